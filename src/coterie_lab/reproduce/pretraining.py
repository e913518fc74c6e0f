"""One model for all that is trained first, and of which only the head is trained after that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coterie.core.task import Task
from coterie.runs.config import build_algorithm, build_task
from coterie.runs.fit import fit
from coterie_lab.reproduce.rounds import seeded


def pretrain(spec: dict[str, Any], device: str) -> None:
    """Train the model of `[pretrain]`, or go on with it; it is there for all experiments that name the same folder.

    Args:
        spec: Table of an experiment: `pretrain` has the folder `out`, the data, the algorithm, rounds and seed.
        device: "auto", "cpu" or "cuda".
    """
    own = spec["pretrain"]
    fit(
        build_algorithm(own["algorithm"]),
        build_task(spec["task"]),
        seeded(own["data"], own["seed"]),
        rounds=own["rounds"],
        seed=own["seed"],
        device=device,
        evaluations=20,
        out=own["out"],
        resume=(Path(own["out"]) / "config.toml").exists(),
    )


def heads(spec: dict[str, Any]) -> Task:
    """The task of which only the head is trained, once `pretrain` is done.

    Args:
        spec: Table of an experiment.
    """
    return build_task({"from": spec["pretrain"]["out"], "head": spec["pretrain"]["head"]})
