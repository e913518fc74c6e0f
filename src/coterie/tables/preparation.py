"""From a table to rows of numbers that a model takes, and back: everything is learnt from sums over rows.

A preparation is made in two steps, each of which adds up what the holders of rows have summed:

1. `TableSums.of(rows, …)`, added: what each column is, its levels, and what the target is (`Layout.of`);
2. `layout.moments(rows)`, added: the scale of the numbers that columns become (`Preparation.of`).

`Preparation.of_table` does both for one table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from coterie.storage.scales import Moments, Scale
from coterie.tables.column_sums import ColumnSums, Frame, as_numbers, as_words
from coterie.tables.columns import Column, described, recognise, restored
from coterie.tables.rows import as_pandas, check_columns
from coterie.tables.target import Kind, Target

FARTHEST = 1e9  # deviations from the mean: beyond, a number of 32 bits has no square


class TableSums(NamedTuple):
    """What is known of a table's columns; those of two tables add up."""

    columns: dict[str, ColumnSums]
    target: ColumnSums

    @classmethod
    def of(cls, frame: Any, client: str, target: str) -> TableSums:
        """Sum up a table.

        Args:
            frame: The rows: a table of pandas', or any that narwhals knows, such as those of polars.
            client: The column that says whose a row is.
            target: The column that is to be predicted.
        """
        rows = as_pandas(frame)
        check_columns(rows, [client, target])
        y = np.nan_to_num(as_numbers(rows[target]), posinf=0.0, neginf=0.0)
        others = [name for name in rows.columns if name not in (client, target)]
        return cls({str(n): ColumnSums.of(rows[n], y) for n in others}, ColumnSums.of(rows[target], y))

    def __add__(self, other: Any) -> TableSums:
        if self.columns.keys() != other.columns.keys():
            raise ValueError(f"tables must have the same columns, got {list(self.columns)} and {list(other.columns)}")
        both = {name: sums + other.columns[name] for name, sums in self.columns.items()}
        return TableSums(both, self.target + other.target)


@dataclass(frozen=True)
class Layout:
    """What the columns of a table are, and the target; the scale is not known yet.

    Attributes:
        client: The column that says whose a row is.
        target: What is predicted.
        columns: Those that are used.
        notes: What there is to say about others, and about values that are missing.
    """

    client: str
    target: Target
    columns: tuple[Column, ...]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, sums: TableSums, client: str, target: str, kind: Kind = "auto") -> Layout:
        """Tell what columns are.

        Args:
            sums: Of all rows together.
            client: The column that says whose a row is.
            target: The column that is to be predicted.
            kind: What the target is: "number", "log", "classes", or "auto".
        """
        what = Target.of(target, sums.target, kind)
        found = [recognise(name, own, what.log) for name, own in sums.columns.items()]
        columns = tuple(each.column for each in found if each.column is not None)
        notes = tuple(note for each in found for note in each.notes)
        if what.log and kind == "auto":
            notes = (
                f"target '{target}' is above 0 and skewed: its logarithm is learnt, unless kind is 'number'",
                *notes,
            )
        if not columns:
            raise ValueError(f"there is no column to predict '{target}' from{': ' + '; '.join(notes) if notes else ''}")
        return cls(client, what, columns, notes)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the numbers that columns become."""
        return tuple(name for column in self.columns for name in column.names)

    def encode(self, frame: Frame) -> np.ndarray:
        """Those numbers (n, d), in their own units; NaN where a value is missing."""
        check_columns(frame, [column.name for column in self.columns])
        return np.concatenate([column.encode(frame[column.name]) for column in self.columns], 1)

    def moments(self, frame: Any) -> Moments:
        """Sums from which their scale follows."""
        return Moments.of(self.encode(as_pandas(frame)))


@dataclass(frozen=True)
class Preparation:
    """How rows of a table become rows of numbers.

    Attributes:
        layout: What the columns are.
        scale: Means and deviations of the numbers that they become.
        used: Which of these are used: those that vary (d,).
        about_rows: What there is to say about the rows that it was last applied to, such as those that were left out.
    """

    layout: Layout
    scale: Scale
    used: np.ndarray
    about_rows: tuple[str, ...] = ()

    @classmethod
    def of(cls, layout: Layout, moments: Moments) -> Preparation:
        """The preparation that follows from sums over all rows.

        Args:
            layout: What the columns are.
            moments: Sums of the numbers that they become.
        """
        scale = Scale.of(moments)
        used = scale.deviation > 0
        if not used.any():
            raise ValueError(f"no column varies: there is nothing to predict '{layout.target.name}' from")
        return cls(layout, scale, used)

    @classmethod
    def of_table(cls, frame: Any, client: str, target: str, kind: Kind = "auto") -> Preparation:
        """The preparation of one table.

        Args:
            frame: Its rows.
            client: The column that says whose a row is.
            target: The column that is to be predicted.
            kind: What the target is: "number", "log", "classes", or "auto".

        Example:
            >>> import pandas as pd
            >>> shops = pd.DataFrame({"shop": ["a", "a", "b"], "sales": [3.0, 5.0, 4.0], "price": [2.0, 1.0, 3.0]})
            >>> preparation = Preparation.of_table(shops, client="shop", target="sales")
            >>> preparation.names, preparation.clients(shops).tolist()
            (('price',), ['a', 'a', 'b'])
        """
        rows = as_pandas(frame)
        layout = Layout.of(TableSums.of(rows, client, target), client, target, kind)
        return cls.of(layout, layout.moments(rows))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of the numbers in a row."""
        return tuple(name for name, own in zip(self.layout.names, self.used, strict=True) if own)

    @property
    def target(self) -> Target:
        """What is predicted."""
        return self.layout.target

    @property
    def notes(self) -> tuple[str, ...]:
        """What there is to say about the table."""
        flat = [c.name for c, own in self._by_column() if not own.any()]
        told = (f"column '{name}' varies by less than a millionth of its size: it is left out" for name in flat)
        return (*self.about_rows, *self.layout.notes, *told)

    def _by_column(self) -> Iterator[tuple[Column, np.ndarray]]:
        """Every column, and which of the numbers that it becomes are used."""
        at = 0
        for column in self.layout.columns:
            yield column, self.used[at : at + len(column.names)]
            at += len(column.names)

    def with_classes(self, classes: tuple[str, ...]) -> Preparation:
        """The same for a target that may have other values, too."""
        return replace(self, layout=replace(self.layout, target=replace(self.target, classes=classes)))

    def features(self, frame: Any) -> np.ndarray:
        """Rows of numbers (n, d) with mean 0 and deviation 1, as of the rows that were summed up; 0 where missing."""
        scaled = self.scale(self.layout.encode(as_pandas(frame)))[:, self.used]
        return np.clip(np.nan_to_num(scaled), -FARTHEST, FARTHEST).astype(np.float32)

    def filled_in(self, frame: Any) -> tuple[str, ...]:
        """What is said of values that are missing, cannot be read, or were never seen: others stand for them."""
        rows = as_pandas(frame)
        check_columns(rows, [column.name for column in self.layout.columns])
        count = {column.name: int(column.unusable(rows[column.name]).sum()) for column in self.layout.columns}
        return tuple(
            f"column '{name}': {lost:,} of {len(rows):,} values are missing or unlike those in training, and filled in"
            for name, lost in count.items()
            if lost
        )

    def targets(self, frame: Any) -> tuple[np.ndarray, np.ndarray]:
        """Targets as a model takes them, and whether there is one (n,)."""
        rows = as_pandas(frame)
        check_columns(rows, [self.target.name])
        return self.target.encode(rows[self.target.name])

    def clients(self, frame: Any) -> np.ndarray:
        """Whose every row is (n,); empty where nobody is named."""
        rows = as_pandas(frame)
        check_columns(rows, [self.layout.client])
        return as_words(rows[self.layout.client])

    def effects(self, coefficients: np.ndarray, intercept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A linear model (…, d) and (…) in the units of the table.

        Args:
            coefficients: Of the numbers in a row.
            intercept: Of the same model.
        """
        unit = self.target.deviation
        mean, deviation = self.scale.mean[self.used], self.scale.deviation[self.used]
        own = unit * coefficients / deviation
        return own, unit * intercept + self.target.mean - (own * mean).sum(-1)

    def plain(self) -> dict[str, Any]:
        """All of it as plain values, for JSON."""
        return {
            "client": self.layout.client,
            "target": vars(self.target),
            "columns": described(self.layout.columns),
            "notes": list(self.layout.notes),
            "about_rows": list(self.about_rows),
            "mean": self.scale.mean.tolist(),
            "deviation": self.scale.deviation.tolist(),
            "used": self.used.tolist(),
        }

    @classmethod
    def from_plain(cls, table: dict[str, Any]) -> Preparation:
        """The preparation that `plain` has written."""
        target = Target(**{**table["target"], "classes": tuple(table["target"]["classes"])})
        layout = Layout(table["client"], target, restored(table["columns"]), tuple(table["notes"]))
        scale = Scale(np.array(table["mean"]), np.array(table["deviation"]))
        return cls(layout, scale, np.array(table["used"], dtype=bool), tuple(table["about_rows"]))
