"""Residuals of regressions that are linear in their parameters, f(x) = ⟨φ(x), θ⟩, for many θ at once.

Throughout, n is a client's rows, d the parameters, h the models θ.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.core.task import Data, Task


def features(task: Task, data: Data) -> Tensor:
    """φ(x) of every row (n, d)."""
    assert task.features is not None  # `require_linear` has checked it
    return task.features(data.x)


def values_of(task: Task, data: Data) -> Tensor:
    """φ(x) and y side by side, in double precision (n, d + 1); 0 for padding."""
    phi, y = features(task, data), data.y.reshape(-1, 1)
    return torch.cat([phi.double(), y.double()], 1) * data.mask[:, None]


def residuals(phi: Tensor, data: Data, theta: Tensor) -> Tensor:
    """Y - ⟨φ(x), θ⟩ for every row and θ (n, h); ε(x, y, θ) is that times φ(x)."""
    return (data.y.reshape(-1, 1) - phi @ theta.T) * data.mask[:, None]


def projected(phi: Tensor, q: Tensor) -> Tensor:
    """φᵀQ for the Q (h, d, k) of every model (n, h, k)."""
    return (phi @ q.movedim(1, 0).flatten(1)).unflatten(1, (q.shape[0], q.shape[2]))


def pairs(data: Data) -> Tensor:
    """n(n - 1), the ordered pairs of a client's rows."""
    return data.mask.sum() * (data.mask.sum() - 1)


def evidence(data: Data) -> Tensor:
    """How heavily a client counts: two rows make one pair, and each further row adds about as much."""
    return data.mask.sum() - 1
