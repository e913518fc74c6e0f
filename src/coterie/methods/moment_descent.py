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

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from coterie.core.cohort import Cohort
from coterie.core.features import require_linear
from coterie.core.key import Key
from coterie.core.local import pick
from coterie.core.pytree import Outer, Params, exact, flat, to_server, unflat
from coterie.core.registry import register
from coterie.core.settings import setting
from coterie.core.step import ClientStep, Local, Reply, Step, client_step
from coterie.core.task import Data, Task
from coterie.parts.kmeans import kmeans, linked
from coterie.parts.recruiting import LEAST, Population, Recruiting, Subspace, covering
from coterie.parts.residuals import evidence, features, pairs, projected, residuals
from coterie.parts.starts import Start
from coterie.parts.whitening import Whitening

_Q, _START, _NOISE, _ROWS = range(2, 6)  # streams under the key


class Anchors(NamedTuple):
    """Where the anchor clients stand."""

    theta: Tensor  # θ_{i,t} (h, d)
    at: Tensor  # the set H, as positions in the cohort (h,)
    sigma: Tensor  # σ̂_{i,t}, the length of the residual error that was left before the last step (h,)
    subspace: Tensor  # Û_{i,t}, of the last iteration, for whitened features (h, d, k)
    white: Tensor  # W, such that Wφ has the identity as its second moment (d, d)


@register("moment_descent", "start")
@dataclass(frozen=True)
class MomentDescent(Recruiting, Whitening, Start):
    """A few anchor clients descend towards their own models in subspaces that many small clients estimate.

    It is for regressions whose model is linear in its parameters, f(x) = ⟨φ(x), θ⟩. A client with two rows is enough
    for the subspaces, and only sums of what such clients send are needed. The anchors' models are seen by the server,
    and by the other clients unless `noise` hides them.

    Args:
        anchors: n_H; None takes as many as miss none of k equal clusters in 99.9 % of draws.
        clients: m, the other clients of an iteration; None takes as many as have 18·k²·d rows beyond their first.
        ell: ℓ, the pairs of rows that an anchor uses in an iteration; None takes 6k, or as many as so many clients have
            as are wanted for anchors, but at least 6.
        rounds: T, the iterations.
        orthogonal: T₁, the orthogonal iterations for each subspace.
        power: T₂, the power iterations of an anchor.
        step: The part of its residual error by which an anchor moves: α/(2β²) as printed, with α = β = 1 for whitened
            features.
        floor: εΔ: an anchor whose σ̂, as whitened features have it, is not above it stays where it is.
        radius: θ_0 is drawn from the ball of this radius R; 0 starts from zero.
        reuse: Whether the same clients serve in every iteration, and anchors draw from all their rows each time; the
            analysis wants fresh ones. None takes fresh ones if there are enough of them.
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
    reuse: bool | None = None
    subspace: Subspace = "auto"
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
        if None in (self.ell, self.reuse, self.anchors) or self.subspace == "auto":
            yield from self._settled(k, d, cohort, key).descent(k, task, cohort, key)
            return
        self._check(k)
        dtype, k = cohort.federation.train.x.dtype, min(k, d)
        require_linear(task, cohort.federation.train.x[:2], "MomentDescent")
        people = self.recruited(k, d, cohort, key)  # lines 3 and 7
        h, white = len(people.anchors), self.whitening(cohort.only(torch.cat([people.anchors, people.others[0]])))
        theta = self._first(d, key).expand(h, d).to(dtype)  # lines 4 and 5
        for t in range(self.rounds):
            now = cohort.fold(t)
            others = now.only(people.others[t])  # line 7: S_t
            subspace = self._subspace(theta, k, others, white, key.fold(_Q, t))  # lines 8 and 9
            sent = {"theta": theta, "U": white.T @ subspace}  # line 10
            sent = {name: x.to(dtype) for name, x in sent.items()}
            reply = now.only(people.anchors).gather(self.descend, sent, rows=torch.arange(h))  # lines 11 to 15
            theta = reply.update
            yield Anchors(to_server(theta), people.anchors, to_server(reply.note["sigma"]), subspace, white)

    def centres(self, anchors: Anchors, k: int) -> Tensor:
        """Line 16: the anchors' models merged into k (k, d); by default as whitened features see them."""
        theta = anchors.theta.double()
        if self.merge == "lloyd":
            return kmeans(theta @ torch.linalg.inv(anchors.white), k) @ anchors.white
        groups = linked(torch.cdist(theta, theta) < (self.delta or 0) / 2)
        if len(groups) != k:
            raise ValueError(
                f"MomentDescent: anchors closer than delta/2 = {(self.delta or 0) / 2:g} form {len(groups)} groups, "
                f"but k is {k}; merge='lloyd' needs no delta"
            )
        return groups @ theta / groups.sum(1, keepdim=True)

    # --- what a client does --------------------------------------------------------------------------------------

    @client_step
    def pool(self, task: Task) -> ClientStep:
        """The mean of ε(x, y, θ) ε(x̃, ỹ, θ)ᵀ over all ordered pairs of a client's rows, for every θ (h·d, d)."""

        def run(sent: dict[str, Tensor], local: Local) -> Reply:
            phi, one, two = self._both(task, sent, local.data)
            others = (one.T @ phi)[None] - one[:, :, None] * phi[:, None]  # of each row's partners (n, h, d)
            left = two[:, :, None] * others / pairs(local.data)
            return Reply(Outer(left.flatten(1), phi), evidence(local.data))

        return ClientStep(run)

    @client_step
    def apply(self, task: Task) -> ClientStep:
        """The symmetric part of the same matrix, applied to Q (d, h·k)."""

        def run(sent: dict[str, Tensor], local: Local) -> Reply:
            phi, one, two = self._both(task, sent, local.data)
            seen = projected(phi, sent["Q"])

            def against(own: Tensor, other: Tensor) -> Tensor:
                each = other[:, :, None] * seen
                return own[:, :, None] * (each.sum(0) - each)

            right = (against(one, two) + against(two, one)) / 2 if self.noise else against(one, one)
            return Reply(Outer(phi, (right / pairs(local.data)).flatten(1)), evidence(local.data))

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
        ell = self.ell or 0  # it has been settled

        def run(sent: dict[str, Tensor], local: Local) -> Reply:
            theta, projection = sent["theta"], sent["U"]
            rows = pick(local.data, local.draws["rows"])
            phi = features(task, rows)
            e = residuals(phi, rows, theta[None]) * (phi @ projection)  # Ûᵀε (2ℓ, k)
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

    def _both(self, task: Task, sent: dict[str, Tensor], data: Data) -> tuple[Tensor, Tensor, Tensor]:
        """φ (n, d), and y - ⟨φ, θ⟩ (n, h) under the two copies of the anchors' models."""
        phi = features(task, data)
        one = residuals(phi, data, sent["theta"])
        return phi, one, residuals(phi, data, sent["theta~"]) if self.noise else one

    def _one_pair(self, task: Task, *, transposed: bool) -> ClientStep:
        to, of = (1, 0) if transposed else (0, 1)

        def run(sent: dict[str, Tensor], local: Local) -> Reply:
            phi, one, two = self._both(task, sent, local.data)
            seen = projected(phi[of][None], sent["Q"])
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
            return exact(sums.update[0] / sums.weight[0])

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

    def _settled(self, k: int, d: int, cohort: Cohort, key: Key) -> MomentDescent:
        """The same with a value for each setting that was left open."""
        subspace = self.subspace
        if subspace == "auto":
            subspace = "pooled" if d <= self.orthogonal * k else "symmetric"
        usual = replace(self, anchors=self.anchors or covering(k), subspace=subspace, ell=self.ell or 6 * k)
        large = cohort.sizes[cohort.sizes >= 2 * LEAST].sort(descending=True).values[: usual.anchors]
        rows = int(large[-1]) if len(large) else 0  # of the smallest anchor
        if self.reuse is None:
            fresh = replace(usual, reuse=False)
            if rows >= fresh.rows_needed and isinstance(fresh.recruits(k, d, cohort, key), Population):
                return fresh
            usual = replace(usual, reuse=True)
        if self.ell is None and rows < usual.rows_needed:
            return replace(usual, ell=max(LEAST, 6 * k * rows // usual.rows_needed))
        return usual

    def _check(self, k: int) -> None:
        if self.merge == "distance" and self.delta is None:
            raise ValueError("MomentDescent: merge='distance' needs delta, the separation Δ of the models")
        if (self.anchors or 0) < k:
            raise ValueError(f"MomentDescent: anchors must be at least k = {k}, got {self.anchors}")
