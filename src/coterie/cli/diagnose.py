"""Diagnosing a run, with nothing but its folder and the data that its configuration names."""

from __future__ import annotations

from pathlib import Path

from coterie.cli.assign import restored
from coterie.config import build_federation
from coterie.data import DATASETS
from coterie.diagnose import Diagnosis, diagnose
from coterie.evaluate import evaluate
from coterie.executors import find_device, find_executor
from coterie.key import Key
from coterie.record import read_config, read_history
from coterie.run import Run
from coterie.tree import to_device


def diagnose_folder(path: Path, device: str) -> Diagnosis:
    """What `diagnose` says of a finished run and the federation that it was trained on."""
    algorithm, task, state = restored(path)
    table = read_config(path)["data"]
    if table["name"] not in DATASETS:
        raise ValueError(
            f"{path} was trained from Python on data of its own; use coterie.diagnose(federation, run) there"
        )
    federation, place = build_federation(table), find_device(device)
    cohort = find_executor("vectorised")(federation, task, Key.of(0), place)
    state = to_device(state, place)
    run = Run(algorithm, state, evaluate(algorithm, state, cohort), read_history(path), path, cohort)
    return diagnose(federation, run)
