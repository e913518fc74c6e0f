"""Least squares from sums over rows: by φᵀφ, or by products of it with vectors where that has too many numbers.

What is solved for is a change of the present models, so directions that no row has are left as they are, and rounding
errors of the sums are those of a small number. Everything is for k clusters at once, on the server, in float64.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

NARROW = 1e-10  # of the largest eigenvalue of correlations: a direction with less is one that no row has
SOLVED = 1e-20  # of the squared length of b, as preconditioned: conjugate gradients have arrived


def least_squares(gram: Tensor, pull: Tensor) -> Tensor:
    """The shortest x with Ax = b for A = Σφφᵀ (k, d, d) and b = Σφr (k, d), as features of equal scale have it.

    Example:
        >>> least_squares(torch.tensor([[[4.0, 0.0], [0.0, 0.0]]]), torch.tensor([[2.0, 0.0]]))
        tensor([[0.5000, 0.0000]])
    """
    scale = gram.diagonal(dim1=1, dim2=2).sqrt().clamp(min=torch.finfo(gram.dtype).tiny ** 0.5)
    values, vectors = torch.linalg.eigh(gram / (scale[:, :, None] * scale[:, None]))
    inverse = torch.where(values > NARROW * values[:, -1:], 1 / values, 0.0)
    along = (vectors.mT @ (pull / scale)[:, :, None])[:, :, 0] * inverse
    return (vectors @ along[:, :, None])[:, :, 0] / scale


def conjugate(times: Callable[[Tensor], Tensor], pull: Tensor, scale: Tensor, steps: int) -> Tensor:
    """The same by so many steps of conjugate gradients, preconditioned by the diagonal of A.

    Args:
        times: `times(p)` is Ap (k, d); each is an exchange with the clients.
        pull: b (k, d).
        scale: The diagonal of A (k, d).
        steps: Of the iteration.
    """
    tiny = torch.finfo(pull.dtype).tiny

    def dot(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum(1, keepdim=True)

    inverse = torch.where(scale > 0, 1 / scale.clamp(min=tiny), 0.0)
    x, left, p = torch.zeros_like(pull), pull, inverse * pull
    size = first = dot(left, p)
    for _ in range(steps):
        product = times(p)
        curved = dot(p, product)
        going = (size > SOLVED * first) & (curved > 0)  # what is left after that is rounding
        far = torch.where(going, size / curved.clamp(min=tiny), 0.0)
        x, left = x + far * p, left - far * product
        size, old = dot(left, inverse * left), size
        p = inverse * left + torch.where(going, size / old.clamp(min=tiny), 0.0) * p
    return x
