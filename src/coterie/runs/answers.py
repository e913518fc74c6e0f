"""Yes, no, or None where figures do not decide."""

from __future__ import annotations


def answer(value: float, low: float, high: float) -> bool | None:
    """What a figure says: yes above one bound, no up to another, and nothing between them.

    Args:
        value: The figure.
        low: Up to here the answer is no.
        high: Above it the answer is yes.

    Example:
        >>> [answer(value, low=1, high=4) for value in (0.5, 2.0, 8.0)]
        [False, None, True]
    """
    return True if value > high else None if value > low else False


def every(*answers: bool | None) -> bool | None:
    """Whether all say yes: no if one says no, else None if one says nothing."""
    return False if False in answers else None if None in answers else True
