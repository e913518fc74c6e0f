"""Mixtures of random effects by EM: θ ~ Σ_j π_j N(μ_j, Σ), y = φθ + noise of variance σ², from sums over clients.

Random-Effects Models for Longitudinal Data
    Nan M. Laird, James H. Ware. Biometrics 1982 (k = 1).
A Linear Mixed-Effects Model With Heterogeneity in the Random-Effects Population
    Geert Verbeke, Emmanuel Lesaffre. JASA 1996 (k > 1).
Parameter Expansion to Accelerate EM: The PX-EM Algorithm
    Chuanhai Liu, Donald B. Rubin, Ying Nian Wu. Biometrika 1998.

Σ is held by a factor, Σ = LLᵀ, and θ = μ_j + Lu with u ~ N(0, I), so that nothing is divided by Σ: Σ = 0 is a
clustering, and no special case. Throughout, f is the fits that go side by side, k their components, n a client's
rows, d the features, and h the covariances of a fit: 1 where all components share it, else k. Equation numbers are
those of docs/methods/mixed_effects.md.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from coterie.core.key import Key
from coterie.core.pytree import Outer
from coterie.parts.least_squares import NARROW, least_squares

QUIET = 1e-8  # the least σ², where the residuals of one model for all have variance 1
EMPTY = 1e-6  # clients: a component with fewer stays where it is
NEVER = -1e30  # the log of a share of 0
FEWER = 2  # times as many rows as a condensed client has, up to which they are used as they are
TIGHT = 0.3  # of the variance of one component: that with which several start


class Frame(NamedTuple):
    """Units in which features are alike, and residuals of one model for all are about 1: φ · basis, and y / unit."""

    basis: Tensor  # (p, d) for p parameters of a model, of which rows tell d apart; (p,) where these are scaled alone
    unit: Tensor

    def features(self, phi: Tensor) -> Tensor:
        """Features (n, d) in these units, from φ (n, p)."""
        return phi * self.basis if self.basis.dim() == 1 else phi @ self.basis

    def parameters(self, beta: Tensor) -> Tensor:
        """A model's own parameters (…, p), from those in these units (…, d)."""
        return self.unit * (beta * self.basis if self.basis.dim() == 1 else beta @ self.basis.mT)

    def covariance(self, spread: Tensor) -> Tensor:
        """The covariance of a model's own parameters (…, p, p), from that in these units (…, d, d)."""
        basis = self.basis.diag() if self.basis.dim() == 1 else self.basis
        return self.unit.square() * (basis @ spread @ basis.mT)

    def rows(self, values: Tensor, count: Tensor) -> Rows:
        """A client's rows in these units, from φ and y side by side (n, p + 1), and how many of them are real."""
        phi, y = self.features(values[:, :-1]), values[:, -1] / self.unit
        return Rows(phi[None, None], y[None, None], count.double())


class Mixture(NamedTuple):
    """The parameters of f fits. A component that a fit does not have is one with share 0."""

    share: Tensor  # π (f, k)
    mean: Tensor  # μ (f, k, d)
    factor: Tensor  # L (f, h, d, d); its diagonal alone (f, h, d) where Σ is diagonal
    noise: Tensor  # σ² (f,)

    @property
    def diagonal(self) -> bool:
        """Whether Σ is diagonal."""
        return self.factor.dim() == 3

    @property
    def covariance(self) -> Tensor:
        """Σ (f, h, d, d)."""
        return torch.diag_embed(self.factor.square()) if self.diagonal else self.factor @ self.factor.mT

    def stretched(self, rows: Tensor) -> Tensor:
        """Rows · L (f, h, n, d), for rows (…, n, d)."""
        return rows * self.factor[..., None, :] if self.diagonal else rows @ self.factor

    def moved(self, u: Tensor) -> Tensor:
        """θ = μ_j + Lu (f, k, d), for u (f, k, d)."""
        far = self.factor * u if self.diagonal else (self.factor @ u[..., None])[..., 0]
        return self.mean + far


class Conditional(NamedTuple):
    """Of u given y and a component: Cov u = (I + zᵀz)⁻¹ with z = φL/σ, by the smaller of zᵀz and zzᵀ."""

    z: Tensor  # φL (f, h, n, d)
    half: Tensor  # A (f, h, …, d): Cov u = AᵀA, or I - AᵀA where there are fewer rows than features
    few: bool  # whether there are
    volume: Tensor  # log det(I + zᵀz) (f, h)
    information: Outer  # φᵀΩ⁻¹φ (f, h, d, d), with Ω = φΣφᵀ + σ²I

    @classmethod
    def of(cls, mixture: Mixture, phi: Tensor) -> Self:
        """What follows from rows φ (…, n, d), 0 for padding."""
        rows, deviation = mixture.stretched(phi), mixture.noise[:, None, None, None].sqrt()
        z, white, (n, d) = rows / deviation, phi / deviation, phi.shape[-2:]
        few = n < d
        small = (z @ z.mT if few else z.mT @ z) + torch.eye(min(n, d), dtype=z.dtype, device=z.device)
        root = torch.linalg.cholesky(small)
        volume = 2 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        white = white.expand(*z.shape[:2], n, d)
        if few:
            white = torch.linalg.solve_triangular(root, white, upper=False)
            return cls(rows, mixture.stretched(white), few, volume, Outer(white, white))
        whole = torch.eye(d, dtype=z.dtype, device=z.device).expand_as(root)
        half = torch.linalg.solve_triangular(root, whole, upper=False)
        less = half @ (z.mT @ white)
        return cls(rows, half, few, volume, Outer(torch.cat([white, -less], -2), torch.cat([white, less], -2)))

    def times(self, v: Tensor) -> Tensor:
        """Cov u · v (f, k, d), for v (f, k, d)."""
        product = pull(self.half, along(self.half, v))
        return v - product if self.few else product

    def variances(self, rows: Tensor) -> Tensor:
        """Of ⟨row, u⟩ (f, h, n), for rows (f, h, n, d)."""
        part = (rows @ self.half.mT).square().sum(-1)
        return rows.square().sum(-1) - part if self.few else part

    def covariance(self) -> Tensor:
        """Cov u (f, h, d, d)."""
        product = self.half.mT @ self.half
        if not self.few:
            return product
        return torch.eye(product.shape[-1], dtype=product.dtype, device=product.device) - product

    def diagonal(self) -> Tensor:
        """The variances of u (f, h, d)."""
        part = self.half.square().sum(-2)
        return 1 - part if self.few else part


class Posterior(NamedTuple):
    """What a client knows of itself under every component of every fit."""

    u: Tensor  # E u (f, k, d)
    given: Conditional
    evidence: Tensor  # log π_j p(y | j) (f, k)

    @property
    def share(self) -> Tensor:
        """How likely the client is of each component (f, k)."""
        return self.evidence.softmax(-1)  # (3)

    @property
    def loglik(self) -> Tensor:
        """Log p(y) (f,)."""
        return self.evidence.logsumexp(-1)  # (4)

    def mean(self, mixture: Mixture) -> Tensor:
        """E θ (f, d), over all components."""
        return (self.share[..., None] * mixture.moved(self.u)).sum(1)  # (10)

    def deviations(self, mixture: Mixture, phi: Tensor) -> Tensor:
        """Of y = φθ + noise for new rows φ (n, d), over θ and noise (f, n)."""
        rows, w = phi[None, None], self.share[..., None]
        each = along(rows, mixture.moved(self.u))  # φ E θ in each component (f, k, n)
        mean = (w * each).sum(1)
        within = self.given.variances(mixture.stretched(rows))
        between = (each - mean[:, None]).square()
        return (mixture.noise[:, None] + (w * (within + between)).sum(1)).sqrt()  # (11)


class Rows(NamedTuple):
    """A client's rows: y = φθ + noise."""

    phi: Tensor  # φ(x) (f', k', n, d), 0 for padding; f' and k' are 1 where all fits and components have the same
    y: Tensor  # (f', k', n), 0 for padding
    number: Tensor  # how many there are

    def condensed(self) -> Rows:
        """As few rows with the same second moments of φ and y, which are all that a regression sees of them."""
        n, d = self.phi.shape[-2:]
        if n <= FEWER * (d + 1):
            return self
        both = torch.cat([self.phi, self.y[..., None]], -1)
        values, vectors = torch.linalg.eigh(both.mT @ both)
        root = values.clamp(min=0).sqrt()[..., None] * vectors.mT
        return Rows(root[..., :-1].contiguous(), root[..., -1].contiguous(), self.number)


def along(rows: Tensor, v: Tensor) -> Tensor:
    """⟨row, v⟩ (f, k, n), for rows (f', k', n, d) and v (f, k, d)."""
    return v @ rows[:, 0].mT if rows.shape[1] == 1 else (rows @ v[..., None])[..., 0]


def pull(rows: Tensor, off: Tensor) -> Tensor:
    """Rowsᵀ · off (f, k, d), for rows (f', k', n, d) and off (f, k, n)."""
    return off @ rows[:, 0] if rows.shape[1] == 1 else (off[..., None, :] @ rows)[..., 0, :]


def posterior(mixture: Mixture, rows: Rows) -> Posterior:
    """The E-step of one client."""
    off, noise = rows.y - along(rows.phi, mixture.mean), mixture.noise[:, None]  # r_j = y - φμ_j (f, k, n)
    given = Conditional.of(mixture, rows.phi)
    push = pull(given.z, off) / noise[..., None]  # Lᵀφᵀr_j/σ² (f, k, d)
    u = given.times(push)  # (1)
    misfit = off.square().sum(-1) / noise - (push * u).sum(-1)  # r_jᵀΩ⁻¹r_j
    evidence = -0.5 * (misfit + given.volume + rows.number * (math.log(2 * math.pi) + noise.log()))  # (2)
    return Posterior(u, given, evidence + mixture.share.log().clamp(min=NEVER))


def contribution(mixture: Mixture, rows: Rows, found: Posterior) -> dict[str, Any]:
    """What one client adds to the sums that the M-step needs: eq. (5)."""
    h, w, u = mixture.factor.shape[1], found.share, found.u
    phi, z, off = rows.phi, found.given.z, rows.y - along(rows.phi, mixture.mean)

    def pooled(x: Tensor) -> Tensor:
        """Over the components that share a covariance, by how likely the client is of each."""
        each = w.reshape(*w.shape, *[1] * (x.dim() - 2)) * x
        return each if h > 1 else each.sum(1, keepdim=True)

    total = {
        "count": w,
        "mean": w[..., None] * u,
        "off": (w * off.square().sum(-1)).sum(-1),
        "loglik": found.loglik,
        "rows": rows.number,
    }
    fisher, lift = found.given.information, u * pull(z, off)  # u ∘ Lᵀφᵀr
    if mixture.diagonal:
        known = (w[..., None] * (fisher.left * fisher.right).sum(-2)).expand_as(total["mean"])
        second, curve = u.square() + found.given.diagonal(), along(z, u).square() + found.given.variances(z)
        alone = {"second": pooled(second), "curve": pooled(curve.sum(-1)), "lift": pooled(lift.sum(-1))}
        return total | alone | {"information": known}
    second = _second(w, u, found.given.covariance())
    weighed = w[..., None, None] * phi
    beside = torch.cat([phi.expand_as(weighed), z * u[..., None, :], off[..., None]], -1)
    return total | {
        "second": second,
        "normal": Outer(weighed, beside),  # φᵀφ, φᵀφL diag(u) and φᵀr (f, k, d, 2d + 1)
        "curve": (z.mT @ z) * second,
        "lift": pooled(lift),
        "information": Outer(w[..., None, None] * fisher.left, fisher.right.expand(*w.shape, -1, -1)),
    }


def _second(w: Tensor, u: Tensor, covariance: Tensor) -> Tensor:
    """E uuᵀ (f, h, d, d), by how likely the client is of each component; where all share Σ, of none by itself."""
    if covariance.shape[1] > 1:
        return w[..., None, None] * (u[..., :, None] * u[..., None, :] + covariance)
    return ((w[..., None] * u).mT @ u + w.sum(-1)[:, None, None] * covariance[:, 0])[:, None]


def turned(mixture: Mixture, t: int) -> Mixture:
    """The same mixture by another factor LQ of the same Σ, with a rotation Q that follows from the round.

    The M-step stretches Σ along the columns of its factor. Were these the same in every round, an axis that shrinks to
    0 on its way to the likeliest Σ would stay there, whichever way it points.
    """
    if mixture.diagonal:
        return mixture
    d = mixture.mean.shape[-1]
    q, r = torch.linalg.qr(torch.randn(d, d, generator=Key.of(t).generator(), dtype=torch.float64))
    return mixture._replace(factor=mixture.factor @ (q * r.diagonal().sign()).to(mixture.factor))


def maximised(mixture: Mixture, sums: dict[str, Tensor], learn_noise: bool = True) -> Mixture:
    """The M-step: parameters that are at least as likely, from sums over the clients.

    Args:
        mixture: Under which the sums were made.
        sums: Of what clients contribute.
        learn_noise: Whether σ² is a parameter.
    """
    count = sums["count"]
    there = count > EMPTY
    shift = sums["mean"] / count.clamp(min=EMPTY)[..., None]  # ν_j
    shape, step, off = (_stretched_alone if mixture.diagonal else _expanded)(mixture, sums)
    within = _within(mixture, sums, shift)
    root = mixture.factor * shape if mixture.diagonal else mixture.factor * shape[..., None, :]  # L diag(a)
    moved = mixture._replace(factor=root).moved(shift) + step
    own = there if root.shape[1] > 1 else there.any(1, keepdim=True)
    factor = _factor(root, within)
    noise = (off / sums["rows"]).clamp(min=QUIET) if learn_noise else mixture.noise
    return Mixture(
        share=count / count.sum(1, keepdim=True),  # (6)
        mean=torch.where(there[..., None], moved, mixture.mean),  # (7)
        factor=torch.where(own.reshape(*own.shape, *[1] * (factor.dim() - 2)), factor, mixture.factor),  # (8)
        noise=noise,  # (9)
    )


def _within(mixture: Mixture, sums: dict[str, Tensor], shift: Tensor) -> Tensor:
    """T: the covariance of u within components (f, h, d, d), or its diagonal."""
    count, h = sums["count"], mixture.factor.shape[1]
    square = shift.square() if mixture.diagonal else shift[..., :, None] * shift[..., None, :]
    between = count.reshape(*count.shape, *[1] * (square.dim() - 2)) * square
    weight = count if h > 1 else count.sum(1, keepdim=True)
    whole = sums["second"] - (between if h > 1 else between.sum(1, keepdim=True))
    return whole / weight.clamp(min=EMPTY).reshape(*weight.shape, *[1] * (square.dim() - 2))


def _factor(root: Tensor, within: Tensor) -> Tensor:
    """The symmetric L with LL = root · T · rootᵀ."""
    if root.dim() == 3:
        return root.abs() * within.clamp(min=0).sqrt()
    values, vectors = torch.linalg.eigh(root @ within @ root.mT)
    return (vectors * values.clamp(min=0).sqrt()[..., None, :] @ vectors.mT).contiguous()


def _expanded(mixture: Mixture, sums: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Least squares of the expanded model y = φ(μ_j + δ_j + L diag(a) u): a (f, h, d), δ (f, k, d), what is left."""
    (f, k, d), h = mixture.mean.shape, mixture.factor.shape[1]
    gram, cross, push = sums["normal"].split([d, d, 1], -1)
    whole = gram.new_zeros(f, k + h, d, k + h, d)
    for j in range(k):
        at = k + (j if h > 1 else 0)
        whole[:, j, :, j], whole[:, j, :, at], whole[:, at, :, j] = gram[:, j], cross[:, j], cross[:, j].mT
    for i in range(h):
        whole[:, k + i, :, k + i] = sums["curve"][:, i]
    whole, right = whole.reshape(f, (k + h) * d, -1), torch.cat([push[..., 0], sums["lift"]], 1).flatten(1)
    now = torch.cat([right.new_zeros(f, k * d), right.new_ones(f, h * d)], 1)
    x = now + least_squares(whole, right - (whole @ now[..., None])[..., 0])
    off = sums["off"] - 2 * (x * right).sum(1) + (x * (whole @ x[..., None])[..., 0]).sum(1)
    step, shape = x.unflatten(1, (k + h, d)).split([k, h], 1)
    return shape, step, off


def _stretched_alone(mixture: Mixture, sums: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The same with one number for all of a's and δ = 0, for which no d x d numbers are needed."""
    curve, lift = sums["curve"], sums["lift"]
    shape = torch.where(curve > 0, lift / curve.clamp(min=torch.finfo(curve.dtype).tiny), 1.0)
    off = sums["off"] + (shape * (shape * curve - 2 * lift)).sum(1)
    return shape[..., None], torch.zeros_like(mixture.mean), off


def framed(size: Tensor, moments: Tensor, rows: Tensor, noise: float | None = None) -> tuple[Frame, Mixture]:
    """Units in which features are uncorrelated and of size 1, and where EM begins: one model for all.

    Args:
        size: By which features and targets were divided first (p + 1,).
        moments: Their second moments after that, summed over all rows (p + 1, p + 1).
        rows: How many there are.
        noise: σ² in the targets' own units, where it is known: then these are kept.
    """
    mean = moments / rows
    scale = mean.diagonal().sqrt()
    scale = torch.where(scale > 0, scale, 1.0)
    mean = mean / (scale[:, None] * scale)
    values, vectors = torch.linalg.eigh(mean[:-1, :-1])
    there = values > NARROW * values[-1]
    basis = vectors[:, there] / values[there].sqrt()
    effect = basis.mT @ mean[:-1, -1]
    whole = (size * scale)[-1]
    left = (mean[-1, -1] - effect.square().sum()).clamp(min=NARROW).sqrt() if noise is None else 1 / whole
    frame = Frame((basis / (size * scale)[:-1, None]).contiguous(), left * whole)
    return frame, first_mixture(effect / left, noise, diagonal=False)


def first_mixture(mean: Tensor, noise: float | None = None, *, diagonal: bool) -> Mixture:
    """Where EM begins: at one model for all, whose residuals are half noise and half clients' own effects.

    Args:
        mean: Its parameters (d,).
        noise: σ² where it is known.
        diagonal: Whether Σ is.
    """
    d = len(mean)
    factor = torch.full((d,), (0.5 / max(d, 1)) ** 0.5, dtype=mean.dtype)
    factor = factor if diagonal else factor.diag()
    return Mixture(mean.new_ones(1, 1), mean[None, None], factor[None, None], mean.new_full((1,), noise or 0.5))


def scattered(mixture: Mixture, k: int, count: int, generator: torch.Generator) -> Mixture:
    """Fits of more components than there are groups, by which these are looked for: at draws of θ.

    Groups that are far apart differ along the axes of Σ that are longest. No single client need be seen for that.

    Args:
        mixture: Of one component (f = 1).
        k: Components.
        count: Fits.
        generator: Of the draws.
    """
    d = mixture.mean.shape[-1]
    drawn = torch.randn(count, k, d, generator=generator, dtype=mixture.mean.dtype)
    one = mixture._replace(mean=mixture.mean.expand(count, k, d))
    return started(mixture, one.moved(drawn))


def started(mixture: Mixture, means: Tensor, width: int = 0) -> Mixture:
    """Fits with these means (f, k, d), each component as likely as the others and narrower than all clients are.

    Args:
        mixture: Of one component (f = 1).
        means: Of those to be started.
        width: Components at least: those that there are not have share 0.
    """
    count, k, d = means.shape
    more = max(0, width - k)
    share = torch.cat([means.new_full((count, k), 1 / k), means.new_zeros(count, more)], 1)
    means = torch.cat([means, mixture.mean.expand(count, more, d)], 1)
    factor = mixture.factor * (1.0 if k == 1 else TIGHT**0.5)
    return Mixture(share, means, factor.repeat(count, *[1] * (factor.dim() - 1)), mixture.noise.repeat(count))


def seeds(centres: Tensor, weight: Tensor, k: int, count: int, generator: torch.Generator) -> Tensor:
    """K-means++ among weighted centres (c, d), so many times (count, k, d)."""
    found = []
    for _ in range(count):
        chosen = [int(torch.multinomial(weight, 1, generator=generator))]
        while len(chosen) < k:
            near = torch.cdist(centres, centres[chosen]).amin(1).square() * weight
            usable = near if bool((near > 0).any()) else weight  # all centres are the same
            chosen.append(int(torch.multinomial(usable, 1, generator=generator)))
        found.append(centres[chosen])
    return torch.stack(found)


def parameters(k: Tensor, d: int, *, diagonal: bool, own: bool) -> Tensor:
    """How many free numbers mixtures of k components have: π, μ, Σ and σ²."""
    each = d if diagonal else d * (d + 1) // 2
    return k - 1 + k * d + (k if own else 1) * each + 1


def bic(loglik: Tensor, free: Tensor, clients: int) -> Tensor:
    """Schwarz's criterion, lowest for the best: clients are the independent draws."""
    return free * math.log(clients) - 2 * loglik
