"""The rows of a table that can be used, whose they are, and which of them are held out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from coterie.storage.names import nearest_name
from coterie.tables.column_sums import ColumnSums, Frame, as_words, distinct_values, in_order
from coterie.tables.columns import Date, Log, Number, recognise

CROWDED = 0.5  # clients per row from which on the column is no client's name
FEW = 20  # rows up to which it may be one all the same


class Rows(NamedTuple):
    """The rows of a table that can be used, and whose they are."""

    frame: Frame
    client: np.ndarray  # the name of each row's client
    notes: tuple[str, ...]

    def by_client(self) -> tuple[tuple[str, ...], np.ndarray]:
        """The clients in their order, and the position of every row's client (n,)."""
        code, found = distinct_values(self.client)
        order = sorted(range(len(found)), key=lambda i: in_order(found[i]))
        return tuple(str(found[i]) for i in order), np.argsort(order)[code]

    def only(self, keep: np.ndarray) -> Rows:
        """The rows at which `keep` is true."""
        return self._replace(frame=self.frame[keep].reset_index(drop=True), client=self.client[keep])


def usable(frame: Any, client: str, target: str) -> Rows:
    """The rows that have a client and a target, without a column that only counts rows.

    Args:
        frame: The table.
        client: The column that says whose a row is.
        target: The column that is to be predicted.

    Raises:
        ValueError: A column is not there, or the client's column cannot be one.
    """
    rows = as_pandas(frame)
    check_columns(rows, [client, target])
    if client == target:
        raise ValueError(f"client and target are both '{client}'")
    rows, notes = _without_row_numbers(rows, client, target)
    names = as_words(rows[client])
    known, there = names != "", rows[target].notna().to_numpy()
    for what, own in ((f"client '{client}'", known), (f"target '{target}'", there)):
        if (lost := int((~own).sum())) == len(own):
            raise ValueError(f"{what} has no values")
        elif lost:
            notes.append(f"{lost:,} row{'s' * (lost > 1)} without a {what.split()[0]} left out")
    return _checked(Rows(rows, names, tuple(notes)).only(known & there), client)


def held_out(rows: Rows, share: float, time: str | None, seed: int) -> np.ndarray:
    """Which rows are held out (n,): of every client a share, at least one and not all; of one with a single row none.

    Args:
        rows: The rows.
        share: Of each client's rows; 0 for none.
        time: A column that orders them: the last ones are held out. None draws them.
        seed: Of that draw.
    """
    if not 0 <= share < 1:
        raise ValueError(f"test must be a share from 0 to below 1, got {share!r}")
    code, _ = distinct_values(rows.client)
    count = np.bincount(code)
    order = np.random.default_rng(seed).random(len(code)) if time is None else _moments(rows.frame, time)
    by_client = np.lexsort((order, code))
    rank = np.empty(len(code), dtype=np.int64)
    rank[by_client] = np.arange(len(code)) - np.repeat(np.cumsum(count) - count, count)
    kept = np.maximum(count - np.maximum(np.round(share * count), share > 0), 1)
    return rank >= kept[code]


def _moments(frame: Frame, time: str) -> np.ndarray:
    """When every row was, as a number."""
    check_columns(frame, [time])
    when = recognise(time, ColumnSums.of(frame[time], np.zeros(len(frame)))).column
    if not isinstance(when, Number | Log | Date):
        raise ValueError(f"time '{time}' must hold numbers or dates")
    moments = when.encode(frame[time])[:, 0]
    if np.isnan(moments).any():
        raise ValueError(f"time '{time}' has no value in {int(np.isnan(moments).sum()):,} rows")
    return moments


def _checked(rows: Rows, client: str) -> Rows:
    """Refuse a client's column that is none; mention clients that have one row."""
    code, names = distinct_values(rows.client)
    count, n = np.bincount(code), len(code)
    if len(names) == 1:
        raise ValueError(f"client '{client}' has one value only, '{names[0]}': there is nobody to tell apart")
    if n > FEW and len(names) > CROWDED * n:
        raise ValueError(
            f"client '{client}' has {len(names):,} different values in {n:,} rows, fewer than two rows each: "
            "is it a row's number rather than a client's?"
        )
    single = int((count == 1).sum())
    told = f"{single:,} client{'s have' if single > 1 else ' has'} one row only, which trains and scores nothing"
    return rows._replace(notes=(*rows.notes, told)) if single else rows


def _without_row_numbers(frame: Frame, client: str, target: str) -> tuple[Frame, list[str]]:
    """Leave out a first column without a name that counts rows, as R and pandas write it."""
    first = frame.columns[0]
    nameless = str(first).strip() == "" or str(first).startswith("Unnamed: 0") or str(first) == "rownames"
    if first in (client, target) or not nameless:
        return frame, []
    name = f"column '{first}'" if str(first) == "rownames" else "the first column, which has no name,"
    return frame.drop(columns=first), [f"{name} counts rows: it is left out"]


def as_pandas(frame: Any) -> Frame:
    """A table of pandas', from any that narwhals knows."""
    import pandas as pd

    if isinstance(frame, pd.DataFrame):
        return frame
    import narwhals as nw

    try:
        table = nw.from_native(frame, eager_only=True)
    except TypeError:
        raise ValueError(f"a table must be a DataFrame of pandas or polars, got {type(frame).__name__}") from None
    return pd.DataFrame({name: table[name].to_list() for name in table.columns})


def check_columns(frame: Frame, names: Sequence[str]) -> None:
    """Refuse a table that lacks a column; says which name is the nearest."""
    for name in names:
        if name not in frame.columns:
            raise ValueError(f"there is no column '{name}'{nearest_name(name, [str(c) for c in frame.columns])}")
