"""IFCA, the Iterative Federated Clustering Algorithm.

An Efficient Framework for Clustered Federated Learning
    Avishek Ghosh, Jichan Chung, Dong Yin, Kannan Ramchandran. NeurIPS 2020, Algorithm 1.

Line numbers in the comments are those of Algorithm 1; sections are those of the paper. Throughout, r is the starts that
run side by side, k the clusters, m the clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from coterie.core.cohort import Cohort
from coterie.core.key import Key
from coterie.core.method import Groups, Report
from coterie.core.pytree import Params, stacked, tree_map
from coterie.core.registry import register
from coterie.core.settings import setting
from coterie.core.step import client_step
from coterie.core.sums import Sums, mean_of
from coterie.core.task import Task
from coterie.core.train import Gradient, Models, Rows, Train
from coterie.parts.choosing import counted
from coterie.parts.doubts import Doubting
from coterie.parts.restarts import Restarts, held_out_loss
from coterie.parts.revival import Revival
from coterie.parts.server_step import ServerStep
from coterie.parts.sharing import Sharing
from coterie.parts.starts import Start, find_start
from coterie.parts.tournament import Tournament


class State(NamedTuple):
    """What IFCA knows after a round."""

    theta: Params  # the cluster models θ_j of every start (r, k, …)
    labels: Tensor  # each client's last cluster identity (r, m), -1 where it has never taken part or it is hidden
    members: Tensor  # clients of each cluster (r, k): by the labels or, where these are hidden, of the last round
    quality: Tensor  # the loss by which starts are compared (r,)
    empty: Tensor  # rounds since each cluster last had a member (r, k)
    still: int  # rounds since a client last changed its cluster
    round: int
    moments: Any = ()  # what the server's optimiser remembers of each (r·k, …)


@register("ifca")
@dataclass(frozen=True)
class IFCA(Restarts, Revival, Sharing, ServerStep, Doubting):
    """Alternate between estimating each client's cluster and improving the cluster models.

    Args:
        k: Number of clusters.
        average: "model" (option II: the mean of locally trained models) or "gradient" (option I).
        normalise: Option I divides the summed gradients by the cluster's own weight ("cluster") or by that of all m
            clients ("all", as printed). As printed the larger cluster takes the larger step and tends to win everybody.
        init: The start: "tournament", "farthest_first", "random" (the paper's), "balanced", "random_groups",
            "moment_descent", one of their classes with settings of your own, or k state dicts. None takes the
            tournament, which finds groups where the others lose some, and costs some exchanges in which the server
            sees the models of up to 200 clients; or with `shared`, farthest-first: its models are not trained for so
            long that their shared parameters no longer go together.
        restarts: Starts that are run side by side; the best by held-out loss is kept.
        holdout: Share of each client's rows that is kept out of the rounds' training to compare restarts (only if
            restarts > 1; 0 compares by training loss). Starts that train, such as farthest-first, use all rows, but the
            tournament holds out a fifth of its own.
        shared: Names of the parameters that all clusters share (Section 4.1); the others are clustered.
        patience: Once no client has changed its cluster for so many rounds, each is sent its own model only
            (Section 4.1). None always sends all k.
        recheck: While only own models are sent, all k are sent again every so many rounds.
        resample: T, to use fresh rows in each of T rounds, half for choosing and half for stepping (Section 5).
        revive: A cluster that had no member for so many rounds is started again from the client that is served worst.

    Example:
        >>> import coterie as ct
        >>> federation = ct.data.rotated_digits(clients=16, seed=0)
        >>> task = ct.Task.classifier(ct.models.MLP(64, 32, 10))
        >>> run = ct.fit(ct.IFCA(k=4), task, federation, rounds=20, seed=0)
        >>> len(run.models), len(run.labels)
        (4, 16)
    """

    # What is not here comes from the bases. Restarts: drawn, best, models, compares. Revival: revived and, from
    # LocalTraining, the settings lr, tau, batch, fraction, weights and descend, step_size. Sharing: tied, apart,
    # over_clusters. ServerStep: begin_server, advance, begun_again. Doubting: doubts and, from Choosing, place, assign.

    quick = {"init": Tournament(steps=4, bouts=1)}

    k: int = setting(low=1)
    average: Literal["model", "gradient"] = "model"
    normalise: Literal["cluster", "all"] = "cluster"
    init: str | Start | Sequence[Params] | None = None
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
        default = "farthest_first" if self.shared else "tournament"
        draw = find_start(default if self.init is None else self.init, self.k)
        theta = self.tied(self.drawn(lambda r: draw(self.k, self.lr, task, cohort.fold(r), key.fold(r))))
        never, none = torch.full((self.restarts, cohort.population), -1), torch.zeros(self.restarts, self.k).long()
        moments = self.begin_server(_in_line(theta), task)
        return State(theta, never, none, torch.full((self.restarts,), torch.inf), none.clone(), 0, 0, moments)

    def round(self, state: State, cohort: Cohort) -> tuple[State, Report]:
        """Lines 3 to 15."""
        chosen, slots = cohort.sample(self.fraction), self.restarts * self.k  # line 4: M_t
        if self._settled(state):
            own = self.k * torch.arange(self.restarts) + state.labels[:, chosen.clients].T  # (c, r)
            sums = chosen.combine(self.follow, self._one_each(state), slots=slots, rows=own)
        else:
            sums = chosen.combine(self.step, self._broadcast(state), slots=slots)  # lines 3 and 5-12
        labels = state.labels.clone()
        labels[:, chosen.clients] = sums.note["label"].T
        seen = sums.members  # a secure sum hides labels, but counts them
        members = counted(labels, self.k) if seen is None else seen.unflatten(0, (self.restarts, self.k))
        theta, moments = self._improve(state, sums, cohort)  # lines 13-15
        after = State(
            theta=theta,
            moments=moments,
            labels=labels,
            members=members,
            quality=held_out_loss(sums.note),
            empty=torch.where(members > 0, 0, state.empty + 1),
            still=0 if bool((labels != state.labels).any()) else state.still + 1,
            round=state.round + 1,
        )
        report = Report(chosen.clients, sums.note["loss"][:, self.best(after)])
        revived = self.revived(after, sums, chosen)
        new = (revived.empty != after.empty).flatten()  # a cluster that is started again counts from 0
        moments = self.begun_again(after.moments, _in_line(revived.theta), new, cohort.task)
        return revived._replace(moments=moments), report

    @client_step
    def step(self, task: Task) -> Train:
        """Lines 5 to 12 at one client: estimate the cluster (line 6), then improve its model (lines 8 to 11)."""
        by = Gradient(self.batch) if self.average == "gradient" else self.descend()  # line 9, line 11
        return Train(by, self.k, choose=True, starts=self.restarts, weights=self.weights, rows=self._rows())

    @client_step
    def follow(self, task: Task) -> Train:
        """Lines 8 to 12 at a client that is sent only the model of its last cluster."""
        by = Gradient(self.batch) if self.average == "gradient" else self.descend()
        return Train(by, self.k, starts=self.restarts, weights=self.weights, rows=self._rows(), full_loss=True)

    def labels(self, state: State) -> Tensor:
        """The cluster identities of the best start."""
        return state.labels[self.best(state)]

    def members(self, state: State) -> Tensor:
        """How many clients each cluster of the best start has."""
        return state.members[self.best(state)]

    def done(self, state: State) -> bool:
        """With re-sampling, once every row has been used."""
        return self.resample is not None and state.round >= self.resample

    def join(self, state: State, newcomers: Cohort) -> State:
        """Line 6 for clients that are new, in the best start; in the others they have never taken part."""
        self._check(newcomers.task, newcomers)
        labels = torch.full((self.restarts, len(newcomers)), -1)
        labels[self.best(state)] = self.place_new(state, newcomers)
        members = state.members + counted(labels, self.k)
        return state._replace(labels=torch.cat([state.labels, labels], 1), members=members)

    def adopt(self, state: State, groups: Groups, task: Task) -> tuple[IFCA, State]:
        """The best start alone goes on; the server's optimiser begins anew."""
        if self.resample is not None:
            raise ValueError("update: IFCA with resample uses every row once, and cannot go on")
        k, best = stacked(groups.models), self.best(state)
        method, labels = replace(self, k=k, restarts=1), groups.labels[None]
        theta = method.tied(tree_map(lambda x: x[None], groups.models))
        return method, State(
            theta=theta,
            labels=labels,
            members=counted(labels, k),
            quality=state.quality[best][None],
            empty=state.empty[best][None] if k == self.k else torch.zeros(1, k).long(),
            still=0,
            round=state.round,
            moments=method.begin_server(_in_line(theta), task),
        )

    def grows(self) -> bool:
        """Any k will do."""
        return True

    # --- what the server sends, and does with the replies ----------------------------------------------------------

    def _broadcast(self, state: State) -> Models:
        """Line 3: k models, of which the shared parameters are sent once."""
        clustered, common = self.apart(state.theta)
        return Models(clustered, self.step_size(state.round), common=common)

    def _one_each(self, state: State) -> Models:
        """All models one after the other (r·k, …), from which each client is sent its own."""
        label = torch.arange(self.k).repeat(self.restarts)
        return Models(_in_line(state.theta), self.step_size(state.round), label=label)

    def _settled(self, state: State) -> bool:
        """Whether identities have been still for long enough to send one model each."""
        if self.patience is None or state.still < self.patience or bool((state.labels < 0).any()):
            return False
        return (state.still - self.patience) % self.recheck != self.recheck - 1  # in the last of these all k are sent

    def _improve(self, state: State, sums: Sums, cohort: Cohort) -> tuple[Params, Any]:
        """Lines 14 and 15; an empty cluster keeps its model, shared parameters are averaged over everybody."""
        everybody = float(cohort.sizes.sum()) if self.weights == "size" else float(cohort.population)

        def new(name: str, old: Tensor) -> Tensor:
            total, weight = self.over_clusters(name, sums.update[name], sums.weight)
            if self.average == "model":
                return mean_of(total, weight, old)  # line 15
            share = weight / everybody if self.normalise == "all" else torch.ones_like(weight)
            gradient = mean_of(total, weight, torch.zeros_like(old))
            return old - self.step_size(state.round) * share.reshape(old.shape[:2] + (1,) * (old.dim() - 2)) * gradient

        mean = {name: new(name, old) for name, old in state.theta.items()}
        before, target = _in_line(state.theta), _in_line(mean)
        theta, moments = self.advance(before, target, sums.weight, state.moments, cohort.task)
        return tree_map(lambda x, like: x.reshape(like.shape), theta, mean), moments

    def _rows(self) -> Rows | None:
        """Which rows serve for what: some judge restarts, and with re-sampling every round has fresh ones."""
        holdout = self.holdout if self.compares else 0.0
        return Rows(holdout, self.resample) if holdout or self.resample else None

    def _check(self, task: Task, cohort: Cohort) -> None:
        if self.k > cohort.population:
            raise ValueError(f"IFCA: k must be at most the number of clients, {cohort.population}, got {self.k}")
        self.check_shared(task)
        if self.shared and not self.takes_the_mean:
            raise ValueError("IFCA: shared parameters and a server optimiser do not go together")
        if self.average == "gradient" and not (self.descend().plain and self.epochs is None):
            raise ValueError(
                "IFCA: average='gradient' sends one gradient; optimiser, clip and epochs need average='model'"
            )
        if (rows := self._rows()) is not None:
            rows.check(cohort, "IFCA")


def _in_line(theta: Params) -> Params:
    """The models of all starts one after the other (r·k, …)."""
    return tree_map(lambda x: x.flatten(0, 1), theta)
