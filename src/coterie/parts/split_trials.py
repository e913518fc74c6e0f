"""When clusters are split, and trials of splits: one that serves held-out rows worse than before is undone."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from typing import Any

import torch

from coterie.core.cohort import Cohort
from coterie.core.pytree import tree_map
from coterie.core.settings import setting
from coterie.parts.held_out_rows import HeldOutRows
from coterie.parts.split_tree import Cut, Node, pruned


@dataclass(frozen=True, kw_only=True)
class SplitTrials(HeldOutRows):
    """For methods that split, whose states hold `theta`, `leaves`, `tree`, `node`, `reports`, `progress` and `round`.

    Args:
        patience: A cluster is stationary only if its held-out loss has not fallen by 2% in so many rounds. Also, a
            split is judged so many rounds after it was made, and undone if the held-out loss of either half is higher
            than it was under the model before. Until then neither is split again.
        schedule: Rounds (1 is the first) in which a cluster is split, that with the greatest contrast, whatever the
            thresholds say: three rounds for four groups, as in the paper's experiments. Empty for none.
    """

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

    def may_split(self, node: Node, t: int) -> bool:
        """Whether a leaf may be split in round t: the split that made it is judged, and none of its own was undone."""
        on_trial = self.holdout and node.parent >= 0 and t - node.since <= self.patience
        return not on_trial and not node.refused and (not self.schedule or t + 1 in self.schedule)

    def in_turn(self, cuts: dict[int, Cut]) -> dict[int, Cut]:
        """The cuts of a round; with a schedule only the clearest, for k - 1 rounds are scheduled for k groups."""
        if not self.schedule or not cuts:
            return cuts
        clearest = max(cuts, key=lambda c: (isfinite(cuts[c].contrast), cuts[c].contrast))
        return {clearest: cuts[clearest]}

    def judged(self, state: Any, cohort: Cohort) -> Any:
        """The state without splits under which a half does worse on its held-out rows than under the model before."""
        for v, parent in list(state.tree.items()):
            since = state.tree[parent.children[0]].since if parent.children else state.round
            if not self.holdout or parent.judged or state.round - since < self.patience:
                continue
            state = state._replace(tree={**state.tree, v: parent._replace(judged=True)})
            if rises := [rise for child in parent.children if (rise := _rise(state, child, since))]:
                cohort.log(f"CFL: round {state.round + 1}: a split is undone: {rises[0]}")
                state = _undone(state, v)
        return state


def _rise(state: Any, child: int, since: int) -> str | None:
    """By how much the held-out loss of a half went up since its split, in words; None if it did not."""
    reports = state.reports
    known = (torch.isfinite(reports.held) & torch.isfinite(reports.before)).cpu()
    clients = (state.node == child) & (reports.when > since) & known
    now, before = (float(loss[clients].mean()) for loss in (reports.held, reports.before))
    if now > before:
        return f"the held-out loss of {int(clients.sum())} clients went up from {before:.4g} to {now:.4g}"
    return None


def _undone(state: Any, v: int) -> Any:
    """The state after the split of node v was undone: a leaf again, with the model that it had."""
    parent = state.tree[v]
    c, gone = (state.leaves.index(child) for child in parent.children)
    keep = [j for j in range(len(state.leaves)) if j != gone]
    leaves = [v if j == c else leaf for j, leaf in enumerate(state.leaves)]
    return state._replace(
        theta=tree_map(lambda x, own: torch.cat([x[:c], own[None], x[c + 1 :]])[keep], state.theta, parent.theta),
        leaves=tuple(leaves[j] for j in keep),
        tree=pruned(state.tree, v),
        node=torch.where(torch.isin(state.node, torch.tensor(parent.children)), v, state.node),
        moments=tree_map(lambda x: x[keep], state.moments),
        progress=tree_map(lambda x: x[keep], state.progress),
    )
