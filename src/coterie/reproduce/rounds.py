"""Plain rounds, for experiments that look at states, or at scores in their own way."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterator
from typing import Any

from coterie.algorithms.base import Algorithm
from coterie.cohort import Cohort
from coterie.config import build_federation
from coterie.data import CHANGES
from coterie.executors import find_device, find_executor
from coterie.federation import Federation
from coterie.key import Key
from coterie.loop import CLIENTS, START
from coterie.precision import check_precision
from coterie.task import Task


def seeded(data: dict[str, Any], seed: int, **more: Any) -> Federation:
    """The federation of a table, with this seed for the dealing and for all that its changes draw."""
    draws = {name for name, change in CHANGES.items() if "seed" in inspect.signature(change).parameters}
    change = [{**c, "seed": seed} if c["name"] in draws else c for c in data.get("change", [])]
    return build_federation({**data, **more, "seed": seed, "change": change})


def states(
    algorithm: Algorithm, task: Task, federation: Federation, rounds: int, seed: int, device: str
) -> Iterator[Any]:
    """The state at the start and after every round."""
    return states_of(algorithm, everybody(task, federation, seed, device), rounds, seed)


def last_state(*args: Any) -> Any:
    """The state after the last round."""
    return deque(states(*args), maxlen=1).pop()


def everybody(task: Task, federation: Federation, seed: int, device: str, precision: str = "float32") -> Cohort:
    """All clients of a federation. The precision is for a GPU; a CPU computes in float32."""
    place = find_device(device)
    used = check_precision(precision if place.type == "cuda" else "float32", place)
    return find_executor("vectorised")(federation, task, Key.of(seed).fold(CLIENTS), place, precision=used)


def states_of(algorithm: Algorithm, cohort: Cohort, rounds: int, seed: int) -> Iterator[Any]:
    """The state at the start and after every round with these clients."""
    state = algorithm.start(cohort.task, cohort.at(0), Key.of(seed).fold(START))
    yield state
    for t in range(rounds):
        state, _ = algorithm.round(state, cohort.at(t))
        yield state
