"""k-means for the server, who has all points at hand, and for a client, whose step must be traceable under vmap."""

from __future__ import annotations

import math

import torch
from torch import Tensor

STARTS = 20  # first centres that are tried, at most


class TooFewCentres(ValueError):
    """Clients found fewer centres than there are to be clusters."""

    def __init__(self, message: str, found: int) -> None:
        super().__init__(message)
        self.found = found


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


def linked(close: Tensor) -> Tensor:
    """The groups of points that are linked by close ones (groups, h), 1 for each member, from who is close (h, h).

    Example:
        >>> linked(torch.tensor([[1, 1, 0], [1, 1, 0], [0, 0, 1]]) > 0).tolist()
        [[0.0, 0.0, 1.0], [1.0, 1.0, 0.0]]
    """
    reach = close.double()
    for _ in range(math.ceil(math.log2(len(reach))) + 1):
        reach = (reach @ reach > 0).double()
    return reach.unique(dim=0)


def distances(x: Tensor, centres: Tensor) -> Tensor:
    """Squared distances (n, k); unlike `torch.cdist`, fast under vmap."""
    about = centres.mean(0)  # far from the origin squares would lose the digits that tell points apart
    x, centres = x - about, centres - about
    return (x.square().sum(1, keepdim=True) - 2 * x @ centres.T + centres.square().sum(1)).clamp(min=0)


# Below, s is the k-means of a client's points that run side by side. Each has its centres; the points are there once.


def seeded(x: Tensor, mask: Tensor, uniform: Tensor) -> Tensor:
    """Centres by k-means++ (s, k, d); `uniform` (s, k) has one random number in [0, 1) for each.

    The first of them are those that fewer numbers would have given.
    """
    chance, centres = mask.expand(len(uniform), -1), []
    for u in uniform.T:
        at = (chance.cumsum(1) <= (u * chance.sum(1))[:, None]).sum(1).clamp(max=len(x) - 1)
        centres.append(x.index_select(0, at))
        gap = distances(x, centres[-1]).T * mask
        chance = gap if len(centres) == 1 else torch.minimum(chance, gap)
    return torch.stack(centres, 1)


def farthest(x: Tensor, mask: Tensor, k: int) -> Tensor:
    """Centres (k, d), each the real point that is farthest from those before it; the first, from the mean.

    k-means++ seldom begins in a cluster of few points that are far from all others; this does.
    """
    centres, gap = [(mask @ x) / mask.sum()], None
    for _ in range(k):
        new = distances(x, centres[-1][None])[:, 0]
        gap = new if gap is None or len(centres) == 2 else torch.minimum(gap, new)  # the mean is no centre
        centres.append(x.index_select(0, gap.where(mask > 0, -1.0).argmax().reshape(1))[0])
    return torch.stack(centres[1:])


def lloyd(x: Tensor, mask: Tensor, centres: Tensor, steps: int) -> Tensor:
    """So many of Lloyd's steps from centres (s, k, d); a centre that loses all points stays where it is."""
    for _ in range(steps):
        own = members(x, mask, centres)
        size = own.sum(2)[..., None]
        mean = (own.flatten(0, 1) @ x).unflatten(0, own.shape[:2]) / size.clamp(min=1)
        centres = torch.where(size > 0, mean, centres)
    return centres


def members(x: Tensor, mask: Tensor, centres: Tensor) -> Tensor:
    """1 where a centre of (s, k, d) is the nearest to a real point (s, k, n), 0 elsewhere."""
    near = nearest_centres(x, centres)[:, None]
    return (near == torch.arange(centres.shape[1], device=x.device)[:, None]) * mask


def nearest_centres(x: Tensor, centres: Tensor) -> Tensor:
    """The number of the nearest centre of (s, k, d) to every point (s, n)."""
    return _offsets(x, centres).min(1).indices  # on a CPU several times as fast as argmin


def spread(x: Tensor, mask: Tensor, centres: Tensor) -> Tensor:
    """The mean squared distance of real points to the nearest centre of (s, k, d), for each s."""
    least = _offsets(x, centres).amin(1) + x.square().sum(1)
    return (least.clamp(min=0) @ mask) / mask.sum()


def _offsets(x: Tensor, centres: Tensor) -> Tensor:
    """Squared distances (s, k, n) less the squared length of the point, which the choice of a centre does not need."""
    flat = centres.flatten(0, 1)
    return torch.addmm(flat.square().sum(1, keepdim=True), flat, x.T, alpha=-2).unflatten(0, centres.shape[:2])
