"""Diagnosing a run, with nothing but its folder and the data that its configuration names."""

from __future__ import annotations

from pathlib import Path

from coterie.cli.assign import restored
from coterie.config import build_federation
from coterie.data import DATASETS
from coterie.diagnosis import Diagnosis, diagnose_state
from coterie.executors import find_device, find_executor
from coterie.key import Key
from coterie.record import read_config
from coterie.tree import to_device


def diagnose_folder(path: Path, device: str) -> Diagnosis:
    """What `diagnose` says of a finished run and the federation that it was trained on."""
    algorithm, task, state = restored(path)
    table = read_config(path)["data"]
    if table["name"] not in DATASETS:
        raise ValueError(
            f"{path} was trained from Python on data of its own; use coterie.diagnose(federation, run) there"
        )
    place = find_device(device)
    cohort = find_executor("vectorised")(build_federation(table), task, Key.of(0), place)
    return diagnose_state(cohort, algorithm, to_device(state, place))
