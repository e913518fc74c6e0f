"""What a mixture of random effects says of clients, in the units of the data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coterie.core.method import Coefficient
from coterie.core.pytree import Params
from coterie.parts.random_effects import Frame, Mixture

LISTED = 20  # parameters that are printed


@dataclass(frozen=True)
class Effects:
    """How clients' parameters vary; printing it shows a table.

    Attributes:
        names: Of the p parameters.
        mean: μ of every component (k, p).
        error: Its standard errors (k, p), from the information of the last round, as if components were known.
        share: π (k,).
        covariance: Σ (p, p), or one for each component (k, p, p).
        noise: σ², None of classes and counts.
        between: Share of the variation of ⟨φ, θ⟩ + noise over rows and clients that is between components.
        within: That is between clients of one component.
        rest: That is noise; None of classes and counts, whose shares are of ⟨φ, θ⟩ alone.
    """

    names: tuple[str, ...]
    mean: np.ndarray
    error: np.ndarray
    share: np.ndarray
    covariance: np.ndarray
    noise: float | None
    between: float
    within: float
    rest: float | None

    @classmethod
    def of(cls, mixture: Mixture, information: Tensor, frame: Frame, like: Params, *, noisy: bool) -> Effects:
        """The effects of one fit.

        Args:
            mixture: The fit (f = 1).
            information: About each μ (k, d, d), or the diagonal of it (k, d).
            frame: Its units.
            like: A model, for the names of its parameters.
            noisy: Whether σ² is a parameter.
        """
        centre = (mixture.share[0, :, None] * mixture.mean[0]).sum(0)
        # Features have second moments I in these units, so a squared length is a variance over rows.
        between = float((mixture.share[0] * (mixture.mean[0] - centre).square().sum(1)).sum())
        spread = mixture.covariance[0]
        weight = mixture.share[0] if len(spread) > 1 else torch.ones_like(mixture.share[0, :1])
        within = float((weight * spread.diagonal(dim1=-2, dim2=-1).sum(-1)).sum())
        noise = float(mixture.noise[0]) if noisy else 0.0
        total = max(between + within + noise, torch.finfo(torch.float64).tiny)
        known = torch.diag_embed(information) if mixture.diagonal else information
        error = frame.covariance(torch.linalg.pinv(known, hermitian=True)).diagonal(dim1=-2, dim2=-1).clamp(min=0)
        covariance = frame.covariance(spread)
        return cls(
            names=names_of(like),
            mean=frame.parameters(mixture.mean[0]).numpy(),
            error=error.sqrt().numpy(),
            share=mixture.share[0].numpy(),
            covariance=(covariance if len(covariance) > 1 else covariance[0]).numpy(),
            noise=noise * float(frame.unit) ** 2 if noisy else None,
            between=between / total,
            within=within / total,
            rest=noise / total if noisy else None,
        )

    def coefficients(self) -> list[Coefficient]:
        """Every μ with its standard error."""
        return [
            Coefficient(name, j, float(self.mean[j, i]), float(self.error[j, i]))
            for j in range(len(self.mean))
            for i, name in enumerate(self.names)
        ]

    def __str__(self) -> str:
        """A table of μ ± its standard error, and of the deviations within components."""
        deviation = np.sqrt(np.diagonal(self.covariance, axis1=-2, axis2=-1).clip(min=0)).reshape(-1, len(self.names))
        head = ["", *(f"μ_{j} (π {share:.2f})" for j, share in enumerate(self.share)), *_numbered("sd", len(deviation))]
        rows = [
            [name, *(f"{m:.4g} ± {e:.2g}" for m, e in zip(mean, error, strict=True)), *(f"{s:.3g}" for s in own)]
            for name, mean, error, own in zip(self.names, self.mean.T, self.error.T, deviation.T, strict=True)
        ]
        more = [] if len(rows) <= LISTED else [f"… and {len(rows) - LISTED} more parameters"]
        noise = "" if self.noise is None or self.rest is None else f", noise {self.rest:.1%} (σ² = {self.noise:.4g})"
        shares = f"variation: between components {self.between:.1%}, within them {self.within:.1%}{noise}"
        return "\n".join([*_aligned([head, *rows[:LISTED]]), *more, shares])


def names_of(like: Params) -> tuple[str, ...]:
    """A name for every number of a model.

    Example:
        >>> names_of({"weight": torch.zeros(1, 2), "bias": torch.zeros(1)})
        ('weight[0, 0]', 'weight[0, 1]', 'bias[0]')
    """
    return tuple(f"{name}{list(at) if at else ''}" for name, p in like.items() for at in np.ndindex(*p.shape))


def _numbered(name: str, count: int) -> list[str]:
    return [name] if count == 1 else [f"{name}_{j}" for j in range(count)]


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
    return [line.rstrip() for line in lines]
