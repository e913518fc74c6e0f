"""The list of available methods, data sets, models and experiments."""

from __future__ import annotations

from typing import Any

from coterie.core.registry import known
from coterie.data import CHANGES, DATASETS
from coterie.models import MODELS


def inventory(experiments: dict[str, dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Return all names that a configuration or a command can use, by kind, with a one-line description of each.

    Args:
        experiments: The tables of the experiments, by name.
    """

    def lines(register: dict[str, Any]) -> dict[str, str]:
        return {name: (thing.__doc__ or "").strip().splitlines()[0] for name, thing in register.items()}

    return {
        "methods": lines(known("method")),
        "starts": lines(known("start")),
        "optimisers": lines(known("optimiser")),
        "schedules": lines(known("schedule")),
        "uplinks": lines(known("uplink")),
        "robust means": lines(known("aggregate")),
        "callbacks": lines(known("callback")),
        "data sets": lines(DATASETS),
        "changes": lines(CHANGES),
        "models": lines(MODELS),
        "experiments": {name: e["title"] for name, e in experiments.items()},
    }
