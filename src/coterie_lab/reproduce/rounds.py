"""Plain rounds, for experiments that look at states, or at scores in their own way."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterator
from typing import Any

from coterie.core.cohort import Cohort
from coterie.core.federation import Federation
from coterie.core.key import Key
from coterie.core.method import Method
from coterie.core.pytree import to_device
from coterie.core.task import Task
from coterie.data import CHANGES
from coterie.engines import find_device, simulated
from coterie.runs.config import build_federation
from coterie.runs.loop import CLIENTS, START


def seeded(data: dict[str, Any], seed: int, **more: Any) -> Federation:
    """The federation of a table, with this seed for the dealing and for all that its changes draw."""
    draws = {name for name, change in CHANGES.items() if "seed" in inspect.signature(change).parameters}
    change = [{**c, "seed": seed} if c["name"] in draws else c for c in data.get("change", [])]
    return build_federation({**data, **more, "seed": seed, "change": change})


def states(algorithm: Method, task: Task, federation: Federation, rounds: int, seed: int, device: str) -> Iterator[Any]:
    """The state at the start and after every round."""
    return states_of(algorithm, everybody(task, federation, seed, device), rounds, seed)


def last_state(*args: Any) -> Any:
    """The state after the last round."""
    return deque(states(*args), maxlen=1).pop()


def everybody(task: Task, federation: Federation, seed: int, device: str, precision: str = "float32") -> Cohort:
    """All clients of a federation. The precision is for a GPU; a CPU computes in float32."""
    place = find_device(device)
    used = precision if place.type == "cuda" else "float32"
    return simulated(federation, task, Key.of(seed).fold(CLIENTS), device=place, precision=used)


def states_of(algorithm: Method, cohort: Cohort, rounds: int, seed: int) -> Iterator[Any]:
    """The state at the start and after every round with these clients."""
    state = to_device(algorithm.start(cohort.task, cohort.at(0), Key.of(seed).fold(START)), cohort.engine.device)
    yield state
    for t in range(rounds):
        state, _ = algorithm.round(state, cohort.at(t))
        yield state
