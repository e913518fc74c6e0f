"""Whether `fit` was given a method, a task and a federation, or something that a user may take for one."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from torch import nn

from coterie.core.federation import Federation
from coterie.core.method import Method
from coterie.core.registry import known
from coterie.core.task import Task


def check_method(algorithm: Any, where: str = "fit: algorithm") -> None:
    """Refuse what is not a method with its settings.

    Args:
        algorithm: What the user gave.
        where: What the message calls it.

    Raises:
        ValueError: It is a class, a name, or something else.
    """
    if isinstance(algorithm, Method):
        return
    cls = known("method").get(algorithm.lower()) if isinstance(algorithm, str) else algorithm
    example = _call(cls) if isinstance(cls, type) and issubclass(cls, Method) else "IFCA(k=4)"
    raise ValueError(f"{where} must be a method with its settings: {example}, got {_what(algorithm)}")


def check_task(task: Any, where: str = "fit") -> None:
    """Refuse what is not a task.

    Args:
        task: What the user gave.
        where: The function that was called.

    Raises:
        ValueError: It is a module, or something else.
    """
    if not isinstance(task, Task):
        module = "module" if isinstance(task, nn.Module) else "model"
        ways = f"Task.classifier({module}) or Task.regressor({module})"
        raise ValueError(f"{where}: task must be a Task, such as {ways}, got {_what(task)}")


def check_callbacks(callbacks: Any) -> None:
    """Refuse callbacks that cannot be called with a row of the history and a run.

    Args:
        callbacks: What the user gave.

    Raises:
        ValueError: One is not a function of two arguments.
    """
    for callback in callbacks if isinstance(callbacks, list | tuple) else [callbacks]:
        try:
            inspect.signature(callback).bind({}, None)
            fine = callback is not callbacks and not isinstance(callback, type)
        except (TypeError, ValueError):
            fine = False
        if not fine:
            raise ValueError(
                f"fit: callbacks must be a list of functions of a row of the history and the run, got {callback!r}"
            )


def check_federation(federation: Any, where: str = "fit") -> None:
    """Refuse what is not a federation.

    Args:
        federation: What the user gave.
        where: The function that was called.

    Raises:
        ValueError: It is a list of clients, or something else.
    """
    if not isinstance(federation, Federation):
        way = "Federation.from_clients([(x, y), …])"
        raise ValueError(f"{where}: federation must be a Federation, such as {way}, got {_what(federation)}")


def _call(cls: type[Method]) -> str:
    """How a method is made, with the settings that must be given."""
    missing = dataclasses.MISSING
    needed = [f.name for f in dataclasses.fields(cls) if f.default is missing and f.default_factory is missing]
    return f"{cls.__name__}({', '.join(f'{name}=…' for name in needed)})"


def _what(given: Any) -> str:
    if isinstance(given, type):
        return f"the class {given.__name__}"
    return repr(given) if isinstance(given, str | int | float | None) else f"a {type(given).__name__}"
