"""IFCA, the Iterative Federated Clustering Algorithm.

An Efficient Framework for Clustered Federated Learning
    Avishek Ghosh, Jichan Chung, Dong Yin, Kannan Ramchandran. NeurIPS 2020, Algorithm 1.

Line numbers in the comments are those of Algorithm 1; sections are those of the paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import grad

from coterie.algorithms.base import Algorithm, LocalTraining, Report, among, choosing, hold_out, nearest
from coterie.algorithms.starts import Start, find_start
from coterie.client import ClientStep, Local, Plan, Reply, each_start, local_update, mean_loss, pick
from coterie.cohort import Cohort, Sums
from coterie.key import Key
from coterie.settings import setting
from coterie.task import Data, Task
from coterie.tree import Params, stack, take, tree_map


class State(NamedTuple):
    """What IFCA knows after a round; r restarts run side by side."""

    theta: Params  # the cluster models θ_j of every restart (r, k, …)
    labels: Tensor  # each client's last cluster identity (r, m), -1 where it has never taken part or does not tell
    members: Tensor  # clients of each cluster (r, k): by the labels or, where these are not told, of the last round
    quality: Tensor  # the loss by which restarts are compared (r,)
    empty: Tensor  # rounds since each cluster last had a member (r, k)
    still: int  # rounds since a client last changed its cluster
    round: int


@dataclass(frozen=True)
class IFCA(LocalTraining, Algorithm):
    """Alternate between estimating each client's cluster and improving the cluster models.

    Args:
        k: Number of clusters.
        average: "model" (option II: the mean of locally trained models) or "gradient" (option I).
        normalise: Option I divides the summed gradients by the cluster's own weight ("cluster") or by that of all m
            clients ("all", as printed). As printed the larger cluster takes the larger step and tends to win everybody.
        init: The start: "farthest_first", "random" (the paper's), "balanced", "random_groups", one of their classes
            with settings of your own, or k state dicts. Farthest-first loses far fewer groups than random does, and
            costs one exchange in which the server sees the models of some clients.
        restarts: Starts that are run side by side; the best by held-out loss is kept.
        holdout: Share of each client's rows that is kept out of the rounds' training to compare restarts (only if
            restarts > 1; 0 compares by training loss). Starts that train, such as farthest-first, use all rows.
        shared: Names of the parameters that all clusters share (Section 4.1); the others are clustered.
        patience: Once no client has changed its cluster for so many rounds, each is sent its own model only
            (Section 4.1). None always sends all k.
        recheck: While only own models are sent, all k are sent again every so many rounds.
        resample: T, to use fresh rows in each of T rounds, half for choosing and half for stepping (Section 5).
        revive: A cluster that had no member for so many rounds is re-seeded from the client that is served worst.

    Example:
        >>> import coterie as ct
        >>> federation = ct.data.rotated_digits(clients=16, seed=0)
        >>> task = ct.Task.classifier(ct.models.MLP(64, 32, 10))
        >>> run = ct.fit(ct.IFCA(k=4), task, federation, rounds=20, seed=0)
        >>> len(run.models), len(run.labels)
        (4, 16)
    """

    k: int = setting(low=1)
    average: Literal["model", "gradient"] = "model"
    normalise: Literal["cluster", "all"] = "cluster"
    init: str | Start | Sequence[Params] = "farthest_first"
    restarts: int = setting(1, low=1)
    holdout: float = setting(0.2, low=0, high=0.9)
    shared: tuple[str, ...] = ()
    patience: int | None = setting(None, low=1)
    recheck: int = setting(10, low=2)
    resample: int | None = setting(None, low=1)
    revive: int | None = setting(None, low=1)

    def start(self, task: Task, cohort: Cohort, key: Key) -> State:
        """Line 1: the initial models, r times k of them."""
        self._check(task, cohort)
        draw = find_start(self.init, self.k)
        starts = [draw(self.k, self.lr, task, cohort.fold(r), key.fold(r)) for r in range(self.restarts)]
        theta = tree_map(lambda x: x.to(cohort.device), stack(starts))
        for name in self.shared:
            theta[name] = theta[name][:, :1].expand_as(theta[name]).contiguous()
        r, m = self.restarts, cohort.population
        never, none = torch.full((r, m), -1), torch.zeros(r, self.k, dtype=torch.long)
        return State(theta, never, none, torch.full((r,), torch.inf), none.clone(), 0, 0)

    def round(self, state: State, cohort: Cohort) -> tuple[State, Report]:
        """Lines 3 to 15."""
        chosen = cohort.sample(self.fraction)  # line 4: M_t
        slots = self.restarts * self.k
        if self._settled(state):
            rows = (self._first() + state.labels[:, chosen.clients]).T  # (c, r): each client's own model
            sums = chosen.combine(self.follow, self._one_each(state), slots=slots, rows=rows)
        else:
            sums = chosen.combine(self.step, self._broadcast(state), slots=slots)  # lines 3 and 5-12
        theta = self._improve(state, sums, cohort)  # lines 13-15
        labels = state.labels.clone()
        labels[:, chosen.clients] = sums.note["label"].T.cpu()
        members = self._members(labels, sums)
        changed = bool((labels != state.labels).any())
        after = State(
            theta=theta,
            labels=labels,
            members=members,
            quality=_quality(sums.note),
            empty=torch.where(members > 0, 0, state.empty + 1),
            still=0 if changed else state.still + 1,
            round=state.round + 1,
        )
        loss = sums.note["loss"][:, _best(after)]
        return self._revive(after, sums, chosen), Report(chosen.clients, loss)

    def step(self, task: Task) -> ClientStep:
        """Lines 5 to 12 at one client: estimate the cluster, then improve its model."""

        def one_start(theta: Params, common: Params, lr: Tensor, local: Local) -> tuple[Tensor, Tensor, Params, Tensor]:
            whole = {**theta, **tree_map(lambda x: x.expand(self.k, *x.shape), common)}
            j, loss = nearest(task, whole, self._rows(local, "choose"))  # line 6: ĵ
            return j, loss, *self._train(task, take(whole, j), lr, local)

        def run(sent: dict[str, Any], local: Local) -> Reply:
            each = each_start(one_start, in_dims=(0, 0, None, None))
            j, loss, update, held = each(sent["theta"], sent["common"], sent["lr"], local)
            return self._reply(j, loss, update, held, local)

        return ClientStep(run, self._draw(), self._plan(choose=True))

    def follow(self, task: Task) -> ClientStep:
        """Lines 8 to 12 at a client that is sent only the model of its last cluster."""

        def one_start(theta: Params, lr: Tensor, local: Local) -> tuple[Tensor, Params, Tensor]:
            return mean_loss(task, theta, self._rows(local, "choose")), *self._train(task, theta, lr, local)

        def run(sent: dict[str, Any], local: Local) -> Reply:
            each = each_start(one_start, in_dims=(0, 0, None))
            loss, update, held = each(sent["theta"], sent["lr"], local)
            return self._reply(sent["label"], loss, update, held, local)

        return ClientStep(run, self._draw(), self._plan(choose=False))

    def choose(self, task: Task) -> ClientStep:
        """Line 6 alone."""
        return choosing(task)

    def done(self, state: State) -> bool:
        """With re-sampling, once every row has been used."""
        return self.resample is not None and state.round >= self.resample

    def models(self, state: State) -> Params:
        """Line 17: the k models of the best restart."""
        return take(state.theta, _best(state))

    def labels(self, state: State) -> Tensor:
        """The cluster identities of the best restart."""
        return state.labels[_best(state)]

    def members(self, state: State) -> Tensor:
        """How many clients each cluster of the best restart has."""
        return state.members[_best(state)]

    def place(self, state: State, cohort: Cohort) -> Tensor:
        """Line 6 for every client of the cohort."""
        return cohort.gather(self.choose, self.models(state), slots=self.k).slot.cpu()

    def join(self, state: State, newcomers: Cohort) -> State:
        """Line 6 for clients that are new, in the best restart; in the others they have never taken part."""
        self._check(newcomers.task, newcomers)
        labels = torch.full((self.restarts, len(newcomers)), -1)
        if bool((state.labels >= 0).any()):  # else nobody has told a cluster yet, or nobody tells
            labels[_best(state)] = self.place(state, newcomers)
        more = torch.stack([(labels == j).sum(1) for j in range(self.k)], 1)
        return state._replace(labels=torch.cat([state.labels, labels], 1), members=state.members + more)

    def assign(self, state: State, task: Task, data: Data) -> int:
        """Line 6 for a client that may have taken no part in training."""
        return int(nearest(task, self.models(state), data)[0])

    # --- what the server sends -----------------------------------------------------------------------------------

    def _broadcast(self, state: State) -> dict[str, Any]:
        """Line 3: k models, of which the shared parameters are sent once."""
        theta = {n: x for n, x in state.theta.items() if n not in self.shared}
        common = {n: state.theta[n][:, 0] for n in self.shared}
        return {"theta": theta, "common": common, "lr": self.step_size(state.round)}

    def _one_each(self, state: State) -> dict[str, Any]:
        """All models one after the other (r·k, …), from which each client is sent its own."""
        slots = self.restarts * self.k
        theta = tree_map(lambda x: x.flatten(0, 1), state.theta)
        label = torch.arange(self.k).repeat(self.restarts)
        return {"theta": theta, "label": label, "lr": self.step_size(state.round).expand(slots)}

    def _settled(self, state: State) -> bool:
        """Whether identities have been still for long enough to send one model each."""
        if self.patience is None or state.still < self.patience or bool((state.labels < 0).any()):
            return False
        return (state.still - self.patience) % self.recheck != self.recheck - 1

    def _first(self) -> Tensor:
        """The slot of cluster 0 of every restart (r, 1)."""
        return self.k * torch.arange(self.restarts)[:, None]

    # --- what a client does --------------------------------------------------------------------------------------

    def _train(self, task: Task, theta: Params, lr: Tensor, local: Local) -> tuple[Params, Tensor]:
        """Lines 8 to 11: the gradient or the trained model, and the loss on rows that were kept out."""
        rows = self._rows(local, "step")
        batches = local.draws["batches"] if self.batch else None
        if self.average == "gradient":
            batch = rows if batches is None else pick(local.data, batches[0])
            update = grad(lambda t: mean_loss(task, t, batch))(theta)  # line 9
        else:  # line 11: LocalUpdate(θ_ĵ, γ, τ)
            rows = rows if batches is None else local.data
            update, _ = local_update(task, theta, rows, lr=lr, tau=self.tau, batches=batches)
        held = mean_loss(task, theta, pick(local.data, local.draws["held"])) if self._holds_out else torch.zeros(())
        return update, held

    def _reply(self, j: Tensor, loss: Tensor, update: Params, held: Tensor, local: Local) -> Reply:
        note = {"label": j, "loss": loss}
        if self._holds_out:
            count = (local.draws["held"] >= 0).sum()
            note |= {"held": held * count, "held_rows": count.expand(held.shape)}
        slot = self._first().flatten().to(j.device) + j
        return Reply(update, self.weight(local.data).expand(self.restarts), slot, note)

    def _rows(self, local: Local, purpose: str) -> Data:
        return pick(local.data, local.draws[purpose]) if self._splits_rows else local.data

    def _draw(self) -> Any:
        if not self._splits_rows and self.batch is None:
            return None

        def draw(n: int, key: Key, when: tuple[int, ...]) -> dict[str, Tensor]:
            held, rest = torch.arange(0), torch.arange(n)
            if self._splits_rows:
                held, rest = hold_out(n, self.holdout if self._holds_out else 0.0, key)
            choose = step = rest
            if self.resample:  # Section 5: 2T disjoint subsets, two of which are used in a round
                size, t = len(rest) // (2 * self.resample), when[0]
                choose, step = rest[2 * t * size :].split(size)[:2]
            rows = {"choose": choose, "step": step, "held": held} if self._splits_rows else {}
            batches = self.draw_batches(len(step), key, when)
            return rows if batches is None else {**rows, "batches": among(step, batches)}

        return draw

    def _plan(self, *, choose: bool) -> Plan | None:
        if self._draw() is not None:
            return None
        return Plan(
            tau=self.tau,
            gradient=self.average == "gradient",
            weights=self.weights,
            clusters=self.k if choose else None,
            slots_per_start=self.k,
            steady=self.decay == 1,
        )

    @property
    def _holds_out(self) -> bool:
        return self.restarts > 1 and self.holdout > 0

    @property
    def _splits_rows(self) -> bool:
        return self._holds_out or self.resample is not None

    # --- what the server does with the replies -------------------------------------------------------------------

    def _improve(self, state: State, sums: Sums, cohort: Cohort) -> Params:
        """Lines 14 and 15; an empty cluster keeps its model, shared parameters are averaged over everybody."""
        everybody = float(cohort.sizes.sum()) if self.weights == "size" else float(cohort.population)
        own = sums.weight.unflatten(0, (self.restarts, self.k))

        def new(name: str, old: Tensor) -> Tensor:
            total, weight = sums.update[name].unflatten(0, (self.restarts, self.k)), own
            if name in self.shared:
                total, weight = (x.sum(1, keepdim=True).expand_as(x) for x in (total, weight))
            weight = weight.reshape(weight.shape + (1,) * (old.dim() - 2))
            mean = total / weight.clamp(min=torch.finfo(total.dtype).tiny)
            if self.average == "gradient":  # line 14: divided by m as printed, or by the cluster's own weight
                share = weight / everybody if self.normalise == "all" else 1.0
                mean = old - self.step_size(state.round) * share * mean
            return torch.where(weight > 0, mean, old)

        return {name: new(name, old) for name, old in state.theta.items()}

    def _members(self, labels: Tensor, sums: Sums) -> Tensor:
        """Clients of each cluster (r, k)."""
        if sums.members is not None:
            return sums.members.cpu().unflatten(0, (self.restarts, self.k))
        return torch.stack([(labels == j).sum(1) for j in range(self.k)], 1)

    def _revive(self, state: State, sums: Sums, chosen: Cohort) -> State:
        """Re-seed clusters that have long been empty, each from the participant that is served worst."""
        if self.revive is None or not bool((dead := state.empty >= self.revive).any()):
            return state
        theta, empty, served = tree_map(torch.clone, state.theta), state.empty.clone(), sums.note["loss"].clone()
        for r, j in dead.nonzero().tolist():
            worst = int(served[:, r].argmax())
            served[worst, r] = -torch.inf  # the next empty cluster takes another client
            label = int(sums.note["label"][worst, r])
            sent = {"theta": take(take(state.theta, r), label), "lr": self.step_size(state.round)}
            reply = chosen.only([worst]).fold(r, j).gather(self.train, sent)
            for name, x in reply.update.items():
                if name not in self.shared:
                    theta[name][r, j] = x[0]
            empty[r, j] = 0
        return state._replace(theta=theta, empty=empty, still=0)  # so that everybody is sent the new models too

    def _check(self, task: Task, cohort: Cohort) -> None:
        if self.k > cohort.population:
            raise ValueError(f"IFCA: k must be at most the number of clients, {cohort.population}, got {self.k}")
        names = task.init(Key.of(0))
        for name in self.shared:
            if name not in names:
                raise ValueError(f"IFCA: shared names '{name}', but the model's parameters are {', '.join(names)}")
        least = int(cohort.sizes.min())
        kept = least - int(self.holdout * least) if self._holds_out else least
        if self.resample and kept < 2 * self.resample:
            who = cohort.federation.name(int(cohort.clients[cohort.sizes.argmin()]))
            aside = f", {least - kept} of them held out" if kept < least else ""
            raise ValueError(
                f"IFCA: resample={self.resample} needs at least {2 * self.resample} rows on every client, but "
                f"{who} has {least}{aside}"
            )


def _best(state: State) -> int:
    return int(state.quality.argmin())


def _quality(note: dict[str, Tensor]) -> Tensor:
    """The mean held-out loss of every restart (r,), or the training loss where nothing is held out."""
    if "held" in note and bool((note["held_rows"] > 0).any()):
        quality = note["held"].sum(0) / note["held_rows"].sum(0)
    else:
        quality = note["loss"].mean(0)
    return quality.nan_to_num(nan=torch.inf, posinf=torch.inf).cpu()
