"""What all figures of a report have in common."""

from __future__ import annotations

from typing import NamedTuple

from markupsafe import Markup

INK = "var(--ink)"
CLUSTERS = 12  # that are told apart by colour


class Figure(NamedTuple):
    """A figure of a report.

    Attributes:
        name: Of the file that it is downloaded as.
        title: What it is called.
        drawing: The chart, or a table.
        says: What it shows, in a sentence.
        wide: Whether it takes the whole width of the page.
    """

    name: str
    title: str
    drawing: Markup
    says: str = ""
    wide: bool = False
