"""Who the rows of a table belong to: any hashable values, as positions of clients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import torch

from coterie.core.federation import Federation
from coterie.storage.packed import Packed

UNKNOWN = -1  # the position of a client that is not known


def clients_of(groups: Any, rows: int, where: str) -> tuple[np.ndarray, np.ndarray]:
    """The clients among rows, sorted where they can be, and the position of every row's client (n,).

    Args:
        groups: Whose each row is; None where all are of one client, which is called 0.
        rows: How many there are.
        where: The beginning of messages.

    Raises:
        ValueError: There is not one value for each row.

    Example:
        >>> clients_of(["b", "a", "b"], 3, "fit")
        (array(['a', 'b'], dtype=object), array([1, 0, 1]))
    """
    if groups is None:
        return np.zeros(1, dtype=int), np.zeros(rows, dtype=int)
    position, found = pd.factorize(_listed(groups, rows, where))
    if (position < 0).any():
        raise ValueError(f"{where}: groups must name a client for each row, but row {position.argmin()} has none")
    ids = np.asarray(found)
    try:
        order = np.argsort(ids, kind="stable")
    except TypeError:  # they have no order: as they come
        order = np.arange(len(ids))
    return ids[order], np.argsort(order)[position]


def positions(groups: Any, rows: int, clients: np.ndarray, where: str) -> np.ndarray:
    """The position of every row's client among those that are known (n,), -1 for others.

    Args:
        groups: Whose each row is; None where nobody knows.
        rows: How many there are.
        clients: Those that are known.
        where: The beginning of messages.

    Raises:
        ValueError: There is not one value for each row, or clients have other types than those that are known.
    """
    if groups is None:
        return np.full(rows, UNKNOWN)
    given, known = _listed(groups, rows, where), pd.Index(clients, tupleize_cols=False)
    at = known.get_indexer(pd.Index(given, tupleize_cols=False))
    if (at < 0).all() and (alike := set(map(str, clients)) & set(map(str, given.unique()))):
        own, other = (type(x).__name__ for x in (clients[0], given.iloc[0]))
        raise ValueError(f"{where}: groups are of type {other}, but fit knew client {min(alike)!r} as {own}")
    return at


def federation_of(
    x: np.ndarray, y: np.ndarray, clients: np.ndarray, at: np.ndarray, columns: tuple[str, ...] | None
) -> Federation:
    """The rows of a table by client.

    Args:
        x: The rows (n, d).
        y: Their targets (n,).
        clients: Who they belong to.
        at: The position of every row's client (n,).
        columns: The names of the entries of a row, None where they have none.
    """
    order = np.argsort(at, kind="stable")
    offsets = np.concatenate([[0], np.bincount(at, minlength=len(clients)).cumsum()])
    names = tuple(map(str, clients.tolist()))
    return Federation(
        Packed(torch.from_numpy(x[order]), torch.from_numpy(y[order]), torch.from_numpy(offsets)),
        ids=names if len(set(names)) == len(names) else None,  # 1 and "1" are two clients
        columns=columns,
    )


def _listed(groups: Any, rows: int, where: str) -> pd.Series:
    try:
        values = pd.Series(groups)
    except ValueError as error:
        raise ValueError(f"{where}: groups must be a list with one client for each row ({error})") from None
    if len(values) != rows:
        raise ValueError(f"{where}: groups has {len(values)} entries, but there are {rows} rows")
    return values
