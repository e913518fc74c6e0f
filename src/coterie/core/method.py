"""What a method is: hyperparameters, and pure functions of a state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from coterie.core.card import Card
from coterie.core.cohort import Cohort
from coterie.core.key import Key
from coterie.core.local import each_nearest, membership
from coterie.core.model_tree import ModelTree
from coterie.core.pytree import Params, stacked
from coterie.core.settings import setting
from coterie.core.step import ClientStep, Local, Reply, Step, client_step
from coterie.core.task import Data, Task
from coterie.core.train import Models


class Report(NamedTuple):
    """What a round says besides its state.

    Attributes:
        clients: Who took part, as positions in the federation.
        loss: F_i of each of them at the model it was given, before its step; where clients neither choose nor train
            on all their rows, on the first minibatch.
    """

    clients: Tensor
    loss: Tensor


class Needs(NamedTuple):
    """What a method needs, for messages, tests and the docs' table.

    Attributes:
        task: The kind of task it is for; "" for any that has a loss per row and a target.
        points: Whether it groups rows rather than clients, and looks at no target.
        linear: Whether the model must be linear in its parameters.
        gather: Whether the server sees single clients' replies, so that there is no secure sum of them.
        soft: Whether a client adds to all clusters, to each as much as it has of it.
    """

    task: str = ""
    points: bool = False
    linear: bool = False
    gather: bool = False
    soft: bool = False


class Groups(NamedTuple):
    """Clients and models as they are now, for `Method.adopt`.

    Attributes:
        models: The clusters' models (k, …), which may be more or fewer than those of the state.
        clients: Where each client is among those that the state is about (m,).
        labels: The cluster of each (m,), -1 where it is to be found yet.
    """

    models: Params
    clients: Tensor
    labels: Tensor


class Coefficient(NamedTuple):
    """A parameter of a cluster's model that people read.

    Attributes:
        name: Of the parameter.
        cluster: Whose model it is of.
        mean: Its value.
        error: Its standard error, None where nobody knows it.
    """

    name: str
    cluster: int
    mean: float
    error: float | None


class Served(NamedTuple):
    """What clients are sent to be served with.

    Attributes:
        message: `Models` with labels, or whatever the step `own_model` makes a client's model from.
        whole: Whether every client is sent all of it; otherwise the row of its cluster.
    """

    message: Any
    whole: bool = False


@dataclass(frozen=True)
class Method(ABC):
    """Hyperparameters, and pure functions of a state.

    A subclass is a frozen dataclass with no logic in its constructor. All that it learns is in a NamedTuple, its
    state; nothing is remembered anywhere else, so a checkpoint is complete by construction.
    """

    needs: ClassVar[Needs] = Needs()
    quick: ClassVar[Mapping[str, Any]] = {}  # settings with which it does little work, for the conformance suite

    def _repr_html_(self) -> str:
        return Card(type(self).__name__, [(f.name, repr(getattr(self, f.name))) for f in fields(self)]).html()

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
        """Every client's cluster as the server knows it (m,); -1 for a client that has not taken part yet."""

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

    def adopt(self, state: Any, groups: Groups, task: Task) -> tuple[Method, Any]:
        """The method and the state that go on with these models and clients, for `Run.update`.

        Args:
            state: About the clients of before.
            groups: The models, and which clients are with which.
            task: What is learnt.

        Raises:
            ValueError: It cannot, or not with these settings.
        """
        raise ValueError(
            f"update: {type(self).__name__} cannot go on with other clients than it began with: it has no `adopt`, as "
            "IFCA, CFL, FedX, MixedRegression, MixedEffects, FedAvg, and Personal around them have"
        )

    def grows(self) -> bool:
        """Whether `adopt` takes more models than there were; else `Run.update` looks for no new groups."""
        return False

    def members(self, state: Any) -> Tensor:
        """How many clients each cluster has, as the server knows it (k,)."""
        known = self.labels(state)
        clusters = stacked(self.models(state))
        return torch.bincount(known[known >= 0], minlength=clusters)

    def changed(self, before: Any, after: Any) -> int:
        """How many clients changed their cluster from one state to the next."""
        old, new = self.labels(before), self.labels(after)
        return int(((old != new) & (old >= 0)).sum())

    def own_choice(self) -> Step | None:
        """The step by which a client that is sent all models chooses its own; None where the server decides."""
        return None

    def served(self, state: Any) -> Served:
        """What clients are sent to be served with: the model of their cluster."""
        models = self.models(state)
        return Served(Models(models, label=torch.arange(stacked(models))))

    def own_model(self) -> Step | None:
        """The step by which a client makes a model of its own from what `served` sends, on its training rows.

        Its update is `Models`: the model, which never leaves the client, and the client's cluster. None where clients
        use what they are sent as it is.
        """
        return None

    def deviations(self, state: Any, task: Task, data: Data | None, x: Tensor) -> Tensor:
        """The standard deviation of what is predicted for each row of x (n,), of a client with these training rows.

        Args:
            state: What was learnt.
            task: The task.
            data: The client's rows; None where nothing is known of it.
            x: The rows to predict.

        Raises:
            ValueError: The method knows none.
        """
        raise ValueError(f"{type(self).__name__} knows no standard deviations of predictions; MixedEffects does")

    def default_task(self) -> Task:
        """The task where none is given."""
        raise ValueError(f"fit: {type(self).__name__} needs a task")

    def check_task(self, task: Task) -> None:
        """Refuse a task of another kind than the method needs; a task that a user made has no kind."""
        wanted, given = self.needs.task, task.spec.get("kind", self.needs.task)
        if wanted and given != wanted:
            raise ValueError(f"{type(self).__name__}: the task must be a Task.{wanted}, got a task of kind '{given}'")

    def tree(self, state: Any) -> ModelTree | None:
        """The models on the way to the clusters' models, for methods that split; None for others."""
        return None

    def report(self, state: Any) -> str | None:
        """What was learnt besides models and clusters, as text; None where there is nothing."""
        return None

    def coefficients(self, state: Any) -> list[Coefficient]:
        """The parameters that people read one by one, for reports; empty where nobody does."""
        return []

    def doubts(self, state: Any, cohort: Cohort) -> Iterator[str]:
        """What speaks against the result when a run ends, a sentence each. Clients may be asked, uncharged."""
        yield from ()

    def done(self, state: Any) -> bool:
        """Whether there is nothing left to do."""
        return False


@dataclass(frozen=True)
class PointMethod(Method):
    """A method that groups points, of which a client may hold several groups'.

    Which cluster a point is in is known to its client alone. A state holds `clients` and `members`: how many clients
    there are, and how many points each cluster has. `models` are k, one for each cluster, or one that tells them all
    apart.

    Args:
        k: The clusters.
    """

    k: int = setting(low=1)

    def check_points(self, cohort: Cohort) -> None:
        """Refuse fewer points than clusters."""
        if self.k > (points := int(cohort.sizes.sum())):
            raise ValueError(
                f"{type(self).__name__}: k must be at most the number of points of all clients, {points}, got {self.k}"
            )

    @abstractmethod
    def points(self, task: Task) -> ClientStep:
        """A client step, sent what `asked` returns: the cluster of every row, in the note "label" (n,)."""

    def asked(self, state: Any) -> Any:
        """What the step `points` is sent: the models."""
        return self.models(state)

    def models_asked(self, sent: Any) -> Params:
        """The models in what `asked` returned."""
        return sent

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
        return cohort.gather(self.commonest, self.asked(state), slots=self.k).slot

    def assign(self, state: Any, task: Task, data: Data) -> int:
        """The commonest cluster among these points."""
        return int(self.assign_points(state, task, data).mode().values)

    @client_step
    def commonest(self, task: Task) -> ClientStep:
        """The commonest cluster among a client's points."""
        inner = self.points(task)

        def run(sent: Any, local: Local) -> Reply:
            label = inner.run(sent, local).note["label"]
            return Reply(slot=membership(label, self.k, local.data.mask).sum(0).argmax())

        return ClientStep(run, inner.draw)
