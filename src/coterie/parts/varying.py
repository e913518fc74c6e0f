"""Groups whose clients vary: θ ~ Σ_j π_j N(μ_j, Σ), y = φθ + noise, fitted by EM from sums over clients.

Σ = 0 is a clustering, k = 1 is a linear mixed model. Σ is held by a factor, Σ = LLᵀ, so that Σ = 0 is no special case.
Throughout, f is the fits that go side by side, k their groups, n a client's rows and d the parameters of a model.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.parts.least_squares import least_squares

QUIET = 1e-12  # the least variance of noise, of that of y


class Groups(NamedTuple):
    """The parameters of f fits."""

    share: Tensor  # π (f, k)
    mean: Tensor  # μ (f, k, d)
    factor: Tensor  # L (f, d, d)
    noise: Tensor  # σ² (f,)

    def only(self, at: Tensor) -> Groups:
        """Some of the fits."""
        return Groups(*(x[at] for x in self))


class Seen(NamedTuple):
    """What a client's rows say under every group of every fit."""

    evidence: Tensor  # log π_j p(y | j) (f, k)
    effect: Tensor  # E[θ - μ_j] (f, k, d)
    spread: Tensor  # Cov[θ] (f, d, d)
    off: Tensor  # y - φμ_j (f, k, n)


def seen(groups: Groups, phi: Tensor, y: Tensor, rows: Tensor) -> Seen:
    """The E-step of one client: φ (n, d) and y (n,) are 0 for padding."""
    off = y - groups.mean @ phi.mT
    noise = groups.noise[:, None]
    z = phi @ groups.factor / noise[..., None].sqrt()  # φL/σ (f, n, d)
    inverse, volume = _conditioned(z)
    pull = off @ z / noise[..., None].sqrt()  # Lᵀφᵀr_j/σ² (f, k, d)
    u = pull @ inverse
    misfit = off.square().sum(-1) / noise - (pull * u).sum(-1)
    evidence = -0.5 * (misfit + volume[:, None] + rows * (2 * math.pi * noise).log())
    spread = groups.factor @ inverse @ groups.factor.mT
    return Seen(evidence + groups.share.log(), u @ groups.factor.mT, spread, off)


def contribution(groups: Groups, phi: Tensor, y: Tensor, rows: Tensor) -> dict[str, Any]:
    """What one client adds to the sums from which the M-step follows."""
    found = seen(groups, phi, y, rows)
    own, noise = found.evidence.softmax(-1), groups.noise[:, None, None]
    left = found.off - found.effect @ phi.mT  # y - φE[θ] (f, k, n)
    gram = phi.mT @ phi
    information = (gram - gram @ found.spread @ gram / noise) / noise
    return {
        "likelihood": found.evidence.logsumexp(-1),
        "share": own,
        "information": own[..., None, None] * information[:, None],
        "pull": own[..., None] * (left @ phi) / noise,
        "second": torch.einsum("fk,fkd,fke->fde", own, found.effect, found.effect) + found.spread,
        "squares": (own * left.square().sum(-1)).sum(-1) + (gram * found.spread).sum((-2, -1)),
        "rows": rows.expand(len(own)),
        "clients": torch.ones_like(own[:, 0]),
    }


def maximised(groups: Groups, sums: dict[str, Tensor]) -> Groups:
    """The M-step: means by generalised least squares, which does not wait for Σ as posterior means would."""
    fits, k, d = groups.mean.shape
    change = least_squares(sums["information"].flatten(0, 1), sums["pull"].flatten(0, 1)).reshape(fits, k, d)
    values, vectors = torch.linalg.eigh(sums["second"] / sums["clients"][:, None, None])
    return Groups(
        share=sums["share"] / sums["clients"][:, None],
        mean=groups.mean + change,
        factor=vectors * values.clamp(min=0).sqrt()[:, None],
        noise=(sums["squares"] / sums["rows"]).clamp(min=QUIET * float(groups.noise.max())),
    )


def split(groups: Groups) -> Groups:
    """Every way to part one group of a single fit in two, along the direction in which clients vary most."""
    (share, mean, factor, noise), k = (x[0] for x in groups), groups.mean.shape[1]
    vectors, values, _ = torch.linalg.svd(factor)
    along = vectors[:, 0] * values[0]
    less = factor - 0.7 * torch.outer(vectors[:, 0], vectors[:, 0] @ factor)
    rest = torch.stack([torch.arange(k)[torch.arange(k) != j] for j in range(k)])
    halves = torch.stack([mean + along, mean - along], 1)  # (k, 2, d)
    return Groups(
        share=torch.cat([share[rest], share[:, None].expand(-1, 2) / 2], 1),
        mean=torch.cat([mean[rest], halves], 1),
        factor=less.expand(k, -1, -1),
        noise=noise.expand(k),
    )


def merged(groups: Groups) -> Groups:
    """Every way to make one of two groups of a single fit."""
    (share, mean, factor, noise), k = (x[0] for x in groups), groups.mean.shape[1]
    ways = []
    for a, b in torch.combinations(torch.arange(k)).tolist():
        rest, both = [j for j in range(k) if j not in (a, b)], share[a] + share[b]
        apart = mean[a] - mean[b]
        values, vectors = torch.linalg.eigh(factor @ factor.mT + share[a] * share[b] / both * torch.outer(apart, apart))
        middle = (share[a] * mean[a] + share[b] * mean[b]) / both
        ways.append((
            torch.cat([share[rest], both[None]]),
            torch.cat([mean[rest], middle[None]]),
            vectors * values.clamp(min=0).sqrt(),
            noise,
        ))  # fmt: skip
    return Groups(*(torch.stack(x) for x in zip(*ways, strict=True)))


class Lines(NamedTuple):
    """The lines from one group to another, for p pairs of groups of a single fit."""

    begin: Tensor  # μ_a (p, d)
    apart: Tensor  # μ_b - μ_a (p, d)
    factor: Tensor  # of what clients vary by beside the line (p, d, d)
    noise: Tensor  # (p,)


def lines(groups: Groups) -> Lines:
    """Those between all pairs. Along a line clients may lie anywhere; beside it, they vary as Σ says."""
    mean, factor = groups.mean[0], groups.factor[0]
    a, b = torch.combinations(torch.arange(len(mean))).mT
    apart = mean[b] - mean[a]
    values, vectors = torch.linalg.eigh(factor @ factor.mT)
    values = torch.maximum(values, 1e-6 * apart.square().sum(1, keepdim=True))  # (p, d): Σ may be 0
    inverse = (vectors / values[:, None]) @ vectors.mT
    along = 1 / torch.einsum("pd,pde,pe->p", apart, inverse, apart)
    beside = (vectors * values[:, None]) @ vectors.mT - along[:, None, None] * apart[:, :, None] * apart[:, None]
    values, vectors = torch.linalg.eigh(beside)
    return Lines(mean[a], apart, vectors * values.clamp(min=0).sqrt()[:, None], groups.noise.expand(len(a)))


def position(lines: Lines, phi: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Where a client lies on each line (p,), 0 being its begin and 1 its end, and the standard errors of that (p,)."""
    root = lines.noise.sqrt()[:, None]
    step = lines.apart @ phi.mT / root  # (p, n)
    off = (y - lines.begin @ phi.mT) / root
    z = phi @ lines.factor / root[..., None]
    inverse, _ = _conditioned(z)
    lift = (step[:, None] @ z @ inverse)[:, 0]  # (p, d)
    rest = step - (z @ lift[..., None])[..., 0]
    information = (rest * step).sum(1).clamp(min=1e-30)
    return (rest * off).sum(1) / information, information.rsqrt()


def _conditioned(z: Tensor) -> tuple[Tensor, Tensor]:
    """(I + zᵀz)⁻¹ (f, d, d), and log det(I + zᵀz) (f,)."""
    whole = z.mT @ z + torch.eye(z.shape[-1], dtype=z.dtype, device=z.device)
    root = torch.linalg.cholesky(whole)
    return torch.cholesky_inverse(root), 2 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
