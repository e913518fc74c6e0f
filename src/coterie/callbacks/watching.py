"""Callbacks that watch a column of the history: to end a run, or to keep its best models."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from coterie.core.registry import register
from coterie.core.settings import setting
from coterie.runs.folder import write_models
from coterie.runs.run import Run
from coterie.storage import reading, snapshot

HIGHER = ("accuracy", "score", "ari", "nmi", "purity", "matched")  # of these more is better, of all others less
BEST = "best.json"

Mode = Literal["auto", "min", "max"]


@register("early_stopping", "callback")
@dataclass(frozen=True)
class EarlyStopping:
    """End a run when something has not got better for a while.

    It goes by the history alone, so that a run that is resumed stops where it would have.

    Args:
        watch: A column of the history: "loss", or the task's metric, such as "accuracy", in rounds that have one.
        patience: For how many rounds with a value it may not get better.
        delta: By how much at least it must get better to count.
        mode: Whether less ("min") or more ("max") is better; "auto" knows accuracy and loss.

    Example:
        >>> import coterie as ct
        >>> task = ct.Task.classifier(ct.models.MLP(64, 32, 10))
        >>> stop = EarlyStopping("accuracy", patience=2)
        >>> run = ct.fit(ct.FedAvg(), task, ct.data.digits(8), rounds=200, callbacks=[stop])
        >>> len(run.history) < 200
        True
    """

    watch: str = "loss"
    patience: int = setting(10, low=1)
    delta: float = setting(0.0, low=0)
    mode: Mode = "auto"

    def __call__(self, row: dict[str, Any], run: Run) -> bool:
        """Whether to stop."""
        values = [_cost(r[self.watch], self.watch, self.mode) for r in run.history if r.get(self.watch) is not None]
        if row.get(self.watch) is None:
            _check_known(self.watch, row, run)
            return False
        best, since = values[0], 0
        for value in values[1:]:
            best, since = (value, 0) if value < best - self.delta else (best, since + 1)
        return since >= self.patience


@register("checkpoint", "callback")
@dataclass
class Checkpoint:
    """Keep the best models of a run in a folder, one file per cluster, as `load_state_dict` takes them.

    Args:
        folder: Where they are written, with `best.json`, which says of what round they are; None takes `best` in the
            run folder.
        watch: The column of the history to go by; None takes the task's metric.
        keep: "best", or "last": those of the last round.
        each: "run": all models are of the round that was best on the whole. "cluster": each model is of the round in
            which its own cluster scored best.
        mode: Whether less ("min") or more ("max") is better; "auto" knows accuracy and loss.
    """

    folder: str | Path | None = None
    watch: str | None = None
    keep: Literal["best", "last"] = "best"
    each: Literal["run", "cluster"] = "run"
    mode: Mode = "auto"

    def __call__(self, row: dict[str, Any], run: Run) -> None:
        """Write the models that are better than those that are there."""
        watch = self.watch or run.task.metric
        if row.get(watch) is None:
            _check_known(watch, row, run)
            return
        folder, models = self._folder(run), run.models
        file = folder / BEST
        found = row["per_cluster"] if self.each == "cluster" else [row[watch]] * len(models)
        new = [{"round": row["round"], watch: value} for value in found or []]
        shape = [{"round": int, f"{watch}?": (None, float)}]
        old = reading.read_json(file, shape) if row["round"] > 1 and reading.is_there(file) else []
        if self.each == "run" and old and not self._better(new[0], old[0], watch):
            return
        better = [self.each == "run" or j >= len(old) or self._better(own, old[j], watch) for j, own in enumerate(new)]
        write_models(folder, models, [j for j, yes in enumerate(better) if yes])
        kept = [own if yes else old[j] for j, (own, yes) in enumerate(zip(new, better, strict=True))]
        snapshot.write_text(file, json.dumps(kept, indent=1) + "\n")

    def _folder(self, run: Run) -> Path:
        folder = self.folder or (run.path and run.path / "best")
        if folder is None:
            raise ValueError("Checkpoint: folder must be given where fit is given no out folder")
        return Path(folder)

    def _better(self, new: dict[str, Any], old: dict[str, Any], watch: str) -> bool:
        if self.keep == "last" or old.get(watch) is None:
            return True
        return new[watch] is not None and _cost(new[watch], watch, self.mode) < _cost(old[watch], watch, self.mode)


def _cost(value: float, watch: str, mode: Mode) -> float:
    """A value such that less is better."""
    return -value if mode == "max" or (mode == "auto" and watch in HIGHER) else value


def _check_known(watch: str, row: dict[str, Any], run: Run) -> None:
    """Refuse a column that no round can have; the metric is missing in rounds that are not scored."""
    if watch not in row and watch != run.task.metric and not any(watch in r for r in run.history):
        known = ", ".join(n for n, v in row.items() if isinstance(v, int | float))
        raise ValueError(f"callbacks: the history has no column '{watch}'; it has {known}")
