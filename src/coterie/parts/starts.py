"""Where the k models start: named strategies for algorithms that depend on their initialisation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie.core.cohort import Cohort
from coterie.core.key import Key
from coterie.core.local import mean_loss
from coterie.core.pytree import Params, stack, take
from coterie.core.registry import known, register
from coterie.core.settings import setting, validate
from coterie.core.step import ClientStep, Local, Reply, client_step
from coterie.core.sums import slot_mean
from coterie.core.task import Task
from coterie.core.train import Descend, Models, Train
from coterie.parts.choosing import choose_nearest
from coterie.storage.names import nearest_name

NOISE = 0.01  # by which copies of one model differ
BETTER = 0.02  # of a loss: what a model must gain a client to be more than as good by chance


@dataclass(frozen=True)
class Start(ABC):
    """A way to find k models to start from."""

    @abstractmethod
    def __call__(self, k: int, lr: float, task: Task, cohort: Cohort, key: Key) -> Params:
        """K models, stacked (k, …). `lr` is the step size of the algorithm that asks."""


@register("random", "start")
@dataclass(frozen=True)
class Random(Start):
    """k independent draws of the task's own initialisation; of a module that is taken as it is, noisy copies."""

    def __call__(self, k: int, lr: float, task: Task, cohort: Cohort, key: Key) -> Params:
        """Draw k models."""
        drawn = [task.init(key.fold(j)) for j in range(k)]
        if task.same_start:  # else all clients would find all models equally good, and choose the first
            drawn[1:] = [_near(x, key.fold(j), lambda p: NOISE * p.abs().mean()) for j, x in enumerate(drawn[1:], 1)]
        return stack(drawn)


@register("balanced", "start")
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
            slot = cohort.gather(self.choose, theta, slots=k).slot
            smallest = int(torch.bincount(slot, minlength=k).min())
            if smallest > most:
                best, most = theta, smallest
            if most >= self.share * len(cohort) / k:
                break
        return best

    @client_step
    def choose(self, task: Task) -> ClientStep:
        """Which model serves a client best."""
        return choose_nearest(task)


@register("farthest_first", "start")
@dataclass(frozen=True)
class FarthestFirst(Start):
    """Train some clients alone from one start, then repeatedly take the model of the client that is served worst.

    Only clients with at least the median number of rows are taken: a model of a handful of rows is an outlier that
    serves nobody. A model that serves too few better than those before is passed over: it is an outlier, too, or
    of a hostile client. It needs `gather`: the server sees those clients' models.

    Args:
        clients: How many clients train, at most.
        steps: Full-batch gradient steps each of them takes.
        lr: Their step size; None takes the algorithm's own.
        support: So many clients must be served better by a model, its own client among them. Where hostile clients may
            speak for each other's models, it should be more than there are of them.
    """

    clients: int = setting(200, low=1)
    steps: int = setting(30, low=1)
    lr: float | None = setting(None, low=0)
    support: int = setting(2, low=0)

    def __call__(self, k: int, lr: float, task: Task, cohort: Cohort, key: Key) -> Params:
        """Train, then choose k of the trained models."""
        some = cohort.sample(max(k, self.clients) / len(cohort))
        start, rate = task.init(key.fold(0)), torch.tensor(lr if self.lr is None else self.lr)
        reply = some.gather(self.train, Models(start, rate))
        trained, rows, served = reply.update, reply.weight, reply.note["loss"]
        few = rows < rows.median() if 2 * k <= len(some) else torch.zeros_like(rows, dtype=torch.bool)
        taken: list[int] = []
        passed: list[int] = []
        while len(taken) < k:
            waiting = served.clone()
            waiting[few] = -torch.inf
            waiting[taken + passed] = -torch.inf  # a client is never taken twice
            if bool((waiting == -torch.inf).all()):  # nobody is left but those passed over
                return take(trained, torch.tensor(taken + passed)[:k])
            worst = int(waiting.argmax())
            own = some.gather(self.loss, take(trained, worst)).note["loss"]
            if int((own < served - BETTER * served.abs()).sum()) < self.support:
                passed.append(worst)
                continue
            served = own if not taken else served.minimum(own)
            taken.append(worst)
        return take(trained, torch.tensor(taken))

    @client_step
    def train(self, task: Task) -> Train:
        """Full-batch steps from the common start."""
        return Train(Descend(self.steps), weights="size")

    @client_step
    def loss(self, task: Task) -> ClientStep:
        """How badly a model serves a client."""

        def run(theta: Params, local: Local) -> Reply:
            return Reply(note={"loss": mean_loss(task, theta, local.data)})

        return ClientStep(run)


@register("random_groups", "start")
@dataclass(frozen=True)
class RandomGroups(Start):
    """Split the clients into k random groups and train a model on each for a few rounds.

    Args:
        rounds: Rounds of averaging within the groups.
        steps: Full-batch steps per round.
        fraction: Share of the clients that take part in each of these rounds.
    """

    rounds: int = setting(20, low=1)
    steps: int = setting(5, low=1)
    fraction: float = setting(1.0, low=0, high=1)

    def __call__(self, k: int, lr: float, task: Task, cohort: Cohort, key: Key) -> Params:
        """Train a model per random group."""
        group = torch.zeros(cohort.population, dtype=torch.long)
        group[cohort.clients[key.fold(k).shuffle(cohort.numbers)]] = torch.arange(len(cohort)) % k
        theta = Random()(k, lr, task, cohort, key)
        for r in range(self.rounds):
            some = cohort.fold(r).sample(self.fraction)
            sent = Models(theta, torch.tensor(lr), label=torch.arange(k))
            theta = slot_mean(some.combine(self.train, sent, slots=k, rows=group[some.clients]), otherwise=theta)
        return theta

    @client_step
    def train(self, task: Task) -> Train:
        """Full-batch steps from the group's model."""
        return Train(Descend(self.steps, steady=True))


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


def noisy_copies(task: Task, k: int, key: Key) -> Params:
    """K models (k, …) that differ from one random model by a little noise, so that none is better than the others."""
    first = task.init(key)
    return stack([_near(first, key.fold(j), lambda x: NOISE) for j in range(k)])


def _near(theta: Params, key: Key, noise: Callable[[Tensor], float | Tensor]) -> Params:
    """A model that differs from another by noise, of a deviation that is given for each tensor."""
    g = key.generator()
    return {n: x + noise(x) * torch.randn(x.shape, generator=g) for n, x in theta.items()}


def find_start(init: Any, k: int) -> Start:
    """The strategy meant by a name, a strategy, or k state dicts."""
    if isinstance(init, str):
        starts = {name: cls for name, cls in known("start").items() if issubclass(cls, Start)}
        if init not in starts:
            raise ValueError(f"init must be one of {', '.join(starts)}, got '{init}'{nearest_name(init, starts)}")
        return starts[init]()
    if isinstance(init, Start):
        validate(init)
        return init
    if len(init) != k:
        raise ValueError(f"init: {k} models are wanted, one per cluster, got {len(init)}")
    return Given(tuple(init))
