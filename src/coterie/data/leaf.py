"""Data in the JSON format of LEAF, in which every client is a user with rows `x` and labels `y`.

LEAF: A Benchmark for Federated Settings
    Sebastian Caldas, Sai Meher Karthik Duddu, Peter Wu, Tian Li, Jakub Konečný, H. Brendan McMahan, Virginia Smith,
    Ameet Talwalkar. arXiv 1812.01097, 2018.
"""

from __future__ import annotations

import json
import reprlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from coterie.core.federation import Federation
from coterie.data.source import dataset


class _Rows(NamedTuple):
    """The rows of a user, and what is wrong with them."""

    x: np.ndarray
    y: np.ndarray
    fault: str | None = None
    path: Path = Path()


@dataset
def leaf(folder: str | Path) -> Federation:
    """A folder of LEAF's JSON files, `train/*.json` and `test/*.json`: one client per user.

    Each file has some of the users. A row of `x` is a list of numbers. Train and test have the same users; a user may
    have no test rows.

    Args:
        folder: The folder.
    """
    return read_leaf(Path(folder))


def read_leaf(folder: Path) -> Federation:
    """Return the users of a LEAF folder in the order of its files, with rows (n, width) of float32.

    Args:
        folder: Has folders `train` and `test` with JSON files.

    Raises:
        ValueError: A file is missing or cannot be used; names the file, and the user where it is about one.
    """
    train, test = (_users(folder / part) for part in ("train", "test"))
    for users, others, part in ((train, test, "test"), (test, train, "train")):
        if alone := next((name for name in users if name not in others), None):
            raise ValueError(f"{users[alone].path}: user '{alone}' is not in {folder / part}; both must have the same")
    first, like = next(iter(train.items()))
    if none := next((name for name, rows in train.items() if not len(rows.x)), None):
        raise ValueError(f"{train[none].path}: user '{none}' has no rows, needs at least 1")
    for name, rows in (*train.items(), *test.items()):
        if len(rows.x) and rows.x.shape[1:] != like.x.shape[1:]:
            widths = f"{rows.x.shape[1]} numbers, those of user '{first}' {like.x.shape[1]}"
            raise ValueError(f"{rows.path}: rows of user '{name}' have {widths}")
    whole = all(rows.y.dtype.kind in "iub" for rows in (*train.values(), *test.values()) if len(rows.y))

    def pair(rows: _Rows) -> tuple[Tensor, Tensor]:
        x, y = rows.x.reshape(-1, *like.x.shape[1:]), rows.y.astype(np.int64 if whole else np.float32)
        return torch.from_numpy(x), torch.from_numpy(y)

    return Federation.from_clients(
        [pair(rows) for rows in train.values()], [pair(test[name]) for name in train], ids=list(train)
    )


def _users(folder: Path) -> dict[str, _Rows]:
    """Read the users of all files of a folder."""
    files = sorted(folder.glob("*.json"))
    if not files:
        what = "has no file *.json" if folder.is_dir() else "is not a folder"
        raise ValueError(f"{folder} {what}; a folder of LEAF has train/*.json and test/*.json")
    users: dict[str, _Rows] = {}
    for path in files:
        for name, rows in _file(path).items():
            if name in users:
                raise ValueError(f"{path}: user '{name}' is in {users[name].path.name} too")
            users[name] = rows._replace(path=path)
    return users


def _file(path: Path) -> dict[str, _Rows]:
    """Read the users of one file. Their rows become arrays one by one: as Python's numbers they would fill memory."""
    try:
        with path.open(encoding="utf-8") as file:
            content = json.load(file, object_hook=_hook)
    except (ValueError, RecursionError) as error:  # of JSON or of UTF-8, or of lists in lists in lists
        raise ValueError(f"{path} is not a file of JSON ({error})") from None
    users, data = (content.get(key) if isinstance(content, dict) else None for key in ("users", "user_data"))
    if not isinstance(users, list) or not users or not isinstance(data, dict):
        raise ValueError(f"{path} is not a file of LEAF: it must have a list 'users' and a table 'user_data'")
    found: dict[str, _Rows] = {}
    for name in map(str, users):
        rows = data.get(name)
        if not isinstance(rows, _Rows):
            raise ValueError(f"{path}: user '{name}' has no table of 'x' and 'y' in 'user_data'")
        if rows.fault:
            raise ValueError(f"{path}: user '{name}' {rows.fault}")
        found[name] = rows
    return found


def _hook(table: dict[str, Any]) -> Any:
    """Turn the table of one user into arrays; what is wrong is kept until it is known whose it is."""
    if not isinstance(table.get("x"), list) or not isinstance(table.get("y"), list):
        return table
    empty = np.zeros(0)
    if len(table["x"]) != len(table["y"]):
        return _Rows(empty, empty, f"has {len(table['x'])} rows of x but {len(table['y'])} of y")
    x, y = _array(table["x"]), _array(table["y"])
    if len(table["x"]) and (x is None or x.ndim != 2):
        return _Rows(empty, empty, _reason(table["x"]))
    if len(table["y"]) and (y is None or y.ndim != 1):
        told = f"y must be one number for each row, got {reprlib.repr(table['y'][0])}"
        return _Rows(empty, empty, f"has rows that cannot be used: {told}")
    with np.errstate(over="ignore"):  # a federation says whose numbers are infinite
        return _Rows(empty if x is None else x.astype(np.float32), empty if y is None else y)


def _array(values: list[Any]) -> np.ndarray | None:
    """Numbers, or lists of them, as an array; None of anything else."""
    try:
        found = np.array(values)
    except ValueError:  # lists of unequal lengths
        return None
    return found if found.dtype.kind in "iubf" else None


def _reason(rows: list[Any]) -> str:
    widths = sorted({len(row) for row in rows if isinstance(row, list)})
    if len(widths) > 1:
        return f"has rows of {widths[0]} and of {widths[-1]} numbers"
    return f"has rows that cannot be used: x must be lists of numbers, got {reprlib.repr(rows[0])}"
