"""Clients that are sent all models and choose the one that serves them best."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coterie.core.cohort import Cohort
from coterie.core.local import model_losses, nearest, personal_of
from coterie.core.method import Method
from coterie.core.pytree import Params, stacked
from coterie.core.step import ClientStep, Local, Reply, Step, client_step
from coterie.core.task import Data, Task


class Choosing(Method):
    """A method whose clients choose among its models by their loss: how clients are placed, old ones and new ones."""

    @client_step
    def choose(self, task: Task) -> ClientStep:
        """Which of the models that are sent has the lowest loss on the client's rows."""
        return choose_nearest(task)

    def own_choice(self) -> Step | None:
        """Clients choose by themselves."""
        return self.choose

    def place(self, state: Any, cohort: Cohort) -> Tensor:
        """The model with the lowest loss, for every client of the cohort."""
        models = self.models(state)
        return cohort.gather(self.choose, models, slots=stacked(models)).slot

    def place_new(self, state: Any, newcomers: Cohort) -> Tensor:
        """The clusters of clients that join; -1 where nobody has a label yet, or nobody's is known to the server."""
        if bool((self.labels(state) >= 0).any()):
            return self.place(state, newcomers)
        return torch.full((len(newcomers),), -1)

    def assign(self, state: Any, task: Task, data: Data) -> int:
        """The model with the lowest loss, for a client that may have taken no part in training."""
        return int(nearest(task, self.models(state), data)[0])


def choose_nearest(task: Task) -> ClientStep:
    """A client step: which of the models sent (k, …) has the lowest loss on the client's rows, and how low it is."""

    def run(theta: Params, local: Local) -> Reply:
        j, loss = nearest(task, theta, local.data, personal_of(local.memory))
        return Reply(slot=j, note={"loss": loss})

    return ClientStep(run)


def try_all(task: Task) -> ClientStep:
    """A client step: the loss of each of the models sent (k, …) on the client's rows."""

    def run(theta: Params, local: Local) -> Reply:
        return Reply(note={"losses": model_losses(task, theta, local.data, personal_of(local.memory))})

    return ClientStep(run)


def counted(labels: Tensor, k: int) -> Tensor:
    """How many clients are in each of k clusters (r, k), from their labels (r, m).

    Example:
        >>> counted(torch.tensor([[0, 1, 1, -1]]), 3).tolist()
        [[1, 2, 0]]
    """
    return torch.stack([(labels == j).sum(1) for j in range(k)], 1)
