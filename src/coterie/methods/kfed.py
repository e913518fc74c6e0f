"""k-FED: every client clusters its own points, the server clusters the clients' centres, and that is all.

Heterogeneity for the Win: One-Shot Federated Clustering
    Don Kurian Dennis, Tian Li, Virginia Smith. ICML 2021.
Efficient Clustering Frameworks for Federated Learning Systems
    Jichan Chung. UCB/EECS-2023-212, Algorithm 2, whose line numbers are in the comments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.core.cohort import Cohort
from coterie.core.key import Key
from coterie.core.method import Needs, PointMethod, Report
from coterie.core.pytree import Params, exact, to_server
from coterie.core.registry import register
from coterie.core.settings import setting
from coterie.core.step import ClientStep, Local, Reply, client_step
from coterie.core.task import Data, Task
from coterie.parts.kmeans import TooFewCentres, distances, farthest, kmeans, lloyd, members, seeded, spread

SEEDS = 8  # random starts for the k-means of a client's points, beside the farthest-first one
_SEEDS = 3  # stream under a client's key


class State(NamedTuple):
    """What k-FED knows."""

    centres: Tensor  # μ (k, d)
    members: Tensor  # points of each cluster (k,)
    clients: int
    round: int


@register("kfed")
@dataclass(frozen=True)
class KFED(PointMethod):
    """One exchange: local k-means, then k-means over the local centres.

    The server sees every client's centres, and how many points each has.

    Args:
        k: K, the clusters of all clients together.
        local: k′, the clusters that a client looks for among its own points, at most k; None lets each client choose
            the number that explains its points best (by BIC). A client with points of one cluster only must not look
            for more: its centres would pull the cluster apart.
        steps: Lloyd's steps at a client.
        weighted: Whether local centres count by their points, rather than all the same.

    Example:
        >>> import coterie as ct
        >>> run = ct.fit(ct.KFED(k=4), None, ct.data.gaussian_clusters(k=4, p=0.5, seed=0), rounds=1)
        >>> run.purity
        1.0
    """

    needs = Needs(task="distance", points=True, gather=True)

    k: int = setting(low=1)
    local: int | None = setting(None, low=1)
    steps: int = setting(20, low=1)
    weighted: bool = False

    def default_task(self) -> Task:
        """Squared distance to a centre."""
        return Task.distance()

    def start(self, task: Task, cohort: Cohort, key: Key) -> State:
        """Nothing is known yet: all centres are at the origin."""
        self._check(cohort)
        d = cohort.federation.train.x[0].numel()
        return State(torch.zeros(self.k, d), torch.zeros(self.k), cohort.population, 0)

    def round(self, state: State, cohort: Cohort) -> tuple[State, Report]:
        """Lines 1 to 3."""
        reply = cohort.gather(self.cluster, ())  # lines 1 and 2
        centres, sizes = reply.update["centres"].flatten(0, 1), reply.update["sizes"].flatten()
        real = sizes > 0
        if (number := int(real.sum())) < self.k:
            how = "a larger local finds more" if self.local else "with local= they look for a given number"
            raise TooFewCentres(f"KFED: k is {self.k}, but clients found {number} centres together; {how}", number)
        points, sizes = exact(centres[real]), to_server(sizes[real])
        found = kmeans(points, self.k, sizes if self.weighted else None)  # line 3
        near = torch.cdist(points, found).argmin(1)
        count = torch.zeros(self.k).index_add_(0, near, sizes)
        after = State(found.to(centres), count, state.clients, state.round + 1)
        return after, Report(cohort.clients, reply.note["loss"])

    @client_step
    def cluster(self, task: Task) -> ClientStep:
        """Lines 1 and 2 at one client: its centres, as many as k of which some may have no points."""

        def run(_: Any, local: Local) -> Reply:
            centres, sizes, loss = self._own(local)
            return Reply({"centres": centres, "sizes": sizes}, note={"loss": loss})

        return ClientStep(run, self._draw)

    @client_step
    def points(self, task: Task) -> ClientStep:
        """Line 4: a point goes where the server put its local centre."""

        def run(theta: Params, local: Local) -> Reply:
            centres, sizes, _ = self._own(local)
            x = local.data.x.flatten(1)
            own = distances(x, centres).masked_fill(sizes == 0, torch.inf).argmin(1)
            label = distances(centres, theta["centre"]).argmin(1).index_select(0, own)
            return Reply(note={"label": label})

        return ClientStep(run, self._draw)

    def assign_points(self, state: State, task: Task, data: Data) -> Tensor:
        """The nearest centre: points that come alone have no local centres."""
        x, d = data.x.reshape(len(data.x), -1), state.centres.shape[1]
        if x.shape[1] != d:
            raise ValueError(f"KFED: its centres have {d} values, but rows are of shape {tuple(data.x.shape[1:])}")
        return distances(x.to(state.centres), state.centres).argmin(1)

    def models(self, state: State) -> Params:
        """The centres."""
        return {"centre": state.centres}

    def done(self, state: State) -> bool:
        """After the one exchange."""
        return state.round >= 1

    def _own(self, local: Local) -> tuple[Tensor, Tensor, Tensor]:
        """A client's centres (k, d), their points (k,), and the mean squared distance to them."""
        x, mask = local.data.x.flatten(1), local.data.mask
        mean = mask @ x / mask.sum()
        x = x - mean  # see `distances`
        most = self._numbers()[-1]
        starts = torch.cat([seeded(x, mask, local.draws["uniform"][:, :most]), farthest(x, mask, most)[None]])
        tried = [self._clustered(x, mask, starts[:, :n]) for n in self._numbers()]
        centres, sizes, spreads = (torch.stack(parts) for parts in zip(*tried, strict=True))
        rows = mask.sum()
        parameters = torch.tensor([float(n * (x.shape[1] + 1)) for n in self._numbers()], device=x.device)
        unlike = rows * x.shape[1] / 2 * (spreads / x.shape[1]).clamp(min=1e-12).log()
        bic = unlike + parameters * rows.log()  # twice the usual price, for centres are where they explain most
        best = bic.masked_fill(torch.tensor(self._numbers(), device=x.device) > rows, torch.inf).argmin().reshape(1)
        centres, sizes, apart = (found.index_select(0, best)[0] for found in (centres, sizes, spreads))
        return centres + mean, sizes, apart

    def _numbers(self) -> list[int]:
        """The k′ that are tried."""
        return list(range(1, self.k + 1)) if self.local is None else [self.local]

    def _clustered(self, x: Tensor, mask: Tensor, starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The best k-means of several starts: k′ centres, filled up to k with some without points; and their spread."""
        found = lloyd(x, mask, starts, self.steps)
        spreads = spread(x, mask, found)
        best = spreads.argmin().reshape(1)
        centres = found.index_select(0, best)
        sizes = members(x, mask, centres)[0].sum(1)
        missing = self.k - centres.shape[1]
        return (
            torch.cat([centres[0], centres[0, :1].expand(missing, -1)]),
            torch.nn.functional.pad(sizes, (0, missing)),
            spreads.index_select(0, best)[0],
        )

    def _draw(self, n: int, key: Key, when: tuple[int, ...]) -> dict[str, Tensor]:
        return {"uniform": torch.rand(SEEDS, self.k, generator=key.fold(_SEEDS).generator())}

    def _check(self, cohort: Cohort) -> None:
        row = cohort.federation.train.x[0]
        if row.dim() == 0 or row.dtype not in (torch.float32, torch.float64):
            given = f"{row.dtype} of shape {tuple(row.shape)}"
            raise ValueError(f"KFED: rows must be arrays of real numbers, got {given}; give float32")
        self.check_points(cohort)
        least = int(cohort.sizes.min())
        if self.local is not None and self.local > self.k:
            raise ValueError(f"KFED: local must be at most k, {self.k}, got {self.local}")
        if self.local is not None and self.local > least:
            who = cohort.federation.name(int(cohort.sizes.argmin()))
            raise ValueError(
                f"KFED: local is {self.local}, but {who} has {least} points; local=None lets it look for fewer"
            )
