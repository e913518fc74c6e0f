"""Rows whose entries have names: tables of pandas' become arrays, all with their columns in one order."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Names = tuple[str, ...]


def plain_clients(clients: Any, columns: Names | None, name: Callable[[int], str]) -> tuple[Any, Names | None]:
    """Turn pandas tables among the clients that a user passes into arrays, and return the names of their columns.

    Args:
        clients: Clients in any form; only pairs (x, y) with a table as x are changed.
        columns: The columns that x must have, in the order to put them in; None takes those of the first table.
        name: Returns the name of client i, for messages.

    Raises:
        ValueError: A table has other columns than the first, or one that holds no numbers; names the client.
    """
    if not isinstance(clients, list | tuple):
        return clients, columns
    plain = []
    for i, given in enumerate(clients):
        if isinstance(given, list | tuple) and len(given) == 2 and is_table(given[0]):
            columns = columns or names_of(given[0], name(i))
            given = _numbers(given[0], columns, name(i)), _unnamed(given[1])
        plain.append(given)
    return plain, columns


def is_table(x: Any) -> bool:
    """Whether x is a DataFrame; whoever has one has loaded pandas, so it is not loaded for this.

    Args:
        x: Anything.
    """
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(x, pandas.DataFrame)


def names_of(table: Any, who: str) -> Names | None:
    """Return the names of a table's columns; None if they are only numbered.

    Args:
        table: A DataFrame.
        who: Whose it is, for messages.
    """
    if isinstance(table.columns, sys.modules["pandas"].RangeIndex):
        return None
    names = tuple(str(column) for column in table.columns)
    if repeated := [n for n, times in Counter(names).items() if times > 1]:
        raise ValueError(f"{who}: two columns are called '{repeated[0]}'")
    return names


def order(given: Sequence[str], columns: Names, who: str) -> list[int]:
    """Return where each of the columns is among those given.

    Args:
        given: The names of the columns in their order.
        columns: The names in the order that is wanted.
        who: Whose columns they are, for messages.

    Raises:
        ValueError: Some are missing, or there are others; says which.

    Example:
        >>> order(["b", "a"], ("a", "b"), "new.csv")
        [1, 0]
    """
    wrong = [("lacks", [n for n in columns if n not in given]), ("has also", [n for n in given if n not in columns])]
    if told := [f"{verb} {_listed(names)}" for verb, names in wrong if names]:
        raise ValueError(f"{who}: its columns must be {_listed(columns)}; it {' and '.join(told)}")
    return [list(given).index(n) for n in columns]


def _numbers(table: Any, columns: Names | None, who: str) -> np.ndarray:
    """The rows of a table, with the columns in the order that is wanted."""
    names = names_of(table, who)
    if columns is not None and names is not None:
        table = table.iloc[:, order(names, columns, who)]
    try:
        return table.to_numpy(dtype=np.float32, copy=True)  # pandas' own is read-only
    except (TypeError, ValueError) as error:
        raise ValueError(f"{who}: its columns must hold numbers ({error})") from None


def _unnamed(y: Any) -> Any:
    """A Series or a table of targets as an array."""
    return y.to_numpy(copy=True) if hasattr(y, "to_numpy") else y


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"'{n}'" for n in names[:5]) + (", …" if len(names) > 5 else "")
