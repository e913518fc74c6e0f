"""First assignments of points to clusters, for methods that improve one: random, by centres, by k-FED, by the truth."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie.core.cohort import Cohort
from coterie.core.key import Key
from coterie.core.method import PointMethod
from coterie.core.pytree import exact, to_server
from coterie.core.registry import register
from coterie.core.settings import setting
from coterie.core.step import Step
from coterie.parts.kmeans import TooFewCentres, lloyd, nearest_centres, seeded

log = logging.getLogger("coterie")

LLOYD = 20  # steps of k-means over the clients' centres
_LABELS, _SEEDS = 4, 8  # streams under a key


@register("disturbed", "start")
@dataclass(frozen=True)
class Disturbed:
    """An initial assignment by the true cluster, of which some are drawn anew: to see what a method makes of errors.

    Args:
        share: Points whose cluster is drawn anew.
    """

    share: float = setting(0.25, low=0, high=1)


class FirstAssignment:
    """For methods with `k` clusters and `restarts`; `init` is "centres", "random", "kfed", "mixed" or `Disturbed`."""

    k: int
    restarts: int
    init: Any

    @property
    def by_kfed(self) -> int:
        """Restarts that begin with k-FED's assignment."""
        named = {"kfed": self.restarts, "mixed": 1, "centres": 1}
        return named.get(self.init, 0) if isinstance(self.init, str) else 0

    def centres_by(self, kfed: PointMethod, look: Step, cohort: Cohort, key: Key) -> dict[str, Any]:
        """The centres to be sent: of k-FED, and for `init="centres"` those of every restart.

        None of k-FED if it finds too few and there are restarts that do without.

        Args:
            kfed: The method.
            look: Its step by which a client finds k centres among its own points.
            cohort: The clients.
            key: Of the draws.
        """
        sent = self._seeds(look, cohort, key) if self.init == "centres" and self.restarts > 1 else {}
        try:
            state, _ = kfed.round(kfed.start(kfed.default_task(), cohort, key), cohort)
        except TooFewCentres as error:
            if sent:
                return sent
            few = f"UIFCA: init {self.init!r} begins with k-FED, which found {error.found} centres for k = {self.k}"
            if self.init == "kfed" or self.restarts == 1:
                raise ValueError(f"{few}; init='random' does without") from error
            log.warning("%s; all restarts begin with a random assignment", few)
            return {}
        return {**sent, "centres": kfed.models(state)}

    def _seeds(self, look: Step, cohort: Cohort, key: Key) -> dict[str, Tensor]:
        """The first centres of every restart (r, k, d): k-means over those of the clients, each from seeds of its own.

        Each client is asked for k centres: those that k-FED's clients send are too few to differ from seed to seed. In
        half of the restarts they count by their points, in the others all the same, which finds clusters of few points.
        """
        reply = cohort.gather(look, ()).update
        sizes = to_server(reply["sizes"].flatten())
        points, sizes = exact(reply["centres"].flatten(0, 1)[sizes > 0]), sizes[sizes > 0].double()
        if len(points) < self.k:
            return {}
        uniform = torch.rand(self.restarts, self.k, generator=key.fold(_SEEDS).generator(), dtype=torch.float64)
        about = points.mean(0)  # see `distances`
        found = [
            lloyd(points - about, weight, seeded(points - about, weight, half), LLOYD)
            for weight, half in zip((sizes, torch.ones_like(sizes)), uniform.tensor_split(2), strict=True)
        ]
        return {"seeds": (torch.cat(found) + about).to(reply["centres"])}

    def draw_labels(self, n: int, key: Key) -> Tensor:
        """Random clusters for n points in every restart (r, n); -1 for points that keep their true one."""
        g = key.fold(_LABELS).generator()
        label = torch.randint(self.k, (self.restarts, n), generator=g)
        if isinstance(self.init, Disturbed):
            label = label.where(torch.rand(self.restarts, n, generator=g) < self.init.share, -1)
        return label

    def nearest_seeds(self, x: Tensor, seeds: Tensor) -> Tensor:
        """The nearest of each restart's centres (r, k, d) to every point (r, n)."""
        about = seeds.mean((0, 1))
        return nearest_centres(x.flatten(1) - about, seeds - about)

    def labels_by(self, centres: Tensor, label: Tensor) -> Tensor:
        """The labels (r, n) of which the first restarts are k-FED's (n,), those of the nearest centres."""
        first = torch.arange(self.restarts, device=centres.device)[:, None] < self.by_kfed
        return torch.where(first, centres, label)
