"""Modules that have moved: for one release their old names still work, with a warning.

Everything that the README and the documentation use (`import coterie as ct`, configurations, the command line) has kept
its name; this is for programs that imported from inside the package.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from types import ModuleType
from typing import Any

MOVED = {
    "algorithms": "methods",
    "algorithms.base": "core.method",
    "client": "core.step",
    "cohort": "core.cohort",
    "config": "runs.config",
    "diagnosis": "runs.diagnosis",
    "evaluate": "runs.evaluate",
    "executors": "engines",
    "features": "core.features",
    "federation": "core.federation",
    "key": "core.key",
    "losses": "core.losses",
    "mapped": "storage.mapped",
    "metrics": "runs.metrics",
    "packed": "storage.packed",
    "parameter_tree": "core.model_tree",
    "plots": "runs.plots",
    "precision": "core.precision",
    "record": "runs.folder",
    "result": "runs.run",
    "run": "runs.fit",
    "settings": "core.settings",
    "snapshot": "storage.snapshot",
    "task": "core.task",
    "tree": "core.pytree",
    "uplink": "core.uplink",
    **{f"algorithms.{name}": f"methods.{name}" for name in (
        "cfl", "clustergan", "fedavg", "fedx", "ifca", "kfed", "local_only", "mixed_regression", "moment_descent",
        "uifca",
    )},
    **{f"algorithms.{name}": f"parts.{name}" for name in ("bipartition", "disguise", "kmeans", "starts")},
}  # fmt: skip

RENAMED = {"Algorithm": ("core.method", "Method"), "PointAlgorithm": ("core.method", "PointMethod")}
"""Classes that have another name now, and where they are."""


class _Old(ModuleType):
    """A module under its old name: what it had is looked up in the new one, or at the top of the package."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in RENAMED:
            home, new = RENAMED[name]
            return getattr(importlib.import_module(f"coterie.{home}"), new)
        module = importlib.import_module(f"coterie.{MOVED[self.__name__.removeprefix('coterie.')]}")
        return getattr(module, name) if hasattr(module, name) else getattr(sys.modules["coterie"], name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of coterie by their old names."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """The old module, if this is the name of one."""
        package, _, old = fullname.partition(".")
        if package != "coterie" or old not in MOVED:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=any(n.startswith(f"{old}.") for n in MOVED))

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """The module under its old name."""
        new = MOVED[spec.name.removeprefix("coterie.")]
        warnings.warn(
            f"{spec.name} is coterie.{new} now; the old name will go with the next release",
            DeprecationWarning,
            stacklevel=2,
        )
        return _Old(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: attributes are found when they are asked for."""


def install() -> None:
    """Have the old names found after all others."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
