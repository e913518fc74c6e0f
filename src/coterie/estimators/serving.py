"""Which models serve whom, and what they say of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from coterie.core.pytree import Params
from coterie.core.task import SHARE, Task
from coterie.estimators.clients import UNKNOWN
from coterie.runs.run import AT_ONCE, Run
from coterie.storage.scales import Scale

Models = dict[str, Any]  # stacked (k, …): arrays of linear models, tensors of others


@dataclass(frozen=True)
class Serving:
    """The models of clusters, and of clients that have their own.

    Attributes:
        models: The clusters' models (k, …).
        population: Their shares of all clients (k,), by which they are mixed for a client that nobody knows.
        own: Models that clients have for themselves; None where they are served by those of the clusters.
        which: The models that serve each client (m, j), among the own ones or the clusters'.
        shares: How much of each goes into what the client is served with (m, j).
    """

    models: Models
    population: np.ndarray
    own: Models | None
    which: np.ndarray
    shares: np.ndarray

    @classmethod
    def of(cls, run: Run, units: Callable[[Params], Models]) -> Serving:
        """What a run has learnt.

        Args:
            run: A run of clients that are here.
            units: Puts stacked models into the units in which they are to be used.
        """
        theta, own = _here(run.algorithm.models(run.state)), run.own_models()
        members = run.algorithm.members(run.state).double()
        models, population = units(theta), (members / members.sum()).numpy()
        if own is None:
            return cls(models, population, None, run.labels[:, None], np.ones((len(run.labels), 1)))
        own = _here(own)
        shares = own.pop(SHARE, torch.ones(len(run.labels), 1)).double().numpy()
        if all(x.shape[1:] == theta[name].shape and bool((x == theta[name]).all()) for name, x in own.items()):
            return cls(models, population, None, np.tile(np.arange(shares.shape[1]), (len(shares), 1)), shares)
        each = {name: x.reshape(-1, *theta[name].shape[1:]) for name, x in own.items()}
        return cls(models, population, units(each), np.arange(shares.size).reshape(shares.shape), shares)

    def values(
        self, x: np.ndarray, at: np.ndarray, outputs: int, value: Callable[[Models, np.ndarray], np.ndarray]
    ) -> np.ndarray:
        """What the models say of rows, mixed (n, outputs).

        Args:
            x: The rows (n, d).
            at: The position of every row's client (n,), -1 where it is not known.
            outputs: How many numbers a model says of a row.
            value: What one model says of rows.
        """
        out = np.zeros((len(x), outputs))
        for model, rows, share in self._uses(at):
            out[rows] += share * value(model, x[rows])
        return out

    def _uses(self, at: np.ndarray) -> Iterator[tuple[Models, np.ndarray, Any]]:
        """Every model that is used, the rows that it is used for, and how much it counts there."""
        stranger = np.flatnonzero(at == UNKNOWN)
        for j in np.flatnonzero(self.population).tolist() if len(stranger) else ():
            yield _one(self.models, j), stranger, self.population[j]
        known, models = np.flatnonzero(at != UNKNOWN), self.own or self.models
        for which, shares in zip(self.which.T, self.shares.T, strict=True):
            for rows in _alike(which[at[known]]):
                mine = known[rows]
                yield _one(models, which[at[mine[0]]]), mine, shares[at[mine], None]


def linear_units(theta: Params, x: Scale, y: Scale) -> Models:
    """Linear models (k, …) of rows in units of a scale as models of rows in units of the data.

    Args:
        theta: `weight` (k, outputs, d) and `bias` (k, outputs).
        x: The scale of rows.
        y: That of what is predicted.
    """
    weight, bias = (theta[name].double().numpy() for name in ("weight", "bias"))
    slopes = weight / x.unit
    return {"coef": y.unit * slopes, "intercept": y.undo(bias - slopes @ x.mean)}


def linear_value(model: Models, x: np.ndarray) -> np.ndarray:
    """What a linear model says of rows (n, outputs)."""
    return x @ model["coef"].T + model["intercept"]


def module_value(task: Task, model: Params, x: np.ndarray) -> np.ndarray:
    """What a task's module says of rows (n, outputs), with these parameters."""
    functions = task.functions
    assert functions is not None  # the task is made from a module
    with torch.no_grad():
        parts = torch.from_numpy(x.astype(np.float32)).split(AT_ONCE)
        out = torch.cat([functions.output(model, part, part.new_ones(len(part))) for part in parts])
    return out.reshape(len(x), -1).double().numpy()


def _here(theta: Params) -> Params:
    return {name: x.detach().cpu() for name, x in theta.items()}


def _one(models: Models, j: int) -> Models:
    return {name: x[j] for name, x in models.items()}


def _alike(which: np.ndarray) -> list[np.ndarray]:
    """The positions of equal numbers, those of one number together."""
    order = np.argsort(which, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(which[order])) + 1) if len(order) else []
