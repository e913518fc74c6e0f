"""When clusters are split, and trials of splits: one that does not serve held-out rows better is undone."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from typing import Any, ClassVar

import torch
from torch import Tensor

from coterie.core.cohort import Cohort
from coterie.core.pytree import put_rows, tree_map
from coterie.core.settings import setting
from coterie.core.step import ClientStep, Local, Reply, Step, client_step, derived
from coterie.core.sums import slot_mean, slot_sum
from coterie.core.task import Task
from coterie.core.train import Models
from coterie.parts.client_reports import held_out_losses, unless_diverged
from coterie.parts.held_out_rows import HeldOutRows
from coterie.parts.server_step import ServerStep
from coterie.parts.split_tree import Cut, Node, pruned

ERRORS = 2  # standard errors that a gain or a loss must exceed


@dataclass(frozen=True, kw_only=True)
class SplitTrials(HeldOutRows, ServerStep):
    """For methods that split and have a `step`, whose states hold `theta`, `leaves`, `tree`, `node` and `reports`.

    Args:
        patience: Rounds between two tests of whether a cluster is to be split. Also, a split is on trial for so many
            rounds, in which the parent's model is trained on beside those of the halves, and undone unless held-out
            rows then find that clients gain by more than twice the error of their mean gain, and neither half loses by
            more. Until then neither half is split again. A cluster that was found whole, or of which a split was
            undone, waits twice as long for the next test.
        schedule: Rounds (1 is the first) in which a cluster is split, that with the greatest contrast, whatever the
            thresholds say: three rounds for four groups, as in the paper's experiments. Empty for none.
    """

    step: ClassVar[Step]  # lines 7 and 8 at one client

    patience: int = setting(10, low=1)
    schedule: tuple[int, ...] = ()

    def check_schedule(self) -> None:
        """Refuse rounds for splits that are not numbered from 1, or leave no time to judge the split before."""
        if early := [t for t in self.schedule if t < 1]:
            raise ValueError(f"CFL: schedule holds round {early[0]}, but the first round is 1")
        for a, b in pairwise(sorted(self.schedule)):
            if self.holdout and b - a <= self.patience:
                raise ValueError(
                    f"CFL: schedule has rounds {a} and {b}, but a split is judged for patience = {self.patience} "
                    "rounds before the next; lower patience, or set holdout to 0"
                )

    def may_split(self, tree: dict[int, Node], v: int, t: int) -> bool:
        """Whether leaf v may be split in round t: the split that made it is judged, and if scheduled, none undone."""
        node = tree[v]
        if node.parent >= 0 and tree[node.parent].rival:  # on trial
            return False
        return t + 1 in self.schedule and not node.whole if self.schedule else True

    def is_due(self, node: Node, t: int) -> bool:
        """Whether it is time to test a leaf."""
        return t - node.checked >= self.patience * 2**node.whole

    def in_turn(self, cuts: dict[int, Cut]) -> dict[int, Cut]:
        """The cuts of a round; with a schedule only the clearest, for k - 1 rounds are scheduled for k groups."""
        if not self.schedule or not cuts:
            return cuts
        clearest = max(cuts, key=lambda c: (isfinite(cuts[c].contrast), cuts[c].contrast))
        return {clearest: cuts[clearest]}

    def on_trial(self, state: Any) -> list[int]:
        """The nodes whose splits are not judged yet."""
        return [v for v, node in state.tree.items() if node.rival]

    def rivals_trained(self, state: Any, chosen: Cohort) -> Any:
        """The models that clusters would have without the splits that are on trial, trained on by the same clients."""
        for v in self.on_trial(state):
            node = state.tree[v]
            clients = torch.isin(state.node[chosen.clients], torch.tensor(node.children)).nonzero().flatten()
            if not len(clients):
                continue
            some, (theta, moments) = chosen.only(clients), node.rival
            sent = Models(theta, self.step_size(state.round), label=torch.arange(1))
            reply = some.fold(v).gather(self.train_rival, sent, rows=torch.zeros_like(clients))
            sums = slot_sum(reply, 1)
            mean = tree_map(torch.add, theta, slot_mean(sums, otherwise=tree_map(torch.zeros_like, theta)))
            rival = self.advance(theta, mean, sums.weight, moments, chosen.task)
            held = put_rows(state.reports.rival, some.clients, held_out_losses(reply.note))
            tree = {**state.tree, v: node._replace(rival=rival)}
            state = state._replace(tree=tree, reports=state.reports._replace(rival=held))
        return state

    @client_step
    def train_rival(self, task: Task) -> ClientStep:
        """Train a model that the client may never use: it remembers nothing of it."""
        step = derived(self.step, task)

        def run(sent: Models, local: Local) -> Reply:
            return unless_diverged(step.run(sent, local))._replace(memory=())

        return ClientStep(run, step.draw, weights=step.weights)

    def judged(self, state: Any, cohort: Cohort) -> Any:
        """The state after the splits whose time has come were judged: they stand, or are undone."""
        for v in self.on_trial(state):
            since = state.tree[state.tree[v].children[0]].since
            if state.round - since < self.patience:
                continue
            if against := _against(state, v, since):
                cohort.log(f"CFL: round {state.round + 1}: a split is undone: {against}")
                state = _undone(state, v)
            else:
                state = state._replace(tree={**state.tree, v: state.tree[v]._replace(rival=())})
        return state


def _against(state: Any, v: int, since: int) -> str | None:
    """What held-out losses say against the split of node v, in words; None if they speak for it."""
    gains = [g for child in state.tree[v].children if len(g := _gains(state, child, since))]
    if not gains:  # nobody holds rows out
        return None
    apart = torch.cat([g - g.mean() for g in gains])
    deviation = float((apart.square().sum() / max(1, len(apart) - len(gains))).sqrt())
    for half in gains:
        if (loss := -float(half.mean())) > (error := ERRORS * deviation / len(half) ** 0.5):
            return f"the held-out loss of {len(half)} clients is {loss:.3g} higher than without it (± {error:.2g})"
    gain, error = float(torch.cat(gains).mean()), ERRORS * deviation / len(apart) ** 0.5
    return f"the held-out loss is only {gain:.3g} lower than without it (± {error:.2g})" if gain <= error else None


def _gains(state: Any, child: int, since: int) -> Tensor:
    """By how much the held-out loss of each client of a half is lower than it would be without the split."""
    reports = state.reports
    gain = (reports.rival - reports.held).cpu()
    return gain[(state.node == child) & (reports.when > since).cpu() & torch.isfinite(gain)]


def _undone(state: Any, v: int) -> Any:
    """The state after the split of node v was undone: a leaf again, with the model that was trained on meanwhile."""
    parent = state.tree[v]
    theta, moments = parent.rival
    c, gone = (state.leaves.index(child) for child in parent.children)
    keep = [j for j in range(len(state.leaves)) if j != gone]
    leaves = [v if j == c else leaf for j, leaf in enumerate(state.leaves)]

    def put_back(rows: Any, own: Any) -> Any:
        return tree_map(lambda x, new: torch.cat([x[:c], new.to(x), x[c + 1 :]])[keep], rows, own)

    return state._replace(
        theta=put_back(state.theta, theta),
        moments=put_back(state.moments, moments),
        leaves=tuple(leaves[j] for j in keep),
        tree=pruned(state.tree, v, state.round),
        node=torch.where(torch.isin(state.node, torch.tensor(parent.children)), v, state.node),
    )
