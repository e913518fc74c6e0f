"""Evaluation: every client with its own model, on its own rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from coterie import metrics
from coterie.algorithms.base import Algorithm
from coterie.client import ClientStep, Local, Reply, mean_loss
from coterie.cohort import Cohort
from coterie.parameter_tree import ParameterTree
from coterie.task import Task
from coterie.tree import Params, stack


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

    def score_ensemble(self, task: Task) -> ClientStep:
        """Score the models that were sent, as one ensemble, on the client's rows."""
        return self.score(task.ensemble())

    def score(self, task: Task) -> ClientStep:
        """Score the model that was sent on the client's rows."""

        def run(theta: Params, local: Local) -> Reply:
            rows = local.data.mask.sum()
            score = (task.score(theta, local.data) * local.data.mask).sum() / rows
            note = {"score": score, "loss": mean_loss(task, theta, local.data)}
            return Reply((), rows, torch.zeros((), dtype=torch.long), note)

        return ClientStep(run)


Along = Literal["leaf", "root", "path"]


def evaluate(
    algorithm: Algorithm,
    state: Any,
    cohort: Cohort,
    choose_on: Literal["train", "test"] = "train",
    along: Along = "leaf",
) -> Scores:
    """Let every client choose its cluster, then score that cluster's model on its test rows.

    Args:
        algorithm: The method that made the state.
        state: What it has learnt.
        cohort: The clients; what they exchange here is not charged to the run.
        choose_on: "train" (honest: the test rows only score) or "test" (a client may look at its labelled test rows).
        along: For algorithms that leave a tree of models: a client may also be scored with the model at the "root", or
            with the ensemble of all models on the "path" from there to its leaf.
    """
    if choose_on not in ("train", "test"):
        raise ValueError(f"choose_on must be 'train' or 'test', got {choose_on!r}")
    aside = cohort.uncharged()
    labels = algorithm.place(state, aside.on(choose_on))
    if along == "leaf":
        note = aside.on("test").gather(Scorer().score, algorithm.models(state), rows=labels).note
    else:
        note = _along(algorithm.tree(state), labels, aside.on("test"), along)
    groups = cohort.federation.groups
    return Scores(
        metric=cohort.task.metric,
        per_client=note["score"].cpu().numpy(),
        labels=labels.cpu().numpy(),
        groups=None if groups is None else groups[cohort.clients].numpy(),
        loss=note["loss"].cpu().numpy(),
        chosen_on=choose_on,
    )


def _along(tree: ParameterTree | None, labels: Tensor, cohort: Cohort, along: Along) -> dict[str, Tensor]:
    """Score clients with the root's model, or with the ensemble on the way to their leaf."""
    if along not in get_args(Along):
        raise ValueError(f"along must be 'leaf', 'root' or 'path', got {along!r}")
    if tree is None:
        raise ValueError(f"along={along!r} needs a tree of models, which this algorithm does not make")
    note = {name: torch.empty(len(cohort)) for name in ("score", "loss")}
    for c in labels.unique().tolist():
        at = (labels == c).nonzero().flatten()
        path = tree.path(c)[: 1 if along == "root" else None]
        found = cohort.only(at).gather(Scorer().score_ensemble, stack([branch.model for branch in path])).note
        for name, whole in note.items():
            whole[at] = found[name].cpu()
    return note
