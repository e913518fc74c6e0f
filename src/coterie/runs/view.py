"""A run as its folder tells it, finished or not."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from coterie.runs.folder import finished, read_config, read_events, read_result, rounds_of

# What every row of the history has besides the score, whose name is the task's.
FIXED = {
    "round", "loss", "loss_per_cluster", "per_cluster", "changed", "moved", "groups", "members", "participants",
    "seconds", "bytes_down", "bytes_up", "left_out", "update", "epsilon", "clip",
}  # fmt: skip


@dataclass(frozen=True)
class View:
    """What is known of a run.

    Attributes:
        path: The run folder.
        config: The content of config.toml.
        history: The rounds so far.
        result: The content of result.json, None as long as the run has not come to its end.
        log: What the executor and the method had to say.
        begun: When and from what code the run was begun; empty where the folder does not say it.
    """

    path: Path
    config: dict[str, Any]
    history: list[dict[str, Any]]
    result: dict[str, Any] | None
    log: list[str] = field(default_factory=list)
    begun: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path) -> View:
        """The view of a run folder.

        Raises:
            ValueError: It is none.
        """
        config = read_config(path)
        result = read_result(path) if finished(path) else None  # first: a run goes on while it is read
        events = read_events(path)
        log = [str(event.get("message")) for event in events if event["event"] == "log"]
        begun = next((event for event in events if event["event"] == "start"), {})
        return cls(path, config, rounds_of(events, path), result, log, begun)

    @property
    def name(self) -> str:
        """The method and the data."""
        return f"{self.config['algorithm']['name']} on {self.data}"

    @property
    def data(self) -> str:
        """What the data are called."""
        data = self.config["data"]["name"]
        return "custom data" if data == "custom" else data

    @property
    def standing(self) -> str | None:
        """How far a run is that has not come to its end; None for one that has."""
        if self.result is not None:
            return None
        return f"running or stopped after round {len(self.history)} of {self.config['run']['rounds']}"

    @property
    def title(self) -> str:
        """The method, the data and the score, in one line."""
        parts = [] if self.score is None else [f"{self.metric} {self.score:.3f}"]
        if self.result is not None and self.result.get("ari") is not None:
            parts.append(f"ARI {self.result['ari']:.3f}")
        if self.standing:
            parts.append(self.standing)
        return f"{self.name}: {', '.join(parts)}"

    @property
    def metric(self) -> str:
        """The name of the score; "score" before the first round, where nothing tells it."""
        if self.result is not None:
            return self.result["metric"]
        return next((key for row in self.history for key in row if key not in FIXED), "score")

    @property
    def score(self) -> float | None:
        """The mean over clients, as last known."""
        if self.result is not None:
            return self.result["score"]
        return next((row[self.metric] for row in reversed(self.history) if row.get(self.metric) is not None), None)

    @property
    def per_cluster(self) -> dict[int, float]:
        """The score of every cluster, as last known."""
        if self.result is not None:
            return {int(j): value for j, value in self.result["per_cluster"].items()}
        last: list[Any] = next((row["per_cluster"] for row in reversed(self.history) if row["per_cluster"]), [])
        return {j: value for j, value in enumerate(last) if value is not None}

    @cached_property
    def labels(self) -> np.ndarray | None:
        """The cluster of every client; None where nobody knows it, or where it is points that have one."""
        if self.result is None or self.result.get("table") is not None or set(self.result["labels"]) == {-1}:
            return None
        return np.array(self.result["labels"])

    @cached_property
    def sizes(self) -> dict[int, int]:
        """The members of every cluster that has any; empty where the folder lists none, as of very many clusters."""
        if self.labels is not None:
            found, count = np.unique(self.labels[self.labels >= 0], return_counts=True)
            return dict(zip(found.tolist(), count.tolist(), strict=True))
        members = self.history[-1]["members"] if self.history else None
        return {j: n for j, n in enumerate(members or []) if n}

    @property
    def members(self) -> str:
        """What clusters are of: clients, or the points of methods that group those; "members" where it is not told."""
        if self.result is None:
            return "members"
        return "clients" if self.result.get("table") is None else "points"

    @property
    def groups(self) -> np.ndarray | None:
        """The true group of every client, None where nobody knows it."""
        groups = None if self.result is None else self.result.get("groups")
        return None if groups is None else np.array(groups)

    @property
    def names(self) -> list[str]:
        """What the clients of a finished run are called."""
        assert self.result is not None
        return self.result.get("ids") or [str(i) for i in range(len(self.result["labels"]))]

    @property
    def privacy(self) -> str | None:
        """ε and δ as last known; None for a run that is not private."""
        settings, last = self.config["run"].get("privacy"), self.history[-1] if self.history else {}
        if not settings or last.get("epsilon") is None:
            return None
        added = "by the clients" if self.config["run"].get("secure") else "by the server"
        return f"epsilon {last['epsilon']:.4g}, delta {settings['delta']:g} for every client, noise added {added}"

    @property
    def tree(self) -> list[dict[str, Any]] | None:
        """The outline of the tree of models, None where there is none."""
        return None if self.result is None else self.result.get("tree")
