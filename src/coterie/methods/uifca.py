"""UIFCA: K generative models, and every point of every client goes to the one under which it is likeliest.

Efficient Clustering Frameworks for Federated Learning Systems
    Jichan Chung. UCB/EECS-2023-212, Chapter 4, Algorithms 3 to 5.

Line numbers in the comments are those of Algorithm 3 unless they say otherwise. A round here is a cluster round. What
is not in the report: models in closed form (`parts/closed_form.py`), points that count for several clusters
(`parts/mixture.py`), and models that are shrunk, as strongly as held-out points find best (`parts/candidates.py`).

Throughout, r is the restarts that run side by side, k the clusters, n the points of a client, d their dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from coterie.core.cohort import Cohort
from coterie.core.key import Key
from coterie.core.local import each_model, local_update, remembered
from coterie.core.method import Needs, PointMethod, Report
from coterie.core.optimisers import find_optimiser
from coterie.core.pytree import Params, stack, to_server, tree_map
from coterie.core.registry import register
from coterie.core.settings import setting
from coterie.core.step import ClientStep, Local, Reply, client_step
from coterie.core.sums import slot_mean
from coterie.core.task import Data, Task
from coterie.methods.kfed import KFED
from coterie.parts.candidates import SETTLED, Candidates, draw_held_out, for_each_candidate
from coterie.parts.first_assignment import Disturbed, FirstAssignment
from coterie.parts.held_out import held_out
from coterie.parts.mixture import joint, own_shares
from coterie.parts.shrinkage import Moments
from coterie.parts.starts import find_start, noisy_copies

_BATCHES, _MODELS = 5, 6  # streams under a key


class State(NamedTuple):
    """What the server knows after a cluster round."""

    theta: Params  # θ_k of every restart (r, k, …)
    share: Tensor  # of each cluster in the mixture of these models (r, k)
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


@register("uifca")
@dataclass(frozen=True)
class UIFCA(Candidates, FirstAssignment, PointMethod):
    """Alternate between fitting one generative model per cluster and assigning every point to the likeliest.

    Args:
        k: K, the clusters.
        init: The initial assignment: "random", "kfed" (k-FED + UIFCA), "centres", of whose restarts one is from k-FED
            and the others from k-means over the clients' centres, each from seeds of its own; or "mixed", where the
            others are random. k state dicts assign by likelihood.
        mixture: Whether a point counts for every cluster, by how likely it is to be in it, and a cluster's share of the
            client's points counts in its assignment; for models with a closed form. The report has each point in one
            cluster, and all clusters alike.
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
    quick = {"restarts": 2}

    k: int = setting(low=1)
    init: Literal["centres", "mixed", "random", "kfed"] | Disturbed | Sequence[Params] = "centres"
    mixture: bool = True
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

    @property
    def favours_first(self) -> bool:
        """Whether the first restart, from k-FED, is kept unless another is clearly better."""
        return self.init == "centres"

    def start(self, task: Task, cohort: Cohort, key: Key) -> State:
        """Line 1: the initial assignment, which each client keeps for itself."""
        self.check_points(cohort)
        theta, sent = self.drawn_models(task, key.fold(_MODELS)), {}
        share = torch.full((self.restarts, self.k), 1 / self.k)
        if self.by_kfed:
            sent = self.centres_by(KFED(self.k), KFED(self.k, local=self.k).cluster, cohort, key)
        elif not isinstance(self.init, str | Disturbed):
            given = find_start(self.init, self.k)(self.k, self.lr, task, cohort, key)
            theta = tree_map(lambda x: x.expand(self.restarts, *x.shape), given)
            sent = {"theta": theta, "share": share}
        about = self.mean_point(cohort)
        sums = cohort.combine(self.begin, {**sent, "about": about})
        state = self._after(theta, share, sums.update, about, cohort, None)
        self.check_columns(state.moments, cohort)
        return state

    def round(self, state: State, cohort: Cohort) -> tuple[State, Report]:
        """Lines 3 to 7."""
        theta, pull, unlikely = self.chosen(state, cohort)  # line 5
        about = state.moments.about if isinstance(state.moments, Moments) else ()
        share = self._share(state)
        sums = cohort.combine(self.reassign, {"theta": theta, "share": share, "about": about})  # line 7
        before = state._replace(pull=pull, quality=unlikely, weighed=state.shrinks)
        after = self._after(theta, share, sums.update, about, cohort, before)
        return after, Report(cohort.clients, sums.note["loss"][:, self.best(after)])

    @client_step
    def begin(self, task: Task) -> ClientStep:
        """Line 1 at one client."""
        kfed = KFED(self.k).points(task)

        def run(sent: dict[str, Any], local: Local) -> Reply:
            label = local.draws["label"]
            if "theta" in sent:
                label = self._likely(task, sent, local.data).argmax(1)
            elif isinstance(self.init, Disturbed):
                label = torch.where(label < 0, local.data.y, label)
            if "seeds" in sent:
                label = self.nearest_seeds(local.data.x, sent["seeds"])
            if "centres" in sent:
                own = kfed.run(sent["centres"], local._replace(draws=local.draws["kfed"])).note["label"]
                label = self.labels_by(own, label)
            first, nothing = label.clamp(0, self.k - 1), local.data.mask.new_zeros(self.restarts)
            return self._counted(first, label, self._members(first, local.data), sent["about"], local, nothing)

        def draw(n: int, key: Key, when: tuple[int, ...]) -> dict[str, Any]:
            drawn = {"label": self.draw_labels(n, key), "held": held_out(n, key)}
            return {**drawn, "kfed": kfed.draw(n, key, when) if kfed.draw else {}}

        return ClientStep(run, draw, {"loss": "mean"})

    @client_step
    def reassign(self, task: Task) -> ClientStep:
        """Line 7 at one client: every point to the model under which it is likeliest."""
        mixes = self.mixes(task)

        def run(sent: dict[str, Any], local: Local) -> Reply:
            likely, before = self._likely(task, sent, local.data), remembered(local.memory, len(local.data.mask))
            label = likely.argmax(1)
            own = likely.softmax(1) * local.data.mask if mixes else self._members(label, local.data)
            loss = -(likely.logsumexp(1) if mixes else likely.amax(1)) @ local.data.mask
            return self._counted(label, before, own, sent["about"], local, loss)

        return ClientStep(run, draw_held_out, {"loss": "mean"})

    @client_step
    def learn(self, task: Task) -> ClientStep:
        """Algorithm 5 for all models that are sent (r·c·k, …), each on the points that are assigned to it.

        For every restart there may be several candidates, c, for its k models.
        """
        holds, optimiser = self.weighs(task) or self.compares, find_optimiser(self.optimiser, "UIFCA: optimiser")

        def run(sent: dict[str, Any], local: Local) -> Reply:
            own = self._members(remembered(local.memory, len(local.data.mask)), local.data)
            if holds:
                own = own * (local.draws["held"] <= 0)
            own = for_each_candidate(own, sent["theta"])

            def train(theta: Params, mask: Tensor) -> Params:
                data = local.data._replace(mask=mask)
                batches = self._subsets(mask, local.draws["rank"]) if self.batch else None  # Algorithm 5, line 4
                given = {"lr": sent["lr"], "tau": self.steps, "batches": batches, "optimiser": optimiser}
                return local_update(task, theta, data, **given).theta

            end = each_model(train)(sent["theta"], own)
            slot = torch.arange(len(own), device=own.device)
            return Reply(end, own.sum(1), slot, memory=local.memory)

        def draw(n: int, key: Key, when: tuple[int, ...]) -> dict[str, Any]:
            rank = torch.randperm(n, generator=key.fold(_BATCHES, *when).generator())
            return {"held": held_out(n, key), "rank": rank}

        return ClientStep(run, draw)

    @client_step
    def points(self, task: Task) -> ClientStep:
        """Line 7 alone, for the models of one restart."""

        def run(sent: dict[str, Any], local: Local) -> Reply:
            one = tree_map(lambda x: x[None], sent)
            return Reply(note={"label": self._likely(task, one, local.data)[0].argmax(0)})

        return ClientStep(run)

    def asked(self, state: State) -> dict[str, Any]:
        """The models of the best restart, and the clusters' shares."""
        return {"theta": self.models(state), "share": state.share[self.best(state)]}

    def models_asked(self, sent: dict[str, Any]) -> Params:
        """The models."""
        return sent["theta"]

    def assign_points(self, state: State, task: Task, data: Data) -> Tensor:
        """Line 7 for the rows of one client, who may have taken no part."""
        sent = tree_map(lambda x: x[None].to(data.mask.device), self.asked(state))
        return self._likely(task, sent, data)[0].argmax(0)

    def join(self, state: State, newcomers: Cohort) -> State:
        """Line 7 for the points of clients that are new, who remember it; sums will have them after the next round."""
        about = state.moments.about if isinstance(state.moments, Moments) else ()
        newcomers.combine(self.begin, {"theta": state.theta, "share": state.share, "about": about})
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

    def _counted(self, label: Tensor, before: Tensor, own: Tensor, about: Any, local: Local, loss: Tensor) -> Reply:
        """The reply to an assignment (r, n): sums over the points of every cluster. The assignment stays here.

        Args:
            label: The assignment.
            before: The one before.
            own: How much each point counts for every cluster (r, k, n).
            about: The common point of all sums of moments.
            local: The client's.
            loss: The sum over its points (r,).
        """
        moved = ((label != before) * local.data.mask).sum(1)
        sizes = self._members(label, local.data).sum(2)
        update: dict[str, Any] = {"sizes": sizes, "moved": moved, "loss": loss}
        update |= self.moment_sums(own, about, local, held=self.compares or self.shrink)
        note = {"loss": loss / local.data.mask.sum()}
        return Reply(update, note=note, memory=label)

    def _likely(self, task: Task, sent: dict[str, Any], data: Data) -> Tensor:
        """How likely every point is under every model (r, k, n), its cluster's share of the points included or not."""
        models = tree_map(lambda x: x.flatten(0, 1), sent["theta"])
        losses = each_model(lambda t: task.loss(t, data))(models).unflatten(0, sent["share"].shape)
        if self.mixes(task):
            return joint(losses, own_shares(losses, sent["share"], data.mask))
        return -losses.nan_to_num(nan=torch.inf, posinf=torch.inf)

    def _members(self, label: Tensor, data: Data) -> Tensor:
        """1 where a real point is in a cluster (r, k, n)."""
        return (label[:, None] == torch.arange(self.k, device=label.device)[:, None]) * data.mask

    def _subsets(self, mask: Tensor, rank: Tensor) -> Tensor:
        """Algorithm 5, line 4: rows of every step (M, N), out of the real ones in a random order, again and again."""
        order = torch.where(mask > 0, rank, len(rank)).argsort()
        place = torch.arange(self.steps * (self.batch or 1), device=mask.device) % mask.sum().long().clamp(min=1)
        return order.index_select(0, place).reshape(self.steps, -1)

    # --- what the server does ------------------------------------------------------------------------------------

    def averaged(self, theta: Params, pull: Tensor, sizes: Tensor, cohort: Cohort) -> Params:
        """Algorithm 4 for models (r, k, …), each restart's pulled together as strongly as `pull` says (r,).

        Args:
            theta: The models to begin with.
            pull: How strongly: 0 leaves each to itself, 1 makes all but their locations the same.
            sizes: Points of every cluster (r, k).
            cohort: The clients.
        """
        shape, share = sizes.shape, sizes / sizes.sum(1, keepdim=True)
        for t in range(self.tau):  # Algorithm 4, line 4
            flat = tree_map(lambda x: x.flatten(0, 1), theta)
            lr = torch.tensor(self.lr * self.decay**t)
            sums = cohort.fold(t).combine(
                self.learn, {"theta": flat, "lr": lr}, slots=len(pull) * self.k
            )  # lines 5 and 6
            theta = tree_map(lambda x: x.unflatten(0, shape), slot_mean(sums, otherwise=flat))  # line 7
            theta = self.pulled(theta, share, pull, cohort.task)
        return theta

    def _share(self, state: State) -> Tensor:
        """Each cluster's share of all points (r, k)."""
        number = state.moments.number if isinstance(state.moments, Moments) else state.sizes
        return (number / number.sum(1, keepdim=True)).float()

    def _after(
        self, theta: Params, share: Tensor, update: Any, about: Any, cohort: Cohort, before: State | None
    ) -> State:
        """The next state, of an assignment's sums."""
        found = to_server({name: update[name][0] for name in ("sizes", "moved", "loss")})
        settled, quality = torch.zeros(self.restarts, dtype=torch.bool), found["loss"]
        if before and bool(before.quality.any()):
            quality = before.quality
        if before and self.shrink:
            settled = before.shrinks | (found["moved"] <= SETTLED * float(cohort.sizes.sum()))
        return State(
            theta=theta,
            share=to_server(share),
            moments=self.moments(update.get("all"), about),
            held=self.moments(update.get("held"), about),
            sizes=found["sizes"],
            moved=found["moved"],
            quality=quality.nan_to_num(nan=torch.inf),
            shrinks=settled,
            weighed=before.weighed if before else torch.zeros_like(settled),
            pull=before.pull if before else torch.zeros(self.restarts),
            clients=cohort.population,
            round=before.round + 1 if before else 0,
        )

    def drawn_models(self, task: Task, key: Key) -> Params:
        """Algorithm 4, line 3: a random model of every restart, with a little noise for each cluster (r, k, …)."""
        return stack([noisy_copies(task, self.k, key.fold(r)) for r in range(self.restarts)])
