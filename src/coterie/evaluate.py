"""Evaluation: every client with its own model, on its own rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from coterie import metrics
from coterie.algorithms.base import Algorithm
from coterie.client import ClientStep, Local, Reply, mean_loss
from coterie.cohort import Cohort
from coterie.task import Task
from coterie.tree import Params


@dataclass(frozen=True)
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
    def clustering(self) -> dict[str, float]:
        """Labels against true groups: ari, nmi, purity, matched; empty where the groups are not known."""
        if self.groups is None:
            return {}
        return {
            "ari": metrics.ari(self.labels, self.groups),
            "nmi": metrics.nmi(self.labels, self.groups),
            "purity": metrics.purity(self.labels, self.groups),
            "matched": metrics.matched_accuracy(self.labels, self.groups),
        }


@dataclass(frozen=True)
class Scorer:
    """The client's side of an evaluation."""

    def score(self, task: Task) -> ClientStep:
        """Score the model that was sent on the client's rows."""

        def run(theta: Params, local: Local) -> Reply:
            rows = local.data.mask.sum()
            score = (task.score(theta, local.data) * local.data.mask).sum() / rows
            note = {"score": score, "loss": mean_loss(task, theta, local.data)}
            return Reply((), rows, torch.zeros((), dtype=torch.long), note)

        return ClientStep(run)


def evaluate(algorithm: Algorithm, state: Any, cohort: Cohort, choose_on: Literal["train", "test"] = "train") -> Scores:
    """Let every client choose its cluster, then score that cluster's model on its test rows.

    Args:
        algorithm: The method that made the state.
        state: What it has learnt.
        cohort: The clients; what they exchange here is not charged to the run.
        choose_on: "train" (honest: the test rows only score) or "test" (a client may look at its labelled test rows).
    """
    if choose_on not in ("train", "test"):
        raise ValueError(f"choose_on must be 'train' or 'test', got {choose_on!r}")
    aside = cohort.uncharged()
    labels = algorithm.place(state, aside.on(choose_on))
    note = aside.on("test").gather(Scorer().score, algorithm.models(state), rows=labels).note
    groups = cohort.federation.groups
    return Scores(
        metric=cohort.task.metric,
        per_client=note["score"].cpu().numpy(),
        labels=labels.cpu().numpy(),
        groups=None if groups is None else groups[cohort.clients].numpy(),
        loss=note["loss"].cpu().numpy(),
        chosen_on=choose_on,
    )
