"""Names that others gave: hints for those that are not known, and what of them may go to a terminal."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable


def nearest_name(name: str, known: Iterable[str]) -> str:
    """A hint that ends an error message: the known name most like the one given.

    Args:
        name: What was given.
        known: What could have been.

    Example:
        >>> nearest_name("prize", ["price", "shop"])
        "; did you mean 'price'?"
    """
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.4)
    return f"; did you mean '{close[0]}'?" if close else f"; known are {', '.join(sorted(known))}"


_TURNING = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}  # the direction of what follows


def printable(text: str) -> str:
    r"""Text with control characters spelled out, so that a name in a table cannot steer the terminal; lines stay.

    Args:
        text: To be printed.

    Example:
        >>> printable("a\x1b[2Jb")
        'a\\x1b[2Jb'
    """
    if text.isascii() and text.replace("\n", "").isprintable():
        return text
    return "".join(c if c == "\n" or not _steers(c) else c.encode("unicode_escape").decode() for c in text)


def _steers(c: str) -> bool:
    return unicodedata.category(c) == "Cc" or unicodedata.bidirectional(c) in _TURNING
