"""Synthetic federations whose true models are known."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from coterie.core.federation import Federation, Packed
from coterie.core.key import Key
from coterie.data.source import dataset

MOST = 1e6  # the largest expected count: float32 has all whole numbers up to 16 times that


@dataset
def linear_mixture(
    clients: int,
    rows: int,
    features: int,
    groups: int = 2,
    scale: float = 1.0,
    sigma: float = 0.1,
    seed: int = 0,
    scaling: Literal["code", "text"] = "code",
) -> Federation:
    """A mixture of linear regressions (IFCA, Section 6.1): y = ⟨x, θ*_j⟩ + ε with x ~ N(0, I), ε ~ N(0, σ²).

    The truth θ*_j is drawn coordinate-wise from Bernoulli(0.5); `linear_truth` returns it.

    Args:
        clients: Number of clients m, in contiguous groups of equal size.
        rows: Number of rows per client n.
        features: Number of features d.
        groups: Number of groups k.
        scale: The factor r or the norm R of θ*, depending on `scaling`.
        sigma: Standard deviation σ of the noise.
        seed: Seed of the truth and of the rows.
        scaling: "code" multiplies θ* by r, as the authors' code does, so that groups are about r·√(d/2) apart; "text"
            rescales ‖θ*‖ to R, as the paper says.

    Example:
        >>> federation = linear_mixture(clients=4, rows=10, features=5, seed=0)
        >>> tuple(federation.train.x.shape), federation.groups.tolist()
        ((40, 5), [0, 0, 1, 1])
    """
    if groups < 1:
        raise ValueError(f"linear_mixture: groups must be at least 1, got {groups}")
    if clients < groups or clients % groups:
        raise ValueError(f"linear_mixture: clients must be a positive multiple of {groups}, got {clients}")
    truth = linear_truth(features, groups, scale, seed, scaling)
    x, noise = linear_draws(clients * rows, features, seed)
    per_group = clients * rows // groups
    y = torch.cat([part @ theta for part, theta in zip(x.split(per_group), truth, strict=True)]) + sigma * noise
    offsets = torch.arange(clients + 1) * rows
    return Federation(Packed(x, y, offsets), groups=torch.arange(clients) // (clients // groups))


@dataset
def varying_regression(
    clients: int,
    rows: int,
    features: int,
    groups: int = 1,
    spread: float = 0.0,
    distance: float = 2.0,
    sigma: float = 0.5,
    test_rows: int = 50,
    seed: int = 0,
) -> Federation:
    """Linear regressions y = ⟨x, θ_i⟩ + ε whose models vary about the centre of their group, θ_i ~ N(μ_j, (sΔ)²I/d).

    x ~ N(0, I) and ε ~ N(0, σ²). The centres μ_j are at right angles to each other, any two of them Δ apart. With a
    spread s of 0 clients of a group have one model; with one group they merely vary; between the two lies what most
    federations are like.

    Args:
        clients: Number of clients m, in contiguous groups of equal size.
        rows: Number of training rows per client.
        features: Number of features d, at least as many as groups.
        groups: Number of groups.
        spread: s, the root-mean-square distance of a client's model from the centre of its group, as a share of Δ.
        distance: Δ, the distance between centres.
        sigma: Standard deviation σ of the noise.
        test_rows: Number of test rows per client.
        seed: Seed of the centres, the models and the rows.

    Example:
        >>> federation = varying_regression(clients=6, rows=10, features=4, groups=2, spread=0.2)
        >>> tuple(federation.train.x.shape), tuple(federation.test.x.shape), federation.groups.tolist()
        ((60, 4), (300, 4), [0, 0, 0, 1, 1, 1])
    """
    _check_varying("varying_regression", clients, features, groups, rows=rows, test_rows=test_rows, spread=spread)
    if not sigma >= 0:
        raise ValueError(f"varying_regression: sigma must be at least 0, got {sigma}")
    g = Key.of(seed).generator()
    group, theta = _varying_models(clients, features, groups, spread, distance, g)

    def part(n: int) -> Packed:
        x = torch.randn(clients, n, features, generator=g)
        y = torch.einsum("mnd,md->mn", x, theta) + sigma * torch.randn(clients, n, generator=g)
        return Packed(x.flatten(0, 1), y.flatten(), torch.arange(clients + 1) * n)

    return Federation(part(rows), part(test_rows), group)


@dataset
def varying_counts(
    clients: int,
    rows: int,
    features: int,
    groups: int = 1,
    spread: float = 0.0,
    distance: float = 1.0,
    rate: float = 2.0,
    test_rows: int = 50,
    seed: int = 0,
) -> Federation:
    """Counts y ~ Poisson(λ e^⟨x, θ_i⟩) whose models vary about the centre of their group as in `varying_regression`.

    Args:
        clients: Number of clients m, in contiguous groups of equal size.
        rows: Number of training rows per client.
        features: Number of features d, at least as many as groups.
        groups: Number of groups.
        spread: s, the root-mean-square distance of a client's model from the centre of its group, as a share of Δ.
        distance: Δ, the distance between centres.
        rate: λ, the expected count at x = 0.
        test_rows: Number of test rows per client.
        seed: Seed of the centres, the models and the rows.

    Example:
        >>> federation = varying_counts(clients=6, rows=10, features=4, groups=2, spread=0.2)
        >>> federation.train.y.dtype, bool((federation.train.y >= 0).all()), federation.groups.tolist()
        (torch.float32, True, [0, 0, 0, 1, 1, 1])
    """
    _check_varying("varying_counts", clients, features, groups, rows=rows, test_rows=test_rows, spread=spread)
    if not 0 < rate <= MOST:
        raise ValueError(f"varying_counts: rate must be above 0, at most {MOST:g}, got {rate}")
    g = Key.of(seed).generator()
    group, theta = _varying_models(clients, features, groups, spread, distance, g)

    def part(n: int) -> Packed:
        x = torch.randn(clients, n, features, generator=g)
        expected = rate * torch.einsum("mnd,md->mn", x, theta).exp()
        y = torch.poisson(expected.clamp(max=MOST), generator=g)
        return Packed(x.flatten(0, 1), y.flatten(), torch.arange(clients + 1) * n)

    return Federation(part(rows), part(test_rows), group)


def _varying_models(
    clients: int, features: int, groups: int, spread: float, distance: float, g: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Every client's group (m,), and its model (m, d) about the centre of that."""
    group = torch.arange(clients) // (clients // groups)
    centres = distance / 2**0.5 * torch.linalg.qr(torch.randn(features, groups, generator=g)).Q.T
    return group, centres[group] + spread * distance * torch.randn(clients, features, generator=g) / features**0.5


def _check_varying(name: str, clients: int, features: int, groups: int, **numbers: float) -> None:
    if not 1 <= groups <= features:
        raise ValueError(f"{name}: groups must be 1 to {features}, the features, got {groups}")
    if clients < groups or clients % groups:
        raise ValueError(f"{name}: clients must be a positive multiple of {groups}, got {clients}")
    for what, value in numbers.items():
        low = 0 if what == "spread" else 1
        if not value >= low:
            raise ValueError(f"{name}: {what} must be at least {low}, got {value}")


def linear_draws(rows: int, features: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return the x (rows, d) and ε/σ (rows,) of `linear_mixture` with the same seed; they do not depend on its truth.

    Args:
        rows: Number of rows of all clients together.
        features: Number of features d.
        seed: Seed of the draws.
    """
    g = Key.of(seed).fold(1).generator()
    return torch.randn(rows, features, generator=g), torch.randn(rows, generator=g)


def linear_truth(
    features: int, groups: int, scale: float, seed: int, scaling: Literal["code", "text"] = "code"
) -> Tensor:
    """Return the true models θ* (k, d) of `linear_mixture` with the same arguments.

    Args:
        features: Number of features d.
        groups: Number of groups k.
        scale: The factor r or the norm R of θ*, depending on `scaling`.
        seed: Seed of the draws.
        scaling: "code" multiplies θ* by r, "text" rescales ‖θ*‖ to R.
    """
    draws = torch.rand(groups, features, generator=Key.of(seed).fold(0).generator())
    theta = (draws < 0.5).float()
    if scaling == "text":
        theta = theta / theta.norm(dim=1, keepdim=True).clamp(min=1)
    return scale * theta
