"""Sums over a column of a table, from which it follows what the column is.

Two tables with the same columns, such as those of two clients, are summed up each where it lies, and the sums are
added. Nothing else needs to be known of the rows.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

Frame = Any  # a table of pandas', whose own types say less than they promise
Series = Any

PER_LEVEL = 10  # rows that a level needs on average, to say that a line is no good
SKEWED = 1.5  # the skewness from which on a logarithm is tried
BENT = 0.1  # of the mean: numbers that deviate less from it are nearly on a line with their logarithms
FEW_NUMBERS = 50  # of which skewness says little
COUNTED = 10_000  # levels that are counted; with more, the column is a name or free text
DATE = re.compile(r"^\d{4}-\d{1,2}-\d{1,2}([ T]\d{1,2}:\d{2}.*)?$")


class Level(NamedTuple):
    """Rows with one value: how many, and the sum of their targets."""

    rows: float
    target: float


@dataclass(frozen=True)
class ColumnSums:
    """What is known of a column; those of two tables add up.

    Attributes:
        rows: Rows of the table.
        numbers: Values that are numbers, or read as one.
        words: Values that do not.
        dates: Of these, how many read as dates.
        whole: Whether all numbers are whole.
        line: Of numbers, the sums of x, x², xy, y and y² for targets y.
        powers: Of numbers, and of the logarithms of those above 0, the sums of x, x² and x³ (2, 3).
        positive: Numbers above 0.
        levels: The distinct values; None where there are too many.
        sample: A value that is no number.
        native: Whether it holds dates that need no reading.
    """

    rows: int
    numbers: int
    words: int
    dates: int
    whole: bool
    line: np.ndarray
    powers: np.ndarray
    positive: int
    levels: dict[str, Level] | None
    sample: str
    native: bool = False

    @classmethod
    def of(cls, values: Series, target: np.ndarray) -> ColumnSums:
        """Sum up a column.

        Args:
            values: The column.
            target: The target of every row as a number, 0 where it is none.
        """
        import pandas as pd

        if pd.api.types.is_datetime64_any_dtype(values):
            there = int(values.notna().sum())
            return cls(len(values), 0, there, there, False, np.zeros(5), np.zeros((2, 3)), 0, None, "", native=True)
        number = as_numbers(values)
        known = np.isfinite(number)
        x, y = number[known], target[known]
        logs = np.log(x[x > 0])
        with np.errstate(over="ignore", invalid="ignore"):  # `squarable` tells
            line = np.array([x.sum(), (x * x).sum(), (x * y).sum(), y.sum(), (y * y).sum()])
            powers = np.array([[(z**p).sum() for p in (1, 2, 3)] for z in (x, logs)])
        whole = bool((x == np.round(x)).all())
        words = values[values.notna() & ~known] if not pd.api.types.is_numeric_dtype(values) else values[:0]
        text = words.astype(str)
        levels = _levels(x, y) if whole and not len(words) else None
        if len(words):
            levels = _levels(values[values.notna()].astype(str).to_numpy(), target[values.notna().to_numpy()])
        dates = int(text.str.match(DATE).sum()) if len(text) else 0
        sample = text.iloc[0] if len(text) else ""
        return cls(len(values), len(x), len(words), dates, whole, line, powers, len(logs), levels, sample)

    def __add__(self, other: ColumnSums) -> ColumnSums:
        levels = None
        if self.levels is not None and other.levels is not None:
            both = {v: _plus(self.levels.get(v), other.levels.get(v)) for v in {**self.levels, **other.levels}}
            levels = both if len(both) <= COUNTED else None
        return ColumnSums(
            self.rows + other.rows,
            self.numbers + other.numbers,
            self.words + other.words,
            self.dates + other.dates,
            self.whole and other.whole,
            self.line + other.line,
            self.powers + other.powers,
            self.positive + other.positive,
            levels,
            self.sample or other.sample,
            self.native or other.native,
        )

    @property
    def known(self) -> int:
        """Values that are there."""
        return self.numbers + self.words

    @property
    def squarable(self) -> bool:
        """Whether numbers are small enough to be computed with."""
        return bool(np.isfinite(self.powers[0, :2]).all())

    @property
    def skewed(self) -> bool:
        """Whether numbers are all above 0 and stretch far to the right, and their logarithms do not."""
        if self.words or self.numbers < FEW_NUMBERS or self.positive < self.numbers:
            return False
        plain, log = (_skewness(sums, self.numbers) for sums in self.powers)
        return plain > SKEWED and abs(log) < plain / 2

    @property
    def scattered(self) -> bool:
        """Whether numbers are all above 0 and deviate so far from their mean that a logarithm bends them."""
        if self.words or self.numbers < FEW_NUMBERS or self.positive < self.numbers:
            return False
        mean, square, _ = self.powers[0] / self.numbers
        return square - mean**2 > (BENT * mean) ** 2

    @property
    def curved(self) -> float:
        """The share of the target's variation that its means by level have, and a line through them has not."""
        if not self.levels or not self.whole or self.words or self.numbers < PER_LEVEL * len(self.levels):
            return 0.0
        n, (sx, sxx, sxy, sy, syy) = self.numbers, self.line
        total, own = syy - sy**2 / n, sxx - sx**2 / n
        if total <= 0 or own <= 0:
            return 0.0
        between = sum(level.target**2 / level.rows for level in self.levels.values()) - sy**2 / n
        chance = (len(self.levels) - 2) / n  # what levels that mean nothing would have, about
        return float((between - (sxy - sx * sy / n) ** 2 / own) / total - chance)


# --- values -----------------------------------------------------------------------------------------------------------


def as_numbers(values: Series) -> np.ndarray:
    """A column as numbers, NaN for what is none."""
    import pandas as pd

    if pd.api.types.is_bool_dtype(values) and not isinstance(values.dtype, pd.CategoricalDtype):
        return values.to_numpy(float, na_value=np.nan)
    if isinstance(values.dtype, pd.CategoricalDtype):
        values = values.astype(object)
    if pd.api.types.is_datetime64_any_dtype(values):
        return np.full(len(values), np.nan)
    number: Series = pd.to_numeric(values, errors="coerce")
    return number.to_numpy(float, na_value=np.nan)


def as_words(values: Series) -> np.ndarray:
    """A column as strings, whole numbers without a point; empty where there is none."""
    import pandas as pd

    if pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values):
        codes, distinct = distinct_values(values.to_numpy(float, na_value=np.nan))
        return np.array([_word(v) for v in distinct.tolist()], dtype=object)[codes]
    return values.astype(object).where(values.notna(), "").astype(str).to_numpy(object)


def _word(value: float) -> str:
    if math.isnan(value):
        return ""
    return str(int(value)) if value == int(value) else repr(value)


def distinct_values(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The position of every value among the distinct ones (n,), and these; what is missing is one of them."""
    import pandas as pd

    codes, distinct = pd.factorize(values, use_na_sentinel=False)
    return codes, np.asarray(distinct)


def _levels(values: np.ndarray, target: np.ndarray) -> dict[str, Level] | None:
    """Count the distinct values; None if there are too many."""
    codes, distinct = distinct_values(values)
    if len(distinct) > COUNTED:
        return None
    count = np.bincount(codes, minlength=len(distinct))
    total = np.bincount(codes, target, minlength=len(distinct))
    words = [_word(v) if isinstance(v, float) else str(v) for v in distinct.tolist()]
    return {w: Level(float(n), float(s)) for w, n, s in zip(words, count, total, strict=True)}


def _skewness(sums: np.ndarray, n: int) -> float:
    """Of n numbers, from the sums of their first three powers."""
    mean, square, cube = sums / n
    variance = square - mean**2
    if variance <= 1e-9 * max(square, np.finfo(float).tiny):
        return 0.0
    return float((cube - 3 * mean * variance - mean**3) / variance**1.5)


def _plus(a: Level | None, b: Level | None) -> Level:
    both = [level for level in (a, b) if level is not None]
    return Level(sum(level.rows for level in both), sum(level.target for level in both))


def in_order(level: str) -> tuple[float, str]:
    """A key to sort words by: numbers by their value, before all others."""
    try:
        return float(level), level
    except ValueError:
        return math.inf, level
