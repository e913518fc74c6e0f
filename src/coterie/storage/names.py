"""Hints for names that are not known."""

from __future__ import annotations

import difflib
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
