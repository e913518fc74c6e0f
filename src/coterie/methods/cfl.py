"""CFL, Clustered Federated Learning: split a population where its gradients disagree.

Clustered Federated Learning: Model-Agnostic Distributed Multi-Task Optimization under Privacy Constraints
    Felix Sattler, Klaus-Robert Müller, Wojciech Samek. 2019 (arXiv:1910.01991), Algorithms 1 to 5.

Algorithm 1 is in `bipartition.py`, the map P of Section V-B in `disguise.py`. Line numbers in the comments are those of
Algorithm 5, which is Algorithm 3 unrolled into rounds; equations and sections are those of the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from coterie.core.cohort import Cohort
from coterie.core.key import Key
from coterie.core.local import hold_out, mean_gradient, mean_loss, pick
from coterie.core.method import Method, Needs, Report
from coterie.core.model_tree import Branch, ModelTree
from coterie.core.pytree import Params, flat, stack, take, tree_map
from coterie.core.registry import register
from coterie.core.settings import setting
from coterie.core.step import ClientStep, Local, Reply, client_step
from coterie.core.sums import slot_mean, slot_sum
from coterie.core.task import Data, Task
from coterie.core.train import draw_batches, weight_of
from coterie.parts.bipartition import Linkage, bipartition, contrast, cosines
from coterie.parts.disguise import Disguise, Kind, Sketch, shapes_of
from coterie.parts.local_training import LocalTraining

ROOT = 0
BLIND = 1 / 3  # of eps1, where no held-out rows tell whether a cluster is stationary
LOWER = 0.02  # a loss is clearly lower than another by this share of it
SAME = 1e-3  # √((1 - α_cross) / 2) below which updates differ by rounding only


class Node(NamedTuple):
    """A node v of the parameter tree (Section V-C) and the edge that leads to it."""

    parent: int  # -1 at the root
    children: tuple[int, ...]  # two, or none at a leaf
    theta: Params  # θ*_v, the stationary model before the split; at a leaf nothing yet, its model is in the state
    clients: Tensor  # c_v
    updates: Tensor  # Δ_e (|c_v|, …): what these clients sent at the parent's θ*; nothing at the root
    since: int  # the round in which it was made, -1 at the root
    cross: float  # α_cross of its split
    refused: bool  # whether a split of it was undone
    judged: bool  # whether its split has stood its trial
    warned: bool  # whether it has been told why it is not split


class Sent(NamedTuple):
    """What a client is sent: a node's model, the step size, and the number of its cluster."""

    theta: Params
    lr: Tensor
    label: Tensor


class Cut(NamedTuple):
    """A split: the clients of either half, their largest similarity, and how clearly the halves differ."""

    first: Tensor
    second: Tensor
    cross: float
    contrast: float


class State(NamedTuple):
    """What the server knows after a round. Models and updates are disguised if there is a disguise."""

    theta: Params  # the leaves' models (k, …)
    leaves: tuple[int, ...]  # the node of each of them
    tree: dict[int, Node]
    node: Tensor  # every client's node (m,); an inner one if it was not heard of when that was split
    updates: Tensor  # every client's latest update, gradient or sketch (m, …)
    heard: Tensor  # the round of that (m,), -1 for none
    mute: Tensor  # whether what it sent last could not be compared (m,)
    weight: Tensor  # how heavily it counts (m,)
    held: Tensor  # its loss then on the rows it holds out (m,), infinite if none
    before: Tensor  # the same under its parent's θ* (m,)
    peak: Tensor  # the greatest mean length of its clients' updates, over γ, since a leaf is there (k,)
    best: Tensor  # the last held-out loss that was clearly lower than those before, by leaf (k,)
    still: Tensor  # rounds since then (k,)
    shapes: tuple[tuple[str, tuple[int, ...]], ...]  # of the parameters
    round: int


@register("cfl")
@dataclass(frozen=True, kw_only=True)
class CFL(LocalTraining, Method):
    """Train one model; where it no longer improves and clients still disagree, split them in two, again and again.

    Args:
        thresholds: "relative" needs no tuning from model to model. A cluster is stationary once its mean update is
            shorter than eps1 times the longest update of its clients and, if rows are held out, the loss on those has
            not fallen by 2% in `patience` rounds; its clients are incongruent while their updates are on average longer
            than eps2 times what they have been at most. "absolute": eps1 and eps2 are the lengths ε₁ and ε₂ of (32) and
            (33), as printed; they depend on the model, the step size and the local steps, and are to be given.
        eps1: See above.
        eps2: See above.
        schedule: Rounds (1 is the first) in which a cluster is split, that with the greatest contrast, whatever the
            thresholds say: three rounds for four groups, as in the paper's experiments. Empty for none.
        gamma_max: γ_max of (39), the noise that clients' updates are assumed to have: a split is made only if
            √((1 - α_cross) / 2) is larger.
        contrast: A split is made only if the halves' means are so many times as far apart, squared, as they would be
            by chance, judged by the scatter within the halves. 0 for the algorithm as printed.
        compare: What is compared: the clients' weight updates, or their full gradients.
        linkage: "single" is Algorithm 1; "complete" is the authors' code.
        sketch: Compare random projections of this length; the server then sees sums and projections only.
        holdout: Share of every client's rows that is kept out of training, to see when a cluster is stationary and to
            judge splits. With 0, or where clients have too few rows, only the mean update tells the one, which must be
            shorter than a third of eps1 then; and no split is undone.
        patience: See `thresholds`. Also, a split is judged so many rounds after it was made, and undone if the held-out
            loss of either half is higher than it was under the model before. Until then neither is split again.
        max_age: A client's last update counts in a split for so many rounds. Clients not heard of for longer stay
            with the parent until they are, and are then placed by Algorithm 4.
        privacy: Clients send updates through a secret "permutation" of all coordinates, or "rotation"; the server never
            holds a model or an update in the clear.
        secret: The seed of it, which only clients know.

    Example:
        >>> import coterie as ct
        >>> federation = ct.data.permuted_digits(clients=20, groups=2, seed=0)
        >>> task = ct.Task.classifier(ct.models.MLP(64, 32, 10))
        >>> run = ct.fit(ct.CFL(), task, federation, rounds=80)
        >>> len(run.models), run.ari
        (2, 1.0)
    """

    needs = Needs(gather=True)

    thresholds: Literal["relative", "absolute"] = "relative"
    eps1: float = setting(0.3, low=0)
    eps2: float = setting(0.5, low=0)
    schedule: tuple[int, ...] = ()
    gamma_max: float = setting(0.0, low=0)
    contrast: float = setting(2.0, low=0)
    compare: Literal["update", "gradient"] = "update"
    linkage: Linkage = "single"
    sketch: int | None = setting(None, low=2)
    holdout: float = setting(0.1, low=0, high=0.9)
    patience: int = setting(10, low=1)
    max_age: int = setting(10, low=0)
    privacy: Kind = "none"
    secret: int = setting(0, low=0)

    def start(self, task: Task, cohort: Cohort, key: Key) -> State:
        """Line 3: one cluster of all clients, one model."""
        self._check(cohort)
        theta = task.init(key.fold(0))
        shapes, m = shapes_of(theta), cohort.population
        hidden = self._disguise(shapes).put_on(theta)
        root = Node(
            -1,
            (),
            {},
            torch.arange(m),
            torch.zeros(0, 0),
            since=-1,
            cross=1.0,
            refused=False,
            judged=False,
            warned=False,
        )
        return State(
            theta=stack([hidden]),
            leaves=(ROOT,),
            tree={ROOT: root},
            node=torch.full((m,), ROOT),
            updates=torch.zeros(m, self.sketch or flat(hidden, axes=0).numel()),
            heard=torch.full((m,), -1),
            mute=torch.zeros(m, dtype=torch.bool),
            weight=torch.zeros(m),
            held=torch.full((m,), torch.inf),
            before=torch.full((m,), torch.inf),
            peak=torch.zeros(1),
            best=torch.full((1,), torch.inf),
            still=torch.zeros(1, dtype=torch.long),
            shapes=shapes,
            round=0,
        )

    def round(self, state: State, cohort: Cohort) -> tuple[State, Report]:
        """Lines 5 to 23."""
        chosen = cohort.sample(self.fraction)
        state, chosen = self._settle(state, chosen)
        if not len(chosen):  # all who were drawn wait at inner nodes, with nothing to be compared by
            return state._replace(round=state.round + 1), Report(chosen.clients, torch.zeros(0))
        state, theta, report = self._exchange(state, chosen)  # lines 5-12
        state, split = self._splits(state, cohort)  # lines 13-19, at the models that the updates were made at
        after = state._replace(theta=theta)
        for c, halves in split.items():
            after = self._split(after, c, take(state.theta, c), halves)
        after = self._judge(after, cohort)
        return after._replace(round=state.round + 1), report

    @client_step
    def step(self, task: Task) -> ClientStep:
        """Lines 7 and 8 at one client: train the model that was sent, and send what has changed."""
        disguise = self._disguise(shapes_of(like := task.init(Key.of(0))))
        project = Sketch(flat(disguise.put_on(like), axes=0).numel(), self.sketch) if self.sketch else None

        def vector(params: Params) -> Tensor:
            return flat(params, axes=0) if project is None else project(flat(params, axes=0))

        def run(sent: Sent, local: Local) -> Reply:
            theta = disguise.take_off(sent.theta)
            own = pick(local.data, local.draws["rows"]) if self.holdout else local.data
            rows, batches = (local.data, local.draws["batches"]) if self.batch else (own, None)
            end, loss = self.descend()(task, theta, rows, sent.lr, batches)
            delta = disguise.put_on(tree_map(torch.sub, end, theta))
            fine = torch.stack([torch.isfinite(x).all() for x in delta.values()]).all()
            delta = tree_map(lambda x: torch.where(fine, x, 0.0), delta)  # a client that diverged spoils no sum
            weight = torch.where(fine, weight_of(local.data, self.weights), 0.0)
            note = {"loss": loss, "held": self._held(task, theta, local), "weight": weight}
            if self.compare == "gradient":
                note["vector"] = vector(disguise.put_on(mean_gradient(task, theta, own)))
            elif self.sketch:
                note["vector"] = vector(delta)
            return Reply(delta, weight, sent.label, note)

        def draw(n: int, key: Key, when: tuple[int, ...]) -> dict[str, Tensor]:
            held, rows = hold_out(n, self.holdout, key) if self.holdout else (torch.arange(0), torch.arange(n))
            drawn = {"held": held, "rows": rows} if self.holdout else {}
            if self.batch is not None:
                drawn["batches"] = draw_batches(rows, self.batch, self.tau, key, when)
            return drawn

        return ClientStep(run, draw if self.holdout or self.batch else None)

    @client_step
    def probe(self, task: Task) -> ClientStep:
        """Algorithm 4, line 5 at one client: only what is compared of what it would send."""
        step = self.step(task)

        def run(sent: Sent, local: Local) -> Reply:
            reply = step.run(sent, local)
            vector = reply.note["vector"] if "vector" in reply.note else flat(reply.update, axes=0)
            return Reply(weight=reply.weight, note={"vector": vector})

        return ClientStep(run, step.draw)

    def models(self, state: State) -> Params:
        """The leaves' models, in the clear: what the clients make of the server's answer."""
        return self._disguise(state.shapes).take_off_each(state.theta)

    def labels(self, state: State) -> Tensor:
        """Every client's leaf; -1 for a client that waits at an inner node."""
        cluster = torch.full((max(state.tree) + 1,), -1)
        cluster[list(state.leaves)] = torch.arange(len(state.leaves))
        return cluster[state.node]

    def place(self, state: State, cohort: Cohort) -> Tensor:
        """The leaf of every client: where it is known to be, or, on other rows than those it trains on, Algorithm 4."""
        known = state.node[cohort.clients] if cohort.part == "train" else torch.full((len(cohort),), ROOT)
        return self.labels(state._replace(node=self._walk(state, cohort, known)[0]))

    def join(self, state: State, newcomers: Cohort) -> State:
        """Algorithm 4 for clients that are new; one that cannot be compared waits at the root."""
        n, root = len(newcomers), torch.full((len(newcomers),), ROOT)
        found, sure = self._walk(state, newcomers, root)
        return state._replace(
            node=torch.cat([state.node, torch.where(sure, found, root).to(state.node)]),
            updates=_more(state.updates, n, 0.0),
            heard=_more(state.heard, n, -1),
            mute=_more(state.mute, n, False),
            weight=_more(state.weight, n, 0.0),
            held=_more(state.held, n, torch.inf),
            before=_more(state.before, n, torch.inf),
        )

    def assign(self, state: State, task: Task, data: Data) -> int:
        """Algorithm 4: walk down the tree, always to the branch with the most similar update."""
        v, step, n = ROOT, self.probe(task), len(data.x)  # line 2
        draws = step.draw(n, Key.of(0), (0,)) if step.draw else {}
        local = Local(data, tree_map(lambda x: x.to(data.x.device), draws), ())
        while state.tree[v].children:  # lines 3-13
            reply = step.run(tree_map(lambda x: x.to(data.x.device), self._asked(state, v)), local)
            v = self._branch(state, v, reply.note["vector"][None])[0]
        return state.leaves.index(v)

    def tree(self, state: State) -> ModelTree:
        """The parameter tree, with models in the clear."""
        disguise, models = self._disguise(state.shapes), self.models(state)
        leaves, below = {v: c for c, v in enumerate(state.leaves)}, {v: list[int]() for v in state.tree}
        for client, v in enumerate(state.node.tolist()):
            while v >= 0:
                below[v].append(client)
                v = state.tree[v].parent

        def model(v: int, node: Node) -> Params:
            theta = take(models, leaves[v]) if v in leaves else disguise.take_off(node.theta)
            return tree_map(torch.Tensor.cpu, theta)

        return ModelTree({
            v: Branch(
                parent=None if node.parent < 0 else node.parent,
                children=node.children,
                clients=below[v],
                cluster=leaves.get(v),
                round=node.since + 1,
                cross=node.cross if node.children else None,
                model=model(v, node),
            )
            for v, node in state.tree.items()
        })  # fmt: skip

    # --- what is exchanged ----------------------------------------------------------------------------------------

    def _exchange(self, state: State, chosen: Cohort) -> tuple[State, Params, Report]:
        """Lines 5 to 12: every client trains its leaf's model. What the server then knows, and the new models."""
        at, k = chosen.clients, len(state.leaves)
        label = self.labels(state)[at]
        sent = Sent(state.theta, self.step_size(state.round).expand(k), torch.arange(k))
        if self.sketch:
            sums = chosen.combine(self.step, sent, slots=k, rows=label)
            vectors = sums.note["vector"]
        else:
            reply = chosen.gather(self.step, sent, slots=k, rows=label)
            sums, vectors = slot_sum(reply, k), reply.note.get("vector", flat(reply.update))
        usable = self._usable(state, chosen, vectors, sums.note["weight"])
        theta = tree_map(torch.add, state.theta, slot_mean(sums, otherwise=tree_map(torch.zeros_like, state.theta)))
        told = state._replace(
            updates=_put(state.updates, at[usable], vectors[usable.to(vectors.device)]),
            heard=_put(state.heard, at[usable], torch.full((int(usable.sum()),), state.round)),
            mute=_put(state.mute, at, ~usable),
            weight=_put(state.weight, at, sums.note["weight"]),
            held=_put(state.held, at, sums.note["held"]),
        )
        loss = sums.note["loss"]
        fine = torch.isfinite(loss) & (sums.note["weight"] > 0)
        if not bool(fine.any()):  # then it is not one client's fault
            return told, theta, Report(at, torch.full_like(loss, torch.inf))
        return self._watch(told), theta, Report(at[fine.cpu()], loss[fine])

    def _watch(self, state: State) -> State:
        """Note how long the updates of every leaf's clients are, and whether their held-out loss still falls."""
        peak, best, still = state.peak.clone(), state.best.clone(), state.still.clone()
        for c, v in enumerate(state.leaves):
            clients = self._fresh(state, v)
            if not bool((state.heard[clients] == state.round).any()):
                continue  # nothing new of this leaf
            peak[c] = peak[c].maximum(self._length(state, clients).mean())
            held = state.held[clients]
            loss = held[torch.isfinite(held)].mean() if bool(torch.isfinite(held).any()) else best[c]
            lower = bool(torch.isinf(best[c]) | (loss < best[c] - LOWER * best[c].abs()))
            best[c], still[c] = (loss, 0) if lower else (best[c], still[c] + 1)
        return state._replace(peak=peak, best=best, still=still)

    def _length(self, state: State, clients: Tensor) -> Tensor:
        """How long clients' updates are, in steps of this round's size, so that a step that shrinks does not matter."""
        step = float(self.step_size(state.round)) if self.compare == "update" else 1.0
        return state.updates[clients].norm(dim=1) / max(step, torch.finfo(torch.float32).tiny)

    def _usable(self, state: State, chosen: Cohort, vectors: Tensor, weight: Tensor) -> Tensor:
        """Which participants' updates can be compared. Others are kept out, never taken for zeros, and named."""
        finite, usable = weight > 0, _comparable(vectors, weight).cpu()
        for i in (~usable).nonzero().flatten().tolist():
            client = int(chosen.clients[i])
            if not state.mute[client]:  # it is named when it falls out, not in every round
                what = "all zero" if finite[i] else "not finite"
                name = chosen.federation.name(client)
                chosen.log(f"CFL: round {state.round + 1}: {name} is kept out of splits: its update is {what}")
        return usable

    def _held(self, task: Task, theta: Params, local: Local) -> Tensor:
        """The loss of a model on the rows that the client holds out, infinite if it holds out none."""
        if not self.holdout:
            return torch.full((), torch.inf)
        rows = local.draws["held"]
        return torch.where((rows >= 0).any(), mean_loss(task, theta, pick(local.data, rows)), torch.inf)

    def _disguise(self, shapes: tuple[tuple[str, tuple[int, ...]], ...]) -> Disguise:
        return Disguise(self.privacy, self.secret, tuple((name, tuple(shape)) for name, shape in shapes))

    def _settle(self, state: State, chosen: Cohort) -> tuple[State, Cohort]:
        """Place clients that wait at an inner node, now that they are heard; who cannot be placed goes on waiting."""
        waiting = self.labels(state)[chosen.clients] < 0
        found, sure = self._walk(state, chosen, state.node[chosen.clients])
        state = state._replace(node=_put(state.node, chosen.clients[sure], found[sure]))
        return state, chosen.only((sure | ~waiting).nonzero().flatten()) if bool(waiting.any()) else chosen

    def _walk(self, state: State, cohort: Cohort, at: Tensor) -> tuple[Tensor, Tensor]:
        """Algorithm 4 for many clients at once, from the nodes that they are at down to leaves.

        Also returns which of them could be compared all the way: an update may be all zero or not finite.
        """
        at, sure, depth = at.clone(), torch.ones(len(at), dtype=torch.bool), 0
        while len(waiting := torch.tensor([i for i, v in enumerate(at.tolist()) if state.tree[v].children])):
            inner, rows = at[waiting].unique(return_inverse=True)
            sent = stack([self._asked(state, v) for v in inner.tolist()])
            reply = cohort.only(waiting).fold(depth).gather(self.probe, sent, rows=rows)
            vectors, depth = reply.note["vector"], depth + 1
            sure[waiting] &= _comparable(vectors, reply.weight).cpu()
            for j, v in enumerate(inner.tolist()):
                own = (rows == j).nonzero().flatten()
                at[waiting[own]] = torch.tensor(self._branch(state, v, vectors[own]))
        return at, sure

    def _asked(self, state: State, v: int) -> Sent:
        """An inner node's model, with the step size of the updates that it was split by."""
        since = state.tree[state.tree[v].children[0]].since
        return Sent(state.tree[v].theta, self.step_size(since), torch.tensor(0))

    def _branch(self, state: State, v: int, vectors: Tensor) -> list[int]:
        """Algorithm 4, lines 6 to 12: the child whose clients' updates hold the most similar one."""
        first, second = state.tree[v].children
        unit = torch.nn.functional.normalize(vectors)

        def most(child: int) -> Tensor:
            return (unit @ torch.nn.functional.normalize(state.tree[child].updates.to(unit)).T).max(1).values

        return torch.where(most(first) > most(second), first, second).tolist()

    # --- splitting ------------------------------------------------------------------------------------------------

    def _splits(self, state: State, cohort: Cohort) -> tuple[State, dict[int, Cut]]:
        """Lines 13 to 18: the leaves that are to be split, and how."""
        cuts, tree = {}, dict(state.tree)
        for c, v in enumerate(state.leaves):
            clients = self._fresh(state, v)
            if len(clients) < 2 or not self._disagree(state, c, clients):
                continue
            cut = self._cut(clients, state.updates[clients])
            if not (reason := self._unsafe(cut)):
                cuts[c] = cut
            elif not tree[v].warned:
                cohort.log(f"CFL: round {state.round + 1}: cluster {c} is not split: {reason}")
                tree[v] = tree[v]._replace(warned=True)
        if self.schedule and cuts:  # one at a time: k - 1 rounds are scheduled for k groups
            clearest = max(cuts, key=lambda c: (isfinite(cuts[c].contrast), cuts[c].contrast))
            cuts = {clearest: cuts[clearest]}
        for c, cut in cuts.items():
            sizes = f"{len(cut.first)} and {len(cut.second)} clients"
            told = f"α_cross = {cut.cross:.3f}, {cut.contrast:.1f} times as far apart as by chance"
            cohort.log(f"CFL: round {state.round + 1}: cluster {c} is split into {sizes} ({told})")
        return state._replace(tree=tree), cuts

    def _cut(self, clients: Tensor, updates: Tensor) -> Cut:
        """Lines 14 to 16: the two halves of some clients."""
        halves = bipartition(cosines(updates), self.linkage)
        second = torch.from_numpy(halves.second)
        return Cut(clients[~second], clients[second], halves.cross, contrast(updates, second))

    def _fresh(self, state: State, v: int) -> Tensor:
        """A leaf's clients whose last update is not too old and was made since the leaf is there."""
        young = state.heard >= max(state.round - self.max_age, state.tree[v].since + 1)
        return ((state.node == v) & young).nonzero().flatten()

    def _disagree(self, state: State, c: int, clients: Tensor) -> bool:
        """Line 13: whether the cluster is near a stationary point (32) while its clients are not (33)."""
        node = state.tree[state.leaves[c]]
        if node.refused or (self.holdout and node.parent >= 0 and state.round - node.since <= self.patience):
            return False
        if self.schedule:
            return state.round + 1 in self.schedule
        updates, weight = state.updates[clients], state.weight[clients]
        mean, longest = float((weight @ updates / weight.sum()).norm()), float(updates.norm(dim=1).max())
        if self.thresholds == "absolute":
            return mean < self.eps1 and longest > self.eps2
        blind = bool(torch.isinf(state.best[c]))  # nobody holds rows out
        if not blind and int(state.still[c]) < self.patience:
            return False  # on those rows the model still becomes better
        far = float(self._length(state, clients).mean()) > self.eps2 * float(state.peak[c])
        return mean < (BLIND if blind else 1.0) * self.eps1 * longest and far

    def _unsafe(self, cut: Cut) -> str | None:
        """Why a split is not to be trusted, by line 17 and by chance."""
        margin = max(0.0, (1 - cut.cross) / 2) ** 0.5
        if margin < SAME:
            return "all updates point the same way"
        if margin <= self.gamma_max:  # (39)
            return f"√((1 - α_cross) / 2) is {margin:.3f}, not above gamma_max = {self.gamma_max:g}"
        if cut.contrast < self.contrast and not self.schedule:
            return f"the halves are {cut.contrast:.1f} times as far apart as by chance, less than {self.contrast:g}"
        return None

    def _split(self, state: State, c: int, theta: Params, cut: Cut) -> State:
        """Line 18: the leaf becomes an inner node with its stationary model, from which both halves go on."""
        v, new = state.leaves[c], max(state.tree) + 1
        tree, node = dict(state.tree), state.node
        before = torch.where((state.node == v).to(state.before.device), torch.inf, state.before)
        tree[v] = tree[v]._replace(children=(new, new + 1), theta=theta, cross=cut.cross, judged=False)
        for child, clients in ((new, cut.first), (new + 1, cut.second)):
            tree[child] = Node(v, (), {}, clients, state.updates[clients], state.round, 1.0, False, False, False)
            node = _put(node, clients, torch.full_like(clients, child))
            before = _put(before, clients, state.held[clients])
        return state._replace(
            theta=tree_map(lambda x, own: torch.cat([x[:c], own[None], x[c + 1 :], own[None]]), state.theta, theta),
            leaves=(*state.leaves[:c], new, *state.leaves[c + 1 :], new + 1),
            peak=_anew(state.peak, c, 0.0),
            best=_anew(state.best, c, torch.inf),
            still=_anew(state.still, c, 0),
            tree=tree,
            node=node,
            before=before,
        )

    def _judge(self, state: State, cohort: Cohort) -> State:
        """Undo splits under which a half does worse on the rows its clients hold out than under the model before."""
        for v, parent in list(state.tree.items()):
            since = state.tree[parent.children[0]].since if parent.children else state.round
            if not self.holdout or parent.judged or state.round - since < self.patience:
                continue
            state = state._replace(tree={**state.tree, v: parent._replace(judged=True)})
            for child in parent.children:
                known = torch.isfinite(state.held) & torch.isfinite(state.before)
                clients = (state.node == child) & (state.heard > since) & known.cpu()
                now, before = (float(loss[clients].mean()) for loss in (state.held, state.before))
                if now > before:
                    cohort.log(
                        f"CFL: round {state.round + 1}: a split is undone: the held-out loss of {int(clients.sum())} "
                        f"clients went up from {before:.4g} to {now:.4g}"
                    )
                    state = self._undo(state, v)
                    break
        return state

    def _undo(self, state: State, v: int) -> State:
        """Make an inner node a leaf again, with the model that it had; it is not split another time."""
        parent = state.tree[v]
        c, gone = (state.leaves.index(child) for child in parent.children)
        keep = [j for j in range(len(state.leaves)) if j != gone]
        tree = {u: node for u, node in state.tree.items() if u not in parent.children}
        tree[v] = parent._replace(children=(), theta={}, cross=1.0, refused=True)
        leaves = list(state.leaves)
        leaves[c] = v
        return state._replace(
            theta=tree_map(lambda x, own: torch.cat([x[:c], own[None], x[c + 1 :]])[keep], state.theta, parent.theta),
            leaves=tuple(leaves[j] for j in keep),
            peak=state.peak[keep],
            best=state.best[keep],
            still=state.still[keep],
            tree=tree,
            node=torch.where(torch.isin(state.node, torch.tensor(parent.children)), v, state.node),
        )

    def _check(self, cohort: Cohort) -> None:
        if cohort.population < 2:
            raise ValueError(f"CFL: at least 2 clients are needed to compare, got {cohort.population}")
        if self.gamma_max >= 1:
            raise ValueError(f"CFL: gamma_max must be at least 0 and below 1, got {self.gamma_max:g}")
        if early := [t for t in self.schedule if t < 1]:
            raise ValueError(f"CFL: schedule holds round {early[0]}, but the first round is 1")
        for a, b in pairwise(sorted(self.schedule)):
            if self.holdout and b - a <= self.patience:
                raise ValueError(
                    f"CFL: schedule has rounds {a} and {b}, but a split is judged for patience = {self.patience} "
                    "rounds before the next; lower patience, or set holdout to 0"
                )


def _comparable(vectors: Tensor, weight: Tensor) -> Tensor:
    """Whether a client's vector has a direction; a client that has diverged has no weight."""
    return (weight > 0) & torch.isfinite(vectors).all(1) & (vectors != 0).any(1)


def _anew(values: Tensor, c: int, value: float) -> Tensor:
    """One value per leaf (k,), begun anew for leaf c and for one more."""
    return torch.cat([values[:c], values.new_full((1,), value), values[c + 1 :], values.new_full((1,), value)])


def _more(values: Tensor, n: int, value: float) -> Tensor:
    """Values of clients (m, …), and the same value for n more."""
    return torch.cat([values, values.new_full((n, *values.shape[1:]), value)])


def _put(whole: Tensor, at: Tensor, rows: Tensor) -> Tensor:
    """A copy of `whole` with these rows at these places."""
    return whole.index_copy(0, at.to(whole.device), rows.to(whole))
