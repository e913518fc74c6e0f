"""Other groupings than those of a mixture of random effects, and the lines between its groups.

Throughout, a mixture is one fit (f = 1) whose k groups share a full covariance Σ, in d features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from coterie.parts.random_effects import Frame, Mixture, Rows, along, posterior, pull

LESS = 0.3  # of the deviation of clients along the line on which a group is split: what halves are left with
LEAST = 1e-6  # of the squared distance of two groups: the least variance of clients in any direction


def split(mixture: Mixture) -> Mixture:
    """Every way to part one group in two, along the direction in which clients vary most (k fits of k + 1 groups)."""
    share, mean, factor = mixture.share[0], mixture.mean[0], mixture.factor[0, 0]
    k, (vectors, values, _) = len(share), torch.linalg.svd(factor)
    far = vectors[:, 0] * values[0]
    less = factor - (1 - LESS) * torch.outer(vectors[:, 0], vectors[:, 0] @ factor)
    rest = torch.stack([torch.arange(k)[torch.arange(k) != j] for j in range(k)])
    return Mixture(
        share=torch.cat([share[rest], share[:, None].expand(-1, 2) / 2], 1),
        mean=torch.cat([mean[rest], torch.stack([mean + far, mean - far], 1)], 1),
        factor=less.expand(k, 1, -1, -1),
        noise=mixture.noise.expand(k),
    )


def merged(mixture: Mixture) -> Mixture:
    """Every way to make one of two groups (k(k - 1)/2 fits of k - 1 groups); Σ grows by what set them apart."""
    share, mean, factor = mixture.share[0], mixture.mean[0], mixture.factor[0, 0]
    ways = []
    for a, b in pairs(len(share)).tolist():
        rest = [j for j in range(len(share)) if j not in (a, b)]
        both, apart = share[a] + share[b], mean[a] - mean[b]
        middle = (share[a] * mean[a] + share[b] * mean[b]) / both
        between = share[a] * share[b] / both * torch.outer(apart, apart)
        wide = _root(factor @ factor.mT + between)
        ways.append((torch.cat([share[rest], both[None]]), torch.cat([mean[rest], middle[None]]), wide[None]))
    shares, means, factors = (torch.stack(x) for x in zip(*ways, strict=True))
    return Mixture(shares, means, factors, mixture.noise.expand(len(ways)))


def centred(mixture: Mixture, frame: Frame, theta: Tensor, members: Tensor, *, tied: bool) -> Mixture:
    """A mixture with other centres, given as models (k, p) with so many clients each (k,); Σ and σ² stay.

    Where groups are not `tied` to one Σ, a group that is new has that of the last.
    """
    beta, basis = theta.to(mixture.mean) / frame.unit, frame.basis
    mean = torch.where(basis == 0, 0.0, beta / basis) if basis.dim() == 1 else beta @ torch.linalg.pinv(basis).mT
    share = (members + 1).to(mean)
    own = torch.arange(len(theta)).clamp(max=mixture.factor.shape[1] - 1)
    factor = mixture.factor if tied else mixture.factor[:, own]
    return Mixture((share / share.sum())[None], mean[None], factor, mixture.noise)


def pairs(k: int) -> Tensor:
    """All pairs of k groups, one per row."""
    return torch.combinations(torch.arange(k))


class Lines(NamedTuple):
    """The lines from group a to group b of p pairs. Along a line clients may lie anywhere, beside it they vary by Σ."""

    beside: Mixture  # p fits of one group each: its mean is μ_a, its covariance what is left of Σ beside the line
    apart: Tensor  # μ_b - μ_a (p, d)

    @classmethod
    def of(cls, mixture: Mixture) -> Lines:
        """The lines between all groups."""
        mean, factor = mixture.mean[0], mixture.factor[0, 0]
        a, b = pairs(len(mean)).mT
        apart = mean[b] - mean[a]
        values, vectors = torch.linalg.eigh(factor @ factor.mT)
        values = torch.maximum(values, LEAST * apart.square().sum(1, keepdim=True))  # (p, d)
        inverse = (vectors / values[:, None]) @ vectors.mT
        within = 1 / torch.einsum("pd,pde,pe->p", apart, inverse, apart)  # of clients along the line
        whole = (vectors * values[:, None]) @ vectors.mT
        rest = _root(whole - within[:, None, None] * apart[:, :, None] * apart[:, None])
        one = torch.ones_like(within)[:, None]
        return cls(Mixture(one, mean[a][:, None], rest[:, None], mixture.noise.expand(len(a))), apart)

    def position(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Where a client lies on each line (p,), 0 being its begin and 1 its end, and the standard errors (p,)."""
        found = posterior(self.beside, rows)
        left = rows.y - along(rows.phi, self.beside.moved(found.u))
        pulled = pull(rows.phi, left)[:, 0] / self.beside.noise[:, None]  # φᵀΩ⁻¹(y - φμ_a)
        fisher = found.given.information
        known = (along(fisher.left, self.apart[:, None]) * along(fisher.right, self.apart[:, None])).sum((1, 2))
        known = known.clamp(min=torch.finfo(known.dtype).tiny)
        return (self.apart * pulled).sum(1) / known, known.rsqrt()


def _root(covariance: Tensor) -> Tensor:
    """L with LLᵀ = a covariance (…, d, d)."""
    values, vectors = torch.linalg.eigh(covariance)
    return vectors * values.clamp(min=0).sqrt()[..., None, :]
