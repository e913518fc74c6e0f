"""How the step size changes over the rounds, as a factor of `lr`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from coterie.core.registry import register
from coterie.core.settings import setting


@dataclass(frozen=True)
class Schedule(ABC):
    """A factor of the step size for every round. Any function of the round will do as well."""

    @abstractmethod
    def __call__(self, t: int) -> float:
        """The factor of round t, the first being 0."""


@register("step", "schedule")
@dataclass(frozen=True)
class StepDecay(Schedule):
    """A smaller step every so many rounds, as `torch.optim.lr_scheduler.StepLR`.

    Args:
        every: Rounds with the same step size.
        factor: What it is multiplied by then.

    Example:
        >>> [StepDecay(every=2)(t) for t in range(4)]
        [1.0, 1.0, 0.1, 0.1]
    """

    every: int = setting(low=1)
    factor: float = setting(0.1, low=0)

    def __call__(self, t: int) -> float:
        """The factor of round t."""
        return float(self.factor ** (t // self.every))


@register("cosine", "schedule")
@dataclass(frozen=True)
class Cosine(Schedule):
    """Down along half a cosine, as `torch.optim.lr_scheduler.CosineAnnealingLR`.

    Args:
        rounds: After so many rounds it is at the floor, and stays there.
        floor: The last factor.

    Example:
        >>> [round(Cosine(rounds=2)(t), 3) for t in range(4)]
        [1.0, 0.5, 0.0, 0.0]
    """

    rounds: int = setting(low=1)
    floor: float = setting(0.0, low=0, high=1)

    def __call__(self, t: int) -> float:
        """The factor of round t."""
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * min(t / self.rounds, 1))) / 2


@register("warmup", "schedule")
@dataclass(frozen=True)
class Warmup(Schedule):
    """Up in a line, then on with another schedule.

    Args:
        rounds: The factor of the first is 1/rounds, that of the last is 1.
        then: What comes after, which counts its rounds from there; None stays at 1.

    Example:
        >>> [Warmup(rounds=2, then=StepDecay(every=1))(t) for t in range(4)]
        [0.5, 1.0, 1.0, 0.1]
    """

    rounds: int = setting(low=1)
    then: Schedule | None = None

    def __call__(self, t: int) -> float:
        """The factor of round t."""
        if t < self.rounds:
            return (t + 1) / self.rounds
        return 1.0 if self.then is None else self.then(t - self.rounds)
