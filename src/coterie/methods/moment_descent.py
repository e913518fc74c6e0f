"""Federated moment descent: coarse estimates of k regression models from any start.

Global Convergence of Federated Learning for Mixed Regression
    Lili Su, Jiaming Xu, Pengkun Yang. NeurIPS 2022, Phase 1.

Line numbers in the comments are those of Phase 1. Four things are not as printed, for as printed it does not work. A
singular vector has no sign (line 11): here the power iteration starts from the mean, and keeps its sign. That iteration
returns the square of σ_1(A) = σ̂², so σ̂ is a fourth root. Anchors are merged into k clusters without knowing Δ (line 16;
the printed rule is an option). And features are whitened, where the paper wants covariances near the identity. It is
not the FedMD of Li and Wang (2019), which is distillation.

Throughout, h is the anchor clients, d the parameters, k the clusters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from coterie.core.cohort import Cohort
from coterie.core.features import require_linear
from coterie.core.key import Key
from coterie.core.local import pick
from coterie.core.pytree import Outer, Params, flat, unflat
from coterie.core.registry import register
from coterie.core.settings import setting
from coterie.core.step import ClientStep, Local, Reply, Step, client_step
from coterie.core.task import Data, Task
from coterie.parts.kmeans import kmeans
from coterie.parts.starts import Start

ENOUGH = 18  # times k²d: the pairs of rows from which on an iteration has been found reliable
COLLINEAR = 1e-5  # the smallest eigenvalue that the correlations of the features must have
_H, _S, _Q, _START, _NOISE, _ROWS = range(6)  # streams under the key


class Anchors(NamedTuple):
    """Where the anchor clients stand."""

    theta: Tensor  # θ_{i,t} (h, d)
    at: Tensor  # the set H, as positions in the cohort (h,)
    sigma: Tensor  # σ̂_{i,t}, the length of the residual error that was left before the last step (h,)
    subspace: Tensor  # Û_{i,t}, of the last iteration, for whitened features (h, d, k)
    white: Tensor  # W, such that Wφ has the identity as its second moment (d, d)


class _Population(NamedTuple):
    """Who takes part, and the scale of their features."""

    anchors: Tensor  # positions of H
    others: list[Tensor]  # positions of S_t for every t
    white: Tensor  # as in `Anchors`


@register("moment_descent", "start")
@dataclass(frozen=True)
class MomentDescent(Start):
    """A few anchor clients descend towards their own models in subspaces that many small clients estimate.

    It is for regressions whose model is linear in its parameters, f(x) = ⟨φ(x), θ⟩. A client with two rows is enough
    for the subspaces, and only sums of what such clients send are needed. The anchors' models are seen by the server,
    and by the other clients unless `noise` hides them.

    Args:
        anchors: n_H; None takes as many as miss none of k equal clusters in 99.9 % of draws.
        clients: m, the other clients of an iteration; None takes as many as have 18·k²·d rows beyond their first.
        ell: ℓ, the pairs of rows that an anchor uses in an iteration; None takes 6k.
        rounds: T, the iterations.
        orthogonal: T₁, the orthogonal iterations for each subspace.
        power: T₂, the power iterations of an anchor.
        step: The part of its residual error by which an anchor moves: α/(2β²) as printed, with α = β = 1 for whitened
            features.
        floor: εΔ: an anchor whose σ̂, as whitened features have it, is not above it stays where it is.
        radius: θ_0 is drawn from the ball of this radius R; 0 starts from zero.
        reuse: Whether the same clients serve in every iteration, and anchors draw from all their rows each time; the
            analysis wants fresh ones.
        subspace: How the subspaces are found. "printed": orthogonal iteration on YYᵀ with one pair of rows per client,
            two exchanges for each; "symmetric": on the mean over all pairs of rows, which is symmetric, one exchange
            for each; "pooled": the d×d sum of the same is sent once. "auto": whichever of the last two sends less.
        noise: Standard deviation of the noise under which anchors' models are sent, two copies to each client (Remark
            2).
        merge: How the anchors' models become k (line 16): "lloyd" (farthest-first and Lloyd's k-means) or "distance",
            the printed rule that puts anchors closer than Δ/2 together.
        delta: Δ, which "distance" needs.

    Example:
        >>> import coterie as ct
        >>> federation = ct.data.mixed_regression(k=2, d=5, seed=0)
        >>> task = ct.Task.regressor(ct.models.Linear(5, 1))
        >>> run = ct.fit(ct.IFCA(k=2, init=ct.MomentDescent(rounds=4)), task, federation, rounds=10, evaluations=1)
        >>> len(run.models)
        2
    """

    anchors: int | None = setting(None, low=1)
    clients: int | None = setting(None, low=1)
    ell: int | None = setting(None, low=1)
    rounds: int = setting(6, low=1)
    orthogonal: int = setting(20, low=1)
    power: int = setting(20, low=1)
    step: float = setting(0.5, low=0)
    floor: float = setting(0.0, low=0)
    radius: float = setting(0.0, low=0)
    reuse: bool = False
    subspace: Literal["auto", "printed", "symmetric", "pooled"] = "auto"
    noise: float = setting(0.0, low=0)
    merge: Literal["lloyd", "distance"] = "lloyd"
    delta: float | None = setting(None, low=0)

    def __call__(self, k: int, lr: float, task: Task, cohort: Cohort, key: Key) -> Params:
        """Line 2: θ̂_1, …, θ̂_k."""
        *_, last = self.descent(k, task, cohort, key)
        like = task.init(key)
        return unflat(self.centres(last, k).to(next(iter(like.values())).dtype), like)

    def descent(self, k: int, task: Task, cohort: Cohort, key: Key) -> Iterator[Anchors]:
        """Lines 3 to 15: where the anchors stand after every iteration."""
        d = flat(task.init(key), 0).numel()
        if self.ell is None or self.anchors is None or self.subspace == "auto":
            yield from self._settled(k, d).descent(k, task, cohort, key)
            return
        self._check(k)
        dtype, k = cohort.federation.train.x.dtype, min(k, d)
        people = self._population(k, d, task, cohort, key)
        h = len(people.anchors)
        theta = self._first(d, key).expand(h, d).to(dtype)  # lines 4 and 5
        for t in range(self.rounds):
            now = cohort.fold(t)
            others = now.only(people.others[t])  # line 7: S_t
            subspace = self._subspace(theta, k, others, people.white, key.fold(_Q, t))  # lines 8 and 9
            sent = {"theta": theta, "U": people.white.T @ subspace}  # line 10
            sent = {name: x.to(dtype) for name, x in sent.items()}
            reply = now.only(people.anchors).gather(self.descend, sent, rows=torch.arange(h))  # lines 11 to 15
            theta = reply.update
            yield Anchors(theta.cpu(), people.anchors, reply.note["sigma"].cpu(), subspace, people.white)

    def centres(self, anchors: Anchors, k: int) -> Tensor:
        """Line 16: the anchors' models merged into k (k, d); by default as whitened features see them."""
        theta = anchors.theta.double()
        if self.merge == "lloyd":
            return kmeans(theta @ torch.linalg.inv(anchors.white), k) @ anchors.white
        groups = _linked(torch.cdist(theta, theta) < (self.delta or 0) / 2)
        if len(groups) != k:
            raise ValueError(
                f"MomentDescent: anchors closer than delta/2 = {(self.delta or 0) / 2:g} form {len(groups)} groups, "
                f"but k is {k}; merge='lloyd' needs no delta"
            )
        return groups @ theta / groups.sum(1, keepdim=True)

    # --- what a client does --------------------------------------------------------------------------------------

    @client_step
    def second_moment(self, task: Task) -> ClientStep:
        """The sum of φφᵀ over a client's rows."""

        def run(_: Any, local: Local) -> Reply:
            phi = _features(task, local.data) * local.data.mask[:, None]
            return Reply(Outer(phi, phi), note={"rows": local.data.mask.sum()})

        return ClientStep(run)

    @client_step
    def pool(self, task: Task) -> ClientStep:
        """The mean of ε(x, y, θ) ε(x̃, ỹ, θ)ᵀ over all ordered pairs of a client's rows, for every θ (h·d, d)."""

        def run(sent: dict[str, Tensor], local: Local) -> Reply:
            phi, one, two = self._residuals(task, sent, local.data)
            others = (one.T @ phi)[None] - one[:, :, None] * phi[:, None]  # of each row's partners (n, h, d)
            left = two[:, :, None] * others / _pairs(local.data)
            return Reply(Outer(left.flatten(1), phi), _evidence(local.data))

        return ClientStep(run)

    @client_step
    def apply(self, task: Task) -> ClientStep:
        """The symmetric part of the same matrix, applied to Q (d, h·k)."""

        def run(sent: dict[str, Tensor], local: Local) -> Reply:
            phi, one, two = self._residuals(task, sent, local.data)
            seen = _projected(phi, sent["Q"])

            def against(own: Tensor, other: Tensor) -> Tensor:
                each = other[:, :, None] * seen
                return own[:, :, None] * (each.sum(0) - each)

            right = (against(one, two) + against(two, one)) / 2 if self.noise else against(one, one)
            return Reply(Outer(phi, (right / _pairs(local.data)).flatten(1)), _evidence(local.data))

        return ClientStep(run)

    @client_step
    def forth(self, task: Task) -> ClientStep:
        """YᵀQ for Y = ε(x₁, y₁, θ) ε(x₂, y₂, θ)ᵀ of a client's first two rows (d, h·k)."""
        return self._one_pair(task, transposed=True)

    @client_step
    def back(self, task: Task) -> ClientStep:
        """Y times what `forth` gave."""
        return self._one_pair(task, transposed=False)

    @client_step
    def descend(self, task: Task) -> ClientStep:
        """Lines 11 to 15 at an anchor client."""
        ell = self.ell or 0  # `descent` has set it

        def run(sent: dict[str, Tensor], local: Local) -> Reply:
            theta, projection = sent["theta"], sent["U"]
            rows = pick(local.data, local.draws["rows"])
            phi = _features(task, rows)
            e = _off(phi, rows, theta[None]) * (phi @ projection)  # Ûᵀε (2ℓ, k)
            a = e[:ell].T @ e[ell:] / ell  # eq. (2)
            size = a.abs().amax().clamp(min=torch.finfo(a.dtype).tiny)  # its powers would leave the range of floats
            beta = e.mean(0)  # so that β̂ has the sign of the mean
            for _ in range(self.power):  # line 11: power iteration on AAᵀ
                beta = a / size @ (a.T / size @ beta)
                beta = beta / beta.norm().clamp(min=torch.finfo(beta.dtype).tiny)
            sigma = (a.T @ beta).norm().sqrt()  # the fourth root of the eigenvalue of AAᵀ
            move = torch.where(sigma > self.floor, self.step * sigma, 0.0)  # lines 12 to 15
            return Reply(theta + move * (projection @ beta), note={"sigma": sigma})

        def draw(n: int, key: Key, when: tuple[int, ...]) -> dict[str, Tensor]:
            t = when[-1]
            order = torch.randperm(n, generator=key.fold(_ROWS, t if self.reuse else 0).generator())
            first = 0 if self.reuse else 2 * ell * t
            return {"rows": order[first : first + 2 * ell]}

        return ClientStep(run, draw)

    def _residuals(self, task: Task, sent: dict[str, Tensor], data: Data) -> tuple[Tensor, Tensor, Tensor]:
        """φ (n, d), and y - ⟨φ, θ⟩ (n, h) under the two copies of the anchors' models."""
        phi = _features(task, data)
        one = _off(phi, data, sent["theta"])
        return phi, one, _off(phi, data, sent["theta~"]) if self.noise else one

    def _one_pair(self, task: Task, *, transposed: bool) -> ClientStep:
        to, of = (1, 0) if transposed else (0, 1)

        def run(sent: dict[str, Tensor], local: Local) -> Reply:
            phi, one, two = self._residuals(task, sent, local.data)
            seen = _projected(phi[of][None], sent["Q"])
            right = (one[0] * two[1])[:, None] * seen
            return Reply(Outer(phi[to][None], right.flatten(1)))

        return ClientStep(run)

    # --- what the server does ------------------------------------------------------------------------------------

    def _subspace(self, theta: Tensor, k: int, others: Cohort, white: Tensor, key: Key) -> Tensor:
        """Line 9: the top-k left singular vectors of every anchor's Y_{i,t} (h, d, k), for whitened features."""
        sent, rows = self._copies(theta, others, key)
        h, d = theta.shape

        def mean(step: Step, more: dict[str, Tensor]) -> Tensor:
            shared = sent | {n: x if rows is None else x.expand(len(others), *x.shape) for n, x in more.items()}
            sums = others.combine(step, shared, rows=rows)
            return (sums.update[0] / sums.weight[0]).cpu().double()

        if self.subspace == "pooled":
            y = white @ mean(self.pool, {}).reshape(h, d, d) @ white.T
            values, vectors = torch.linalg.eigh((y + y.mT) / 2)
            top = values.abs().argsort(-1, descending=True)[:, None, :k]
            return vectors.gather(2, top.expand(-1, d, -1))
        q = torch.linalg.qr(torch.randn(h, d, k, dtype=torch.float64, generator=key.generator()))[0]
        for _ in range(self.orthogonal):
            for step in (self.forth, self.back) if self.subspace == "printed" else (self.apply,):
                q = white @ mean(step, {"Q": (white.T @ q).to(theta)}).reshape(d, h, k).movedim(1, 0)
            q = torch.linalg.qr(q)[0]
        return q

    def _copies(self, theta: Tensor, others: Cohort, key: Key) -> tuple[dict[str, Tensor], Tensor | None]:
        """Line 8: the anchors' models as each client gets them (and which of them), twice under noise of its own."""
        if not self.noise:
            return {"theta": theta}, None
        g, shape = key.fold(_NOISE).generator(), (len(others), *theta.shape)
        sent = {name: theta + self.noise * torch.randn(shape, generator=g).to(theta) for name in ("theta", "theta~")}
        return sent, torch.arange(len(others))

    def _first(self, d: int, key: Key) -> Tensor:
        """θ_0, uniform in the ball of radius R."""
        g = key.fold(_START).generator()
        direction, length = torch.randn(d, dtype=torch.float64, generator=g), torch.rand((), generator=g)
        return self.radius * length.double() ** (1 / d) * direction / direction.norm()

    def _settled(self, k: int, d: int) -> MomentDescent:
        """The same with a value for each setting that was left open."""
        subspace = self.subspace
        if subspace == "auto":
            subspace = "pooled" if d <= self.orthogonal * k else "symmetric"
        return replace(self, ell=self.ell or 6 * k, anchors=self.anchors or _covering(k), subspace=subspace)

    def _population(self, k: int, d: int, task: Task, cohort: Cohort, key: Key) -> _Population:
        """Lines 3 and 7: who takes part in which iteration."""
        require_linear(task, cohort.federation.train.x[:2], "MomentDescent")
        anchors = self._choose_anchors(k, cohort, key)
        able = cohort.sizes >= 2
        able[anchors] = False
        order = key.fold(_S).shuffle(cohort.numbers)
        order = order[able[order]]
        if not len(order):
            raise ValueError(
                f"MomentDescent: no client besides the {len(anchors)} anchors has two rows; fewer anchors leave some"
            )
        evidence = torch.ones_like(order) if self.subspace == "printed" else cohort.sizes[order] - 1
        others = self._choose_others(order, evidence, ENOUGH * k**2 * d)
        self._log(k, d, cohort, anchors, others)
        white = self._whitening(task, cohort.only(torch.cat([anchors, others[0]])))
        return _Population(anchors, others, white)

    def _choose_anchors(self, k: int, cohort: Cohort, key: Key) -> Tensor:
        each = 2 * (self.ell or 0)
        need = each if self.reuse else each * self.rounds
        large = (cohort.sizes >= need).nonzero().flatten()
        if len(large) < k:
            way = "a smaller ell needs fewer" if self.reuse else f"with reuse=True it needs {each}"
            raise ValueError(
                f"MomentDescent: an anchor client needs {need} rows (ell={self.ell}, reuse={self.reuse}) and k={k} of "
                f"them are needed at least, but {len(large)} of {len(cohort)} clients have so many (the largest has "
                f"{int(cohort.sizes.max())}); {way}"
            )
        return large[key.fold(_H).shuffle(cohort.numbers[large])][: self.anchors].sort().values

    def _choose_others(self, order: Tensor, evidence: Tensor, enough: int) -> list[Tensor]:
        """S_0, …, S_{T-1}, dealt from clients in a random order, of whom each has so much to tell."""
        parts, begin, total = [], 0, evidence.cumsum(0)
        for _ in range(1 if self.reuse else self.rounds):
            before = int(total[begin - 1]) if begin else 0
            end = begin + self.clients if self.clients else int(torch.searchsorted(total, before + enough)) + 1
            if self.reuse and self.clients is None:
                end = min(end, len(order))
            if end > len(order):
                self._too_few(order, math.ceil(enough / float(evidence.double().mean())))
            parts.append(order[begin:end].sort().values)
            begin = end
        return parts * self.rounds if self.reuse else parts

    def _too_few(self, order: Tensor, enough: int) -> None:
        need, times = self.clients or enough, 1 if self.reuse else self.rounds
        way = "clients=None takes those there are" if self.reuse else "reuse=True takes the same in every iteration"
        raise ValueError(
            f"MomentDescent: {times} iterations need about {times * need} clients with at least two rows besides "
            f"the anchors, {need} each, but there are {len(order)}; {way}"
        )

    def _log(self, k: int, d: int, cohort: Cohort, anchors: Tensor, others: list[Tensor]) -> None:
        sizes = {"pooled": d * d, "symmetric": d * k * self.orthogonal, "printed": 2 * d * k * self.orthogonal}
        told = int((cohort.sizes[others[0]] - 1).sum())
        asked = f" (of {self.anchors} asked for)" if len(anchors) < (self.anchors or 0) else ""
        short = (
            f", which is less than has been found reliable ({ENOUGH * k**2 * d})" if told < ENOUGH * k**2 * d else ""
        )
        cohort.log(
            f"moment descent: {len(anchors)} anchors{asked} use {2 * (self.ell or 0)} rows in each of {self.rounds} "
            f"iterations, with {len(others[0])} {'' if self.reuse else 'fresh '}clients that have {told} rows beyond "
            f"their first{short}; subspaces {self.subspace}, {sizes[self.subspace]} numbers up per client, anchor and "
            f"iteration ({', '.join(f'{way}: {size}' for way, size in sizes.items())})"
        )

    def _check(self, k: int) -> None:
        if self.merge == "distance" and self.delta is None:
            raise ValueError("MomentDescent: merge='distance' needs delta, the separation Δ of the models")
        if (self.anchors or 0) < k:
            raise ValueError(f"MomentDescent: anchors must be at least k = {k}, got {self.anchors}")

    def _whitening(self, task: Task, cohort: Cohort) -> Tensor:
        """The inverse root of the correlations of the features, over their scales (d, d)."""
        sums = cohort.combine(self.second_moment, ())
        rows = int(sums.note["rows"].sum())
        moment = sums.update[0].cpu().double() / rows
        scale = moment.diagonal().sqrt()
        values, vectors = torch.linalg.eigh(moment / (scale[:, None] * scale).clamp(min=1e-300))
        if float(values[0]) <= COLLINEAR:
            raise ValueError(f"MomentDescent: {_degenerate(vectors[:, 0], rows, len(cohort))}")
        return (vectors / values.sqrt()) @ vectors.T / scale


def _linked(close: Tensor) -> Tensor:
    """The groups of points that are linked by close ones (groups, h), 1 for each member."""
    reach = close.double()
    for _ in range(math.ceil(math.log2(len(reach))) + 1):
        reach = (reach @ reach > 0).double()
    return reach.unique(dim=0)


def _covering(k: int) -> int:
    """So many draws miss one of k equal clusters once in a thousand times."""
    return math.ceil(math.log(1000 * k) / -math.log1p(-1 / k)) if k > 1 else 1


def _features(task: Task, data: Data) -> Tensor:
    assert task.features is not None  # `require_linear` has seen to it
    return task.features(data.x)


def _off(phi: Tensor, data: Data, theta: Tensor) -> Tensor:
    """Y - ⟨φ(x), θ⟩ for every row and θ (n, h); ε(x, y, θ) is that times φ(x)."""
    return (data.y.reshape(-1, 1) - phi @ theta.T) * data.mask[:, None]


def _projected(phi: Tensor, q: Tensor) -> Tensor:
    """φᵀQ for every anchor's Q (n, h, k)."""
    return (phi @ q.movedim(1, 0).flatten(1)).unflatten(1, (q.shape[0], q.shape[2]))


def _pairs(data: Data) -> Tensor:
    """n(n - 1)."""
    return data.mask.sum() * (data.mask.sum() - 1)


def _evidence(data: Data) -> Tensor:
    """How heavily a client counts: two rows make one pair, and each further row adds about as much."""
    return data.mask.sum() - 1


def _degenerate(direction: Tensor, rows: int, clients: int) -> str:
    """What is wrong with features that do not span all d dimensions; `direction` is one that they miss."""
    if rows < len(direction):
        return f"{clients} clients have {rows} rows together, fewer than the model's {len(direction)} parameters"
    involved = (direction.abs() > 0.01).nonzero().flatten().tolist()
    where = f"over {rows} rows of {clients} clients (features are counted from 0; the model's bias is the last)"
    if len(involved) == 1:
        return f"feature {involved[0]} is zero {where}"
    names = ", ".join(map(str, involved[:8])) + (", …" if len(involved) > 8 else "")
    return (
        f"features {names} are collinear {where}: one of them is constant, follows from the others, or has a mean far "
        "above its spread"
    )
