"""The contracts, and what the author of a method imports: keys, tasks, client steps, cohorts, methods.

from coterie.core import Cohort, Method, Models, Report, Train, client_step, register
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coterie.core.cohort import Cohort
    from coterie.core.key import Key
    from coterie.core.local import mean_loss, nearest, pick
    from coterie.core.method import Method, Needs, PointMethod, Report, Served
    from coterie.core.pytree import Params, flat, put_rows, stack, take, tree_map, unflat
    from coterie.core.registry import register
    from coterie.core.settings import setting
    from coterie.core.step import ClientStep, Local, Reply, client_step
    from coterie.core.sums import Sums, slot_mean, slot_sum
    from coterie.core.task import Data, Task
    from coterie.core.train import Descend, Gradient, Models, Rows, Train

_HOMES = {
    "cohort": ("Cohort",),
    "key": ("Key",),
    "local": ("mean_loss", "nearest", "pick"),
    "method": ("Method", "Needs", "PointMethod", "Report", "Served"),
    "pytree": ("Params", "flat", "put_rows", "stack", "take", "tree_map", "unflat"),
    "registry": ("register",),
    "settings": ("setting",),
    "step": ("ClientStep", "Local", "Reply", "client_step"),
    "sums": ("Sums", "slot_mean", "slot_sum"),
    "task": ("Data", "Task"),
    "train": ("Descend", "Gradient", "Models", "Rows", "Train"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Load what is asked for, and not before: torch loads for seconds, and a node's thin ClientApp does without."""
    if name not in _HOME:
        raise AttributeError(f"module 'coterie.core' has no attribute '{name}'")
    return getattr(importlib.import_module(f"coterie.core.{_HOME[name]}"), name)
