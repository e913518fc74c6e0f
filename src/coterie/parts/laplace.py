"""Laplace's approximation of a client's posterior where targets are classes: the Gaussian E-step, iterated.

Around any parameters the log-likelihood of logits is a parabola, which is the log-likelihood of a regression with
weighted rows. The posterior mean of that regression is Newton's step towards the mode of the true posterior, so at the
mode the two agree, and all sums of the regression serve: eq. (12) of docs/methods/mixed_effects.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.core.task import Data
from coterie.parts.random_effects import NEVER, Mixture, Posterior, Rows, along, posterior

STEPS = 6  # of Newton
SHORTER = (1.0, 0.5, 0.2, 0.05, 0.0)  # of each step, that which does best; the parabola may be a bad guide far out
UNLIKELY = 1e-12  # the least probability of a class


def linearised(logits: Tensor, phi: Tensor, data: Data) -> tuple[Tensor, Tensor]:
    """The regression that is like these classes around some logits: weighted rows, and its residuals there.

    Args:
        logits: (…, n, c) for c classes.
        phi: Their gradients (n, c, d).
        data: Labels and mask.

    Returns:
        W^½φ (…, n·c, d) with W the curvature diag(p) - ppᵀ, and W^-½(one-hot - p) (…, n·c).
    """
    p = logits.softmax(-1).clamp(min=UNLIKELY)
    about = (p[..., None] * phi).sum(-2, keepdim=True)
    weight = p.sqrt() * data.mask[:, None]
    label = torch.nn.functional.one_hot(data.y.long().clamp(min=0), p.shape[-1])
    rows, off = weight[..., None] * (phi - about), (label - p) / p.sqrt() * data.mask[:, None]
    return rows.flatten(-3, -2), off.flatten(-2, -1)


def laplace(mixture: Mixture, phi: Tensor, data: Data) -> tuple[Rows, Posterior]:
    """The E-step of one client whose targets are classes.

    Args:
        mixture: Of f fits, with noise 1.
        phi: Gradients of the logits of its rows (n, c, d).
        data: Its rows.

    Returns:
        The regression that is like them around the mode, and what the client knows of itself.
    """
    flat, shape = phi.flatten(0, 1)[None, None], phi.shape[:2]
    label, mask = data.y.long().clamp(min=0)[..., None], data.mask.double()

    def logits(u: Tensor) -> Tensor:
        return along(flat, mixture.moved(u)).unflatten(-1, shape)  # (f, k, n, c)

    def height(u: Tensor) -> tuple[Tensor, Tensor]:
        """Log p(y | θ), and with the log-density of u, but for a constant (f, k)."""
        out = logits(u).log_softmax(-1)
        likely = (out.gather(-1, label.expand(*out.shape[:-1], 1))[..., 0] * mask).sum(-1)
        return likely, likely - 0.5 * u.square().sum(-1)

    def around(u: Tensor) -> Rows:
        rows, off = linearised(logits(u), phi, data)
        return Rows(rows, off + along(rows, mixture.moved(u)), mask.sum())

    u = torch.zeros_like(mixture.mean)
    for _ in range(STEPS):
        step = posterior(mixture, around(u)).u - u
        tried = torch.stack([u + far * step for far in SHORTER])
        best = torch.stack([height(v)[1] for v in tried]).argmax(0)
        u = tried.gather(0, best[None, ..., None].expand(1, *u.shape))[0]
    rows = around(u)
    found = posterior(mixture, rows)
    evidence = height(u)[1] - 0.5 * found.given.volume + mixture.share.log().clamp(min=NEVER)
    return rows, found._replace(u=u, evidence=evidence)
