"""A client step in plain words, and back: a node rebuilds it from classes that are registered there too."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np

from coterie.core.registry import named, owners
from coterie.core.settings import validate
from coterie.core.step import Step, client_steps
from coterie.core.uplink import Uplink
from coterie.storage import snapshot


def describe_step(step: Step) -> dict[str, str]:
    """A step as the name of its owner, the owner's settings as JSON, and its own name.

    Example:
        >>> import coterie as ct
        >>> plain = describe_step(ct.FedAvg(lr=0.5, tau=2).step)
        >>> plain["owner"], plain["step"]
        ('method.fedavg', 'step')
        >>> rebuild_step(plain).__self__ == ct.FedAvg(lr=0.5, tau=2)
        True

    Raises:
        ValueError: The clients could not rebuild it; says why.
    """
    owner, name = getattr(step, "__self__", None), getattr(step, "__name__", "")
    if named(type(owner)) is None or name not in client_steps(type(owner)):
        whose = type(owner).__name__ if owner is not None else "no class"
        raise ValueError(
            f"'{name}' of {whose} cannot be sent to clients: it must be marked with @client_step, and its class "
            "registered with @coterie.register"
        )
    return {"owner": _name(type(owner)), "settings": json.dumps(_settings(owner)), "step": name}


def describe_uplink(uplink: Uplink) -> str:
    """The transforms of an uplink as JSON.

    Raises:
        ValueError: One is a function, which nodes could not rebuild.
    """
    for transform in uplink.transforms:
        if named(type(transform)) is None:
            raise ValueError(
                f"uplink: {getattr(transform, '__name__', transform)!r} cannot be sent to clients; on Flower a "
                "transform must be a dataclass that is registered with @coterie.register(name, 'uplink')"
            )
    return json.dumps([{"name": _name(type(t)), **_settings(t)} for t in uplink.transforms])


def rebuild_step(plain: dict[str, Any]) -> Step:
    """The step that `describe_step` described.

    Raises:
        ValueError: It names something unknown, or a setting is not allowed.
    """
    owner = _owner(plain.get("owner"), json.loads(str(plain.get("settings", "{}"))))
    if plain.get("step") not in client_steps(type(owner)):
        raise ValueError(f"{type(owner).__name__} has no client step {plain.get('step')!r}")
    return getattr(owner, str(plain["step"]))


def rebuild_uplink(plain: str) -> Uplink:
    """The uplink that `describe_uplink` described.

    Raises:
        ValueError: It names something that is no transform.
    """
    found = tuple(_value(table) for table in json.loads(plain))
    if any(not callable(transform) for transform in found):
        raise ValueError("an uplink is made of transforms")
    return Uplink(found)


def types_of(step: Step) -> dict[str, type]:
    """The NamedTuples of which a step's trees may be made."""
    return snapshot.named_tuples(getattr(step, "__self__", None))


def _name(cls: type) -> str:
    return next(name for name, own in owners().items() if own is cls)


def _settings(owner: Any) -> dict[str, Any]:
    return {f.name: _plain(getattr(owner, f.name), type(owner).__name__, f.name) for f in dataclasses.fields(owner)}


def _plain(value: Any, owner: str, name: str) -> Any:
    value = value.item() if isinstance(value, np.generic) else value
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if named(type(value)) is not None:
        return {"name": _name(type(value)), **_settings(value)}
    if name == "init":  # models that the user brought: they travel with the steps that need them
        return []
    if name == "lr_schedule":  # a function: clients are sent step sizes
        return None
    if isinstance(value, tuple | list):
        return [_plain(v, owner, name) for v in value]
    raise ValueError(f"{owner}: {name} cannot be sent to clients: it is of type {type(value).__name__}")


def _owner(name: Any, settings: Any) -> Any:
    classes = owners()
    if not isinstance(name, str) or name not in classes or not isinstance(settings, dict):
        raise ValueError(f"{name!r} is not known here; known are {', '.join(sorted(classes))}")
    known = {f.name for f in dataclasses.fields(classes[name])}
    if not settings.keys() <= known:
        raise ValueError(f"{name} has no setting '{min(settings.keys() - known)}'; is this node's coterie another one?")
    try:
        owner = classes[name](**{n: _value(v) for n, v in settings.items()})
    except TypeError as error:  # a setting is missing
        raise ValueError(f"{name}: {error}") from error
    validate(owner)
    return owner


def _value(value: Any) -> Any:
    if isinstance(value, dict):
        return _owner(value.get("name"), {n: v for n, v in value.items() if n != "name"})
    return tuple(_value(v) for v in value) if isinstance(value, list) else value
