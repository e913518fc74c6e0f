"""What there is: methods, data sets, models, experiments."""

from __future__ import annotations

from typing import Any

from coterie.core.registry import known
from coterie.data import CHANGES, DATASETS
from coterie.models import MODELS


def inventory(experiments: dict[str, dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Everything that can be named in a configuration or on the command line, with a line on each."""

    def lines(register: dict[str, Any]) -> dict[str, str]:
        return {name: (thing.__doc__ or "").strip().splitlines()[0] for name, thing in register.items()}

    return {
        "methods": lines(known("method")),
        "starts": lines(known("start")),
        "uplinks": lines(known("uplink")),
        "data sets": lines(DATASETS),
        "changes": lines(CHANGES),
        "models": lines(MODELS),
        "experiments": {name: e["title"] for name, e in experiments.items()},
    }
