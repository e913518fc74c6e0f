"""Engines: where and how clients' steps run. The same key gives the same run on each, up to rounding."""

from __future__ import annotations

from collections.abc import Callable

import torch

from coterie.core.cohort import Cohort
from coterie.core.engine import Engine
from coterie.core.federation import Federation
from coterie.core.key import Key
from coterie.core.precision import check_precision
from coterie.core.task import Task
from coterie.core.uplink import Uplink
from coterie.engines.sequential import Sequential
from coterie.engines.sharded import Sharded
from coterie.engines.vectorised import Vectorised
from coterie.engines.vmap import Vmap

Make = Callable[..., Engine]
"""Given a federation, a task, a key, a device, an uplink and a precision."""

ENGINES: dict[str, Make] = {engine.name: engine for engine in (Sequential, Vmap, Vectorised, Sharded)}


def find_engine(name: str) -> Make:
    """The engine of that name, which users call the executor of a run."""
    if name not in ENGINES:
        raise ValueError(f"executor must be one of {', '.join(ENGINES)}, got '{name}'")
    return ENGINES[name]


def simulated(
    federation: Federation,
    task: Task,
    key: Key,
    *,
    executor: str = "vectorised",
    device: str | torch.device = "cpu",
    uplink: Uplink | None = None,
    precision: str = "float32",
) -> Cohort:
    """All clients of a federation, simulated in this process: for experiments that do their own rounds.

    Args:
        federation: The clients and their rows.
        task: What is learnt.
        key: The clients' random numbers follow from it.
        executor: The name of the engine.
        device: Where steps run.
        uplink: What is done to every reply.
        precision: Of matrix products.
    """
    place = find_device(device) if isinstance(device, str) else device
    return Cohort(find_engine(executor)(federation, task, key, place, uplink, check_precision(precision, place)))


def find_device(name: str) -> torch.device:
    """The device of that name; "auto" takes a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda") and not name.startswith("cuda:"):
        raise ValueError(f"device must be auto, cpu or cuda, got '{name}'")
    if name != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"device '{name}' was asked for, but torch sees no GPU here; use device='cpu' or 'auto'")
    return torch.device(name)
