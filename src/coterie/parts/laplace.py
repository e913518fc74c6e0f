"""Laplace's approximation of a client's posterior where targets are classes or counts: the Gaussian E-step, iterated.

Around any parameters the log-likelihood is a parabola, which is the log-likelihood of a regression with weighted rows.
The posterior mean of that regression is Newton's step towards the mode of the true posterior, so at the mode the two
agree, and all sums of the regression serve: eq. (12) of docs/methods/mixed_effects.md.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from coterie.core.task import Data
from coterie.parts.families import Family
from coterie.parts.random_effects import NEVER, Mixture, Posterior, Rows, along, posterior, pull


def laplace(family: Family, mixture: Mixture, phi: Tensor, data: Data) -> tuple[Rows, Posterior]:
    """The E-step of one client whose targets are of a family.

    Args:
        family: Of the targets.
        mixture: Of f fits. Its noise is no parameter, but the unit in which squares of rows are sent: 1/W for weights
            W that are common.
        phi: Gradients of the outputs of its rows (n, c, d).
        data: Its rows.

    Returns:
        The regression that is like them around the mode, and what the client knows of itself.
    """
    flat, shape = phi.flatten(0, 1)[None, None], phi.shape[:2]
    mask, unit = data.mask.double(), mixture.noise[:, None, None].sqrt()
    likely = family.likely(data)

    def outputs(u: Tensor) -> Tensor:
        return along(flat, mixture.moved(u)).unflatten(-1, shape)  # (f, k, n, c)

    def height(u: Tensor) -> Tensor:
        """Log p(y | θ) with the log-density of u, but for a constant (f, k)."""
        return (likely(outputs(u)) * mask).sum(-1) - 0.5 * u.square().sum(-1)

    def around(u: Tensor) -> Rows:
        rows, off = family.linearised(outputs(u), phi, data)
        rows, off = rows * unit[..., None], off * unit
        return Rows(rows, off + along(rows, mixture.moved(u)), mask.sum())

    def highest(tried: Tensor) -> Tensor:
        best = torch.stack([height(v).nan_to_num(-torch.inf) for v in tried]).argmax(0)
        return tried.gather(0, best[None, ..., None].expand(1, *tried.shape[1:]))[0]

    u = torch.zeros_like(mixture.mean)
    if family.near is not None:
        rows, y = (x[None, None] for x in family.near(phi, data))
        u = highest(torch.stack([u, posterior(mixture, Rows(rows * unit[..., None], y * unit, mask.sum())).u]))
    for _ in range(family.steps):
        step = posterior(mixture, around(u)).u - u
        u = highest(torch.stack([u + far * step for far in family.lengths]))
    rows = around(u)
    found = posterior(mixture, rows)
    evidence = height(u) - 0.5 * found.given.volume + mixture.share.log().clamp(min=NEVER)
    found = found._replace(u=u, evidence=evidence)
    return (rows, found) if family.skew is None else _averaged(family.skew, outputs(u), mixture, rows, found)


def _averaged(
    skew: Callable[[Tensor, Tensor], Tensor], out: Tensor, mixture: Mixture, rows: Rows, found: Posterior
) -> tuple[Rows, Posterior]:
    """The mean in the place of the mode, to the second order, and the regression of which it is the mean: eq. (13).

    With the mode, EM would end where the penalised likelihood is stationary; with the mean, where the likelihood by
    Laplace's approximation is.
    """
    given, noise = found.given, mixture.noise[:, None, None]
    less = skew(out, given.variances(given.z) / noise) * noise.sqrt()
    return rows._replace(y=rows.y - less), found._replace(u=found.u - given.times(pull(given.z, less) / noise))
