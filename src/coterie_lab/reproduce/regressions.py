"""Mixed regressions whose truth is known: errors as Su, Xu and Yang (2022) measure them, and what an oracle gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from coterie.core.federation import Federation
from coterie.core.pytree import Params, flat, stack
from coterie.core.task import Task
from coterie.data import regression_truth
from coterie.models import Linear
from coterie.runs.config import build_federation


@dataclass(frozen=True)
class Regression:
    """A federation of `mixed_regression`, and the models it was made with."""

    federation: Federation
    truth: Tensor  # θ* (k, d)

    @classmethod
    def of(cls, data: dict[str, Any], seed: int) -> Regression:
        """What a table describes; `k` and `d` must be in it."""
        federation = build_federation({"name": "mixed_regression", **data, "seed": seed})
        return cls(federation, regression_truth(data["k"], data["d"], data.get("radius", 1.0), seed).double())

    @property
    def delta(self) -> float:
        """Δ, the least distance between two of the models."""
        return float(torch.pdist(self.truth).min())

    @property
    def task(self) -> Task:
        """Regression without an intercept, as the paper has it."""
        return Task.regressor(Linear(self.truth.shape[1], 1, bias=False))

    def error(self, models: Sequence[Params]) -> float:
        """d(θ̂, θ*)/Δ."""
        return distance(flat(stack(models)), self.truth) / self.delta

    def oracle(self, federation: Federation) -> float:
        """The same of least squares on the rows of each true cluster, as if the clusters were known."""
        groups, train = _groups(federation), federation.train
        of_row = groups.repeat_interleave(train.sizes)
        found = [
            torch.linalg.lstsq(train.x[of_row == j].double(), train.y[of_row == j].double()).solution
            for j in range(len(self.truth))
        ]
        return float((torch.stack(found) - self.truth).norm(dim=1).max()) / self.delta


def distance(found: Tensor, truth: Tensor) -> float:
    """Eq. (6): the largest error of a model under the matching to the truth that makes it least.

    Example:
        >>> distance(torch.tensor([[3.0], [0.0]]), torch.tensor([[0.0], [2.0]]))
        1.0
    """
    apart = torch.cdist(truth.double(), found.double()).numpy()
    for bound in np.unique(apart):
        far = apart > bound
        if not far[linear_sum_assignment(far)].any():
            return float(bound)
    return float("nan")  # the models are no numbers


def _groups(federation: Federation) -> Tensor:
    assert federation.groups is not None
    return federation.groups
