"""Rules by which the changes that the clients of a cluster send become one, though some of them may be hostile.

A rule counts every client once: a weight is something that a client says of itself.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie.core.registry import find, known, register
from coterie.core.settings import setting, validate

STILL = 1e-6  # of the median distance: the geometric median has been found once it moves by less
ITERATIONS = 100
TINY = 1e-30


@dataclass(frozen=True)
class Rule(ABC):
    """A mean of some clients' changes that a few of them cannot move far."""

    @abstractmethod
    def __call__(self, changes: Tensor) -> Tensor:
        """One change (d,) for those of n clients (n, d)."""


@register("clipped", "aggregate")
@dataclass(frozen=True)
class Clipped(Rule):
    """The mean: it relies on long changes having been shortened, which is done before every rule.

    Example:
        >>> Clipped()(torch.tensor([[1.0], [2.0], [6.0]]))
        tensor([3.])
    """

    def __call__(self, changes: Tensor) -> Tensor:
        """The mean of the changes."""
        return changes.mean(0)


@register("median", "aggregate")
@dataclass(frozen=True)
class Median(Rule):
    """The median of every coordinate (Yin et al. 2018).

    Example:
        >>> Median()(torch.tensor([[1.0], [2.0], [100.0]]))
        tensor([2.])
    """

    def __call__(self, changes: Tensor) -> Tensor:
        """The middle value of every coordinate, or the mean of the two in the middle."""
        return _trimmed_mean(changes, len(changes))


@register("trimmed", "aggregate")
@dataclass(frozen=True)
class Trimmed(Rule):
    """The mean of every coordinate without its largest and smallest values (Yin et al. 2018).

    Args:
        share: Of the clients, whose values are left out on either side, rounded up; it is to be at least the share of
            hostile clients in any cluster.

    Example:
        >>> Trimmed(share=0.25)(torch.tensor([[1.0], [2.0], [4.0], [100.0]]))
        tensor([3.])
    """

    share: float = setting(0.3, low=0, high=0.49)

    def __call__(self, changes: Tensor) -> Tensor:
        """The mean of the values that are left of every coordinate."""
        return _trimmed_mean(changes, math.ceil(self.share * len(changes)))


@register("geometric_median", "aggregate")
@dataclass(frozen=True)
class GeometricMedian(Rule):
    """The point whose distances to all changes have the least sum (Pillutla et al. 2022), by Weiszfeld's iteration.

    Example:
        >>> GeometricMedian()(torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.0, 1.0], [9.0, 9.0]])).round(decimals=3)
        tensor([0., 1.])
    """

    def __call__(self, changes: Tensor) -> Tensor:
        """Means weighted by one over the distance to the mean before, until they stand still."""
        centre = _trimmed_mean(changes, len(changes))
        nearest = STILL * lengths(changes - centre).median().clamp(min=TINY)  # or a weight would be infinite
        for _ in range(ITERATIONS):
            share = 1 / lengths(changes - centre).clamp(min=nearest)
            before, centre = centre, (share / share.sum()) @ changes
            if lengths(centre - before) <= nearest:
                break
        return centre


@register("krum", "aggregate")
@dataclass(frozen=True)
class Krum(Rule):
    """The mean of the changes that have the nearest neighbours: multi-Krum (Blanchard et al. 2017).

    Args:
        share: Of n clients, how many may be hostile, rounded up: f. Each change is judged by its distances to the n - f
            nearest, itself among them, and n - f are kept.

    Example:
        >>> Krum(share=0.25)(torch.tensor([[1.0], [2.0], [3.0], [100.0]]))
        tensor([2.])
    """

    share: float = setting(0.3, low=0, high=0.49)

    def __call__(self, changes: Tensor) -> Tensor:
        """The mean of the n - f changes whose squared distances to their nearest have the least sum."""
        kept = len(changes) - math.ceil(self.share * len(changes))
        if kept < 2:  # there is nobody to compare with
            return _trimmed_mean(changes, len(changes))
        apart = torch.cdist(changes, changes, compute_mode="donot_use_mm_for_euclid_dist").square()
        price = apart.sort(1).values[:, :kept].sum(1)
        return changes[price.argsort(stable=True)[:kept]].mean(0)


@register("buckets", "aggregate")
@dataclass(frozen=True)
class Buckets:
    """The median, coordinate by coordinate, of the means of random buckets of clients, in each round others.

    It needs no client's own reply, so it works under a secure sum: every bucket is a session of its own. Fewer clients
    then hide each other in a sum.

    Args:
        count: The number of buckets. A cluster is safe while most of its means are of buckets without a hostile member.

    Example:
        >>> Buckets(count=3).median(torch.tensor([[1.0], [2.0], [100.0]]))
        tensor([2.])
    """

    count: int = setting(5, low=3)

    def median(self, means: Tensor) -> Tensor:
        """The median of every coordinate of the buckets' means (buckets, d)."""
        return Median()(means)


Aggregate = Rule | Buckets


def find_aggregate(given: Any) -> Aggregate:
    """The rule meant by a name or by an object with settings of its own.

    Args:
        given: What the user gave.

    Raises:
        ValueError: It is neither, or a setting is not allowed.

    Example:
        >>> find_aggregate("trimmed")
        Trimmed(share=0.3)
    """
    rule = find("aggregate", given, "fit: aggregate")() if isinstance(given, str) else given
    if not isinstance(rule, Rule | Buckets):
        names = ", ".join(known("aggregate"))
        raise ValueError(f"fit: aggregate must be one of {names}, or a rule such as Trimmed(share=0.2), got {given!r}")
    validate(rule)
    return rule


def lengths(vectors: Tensor) -> Tensor:
    """The Euclidean length of each vector (…, d)."""
    return vectors.square().sum(-1).sqrt()


def _trimmed_mean(values: Tensor, dropped: int) -> Tensor:
    """The mean of every coordinate without so many of its largest and smallest values, of which one or two stay."""
    dropped = min(dropped, (len(values) - 1) // 2)
    return values.sort(0).values[dropped : len(values) - dropped].mean(0)
