"""A federation as a folder of plain arrays: written piece by piece, mapped into memory when it is read.

federation.json   the header: format version, number of clients and rows, and the type and shape of a row,
                  and of each of its inputs if there are several
train.x, train.y  the rows of all clients one after the other, as raw numbers
train.offsets     the row at which each client begins, and the end: m + 1 integers of 8 bytes
test.…            the same for test rows, if there are any
groups            the true groups, if they are known: m integers of 8 bytes
ids.json          the clients' names, if they have any
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from coterie.storage.clients import Given, Reader, one_per_client
from coterie.storage.inputs import Inputs
from coterie.storage.packed import PIECE, Name, Packed, check_rows, client_name, take_in
from coterie.storage.pages import Pages

VERSION = 1
HEADER, IDS, GROUPS = "federation.json", "ids.json", "groups"
WHOLE = {"dtype": "int64", "shape": []}  # offsets and groups


class Contents(NamedTuple):
    """The content of a folder: training and test rows, groups and names of the clients, and the inputs of a row."""

    train: Packed
    test: Packed | None
    groups: Tensor | None
    ids: tuple[str, ...] | None
    inputs: Inputs | None


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Create a folder atomically: yield a temporary folder, which is renamed to `path` at the end.

    The temporary folder is removed if anything fails.

    Args:
        path: The folder to create, which must not exist yet.
    """
    if path.exists():
        raise ValueError(f"{path} exists already; Federation.create writes a new folder only")
    part = path.with_name(f".{path.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # left over from a process that was killed
    part.mkdir(parents=True)
    try:
        yield part
        part.rename(path)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write(
    folder: Path,
    train: Iterable[Given],
    test: Iterable[Given] | None,
    groups: Iterable[int] | None,
    ids: Iterable[str] | None,
) -> None:
    """Write the arguments of `Federation.create` to a folder, reading each iterable once and keeping little in memory.

    Args:
        folder: An empty folder.
        train: Training rows of every client.
        test: Test rows of every client, or None.
        groups: True group of every client, or None.
        ids: Name of every client, or None.
    """
    names: list[str] = []

    def name(i: int) -> str:
        return client_name(i, names)

    reader = Reader()
    train, test = one_per_client(train, "train"), one_per_client(test, "test")
    named = train if ids is None else _naming(train, iter(ids), names)
    own = _write_rows(folder, "train", take_in(named, name, "rows", reader.read), name)
    inputs = reader.inputs and reader.inputs.plain()
    header: dict[str, Any] = {"train": own, "test": None, "groups": None, "ids": None, "inputs": inputs}
    if test is not None:
        clients = take_in(test, name, "test rows", reader.read, like=(_empty(own["x"]), _empty(own["y"])))
        header["test"] = _write_rows(folder, "test", clients, name)
    if groups is not None:
        values = np.fromiter(groups, np.int64)
        header["groups"] = len(values)
        _write(folder / GROUPS, values.data)
    if ids is not None:
        header["ids"] = len(names)
        _write(folder / IDS, json.dumps(names).encode())
    _write(folder / HEADER, json.dumps({"version": VERSION, "byteorder": sys.byteorder, **header}, indent=1).encode())


def read(path: Path) -> Contents:
    """Map the files of a folder into memory.

    Only the header and the names are read. Of the other files only the sizes and the ends of the offsets are checked.

    Args:
        path: A folder that `write` has filled.

    Raises:
        ValueError: The folder holds no federation, or one of its files is missing or truncated.
    """
    header = _read_json(path / HEADER)
    if not isinstance(header, dict) or header.get("version") != VERSION:
        version = header.get("version") if isinstance(header, dict) else None
        raise ValueError(f"{path / HEADER} has version {version!r} of the format, but only version {VERSION} is known")
    if header.get("byteorder") != sys.byteorder:
        raise ValueError(f"{path} was written {header.get('byteorder')}-endian, but this machine is {sys.byteorder}")
    try:
        ids = None if header["ids"] is None else tuple(str(i) for i in _read_json(path / IDS))
        train = _rows(path, "train", header["train"], ids)
        test = None if header["test"] is None else _rows(path, "test", header["test"], ids)
        groups = None
        if header["groups"] is not None:
            groups, _ = _array(path / GROUPS, WHOLE, header["groups"], lambda row: client_name(row, ids))
        inputs = Inputs.from_plain(header["inputs"]) if header.get("inputs") else None
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path / HEADER} does not describe a federation ({error!r})") from error
    return Contents(train, test, groups, ids, inputs)


def _naming(clients: Iterable[Given], ids: Iterator[str], names: list[str]) -> Iterator[Given]:
    """Read each client's name together with its rows, so that an error message can name the client."""
    for given in clients:
        many = len(given.offsets) - 1 if isinstance(given, Packed) else 1
        names.extend(str(i) for i in islice(ids, many))
        yield given
    names.extend(str(i) for i in ids)


def _write_rows(folder: Path, part: str, clients: Iterable[Packed], name: Name) -> dict[str, Any]:
    """Write the "train" or "test" rows piece by piece, and return their entry in the header."""
    entry: dict[str, Any] = {}
    m = rows = 0
    with ExitStack() as stack:
        files = [stack.enter_context(_new_file(folder / f"{part}.{end}")) for end in ("x", "y", "offsets")]
        files[2].write(_raw(torch.zeros(1, dtype=torch.long)))
        for piece in _in_pieces(clients):
            check_rows(piece, part, lambda i, first=m: name(first + i))
            for file, values in zip(files, (piece.x, piece.y, piece.offsets[1:] + rows), strict=True):
                file.write(_raw(values))
            m, rows = m + len(piece.offsets) - 1, rows + len(piece.x)
            entry = {"clients": m, "rows": rows, "x": _kind(piece.x), "y": _kind(piece.y)}
    if not entry:
        raise ValueError(f"Federation: {part} must have at least one client, got 0")
    return entry


def _in_pieces(clients: Iterable[Packed]) -> Iterator[Packed]:
    """Yield pieces in which small clients are joined, because a million single writes are slow."""
    held: list[Packed] = []
    size = 0
    for one in clients:
        held.append(Packed(one.x.clone(), one.y.clone(), one.offsets))  # its arrays may be reused for the next
        size += one.x.nbytes + one.y.nbytes
        if size >= PIECE:
            yield Packed.of(held)
            held, size = [], 0
    if held:
        yield Packed.of(held)


def _write(path: Path, content: bytes | memoryview) -> None:
    with _new_file(path) as file:
        file.write(content)


@contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """Open a new file, and flush it to the disk before it is closed."""
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _raw(values: Tensor) -> memoryview:
    return (
        values.cpu().contiguous().flatten().view(torch.uint8).numpy().data
    )  # NumPy does not know all of torch's types


def _kind(values: Tensor) -> dict[str, Any]:
    """Return the type and shape of a row, for the header."""
    return {"dtype": str(values.dtype).removeprefix("torch."), "shape": list(values.shape[1:])}


def _empty(kind: dict[str, Any]) -> Tensor:
    """Return a tensor without rows, of the type and shape that the header describes."""
    return torch.empty(0, *kind["shape"], dtype=getattr(torch, kind["dtype"]))


def _rows(path: Path, part: str, entry: dict[str, Any], ids: tuple[str, ...] | None) -> Packed:
    """Map the "train" or "test" rows into memory, as their entry in the header describes them."""
    m, rows = entry["clients"], entry["rows"]
    offsets, _ = _array(path / f"{part}.offsets", WHOLE, m + 1, lambda row: client_name(max(0, row - 1), ids))
    if (ends := (int(offsets[0]), int(offsets[-1]))) != (0, rows):
        raise ValueError(f"{path / part}.offsets runs from {ends[0]} to {ends[1]}, but there are {rows} rows")

    def owner(row: int) -> str:
        return client_name(int(torch.searchsorted(offsets, row, right=True)) - 1, ids)

    (x, x_pages), (y, y_pages) = (_array(path / f"{part}.{a}", entry[a], rows, owner) for a in ("x", "y"))
    return Packed(x, y, offsets, (x_pages, y_pages) if x_pages and y_pages else None)


def _array(file: Path, kind: dict[str, Any], rows: int, owner: Callable[[int], str]) -> tuple[Tensor, Pages | None]:
    """Map a file of `rows` rows; `owner(row)` names the client of a row, for the error if the file ends there."""
    empty = _empty(kind)
    each = empty.element_size() * math.prod(empty.shape[1:])
    if not file.is_file():
        raise ValueError(f"{file} is missing")
    if (has := file.stat().st_size) < (needs := rows * each):
        raise ValueError(f"{file} is cut short: it has {has:,} of {needs:,} bytes and ends in {owner(has // each)}")
    if has > needs:
        raise ValueError(f"{file} has {has:,} bytes, but {rows:,} rows of {each} bytes are {needs:,}")
    if not needs:
        return empty, None  # an empty file cannot be mapped
    pages = Pages(file)
    return pages.tensor(empty.dtype, tuple(empty.shape[1:])), pages


def _read_json(file: Path) -> Any:
    if not file.is_file():
        raise ValueError(f"{file.parent} holds no federation that Federation.create wrote: {file.name} is missing")
    try:
        return json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error})") from error
