"""Names: one registration by which a class is found from Python, TOML, the command line, run folders and nodes.

    @ct.register("fesem")
    @dataclass(frozen=True)
    class FeSEM(Method): ...

A package that is installed beside coterie names its classes as entry points of the group "coterie.methods"; they are
loaded when a name is looked up.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Literal, TypeVar

from coterie.storage.names import nearest_name

log = logging.getLogger("coterie")

GROUP = "coterie.methods"
# Modules that register classes.
BUILT_IN = (
    "coterie.methods",
    "coterie.privacy.bounded",
    "coterie.robust.rules",
    "coterie.runs.evaluate",
    "coterie.runs.diagnosis",
    "coterie.callbacks",
)

Kind = Literal["method", "start", "optimiser", "schedule", "uplink", "aggregate", "callback", "service"]
Class = TypeVar("Class", bound=type)

_registered: dict[tuple[Kind, str], type] = {}


def register(name: str, kind: Kind = "method") -> Callable[[Class], Class]:
    """Register a frozen dataclass of settings under a name.

    Args:
        name: As it is written in a configuration.
        kind: "method"; "start", a way to find the first models; "optimiser" or "schedule", of training; "uplink", a
            change of replies; "aggregate", a robust mean of them; "callback", of `fit`; or "service", which has client
            steps but is no choice of the user's.
    """

    def decorate(cls: Class) -> Class:
        before = _registered.get((kind, name))
        if before is not None and _home(before) != _home(cls):
            raise ValueError(f"register: the {kind} '{name}' is {before.__module__}.{before.__qualname__} already")
        _registered[kind, name] = cls
        return cls

    return decorate


def known(kind: Kind) -> dict[str, type[Any]]:
    """Every class of a kind by its name, those of installed packages among them."""
    _load()
    return {name: cls for (own, name), cls in sorted(_registered.items()) if own == kind}


def find(kind: Kind, name: Any, where: str) -> type[Any]:
    """The class of that name.

    Args:
        kind: Of what.
        name: As the user gave it.
        where: The beginning of the message if there is none.
    """
    classes = known(kind)
    if not isinstance(name, str) or name not in classes:
        raise ValueError(f"{where} {name!r} is not known{nearest_name(str(name), classes)}")
    return classes[name]


def named(cls: type) -> str | None:
    """The name of a class; None where it is not registered."""
    _load()
    return next((name for (_, name), own in _registered.items() if own is cls), None)


def owners() -> dict[str, type[Any]]:
    """All registered classes by kind and name, such as "method.ifca": those whose client steps a node can run.

    Callbacks have none. They write where they are told to, so a node must not make one that a message names.
    """
    _load()
    return {f"{kind}.{name}": cls for (kind, name), cls in _registered.items() if kind != "callback"}


@cache
def _load() -> None:
    """Load what registers itself: the library's own modules, then installed packages."""
    for module in BUILT_IN:
        importlib.import_module(module)
    for point in entry_points(group=GROUP):
        try:
            point.load()
        except Exception as error:  # a broken package must not take the others with it
            log.warning("%s: the entry point '%s' (%s) cannot be loaded: %s", GROUP, point.name, point.value, error)


def _home(cls: type) -> str:
    """The file and name of a class; a file that is loaded twice, perhaps under two names, may register twice."""
    return f"{cls.__module__.rpartition('.')[2]}.{cls.__qualname__}"
