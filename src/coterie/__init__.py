"""coterie: find the hidden groups of a federation's clients and train one model per group."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coterie import data, models
    from coterie.algorithms import (
        CFL,
        IFCA,
        KFED,
        UIFCA,
        Balanced,
        ClusterGAN,
        Disturbed,
        FarthestFirst,
        FedAvg,
        FedX,
        LocalOnly,
        MixedRegression,
        MomentDescent,
        Random,
        RandomGroups,
    )
    from coterie.diagnosis import Diagnosis, diagnose
    from coterie.evaluate import Scores
    from coterie.federation import Federation
    from coterie.result import Diverged, Run
    from coterie.run import fit
    from coterie.secure import SecureSum
    from coterie.task import Task

__version__ = "0.1.0"

__all__ = [
    "CFL", "IFCA", "KFED", "UIFCA", "Balanced", "ClusterGAN", "Diagnosis", "Disturbed", "Diverged", "FarthestFirst",
    "FedAvg", "FedX", "Federation", "LocalOnly", "MixedRegression", "MomentDescent", "Random", "RandomGroups", "Run",
    "Scores", "SecureSum", "Task", "data", "diagnose", "fit", "models",
]  # fmt: skip

_HOMES = {
    "diagnosis": ("Diagnosis", "diagnose"),
    "evaluate": ("Scores",),
    "federation": ("Federation",),
    "result": ("Diverged", "Run"),
    "run": ("fit",),
    "secure": ("SecureSum",),
    "task": ("Task",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Load what is asked for, and not before: a node's thin ClientApp needs no torch, which loads for seconds."""
    if name not in __all__:
        raise AttributeError(f"module 'coterie' has no attribute '{name}'")
    if name in ("data", "models"):
        return importlib.import_module(f"coterie.{name}")
    found = getattr(importlib.import_module(f"coterie.{_HOME.get(name, 'algorithms')}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
