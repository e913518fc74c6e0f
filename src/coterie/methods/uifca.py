"""UIFCA: K generative models, and every point of every client goes to the one under which it is likeliest.

Efficient Clustering Frameworks for Federated Learning Systems
    Jichan Chung. UCB/EECS-2023-212, Chapter 4, Algorithms 3 to 5.

Line numbers in the comments are those of Algorithm 3 unless they say otherwise. A round here is a cluster round. Points
that are wrongly assigned hold on to their cluster if its model has overfitted them, which the report leaves as an open
problem (Section 4.3); our answer is to shrink, as strongly as `UIFCA.chosen` finds best.

Throughout, r is the restarts that run side by side, k the clusters, n the points of a client, d their dimensions.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from coterie.core.cohort import Cohort
from coterie.core.key import Key
from coterie.core.local import adam_update, each_model, each_nearest, local_update, remembered
from coterie.core.method import Needs, PointMethod, Report
from coterie.core.pytree import Outer, Params, stack, take, tree_map
from coterie.core.registry import register
from coterie.core.settings import setting
from coterie.core.step import ClientStep, Local, Reply, client_step
from coterie.core.sums import slot_mean
from coterie.core.task import Data, Task
from coterie.methods.kfed import KFED, TooFewCentres
from coterie.parts.columns import check_columns
from coterie.parts.held_out import held_out, surprise
from coterie.parts.restarts import Restarts
from coterie.parts.shrinkage import Moments, covariances
from coterie.parts.starts import find_start

log = logging.getLogger("coterie")

SETTLED = 0.02  # the share of points that change their cluster below which a restart begins to shrink
PULLS = (0.0, 0.1, 1.0)  # strengths of shrinking that are tried
RIDGE = 1e-3  # at least, of the models that judge: they see fewer points than the others
NOISE = 0.01  # by which the models of a restart differ at first
_LABELS, _BATCHES, _MODELS = 4, 5, 6  # streams under a key


class State(NamedTuple):
    """What the server knows after a cluster round."""

    theta: Params  # θ_k of every restart (r, k, …)
    moments: Moments | tuple[()]  # of the points assigned to each cluster, where models have a closed form
    held: Moments | tuple[()]  # of the held-out ones among them, if they are to judge
    sizes: Tensor  # |S_k| (r, k)
    moved: Tensor  # points that changed their cluster in the last assignment (r,)
    quality: Tensor  # by which restarts are compared: how unlikely held-out points are, or all if none is (r,)
    shrinks: Tensor  # restarts in which it is weighed whether to shrink (r,)
    weighed: Tensor  # those in which it was (r,)
    pull: Tensor  # how strongly they were shrunk (r,)
    clients: int
    round: int


@register("disturbed", "start")
@dataclass(frozen=True)
class Disturbed:
    """An initial assignment by the true cluster, of which some are drawn anew: to see what a method makes of errors.

    Args:
        share: Points whose cluster is drawn anew.
    """

    share: float = setting(0.25, low=0, high=1)


@register("uifca")
@dataclass(frozen=True)
class UIFCA(Restarts, PointMethod):
    """Alternate between fitting one generative model per cluster and assigning every point to the likeliest.

    Args:
        k: K, the clusters.
        init: The initial assignment: "random", "kfed" (k-FED + UIFCA), or "mixed", of whose restarts one is from k-FED
            and the others random; k state dicts assign by likelihood.
        restarts: Assignments that are run side by side; kept is the one under whose mixture of models held-out points
            are likeliest. The likelihood of the points that models were fitted to would prefer what overfits most.
        shrink: Whether, once few points move, each model is shrunk towards what the clusters have in common, by as
            much as it is likely to have overfitted, if this makes held-out points likelier. It needs a closed form, or
            a model that names its `location`.
        ridge: Added to variances, as a part of the mean one.
        tau: τ, communication rounds of a cluster round, for models without a closed form.
        steps: M, gradient steps of a client in a communication round.
        batch: N, points of a step, out of those assigned to the model that takes it; None takes all.
        lr: η, in the first communication round of a cluster round.
        decay: η shrinks to so much of it from each communication round to the next.
        optimiser: "sgd", as the report has it, or "adam", whose moments begin anew in every communication round.
        renew: Whether models are drawn anew in every cluster round (Algorithm 4, line 3), or go on from the last.
        closed: Whether to use the closed form where the model has one.

    Example:
        >>> import coterie as ct
        >>> task = ct.Task.density(ct.models.AffineFlow(32))
        >>> run = ct.fit(ct.UIFCA(k=4), task, ct.data.subspace_clusters(k=4, p=0.5, seed=0), rounds=20)
        >>> run.purity
        1.0
    """

    needs = Needs(task="density", points=True)

    k: int = setting(low=1)
    init: Literal["mixed", "random", "kfed"] | Disturbed | Sequence[Params] = "mixed"
    restarts: int = setting(10, low=1)
    shrink: bool = True
    ridge: float = setting(1e-3, low=0)
    tau: int = setting(20, low=1)
    steps: int = setting(10, low=1)
    batch: int | None = setting(None, low=1)
    lr: float = setting(0.01, low=0)
    decay: float = setting(1.0, low=0, high=1)
    optimiser: Literal["sgd", "adam"] = "sgd"
    renew: bool = False
    closed: bool = True

    def start(self, task: Task, cohort: Cohort, key: Key) -> State:
        """Line 1: the initial assignment, which each client keeps for itself."""
        self.check_points(cohort)
        theta = self._drawn(task, key.fold(_MODELS))
        if self._by_kfed:
            sent = self._from_kfed(cohort, key)
        elif isinstance(self.init, str | Disturbed):
            sent = {}
        else:
            given = find_start(self.init, self.k)(self.k, self.lr, task, cohort, key)
            theta = tree_map(lambda x: x.expand(self.restarts, *x.shape), given)
            sent = {"theta": theta}
        sent["about"] = self._mean(cohort) if self._has_closed_form(task) else ()
        sums = cohort.combine(self.begin, sent)
        state = self._after(theta, sums.update, sent["about"], cohort, None)
        if isinstance(state.moments, Moments):
            number, first, second, about = state.moments
            check_columns(Moments(number[0], first[0], second[0], about), self.ridge, warn=cohort.engine.leads)
        return state

    def _from_kfed(self, cohort: Cohort, key: Key) -> dict[str, Any]:
        """The centres of k-FED; none if it finds too few and there are restarts that do without."""
        kfed = KFED(self.k)
        try:
            state, _ = kfed.round(kfed.start(kfed.default_task(), cohort, key), cohort)
        except TooFewCentres as error:
            told = f"UIFCA: init {self.init!r} begins with k-FED, which found {error.found} centres for k = {self.k}"
            if self.init == "kfed" or self.restarts == 1:
                raise ValueError(f"{told}; init='random' does without") from error
            log.warning("%s; all restarts begin with a random assignment", told)
            return {}
        return {"centres": kfed.models(state)}

    def round(self, state: State, cohort: Cohort) -> tuple[State, Report]:
        """Lines 3 to 7."""
        theta, pull, unlikely = self.chosen(state, cohort)  # line 5
        about = state.moments.about if isinstance(state.moments, Moments) else ()
        sums = cohort.combine(self.reassign, {"theta": theta, "about": about})  # line 7
        before = state._replace(pull=pull, quality=unlikely, weighed=state.shrinks)
        after = self._after(theta, sums.update, about, cohort, before)
        return after, Report(cohort.clients, sums.note["loss"][:, self.best(after)])

    @client_step
    def begin(self, task: Task) -> ClientStep:
        """Line 1 at one client."""
        kfed = KFED(self.k).points(task)

        def run(sent: dict[str, Any], local: Local) -> Reply:
            label = local.draws["label"]
            if "theta" in sent:
                label = self._losses(task, sent["theta"], local.data).argmin(1)
            elif isinstance(self.init, Disturbed):
                label = torch.where(label < 0, local.data.y, label)
            elif "centres" in sent:
                own = kfed.run(sent["centres"], local._replace(draws=local.draws["kfed"])).note["label"]
                first = torch.arange(self.restarts, device=own.device)[:, None] < self._by_kfed
                label = torch.where(first, own, label)
            nothing = local.data.mask.new_zeros(self.restarts)
            return self._counted(label.clamp(0, self.k - 1), label, sent["about"], local, nothing)

        def draw(n: int, key: Key, when: tuple[int, ...]) -> dict[str, Any]:
            g = key.fold(_LABELS).generator()
            label = torch.randint(self.k, (self.restarts, n), generator=g)
            if isinstance(self.init, Disturbed):
                label = label.where(torch.rand(self.restarts, n, generator=g) < self.init.share, -1)
            return {"label": label, "kfed": kfed.draw(n, key, when) if kfed.draw else {}, "held": held_out(n, key)}

        return ClientStep(run, draw, {"loss": "mean"})

    @client_step
    def reassign(self, task: Task) -> ClientStep:
        """Line 7 at one client: every point to the model under which it is likeliest."""

        def run(sent: dict[str, Any], local: Local) -> Reply:
            near = self._losses(task, sent["theta"], local.data)
            label, loss = near.argmin(1), near.amin(1) @ local.data.mask
            return self._counted(label, remembered(local.memory, len(local.data.mask)), sent["about"], local, loss)

        return ClientStep(run, _held, {"loss": "mean"})

    @client_step
    def learn(self, task: Task) -> ClientStep:
        """Algorithm 5 for all models that are sent (r·c·k, …), each on the points that are assigned to it.

        For every restart there may be several candidates, c, for its k models.
        """
        holds = self._weighs(task) or self.compares

        def run(sent: dict[str, Any], local: Local) -> Reply:
            own = self._members(remembered(local.memory, len(local.data.mask)), local.data)
            if holds:
                own = own * (local.draws["held"] <= 0)
            own = self._candidates(own, sent["theta"])

            def train(theta: Params, mask: Tensor) -> Params:
                data = local.data._replace(mask=mask)
                batches = self._subsets(mask, local.draws["rank"]) if self.batch else None  # line 4
                if self.optimiser == "adam":
                    return adam_update(task, theta, data, lr=sent["lr"], tau=self.steps, batches=batches)
                return local_update(task, theta, data, lr=sent["lr"], tau=self.steps, batches=batches)[0]

            end = each_model(train)(sent["theta"], own)
            slot = torch.arange(len(own), device=own.device)
            return Reply(end, own.sum(1), slot, memory=local.memory)

        def draw(n: int, key: Key, when: tuple[int, ...]) -> dict[str, Any]:
            rank = torch.randperm(n, generator=key.fold(_BATCHES, *when).generator())
            return {"held": held_out(n, key), "rank": rank}

        return ClientStep(run, draw)

    @client_step
    def judge(self, task: Task) -> ClientStep:
        """How unlikely held-out points are under the mixture of each candidate's models (r·c,)."""

        def run(sent: dict[str, Any], local: Local) -> Reply:
            losses = each_model(lambda t: task.loss(t, local.data))(sent["theta"])
            update = surprise(losses.unflatten(0, sent["share"].shape), sent["share"], local)
            return Reply(update, memory=local.memory)

        return ClientStep(run, _held)

    @client_step
    def points(self, task: Task) -> ClientStep:
        """Line 7 alone, for the models of one restart."""

        def run(theta: Params, local: Local) -> Reply:
            return Reply(note={"label": each_nearest(task, theta, local.data)})

        return ClientStep(run)

    @client_step
    def total(self, task: Task) -> ClientStep:
        """The sum of a client's points."""

        def run(_: Any, local: Local) -> Reply:
            update = local.data.x.flatten(1).T @ local.data.mask
            return Reply(update / local.data.mask.sum(), local.data.mask.sum())

        return ClientStep(run)

    def join(self, state: State, newcomers: Cohort) -> State:
        """Line 7 for the points of clients that are new, who remember it; sums will have them after the next round."""
        about = state.moments.about if isinstance(state.moments, Moments) else ()
        newcomers.combine(self.begin, {"theta": state.theta, "about": about})
        return super().join(state, newcomers)

    def members(self, state: State) -> Tensor:
        """Points of each cluster, in the best restart."""
        return state.sizes[self.best(state)]

    def changed(self, before: State, after: State) -> int:
        """Points that changed their cluster, in the best restart."""
        return int(after.moved[self.best(after)])

    def done(self, state: State) -> bool:
        """Once no point moves in any restart, and in all it was weighed whether to shrink."""
        return state.round > 0 and bool((state.moved == 0).all()) and (bool(state.weighed.all()) or not self.shrink)

    # --- what a client does --------------------------------------------------------------------------------------

    def _counted(self, label: Tensor, before: Tensor, about: Any, local: Local, loss: Tensor) -> Reply:
        """The reply to an assignment (r, n): sums over the points of every cluster. The assignment stays here."""
        own = self._members(label, local.data)
        moved = ((label != before) * local.data.mask).sum(1)
        update: dict[str, Any] = {"sizes": own.sum(2), "moved": moved, "loss": loss}
        if isinstance(about, Tensor):
            x = (local.data.x.flatten(1) - about).double()  # a covariance is a small difference of such sums
            update["all"] = _sums(own.double(), x)
            if self.compares or self.shrink:
                update["held"] = _sums((own * local.draws["held"]).double(), x)
        note = {"loss": loss / local.data.mask.sum()}
        return Reply(update, note=note, memory=label)

    def _losses(self, task: Task, theta: Params, data: Data) -> Tensor:
        """The loss of every point under every model (r, k, n); infinite where it is no number."""
        models = tree_map(lambda x: x.flatten(0, 1), theta)
        losses = each_model(lambda t: task.loss(t, data))(models).unflatten(0, (self.restarts, self.k))
        return losses.nan_to_num(nan=torch.inf, posinf=torch.inf)

    def _members(self, label: Tensor, data: Data) -> Tensor:
        """1 where a real point is in a cluster (r, k, n)."""
        return (label[:, None] == torch.arange(self.k, device=label.device)[:, None]) * data.mask

    def _candidates(self, own: Tensor, theta: Params) -> Tensor:
        """The members of all models that are sent (r·c·k, n), from those of every restart's clusters (r, k, n)."""
        candidates = len(next(iter(theta.values()))) // (self.restarts * self.k)
        return own[:, None].expand(-1, candidates, -1, -1).flatten(0, 2)

    def _subsets(self, mask: Tensor, rank: Tensor) -> Tensor:
        """Algorithm 5, line 4: rows of every step (M, N), out of the real ones in a random order, again and again."""
        order = torch.where(mask > 0, rank, len(rank)).argsort()
        place = torch.arange(self.steps * (self.batch or 1), device=mask.device) % mask.sum().long().clamp(min=1)
        return order.index_select(0, place).reshape(self.steps, -1)

    # --- what the server does ------------------------------------------------------------------------------------

    def chosen(self, state: State, cohort: Cohort) -> tuple[Params, Tensor, Tensor]:
        """Algorithm 4 for the K models of every restart, shrunk as strongly as makes held-out points likeliest.

        Held-out points train no model that they judge: one that had seen them would pass for a good one. Restarts that
        do not shrink yet are left alone.

        Returns:
            The models, how strongly they were shrunk (r,), and, if it was asked, how unlikely held-out points are (r,).
        """
        task = cohort.task
        pulls = torch.tensor(PULLS if self._weighs(task) and bool(state.shrinks.any()) else PULLS[:1])
        asked = self.compares or len(pulls) > 1
        tried, share = {}, state.sizes
        if not isinstance(state.moments, Moments):
            tried, share = self._trained(state, pulls, cohort)
        elif asked:
            tried, share = self._unseen(state, pulls, task)
        unlikely = torch.zeros(self.restarts, len(pulls))
        if asked:
            sent = {"theta": tree_map(lambda x: x.flatten(0, 1), tried), "share": share}
            unlikely = cohort.combine(self.judge, sent).update[0].cpu().reshape(unlikely.shape)
        best = torch.where(state.shrinks, unlikely.argmin(1), 0)
        if isinstance(state.moments, Moments):
            theta = self._fitted(state, state.moments, pulls[best], task, self.ridge)
        else:
            theta = take(tried, best + len(pulls) * torch.arange(self.restarts))
        return theta, pulls[best], unlikely.gather(1, best[:, None])[:, 0]

    def _trained(self, state: State, pulls: Tensor, cohort: Cohort) -> tuple[Params, Tensor]:
        """Models for every restart and strength (r·c, k, …), by averaging; and their shares of the mixture."""
        begin = self._drawn(cohort.task, cohort.key.fold(_MODELS, state.round)) if self.renew else state.theta
        begin = tree_map(lambda x: x.repeat_interleave(len(pulls), 0), begin)
        sizes = state.sizes.repeat_interleave(len(pulls), 0)
        theta = self.averaged(begin, pulls.repeat(self.restarts), sizes, cohort)
        return theta, sizes / sizes.sum(1, keepdim=True)

    def _unseen(self, state: State, pulls: Tensor, task: Task) -> tuple[Params, Tensor]:
        """The same in closed form, of sums without the held-out points."""
        assert isinstance(state.moments, Moments) and isinstance(state.held, Moments)
        seen = state.moments.less(state.held).each(len(pulls))
        number = seen.number.where(seen.number > 1, 0.0)  # of one point there is no model that has not seen the others
        old = state._replace(theta=tree_map(lambda x: x.repeat_interleave(len(pulls), 0), state.theta))
        theta = self._fitted(old, seen, pulls.repeat(self.restarts), task, max(self.ridge, RIDGE))
        return theta, (number / number.sum(1, keepdim=True).clamp(min=1)).float()

    def averaged(self, theta: Params, pull: Tensor, sizes: Tensor, cohort: Cohort) -> Params:
        """τ rounds of averaging for models (r, k, …), each restart's pulled together as strongly as `pull` says (r,).

        Args:
            theta: The models to begin with.
            pull: How strongly: 0 leaves each to itself, 1 makes all but their locations the same.
            sizes: Points of every cluster (r, k).
            cohort: The clients.
        """
        shape = sizes.shape
        share = sizes / sizes.sum(1, keepdim=True)
        for t in range(self.tau):
            flat = tree_map(lambda x: x.flatten(0, 1), theta)
            lr = torch.tensor(self.lr * self.decay**t)
            sums = cohort.fold(t).combine(self.learn, {"theta": flat, "lr": lr}, slots=len(pull) * self.k)
            theta = tree_map(lambda x: x.unflatten(0, shape), slot_mean(sums, otherwise=flat))  # Algorithm 4, line 7
            theta = self._pulled(theta, share, pull, cohort.task)
        return theta

    def _pulled(self, theta: Params, share: Tensor, pull: Tensor, task: Task) -> Params:
        """All parameters but those of location nearer to their mean over clusters."""

        def nearer(x: Tensor) -> Tensor:
            common = torch.einsum("rk,rk...->r...", share.to(x), x)[:, None]
            return torch.lerp(x, common.expand_as(x), pull.to(x).reshape(-1, *[1] * (x.dim() - 1)))

        return {name: x if name in task.location else nearer(x) for name, x in theta.items()}

    def _fitted(self, state: State, moments: Moments, pull: Tensor, task: Task, ridge: float) -> Params:
        """The likeliest models; a cluster of one point or none keeps its old one."""
        assert task.from_moments is not None
        mean, covariance = covariances(moments, pull, ridge)
        enough = moments.number > 1
        covariance = _where(enough, covariance, torch.eye(mean.shape[-1]).to(mean).expand_as(covariance))
        try:
            found = task.from_moments(mean, covariance)
        except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage] - torch documents it
            raise ValueError(self._singular(state, moments, covariance)) from None
        return {n: _where(enough, found[n].to(old), old) for n, old in state.theta.items()}

    def _after(self, theta: Params, update: Any, about: Any, cohort: Cohort, before: State | None) -> State:
        found = {name: update[name][0].cpu() for name in ("sizes", "moved", "loss")}
        points = float(cohort.sizes.sum())
        settled, quality = torch.zeros(self.restarts, dtype=torch.bool), found["loss"]
        if before and bool(before.quality.any()):
            quality = before.quality
        if before and self.shrink:
            settled = before.shrinks | (found["moved"] <= SETTLED * points)
        return State(
            theta=theta,
            moments=self._moments(update.get("all"), about),
            held=self._moments(update.get("held"), about),
            sizes=found["sizes"],
            moved=found["moved"],
            quality=quality.nan_to_num(nan=torch.inf),
            shrinks=settled,
            weighed=before.weighed if before else torch.zeros_like(settled),
            pull=before.pull if before else torch.zeros(self.restarts),
            clients=cohort.population,
            round=before.round + 1 if before else 0,
        )

    def _moments(self, sums: dict[str, Tensor] | None, about: Any) -> Moments | tuple[()]:
        """From what clients sent; on the device, for what is made of them is most of the server's work."""
        if sums is None:
            return ()
        second = sums["second"][0].unflatten(0, (self.restarts, self.k, -1))
        return Moments(sums["number"][0].double(), sums["first"][0].double(), second.double(), about)

    def _drawn(self, task: Task, key: Key) -> Params:
        """One random model, with a little noise of its own for each cluster and restart (r, k, …)."""

        def near(theta: Params, key: Key) -> Params:
            g = key.generator()
            return {n: x + NOISE * torch.randn(x.shape, generator=g) for n, x in theta.items()}

        firsts = [task.init(key.fold(r)) for r in range(self.restarts)]
        return stack([stack([near(t, key.fold(r, j)) for j in range(self.k)]) for r, t in enumerate(firsts)])

    def _mean(self, cohort: Cohort) -> Tensor:
        """The mean of all points, about which sums of squares are taken so that they keep their digits."""
        sums = cohort.combine(self.total, ())
        return (sums.update[0] / sums.weight[0]).detach()

    def _weighs(self, task: Task) -> bool:
        """Whether models may be shrunk, and some points are held out to tell how strongly."""
        return self.shrink and (bool(task.location) or self._has_closed_form(task))

    def _has_closed_form(self, task: Task) -> bool:
        return self.closed and task.from_moments is not None

    @property
    def _by_kfed(self) -> int:
        """Restarts that begin with k-FED's assignment."""
        return {"kfed": self.restarts, "mixed": 1}.get(self.init, 0) if isinstance(self.init, str) else 0

    def _singular(self, state: State, moments: Moments, covariance: Tensor) -> str:
        """What to tell if a covariance has no inverse."""
        r, j = (torch.linalg.cholesky_ex(covariance).info > 0).nonzero()[0].tolist()
        return (
            f"UIFCA: round {state.round + 1}: the covariance of cluster {j} ({int(moments.number[r, j])} points in "
            f"{covariance.shape[-1]} dimensions) is singular with a ridge of {self.ridge:g}; a larger one helps"
        )


def _held(n: int, key: Key, when: tuple[int, ...]) -> dict[str, Any]:
    """What a step draws that needs nothing but to know which points are held out."""
    return {"held": held_out(n, key)}


def _sums(own: Tensor, x: Tensor) -> dict[str, Any]:
    """How many points of x (n, d) are in every cluster, where `own` (r, k, n) is 1, and their moments."""
    left = own.flatten(0, 1).T[:, :, None] * x[:, None]  # (n, r·k, d)
    return {"number": own.sum(2), "first": own @ x, "second": Outer(left.flatten(1), x)}


def _where(which: Tensor, new: Tensor, old: Tensor) -> Tensor:
    return torch.where(which.to(old.device).reshape(*which.shape, *[1] * (old.dim() - which.dim())), new, old)
