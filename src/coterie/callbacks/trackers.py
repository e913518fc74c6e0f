"""Callbacks that log a run to an experiment tracker. Each needs a package, which is imported when a run begins to log.

What has been logged is noted in the run folder, so that a run that is resumed goes on in the same place and logs no
round twice.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from coterie.core.registry import register
from coterie.runs.compare import flattened, short
from coterie.runs.run import Run
from coterie.storage import reading, snapshot

NOTES = "trackers.json"  # in a run folder: what each tracker has logged
LONGEST = 500  # characters of a text that every version of MLflow takes

Settings = dict[str, str | int | float]


class _Logged(NamedTuple):
    """What a tracker has logged of a run."""

    id: str  # by which the tracker knows the run
    rounds: int = 0
    final: int = 0  # after how many rounds the result was logged


class _Tracker(ABC):
    """What the trackers have in common: what is logged, and that nothing is logged twice."""

    package: ClassVar[str]  # to import
    extra: ClassVar[str]  # of coterie, which installs it

    def __post_init__(self) -> None:
        """Refuse to be made where the package is missing, rather than fail after the first round."""
        if find_spec(self.package) is None:
            message = f"{type(self).__name__} needs the package {self.package}: pip install 'coterie[{self.extra}]'"
            raise ValueError(message)
        self._settings: Settings | None = None  # of a run that is being logged
        self._logged: _Logged | None = None

    def begin(self, config: dict[str, Any]) -> None:
        """Keep the settings of the run that is about to begin."""
        values = flattened(config)
        self._settings = {n: v if isinstance(v, str | int | float) else short(v) for n, v in values.items()}
        self._logged = None

    def __call__(self, row: dict[str, Any], run: Run) -> None:
        """Log all rounds that are not logged yet: the last, or more where an earlier part was not tracked."""
        if self._settings is None:  # another process of the run logs
            return
        before = self._logged or self._open(self._settings, run)
        for each in run.history:
            if each["round"] > before.rounds:
                self._write(_numbers(each, run.task.metric), each["round"])
        self._note(run, before._replace(rounds=max(before.rounds, row["round"])))

    def end(self, run: Run | None) -> None:
        """Log the result of a run that has come to its end, and close."""
        if (logged := self._logged) is not None:
            if run is not None and logged.final != len(run.history):
                self._conclude(_final(run), "\n".join(run.warnings), len(run.history))
                self._note(run, logged._replace(final=len(run.history)))
            self._close(whole=run is not None)
        self._settings = self._logged = None

    def _open(self, settings: Settings, run: Run) -> _Logged:
        """Begin to log, or go on where an earlier part of the run has ended."""
        noted = _notes(run.path).get(self._name())
        before = _Logged(noted["id"], noted["rounds"], noted["final"]) if noted else None
        name = run.path.resolve().name if run.path else type(run.algorithm).__name__
        found = self._connect(settings, name, run.path, before and before.id)
        return before or _Logged(found)

    def _note(self, run: Run, logged: _Logged) -> None:
        self._logged = logged
        if run.path:
            notes = _notes(run.path) | {self._name(): logged._asdict()}
            snapshot.write_text(run.path / NOTES, json.dumps(notes, indent=1) + "\n")

    def _name(self) -> str:
        """The name in the notes: the same for the same settings, which may hold a password and are not written."""
        return f"{type(self).__name__}-{hashlib.blake2b(repr(self).encode(), digest_size=4).hexdigest()}"

    @abstractmethod
    def _connect(self, settings: Settings, name: str, path: Path | None, known: str | None) -> str:
        """Begin to log a run, and return how it is found again.

        Args:
            settings: Of the run.
            name: Of the run, for people.
            path: The run folder.
            known: What this returned when the run was begun, if it is resumed: its settings are logged already.
        """

    @abstractmethod
    def _write(self, numbers: dict[str, float], step: int) -> None:
        """Log numbers of a round, so that they are kept even if the process is killed."""

    @abstractmethod
    def _conclude(self, numbers: dict[str, float], warnings: str, step: int) -> None:
        """Log the result."""

    @abstractmethod
    def _close(self, *, whole: bool) -> None:
        """End; `whole` says whether the run has come to its end."""


@register("mlflow", "callback")
@dataclass(eq=False)
class MLflow(_Tracker):
    """Log a run to MLflow: its settings as parameters, its rounds as metrics.

    Args:
        uri: Of a server, or of a database such as "sqlite:///mlflow.db"; None takes what the environment variable
            MLFLOW_TRACKING_URI says, else MLflow's default.
        experiment: The name of MLflow's experiment that the run is put into; it is made if there is none.
    """

    package, extra = "mlflow", "mlflow"

    uri: str | None = None
    experiment: str = "coterie"

    def _connect(self, settings: Settings, name: str, path: Path | None, known: str | None) -> str:
        from mlflow import MlflowClient
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        try:
            self._client = MlflowClient(self.uri)
            if known is not None:
                self._client.update_run(known, status="RUNNING")
            self._id = known or self._client.create_run(self._experiment_id(), run_name=name).info.run_id
        except MlflowException as error:
            raise ValueError(f"MLflow: {' '.join(error.message.split())}") from error
        if known is None:
            self._client.log_batch(self._id, params=[Param(n, str(v)[:LONGEST]) for n, v in settings.items()])
        return self._id

    def _experiment_id(self) -> str:
        from mlflow.exceptions import MlflowException

        try:
            return self._client.create_experiment(self.experiment)
        except MlflowException:  # perhaps by another run, at the same time
            if (found := self._client.get_experiment_by_name(self.experiment)) is None:
                raise
            return found.experiment_id

    def _write(self, numbers: dict[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self._id, metrics=[Metric(n, v, now, step) for n, v in numbers.items()])

    def _conclude(self, numbers: dict[str, float], warnings: str, step: int) -> None:
        self._write(numbers, step)
        self._client.set_tag(self._id, "warnings", warnings[:LONGEST])

    def _close(self, *, whole: bool) -> None:
        self._client.set_terminated(self._id, status="FINISHED" if whole else "FAILED")


@register("tensorboard", "callback")
@dataclass(eq=False)
class TensorBoard(_Tracker):
    """Write a run as event files of TensorBoard: its settings as text, its rounds as scalars.

    Args:
        folder: Where they are written, one folder per run; None takes `tensorboard` in the run folder.
    """

    package, extra = "tensorboard", "tensorboard"

    folder: str | Path | None = None

    def _connect(self, settings: Settings, name: str, path: Path | None, known: str | None) -> str:
        from torch.utils.tensorboard import SummaryWriter

        folder = self.folder or (path and path / "tensorboard")
        if folder is None:
            raise ValueError("TensorBoard: folder must be given where fit is given no out folder")
        self._writer = SummaryWriter(folder)
        if known is None:
            lines = "".join(f"| {n} | {v} |\n" for n, v in settings.items())
            self._writer.add_text("settings", f"| setting | value |\n|---|---|\n{lines}")
        return name

    def _write(self, numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def _conclude(self, numbers: dict[str, float], warnings: str, step: int) -> None:
        self._write(numbers, step)
        if warnings:
            self._writer.add_text("warnings", warnings, step)

    def _close(self, *, whole: bool) -> None:
        self._writer.close()


@register("wandb", "callback")
@dataclass(eq=False)
class WandB(_Tracker):
    """Log a run to Weights & Biases: its settings as config, its rounds as history, its result as summary.

    Args:
        project: The project that the run is put into.
        offline: Whether to write files only, which `wandb sync` sends later; False sends everything as it comes.
        folder: Where the folder `wandb` with the files is made; None takes the run folder.
    """

    package, extra = "wandb", "wandb"

    project: str = "coterie"
    offline: bool = True
    folder: str | Path | None = None

    def _connect(self, settings: Settings, name: str, path: Path | None, known: str | None) -> str:
        import wandb

        folder = self.folder or path
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)  # or wandb takes another
        self._run = wandb.init(
            project=self.project,
            name=name,
            dir=folder,
            config=dict(settings),
            id=known,
            resume=None if self.offline else "allow",  # offline there is no server to ask; the id is the same
            mode="offline" if self.offline else "online",
            reinit="create_new",  # not a run that the program has begun itself
            settings=wandb.Settings(console="off"),  # the progress line is no log
        )
        return self._run.id

    def _write(self, numbers: dict[str, float], step: int) -> None:
        self._run.log(numbers, step=step)

    def _conclude(self, numbers: dict[str, float], warnings: str, step: int) -> None:
        self._run.summary.update({**numbers, "warnings": warnings})

    def _close(self, *, whole: bool) -> None:
        self._run.finish(exit_code=0 if whole else 1)


def _notes(path: Path | None) -> dict[str, Any]:
    """What trackers have logged of the run in a folder, by their names."""
    shape = {str: {"id": str, "rounds": int, "final": int}}
    return reading.read_json(path / NOTES, shape) if path and reading.is_there(path / NOTES) else {}


def _numbers(row: dict[str, Any], metric: str) -> dict[str, float]:
    """The numbers of a row of the history; what it lists by cluster has one name for each.

    Example:
        >>> row = {"round": 3, "loss": 0.5, "accuracy": 0.9, "per_cluster": [0.8, None], "members": [4, 0], "moved": []}
        >>> list(_numbers(row, "accuracy"))
        ['loss', 'accuracy', 'accuracy/cluster-0', 'members/cluster-0', 'members/cluster-1']
    """
    numbers = {name: value for name, value in row.items() if name != "round"}
    for name, key in ((metric, "per_cluster"), ("loss", "loss_per_cluster"), ("members", "members")):
        numbers |= {f"{name}/cluster-{j}": value for j, value in enumerate(row.get(key) or [])}
    return _finite(numbers)


def _final(run: Run) -> dict[str, float]:
    """What the result holds, in numbers that take no further round with the clients."""
    totals = {name: sum(row[name] for row in run.history) for name in ("seconds", "bytes_down", "bytes_up")}
    scores = run.scores
    each = {f"{scores.metric}/cluster-{j}": value for j, value in scores.per_cluster.items()}
    found = {scores.metric: run.score, "worst_decile": scores.worst_decile, **scores.clustering, **each, **totals}
    found["clusters"] = len(run.algorithm.members(run.state))
    return {f"final/{name}": value for name, value in _finite(found).items()}


def _finite(values: dict[str, Any]) -> dict[str, float]:
    """The values that are numbers a tracker can draw."""
    return {n: float(v) for n, v in values.items() if isinstance(v, int | float) and math.isfinite(v)}
