"""Hyperparameters declare what they allow, so every message about them has one form."""

from __future__ import annotations

import dataclasses
import math
import types
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np


def setting(default: Any = dataclasses.MISSING, *, low: float | None = None, high: float | None = None) -> Any:
    """A dataclass field whose value, where it is a number, lies between `low` and `high`.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Knob:
        ...     k: int = setting(low=1)
        >>> validate(Knob(k=0))
        Traceback (most recent call last):
        ...
        ValueError: Knob: k must be at least 1, got 0
    """
    return dataclasses.field(default=default, metadata={"low": low, "high": high})


def validate(config: Any) -> None:
    """Check every field of a dataclass against its type and its declared range, and those of dataclasses in it."""
    owner, hints = type(config).__name__, get_type_hints(type(config))
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        check_type(f"{owner}: {f.name}", value, hints[f.name])
        low, high = f.metadata.get("low"), f.metadata.get("high")
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            validate(value)
        if not isinstance(value, Real) or isinstance(value, bool):
            continue
        if not math.isfinite(value):
            raise ValueError(f"{owner}: {f.name} must be finite, got {value}")
        if low is not None and value < low:
            raise ValueError(f"{owner}: {f.name} must be at least {low:g}, got {value:g}")
        if high is not None and value > high:
            raise ValueError(f"{owner}: {f.name} must be at most {high:g}, got {value:g}")


def check_type(name: str, value: Any, hint: Any) -> None:
    """Refuse a value that is not of the type it should be.

    Example:
        >>> check_type("[data] clients", "many", int)
        Traceback (most recent call last):
        ...
        ValueError: [data] clients must be a whole number, got 'many'
    """
    if not _fits(value, hint):
        raise ValueError(f"{name} must be {_describe(hint)}, got {value!r}")


def to_plain(value: Any) -> Any:
    """A dataclass of hyperparameters as a dict for TOML or JSON; fields at None are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        plain = {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {n: v for n, v in plain.items() if v is not None}
    if isinstance(value, tuple | list):
        return [to_plain(v) for v in value]
    return value.item() if isinstance(value, np.generic) else value


def _fits(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin is Literal:
        return value in get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, h) for h in get_args(hint))
    if hint is None or hint is type(None):
        return value is None
    if hint is float:
        return isinstance(value, Real) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if origin is tuple:
        return isinstance(value, tuple | list) and all(_fits(v, get_args(hint)[0]) for v in value)
    if isinstance(value, str):
        return hint in (str, Any)  # it is also a Sequence, of letters, which nobody means
    return isinstance(value, origin or hint) if isinstance(origin or hint, type) else True


def _describe(hint: Any) -> str:
    origin = get_origin(hint)
    if origin is Literal:
        return " or ".join(repr(v) for v in get_args(hint))
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(h) for h in get_args(hint))
    if origin is tuple:
        return f"a list, each entry {_describe(get_args(hint)[0])}"
    names = {int: "a whole number", float: "a number", str: "a word", type(None): "None", bool: "true or false"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))
