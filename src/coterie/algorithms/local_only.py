"""LocalOnly: every client trains alone, the *local model* of the IFCA paper's tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from coterie.algorithms.base import Algorithm, LocalTraining, Report, nearest
from coterie.client import ClientStep
from coterie.cohort import Cohort
from coterie.key import Key
from coterie.task import Data, Task
from coterie.tree import Params, tree_map


class State(NamedTuple):
    """Every client's own model."""

    theta: Params  # (m, …)
    round: int


@dataclass(frozen=True, kw_only=True)
class LocalOnly(LocalTraining, Algorithm):
    """Gradient descent on each client's own rows, with no averaging.

    It is a yardstick and no federation: the state holds the m models only so that they are scored as all others are,
    and nothing is charged for moving them.

    Example:
        >>> import coterie as ct
        >>> federation = ct.data.rotated_digits(clients=8, seed=0)
        >>> task = ct.Task.classifier(ct.models.MLP(64, 32, 10))
        >>> run = ct.fit(ct.LocalOnly(), task, federation, rounds=3, seed=0)
        >>> len(run.models), run.labels.tolist()
        (8, [0, 1, 2, 3, 4, 5, 6, 7])
    """

    def start(self, task: Task, cohort: Cohort, key: Key) -> State:
        """All clients start from one random model."""
        one = task.init(key.fold(0))
        return State(tree_map(lambda x: x.to(cohort.device).expand(cohort.population, *x.shape), one), 0)

    def round(self, state: State, cohort: Cohort) -> tuple[State, Report]:
        """Every client goes on from its own model."""
        chosen = cohort.sample(self.fraction)
        lr = self.step_size(state.round).expand(cohort.population)
        reply = chosen.uncharged().gather(self.step, {"theta": state.theta, "lr": lr}, rows=chosen.clients)
        theta = reply.update
        if len(chosen) < len(cohort):
            theta = tree_map(
                lambda old, new: old.to(new).index_copy(0, _on(chosen.clients, new), new), state.theta, theta
            )
        return State(theta, state.round + 1), Report(chosen.clients, reply.note["loss"])

    def step(self, task: Task) -> ClientStep:
        """LocalUpdate."""
        return self.train(task)

    def models(self, state: State) -> Params:
        """One model per client."""
        return state.theta

    def labels(self, state: State) -> Tensor:
        """Every client is a cluster of its own."""
        return torch.arange(len(next(iter(state.theta.values()))))

    def place(self, state: State, cohort: Cohort) -> Tensor:
        """Every client is a cluster of its own."""
        return cohort.clients

    def assign(self, state: State, task: Task, data: Data) -> int:
        """The client whose model serves these rows best."""
        return int(nearest(task, state.theta, data)[0])


def _on(index: Tensor, like: Tensor) -> Tensor:
    return index.to(like.device)
