"""Synthetic federations whose true models are known."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from coterie.core.federation import Federation, Packed
from coterie.core.key import Key
from coterie.data.source import dataset


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
