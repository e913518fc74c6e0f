"""Columns of points that a density cannot use, found from federated sums: they are named, or refused."""

from __future__ import annotations

import logging

from torch import Tensor

from coterie.parts.shrinkage import Moments

log = logging.getLogger("coterie")

NAMED = 5  # columns that a message names


def check_columns(moments: Moments, ridge: float, *, warn: bool) -> None:
    """Refuse columns without which there is no density, and warn of those that count for little.

    Args:
        moments: Sums over the points of every cluster (k, …).
        ridge: Added to all variances, as a part of their mean.
        warn: Whether to warn.
    """
    constant = constant_columns(moments)
    narrow = [j for j in narrow_columns(moments, ridge) if j not in constant]
    if narrow and warn:
        log.warning(
            "UIFCA: %s narrower than the ridge of %g of the mean variance, and will count for little; "
            "columns of one scale, or a smaller ridge, would let them count", _named(narrow), ridge,
        )  # fmt: skip
    if not constant:
        return
    what = f"UIFCA: {_named(constant)} constant over all points"
    if len(constant) == moments.first.shape[-1]:
        raise ValueError(f"{what}: all points are the same")
    if ridge == 0:
        raise ValueError(f"{what}, so that without a ridge there is no density; leave it out, or set ridge above 0")
    if warn:
        log.warning("%s; a ridge of %g of the mean variance keeps the density finite", what, ridge)


def constant_columns(moments: Moments) -> list[int]:
    """The columns in which all points of all clusters (k, …) have one value."""
    second, variance = _columns(moments)
    # Sums are about the mean, which is rounded: such a column has a square all the same, but next to no variance.
    return (variance <= 1e-9 * second).nonzero().flatten().tolist()


def narrow_columns(moments: Moments, ridge: float) -> list[int]:
    """The columns whose variance over all points is less than the ridge that is added to it."""
    _, variance = _columns(moments)
    return (variance < ridge * variance.mean()).nonzero().flatten().tolist()


def _columns(moments: Moments) -> tuple[Tensor, Tensor]:
    """The mean square and the variance of every column over the points of all clusters (k, …)."""
    points = moments.number.sum()
    first, second = moments.first.sum(0) / points, moments.second.sum(0).diagonal() / points
    return second, second - first.square()


def _named(columns: list[int]) -> str:
    """Columns and their verb, for a message: at most the first few by number."""
    if len(columns) == 1:
        return f"column {columns[0]} is"
    first = ", ".join(str(j) for j in columns[:NAMED])
    more = f" and {len(columns) - NAMED} more" if len(columns) > NAMED else ""
    return f"columns {first}{more} are"
