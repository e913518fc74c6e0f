"""FedAvg: one model for all, the *global model* that clustered methods are compared with.

Communication-Efficient Learning of Deep Networks from Decentralized Data
    H. Brendan McMahan, Eider Moore, Daniel Ramage, Seth Hampson, Blaise Agüera y Arcas. AISTATS 2017, Algorithm 1.

Federated Optimization in Heterogeneous Networks (FedProx, `prox` > 0)
    Tian Li, Anit Kumar Sahu, Manzil Zaheer, Maziar Sanjabi, Ameet Talwalkar, Virginia Smith. MLSys 2020, Algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.core.cohort import Cohort
from coterie.core.key import Key
from coterie.core.method import Groups, Method, Report
from coterie.core.pytree import Params, stack, take
from coterie.core.registry import register
from coterie.core.settings import setting
from coterie.core.step import client_step
from coterie.core.sums import slot_mean
from coterie.core.task import Data, Task
from coterie.core.train import Models, Train
from coterie.parts.local_training import LocalTraining
from coterie.parts.server_step import ServerStep


class State(NamedTuple):
    """What FedAvg knows after a round."""

    theta: Params  # the global model, stacked (1, …)
    clients: int  # m
    round: int
    moments: Any = ()  # what the server's optimiser remembers


@register("fedavg")
@dataclass(frozen=True, kw_only=True)
class FedAvg(LocalTraining, ServerStep, Method):
    """Every round, the mean of the participants' locally trained models, or the server's step towards it (FedOpt).

    Args:
        prox: FedProx's μ ≥ 0, the pull of each client's model towards the one it was sent.

    Example:
        >>> import coterie as ct
        >>> federation = ct.data.rotated_digits(clients=8, seed=0)
        >>> task = ct.Task.classifier(ct.models.MLP(64, 32, 10))
        >>> run = ct.fit(ct.FedAvg(prox=0.01), task, federation, rounds=3, seed=0)
        >>> len(run.models), len(run.history)
        (1, 3)
    """

    prox: float = setting(0.0, low=0)

    def start(self, task: Task, cohort: Cohort, key: Key) -> State:
        """One model, drawn at random."""
        theta = stack([task.init(key.fold(0))])
        return State(theta, cohort.population, 0, self.begin_server(theta, task))

    def round(self, state: State, cohort: Cohort) -> tuple[State, Report]:
        """Sample clients, let them train, average."""
        chosen = cohort.sample(self.fraction)
        sums = chosen.combine(self.step, Models(take(state.theta, 0), self.step_size(state.round)))
        mean = slot_mean(sums, otherwise=state.theta)
        theta, moments = self.advance(state.theta, mean, sums.weight, state.moments, cohort.task)
        after = state._replace(theta=theta, moments=moments, round=state.round + 1)
        return after, Report(chosen.clients, sums.note["loss"])

    @client_step
    def step(self, task: Task) -> Train:
        """ClientUpdate, with the proximal term of FedProx."""
        return Train(self.descend(self.prox), weights=self.weights)

    def models(self, state: State) -> Params:
        """The one model."""
        return state.theta

    def labels(self, state: State) -> Tensor:
        """Everybody is in the one cluster."""
        return torch.zeros(state.clients, dtype=torch.long)

    def place(self, state: State, cohort: Cohort) -> Tensor:
        """Everybody is in the one cluster."""
        return torch.zeros(len(cohort), dtype=torch.long)

    def join(self, state: State, newcomers: Cohort) -> State:
        """Everybody is in the one cluster."""
        return state._replace(clients=newcomers.population)

    def adopt(self, state: State, groups: Groups, task: Task) -> tuple[FedAvg, State]:
        """Everybody is in the one cluster; the server's optimiser begins anew."""
        moments = self.begin_server(groups.models, task)
        return self, state._replace(theta=groups.models, clients=len(groups.clients), moments=moments)

    def assign(self, state: State, task: Task, data: Data) -> int:
        """Everybody is in the one cluster."""
        return 0
