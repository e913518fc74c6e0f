"""Trees of tensors as Flower's records, and back, exactly. Nothing that arrives is executed, imported or unpickled."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.lib import format as npy
from torch import Tensor

from coterie.tree import formed

DEEPEST = 16  # levels of a tree; what arrives is not followed further down


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
        return types[shape["named"]](*parts) if "named" in shape else tuple(parts)
    raise ValueError("its tree has a part of no known kind")


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
    # Not array.numpy(): it also opens zip files, and sets aside whatever memory a header asks for.
    stream = io.BytesIO(array.data)
    if npy.read_magic(stream) != (1, 0):
        raise ValueError("an array is not in numpy's format 1.0")
    shape, by_columns, dtype = npy.read_array_header_1_0(stream)
    if dtype.kind not in "biuf" or list(shape) != list(array.shape) or str(dtype) != array.dtype or by_columns:
        raise ValueError(f"an array says it is {array.dtype} {array.shape}, but is {dtype} {shape}")
    # A copy: what comes out of a buffer is read-only.
    return torch.from_numpy(np.frombuffer(array.data, dtype, offset=stream.tell()).reshape(shape).copy())
