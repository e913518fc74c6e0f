"""The one file that a user writes: data.py in the app's folder, whose function tells what a node has."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flwr.app import Context

    from coterie.core.federation import Federation

NEEDED = "the app needs a data.py with a function federation(context) -> Federation"


def find_data_file() -> Path:
    """The data.py of the app that Flower has made importable."""
    found = importlib.util.find_spec("data")
    if found is None or found.origin is None:
        raise ValueError(NEEDED)
    return Path(found.origin)


def load_federation(file: Path, context: Context) -> Federation:
    """What data.py says that this node has.

    Raises:
        ValueError: It has no such function, or that does not give a Federation.
    """
    from coterie.core.federation import Federation

    module = _load(file)
    if not hasattr(module, "federation"):
        raise ValueError(NEEDED)
    if not isinstance(federation := module.federation(context), Federation):
        raise ValueError(f"data.py: federation() must return a Federation, got {type(federation).__name__}")
    return federation


def forget(folder: Path) -> None:
    """Unload what was loaded from an app's folder: another app may have files of the same names."""
    for name, module in list(sys.modules.items()):
        if (file := getattr(module, "__file__", None)) and Path(file).is_relative_to(folder):
            del sys.modules[name]
    sys.path[:] = [part for part in sys.path if part != str(folder)]


def _load(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("data", file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ValueError(NEEDED)
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))  # for modules beside it
    module = importlib.util.module_from_spec(spec)
    sys.modules["data"] = module
    spec.loader.exec_module(module)
    return module
