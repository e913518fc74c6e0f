"""Several inputs per row, laid side by side as one row of float32, and how to take them apart again.

A federation keeps one tensor x. A module that takes several tensors (token ids and an attention mask, an image and an
age) gets them back from it, by position or by keyword, with the shapes and types they had.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

EXACT = 2**24  # float32 holds every whole number up to here
HALF = (torch.float16, torch.bfloat16)
KINDS = {"float32": torch.float32, "int64": torch.long, "bool": torch.bool}

Tree = tuple[Any, ...] | Mapping[str, Any]  # positional inputs, or inputs by keyword


class Input(NamedTuple):
    """One input of a row.

    Attributes:
        name: The keyword; None for a positional input.
        shape: The shape of one row.
        dtype: What the module is given: float32, int64 or bool.
    """

    name: str | None
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def width(self) -> int:
        """How many numbers of a row it takes."""
        return math.prod(self.shape)


class Inputs(NamedTuple):
    """The inputs of a row, in the order in which they lie side by side.

    Example:
        >>> batch = {"ids": torch.tensor([[5, 7], [9, 0]]), "mask": torch.tensor([[True, True], [True, False]])}
        >>> inputs = Inputs.of(batch)
        >>> inputs.pack(batch)
        tensor([[5., 7., 1., 1.],
                [9., 0., 1., 0.]])
        >>> inputs.unpack(inputs.pack(batch))[1]["ids"]
        tensor([[5, 7],
                [9, 0]])
    """

    parts: tuple[Input, ...]

    @classmethod
    def of(cls, tree: Tree) -> Inputs:
        """The layout of these inputs.

        Args:
            tree: Arrays with one entry per row: a tuple of positional inputs, or a table of inputs by keyword.

        Raises:
            ValueError: There is none, or one cannot be kept; names it.
        """
        fields = _fields(tree)
        if not fields:
            raise ValueError("there must be at least one input, got none")
        named = isinstance(tree, Mapping)
        if odd := [name for name in fields if named and not isinstance(name, str)]:
            raise ValueError(f"the name of an input must be a string, got {odd[0]!r}")
        rows = ((key if named else None, _rows(value, key)) for key, value in fields.items())
        return cls(tuple(Input(name, tuple(v.shape[1:]), _given_as(v.dtype)) for name, v in rows))

    def __str__(self) -> str:
        return ", ".join(f"{part.name or 'of'} {part.shape} {_word(part.dtype)}" for part in self.parts)

    @property
    def width(self) -> int:
        """How many numbers a row has: D."""
        return sum(part.width for part in self.parts)

    def pack(self, tree: Tree) -> Tensor:
        """Lay inputs side by side.

        Args:
            tree: Inputs like those that the layout was made of. The order of keywords does not matter.

        Returns:
            The rows (n, D), float32, on the CPU.

        Raises:
            ValueError: They do not fit this layout; names the input at fault.
        """
        fields, parts = _fields(tree), {_key(i, part): part for i, part in enumerate(self.parts)}
        if fields.keys() != parts.keys():
            raise ValueError(f"the inputs are {_listed(fields)}, expected {_listed(parts)}")
        values = {key: _fitting(_rows(fields[key], key), key, part) for key, part in parts.items()}
        counts = [len(value) for value in values.values()]
        if len(set(counts)) > 1:
            raise ValueError(f"the inputs {_listed(parts)} must have equally many rows, got {_listed(counts)}")
        packed = torch.empty(counts[0], self.width)
        for value, place in zip(values.values(), self._places(packed), strict=True):
            place.copy_(value.reshape(place.shape))
        return packed

    def unpack(self, x: Tensor) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Take rows apart again, into the positional and the keyword arguments of a module.

        Args:
            x: Rows (n, D), on any device; inside vmap too.
        """
        pieces = zip(self.parts, self._places(x), strict=True)
        values = [(part.name, piece.reshape(*x.shape[:-1], *part.shape).to(part.dtype)) for part, piece in pieces]
        return tuple(v for name, v in values if name is None), {name: v for name, v in values if name is not None}

    def plain(self) -> list[dict[str, Any]]:
        """The layout as tables for JSON or TOML; a positional input has no name."""
        tables = ({"name": p.name, "shape": list(p.shape), "dtype": _word(p.dtype)} for p in self.parts)
        return [{key: value for key, value in table.items() if value is not None} for table in tables]

    @classmethod
    def from_plain(cls, tables: list[dict[str, Any]]) -> Inputs:
        """The layout that `plain` described.

        Raises:
            KeyError: A table lacks a key, or names a type that no input has.
        """
        return cls(tuple(Input(t.get("name"), tuple(t["shape"]), KINDS[t["dtype"]]) for t in tables))

    def _places(self, x: Tensor) -> tuple[Tensor, ...]:
        """Views of the numbers of each input."""
        return x.split([part.width for part in self.parts], dim=-1)


def _fields(tree: Tree) -> dict[Any, Any]:
    """The inputs by keyword or position, which is also what messages call them."""
    return dict(tree if isinstance(tree, Mapping) else enumerate(tree))


def _key(position: int, part: Input) -> str | int:
    return position if part.name is None else part.name


def _listed(keys: Iterable[Any]) -> str:
    return ", ".join(repr(key) for key in keys)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _given_as(dtype: torch.dtype) -> torch.dtype:
    """The type in which a module is given an input that was of this type."""
    return torch.float32 if dtype.is_floating_point else torch.bool if dtype == torch.bool else torch.long


def _rows(value: Any, key: str | int) -> Tensor:
    """An input as a tensor, if its numbers can be kept in float32."""
    try:
        rows = value.detach() if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"input {key!r} cannot be read as an array of numbers ({error})") from None
    if rows.dim() == 0:
        raise ValueError(f"input {key!r} must be an array with one entry per row, got a single number")
    if rows.dtype.is_complex or rows.dtype in HALF:
        raise ValueError(f"input {key!r} is {rows.dtype}; give float32")
    if not rows.dtype.is_floating_point and rows.dtype != torch.bool and rows.numel():
        low, high = (int(end) for end in rows.long().aminmax())
        if max(-low, high) > EXACT:
            beyond = high if high > EXACT else low
            raise ValueError(f"input {key!r} holds {beyond}: whole numbers beyond ±{EXACT} are not exact in float32")
    return rows


def _fitting(rows: Tensor, key: str | int, part: Input) -> Tensor:
    """The rows of an input, if it is the one that the layout describes."""
    if rows.shape[1:] != part.shape:
        raise ValueError(f"input {key!r} has rows of shape {tuple(rows.shape[1:])}, expected {part.shape}")
    if (dtype := _given_as(rows.dtype)) != part.dtype:
        raise ValueError(f"input {key!r} is {dtype}, expected {part.dtype}")
    return rows
