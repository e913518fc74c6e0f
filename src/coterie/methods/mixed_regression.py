"""Mixed regression from any start: federated moment descent, then FedX with clustering.

Global Convergence of Federated Learning for Mixed Regression
    Lili Su, Jiaming Xu, Pengkun Yang. NeurIPS 2022, Phases 1 and 2, and Theorem 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coterie.core.method import Needs
from coterie.core.pytree import Params
from coterie.core.registry import register
from coterie.methods.fedx import FedX
from coterie.methods.moment_descent import MomentDescent
from coterie.parts.starts import Start


@register("mixed_regression")
@dataclass(frozen=True)
class MixedRegression(FedX):
    """Both phases: `FedX` that starts from what `MomentDescent` finds. A round is one of Phase 2.

    Args:
        init: Phase 1: "moment_descent", or a `MomentDescent` with settings of your own.

    Example:
        >>> import coterie as ct
        >>> federation = ct.data.mixed_regression(k=2, d=5, seed=0)
        >>> task = ct.Task.regressor(ct.models.Linear(5, 1))
        >>> run = ct.fit(ct.MixedRegression(k=2), task, federation, rounds=30, evaluations=1)
        >>> run.ari > 0.9
        True
    """

    needs = Needs(task="regressor", linear=True, gather=True)
    quick = {"init": MomentDescent(clients=12, ell=4, rounds=2, reuse=True), "lr": None}

    init: str | Start | Sequence[Params] = "moment_descent"
