"""First assignments of points to clusters, for methods that improve an assignment: random, by k-FED, by the truth."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie.core.cohort import Cohort
from coterie.core.key import Key
from coterie.core.method import PointMethod
from coterie.core.pytree import Params
from coterie.core.registry import register
from coterie.core.settings import setting
from coterie.parts.kmeans import TooFewCentres

log = logging.getLogger("coterie")

_LABELS = 4  # stream under a client's key


@register("disturbed", "start")
@dataclass(frozen=True)
class Disturbed:
    """An initial assignment by the true cluster, of which some are drawn anew: to see what a method makes of errors.

    Args:
        share: Points whose cluster is drawn anew.
    """

    share: float = setting(0.25, low=0, high=1)


class FirstAssignment:
    """For methods with `k` clusters and `restarts`, whose `init` is "random", "kfed", "mixed" or `Disturbed`."""

    k: int
    restarts: int
    init: Any

    @property
    def by_kfed(self) -> int:
        """Restarts that begin with k-FED's assignment."""
        return {"kfed": self.restarts, "mixed": 1}.get(self.init, 0) if isinstance(self.init, str) else 0

    def centres_by(self, kfed: PointMethod, cohort: Cohort, key: Key) -> dict[str, Params]:
        """The centres of k-FED, to be sent; none if it finds too few and there are restarts that do without."""
        try:
            state, _ = kfed.round(kfed.start(kfed.default_task(), cohort, key), cohort)
        except TooFewCentres as error:
            few = f"UIFCA: init {self.init!r} begins with k-FED, which found {error.found} centres for k = {self.k}"
            if self.init == "kfed" or self.restarts == 1:
                raise ValueError(f"{few}; init='random' does without") from error
            log.warning("%s; all restarts begin with a random assignment", few)
            return {}
        return {"centres": kfed.models(state)}

    def draw_labels(self, n: int, key: Key) -> Tensor:
        """Random clusters for n points in every restart (r, n); -1 for points that keep their true one."""
        g = key.fold(_LABELS).generator()
        label = torch.randint(self.k, (self.restarts, n), generator=g)
        if isinstance(self.init, Disturbed):
            label = label.where(torch.rand(self.restarts, n, generator=g) < self.init.share, -1)
        return label

    def labels_by(self, centres: Tensor, label: Tensor) -> Tensor:
        """The labels (r, n) of which the first restarts are k-FED's (n,), those of the nearest centres."""
        first = torch.arange(self.restarts, device=centres.device)[:, None] < self.by_kfed
        return torch.where(first, centres, label)
