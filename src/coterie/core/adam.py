"""Adam as a pure function, for client steps, which are traced under vmap.

Adam: A Method for Stochastic Optimization
    Diederik P. Kingma, Jimmy Ba. ICLR 2015.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

EPSILON = 1e-8


class Moving(NamedTuple):
    """Parameters side by side (P,) on their way, and what Adam remembers of it.

    In a federation it is begun anew whenever a client is sent a model: what a client remembers of other models does not
    belong to this one, and Adam corrects for having just begun.

    Example:
        >>> Moving.begin(torch.tensor([1.0, 2.0])).step(torch.tensor([5.0, -0.1]), lr=0.1).at
        tensor([0.9000, 2.1000])
    """

    at: Tensor
    mean: Tensor  # of slopes
    square: Tensor  # of their squares
    steps: int

    @classmethod
    def begin(cls, at: Tensor) -> Moving:
        """Where nothing is remembered yet."""
        return cls(at, torch.zeros_like(at), torch.zeros_like(at), 0)

    def step(self, slope: Tensor, lr: float | Tensor, betas: tuple[float, float] = (0.9, 0.999)) -> Moving:
        """One step against the slope."""
        (a, b), t = betas, self.steps + 1
        mean, square = self.mean.lerp(slope, 1 - a), self.square.lerp(slope.square(), 1 - b)
        size = lr * (1 - b**t) ** 0.5 / (1 - a**t)
        return Moving(self.at - size * mean / (square.sqrt() + EPSILON), mean, square, t)
