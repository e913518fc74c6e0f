"""Where the k models start: named strategies for algorithms that depend on their initialisation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms.base import choosing
from coterie.client import ClientStep, Local, Reply, local_update, mean_loss
from coterie.cohort import Cohort, slot_mean
from coterie.key import Key
from coterie.settings import nearest_name, setting, validate
from coterie.task import Task
from coterie.tree import Params, stack, take, tree_map


@dataclass(frozen=True)
class Start(ABC):
    """A way to find k models to start from."""

    @abstractmethod
    def __call__(self, k: int, lr: float, task: Task, cohort: Cohort, key: Key) -> Params:
        """K models, stacked (k, …). `lr` is the step size of the algorithm that asks."""


@dataclass(frozen=True)
class Random(Start):
    """k independent draws of the task's own initialisation."""

    def __call__(self, k: int, lr: float, task: Task, cohort: Cohort, key: Key) -> Params:
        """Draw k models."""
        return stack([task.init(key.fold(j)) for j in range(k)])


@dataclass(frozen=True)
class Balanced(Start):
    """Random models, drawn again until no cluster is starved.

    Args:
        share: A cluster is starved if it gets fewer than share·m/k of the m clients.
        tries: Draws at most; then the most balanced one is taken.
    """

    share: float = setting(0.4, low=0, high=1)
    tries: int = setting(20, low=1)

    def __call__(self, k: int, lr: float, task: Task, cohort: Cohort, key: Key) -> Params:
        """Draw until the clusters are balanced."""
        best, most = {}, -1
        for attempt in range(self.tries):
            theta = Random()(k, lr, task, cohort, key.fold(attempt))
            slot = cohort.gather(self.choose, theta, slots=k).slot.cpu()
            smallest = int(torch.bincount(slot, minlength=k).min())
            if smallest > most:
                best, most = theta, smallest
            if most >= self.share * len(cohort) / k:
                break
        return best

    def choose(self, task: Task) -> ClientStep:
        """Which model serves a client best."""
        return choosing(task)


@dataclass(frozen=True)
class FarthestFirst(Start):
    """Train some clients alone from one start, then repeatedly take the model of the client that is served worst.

    Only clients with at least the median number of rows are taken: a model of a handful of rows is an outlier that
    serves nobody. It needs `gather`: the server sees those clients' models.

    Args:
        clients: How many clients train, at most.
        steps: Full-batch gradient steps each of them takes.
        lr: Their step size; None takes the algorithm's own.
    """

    clients: int = setting(200, low=1)
    steps: int = setting(30, low=1)
    lr: float | None = setting(None, low=0)

    def __call__(self, k: int, lr: float, task: Task, cohort: Cohort, key: Key) -> Params:
        """Train, then choose k of the trained models."""
        some = cohort.sample(max(k, self.clients) / len(cohort))
        start, rate = task.init(key.fold(0)), torch.tensor(lr if self.lr is None else self.lr)
        reply = some.gather(self.train, {"theta": start, "lr": rate})
        trained, rows = reply.update, reply.weight
        few = rows < rows.median() if 2 * k <= len(some) else torch.zeros_like(rows, dtype=torch.bool)
        served = some.gather(self.loss, start).note["loss"]
        taken: list[int] = []
        while len(taken) < k:
            served[few] = -torch.inf
            served[taken] = -torch.inf  # a client is never taken twice
            taken.append(int(served.argmax()))
            own = some.gather(self.loss, take(trained, taken[-1])).note["loss"]
            served = own if len(taken) == 1 else served.minimum(own)
        return take(trained, torch.tensor(taken))

    def train(self, task: Task) -> ClientStep:
        """Full-batch steps from the common start."""

        def run(sent: dict[str, Any], local: Local) -> Reply:
            end, _ = local_update(task, sent["theta"], local.data, lr=sent["lr"], tau=self.steps)
            return Reply(end, local.data.mask.sum(), torch.zeros((), dtype=torch.long), {})

        return ClientStep(run)

    def loss(self, task: Task) -> ClientStep:
        """How badly a model serves a client."""

        def run(theta: Params, local: Local) -> Reply:
            note = {"loss": mean_loss(task, theta, local.data)}
            return Reply((), torch.ones(()), torch.zeros((), dtype=torch.long), note)

        return ClientStep(run)


@dataclass(frozen=True)
class RandomGroups(Start):
    """Split the clients into k random groups and train a model on each for a few rounds.

    Args:
        rounds: Rounds of averaging within the groups.
        steps: Full-batch steps per round.
    """

    rounds: int = setting(20, low=1)
    steps: int = setting(5, low=1)

    def __call__(self, k: int, lr: float, task: Task, cohort: Cohort, key: Key) -> Params:
        """Train a model per random group."""
        order = key.fold(k).shuffle(cohort.numbers)
        group = torch.empty_like(order)
        group[order] = torch.arange(len(cohort)) % k
        theta = tree_map(lambda x: x.to(cohort.device), Random()(k, lr, task, cohort, key))
        for _ in range(self.rounds):
            sent = {"theta": theta, "lr": torch.full((k,), lr), "group": torch.arange(k)}
            theta = slot_mean(cohort.combine(self.train, sent, slots=k, rows=group), otherwise=theta)
        return theta

    def train(self, task: Task) -> ClientStep:
        """Full-batch steps from the group's model."""

        def run(sent: dict[str, Any], local: Local) -> Reply:
            end, _ = local_update(task, sent["theta"], local.data, lr=sent["lr"], tau=self.steps)
            return Reply(end, torch.ones(()), sent["group"], {})

        return ClientStep(run)


@dataclass(frozen=True)
class Given(Start):
    """Models that the user brings."""

    models: Sequence[Mapping[str, Tensor]]

    def __call__(self, k: int, lr: float, task: Task, cohort: Cohort, key: Key) -> Params:
        """Check the models and stack them."""
        like = task.init(key)
        shapes = {n: tuple(x.shape) for n, x in like.items()}
        for j, model in enumerate(self.models):
            got = {n: tuple(x.shape) for n, x in model.items()}
            if got != shapes:
                raise ValueError(f"init: model {j} has parameters {got}, the task's have {shapes}")
        return stack([{n: torch.as_tensor(m[n]) for n in like} for m in self.models])


STARTS: dict[str, type[Start]] = {
    "random": Random,
    "farthest_first": FarthestFirst,
    "balanced": Balanced,
    "random_groups": RandomGroups,
}


def find_start(init: Any, k: int) -> Start:
    """The strategy meant by a name, a strategy, or k state dicts."""
    if isinstance(init, str):
        if init not in STARTS:
            raise ValueError(f"init must be one of {', '.join(STARTS)}, got '{init}'{nearest_name(init, STARTS)}")
        return STARTS[init]()
    if isinstance(init, Start):
        validate(init)
        return init
    if len(init) != k:
        raise ValueError(f"init: {k} models are wanted, one per cluster, got {len(init)}")
    return Given(tuple(init))
