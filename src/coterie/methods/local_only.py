"""LocalOnly: every client trains alone, the *local model* of the IFCA paper's tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from coterie.core.cohort import Cohort
from coterie.core.features import require_linear
from coterie.core.key import Key
from coterie.core.local import mean_loss, nearest
from coterie.core.method import Method, Needs, Report
from coterie.core.pytree import Params, flat, put_rows, stacked, tree_map, unflat
from coterie.core.registry import register
from coterie.core.step import ClientStep, Local, Reply, client_step
from coterie.core.task import Data, Task
from coterie.core.train import Models, Train
from coterie.parts.least_squares import least_squares, normal_equations
from coterie.parts.local_training import LocalTraining


class State(NamedTuple):
    """Every client's own model."""

    theta: Params  # (m, …)
    round: int


@register("local_only")
@dataclass(frozen=True, kw_only=True)
class LocalOnly(LocalTraining, Method):
    """Gradient descent on each client's own rows, with no averaging.

    It is a yardstick and no federation: the state holds the m models only so that they are scored as all others are,
    and nothing is charged for moving them.

    Args:
        refine: "steps" of gradient descent; or "least_squares", the shortest model that fits the client's rows best, in
            one round, for squared loss and a model that is linear in its parameters.

    Example:
        >>> import coterie as ct
        >>> federation = ct.data.rotated_digits(clients=8, seed=0)
        >>> task = ct.Task.classifier(ct.models.MLP(64, 32, 10))
        >>> run = ct.fit(ct.LocalOnly(), task, federation, rounds=3, seed=0)
        >>> len(run.models), run.labels.tolist()
        (8, [0, 1, 2, 3, 4, 5, 6, 7])
    """

    needs = Needs(gather=True)

    refine: Literal["steps", "least_squares"] = "steps"

    def start(self, task: Task, cohort: Cohort, key: Key) -> State:
        """All clients start from one random model; from zero, if they solve for theirs."""
        theta = task.init(key.fold(0))
        if self._solves:
            require_linear(task, cohort.federation.train.x[:2], f"{type(self).__name__}: refine='least_squares'")
            theta = tree_map(torch.zeros_like, theta)
        return State(tree_map(lambda x: x.expand(cohort.population, *x.shape), theta), 0)

    def round(self, state: State, cohort: Cohort) -> tuple[State, Report]:
        """Every client goes on from its own model."""
        chosen = cohort.sample(self.fraction)
        sent = Models(state.theta, self.step_size(state.round))
        reply = chosen.uncharged().gather(self.solve if self._solves else self.step, sent, rows=chosen.clients)
        theta = reply.update
        if len(chosen) < len(cohort):
            theta = put_rows(state.theta, chosen.clients, theta)
        return State(theta, state.round + 1), Report(chosen.clients, reply.note["loss"])

    @client_step
    def step(self, task: Task) -> Train:
        """LocalUpdate."""
        return Train(self.descend(), weights=self.weights)

    @client_step
    def solve(self, task: Task) -> ClientStep:
        """The model that fits the client's rows best."""

        def run(sent: Models, local: Local) -> Reply:
            gram, pull = normal_equations(task, sent.theta, local.data)
            change = least_squares(gram[None], pull[None])[0]
            theta = unflat(flat(sent.theta, 0) + change.to(local.data.x.dtype), sent.theta)
            return Reply(theta, note={"loss": mean_loss(task, sent.theta, local.data)})

        return ClientStep(run)

    def done(self, state: State) -> bool:
        """Whether all have solved for their models."""
        return self._solves and self.fraction == 1 and state.round > 0

    @property
    def _solves(self) -> bool:
        return self.refine == "least_squares"

    def models(self, state: State) -> Params:
        """One model per client."""
        return state.theta

    def labels(self, state: State) -> Tensor:
        """Every client is a cluster of its own."""
        return torch.arange(stacked(state.theta))

    def place(self, state: State, cohort: Cohort) -> Tensor:
        """Every client is a cluster of its own."""
        return cohort.clients

    def assign(self, state: State, task: Task, data: Data) -> int:
        """The client whose model serves these rows best."""
        return int(nearest(task, state.theta, data)[0])
