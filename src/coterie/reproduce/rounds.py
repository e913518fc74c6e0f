"""Plain rounds, for experiments that look at states and not at scores."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from coterie.algorithms.base import Algorithm
from coterie.executors import find_device, find_executor
from coterie.federation import Federation
from coterie.key import Key
from coterie.run import CLIENTS, START
from coterie.task import Task


def states(
    algorithm: Algorithm, task: Task, federation: Federation, rounds: int, seed: int, device: str
) -> Iterator[Any]:
    """The state at the start and after every round."""
    key = Key.of(seed)
    cohort = find_executor("vectorised")(federation, task, key.fold(CLIENTS), find_device(device))
    state = algorithm.start(task, cohort.at(0), key.fold(START))
    yield state
    for t in range(rounds):
        state, _ = algorithm.round(state, cohort.at(t))
        yield state


def last_state(*args: Any) -> Any:
    """The state after the last round."""
    return deque(states(*args), maxlen=1).pop()
