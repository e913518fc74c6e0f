"""CFL, Clustered Federated Learning: split a population where its gradients disagree.

Clustered Federated Learning: Model-Agnostic Distributed Multi-Task Optimization under Privacy Constraints
    Felix Sattler, Klaus-Robert Müller, Wojciech Samek. 2019 (arXiv:1910.01991), Algorithms 1 to 5.

Algorithm 1 is in `parts/bipartition.py`, the map P of Section V-B in `parts/disguise.py`. Line numbers in the comments
are those of Algorithm 5, which is Algorithm 3 unrolled into rounds; equations and sections are those of the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from coterie.core.cohort import Cohort
from coterie.core.key import Key
from coterie.core.local import mean_gradient, nearest
from coterie.core.method import Groups, Method, Needs, Report
from coterie.core.model_tree import ModelTree
from coterie.core.pytree import Params, beside, flat, put_rows, stack, take, tree_map
from coterie.core.registry import register
from coterie.core.settings import setting
from coterie.core.step import ClientStep, Local, Reply, client_step, derived
from coterie.core.sums import slot_mean, slot_sum
from coterie.core.task import Data, Task
from coterie.core.train import Models, Train
from coterie.parts.bipartition import bipartition, contrast, cosines
from coterie.parts.client_reports import Reports, comparable, report_of, unless_diverged
from coterie.parts.disguise import Shapes, shapes_of
from coterie.parts.split_tree import (
    ROOT,
    Cut,
    Node,
    cluster_of,
    grown,
    model_tree,
    moved_down,
    planted,
    split_rows,
)
from coterie.parts.stationarity import Stationarity

SAME = 1e-3  # √((1 - α_cross) / 2) below which updates differ by rounding only


class State(NamedTuple):
    """What the server knows after a round. Models and updates are disguised if there is a disguise."""

    theta: Params  # the leaves' models (k, …)
    leaves: tuple[int, ...]  # the node of each of them
    tree: dict[int, Node]  # the parameter tree of Section V-C
    node: Tensor  # every client's node (m,); an inner one if the client was away when that was split
    reports: Reports  # the last report of every client (m, …)
    shapes: Shapes  # of the parameters
    round: int
    moments: Any = ()  # what the server's optimiser remembers of each (k, …)


@register("cfl")
@dataclass(frozen=True, kw_only=True)
class CFL(Stationarity, Method):
    """Train one model; where it no longer improves and clients still disagree, split them in two, again and again.

    Args:
        gamma_max: γ_max of (39), the noise that clients' updates are assumed to have: a split is made only if
            √((1 - α_cross) / 2) is larger.

    Example:
        >>> import coterie as ct
        >>> federation = ct.data.permuted_digits(clients=20, groups=2, seed=0)
        >>> task = ct.Task.classifier(ct.models.MLP(64, 32, 10))
        >>> run = ct.fit(ct.CFL(), task, federation, rounds=80)
        >>> len(run.models), run.ari
        (2, 1.0)
    """

    needs = Needs(gather=True)

    gamma_max: float = setting(0.0, low=0)

    def start(self, task: Task, cohort: Cohort, key: Key) -> State:
        """Line 3: one cluster of all clients, one model."""
        if cohort.population < 2:
            raise ValueError(f"CFL: at least 2 clients are needed to compare, got {cohort.population}")
        if self.gamma_max >= 1:
            raise ValueError(f"CFL: gamma_max must be at least 0 and below 1, got {self.gamma_max:g}")
        self.check_schedule()
        self.check_secret()
        if task.moving and (self.privacy != "none" or self.sketch):
            raise ValueError("CFL: privacy and sketch are not possible with BatchNorm's statistics; use GroupNorm")
        theta, m = task.init(key.fold(0)), cohort.population
        hidden = self.disguise(shapes_of(theta)).put_on(theta)
        return State(
            theta=stack([hidden]),
            moments=self.begin_server(stack([hidden]), task),
            leaves=(ROOT,),
            tree=planted(m),
            node=torch.full((m,), ROOT),
            reports=Reports.none(m, self.sketch or _compared(hidden, task, axes=0).numel()),
            shapes=shapes_of(theta),
            round=0,
        )

    def round(self, state: State, cohort: Cohort) -> tuple[State, Report]:
        """Lines 5 to 23."""
        state, chosen = self._placed(state, cohort.sample(self.fraction))
        if not len(chosen):  # all participants wait at inner nodes, with nothing to be compared by
            return state._replace(round=state.round + 1), Report(chosen.clients, torch.zeros(0))
        state, learnt, report = self._exchange(state, chosen)  # lines 5-12
        state, cuts = self._cuts(state, cohort)  # lines 13-17, at the models that the updates were made at
        after = state._replace(theta=learnt[0], moments=learnt[1])
        after = self.rivals_trained(after, chosen)
        for c, cut in cuts.items():
            after = self._split(after, c, take(state.theta, c), cut)  # line 18
        after = self.judged(after, cohort)
        return after._replace(round=state.round + 1), report

    @client_step
    def step(self, task: Task) -> Train | ClientStep:
        """Lines 7 and 8 at one client: train the model that was sent, and send what has changed."""
        if self.privacy == "none" and not self.sketch and self.compare == "update":
            return self.change()
        return self._mapped(task)

    def _mapped(self, task: Task) -> ClientStep:
        """The same where the server sees models and updates through a disguise, or compares something else."""
        (disguise, vector), plain = self.maps(task), self.change()
        inner = plain.derive(task)

        def run(sent: Models, local: Local) -> Reply:
            theta = disguise.take_off(sent.theta)
            reply = inner.run(sent._replace(theta=theta), local)
            reply = unless_diverged(reply._replace(update=disguise.put_on(reply.update)))
            if self.compare == "gradient":
                reply.note["vector"] = vector(disguise.put_on(mean_gradient(task, theta, plain.training_rows(local))))
            elif self.sketch:
                reply.note["vector"] = vector(reply.update)
            return reply

        return ClientStep(run, inner.draw, weights=inner.weights)

    @client_step
    def probe(self, task: Task) -> ClientStep:
        """Algorithm 4, line 5 at one client: of what it would send, only what is compared."""
        step = derived(self.step, task)

        def run(sent: Models, local: Local) -> Reply:
            reply = unless_diverged(step.run(sent, local))
            vector = reply.note["vector"] if "vector" in reply.note else _compared(reply.update, task, axes=0)
            return Reply(weight=reply.weight, note={"vector": vector})

        return ClientStep(run, step.draw, weights=step.weights)

    def models(self, state: State) -> Params:
        """The leaves' models without the disguise, as clients use them."""
        return self.disguise(state.shapes).take_off_each(state.theta)

    def labels(self, state: State) -> Tensor:
        """Every client's leaf; -1 for a client that waits at an inner node."""
        return cluster_of(state.tree, state.leaves, state.node)

    def tree(self, state: State) -> ModelTree:
        """The parameter tree, with models without the disguise."""
        models, inner = self.models(state), self.disguise(state.shapes).take_off
        return model_tree(state.tree, state.leaves, state.node, models, inner)

    # --- lines 5 to 12: what is exchanged -------------------------------------------------------------------------

    def _exchange(self, state: State, chosen: Cohort) -> tuple[State, tuple[Params, Any], Report]:
        """Lines 5 to 12: every client trains its leaf's model. What the server then knows, and the new models."""
        k, label = len(state.leaves), self.labels(state)[chosen.clients]
        sent = Models(state.theta, self.step_size(state.round), label=torch.arange(k))
        if self.sketch:
            sums = chosen.combine(self.step, sent, slots=k, rows=label)
            vectors = sums.note["vector"]
        else:
            reply = unless_diverged(chosen.gather(self.step, sent, slots=k, rows=label))
            sums = slot_sum(reply, k)
            vectors = reply.note["vector"] if "vector" in reply.note else _compared(reply.update, chosen.task)
        mean = tree_map(torch.add, state.theta, slot_mean(sums, otherwise=tree_map(torch.zeros_like, state.theta)))
        learnt = self.advance(state.theta, mean, sums.weight, state.moments, chosen.task)
        state = state._replace(reports=state.reports.updated(chosen, vectors, sums.note, state.round))
        return state, learnt, report_of(chosen.clients, sums.note)

    # --- lines 13 to 18: splitting --------------------------------------------------------------------------------

    def _cuts(self, state: State, cohort: Cohort) -> tuple[State, dict[int, Cut]]:
        """Lines 13 to 17: the leaves that are to be split, and how."""
        cuts, tree = {}, dict(state.tree)
        for c, v in enumerate(state.leaves):
            clients = self.fresh(state, v)
            if len(clients) < 2 or not self.may_split(tree, v, state.round):
                continue
            if self.tests and not self.is_due(tree[v], state.round):
                continue
            tree[v] = tree[v]._replace(checked=state.round)
            cut, reason = self.tested(state, c, clients, cohort) if self.tests else self._measured(state, clients)
            if cut and not (reason := reason or self._unsafe(cut)):
                cuts[c] = cut
            elif reason:
                if not tree[v].warned:
                    cohort.log(f"CFL: round {state.round + 1}: cluster {c} is not split: {reason}")
                tree[v] = tree[v]._replace(warned=True, whole=tree[v].whole + self.tests)
        cuts = self.in_turn(cuts)
        for c, cut in cuts.items():
            cohort.log(f"CFL: round {state.round + 1}: cluster {c} is split into {cut}")
        return state._replace(tree=tree), cuts

    def _measured(self, state: State, clients: Tensor) -> tuple[Cut | None, str | None]:
        """Lines 13 to 16 as printed: how a cluster is to be cut, None if it is not; and a reason against that cut."""
        if not self.schedule and not self.stationary(state, clients):  # line 13
            return None, None
        updates = state.reports.updates[clients]
        halves = bipartition(cosines(updates), self.linkage)  # lines 14-16
        clear = contrast(updates, torch.from_numpy(halves.second))
        return Cut.of(clients, halves.second, halves.cross, clear), None

    def _unsafe(self, cut: Cut) -> str | None:
        """Why a split is not to be trusted: line 17."""
        if cut.margin < SAME:
            return "all updates point the same way"
        if cut.margin <= self.gamma_max:  # line 17 (39)
            return f"√((1 - α_cross) / 2) is {cut.margin:.3f}, not above gamma_max = {self.gamma_max:g}"
        return None

    def _split(self, state: State, c: int, theta: Params, cut: Cut) -> State:
        """Line 18: the leaf becomes an inner node with its stationary model, from which both halves go on."""
        v = state.leaves[c]
        rival = tree_map(lambda x: x[c : c + 1], (state.theta, state.moments)) if self.holdout else ()
        tree = grown(state.tree, v, theta, cut, state.reports.updates, state.round, rival)
        first, second = tree[v].children
        return state._replace(
            theta=split_rows(state.theta, c, theta),
            moments=split_rows(state.moments, c, take(state.moments, c)),
            leaves=(*state.leaves[:c], first, *state.leaves[c + 1 :], second),
            tree=tree,
            node=moved_down(state.node, tree, v),
            reports=state.reports._replace(rival=torch.full_like(state.reports.rival, torch.inf)),
        )

    # --- Algorithm 4: clients that are new, or were away ----------------------------------------------------------

    def place(self, state: State, cohort: Cohort) -> Tensor:
        """The leaf of every client: where it is known to be, or, on other rows than those it trains on, Algorithm 4."""
        known = state.node[cohort.clients] if cohort.part == "train" else torch.full((len(cohort),), ROOT)
        return self.labels(state._replace(node=self._walk(state, cohort, known)[0]))

    def join(self, state: State, newcomers: Cohort) -> State:
        """Algorithm 4 for clients that are new; one that cannot be compared waits at the root."""
        root = torch.full((len(newcomers),), ROOT)
        found, sure = self._walk(state, newcomers, root)
        node = torch.cat([state.node, torch.where(sure, found, root)])
        return state._replace(node=node, reports=state.reports.more(len(newcomers)))

    def adopt(self, state: State, groups: Groups, task: Task) -> tuple[CFL, State]:
        """The tree stays; clients without a cluster wait at the root. A report on another leaf's model is void."""
        node = torch.tensor([*state.leaves, ROOT])[groups.labels]  # the last for -1
        reports: Reports = tree_map(lambda x: x[groups.clients.to(x.device)], state.reports)
        when = torch.where(node == state.node[groups.clients], reports.when, -1)
        return self, state._replace(node=node, reports=reports._replace(when=when))

    def assign(self, state: State, task: Task, data: Data) -> int:
        """Algorithm 4: walk down the tree, always to the branch with the most similar update; or by the loss."""
        if self.tests:
            return int(nearest(task, self.models(state), data)[0])
        v, step = ROOT, self.probe(task)  # line 2
        draws = step.draw(len(data.x), Key.of(0), (0,)) if step.draw else {}
        local = Local(data, beside(data.x, draws), ())
        while state.tree[v].children:  # lines 3-13
            reply = step.run(beside(data.x, self._asked(state, v)), local)  # line 5
            v = self._branch(state, v, reply.note["vector"][None])[0]
        return state.leaves.index(v)  # line 14

    def _placed(self, state: State, chosen: Cohort) -> tuple[State, Cohort]:
        """Place participants that wait at an inner node; who cannot be placed goes on waiting, and takes no part."""
        at = state.node[chosen.clients]
        waiting = self.labels(state)[chosen.clients] < 0
        if not bool(waiting.any()):
            return state, chosen
        found, sure = self._walk(state, chosen, at)
        if self.tests:  # the halves' models tell them apart once these are trained
            sure &= ~torch.isin(at, torch.tensor(self.on_trial(state), dtype=at.dtype))
        state = state._replace(node=put_rows(state.node, chosen.clients[sure], found[sure]))
        return state, chosen.only((sure | ~waiting).nonzero().flatten())

    def _walk(self, state: State, cohort: Cohort, at: Tensor) -> tuple[Tensor, Tensor]:
        """Lines 3 to 13 for many clients at once, from the nodes that they are at down to leaves.

        Also returns which of them could be compared all the way: an update may be all zero or not finite.
        """
        if self.tests:
            return self.nearest_leaf(state, cohort, at)
        at, sure, depth = at.clone(), torch.ones(len(at), dtype=torch.bool), 0
        while len(waiting := torch.tensor([i for i, v in enumerate(at.tolist()) if state.tree[v].children])):
            inner, rows = at[waiting].unique(return_inverse=True)
            sent = stack([self._asked(state, v) for v in inner.tolist()])
            reply = cohort.only(waiting).fold(depth).gather(self.probe, sent, rows=rows)  # line 5
            vectors, depth = reply.note["vector"], depth + 1
            sure[waiting] &= comparable(vectors, reply.weight)
            for j, v in enumerate(inner.tolist()):
                own = (rows == j).nonzero().flatten()
                at[waiting[own]] = torch.tensor(self._branch(state, v, vectors[own]))
        return at, sure

    def _asked(self, state: State, v: int) -> Models:
        """An inner node's model, with the step size of the updates that it was split by."""
        since = state.tree[state.tree[v].children[0]].since
        return Models(state.tree[v].theta, self.step_size(since), label=torch.tensor(0))

    def _branch(self, state: State, v: int, vectors: Tensor) -> list[int]:
        """Lines 6 to 12: the child whose clients' updates hold the most similar one."""
        first, second = state.tree[v].children
        alpha = [(normalize(vectors) @ normalize(state.tree[u].updates.to(vectors)).T).amax(1) for u in (first, second)]
        return torch.where(alpha[0] > alpha[1], first, second).tolist()


def _compared(update: Params, task: Task, axes: int = 1) -> Tensor:
    """What is compared of updates: all that is trained, side by side, and no statistics of BatchNorm."""
    return flat({n: x for n, x in update.items() if n not in task.moving}, axes)
