"""A few facts about something, as text for terminals and as HTML for notebooks."""

from __future__ import annotations

from html import escape
from typing import NamedTuple

CELL = "text-align: left; vertical-align: top; padding: 1px 12px 1px 0"


class Card(NamedTuple):
    """A title, and rows of a name and a value.

    Example:
        >>> print(Card("Shop <1>", [("rows", "12"), ("a", "b & c")]))
        Shop <1>
          rows  12
          a     b & c
        >>> "<strong>Shop &lt;1&gt;</strong>" in Card("Shop <1>", []).html()
        True
    """

    title: str
    rows: list[tuple[str, str]]

    def __str__(self) -> str:
        wide = max((len(name) for name, _ in self.rows), default=0)
        return "\n".join([self.title, *(f"  {name:<{wide}}  {value}" for name, value in self.rows)])

    def html(self) -> str:
        """The card as a small table that loads nothing from elsewhere."""
        rows = "".join(
            f'<tr><th style="{CELL}">{escape(name)}</th><td style="{CELL}">{escape(value)}</td></tr>'
            for name, value in self.rows
        )
        return f"<div><strong>{escape(self.title)}</strong><table>{rows}</table></div>"


def in_bytes(n: float) -> str:
    """A number of bytes in few characters.

    Example:
        >>> in_bytes(999), in_bytes(47_200_000)
        ('999 B', '47.2 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} TB"
