"""An error inside a client step, reported with everything that helps to find it."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from coterie.core.engine import Engine, Exchange
from coterie.core.step import step_name

_LIBRARIES = (Path(torch.__file__).resolve().parent, Path(__file__).resolve().parent.parent)


class StepError(ValueError):
    """A client step has failed. The message names step, client and round, and the line where it happened."""


FAULTS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What a step, or the model in it, may raise."""


def is_own_fault(error: Exception) -> bool:
    """Whether a step's error is to be explained: not one that is already, nor a lack of memory.

    Nor a matrix without an inverse: models that diverge come to that, and the loop says so.
    """
    singular = torch.linalg.LinAlgError  # pyright: ignore[reportPrivateImportUsage] - torch documents it
    return not isinstance(error, StepError | torch.OutOfMemoryError | singular)


@contextmanager
def explained(engine: Engine, exchange: Exchange, client: int) -> Iterator[None]:
    """An error in here is raised as a `StepError` that names this client, given by its position in the federation."""
    try:
        yield
    except FAULTS as error:
        if not is_own_fault(error):
            raise
        raise step_error(error, engine, exchange, client) from error


def step_error(error: Exception, engine: Engine, exchange: Exchange, client: int) -> StepError:
    """The error of a step at one client."""
    moment = f"round {exchange.when[0] + 1}" if exchange.when else "the start"
    where = f"{step_name(exchange.step)} failed in {moment} at {engine.federation.name(client)}"
    what = str(error).strip() or "(no message)"
    kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
    return StepError(f"{where}: {kind}{what}{_own_line(error)}")


def _own_line(error: Exception) -> str:
    """The innermost line outside of torch and coterie: most likely the user's own."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.exists() and not any(path.resolve().is_relative_to(library) for library in _LIBRARIES):
            return f"\n  at {frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}"
    return ""
