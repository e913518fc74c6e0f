"""Are there clients that no model serves, and that one new model would?

Clients are suspected if even their best model serves them clearly worse than it serves those who have long been with
it. Then two ways to go on are tried side by side, with the same rounds on the same rows: with the models there are, and
with one more, which begins with what the suspects learn together. There is a new group if two or more suspects choose
that model, and rows that neither way was trained on say two things:

- All clients together are served clearly better with one more model than without.
- Those who choose it are served better than by the models before, by at least half of what they were served worse than
  others. So clients with noisy rows, which no model serves, are no group; nor are clients that merely vary, whom a
  model of their own serves a little better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.core.cohort import Cohort
from coterie.core.local import personal_of
from coterie.core.method import Groups, Method
from coterie.core.pytree import Params, exact, stacked, take, tree_map
from coterie.core.registry import register
from coterie.core.step import ClientStep, Local, Reply, client_step
from coterie.core.task import Task
from coterie.runs.evaluate import Scorer

WORSE = 3.0  # deviations, as the median deviation estimates them, by which a suspect's loss is above the median
KNOWN = 3  # clients of a group whose losses tell what is usual there; with fewer, those of all groups do
CLEARLY = 3.0  # standard errors by which the mean loss of all held-out rows must be lower
CLOSED = 0.5  # of the gap between how suspects and others were served, that the new model must close


class Standing(NamedTuple):
    """Where clients stand in an update.

    Attributes:
        labels: The cluster of each (m,).
        best: The cluster that each one's rows speak for (m,).
        known: Whether it was there before (m,).
    """

    labels: Tensor
    best: Tensor
    known: Tensor

    @property
    def settled(self) -> Tensor:
        """Who has long been with the model that serves it best (m,)."""
        return self.known & (self.labels == self.best)


class NewGroup(NamedTuple):
    """A group that no model served."""

    model: Params  # its model (1, …)
    clients: Tensor  # who is in it, as positions


@register("trial_judge", "service")
@dataclass(frozen=True)
class Judge:
    """The client's side of a trial."""

    @client_step
    def compare(self, task: Task) -> ClientStep:
        """Three models on the client's rows: that of before, and those of the ways without and with one more model."""

        def run(sent: Params, local: Local) -> Reply:
            kept, data = personal_of(local.memory), local.data
            losses = [task.loss({**take(sent, j), **kept}, data) for j in range(3)]
            before, without, new = (torch.where(data.mask > 0, x, 0.0) for x in losses)
            gain = without - new
            sums = {"before": before, "after": new, "gain": gain, "square": gain.square(), "rows": data.mask}
            return Reply(note={name: x.sum() for name, x in sums.items()})

        return ClientStep(run)


def new_group(
    method: Method, state: Any, cohort: Cohort, judges: Sequence[Cohort], standing: Standing, rounds: int
) -> NewGroup | None:
    """A group that no model serves, if there is one.

    Args:
        method: The method.
        state: About these clients.
        cohort: The clients, at the moment of the first round.
        judges: The same clients, each time with other rows to train on and with test rows on which nothing is trained.
        standing: Where they stand.
        rounds: How many rounds models are trained.
    """
    found = _Trial(method, state, cohort, standing, rounds).proposed()
    if found is None:
        return None
    trials = (_Trial(method, state, judge, standing, rounds) for judge in judges)
    judged = [trial.judged(proposed) for trial in trials if (proposed := trial.proposed()) is not None]
    if not judged or not is_clear(tree_map(lambda *xs: torch.cat(xs), *judged)):
        return None
    return NewGroup(found.model, found.members)


def suspects(losses: Tensor, standing: Standing) -> Tensor:
    """Who is served clearly worse by the best model than clients that have long been with it (m,).

    Args:
        losses: Of every client under the model that serves it best (m,).
        standing: Where they stand.

    Example:
        >>> at = torch.zeros(6, dtype=torch.long)
        >>> standing = Standing(at, at, torch.tensor([True, True, True, True, False, True]))
        >>> suspects(torch.tensor([1.0, 1.2, 0.9, 1.1, 9.0, 8.0]), standing).tolist()
        [False, False, False, False, True, True]
    """
    odd = torch.zeros(len(losses), dtype=torch.bool)
    for j in standing.best.unique().tolist():
        here = standing.best == j
        usual = losses[standing.settled & here]
        usual = usual if len(usual) >= KNOWN else losses[standing.settled]
        if len(usual) >= KNOWN:
            middle = usual.quantile(0.5)
            spread = 1.4826 * (usual - middle).abs().quantile(0.5)
            odd |= here & (losses > middle + WORSE * spread)
    return odd


class Judged(NamedTuple):
    """What the held-out rows of clients say, as sums over each client's rows (c,)."""

    member: Tensor  # whether it would be in the new group
    settled: Tensor  # whether it has long been with the model that serves it best, and is no suspect
    rows: Tensor
    before: Tensor  # the loss under the best of the models before
    after: Tensor  # under its model where there is one more
    gain: Tensor  # by how much that is lower than where there is none
    square: Tensor  # of every row's gain


def is_clear(found: Judged) -> bool:
    """Whether one more model serves all clients clearly better than none, and its members nearly as others are served.

    Args:
        found: What the held-out rows of clients say.
    """
    total = float(found.rows.sum())
    mean = float(found.gain.sum()) / max(total, 1.0)
    error = math.sqrt(max(float(found.square.sum()) / max(total, 1.0) - mean**2, 0.0) / max(total, 1.0))
    better = found.before - found.after
    if int((found.member & (better > 0)).sum()) < 2 or not bool(found.settled.any()):
        return False
    rows, usual = float(found.rows[found.member].sum()), found.settled
    gap = float(found.before[found.member].sum()) / rows - float(found.before[usual].sum() / found.rows[usual].sum())
    return mean > CLEARLY * error and float(better[found.member].sum()) / rows > CLOSED * gap


class _Proposed(NamedTuple):
    """One more model, and how the method goes on with it."""

    method: Method
    state: Any
    members: Tensor  # suspects that choose it, as positions
    odd: Tensor  # who is a suspect (m,)
    best: Tensor  # which of the models before serves each client best (m,)

    @property
    def model(self) -> Params:
        """The new one (1, …)."""
        models = self.method.models(self.state)
        return take(models, torch.tensor([stacked(models) - 1]))


@dataclass(frozen=True)
class _Trial:
    """Some rounds of a method from a state of its own, with other models and clients."""

    method: Method
    state: Any
    cohort: Cohort
    standing: Standing
    rounds: int

    def proposed(self) -> _Proposed | None:
        """A model for those whom none serves; None where there are no two that choose it."""
        models, standing = self.method.models(self.state), self.standing
        losses, best = exact(self.cohort.gather(Scorer().losses, models).note["losses"]).min(1)
        odd = suspects(losses, standing)
        some = odd.nonzero().flatten()
        if len(some) < 2:
            return None
        start = take(models, standing.best[some].mode().values[None])
        one, learnt = self._gone_on(start, torch.zeros_like(standing.labels), some)
        wider, k = joined(models, one.models(learnt)), stacked(models)
        method, state = self._gone_on(wider, torch.where(odd, k, standing.labels), self._present(odd))
        members = some[method.place(state, self.cohort.only(some)) == k]
        return _Proposed(method, state, members, odd, best) if len(members) > 1 else None

    def judged(self, proposed: _Proposed) -> Judged:
        """The way with one more model beside that without, on rows that neither was trained on."""
        models, odd = self.method.models(self.state), proposed.odd
        labels, present = torch.where(odd, proposed.best, self.standing.labels), self._present(odd)
        method, state = self._gone_on(models, labels, present)
        some, k = self.cohort.only(present), stacked(models)
        sent = joined(joined(models, method.models(state)), proposed.method.models(proposed.state))
        each = proposed.best[present], method.place(state, some), proposed.method.place(proposed.state, some)
        rows = torch.stack(each, 1) + k * torch.arange(3)
        note = some.on("test").gather(Judge().compare, sent, rows=rows).note
        sums = {name: exact(x) for name, x in note.items()}
        return Judged(torch.isin(present, proposed.members), (self.standing.settled & ~odd)[present], **sums)

    def _present(self, odd: Tensor) -> Tensor:
        """Who takes part: not who waits to be moved, unless it is a suspect."""
        return (odd | (self.standing.labels == self.standing.best)).nonzero().flatten()

    def _gone_on(self, models: Params, labels: Tensor, clients: Tensor) -> tuple[Method, Any]:
        """The method and its state after the rounds, in which these clients took part."""
        groups = Groups(models, torch.arange(len(labels)), labels)
        method, state = self.method.adopt(self.state, groups, self.cohort.task)
        before = dict(self.cohort.ledger.memory)  # of a trial clients remember nothing
        for t in range(self.rounds):
            if method.done(state):
                break
            state, _ = method.round(state, self.cohort.at(self.cohort.when[0] + t).only(clients))
        self.cohort.ledger.memory = before
        return method, state


def joined(models: Params, more: Params) -> Params:
    """Some models (k, …) and others after them."""
    return tree_map(lambda a, b: torch.cat([a, b.to(a)]), models, more)
