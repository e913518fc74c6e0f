"""What differs between groups: coefficients with intervals, or how much each column matters to each group's model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from coterie.core.features import is_linear
from coterie.core.pytree import take
from coterie.core.task import Data
from coterie.methods.mixed_effects import MixedEffects
from coterie.parts.effects import Effects
from coterie.runs.fit import fit
from coterie.runs.run import Run
from coterie.tables.preparation import Preparation

WIDTH = 1.96  # standard errors of an interval of 95 %
LOOKED_AT = 2_000  # rows of a group on which columns are shuffled
GRID = 21  # points of a partial dependence
ROUNDS = 60


class Dependence(NamedTuple):
    """What the groups' models predict if one column is set to some values for all rows."""

    name: str
    at: np.ndarray  # (points,) in the units of the table
    value: np.ndarray  # (k, points), the mean prediction


@dataclass(frozen=True)
class Differences:
    """What differs between groups.

    Attributes:
        names: Of the numbers that columns became (d,).
        value: Coefficients of every group (k, d) in the units of the table; or, of other models, how much the loss
            rises if the column is shuffled.
        error: Standard errors of coefficients (k, d); None for other models.
        level: What an average row is predicted in every group (k,), with `level_error`; None of a classifier.
        level_error: Its standard error.
        weight: By how much groups differ in a column, comparable over columns (d,): the largest difference of
            coefficients of standardised columns, in deviations of the target; or of the losses.
        dependences: Of other models, how predictions depend on the columns that matter most.
    """

    names: tuple[str, ...]
    value: np.ndarray
    error: np.ndarray | None
    level: np.ndarray | None
    level_error: np.ndarray | None
    weight: np.ndarray
    dependences: tuple[Dependence, ...] = ()

    @property
    def order(self) -> np.ndarray:
        """The columns, that in which groups differ most first."""
        return np.argsort(-self.weight, kind="stable")

    @property
    def clear(self) -> np.ndarray:
        """Whether two groups differ by more than chance (d,): 95 %, over all columns and pairs together."""
        if self.error is None:
            return np.zeros(len(self.names), dtype=bool)
        from scipy.stats import norm

        k, d = self.value.shape
        gap = self.value[:, None] - self.value
        deviation = np.sqrt(self.error[:, None] ** 2 + self.error**2)
        z = np.abs(gap) / np.maximum(deviation, np.finfo(float).tiny)
        far = z > norm.isf(0.025 / max(1, d * k * (k - 1) // 2))
        return np.any(far, axis=(0, 1), keepdims=False)


def differences(run: Run) -> Differences:
    """What differs between the groups of a run.

    Args:
        run: A run of clients that are here, with two groups or more.
    """
    federation = run._cohort.federation
    own = federation.preparation
    assert own is not None  # it was made from a table
    if is_linear(run.task, federation.train.x[:2]):
        return _coefficients(run, own)
    return _importance(run, own)


def _coefficients(run: Run, own: Preparation) -> Differences:
    """The mean model of every group with standard errors: clients of a group may vary about it."""
    found = [_effects_of(run, j) for j in np.unique(run.labels[run.labels >= 0])]
    slope, bias = _apart(np.concatenate([each.mean for each in found]))
    slope_error, bias_error = _apart(np.concatenate([each.error for each in found]))
    value, _ = own.effects(slope, bias)
    return Differences(
        names=own.names,
        value=value,
        error=own.target.deviation * slope_error / own.scale.deviation[own.used],
        level=own.target.mean + own.target.deviation * bias,
        level_error=own.target.deviation * bias_error,
        weight=np.ptp(slope, axis=0),
    )


def _effects_of(run: Run, group: int) -> Effects:
    """Random effects of the clients of one group."""
    federation, method = run._cohort.federation, MixedEffects()
    own = federation.select(np.flatnonzero(run.labels == group).tolist())
    alone = fit(method, run.task, own, rounds=ROUNDS, evaluations=1, device=str(run._cohort.engine.device))
    return method.effects(alone.state)


def _apart(theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The coefficients (k, d) and the intercept (k,) of linear models whose parameters are side by side."""
    return theta[:, :-1], theta[:, -1]


def _importance(run: Run, own: Preparation) -> Differences:
    """By how much the loss of a group's rows rises if one column is shuffled among them."""
    rng, names = np.random.default_rng(0), own.names
    labels = [j for j in np.unique(run.labels) if j >= 0]
    value = np.zeros((len(labels), len(names)))
    rows = [_rows_of(run, j, rng) for j in labels]
    for i, (j, (x, y)) in enumerate(zip(labels, rows, strict=True)):
        before = _loss(run, j, x, y)
        for c in range(len(names)):
            mixed = x.clone()
            mixed[:, c] = x[torch.from_numpy(rng.permutation(len(x))), c]
            value[i, c] = _loss(run, j, mixed, y) - before
    weight = np.ptp(value, axis=0)
    most = np.argsort(-value.max(0))[:3]
    dependences = tuple(_dependence(run, own, labels, torch.cat([x for x, _ in rows]), int(c)) for c in most)
    return Differences(names, value, None, None, None, weight, dependences)


def _rows_of(run: Run, group: int, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a group's clients, some of them where there are many."""
    packed = run._cohort.federation.train
    owner = np.repeat(run.labels, packed.sizes.numpy())
    at = np.flatnonzero(owner == group)
    at = torch.from_numpy(np.sort(rng.permutation(at)[:LOOKED_AT]))
    return packed.x[at], packed.y[at]


def _loss(run: Run, group: int, x: torch.Tensor, y: torch.Tensor) -> float:
    theta = take(run.algorithm.models(run.state), group)
    device = next(iter(theta.values())).device
    with torch.no_grad():
        rows = Data(x.to(device), y.to(device), torch.ones(len(x), device=device))
        return float(run.task.loss(theta, rows).mean())


def _dependence(run: Run, own: Preparation, groups: list[int], x: torch.Tensor, column: int) -> Dependence:
    """The mean prediction of every group's model over the same rows, with one column set to the values of a grid."""
    mean, deviation = (float(part[own.used][column]) for part in (own.scale.mean, own.scale.deviation))
    low, high = np.quantile(x[:, column].numpy(), [0.02, 0.98])
    grid = np.unique(np.linspace(low, high, GRID))
    value = np.stack([[_prediction(run, own, j, x, column, at) for at in grid] for j in groups])
    if value.ndim == 3:  # of classes, that one's probability which depends most on the column
        shown = int(np.ptp(value, axis=1).max(0).argmax())
        name = f"{own.names[column]} (probability of {own.target.classes[shown]})"
        return Dependence(name, mean + deviation * grid, value[..., shown])
    return Dependence(own.names[column], mean + deviation * grid, value)


def _prediction(run: Run, own: Preparation, group: int, x: torch.Tensor, column: int, at: float) -> np.ndarray:
    """The mean prediction in the units of the table, or the mean probabilities of classes."""
    functions, theta = run.task.functions, take(run.algorithm.models(run.state), group)
    assert functions is not None  # the task is made from a module
    device = next(iter(theta.values())).device
    rows = x.clone().to(device)
    rows[:, column] = at
    with torch.no_grad():
        out = functions.output(theta, rows, rows.new_ones(len(rows)))
    if own.target.classes:
        return out.softmax(-1).mean(0).cpu().numpy()
    return own.target.mean + own.target.deviation * out.mean().cpu().numpy()
