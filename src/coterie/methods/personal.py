"""Personal models on any method: every client goes on from the model of its cluster, on its own rows.

Two ways are known by these papers; both come with the choice of how far to go, made by each client on rows that it
left out.

Salvaging Federated Learning by Local Adaptation (fine-tuning)
    Tao Yu, Eugene Bagdasaryan, Vitaly Shmatikov. 2020 (arXiv:2002.04758).

Ditto: Fair and Robust Federated Learning Through Personalization (the pull, `strengths`)
    Tian Li, Shengyuan Hu, Ahmad Beirami, Virginia Smith. ICML 2021, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from coterie.core.cohort import Cohort
from coterie.core.features import linearity
from coterie.core.key import Key
from coterie.core.local import personal_of
from coterie.core.method import Groups, Method, Needs, PointMethod, Report, Served
from coterie.core.model_tree import ModelTree
from coterie.core.pytree import Params, take, tree_map
from coterie.core.registry import register
from coterie.core.settings import setting
from coterie.core.step import ClientStep, Draw, Local, Reply, Step, client_step, derived
from coterie.core.task import Data, Task
from coterie.core.train import Descend, Models
from coterie.methods.fedavg import FedAvg
from coterie.methods.local_only import LocalOnly
from coterie.parts.local_training import LocalTraining
from coterie.parts.personal_fits import Descent, fit_by_steps, fit_exactly

PULLS = (0.1, 0.3, 1.0, 3.0, 10.0)  # of a closed form, in rows: few rows cannot tell closer ones apart


class _Inner:
    """What the wrapped method needs; of the class, nothing in particular."""

    def __get__(self, wrapper: Personal | None, owner: type) -> Needs:
        return Needs() if wrapper is None else wrapper.method.needs


@register("personal")
@dataclass(frozen=True)
class Personal(Method):
    """Train by another method; then every client goes on from what it is sent, as far as rows it left out speak for.

    Rounds, states and messages are those of the method. A client's own model is made where its rows are, whenever it
    is served, and sent nowhere. Where clients are sent all models to choose among, all of them are beginnings.

    Args:
        method: Any that trains models for clients or groups of them, such as `FedAvg`, `IFCA` or `CFL`.
        strengths: Pulls s ≥ 0 towards the model that was sent: candidates minimise Σ loss + s‖v - θ‖² over the client's
            rows, Ditto's problem with λ = 2s/n. None takes 0.1 to 10 where the model is linear in its parameters and
            the loss squared, for which there is a closed form; and 0, fine-tuning, elsewhere.
        steps: Where there is no closed form: after how many gradient steps there is a candidate.
        lr: The size of these steps; None takes the method's.
        caution: A personal model is kept if it serves rows that were left out better on average, by more than so many
            standard errors. With 0 the mean error over clients is lowest; with 2 few clients are worse off than with
            the model that they were sent.

    Example:
        >>> import coterie as ct
        >>> federation = ct.data.rotated_digits(clients=8, seed=0)
        >>> task = ct.Task.classifier(ct.models.MLP(64, 32, 10))
        >>> run = ct.fit(ct.Personal(ct.FedAvg()), task, federation, rounds=3, evaluations=1)
        >>> run.score > ct.fit(ct.FedAvg(), task, federation, rounds=3, evaluations=1).score
        True
    """

    needs: ClassVar[Needs] = cast(Needs, _Inner())
    quick = {"method": FedAvg(tau=3), "steps": (1, 3)}

    method: Method
    strengths: tuple[float, ...] | None = None
    steps: tuple[int, ...] = (5, 20)
    lr: float | None = setting(None, low=0)
    caution: float = setting(0.0, low=0)

    # --- a client's own model -------------------------------------------------------------------------------------

    def served(self, state: Any) -> Served:
        """All models, where clients are sent them anyway to choose among; else what the method sends."""
        served = self.method.served(state)
        chooses = self.method.own_choice() is not None and self.method.own_model() is None
        return served._replace(whole=served.whole or chooses)

    def own_model(self) -> Step:
        """Clients make their own."""
        return self.personalise

    @client_step
    def personalise(self, task: Task) -> ClientStep:
        """From what was sent to a model of the client's own."""
        begin, draw = self._beginning(task)
        is_linear, inner = linearity(task), self.method.own_model()

        def run(sent: Any, local: Local) -> Reply:
            data, start = local.data, begin(sent, local)
            if inner is None and is_linear(data.x.shape[1:]):
                theta = fit_exactly(task, start.models, start.own, data, self.strengths or PULLS, self.caution)
            else:
                theta = fit_by_steps(
                    task,
                    lambda rows: begin(sent, local._replace(data=rows)).model(),
                    data,
                    self._descent(),
                    {*task.moving, *task.personal},
                )
            return Reply(Models(theta, label=start.label))

        return ClientStep(run, draw)

    def _beginning(self, task: Task) -> tuple[Callable[[Any, Local], _Start], Draw | None]:
        """What a client begins with, as a function of what it was sent and of its rows; and what that has to draw."""
        inner, choice = self.method.own_model(), self.method.own_choice()
        if inner is not None:
            make = derived(inner, task)
            return lambda sent, local: _Start.of(make.run(sent, local).update, {}), make.draw
        if choice is None:
            return lambda sent, local: _Start.of(sent, personal_of(local.memory)), None
        choose = derived(choice, task)

        def chosen(sent: Models, local: Local) -> _Start:
            own = choose.run(sent.theta, local).slot
            return _Start(sent.theta, own, own, personal_of(local.memory))

        return chosen, choose.draw

    def _descent(self) -> Descent:
        by = self.method.descend() if isinstance(self.method, LocalTraining) else Descend(0)
        assert self._lr is not None  # `start` has checked it
        return Descent(self._lr, self.steps, self.strengths or (0.0,), by.optimiser, by.clip, self.caution)

    @property
    def _lr(self) -> float | None:
        return getattr(self.method, "lr", None) if self.lr is None else self.lr

    # --- the method's own ------------------------------------------------------------------------------------------

    def check_task(self, task: Task) -> None:
        """Refuse what is not for this, and tasks that the method is not for."""
        name, given = type(self).__name__, type(self.method).__name__
        if isinstance(self.method, PointMethod):
            raise ValueError(f"{name}: method must train models for clients; {given} groups points")
        if isinstance(self.method, LocalOnly | Personal):
            raise ValueError(
                f"{name}: method must train models that clients share; those of {given} are their own already"
            )
        for field, values, low in (("strengths", self.strengths, 0), ("steps", self.steps, 1)):
            if values is not None and (not values or min(values) < low):
                raise ValueError(f"{name}: {field} must be numbers of at least {low}, got {list(values)}")
        self.method.check_task(task)

    def start(self, task: Task, cohort: Cohort, key: Key) -> Any:
        """That of the method."""
        self.check_task(task)
        exact = self.method.own_model() is None and linearity(task)(cohort.federation.train.x.shape[1:])
        if self._lr is None and not exact:
            raise ValueError(
                f"{type(self).__name__}: lr is needed: there is no closed form for this task on "
                f"{type(self.method).__name__}, which has no step size of its own"
            )
        return self.method.start(task, cohort, key)

    def round(self, state: Any, cohort: Cohort) -> tuple[Any, Report]:
        """That of the method."""
        return self.method.round(state, cohort)

    def models(self, state: Any) -> Params:
        """The clusters' models, from which clients go on."""
        return self.method.models(state)

    def labels(self, state: Any) -> Tensor:
        """Those of the method."""
        return self.method.labels(state)

    def place(self, state: Any, cohort: Cohort) -> Tensor:
        """As the method places clients."""
        return self.method.place(state, cohort)

    def assign(self, state: Any, task: Task, data: Data) -> int:
        """As the method assigns clients."""
        return self.method.assign(state, task, data)

    def join(self, state: Any, newcomers: Cohort) -> Any:
        """As clients join the method."""
        return self.method.join(state, newcomers)

    def adopt(self, state: Any, groups: Groups, task: Task) -> tuple[Personal, Any]:
        """As the method goes on."""
        method, state = self.method.adopt(state, groups, task)
        return replace(self, method=method), state

    def grows(self) -> bool:
        """Whether the method does."""
        return self.method.grows()

    def members(self, state: Any) -> Tensor:
        """Those of the method."""
        return self.method.members(state)

    def changed(self, before: Any, after: Any) -> int:
        """As the method counts them."""
        return self.method.changed(before, after)

    def own_choice(self) -> Step | None:
        """That of the method."""
        return self.method.own_choice()

    def tree(self, state: Any) -> ModelTree | None:
        """That of the method."""
        return self.method.tree(state)

    def doubts(self, state: Any, cohort: Cohort) -> Iterator[str]:
        """Those of the method."""
        return self.method.doubts(state, cohort)

    def done(self, state: Any) -> bool:
        """Whether the method is."""
        return self.method.done(state)


class _Start(NamedTuple):
    """What a client begins with."""

    models: Params  # that it may begin with (k, …)
    own: Tensor  # the one that it would be served with
    label: Tensor  # the client's cluster
    kept: Params  # what it keeps of a model to itself

    @classmethod
    def of(cls, sent: Models, kept: Params) -> _Start:
        """The one model that was sent."""
        label = cast(Tensor, sent.label)
        return cls(tree_map(lambda x: x[None], sent.theta), torch.zeros_like(label), label, kept)

    def model(self) -> Params:
        """The model that the client would be served with."""
        return {**take(self.models, self.own), **self.kept}
