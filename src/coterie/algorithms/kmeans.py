"""k-means for the server, who has all points at hand, and for a client, whose step must be traceable under vmap."""

from __future__ import annotations

import torch
from torch import Tensor

STARTS = 20  # first centres that are tried, at most


def kmeans(points: Tensor, k: int, weight: Tensor | None = None) -> Tensor:
    """K centres (k, d) of points (h, d): farthest-first, then Lloyd's iteration, from several points; the best of all.

    Args:
        points: At least k of them.
        k: Centres.
        weight: How heavily each point counts (h,); all the same if None.

    Example:
        >>> kmeans(torch.tensor([[0.0], [0.2], [5.0], [9.0]]), 3).flatten().sort().values
        tensor([0.1000, 5.0000, 9.0000])
    """
    weight = torch.ones(len(points), dtype=points.dtype) if weight is None else weight.to(points.dtype)
    step = max(1, len(points) // STARTS)
    found = [_refined(points, _farthest_first(points, k, first), weight) for first in range(0, len(points), step)]
    return min(found, key=lambda centres: float(torch.cdist(points, centres).amin(1).square() @ weight))


def _farthest_first(points: Tensor, k: int, first: int) -> Tensor:
    taken = [first]
    while len(taken) < k:
        taken.append(int(torch.cdist(points, points[taken]).amin(1).argmax()))
    return points[taken]


def _refined(points: Tensor, centres: Tensor, weight: Tensor) -> Tensor:
    label = None
    while label is None or not torch.equal(label, torch.cdist(points, centres).argmin(1)):
        label = torch.cdist(points, centres).argmin(1)
        own = (label[:, None] == torch.arange(len(centres))).to(points) * weight[:, None]
        total = own.sum(0)[:, None]
        centres = torch.where(total > 0, own.T @ points / total.clamp(min=1e-300), centres)
    return centres


def distances(x: Tensor, centres: Tensor) -> Tensor:
    """Squared distances (n, k); unlike `torch.cdist`, fast under vmap."""
    return (x.square().sum(1, keepdim=True) - 2 * x @ centres.T + centres.square().sum(1)).clamp(min=0)


def seeded(x: Tensor, mask: Tensor, uniform: Tensor) -> Tensor:
    """Centres by k-means++ (k, d); `uniform` has one random number in [0, 1) for each."""
    chance, centres = mask, x[:0]
    for u in uniform.unbind():
        at = (chance.cumsum(0) <= u * chance.sum()).sum().clamp(max=len(x) - 1)
        centres = torch.cat([centres, x.index_select(0, at.reshape(1))])
        chance = distances(x, centres).amin(1) * mask
    return centres


def lloyd(x: Tensor, mask: Tensor, centres: Tensor, steps: int) -> Tensor:
    """So many of Lloyd's steps; a centre that loses all points stays where it is."""
    for _ in range(steps):
        own = members(x, mask, centres)
        size = own.sum(0)[:, None]
        centres = torch.where(size > 0, own.T @ x / size.clamp(min=1), centres)
    return centres


def members(x: Tensor, mask: Tensor, centres: Tensor) -> Tensor:
    """1 where a centre is the nearest to a real point (n, k), 0 elsewhere."""
    near = distances(x, centres).argmin(1)
    return (near[:, None] == torch.arange(len(centres), device=x.device)).to(x) * mask[:, None]
