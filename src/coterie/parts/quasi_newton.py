"""Fewer rounds than EM takes, for one component: steps of Newton's kind from the very sums that EM needs.

Representations of Quasi-Newton Matrices and Their Use in Limited Memory Methods
    Richard H. Byrd, Jorge Nocedal, Robert B. Schnabel. Mathematical Programming 1994.
Optimizing Costly Functions with Simple Constraints: A Limited-Memory Projected Quasi-Newton Algorithm
    Mark Schmidt, Ewout van den Berg, Michael Friedlander, Kevin Murphy. AISTATS 2009.

The sums of an E-step have the log-likelihood and, by Fisher's identity, its slope. μ goes to where generalised least
squares has it. Σ and σ² go to the maximum of a parabola whose slope is exact. Its curvature is the expected information
of clients that are alike, put right by how the slope has changed over the last steps. A point that turns out less
likely is given up for an iteration of EM from the best one, so that the best never gets worse. Equation numbers are
those of docs/methods/mixed_effects.md.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Self

import torch
from torch import Tensor

from coterie.parts.least_squares import least_squares
from coterie.parts.random_effects import QUIET, Mixture, maximised

KEPT = 20  # steps whose changes of slope are remembered
SETTLED = 1.15  # times that σ² may change in a step from whose change of slope anything can be learnt
LEAST = 0.1  # of the curvature expected along a step: what is less is taken for a part of it (Powell's damping)
BORDER = 0.7  # of the curvature along σ² at most is explained by Σ, so that the parabola has a maximum
NARROW = (
    1e-8  # of the widest Σ about which rows can tell: it stays that wide in all directions, to have a slope in them
)
REACH = 5.0  # times that σ² may become larger or smaller in a step
SHRINK = 30.0  # times that Σ may become narrower in a step, in any direction
INNER = 50  # iterations at most to the maximum of a parabola among Σ that are no covariances
CLOSE = 1e-2  # of the way from where they began: the last of these
SLACK = 1e-10  # of the log-likelihood, by which rounding may lower it


class Search(NamedTuple):
    """What is known of the likeliest Σ and σ² after some rounds."""

    trial: Mixture  # to be tried in the next round
    found: Mixture  # an iteration of EM from the best so far
    loglik: Tensor  # of the best
    promise: Tensor  # how much more the log-likelihood is expected to be at the maximum
    caution: Tensor  # times that the curvature is taken to be larger than it seems
    rows: Tensor  # that were summed
    at: Tensor  # Σ and σ² of the best, side by side (d² + 1,)
    slope: Tensor  # of the log-likelihood there
    steps: Tensor  # the last ones (s, d² + 1)
    turns: Tensor  # by how much the slope fell along each of them (s, d² + 1)

    @classmethod
    def start(cls, mixture: Mixture) -> Self:
        """Before the first round.

        Args:
            mixture: Where to begin (f = k = 1).
        """
        d, one = mixture.mean.shape[-1], mixture.noise.new_ones(())
        none = mixture.noise.new_zeros(0, d * d + 1)
        nowhere = mixture.noise.new_zeros(d * d + 1)
        return cls(mixture, mixture, -math.inf * one, math.inf * one, one, 0 * one, nowhere, nowhere, none, none)

    def after(self, sent: Mixture, sums: dict[str, Tensor]) -> Search:
        """What is known after a round.

        Args:
            sent: What was tried, by any factor of its Σ.
            sums: What clients contributed to under it.
        """
        loglik, rows, at, slope = sums["loglik"][0], sums["rows"], _point(sent), _slope(sent, sums)
        if bool(rows != self.rows):  # the first round, or of other clients: nothing can be compared
            self = Search.start(sent)
        elif bool(loglik < self.loglik - SLACK * self.loglik.abs()):
            back = self.found._replace(factor=_root(self.found.covariance, self.found.noise, sums))
            return self._learnt(at, slope, reset=False)._replace(trial=back, caution=4 * self.caution)
        else:
            self = self._learnt(at, slope, reset=True)._trusting(loglik)
        self = self._replace(found=maximised(sent, sums), loglik=loglik, rows=rows, at=at, slope=slope)
        trial, promise = _step(sent, sums, self)
        return self._replace(trial=trial, promise=promise)

    def _learnt(self, at: Tensor, slope: Tensor, *, reset: bool) -> Search:
        """With the last step among those remembered; after one that led far away, with none of them."""
        if max(ratio := float(at[-1] / self.at[-1]), 1 / ratio) > SETTLED:
            return self._replace(steps=self.steps[:0], turns=self.turns[:0]) if reset else self
        steps = torch.cat([self.steps, (at - self.at)[None]])[-KEPT:]
        turns = torch.cat([self.turns, (self.slope - slope)[None]])[-KEPT:]
        return self._replace(steps=steps, turns=turns)

    def _trusting(self, loglik: Tensor) -> Search:
        """With as much caution as the last step calls for, by what it gained of what it promised."""
        gained = float((loglik - self.loglik) * self.caution / self.promise.clamp(min=torch.finfo(loglik.dtype).tiny))
        caution = (self.caution / 4).clamp(min=1) if gained > 0.75 else self.caution * (2 if gained < 0.25 else 1)
        return self._replace(caution=caution)


class Curvature(NamedTuple):
    """A positive definite matrix scale · I + Σ_i sign_i row_i row_iᵀ (p, p)."""

    scale: Tensor
    rows: Tensor  # (r, p)
    signs: Tensor  # (r,)

    def times(self, x: Tensor) -> Tensor:
        """The matrix times x (p,)."""
        return self.scale * x + (self.signs * (self.rows @ x)) @ self.rows

    def solve(self, x: Tensor) -> Tensor:
        """Its inverse times x (p,)."""
        small = self.scale * self.signs.diag() + self.rows @ self.rows.mT
        return (x - torch.linalg.solve(small, self.rows @ x) @ self.rows) / self.scale

    def largest(self) -> Tensor:
        """A bound for its largest eigenvalue."""
        up = self.rows[self.signs > 0]
        return self.scale + torch.linalg.eigvalsh(up @ up.mT)[-1]

    def turned(self, steps: Tensor, turns: Tensor) -> Self:
        """With the curvature that was seen along some steps, one after the other (BFGS)."""
        out = self
        for step, turn in zip(steps, turns, strict=True):
            expected = out.times(step)
            whole, seen = step @ expected, step @ turn
            if float(seen) < LEAST * float(whole):
                part = (1 - LEAST) * whole / (whole - seen)
                turn = part * turn + (1 - part) * expected
            new = torch.stack([turn / (step @ turn).sqrt(), expected / whole.sqrt()])
            both = out.signs.new_tensor([1.0, -1.0])
            out = out._replace(rows=torch.cat([out.rows, new]), signs=torch.cat([out.signs, both]))
        return out


def _point(mixture: Mixture) -> Tensor:
    """Σ and σ² side by side (d² + 1,)."""
    return torch.cat([mixture.covariance.flatten(), mixture.noise])


def _slope(mixture: Mixture, sums: dict[str, Tensor]) -> Tensor:
    """Of the log-likelihood along these, by Fisher's identity: eq. (15)."""
    factor, noise, count = mixture.factor[0, 0], mixture.noise[0], sums["count"][0, 0]
    inverse = torch.linalg.inv(factor)
    excess = sums["second"][0, 0] - count * torch.eye(len(factor), dtype=factor.dtype)
    left = sums["off"][0] - 2 * sums["lift"].sum() + sums["curve"].sum()  # E |y - φθ|²
    return torch.cat([(inverse.mT @ excess @ inverse).flatten(), (left / noise**2 - sums["rows"] / noise)[None]]) / 2


class _Units(NamedTuple):
    """Units of Σ and σ² in which clients that are alike have the same information about each number."""

    root: Tensor  # the symmetric W with WW = φᵀΩ⁻¹φ of a client: Σ is WΣW in these units
    inverse: Tensor
    noise: Tensor  # σ² is divided by it

    def given(self, points: Tensor) -> Tensor:
        """Points (…, d² + 1) in these units."""
        return self._by(self.root, points, 1 / self.noise)

    def back(self, points: Tensor) -> Tensor:
        """The inverse of `given`."""
        return self._by(self.inverse, points, self.noise)

    def slopes(self, slopes: Tensor) -> Tensor:
        """Slopes (…, d² + 1) along points in these units."""
        return self._by(self.inverse, slopes, self.noise)

    def _by(self, side: Tensor, x: Tensor, scale: Tensor) -> Tensor:
        matrix = side @ x[..., :-1].unflatten(-1, side.shape) @ side
        return torch.cat([matrix.flatten(-2), scale * x[..., -1:]], -1)


def _expected(mixture: Mixture, sums: dict[str, Tensor]) -> tuple[_Units, Curvature]:
    """The information that clients which are alike would have about Σ and σ², and units that make it simple: (16).

    Its rows being draws, φᵀΩ⁻¹φ of a client varies about the mean as a Wishart matrix does, with as many degrees of
    freedom as a client has rows more than there are parameters.
    """
    count, rows, noise = sums["count"][0, 0], sums["rows"], mixture.noise[0]
    values, vectors = torch.linalg.eigh(sums["information"][0, 0] / count)
    values = values.clamp(min=torch.finfo(values.dtype).eps * values[-1])
    root, inverse = ((vectors * values**power) @ vectors.mT for power in (0.5, -0.5))
    wide, one = root @ mixture.covariance[0, 0] @ root, torch.eye(len(values), dtype=values.dtype)  # from 0 to I
    trace, vary = wide.trace(), 1 / (rows / count - len(values)).clamp(min=1)
    alone = rows - 2 * count * trace + count * ((1 + vary) * wide.square().sum() + vary * trace**2)
    alone = torch.maximum(alone, (rows - count * trace) ** 2 / rows) / noise**2  # Σ_i trace Ω⁻²
    both = count / noise * (one - (1 + vary) * wide - vary * trace * one).flatten()  # Σ_i φᵀΩ⁻²φ
    scale, unit = count * (1 + vary) / 2, (count * (1 + vary) / alone).sqrt()
    both, one = unit / 2 * both, one.flatten()
    explained = (both @ both - vary / (1 + vary + vary * one.sum()) * (both @ one) ** 2) / scale**2
    both = both * (BORDER / explained).sqrt().clamp(max=1) / (2 * scale).sqrt()
    edge = (scale / 2).sqrt()[None]
    line = torch.cat([(count * vary / 2).sqrt() * one, torch.zeros_like(edge)])
    lines = torch.stack([line, torch.cat([both, edge]), torch.cat([both, -edge])])
    return _Units(root, inverse, unit), Curvature(scale, lines, lines.new_tensor([1.0, 1.0, -1.0]))


def _step(mixture: Mixture, sums: dict[str, Tensor], search: Search) -> tuple[Mixture, Tensor]:
    """Where to go from here, and what is expected of it: eq. (14), (17)."""
    units, curvature = _expected(mixture, sums)
    curvature = curvature.turned(units.given(search.steps), units.slopes(search.turns))
    slope, now = units.slopes(search.slope) / search.caution, units.given(search.at)
    wanted = now + curvature.solve(slope)
    after = _highest(wanted, now, slope, curvature)
    gain = (slope @ (after - now) - (after - now) @ curvature.times(after - now) / 2) * search.caution**2
    d = mixture.mean.shape[-1]
    cross, push = sums["normal"][0, 0, :, d : 2 * d].sum(1), sums["normal"][0, 0, :, -1]
    pull = (push - cross)[None] / mixture.noise
    change = least_squares(sums["information"][0], pull)
    at = units.back(after)
    spread, noise = at[:-1].reshape_as(mixture.factor), at[-1:].clamp(min=QUIET)
    moved = Mixture(mixture.share, mixture.mean + change[None], _root(spread, noise, sums), noise)
    return moved, gain + (pull * change).sum() / 2


def _root(covariance: Tensor, noise: Tensor, sums: dict[str, Tensor]) -> Tensor:
    """The symmetric L of a Σ that is not so narrow anywhere that there is no telling the slope."""
    values, vectors = torch.linalg.eigh(covariance)
    least = NARROW * noise * sums["count"].sum() / sums["rows"]
    return (vectors * values.clamp(min=least).sqrt()[..., None, :]) @ vectors.mT


def _highest(wanted: Tensor, now: Tensor, slope: Tensor, curvature: Curvature) -> Tensor:
    """The maximum of a parabola where Σ is a covariance and σ² in reach, by accelerated projected gradients."""
    d, noise, least = math.isqrt(len(now)), now[-1:], now / SHRINK

    def allowed(x: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh((x - least)[:-1].unflatten(0, (d, d)))
        whole = (vectors * values.clamp(min=NARROW)) @ vectors.mT
        return torch.cat([whole.flatten() + least[:-1], x[-1:].clamp(noise / REACH, noise * REACH)])

    def worth(x: Tensor) -> float:
        return float(slope @ (x - now) - (x - now) @ curvature.times(x - now) / 2)

    first = allowed(wanted)
    if torch.allclose(first, wanted, rtol=0, atol=NARROW):
        return first
    at = ahead = first = first if worth(first) > 0 else now
    short, t = 1 / curvature.largest(), 1.0
    for _ in range(INNER):
        old, at = at, allowed(ahead + short * (slope - curvature.times(ahead - now)))
        if float((at - old).norm()) <= CLOSE * float((at - now).norm()):
            break
        if float((ahead - at) @ (at - old)) > 0:  # it goes back: begin anew from here
            t, ahead = 1.0, at
            continue
        t, last = (1 + math.sqrt(1 + 4 * t * t)) / 2, t
        ahead = at + (last - 1) / t * (at - old)
    return max(first, at, key=worth)
