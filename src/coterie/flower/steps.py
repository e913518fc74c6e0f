"""A client step in plain words, and back: a node rebuilds it from names that it knows."""

from __future__ import annotations

import dataclasses
import inspect
import json
from typing import Any

from coterie import snapshot
from coterie.algorithms import ALGORITHMS
from coterie.client import ClientStep
from coterie.cohort import Step
from coterie.config import INITS
from coterie.evaluate import PointScorer, Scorer
from coterie.settings import validate

OWNERS: dict[str, type] = {**ALGORITHMS, **INITS, "scorer": Scorer, "point_scorer": PointScorer}

_NAMES = {cls: name for name, cls in OWNERS.items()}


def steps_of(owner: type) -> tuple[str, ...]:
    """The names of the client steps that a class has.

    Example:
        >>> steps_of(Scorer)
        ('score', 'score_ensemble', 'tally')
    """
    public = ((n, f) for n, f in inspect.getmembers(owner, inspect.isfunction) if not n.startswith("_"))
    return tuple(n for n, f in public if f.__annotations__.get("return") == ClientStep.__name__)


def describe_step(step: Step) -> dict[str, str]:
    """A step as the name of its owner, the owner's settings as JSON, and its own name.

    Example:
        >>> import coterie as ct
        >>> plain = describe_step(ct.FedAvg(lr=0.5, tau=2).step)
        >>> plain["owner"], plain["step"]
        ('fedavg', 'step')
        >>> rebuild_step(plain).__self__ == ct.FedAvg(lr=0.5, tau=2)
        True

    Raises:
        ValueError: The clients could not rebuild it; says why.
    """
    owner, name = getattr(step, "__self__", None), getattr(step, "__name__", "")
    if type(owner) not in _NAMES or name not in steps_of(type(owner)):
        whose = type(owner).__name__ if owner is not None else "no class"
        raise ValueError(f"'{name}' of {whose} cannot be sent to clients: they know only {', '.join(sorted(OWNERS))}")
    return {"owner": _NAMES[type(owner)], "settings": json.dumps(_settings(owner)), "step": name}


def rebuild_step(plain: dict[str, Any]) -> Step:
    """The step that `describe_step` described.

    Raises:
        ValueError: It names something unknown, or a setting is not allowed.
    """
    owner = _owner(plain.get("owner"), json.loads(str(plain.get("settings", "{}"))))
    if plain.get("step") not in steps_of(type(owner)):
        raise ValueError(f"{type(owner).__name__} has no client step {plain.get('step')!r}")
    return getattr(owner, str(plain["step"]))


def types_of(step: Step) -> dict[str, type]:
    """The NamedTuples of which a step's trees may be made."""
    return snapshot.named_tuples(type(getattr(step, "__self__", None)))


def _settings(owner: Any) -> dict[str, Any]:
    return {f.name: _plain(getattr(owner, f.name), type(owner).__name__, f.name) for f in dataclasses.fields(owner)}


def _plain(value: Any, owner: str, name: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value) in _NAMES:
        return {"name": _NAMES[type(value)], **_settings(value)}
    if name == "init":  # models that the user brought: they travel with the steps that need them
        return []
    if isinstance(value, tuple | list):
        return [_plain(v, owner, name) for v in value]
    raise ValueError(f"{owner}: {name} cannot be sent to clients: it is of type {type(value).__name__}")


def _owner(name: Any, settings: Any) -> Any:
    if not isinstance(name, str) or name not in OWNERS or not isinstance(settings, dict):
        raise ValueError(f"{name!r} is not known here; known are {', '.join(sorted(OWNERS))}")
    known = {f.name for f in dataclasses.fields(OWNERS[name])}
    if not settings.keys() <= known:
        raise ValueError(f"{name} has no setting '{min(settings.keys() - known)}'; is this node's coterie another one?")
    try:
        owner = OWNERS[name](**{n: _value(v) for n, v in settings.items()})
    except TypeError as error:  # a setting is missing
        raise ValueError(f"{name}: {error}") from error
    validate(owner)
    return owner


def _value(value: Any) -> Any:
    if isinstance(value, dict):
        return _owner(value.get("name"), {n: v for n, v in value.items() if n != "name"})
    return tuple(_value(v) for v in value) if isinstance(value, list) else value
