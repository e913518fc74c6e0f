"""Executors: where and how the clients' steps run. The same key gives the same run on each, up to rounding."""

from __future__ import annotations

import torch

from coterie.cohort import Cohort
from coterie.executors.fused import Fused
from coterie.executors.sequential import Sequential
from coterie.executors.sharded import Sharded
from coterie.executors.vectorised import Vectorised

EXECUTORS: dict[str, type[Cohort]] = {
    "sequential": Sequential,
    "vmap": Vectorised,
    "vectorised": Fused,
    "sharded": Sharded,
}


def find_executor(name: str) -> type[Cohort]:
    """The executor of that name."""
    if name not in EXECUTORS:
        raise ValueError(f"executor must be one of {', '.join(EXECUTORS)}, got '{name}'")
    return EXECUTORS[name]


def find_device(name: str) -> torch.device:
    """The device of that name; "auto" takes a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda") and not name.startswith("cuda:"):
        raise ValueError(f"device must be auto, cpu or cuda, got '{name}'")
    if name != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"device '{name}' was asked for, but torch sees no GPU here; use device='cpu' or 'auto'")
    return torch.device(name)
