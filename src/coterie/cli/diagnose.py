"""Diagnose a run, using only its folder and the data set that its configuration names."""

from __future__ import annotations

from pathlib import Path

from coterie.cli.assign import restored
from coterie.core.cohort import Cohort
from coterie.core.key import Key
from coterie.core.pytree import to_device
from coterie.data import DATASETS
from coterie.engines import find_device, find_engine
from coterie.runs.config import build_federation
from coterie.runs.diagnosis import Diagnosis, diagnose_state
from coterie.runs.folder import read_config


def diagnose_folder(path: Path, device: str) -> Diagnosis:
    """Return the diagnosis of a finished run and the federation that it was trained on.

    Args:
        path: The run folder.
        device: "auto", "cpu" or "cuda".
    """
    run = restored(path)
    table = read_config(path)["data"]
    if table["name"] not in DATASETS:
        raise ValueError(
            f"{path} was trained from Python on data of its own; use coterie.diagnose(federation, run) there"
        )
    place = find_device(device)
    cohort = Cohort(find_engine("vectorised")(build_federation(table), run.task, Key.of(0), place))
    return diagnose_state(cohort, run.algorithm, to_device(run.state, place))
