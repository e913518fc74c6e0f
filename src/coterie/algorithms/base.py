"""What an algorithm is, and the local training that several share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from coterie.client import ClientStep, Local, Plan, Reply, each_model, local_update, mean_loss, minibatches
from coterie.cohort import Cohort
from coterie.key import Key
from coterie.parameter_tree import ParameterTree
from coterie.settings import setting
from coterie.task import Data, Task
from coterie.tree import Params

_BATCHES, _ROWS = 1, 2  # streams under a client's key


class Report(NamedTuple):
    """What a round tells besides its state.

    Attributes:
        clients: Who took part, as positions in the federation.
        loss: F_i of each of them at the model it was given, before its step; where clients neither choose nor train
            on all their rows, on the first minibatch.
    """

    clients: Tensor
    loss: Tensor


@dataclass(frozen=True)
class Algorithm(ABC):
    """Hyperparameters, and pure functions of a state.

    A subclass is a frozen dataclass with no logic in its constructor. All that it learns is in a NamedTuple, its
    state; nothing is remembered anywhere else, so a checkpoint is complete by construction.
    """

    @abstractmethod
    def start(self, task: Task, cohort: Cohort, key: Key) -> Any:
        """The first state. It may ask the clients, and what that costs is counted."""

    @abstractmethod
    def round(self, state: Any, cohort: Cohort) -> tuple[Any, Report]:
        """One round: the next state, leaving the old one alone."""

    @abstractmethod
    def models(self, state: Any) -> Params:
        """The models learnt, stacked (k, …)."""

    @abstractmethod
    def labels(self, state: Any) -> Tensor:
        """Every client's cluster as the server knows it (m,); -1 for a client not heard of yet."""

    @abstractmethod
    def place(self, state: Any, cohort: Cohort) -> Tensor:
        """The cluster of every client of the cohort under this state, chosen on the cohort's rows."""

    @abstractmethod
    def assign(self, state: Any, task: Task, data: Data) -> int:
        """The cluster of one client, old or new."""

    def join(self, state: Any, newcomers: Cohort) -> Any:
        """The state with more clients, who are the last of the federation, placed as `assign` places a new one.

        Args:
            state: About the clients before them.
            newcomers: They alone.

        Raises:
            ValueError: It takes nobody once it has begun, or not these.
        """
        raise ValueError(f"{type(self).__name__} takes no clients once it has begun")

    def members(self, state: Any) -> Tensor:
        """How many clients each cluster has, as the server knows it (k,)."""
        known = self.labels(state)
        clusters = len(next(iter(self.models(state).values())))
        return torch.bincount(known[known >= 0], minlength=clusters)

    def changed(self, before: Any, after: Any) -> int:
        """How many clients changed their cluster from one state to the next."""
        old, new = self.labels(before), self.labels(after)
        return int(((old != new) & (old >= 0)).sum())

    def default_task(self) -> Task:
        """The task where none is given."""
        raise ValueError(f"fit: {type(self).__name__} needs a task")

    def tree(self, state: Any) -> ParameterTree | None:
        """The models on the way to the clusters' models, for algorithms that split; None for others."""
        return None

    def done(self, state: Any) -> bool:
        """Whether there is nothing left to do."""
        return False


@dataclass(frozen=True)
class PointAlgorithm(Algorithm):
    """An algorithm that groups points, of which a client may hold several groups'.

    Which cluster a point is in is known to its client alone. A state holds `clients` and `members`: how many clients
    there are, and how many points each cluster has. `models` are k, one for each cluster, or one that tells them all
    apart.

    Args:
        k: The clusters.
    """

    k: int = setting(low=1)

    def check_kind(self, task: Task, kind: str) -> None:
        """Refuse a task of another kind; of one that a user made, nothing is known."""
        if (given := task.spec.get("kind", kind)) != kind:
            raise ValueError(f"{type(self).__name__}: the task must be a Task.{kind}, got a task of kind '{given}'")

    def check_points(self, cohort: Cohort) -> None:
        """Refuse fewer points than clusters."""
        if self.k > (points := int(cohort.sizes.sum())):
            raise ValueError(
                f"{type(self).__name__}: k must be at most the number of points of all clients, {points}, got {self.k}"
            )

    @abstractmethod
    def points(self, task: Task) -> ClientStep:
        """A client step, sent the models: the cluster of every row, in the note "label" (n,)."""

    def assign_points(self, state: Any, task: Task, data: Data) -> Tensor:
        """The cluster of every row of a client that may have taken no part (n,)."""
        return each_nearest(task, self.models(state), data)

    def labels(self, state: Any) -> Tensor:
        """Clients as a whole are in no cluster."""
        return torch.full((state.clients,), -1)

    def join(self, state: Any, newcomers: Cohort) -> Any:
        """Clients as a whole need no placing, and their points choose in every round."""
        return state._replace(clients=newcomers.population)

    def members(self, state: Any) -> Tensor:
        """How many points each cluster has (k,)."""
        return state.members

    def place(self, state: Any, cohort: Cohort) -> Tensor:
        """The commonest cluster among each client's points."""
        return cohort.gather(self.commonest, self.models(state), slots=self.k).slot.cpu()

    def assign(self, state: Any, task: Task, data: Data) -> int:
        """The commonest cluster among these points."""
        return int(self.assign_points(state, task, data).mode().values)

    def commonest(self, task: Task) -> ClientStep:
        """The commonest cluster among a client's points."""
        inner = self.points(task)

        def run(theta: Params, local: Local) -> Reply:
            label = inner.run(theta, local).note["label"]
            count = membership(label, self.k, local.data.mask).sum(0)
            return Reply((), torch.ones(()), count.argmax(), {})

        return ClientStep(run, inner.draw)


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """Hyperparameters of the training that clients do on their own rows.

    Args:
        lr: Step size γ.
        tau: Local steps τ per round.
        batch: Rows per local step, from shuffled passes over the client's rows; None takes all of them each time.
        decay: The step size of round t is γ·decayᵗ.
        fraction: Share of the clients that take part in a round.
        weights: "uniform": every client counts the same; "size": by its number of rows.
    """

    lr: float = setting(0.1, low=0)
    tau: int = setting(10, low=1)
    batch: int | None = setting(None, low=1)
    decay: float = setting(1.0, low=0, high=1)
    fraction: float = setting(1.0, low=0, high=1)
    weights: Literal["uniform", "size"] = "uniform"

    def step_size(self, t: int) -> Tensor:
        """γ·decayᵗ, as something that can be sent to clients."""
        return torch.tensor(self.lr * self.decay**t)

    def weight(self, data: Data) -> Tensor:
        """How heavily a client counts in a mean."""
        return data.mask.sum() if self.weights == "size" else torch.ones((), device=data.mask.device)

    def draw_batches(self, n: int, key: Key, when: tuple[int, ...]) -> Tensor | None:
        """Row numbers of every local step (τ, batch), or None for full batches."""
        if self.batch is None:
            return None
        return minibatches(n, max(1, min(self.batch, n)), self.tau, key.fold(_BATCHES, *when).generator())

    def train(self, task: Task, prox: float = 0.0) -> ClientStep:
        """A client step: train the model that was sent, and send back the result."""

        def run(shared: dict[str, Any], local: Local) -> Reply:
            theta, lr = shared["theta"], shared["lr"]
            batches = local.draws["batches"] if self.batch else None
            end, loss = local_update(task, theta, local.data, lr=lr, tau=self.tau, batches=batches, prox=prox)
            return Reply(end, self.weight(local.data), torch.zeros((), dtype=torch.long), {"loss": loss})

        def draw(n: int, key: Key, when: tuple[int, ...]) -> dict[str, Any]:
            return {"batches": self.draw_batches(n, key, when)}

        plan = Plan(self.tau, prox, weights=self.weights, steady=self.decay == 1) if self.batch is None else None
        return ClientStep(run, draw if self.batch else None, plan)


def hold_out(n: int, share: float, key: Key) -> tuple[Tensor, Tensor]:
    """The rows of a client that are kept out of training, the same in every round, and the others."""
    order = torch.randperm(n, generator=key.fold(_ROWS).generator())
    return order[: int(share * n)], order[int(share * n) :]


def among(rows: Tensor, batches: Tensor) -> Tensor:
    """Batches of positions in `rows` as batches of rows; -1 stays no row."""
    return torch.where(batches < 0, -1, rows[batches])


def nearest(task: Task, theta: Params, data: Data) -> tuple[Tensor, Tensor]:
    """Argmin over j of F(θ_j) on these rows, and that loss, for models stacked (k, …)."""
    losses = vmap(lambda t: mean_loss(task, t, data))(theta)
    j = losses.nan_to_num(nan=torch.inf, posinf=torch.inf).argmin()  # nobody chooses a model that has diverged
    return j, losses.index_select(0, j.reshape(1))[0]


def each_nearest(task: Task, theta: Params, data: Data) -> Tensor:
    """Argmin over j of the loss of θ_j for every row (n,), for models stacked (k, …)."""
    losses = each_model(lambda t: task.loss(t, data))(theta)
    return losses.nan_to_num(nan=torch.inf, posinf=torch.inf).argmin(0)


def membership(label: Tensor, k: int, mask: Tensor) -> Tensor:
    """1 where a real row (n,) is in a cluster (n, k)."""
    return (label[:, None] == torch.arange(k, device=label.device)) * mask[:, None]


def remembered(labels: Any, n: int) -> Tensor:
    """The labels that a client kept (…, n); chunks may have padded them to another length.

    Raises:
        ValueError: It kept none.
    """
    if not isinstance(labels, Tensor):
        raise ValueError("clients remember nothing of this run: they missed its start, or their memory was lost")
    short = n - labels.shape[-1]
    return torch.nn.functional.pad(labels, (0, short), value=-1) if short > 0 else labels[..., :n]


def choosing(task: Task) -> ClientStep:
    """A client step: which of the models sent serves the client best, and how well."""

    def run(theta: Params, local: Local) -> Reply:
        j, loss = nearest(task, theta, local.data)
        return Reply((), torch.ones(()), j, {"loss": loss})

    return ClientStep(run)
