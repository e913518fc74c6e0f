"""Rounds without a run folder, for experiments that use states or compute their own scores."""

from __future__ import annotations

import inspect
import json
from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from coterie.core.cohort import Cohort
from coterie.core.federation import Federation
from coterie.core.key import Key
from coterie.core.method import Method
from coterie.core.pytree import to_device
from coterie.core.task import Task
from coterie.data import CHANGES, DATASETS
from coterie.engines import find_device, simulated
from coterie.runs.config import build_federation
from coterie.runs.loop import CLIENTS, START


def seeded(data: dict[str, Any], seed: int, **more: Any) -> Federation:
    """Make the federation that a table describes, with one seed for the data set and for all of its changes.

    Args:
        data: The table.
        seed: The seed.
        more: Further arguments of the data set, which replace those of the table.
    """
    draws = {name for name, change in CHANGES.items() if "seed" in inspect.signature(change).parameters}
    change = [{**c, "seed": seed} if c["name"] in draws else c for c in data.get("change", [])]
    own = {"seed": seed} if "seed" in inspect.signature(DATASETS[data["name"]]).parameters else {}
    return _federation(json.dumps({**data, **more, **own, "change": change}))


@lru_cache(maxsize=1)  # some take seconds to read, and parts of an experiment use the same one after each other
def _federation(table: str) -> Federation:
    return build_federation(json.loads(table))


def states(algorithm: Method, task: Task, federation: Federation, rounds: int, seed: int, device: str) -> Iterator[Any]:
    """Yield the state at the start and after every round.

    Args:
        algorithm: The method.
        task: The task.
        federation: The clients, all of which take part.
        rounds: Number of rounds.
        seed: Seed of all random numbers.
        device: "auto", "cpu" or "cuda".
    """
    return states_of(algorithm, everybody(task, federation, seed, device), rounds, seed)


def last_state(*args: Any) -> Any:
    """Return the state after the last round.

    Args:
        args: Algorithm, task, federation, rounds, seed and device, in this order.
    """
    return deque(states(*args), maxlen=1).pop()


def everybody(task: Task, federation: Federation, seed: int, device: str, precision: str = "float32") -> Cohort:
    """Return a cohort of all clients of a federation.

    Args:
        task: The task.
        federation: The clients.
        seed: Seed of the clients' random numbers.
        device: "auto", "cpu" or "cuda".
        precision: Precision of matrix products on a GPU; a CPU computes in float32.
    """
    place = find_device(device)
    used = precision if place.type == "cuda" else "float32"
    return simulated(federation, task, Key.of(seed).fold(CLIENTS), device=place, precision=used)


def states_of(algorithm: Method, cohort: Cohort, rounds: int, seed: int) -> Iterator[Any]:
    """Yield the state at the start and after every round with the clients of a cohort.

    Args:
        algorithm: The method.
        cohort: The clients.
        rounds: Number of rounds.
        seed: Seed of the start.
    """
    state = to_device(algorithm.start(cohort.task, cohort.at(0), Key.of(seed).fold(START)), cohort.engine.device)
    yield state
    for t in range(rounds):
        state, _ = algorithm.round(state, cohort.at(t))
        yield state
