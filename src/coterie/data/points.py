"""Unlabelled points, of several clusters at each client; y holds the true cluster, which is used for scores only."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from coterie.core.federation import Federation, Packed
from coterie.core.key import Key
from coterie.data.source import dataset

_TRUTH, _LABELS, _POINTS, _SHAPES = range(4)  # independent random streams of a seed


@dataset
def gaussian_clusters(
    k: int = 4,
    p: float = 0.0,
    seed: int = 0,
    *,
    clients: int | None = None,
    points: int = 1000,
    d: int = 32,
    separation: float = 5.0,
    sigma: float = 1.0,
    stretch: float = 1.0,
    weights: tuple[float, ...] | None = None,
) -> Federation:
    """Points around k centres, whose coordinates are 0 or R with equal probability.

    Args:
        k: Number of clusters.
        p: Heterogeneity: the fraction of each client's points that belongs to the client's own cluster, which is i
            modulo k for client i; the other points belong to any cluster.
        seed: Seed of the centres, the clusters and the points.
        clients: Number of clients; None takes k.
        points: Number of points per client.
        d: Number of dimensions.
        separation: The coordinate R.
        sigma: Standard deviation of the points around their centre.
        stretch: Every cluster is an ellipsoid of its own: along random axes, sigma is multiplied by factors between
            1 / stretch and stretch. 1 makes all clusters round.
        weights: The share of each cluster among the points that belong to any cluster; None makes all equal.

    Example:
        >>> federation = gaussian_clusters(k=4, p=1.0, points=10)
        >>> [y.unique().tolist() for _, y in (federation.train.client(i) for i in range(4))]
        [[0], [1], [2], [3]]
        >>> gaussian_clusters(k=3, weights=(0.8, 0.1, 0.1), points=100).train.y.bincount().tolist()
        [237, 29, 34]
    """
    centres = gaussian_centres(k, d, separation, seed)
    if stretch < 1:
        raise ValueError(f"gaussian_clusters: stretch must be at least 1, got {stretch}")
    if stretch == 1:
        return _federation(k, p, seed, clients, points, d, lambda z, noise: centres[z] + sigma * noise, weights)
    shapes = sigma * _ellipsoids(k, d, stretch, Key.of(seed).fold(_SHAPES))

    def place(z: Tensor, noise: Tensor) -> Tensor:
        return centres[z] + (shapes[z] @ noise[:, :, None])[:, :, 0]

    return _federation(k, p, seed, clients, points, d, place, weights)


def _ellipsoids(k: int, d: int, stretch: float, key: Key) -> Tensor:
    """Return matrices (k, d, d) that turn round clusters into ellipsoids."""
    g = key.generator()
    axes = torch.linalg.qr(torch.randn(k, d, d, generator=g))[0]
    return axes * stretch ** (2 * torch.rand(k, 1, d, generator=g) - 1)


def gaussian_centres(k: int, d: int, separation: float, seed: int) -> Tensor:
    """Return the centres (k, d) of `gaussian_clusters` with the same arguments.

    The Bayes rule assigns a point to the nearest of them.

    Args:
        k: Number of clusters.
        d: Number of dimensions.
        separation: The coordinate R.
        seed: Seed of the draws.
    """
    _check_counts(k=k, d=d)
    if k > 2**d:
        raise ValueError(f"gaussian_clusters: of {d} dimensions there are {2**d} centres, got k = {k}")
    g = Key.of(seed).fold(_TRUTH).generator()
    high = torch.rand(k, d, generator=g) < 0.5
    while bool((again := _repeated(high)).any()):  # two clusters with the same centre would be one cluster
        high[again] = torch.rand(int(again.sum()), d, generator=g) < 0.5
    return separation * high.float()


def _repeated(rows: Tensor) -> Tensor:
    """Return which rows are equal to an earlier row (n,)."""
    place = torch.arange(len(rows))
    same = rows.unique(dim=0, return_inverse=True)[1]
    first = torch.full_like(place, len(rows)).scatter_reduce(0, same, place, "amin")
    return place > first[same]


@dataset
def subspace_clusters(
    k: int = 4,
    p: float = 0.0,
    seed: int = 0,
    *,
    clients: int | None = None,
    points: int = 1000,
    d: int = 32,
    subspace: int = 16,
) -> Federation:
    """Points in k random subspaces through the origin, with a standard normal distribution within each.

    Args:
        k: Number of clusters.
        p: Heterogeneity: the fraction of each client's points that belongs to the client's own cluster, which is i
            modulo k for client i; the other points belong to any cluster.
        seed: Seed of the subspaces, the clusters and the points.
        clients: Number of clients; None takes k.
        points: Number of points per client.
        d: Number of dimensions.
        subspace: Number of dimensions of each subspace.
    """
    _check_counts(k=k, d=d)
    if not 1 <= subspace <= d:
        raise ValueError(f"subspace_clusters: subspace must be 1 to d = {d}, got {subspace}")
    bases = torch.linalg.qr(torch.randn(k, d, subspace, generator=Key.of(seed).fold(_TRUTH).generator()))[0]

    def place(z: Tensor, noise: Tensor) -> Tensor:
        return (bases[z] @ noise[:, :subspace, None])[:, :, 0]

    return _federation(k, p, seed, clients, points, d, place)


def _federation(
    k: int,
    p: float,
    seed: int,
    clients: int | None,
    points: int,
    d: int,
    place: Callable[[Tensor, Tensor], Tensor],
    weights: tuple[float, ...] | None = None,
) -> Federation:
    clients = k if clients is None else clients
    _check_counts(clients=clients, points=points)
    z = mixed_clusters(k, p, clients, points, Key.of(seed).fold(_LABELS), weights)
    noise = torch.randn(len(z), d, generator=Key.of(seed).fold(_POINTS).generator())
    return Federation(Packed(place(z, noise), z, torch.arange(clients + 1) * points))


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def dealt(x: Tensor, z: Tensor, p: float, clients: int, key: Key) -> Federation:
    """Distribute rows of known clusters to clients; every row is used once.

    Args:
        x: The rows.
        z: The cluster of each row, 0 to k - 1.
        p: Heterogeneity: the fraction of each cluster's rows that goes to the clients of that cluster; the others go to
            any client.
        clients: Number of clients. Client i belongs to cluster i modulo k.
        key: Key of the shuffling.

    Example:
        >>> z = torch.arange(3).repeat(4)
        >>> [y.tolist() for _, y in (dealt(z[:, None].float(), z, 1.0, 3, Key.of(0)).train.client(i) for i in range(3))]
        [[0, 0, 0, 0], [1, 1, 1, 1], [2, 2, 2, 2]]
    """
    k = int(z.max()) + 1
    _check_share(p)
    if clients < k and p > 0:
        raise ValueError(f"clients must be at least {k}, one for each cluster, unless p is 0, got {clients}")
    shuffled = torch.randperm(len(z), generator=key.generator())
    hands: list[list[Tensor]] = [[] for _ in range(clients)]
    rest = []
    for c in range(k):
        rows = shuffled[z[shuffled] == c]
        kept = round(p * len(rows))
        rest.append(rows[kept:])
        for hand, part in zip(hands[c::k], rows[:kept].tensor_split(len(hands[c::k]) or 1), strict=False):
            hand.append(part)
    left = torch.cat(rest)
    left = left[torch.randperm(len(left), generator=key.fold(1).generator())]
    for hand, part in zip(hands, left.tensor_split(clients), strict=True):
        hand.append(part)
    own = [torch.cat(hand) for hand in hands]
    offsets = torch.tensor([0, *(len(rows) for rows in own)]).cumsum(0)
    return Federation(Packed(x[torch.cat(own)], z[torch.cat(own)], offsets))


def mixed_clusters(
    k: int, p: float, clients: int, points: int, key: Key, weights: tuple[float, ...] | None = None
) -> Tensor:
    """Return the cluster of every point (clients · points,).

    Args:
        k: Number of clusters.
        p: Heterogeneity: the fraction of each client's points, the first ones, that belongs to the client's own
            cluster, which is i modulo k for client i; the other points belong to any cluster.
        clients: Number of clients.
        points: Number of points per client.
        key: Key of the draws.
        weights: The share of each cluster among the other points; None makes all equal.
    """
    _check_share(p)
    if weights is None:
        any_of = torch.randint(k, (clients, points), generator=key.generator())
    else:
        share = _checked_weights(weights, k)
        any_of = share.multinomial(clients * points, replacement=True, generator=key.generator())
        any_of = any_of.reshape(clients, points)
    own = (torch.arange(clients) % k)[:, None]
    return torch.where(torch.arange(points) < round(p * points), own, any_of).flatten()


def _check_share(p: float) -> None:
    if not 0 <= p <= 1 or not math.isfinite(p):
        raise ValueError(f"p must be between 0 and 1, got {p}")


def _checked_weights(weights: tuple[float, ...], k: int) -> Tensor:
    share = torch.tensor([float(w) for w in weights])
    if len(share) != k or not bool((share >= 0).all() & share.isfinite().all() & (share.sum() > 0)):
        raise ValueError(f"weights must be {k} numbers of at least 0 that are not all 0, got {tuple(weights)}")
    return share
