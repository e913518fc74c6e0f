"""Densities whose likeliest parameters follow from the moments of their points: clients send sums, and that is all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coterie.core.cohort import Cohort
from coterie.core.pytree import Outer, Params
from coterie.core.step import ClientStep, Local, Reply, client_step
from coterie.core.task import Task
from coterie.parts.columns import check_columns
from coterie.parts.shrinkage import Moments, covariances


class ClosedForm:
    """For methods with `restarts`, `k` clusters, a `ridge`, and the choice `closed` of using the closed form."""

    k: int
    restarts: int
    ridge: float
    closed: bool

    def has_closed_form(self, task: Task) -> bool:
        """Whether models follow from moments."""
        return self.closed and task.from_moments is not None

    @client_step
    def total(self, task: Task) -> ClientStep:
        """The mean of a client's points, which counts by their number."""

        def run(_: Any, local: Local) -> Reply:
            update = local.data.x.flatten(1).T @ local.data.mask
            return Reply(update / local.data.mask.sum(), local.data.mask.sum())

        return ClientStep(run)

    def mean_point(self, cohort: Cohort) -> Tensor | tuple[()]:
        """The mean of all points, about which squares are summed so that they keep their digits; () if none are."""
        if not self.has_closed_form(cohort.task):
            return ()
        sums = cohort.combine(self.total, ())
        return (sums.update[0] / sums.weight[0]).detach()

    def moment_sums(self, own: Tensor, about: Any, local: Local, *, held: bool) -> dict[str, Any]:
        """A client's sums over the members `own` (r, k, n) of every cluster; over held-out ones too, if asked for."""
        if not isinstance(about, Tensor):
            return {}
        x = (local.data.x.flatten(1) - about).double()  # a covariance is a small difference of such sums
        sums = {"all": _cluster_sums(own.double(), x)}
        return sums | ({"held": _cluster_sums((own * local.draws["held"]).double(), x)} if held else {})

    def check_columns(self, moments: Moments | tuple[()], cohort: Cohort) -> None:
        """Refuse columns without which there is no density, and warn of those that count for little."""
        if isinstance(moments, Moments):
            check_columns(moments.of(0), self.ridge, warn=cohort.engine.leads)

    def moments(self, sums: dict[str, Tensor] | None, about: Any) -> Moments | tuple[()]:
        """The moments (r, k, …) that clients' sums give; on the device, for they are most of the server's work."""
        if sums is None:
            return ()
        second = sums["second"][0].unflatten(0, (self.restarts, self.k, -1))
        return Moments(sums["number"][0].double(), sums["first"][0].double(), second.double(), about)

    def fitted(self, old: Params, moments: Moments, pull: Tensor, task: Task, ridge: float, t: int) -> Params:
        """The likeliest models; a cluster of one point or none keeps its old one.

        Args:
            old: The models before (…, k, …).
            moments: Of the clusters' points.
            pull: How strongly to shrink (…).
            task: Has the closed form.
            ridge: Added to all variances, as a part of their mean.
            t: The round, for messages.
        """
        assert task.from_moments is not None
        mean, covariance = covariances(moments, pull, ridge)
        enough = moments.number > 1
        covariance = _where(enough, covariance, torch.eye(mean.shape[-1]).to(mean).expand_as(covariance))
        try:
            found = task.from_moments(mean, covariance)
        except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage] - torch documents it
            raise ValueError(f"UIFCA: round {t + 1}: {self._singular(moments, covariance)}") from None
        return {n: _where(enough, found[n].to(x), x) for n, x in old.items()}

    def _singular(self, moments: Moments, covariance: Tensor) -> str:
        """Which covariance has no inverse."""
        r, j = (torch.linalg.cholesky_ex(covariance).info > 0).nonzero()[0].tolist()
        return (
            f"the covariance of cluster {j} ({int(moments.number[r, j])} points in {covariance.shape[-1]} dimensions) "
            f"is singular with a ridge of {self.ridge:g}; a larger one helps"
        )


def _cluster_sums(own: Tensor, x: Tensor) -> dict[str, Any]:
    """How many points of x (n, d) are in every cluster, where `own` (r, k, n) is 1, and the sums of their moments."""
    left = own.flatten(0, 1).T[:, :, None] * x[:, None]  # (n, r·k, d)
    return {"number": own.sum(2), "first": own @ x, "second": Outer(left.flatten(1), x)}


def _where(which: Tensor, new: Tensor, old: Tensor) -> Tensor:
    return torch.where(which.to(old.device).reshape(*which.shape, *[1] * (old.dim() - which.dim())), new, old)
