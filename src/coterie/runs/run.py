"""`Run`: what was learnt, how well it does, and how it came about."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from coterie.core.cohort import Cohort
from coterie.core.federation import Array, Federation
from coterie.core.method import Method, PointMethod
from coterie.core.model_tree import ModelTree
from coterie.core.pytree import Params, take
from coterie.core.task import Data, Task
from coterie.engines import find_engine
from coterie.runs.evaluate import Along, PointScores, Scores, evaluate


class Diverged(ValueError):
    """The loss stopped being a number. `run` holds the last good state."""

    def __init__(self, message: str, run: Run) -> None:
        super().__init__(message)
        self.run = run


@dataclass(frozen=True)
class Run:
    """What `fit` returns.

    Attributes:
        algorithm: The method, with its hyperparameters.
        state: All that it has learnt.
        scores: Every client scored with its model, chosen on its training rows.
        history: One dict per round: loss, score (also per cluster), labels changed, groups, members per cluster, bytes
            down and up, seconds.
        path: The run folder, None if nothing was written.
    """

    algorithm: Method
    state: Any
    scores: Scores
    history: list[dict[str, Any]]
    path: Path | None
    _cohort: Cohort

    @property
    def models(self) -> list[Params]:
        """One state dict per cluster; each loads into the task's module."""
        stacked = self.algorithm.models(self.state)
        return [{n: x.cpu() for n, x in take(stacked, j).items()} for j in range(len(next(iter(stacked.values()))))]

    @property
    def labels(self) -> np.ndarray:
        """The cluster of every client."""
        return self.scores.labels

    @property
    def accuracy(self) -> float:
        """Mean accuracy over clients, each with the model of its cluster."""
        if self.scores.metric != "accuracy":
            raise AttributeError(f"this task has no accuracy; it is scored by {self.scores.metric}: see run.score")
        return self.scores.mean

    @property
    def score(self) -> float:
        """The mean over clients of the task's own score."""
        return self.scores.mean

    @property
    def ari(self) -> float | None:
        """Adjusted Rand index of the labels against the true groups; None where those are not known."""
        return self.scores.clustering.get("ari")

    @property
    def purity(self) -> float | None:
        """The share of clients, or of points, that belong to the commonest group of their cluster; None if unknown."""
        return self.scores.clustering.get("purity")

    def assign(self, x: Array, y: Array | None = None) -> int | np.ndarray:
        """The cluster of a client that was not there; of methods that group points, the cluster of each row of x.

        Nothing is sent anywhere: a client that has the models can do it by itself.
        """
        if y is None and not self.algorithm.needs.points:
            raise ValueError(f"assign: {type(self.algorithm).__name__} places a client by its rows x and targets y")
        return assign(self.algorithm, self.state, self._cohort.task, x, y, self._cohort.federation.columns)

    @property
    def tree(self) -> ModelTree:
        """The tree of models that the algorithm left behind; `print(run.tree)` draws it."""
        if (tree := self.algorithm.tree(self.state)) is None:
            raise AttributeError(f"{type(self.algorithm).__name__} makes no tree of models")
        return tree

    def draw_tree(self, path: str | Path) -> None:
        """Write a picture of the tree."""
        from coterie.runs import plots

        fig = plots.figure(5.5, 4)
        plots.tree(fig.subplots(), self.tree.outline(), len(self.history))
        plots.save(fig, Path(path))

    def evaluate(self, choose_on: Literal["train", "test"] = "train", along: Along = "leaf") -> Scores:
        """Score every client again.

        Args:
            choose_on: Its cluster is chosen on its "train" or its "test" rows.
            along: With the model of its cluster ("leaf"); where there is a tree also with that at the "root", or with
                the ensemble of the models on the "path".
        """
        return evaluate(self.algorithm, self.state, self._cohort, choose_on, along)

    def cohort_of(self, federation: Federation) -> Cohort:
        """Other clients, on the same kind of engine as the run's."""
        own = self._cohort.engine.in_the_open()
        return Cohort(find_engine(own.name)(federation, own.task, own.key, own.device, precision=own.precision))


def assign(
    algorithm: Method, state: Any, task: Task, x: Array, y: Array | None, columns: tuple[str, ...] | None = None
) -> int | np.ndarray:
    """The cluster of one client with these rows, or of each of its points; a table's columns go by their names."""
    targets = torch.zeros(len(x), dtype=torch.long) if y is None else y
    client = Federation.from_clients([(x, targets)], columns=columns)
    client.check(task)
    device = next(iter(algorithm.models(state).values())).device
    rows = Data(client.train.x, client.train.y, torch.ones(len(client.train.x)))
    rows = Data(*(v.to(device) for v in rows))
    if isinstance(algorithm, PointMethod):
        return algorithm.assign_points(state, task, rows).cpu().numpy()
    return algorithm.assign(state, task, rows)


def summary(run: Run) -> dict[str, Any]:
    """A run in figures, for its folder."""
    names = run._cohort.federation.ids
    return {
        "metric": run.scores.metric,
        "score": run.score,
        "clusters": len(run.algorithm.members(run.state)),
        **run.scores.clustering,
        "per_cluster": {str(j): v for j, v in run.scores.per_cluster.items()},
        "per_client": [None if math.isnan(v) else v for v in run.scores.per_client.tolist()],
        "labels": run.labels.tolist(),
        "ids": list(names) if names else None,
        "columns": list(columns) if (columns := run._cohort.federation.columns) else None,
        "groups": None if run.scores.groups is None else run.scores.groups.tolist(),
        "table": run.scores.table.tolist() if isinstance(run.scores, PointScores) else None,
        "tree": None if (tree := run.algorithm.tree(run.state)) is None else tree.outline(),
        "seconds": sum(row["seconds"] for row in run.history),
        "bytes_down": sum(row["bytes_down"] for row in run.history),
        "bytes_up": sum(row["bytes_up"] for row in run.history),
        "left_out": dict(Counter(site for row in run.history for site in row.get("left_out", []))),
        "executor": run._cohort.engine.name,
        "device": _device_name(run._cohort.engine.device),
    }


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
