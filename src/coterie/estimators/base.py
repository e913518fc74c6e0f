"""What the estimators have in common: from a table and its clients to a run, and from rows to predictions."""

from __future__ import annotations

import copy
import logging
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from numbers import Integral
from typing import Any, Literal, Self, cast

import numpy as np
import pandas as pd
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import nn

from coterie.core.bars import quietly
from coterie.core.key import Key
from coterie.core.method import Method
from coterie.core.pytree import to_device
from coterie.core.task import Data, Source, Task
from coterie.estimators.choice import Problem, choose
from coterie.estimators.clients import clients_of, federation_of, positions
from coterie.estimators.serving import Models, Serving, linear_units, linear_value, module_value
from coterie.models import MLP, Linear
from coterie.runs.fit import fit
from coterie.storage.names import nearest_name
from coterie.storage.scales import Moments, Scale

log = logging.getLogger("coterie")

ROUTING = "set_fit_request(groups=True), and sklearn.set_config(enable_metadata_routing=True)"
HIDDEN = 64  # units of the model "mlp"
SHARED = (
    "run_",
    "_task",
)  # never change, so that copies have them too; and are made of functions, which have no pickle


class Clustered(BaseEstimator, ABC):
    """A model for each cluster of the clients that a table's rows belong to."""

    labels_: np.ndarray
    clients_: np.ndarray
    n_features_in_: int

    def __init__(
        self,
        *,
        method: str | Method = "auto",
        k: int | Literal["auto"] = "auto",
        model: str | Source = "linear",
        lr: float | None = None,
        rounds: int = 100,
        standardise: bool = True,
        device: str = "auto",
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.method = method
        self.k = k
        self.model = model
        self.lr = lr
        self.rounds = rounds
        self.standardise = standardise
        self.device = device
        self.random_state = random_state

    def fit(self, X: Any, y: Any, groups: Any = None) -> Self:
        """Find the clusters of clients, and train a model for each.

        Args:
            X: The rows (n, features): an array, or a table of pandas or polars.
            y: Their targets (n,).
            groups: Whose each row is (n,): strings, numbers or any other hashable values. None: all are one client's.

        Returns:
            The estimator itself.

        Raises:
            ValueError: The input is bad; the message says what was given and what is allowed.
        """
        rows, targets = self._read(X, y, reset=True)
        for name in ("comparison_", "run_"):  # of a fit before
            vars(self).pop(name, None)
        k, rounds = self._whole("k", auto=True), self._whole("rounds")
        if groups is None:
            log.warning("%s: no groups were given, so all rows are one client's; searches need %s", self._name, ROUTING)
        self.clients_, at = clients_of(groups, len(rows), self._name)
        self.x_scale_ = self._scale("X", rows)
        columns = tuple(map(str, names)) if (names := getattr(self, "feature_names_in_", None)) is not None else None
        learnt = self._learn(targets)
        federation = federation_of(self._scaled(rows), learnt, self.clients_, at, columns)
        self._task = self._made_task()
        federation.check(self._task)
        self._check_outputs(rows[:1])
        with quietly():
            problem = Problem(self._task, federation, rounds, self._seed(), self.device)
            self.method_, comparison = choose(self.method, k, self.lr, problem, self._name)
            options = {"rounds": rounds, "seed": problem.seed, "device": self.device, "evaluations": 1}
            self.run_ = fit(self.method_, self._task, federation, **options)
            self._serving = Serving.of(self.run_, self._units)
        if comparison is not None:
            self.comparison_ = comparison
        self._state = to_device(self.run_.state, torch.device("cpu"))
        self.labels_, self.n_clusters_ = self.run_.labels, len(self._serving.population)
        for said in self.run_.warnings:
            log.warning("%s: %s", self._name, said)
        return self

    def assign(self, X: Any, y: Any, groups: Any = None) -> pd.Series:
        """The cluster of every client among these rows, whether it was there at `fit` or is new.

        Args:
            X: Rows (n, features).
            y: Their targets (n,).
            groups: Whose each row is (n,); None: all are one client's.

        Returns:
            One cluster for each client, by its name.
        """
        check_is_fitted(self)
        rows, targets = self._read(X, y, reset=False)
        clients, at = clients_of(groups, len(rows), self._name)
        federation = federation_of(self._scaled(rows), self._encoded(targets), clients, at, None)
        each = (Data(x, y, x.new_ones(len(x))) for x, y in map(federation.train.client, range(len(clients))))
        found = [self.method_.assign(self._state, self._task, data) for data in each]
        return pd.Series(found, index=pd.Index(clients, name="client", tupleize_cols=False), name="cluster")

    @property
    def models_(self) -> list[Any]:
        """One model for each cluster: of a linear one `coef` and `intercept` in the units of the data; else modules."""
        check_is_fitted(self)
        return [self._shown({n: x[j] for n, x in self._serving.models.items()}) for j in range(self.n_clusters_)]

    # --- what classifiers and regressors do in their own way -----------------------------------------------------

    @abstractmethod
    def _reading(self) -> dict[str, Any]:
        """How `validate_data` is to read rows and targets."""

    @abstractmethod
    def _learn(self, y: np.ndarray) -> np.ndarray:
        """Find the units or the classes of targets; the targets in them."""

    @abstractmethod
    def _encoded(self, y: np.ndarray) -> np.ndarray:
        """Targets in the units, or as numbers of the classes, that `fit` found."""

    @abstractmethod
    def _make(self, source: Source) -> Task:
        """The task of a module."""

    @property
    @abstractmethod
    def _outputs(self) -> int:
        """How many numbers a model says of a row."""

    @property
    @abstractmethod
    def _target_scale(self) -> Scale:
        """The units of a model's output."""

    @abstractmethod
    def _value(self, out: np.ndarray) -> np.ndarray:
        """What is mixed where several models speak, given the output of one."""

    # --- prediction ----------------------------------------------------------------------------------------------

    def _values(self, X: Any, groups: Any) -> np.ndarray:
        """What the models say of rows (n, outputs)."""
        check_is_fitted(self)
        rows = cast(np.ndarray, validate_data(self, X, reset=False, dtype=np.float64))
        at = positions(groups, len(rows), self.clients_, self._name)
        output = self._output()
        return self._serving.values(rows, at, self._outputs, lambda model, x: self._value(output(model, x)))

    def _output(self) -> Callable[[Models, np.ndarray], np.ndarray]:
        if self._linear:
            return linear_value
        y = self._target_scale
        return lambda model, x: y.undo(module_value(self._task, model, self.x_scale_(x)))

    @property
    def _linear(self) -> bool:
        return isinstance(self.model, str) and self.model == "linear"

    def _units(self, theta: Models) -> Models:
        return linear_units(theta, self.x_scale_, self._target_scale) if self._linear else theta

    def _shown(self, model: Models) -> Any:
        """One model as users get it."""
        if self._linear:
            return {name: x[0] if self._outputs == 1 else x for name, x in model.items()}
        assert self._task.functions is not None  # the task is made from a module
        return self._task.functions.pure.loaded(model)

    # --- the arguments --------------------------------------------------------------------------------------------

    def _read(self, X: Any, y: Any, *, reset: bool) -> tuple[np.ndarray, np.ndarray]:
        """Rows and targets as arrays; `reset` takes note of the features' number and names."""
        return cast(tuple[np.ndarray, np.ndarray], validate_data(self, X, y, reset=reset, **self._reading()))

    def _made_task(self) -> Task:
        d = self.n_features_in_
        known: dict[str, Callable[[], nn.Module]] = {
            "linear": lambda: Linear(d, self._outputs),
            "mlp": lambda: MLP(d, HIDDEN, self._outputs),
        }
        if not isinstance(self.model, str):
            return self._make(self.model)
        if self.model not in known:
            raise ValueError(f"{self._name}: model {self.model!r} is not known{nearest_name(self.model, known)}")
        return self._make(known[self.model]())

    def _check_outputs(self, row: np.ndarray) -> None:
        """Refuse a module with another number of outputs than there are classes."""
        functions = self._task.functions
        assert functions is not None  # the task is made from a module
        x = torch.from_numpy(self._scaled(row))
        given = functions.output(functions.init(Key.of(0)), x, x.new_ones(1)).numel()
        if given != self._outputs:
            raise ValueError(f"{self._name}: model must give {self._outputs} outputs for a row, got {given}")

    def _scale(self, what: str, values: np.ndarray) -> Scale:
        """The units in which values are learnt."""
        if not self.standardise:
            return Scale.none(*values.shape[1:])
        with np.errstate(over="ignore"):
            moments = Moments.of(values)
        if not np.isfinite(moments.squares).all():
            raise ValueError(f"{self._name}: {what} holds numbers too large to be squared")
        return Scale.of(moments)

    def _scaled(self, rows: np.ndarray) -> np.ndarray:
        return self.x_scale_(rows).astype(np.float32)

    def _seed(self) -> int:
        given = self.random_state
        if isinstance(given, int | np.integer) and given >= 0:
            return int(given)
        return int(check_random_state(given).randint(np.iinfo(np.int32).max))

    def _whole(self, name: str, auto: bool = False) -> Any:
        """A setting that is a whole number of at least 1; those of numpy are, too."""
        value = getattr(self, name)
        if auto and isinstance(value, str) and value == "auto":
            return value
        if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
            allowed = "'auto' or a whole number" if auto else "a whole number"
            raise ValueError(f"{self._name}: {name} must be {allowed} of at least 1, got {value!r}")
        return operator.index(value)

    @property
    def _name(self) -> str:
        return type(self).__name__

    # --- copies --------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        state = cast(dict[str, Any], super().__getstate__())
        return {name: value for name, value in state.items() if name not in SHARED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if hasattr(self, "method_"):
            self._task = self._made_task()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        other = memo[id(self)] = type(self).__new__(type(self))
        own = vars(self).items()
        vars(other).update({n: v if n in SHARED else copy.deepcopy(v, memo) for n, v in own})
        return other
