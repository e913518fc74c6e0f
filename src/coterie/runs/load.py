"""`load`: a finished run from its folder, without the clients' rows."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coterie.core.cohort import Cohort
from coterie.core.engine import Engine, Exchange, Ledger
from coterie.core.federation import Federation, Packed
from coterie.core.freezing import frozen
from coterie.core.key import Key
from coterie.core.method import Method
from coterie.core.step import Reply
from coterie.core.sums import Sums
from coterie.core.task import Data, Task
from coterie.runs.arguments import check_task
from coterie.runs.config import build_algorithm, build_task
from coterie.runs.fingerprint import difference, fingerprint
from coterie.runs.folder import (
    CONFIG,
    read_checkpoint,
    read_config,
    read_fingerprint,
    read_history,
    read_models,
    read_result,
)
from coterie.runs.loop import CLIENTS
from coterie.runs.run import Run
from coterie.runs.scores import PointScores, Scores, SummedScores
from coterie.storage.inputs import Inputs

log = logging.getLogger("coterie")


def load(folder: str | Path, task: Task | None = None) -> Run:
    """The run that `fit` returned and wrote to a folder. Its clients' rows are not there, so it cannot be scored again.

    Args:
        folder: The run folder.
        task: What was learnt. It is needed for `predict`, `assign` and `module` where the run was made from Python with
            a module that is not one of `coterie.models`.

    Raises:
        ValueError: The folder holds no finished run, or the task's model is another one.
    """
    if task is not None:
        check_task(task, "load")
    path = Path(folder)
    result, config = read_result(path), read_config(path)
    with _said_of(path / CONFIG):
        method, known = _method(config["algorithm"]), task or _task(path, config["task"], result["metric"])
        key = Key.of(config["run"]["seed"]).fold(CLIENTS)
    engine = Absent(path, _clients(result), known, result["executor"], key)
    if task is not None and (other := difference(read_fingerprint(path), fingerprint(engine))):
        raise ValueError(f"{path} was made with {other}")
    content, damaged = read_checkpoint(path, method, known)
    if content is None:
        raise ValueError(f"{path} has no checkpoint that can be read")
    for file in damaged:
        log.warning("%s is damaged; using the checkpoint before it", file.name)
    scores = _scores(result, method, content["state"])
    cohort = Cohort(engine, Ledger(memory=content["memory"]))
    margins, warnings = _array(result.get("margins") or [None] * len(cohort)), result.get("warnings", [])
    return Run(method, content["state"], read_history(path), path, cohort, lambda: scores, margins, warnings)


@contextmanager
def _said_of(file: Path) -> Iterator[None]:
    """Have what is wrong with settings say which file they are from."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


class Absent(Engine):
    """Clients whose rows are not here."""

    remote = True

    def __init__(self, path: Path, federation: Federation, task: Task, name: str, key: Key) -> None:
        super().__init__(federation, task, key, torch.device("cpu"))
        self.path, self.name = path, name

    def combine(self, exchange: Exchange) -> Sums:
        """Refuse."""
        raise self._absence()

    def gather(self, exchange: Exchange) -> Reply:
        """Refuse."""
        raise self._absence()

    def _absence(self) -> ValueError:
        return ValueError(f"the run in {self.path} was loaded without its clients' rows, so they cannot be asked")


def _method(table: dict[str, Any]) -> Method:
    """The method of a run; what the folder does not keep is needed for training only."""
    lost = [
        n
        for n in ("init", "lr_schedule")
        if isinstance(table.get(n), str) and (n == "lr_schedule" or table[n] == "given")
    ]
    return build_algorithm({n: v for n, v in table.items() if n not in lost})


def _task(path: Path, table: dict[str, Any], metric: str) -> Task:
    """The task of a run, or what is known of one that was made from a module of the user's."""
    if "head" in table:  # the run's own files have the frozen layers
        whole = build_task({n: v for n, v in table.items() if n not in ("from", "head", "trunk")})
        return frozen(whole, read_models(path)[0], table["head"], table)
    if "model" in table or table.get("kind") == "distance":
        return build_task(table)

    def unknown(*_: Any) -> Any:
        raise ValueError("the run was made with a module of its own: load it with its task, ct.load(folder, task=…)")

    def check(rows: Data) -> str | None:
        return unknown(rows)

    return Task(unknown, unknown, unknown, metric, check=check, spec=table)


def _clients(result: dict[str, Any]) -> Federation:
    """The clients without their rows: all are one row of zeros, which takes no memory."""
    sizes, shape = result["rows"], tuple(result["row"])
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    total = int(offsets[-1])
    return Federation(
        Packed(torch.zeros(()).expand(total, *shape), torch.zeros(()).expand(total), offsets),
        ids=tuple(result["ids"]) if result["ids"] else None,
        groups=None if result["groups"] is None else torch.tensor(result["groups"]),
        inputs=Inputs.from_plain(result["inputs"]) if result.get("inputs") else None,
        columns=tuple(result["columns"]) if result.get("columns") else None,
    )


def _scores(result: dict[str, Any], method: Method, state: Any) -> Scores:
    """The scores as they were when the run ended."""
    known: dict[str, Any] = {
        "metric": result["metric"],
        "per_client": _array(result["per_client"]),
        "labels": np.array(result["labels"]),
        "groups": None if result["groups"] is None else np.array(result["groups"]),
        "loss": _array(result["losses"]),
        "chosen_on": "train",
    }
    if method.needs.points:
        return PointScores(**known, tables=None if result["table"] is None else np.array(result["table"])[None])
    if result["per_cluster"] and bool((known["labels"] < 0).all()):  # a secure sum
        members = method.members(state).cpu().numpy().astype(np.float64)
        opened = np.array([str(j) in result["per_cluster"] for j in range(len(members))])
        mean = np.array([result["per_cluster"].get(str(j), 0.0) for j in range(len(members))])
        return SummedScores(**known, total=mean * members * opened, count=members * opened)
    return Scores(**known)


def _array(values: list[float | None]) -> np.ndarray:
    return np.array([np.nan if v is None else v for v in values], dtype=np.float32)
