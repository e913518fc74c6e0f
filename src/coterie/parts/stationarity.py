"""When a cluster's training has come to a standstill while its clients' has not: CFL's (32) and (33)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from coterie.core.cohort import Cohort
from coterie.core.key import Key
from coterie.core.local import model_losses, personal_of
from coterie.core.pytree import Params, beside, put_rows, take
from coterie.core.settings import setting
from coterie.core.step import ClientStep, Local, Reply, client_step
from coterie.core.task import Task
from coterie.parts.bipartition import Linkage
from coterie.parts.client_reports import comparable
from coterie.parts.disagreement import Gradients, class_gradients, cleft
from coterie.parts.disguise import Privacy
from coterie.parts.split_tree import Cut, below
from coterie.parts.split_trials import SplitTrials

WIDTH = 256  # numbers to which gradients are sketched to test whether clients disagree
SURE = 6.0  # standard deviations from which on clients want more of their own than chance explains
PROBED = 500  # clients of a cluster at most that are asked for them
_HALVES = 7  # stream under a client's key


@dataclass(frozen=True, kw_only=True)
class Stationarity(SplitTrials, Privacy):
    """Hyperparameters of line 13 of CFL.

    Args:
        thresholds: "tested" has no scale. Every `patience` rounds the clients of a cluster send the gradients of two
            halves of their rows, by class. The cluster is stationary (32) if its mean gradient is shorter than eps1
            times what clients want of their own. Its clients are incongruent (33) if they want more of their own than
            chance explains, by six standard deviations, and the halves of the best cut are `contrast` times as far
            apart as chance could put them. "absolute": eps1 and eps2 are the lengths ε₁ and ε₂ of (32) and (33), as
            printed; they depend on the model, the step size and the local steps, and are to be given.
        eps1: See above.
        eps2: See above; for "absolute" only.
        contrast: See above; for "tested" only.
        linkage: "single" is Algorithm 1; "complete" is the authors' code.
        compare: What is measured and compared where thresholds are absolute or splits scheduled: the clients' weight
            updates, or their full gradients.
        max_age: A client's last update counts for so many rounds. Clients that have been away for longer when their
            cluster is split stay with the parent until they take part again, and are then placed by Algorithm 4.
    """

    linkage: Linkage = "single"
    thresholds: Literal["tested", "absolute"] = "tested"
    eps1: float = setting(1.0, low=0)
    eps2: float = setting(0.5, low=0)
    contrast: float = setting(2.0, low=0)
    compare: Literal["update", "gradient"] = "update"
    max_age: int = setting(10, low=0)

    @property
    def tests(self) -> bool:
        """Whether it is tested if clients disagree, rather than measured or scheduled."""
        return self.thresholds == "tested" and not self.schedule

    def fresh(self, state: Any, v: int) -> Tensor:
        """A leaf's clients whose last update is not too old and was made since the leaf is there."""
        young = state.reports.when >= max(state.round - self.max_age, state.tree[v].since + 1)
        return ((state.node == v) & young).nonzero().flatten()

    @client_step
    def wishes(self, task: Task) -> ClientStep:
        """What the rows of one client want of the model that was sent, by class and by halves of the rows."""
        (disguise, vector), plain = self.maps(task, longest=WIDTH), self.change()
        inner = plain.derive(task)

        def run(hidden: Params, local: Local) -> Reply:
            theta = {**beside(local.data.mask, task.personal), **disguise.take_off(hidden), **personal_of(local.memory)}
            rows = plain.training_rows(local)
            own = class_gradients(task, theta, rows, local.draws["rank"], lambda g: vector(disguise.put_on(g)))
            return Reply(note=own._asdict())

        def draw(n: int, key: Key, when: tuple[int, ...]) -> dict[str, Tensor]:
            drawn = inner.draw(n, key, when) if inner.draw else {}
            kept = len(drawn["train"]) if "train" in drawn else n
            return {**drawn, "rank": torch.randperm(kept, generator=key.fold(_HALVES, *when).generator())}

        return ClientStep(run, draw)

    def tested(self, state: Any, c: int, clients: Tensor, cohort: Cohort) -> tuple[Cut | None, str | None]:
        """How to cut leaf c by what its clients' rows want of its model, None if not at all; and a reason against."""
        here = torch.isin(cohort.clients, clients).nonzero().flatten()
        if len(here) < 2:  # the others cannot be reached now
            return None, None
        some = cohort.only(here[:: -(-len(here) // PROBED)]).fold(state.leaves[c])
        note = some.gather(self.wishes, take(state.theta, c)).note
        usable = comparable(note["sums"].flatten(1), note["rows"].flatten(1).sum(1))
        some, note = some.only(usable.nonzero().flatten()), {n: x[usable.to(x.device)] for n, x in note.items()}
        if len(some) < 2:
            return None, None
        found = cleft(Gradients(**note), state.reports.weight[some.clients], self.linkage)  # lines 14-16
        if self.eps1**2 < found.drift < torch.inf:  # (32): the cluster's model still moves
            return None, None
        cut = Cut.of(some.clients[found.trusted], found.second, found.cross, found.contrast)
        if found.signal < SURE:  # (33)
            return cut, f"what its clients want of their own may be chance ({found.signal:.1f} standard deviations)"
        if cut.contrast < self.contrast:
            return cut, f"its halves are {cut.contrast:.1f} times as far apart as by chance, not {self.contrast:g}"
        return cut, None

    @client_step
    def losses(self, task: Task) -> ClientStep:
        """How well every leaf's model serves one client."""
        disguise, _ = self.maps(task)

        def run(hidden: Params, local: Local) -> Reply:
            theta = disguise.take_off_each(hidden)
            return Reply(note={"losses": model_losses(task, theta, local.data, personal_of(local.memory))})

        return ClientStep(run)

    def nearest_leaf(self, state: Any, cohort: Cohort, at: Tensor) -> tuple[Tensor, Tensor]:
        """The leaf below each client's node `at` whose model serves it best, and whether there is one that does.

        Algorithm 4 compares updates at stationary models, but splits that are tested are made earlier.
        """
        waiting = torch.tensor([i for i, v in enumerate(at.tolist()) if state.tree[v].children], dtype=torch.long)
        sure = torch.ones(len(at), dtype=torch.bool)
        if not len(waiting):
            return at, sure
        losses = cohort.only(waiting).gather(self.losses, state.theta).note["losses"].cpu()
        allowed = torch.stack([below(state.tree, state.leaves, v) for v in at[waiting].tolist()])
        least, leaf = losses.masked_fill(~allowed, torch.inf).nan_to_num(nan=torch.inf, posinf=torch.inf).min(1)
        sure[waiting] = torch.isfinite(least)
        return put_rows(at, waiting, torch.tensor(state.leaves)[leaf]), sure

    def stationary(self, state: Any, clients: Tensor) -> bool:
        """(32) and (33) as printed."""
        updates, weight = state.reports.updates[clients], state.reports.weight[clients]
        mean, longest = float((weight @ updates / weight.sum()).norm()), float(updates.norm(dim=1).max())
        return mean < self.eps1 and longest > self.eps2
