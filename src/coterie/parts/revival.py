"""Revival: a cluster that has been empty for long is started again from a client that is served badly."""

from __future__ import annotations

from typing import Any

import torch

from coterie.core.cohort import Cohort
from coterie.core.pytree import take, tree_map
from coterie.core.step import client_step
from coterie.core.sums import Sums
from coterie.core.task import Task
from coterie.core.train import Models, Train
from coterie.parts.local_training import LocalTraining


class Revival(LocalTraining):
    """For methods with `revive`, whose states hold `theta` (r, k, …) and rounds `empty` (r, k)."""

    revive: int | None
    shared: tuple[str, ...]

    def revived(self, state: Any, sums: Sums, chosen: Cohort) -> Any:
        """The state with every cluster that has been empty for `revive` rounds trained anew by one participant."""
        if self.revive is None or not bool((dead := state.empty >= self.revive).any()):
            return state
        theta, empty, served = tree_map(torch.clone, state.theta), state.empty.clone(), sums.note["loss"].clone()
        for r, j in dead.nonzero().tolist():
            worst = int(served[:, r].argmax())
            served[worst, r] = -torch.inf  # the next empty cluster takes another client
            own = take(take(state.theta, r), int(sums.note["label"][worst, r]))
            reply = chosen.only([worst]).fold(r, j).gather(self.train, Models(own, self.step_size(state.round)))
            for name, x in reply.update.items():
                if name not in self.shared:
                    theta[name][r, j] = x[0]
            empty[r, j] = 0
        return state._replace(theta=theta, empty=empty, still=0)  # so that everybody is sent the new models too

    @client_step
    def train(self, task: Task) -> Train:
        """Train the model that was sent, at one client."""
        return Train(self.descend(), weights=self.weights)
