"""What clients score, each with its own model: the results of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from torch import Tensor

from coterie.core.card import Card
from coterie.runs import metrics
from coterie.runs.hurt import Hurt, errors, worst_tenth

SHOWN = 8  # clusters that a card lists


@dataclass(frozen=True, repr=False)
class Scores:
    """What the clients score, each with the model of its cluster.

    Attributes:
        metric: The name of the score: "accuracy", "mse".
        per_client: Each client's score (m,); NaN for a client without test rows.
        labels: Each client's cluster (m,).
        groups: The true groups (m,), None where nobody knows them.
        loss: Each client's mean loss (m,).
        chosen_on: The rows on which clients chose their cluster: "train", or "test" as the IFCA paper did on MNIST.
    """

    metric: str
    per_client: np.ndarray
    labels: np.ndarray
    groups: np.ndarray | None
    loss: np.ndarray
    chosen_on: str

    def card(self) -> Card:
        """The scores in few lines."""
        rows = [(self.metric, f"{self.mean:.4f}, mean over {len(self.labels):,} clients")]
        if np.isfinite(worst := self.worst_decile):
            rows.append(("worst tenth", f"{worst:.4f}"))
        each = list(self.per_cluster.items())
        rows += [(f"cluster {j}", f"{value:.4f}") for j, value in each[:SHOWN]]
        rows += [("…", f"{len(each) - SHOWN:,} more clusters")] if len(each) > SHOWN else []
        rows += [(name.upper() if name in ("ari", "nmi") else name, f"{v:.3f}") for name, v in self.clustering.items()]
        return Card(f"Scores, clusters chosen on {self.chosen_on} rows", rows)

    def __repr__(self) -> str:
        return str(self.card())

    def _repr_html_(self) -> str:
        return self.card().html()

    @property
    def mean(self) -> float:
        """The mean over clients."""
        return float(np.nanmean(self.per_client))

    @property
    def per_cluster(self) -> dict[int, float]:
        """The mean over the clients of each cluster that has any with a score."""
        scored = ~np.isnan(self.per_client)
        count = np.bincount(self.labels[scored])
        total = np.bincount(self.labels[scored], self.per_client[scored])
        return {int(j): float(total[j] / count[j]) for j in np.flatnonzero(count)}

    @property
    def error(self) -> np.ndarray:
        """Each client's score so that less is better (m,): 1 - accuracy; the loss where the score is a user's own."""
        return errors(self.metric, self.per_client, self.loss)

    @property
    def worst_decile(self) -> float:
        """The mean score of the tenth of the clients that are served worst."""
        return worst_tenth(self.per_client, self.error)

    def hurt(self, than: Scores) -> Hurt:
        """Which share of the clients is worse off than by other scores, and by how much.

        Args:
            than: What the same clients score otherwise: with one model for all, or each alone.

        Example:
            >>> import coterie as ct
            >>> federation = ct.data.rotated_digits(clients=8, seed=0)
            >>> task = ct.Task.classifier(ct.models.MLP(64, 16, 10))
            >>> grouped, one = (ct.fit(m, task, federation, rounds=5) for m in (ct.IFCA(k=2), ct.FedAvg()))
            >>> 0 <= grouped.scores.hurt(than=one.scores).share <= 1
            True
        """
        if (self.metric, len(self.per_client)) != (than.metric, len(than.per_client)):
            mine, others = (f"{s.metric} of {len(s.per_client)} clients" for s in (self, than))
            raise ValueError(f"hurt: both must be scores of the same clients, got {mine} and {others}")
        return Hurt.of(self.error, than.error)

    def among(self, clients: Tensor, labels: Tensor, groups: Tensor | None) -> Self:
        """These scores of some clients among those of all, where the others have none but the label last known.

        Args:
            clients: Whose scores these are, as positions in the federation.
            labels: The label last known of every client (m,).
            groups: The true group of every client (m,), None where nobody knows it.
        """
        at, whole = clients.numpy(), np.full(len(labels), np.nan, dtype=np.float32)
        per_client, loss, known = whole.copy(), whole.copy(), labels.numpy().copy()
        per_client[at], loss[at], known[at] = self.per_client, self.loss, self.labels
        truth = None if groups is None else groups.numpy()
        return replace(self, per_client=per_client, loss=loss, labels=known, groups=truth)

    @property
    def clustering(self) -> dict[str, float]:
        """Labels against true groups: ari, nmi, purity, matched; empty where the groups are not known.

        Clients that belong to no group (-1) do not count.
        """
        if self.groups is None or not bool((known := self.groups >= 0).any()):
            return {}
        labels, groups = self.labels[known], self.groups[known]
        return {
            "ari": metrics.ari(labels, groups),
            "nmi": metrics.nmi(labels, groups),
            "purity": metrics.purity(labels, groups),
            "matched": metrics.matched_accuracy(labels, groups),
        }


@dataclass(frozen=True, repr=False)
class PointScores(Scores):
    """What clients' points score, each with the model of its cluster; `labels` are clients' commonest clusters.

    Attributes:
        tables: For every client, how many points each cluster has (rows) of each true one (columns), (m, k, g); None
            where the truth is not known.
    """

    tables: np.ndarray | None = None

    def among(self, clients: Tensor, labels: Tensor, groups: Tensor | None) -> Self:
        """As for other scores; clients that have none have empty tables."""
        whole = super().among(clients, labels, None)
        if self.tables is None:
            return whole
        tables = np.zeros((len(labels), *self.tables.shape[1:]), dtype=self.tables.dtype)
        tables[clients.numpy()] = self.tables
        return replace(whole, tables=tables)

    @property
    def table(self) -> np.ndarray:
        """The sum of all clients' tables (k, g)."""
        return np.zeros((0, 0), dtype=np.int64) if self.tables is None else self.tables.sum(0)

    @property
    def clustering(self) -> dict[str, float]:
        """The clusters of all points against the true ones: ari, nmi, purity, matched."""
        return {} if self.tables is None else metrics.of_table(self.table)

    @property
    def clustering_per_client(self) -> list[dict[str, float]]:
        """The same, of each client's points alone."""
        return [] if self.tables is None else [metrics.of_table(table) for table in self.tables]


@dataclass(frozen=True, repr=False)
class SummedScores(Scores):
    """Scores where the server may see sums only: no client's score, and nobody's cluster (-1).

    Attributes:
        total: The sum of the scores of the clients of each cluster (k,).
        count: How many clients are in it (k,); 0 for a cluster that is not opened.
    """

    total: np.ndarray
    count: np.ndarray

    @property
    def mean(self) -> float:
        """The mean over the clients of all clusters that are opened; NaN where none is."""
        return float(self.total.sum() / n) if (n := self.count.sum()) else float("nan")

    @property
    def per_cluster(self) -> dict[int, float]:
        """The mean over the clients of each cluster that is opened."""
        return {int(j): float(self.total[j] / self.count[j]) for j in np.flatnonzero(self.count)}


@dataclass(frozen=True, repr=False)
class SummedPointScores(SummedScores):
    """The same where clients have points of several clusters each: there is one sum, over all of them."""

    @property
    def per_cluster(self) -> dict[int, float]:
        """Empty: nobody tells which of its points are in which cluster."""
        return {}
