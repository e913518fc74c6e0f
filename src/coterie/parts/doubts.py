"""What speaks against a clustering: too few rows behind a model, models that are alike, more of them than help."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from coterie.core.cohort import Cohort
from coterie.core.pytree import stacked, tree_map
from coterie.core.step import ClientStep, client_step
from coterie.core.task import Task
from coterie.parts.choosing import Choosing, try_all
from coterie.parts.kmeans import linked

FEW = 0.1  # of the rows that a cluster would have if all had as many
NO_GAIN, ALIKE = 1.0, 2.0  # standard errors: a few clients may be all that gains, but of two clusters everybody does


class Doubting(Choosing):
    """A method whose clients choose, and that says when there are more models than they need."""

    def doubts(self, state: Any, cohort: Cohort) -> Iterator[str]:
        """Clusters with few rows; and in a simulation, where it costs nobody anything, models that are too many."""
        labels, theta = self.labels(state)[cohort.clients], self.models(state)
        k = stacked(theta)
        if k == 1 or bool((labels < 0).any()):  # a client has never taken part, or labels are secret
            return
        yield from few_rows(labels, cohort.sizes, k)
        test = cohort.federation.test
        scored = torch.zeros(0) if test is None else (test.sizes[cohort.clients] > 0).nonzero().flatten()
        if cohort.engine.sums_only or cohort.engine.remote or len(scored) < 2:
            return
        share = torch.bincount(labels, minlength=k) / len(labels)
        sent = tree_map(lambda x: torch.cat([x, torch.tensordot(share.to(x), x, 1)[None]]), theta)
        losses = cohort.uncharged().only(scored).on("test").gather(self.compare, sent).note["losses"]
        yield from superfluous(losses.cpu(), labels[scored])

    @client_step
    def compare(self, task: Task) -> ClientStep:
        """The loss of each of the models that are sent on the client's rows."""
        return try_all(task)


def few_rows(labels: Tensor, sizes: Tensor, k: int) -> Iterator[str]:
    """Clusters that live off few rows, or that nobody is in.

    Args:
        labels: Each client's cluster (m,).
        sizes: Each client's rows (m,).
        k: Clusters.

    Example:
        >>> list(few_rows(torch.tensor([0, 0, 1]), torch.tensor([90, 90, 5]), 2))
        ['cluster 1 lives off 5 of 185 rows (1 client); a smaller k, or other starts, may do better']
    """
    rows, clients = torch.bincount(labels, sizes, k), torch.bincount(labels, minlength=k)
    for j in (rows < FEW * rows.sum() / k).nonzero().flatten().tolist():
        n = int(clients[j])
        whose = f"lives off {int(rows[j]):,} of {int(rows.sum()):,} rows ({n} client{'s' if n > 1 else ''})"
        yield f"cluster {j} {whose if n else 'has no clients'}; a smaller k, or other starts, may do better"


def superfluous(losses: Tensor, labels: Tensor) -> Iterator[str]:
    """Whether models are more than clients need, by rows that took no part in training.

    Args:
        losses: Each client's loss under each of the k models and under the mean of them (m, k + 1).
        labels: Each client's cluster (m,).

    Example:
        >>> own = torch.tensor([[0.1, 0.9, 2.0], [0.2, 0.9, 2.0], [0.9, 0.1, 2.0], [0.9, 0.2, 2.0]])
        >>> list(superfluous(own, torch.tensor([0, 0, 1, 1])))
        []
        >>> list(superfluous(own.fill_(0.5), torch.tensor([0, 0, 1, 1])))
        ['2 models serve clients no better on test rows than one does: try FedAvg, or a smaller k']
    """
    own, k = losses.gather(1, labels[:, None]), losses.shape[1] - 1
    if not _gains((losses - own)[:, losses.mean(0).argmin()], NO_GAIN):
        yield f"{k} models serve clients no better on test rows than one does: try FedAvg, or a smaller k"
        return
    close = torch.eye(k, dtype=torch.bool)
    for a, b in combinations(labels.unique().tolist(), 2):
        either = (labels == a) | (labels == b)
        other = torch.where(labels == a, losses[:, b], losses[:, a])
        close[a, b] = close[b, a] = not _gains((other - own[:, 0])[either], ALIKE)
    for group in linked(close):
        if len(names := [str(j) for j in group.nonzero().flatten().tolist()]) > 1:
            which = f"{', '.join(names[:-1])} and {names[-1]}"
            yield f"clusters {which} are near-copies: their clients are served as well by any of them; try a smaller k"


def _gains(differences: Tensor, errors: float) -> bool:
    """Whether the mean of some clients' differences is above 0 by more than so many of its standard errors."""
    return float(differences.mean()) > errors * float(differences.std()) / len(differences) ** 0.5
