"""Mixed linear regression as in Su, Xu and Yang (2022): many clients with two rows, few clients with many rows."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from coterie.core.federation import Federation, Packed
from coterie.core.key import Key
from coterie.data.source import dataset

_TRUTH, _LABELS, _SIZES, _ROWS, _SPREAD, _TAILS = range(6)  # independent random streams of a seed

LONGEST = 200  # the most rows of a client whose number of rows is heavy-tailed


@dataset
def mixed_regression(
    k: int = 3,
    d: int = 30,
    sigma: float = 0.1,
    seed: int = 0,
    *,
    radius: float = 1.0,
    anchors: int | None = None,
    anchor_rows: int | None = None,
    pairs: int | None = None,
    rest: int = 3000,
    rest_rows: tuple[int, ...] = (2, 2, 2, 5, 5, 20),
    tail: float | None = None,
    p: tuple[float, ...] | None = None,
    spread: tuple[float, ...] | None = None,
    toeplitz: float | None = None,
    dof: float | None = None,
) -> Federation:
    """Regressions y = ⟨x, θ*_j⟩ + ζ with x ~ N(0, Σ_j), ζ ~ N(0, σ²), and each client's cluster j drawn from p.

    The truth θ*_j is drawn uniformly from the sphere of radius R; `regression_truth` returns it. The clients with the
    most rows come first.

    Args:
        k: Number of clusters.
        d: Number of features.
        sigma: Standard deviation σ of the noise.
        seed: Seed of the truth, the clusters, the sizes and the rows.
        radius: R = ‖θ*_j‖.
        anchors: Number of anchor clients, which have many rows; None takes 10k.
        anchor_rows: Number of rows of each anchor client; None takes 80k.
        pairs: Number of clients with two rows; None takes 108·k²·d, enough for six iterations of moment descent.
        rest: Number of other clients.
        rest_rows: Possible numbers of rows of the other clients, each equally likely.
        tail: If given, the numbers of rows of the other clients are heavy-tailed instead: P(n ≥ s) = s^(-tail), from 1
            to 200.
        p: Shares of the clusters; None makes them equal.
        spread: (low, high): the eigenvalues of each Σ_j are drawn from this range and its eigenvectors uniformly; None
            takes Σ_j = I.
        toeplitz: ρ: the features are correlated in all clusters alike, Σ_ab = ρ^|a-b|. Not together with `spread`.
        dof: If given, rows are t-distributed with so many degrees of freedom, above 2, in place of normal: each row is
            stretched as a whole by a factor of its own, such that its covariance is Σ_j still.

    Example:
        >>> federation = mixed_regression(k=2, d=5, pairs=100, rest=0, anchors=3)
        >>> len(federation), federation.train.sizes[:4].tolist()
        (103, [160, 160, 160, 2])
    """
    _check(k, d, sigma, radius, rest_rows, tail, p)
    _check_rows(spread, toeplitz, dof)
    key = Key.of(seed)
    sizes = _sizes(
        (10 * k if anchors is None else anchors, 80 * k if anchor_rows is None else anchor_rows),
        (108 * k**2 * d if pairs is None else pairs, 2),
        (rest, 1),
    )
    sizes[len(sizes) - rest :] = _rest_sizes(rest, rest_rows, tail, key.fold(_SIZES))
    sizes = sizes.sort(descending=True).values
    shares = torch.ones(k) if p is None else torch.tensor(p, dtype=torch.float64)
    z = torch.multinomial(shares, len(sizes), replacement=True, generator=key.fold(_LABELS).generator())
    of_row = z.repeat_interleave(sizes)
    g = key.fold(_ROWS).generator()
    x, noise = torch.randn(len(of_row), d, generator=g), torch.randn(len(of_row), generator=g)
    if spread is not None:
        for j in range(k):
            x[of_row == j] = x[of_row == j] @ _root(d, spread, key.fold(_SPREAD, j))
    if toeplitz is not None:
        x = x @ _correlated(d, toeplitz)
    if dof is not None:
        x *= _stretches(len(x), dof, key.fold(_TAILS))[:, None]
    y = (x * regression_truth(k, d, radius, seed)[of_row]).sum(1) + sigma * noise
    return Federation(Packed(x, y, torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)])), groups=z)


def regression_truth(k: int, d: int, radius: float = 1.0, seed: int = 0) -> Tensor:
    """Return the true models θ* (k, d) of `mixed_regression` with the same arguments.

    Args:
        k: Number of clusters.
        d: Number of features.
        radius: R = ‖θ*_j‖.
        seed: Seed of the draws.
    """
    theta = torch.randn(k, d, generator=Key.of(seed).fold(_TRUTH).generator())
    return radius * theta / theta.norm(dim=1, keepdim=True)


def _sizes(*kinds: tuple[int, int]) -> Tensor:
    """Return the number of rows of every client, for kinds of clients given as (number of clients, rows of each)."""
    for clients, rows in kinds:
        if clients < 0 or rows < 1:
            raise ValueError(f"mixed_regression: there cannot be {clients} clients of {rows} rows each")
    if not any(clients for clients, _ in kinds):
        raise ValueError("mixed_regression: there must be at least one client, got 0")
    return torch.cat([torch.full((clients,), rows) for clients, rows in kinds])


def _rest_sizes(rest: int, rows: tuple[int, ...], tail: float | None, key: Key) -> Tensor:
    if tail is None:
        return torch.tensor(rows)[torch.randint(len(rows), (rest,), generator=key.generator())]
    u = torch.rand(rest, dtype=torch.float64, generator=key.generator()).clamp(min=1e-12)
    return u.pow(-1 / tail).clamp(max=LONGEST).long()  # the inverse of P(n ≥ s) = s^(-tail)


def _root(d: int, spread: tuple[float, ...], key: Key) -> Tensor:
    """Return Σ^(1/2) for a random covariance with eigenvalues from a range and uniform eigenvectors."""
    (low, high), g = spread, key.generator()
    basis = torch.linalg.qr(torch.randn(d, d, generator=g))[0]
    values = low + (high - low) * torch.rand(d, generator=g)
    return (basis * values.sqrt()) @ basis.T


def _correlated(d: int, rho: float) -> Tensor:
    """Return Σ^(1/2) for Σ_ab = ρ^|a-b|."""
    at = torch.arange(d, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(rho ** (at[:, None] - at).abs())
    return ((vectors * values.sqrt()) @ vectors.T).float()


def _stretches(n: int, dof: float, key: Key) -> Tensor:
    """Return √((ν - 2)/χ²_ν) for n rows: normal rows times that are t-distributed with the same covariance."""
    seed = int(torch.randint(2**62, (), generator=key.generator()))
    return torch.from_numpy(((dof - 2) / np.random.default_rng(seed).chisquare(dof, n)) ** 0.5).float()


def _check(
    k: int,
    d: int,
    sigma: float,
    radius: float,
    rest_rows: tuple[int, ...],
    tail: float | None,
    p: tuple[float, ...] | None,
) -> None:
    for name, value, low in (("k", k, 1), ("d", d, 1), ("sigma", sigma, 0), ("radius", radius, 0)):
        if not value >= low or not math.isfinite(value):
            raise ValueError(f"mixed_regression: {name} must be at least {low}, got {value}")
    if not rest_rows or min(rest_rows) < 1:
        raise ValueError(f"mixed_regression: rest_rows must be numbers of rows of at least 1, got {rest_rows}")
    if tail is not None and not tail > 0:
        raise ValueError(f"mixed_regression: tail must be above 0, got {tail}")
    if p is not None and (len(p) != k or min(p) <= 0):
        raise ValueError(f"mixed_regression: p must be {k} numbers above 0, got {p}")


def _check_rows(spread: tuple[float, ...] | None, toeplitz: float | None, dof: float | None) -> None:
    if spread is not None and toeplitz is not None:
        raise ValueError("mixed_regression: give spread or toeplitz, not both")
    if toeplitz is not None and not -1 < toeplitz < 1:
        raise ValueError(f"mixed_regression: toeplitz must be between -1 and 1, got {toeplitz}")
    if dof is not None and not dof > 2:
        raise ValueError(f"mixed_regression: dof must be above 2, got {dof}")
    if spread is not None and (len(spread) != 2 or not 0 < spread[0] <= spread[1]):
        raise ValueError(f"mixed_regression: spread must be (low, high) with 0 < low <= high, got {spread}")
