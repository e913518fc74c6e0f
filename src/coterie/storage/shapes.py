"""Of what shape plain values must be, as values that look like them, and where others differ, in words."""

from __future__ import annotations

from types import NoneType
from typing import Any

WHOLE = 2**63  # whole numbers of files are below: more do not fit into arrays
DEEPEST = 64  # lists and tables in each other at most: deeper ones end the recursion of whoever walks through them

_TYPES: dict[Any, set[type]] = {int: {int}, float: {int, float}, str: {str}, bool: {bool}, None: {NoneType}}
_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false", None: "nothing"}


def misfit(value: Any, shape: Any, where: str = "it") -> str | None:
    """What is wrong with a value of JSON or TOML; None if it has the shape.

    Args:
        value: As it was read.
        shape: `int`, `float`, `str`, `bool`, None or `object` (anything); a list of one shape, that of all entries; a
            dict with the shapes of its keys, of which those that end in a question mark may be missing, and others may
            be there; `{str: shape}`, the shape of all its values; or a tuple of shapes, of which it has one.
        where: What the value is called.

    Example:
        >>> result = {"labels": [int], "score": (None, float), "warnings?": [str]}
        >>> misfit({"labels": [0, 1], "score": None}, result)
        >>> misfit({"labels": [0, 1.5], "score": None}, result)
        'labels must be a list, each entry a whole number'
    """
    if shape is object:
        return None
    if isinstance(shape, tuple):
        found = [misfit(value, each, where) for each in shape]
        return None if None in found else found[-1] if len(found) == 2 else f"{where} must be {_told(shape)}"
    if isinstance(shape, list):
        return _in_list(value, shape[0], where)
    if isinstance(shape, dict):
        return _in_table(value, shape, where)
    return None if _is(value, _TYPES[shape]) else f"{where} must be {_told(shape)}"


def too_deep(value: Any) -> bool:
    """Whether lists and dicts are in each other more often than whatever walks through them can bear.

    Args:
        value: Of any depth.
    """
    level = [value]
    for _ in range(DEEPEST):
        inner = (x for each in level for x in (each.values() if isinstance(each, dict) else each))
        if not (level := [x for x in inner if isinstance(x, dict | list)]):
            return False
    return True


def _in_list(value: Any, entry: Any, where: str) -> str | None:
    if not isinstance(value, list):
        return f"{where} must be a list"
    kinds = entry if isinstance(entry, tuple) else (entry,)
    if all(isinstance(kind, type | None) and kind in _TYPES for kind in kinds):  # of numbers there may be millions
        numbers = [x for x in value if type(x) is int]
        fits = set(map(type, value)) <= set().union(*(_TYPES[kind] for kind in kinds))
        fine = fits and -WHOLE < min(numbers, default=0) <= max(numbers, default=0) < WHOLE
        return None if fine else f"{where} must be a list, each entry {_told(entry)}"
    return next((bad for i, x in enumerate(value) if (bad := misfit(x, entry, f"{where}[{i}]"))), None)


def _in_table(value: Any, shape: dict[Any, Any], where: str) -> str | None:
    if not isinstance(value, dict):
        return f"{where} must be a table"
    inner = "" if where == "it" else f"{where}."
    if str in shape:
        return next((bad for k, x in value.items() if (bad := misfit(x, shape[str], f"{inner}{k!r}"))), None)
    for key, own in shape.items():
        name = key.removesuffix("?")
        if name not in value:
            if name == key:
                return f"{inner}{name} is missing"
        elif bad := misfit(value[name], own, f"{inner}{name}"):
            return bad
    return None


def _is(value: Any, types: set[type]) -> bool:
    return type(value) in types and (type(value) is not int or -WHOLE < value < WHOLE)


def _told(shape: Any) -> str:
    if isinstance(shape, tuple):
        return " or ".join(_told(each) for each in shape)
    return "a list" if isinstance(shape, list) else "a table" if isinstance(shape, dict) else _NAMES[shape]
