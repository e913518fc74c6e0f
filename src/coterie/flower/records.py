"""Trees of tensors as Flower's records, and back, exactly. Nothing that arrives is executed, imported or unpickled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from coterie.core.pytree import Outer, formed

DEEPEST = 16  # levels of a tree; what arrives is not followed further down
LONGEST = 2**31  # the largest axis of an array
MAGIC = b"\x93NUMPY\x01\x00"  # numpy's format 1.0
TYPES = {str(t): t for t in map(np.dtype, ("?", "u1", "i1", "i2", "i4", "i8", "f2", "f4", "f8"))}


def put_tree(content: RecordDict, name: str, tree: Any) -> None:
    """Add a tree of dicts, tuples, NamedTuples and tensors to a message, under a name.

    Tensors go into an `ArrayRecord` under their paths, as JSON; the shape of the tree, which may be empty, goes beside
    it. An `Outer` is sent as its product.

    Example:
        >>> content = RecordDict()
        >>> put_tree(content, "shared", {"theta": {"w": torch.zeros(2)}, "about": ()})
        >>> list(content["shared"]), get_tree(content, "shared", {})
        (['["theta", "w"]'], {'theta': {'w': tensor([0., 0.])}, 'about': ()})

    Raises:
        ValueError: Something in it is not a tensor, or of a type that cannot be sent; says where.
    """
    arrays: dict[str, Array] = {}
    shape = _pack(formed(tree), (), arrays, name)
    content[name] = ArrayRecord(arrays)
    content[f"{name}.tree"] = ConfigRecord({"tree": json.dumps(shape)})


def get_tree(content: RecordDict, name: str, types: Mapping[str, type]) -> Any:
    """The tree that `put_tree` added. Only NamedTuples listed in `types` are built.

    Raises:
        ValueError: It is not there, or is not what `put_tree` writes.
    """
    try:
        arrays, shape = content[name], content[f"{name}.tree"]
        if not isinstance(arrays, ArrayRecord) or not isinstance(shape, ConfigRecord):
            raise TypeError("its records are of the wrong kind")
        used: set[str] = set()
        tree = _unpack(json.loads(str(shape["tree"])), (), arrays, types, used)
        if used != set(arrays):
            raise KeyError("an array has no place in the tree")
    except (KeyError, TypeError, ValueError, IndexError, EOFError, OSError, RecursionError, MemoryError) as error:
        raise ValueError(f"'{name}' cannot be read: {type(error).__name__}: {error}") from error
    return tree


def size_of(content: Any) -> int:
    """How many bytes the arrays and words of a message have, as they are: nothing is opened.

    Example:
        >>> size_of(RecordDict({"answer.tree": ConfigRecord({"tree": "tensor"})}))
        6
    """
    records = content.values() if isinstance(content, RecordDict) else []
    return sum(
        len(value.data) if isinstance(value, Array) else len(value) if isinstance(value, str | bytes) else 0
        for record in records
        for value in record.values()
    )


def _pack(value: Any, path: tuple[Any, ...], arrays: dict[str, Array], name: str) -> Any:
    if isinstance(value, Tensor):
        arrays[json.dumps(path)] = _array(value, path, name)
        return "tensor"
    if isinstance(value, dict):
        return {"dict": {_key(k, path, name): _pack(v, (*path, k), arrays, name) for k, v in value.items()}}
    if isinstance(value, tuple | list):
        kind = {"named": type(value).__name__} if hasattr(value, "_fields") else {}
        return {"tuple": [_pack(v, (*path, i), arrays, name) for i, v in enumerate(value)], **kind}
    raise ValueError(f"{name}{list(path)}: only tensors can be sent, got {type(value).__name__}")


def _unpack(shape: Any, path: tuple[Any, ...], arrays: ArrayRecord, types: Mapping[str, type], used: set[str]) -> Any:
    if len(path) > DEEPEST:
        raise ValueError(f"it is more than {DEEPEST} levels deep")
    if shape == "tensor":
        used.add(key := json.dumps(path))
        return _tensor(arrays[key])
    if isinstance(shape, dict) and isinstance(shape.get("dict"), dict):
        return {k: _unpack(v, (*path, k), arrays, types, used) for k, v in shape["dict"].items()}
    if isinstance(shape, dict) and isinstance(shape.get("tuple"), list):
        parts = [_unpack(v, (*path, i), arrays, types, used) for i, v in enumerate(shape["tuple"])]
        return _named(shape["named"], types)(*parts) if "named" in shape else tuple(parts)
    raise ValueError("its tree has a part of no known kind")


def _named(name: Any, types: Mapping[str, type]) -> type:
    if types[name] is Outer:
        raise ValueError("a product came by its factors")
    return types[name]


def _key(key: Any, path: tuple[Any, ...], name: str) -> str:
    if not isinstance(key, str):
        raise ValueError(f"{name}{list(path)}: keys must be words, got {key!r}")
    return key


def _array(x: Tensor, path: tuple[Any, ...], name: str) -> Array:
    try:
        return Array(x.detach().cpu().contiguous().numpy())
    except TypeError as error:  # numpy has no bfloat16
        raise ValueError(f"{name}{list(path)}: a tensor of {x.dtype} cannot be sent") from error


def _tensor(array: Array) -> Tensor:
    """An array whose bytes are what it says they are.

    Not `array.numpy()`, which also opens zip files and sets aside whatever memory a header asks for. A header is not
    even parsed: it must be the one that numpy writes for this shape and type.
    """
    shape, dtype = tuple(array.shape), TYPES[array.dtype]
    if not all(type(n) is int and 0 <= n < LONGEST for n in shape):
        raise ValueError(f"an array has shape {shape}")
    head = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    begin = len(MAGIC) + 2
    end = begin + int.from_bytes(array.data[len(MAGIC) : begin], "little")
    if array.data[: len(MAGIC)] != MAGIC or array.data[begin:end].rstrip() != head:
        raise ValueError(f"the bytes of an array are not those of {array.dtype} {shape}")
    # A copy: what comes out of a buffer is read-only.
    return torch.from_numpy(np.frombuffer(array.data, dtype, offset=end).reshape(shape).copy())
