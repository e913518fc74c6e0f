"""What a column of a table is (numbers, logarithms, categories, tags or dates), as sums tell; and what it becomes."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from coterie.tables.column_sums import (
    COUNTED,
    ColumnSums,
    Level,
    Series,
    as_numbers,
    as_words,
    distinct_values,
    in_order,
)

LEVELS = 30  # that have a column of their own; all others share one
CODES = 30  # distinct whole numbers up to which they may be codes of categories
CURVED = 0.1  # of the target's variation: what a line through a code's levels may leave out
NAMES = 0.5  # levels per row from which on a column of words is a name rather than a category
MOSTLY = 0.95  # of the values that must read as numbers or dates
SEPARATORS = ("|", ";")  # between tags
UNCLEAR = {  # what a value looks like, and what to do about it
    r"^\d{1,2}[./]\d{1,2}[./]\d{2,4}$": "holds dates such as {}, where day and month may be confused; write 2024-12-31",
    r"^-?\d+,\d+$": "holds numbers with a decimal comma such as {}; write a point",
}
DECORATED = re.compile(  # a number with a currency, a percent sign, or something between thousands
    r"^[-+]?[$€£¥]?\s?[-+]?(\d{1,3}([,.' \u00a0\u202f]\d{3})+([.,]\d+)?|\d+([.,]\d+)?)\s?[%$€£¥]?$"
)
YES_NO = ({"yes", "no"}, {"y", "n"}, {"true", "false"}, {"t", "f"})


@dataclass(frozen=True)
class Number:
    """A column of numbers, taken as they are."""

    kind: ClassVar[str] = "number"
    name: str

    @property
    def names(self) -> tuple[str, ...]:
        """Of the numbers that it becomes."""
        return (self.name,)

    def encode(self, values: Series) -> np.ndarray:
        """The values (n, 1), NaN where there is none."""
        number = as_numbers(values)
        return np.where(np.isfinite(number), number, np.nan)[:, None]

    def unusable(self, values: Series) -> np.ndarray:
        """Which values another stands for (n,)."""
        return np.isnan(self.encode(values)[:, 0])


@dataclass(frozen=True)
class Log:
    """A column of numbers above 0 that stretch far to the right, such as populations and incomes: their logarithms."""

    kind: ClassVar[str] = "log"
    name: str

    @property
    def names(self) -> tuple[str, ...]:
        """Of the numbers that it becomes."""
        return (f"log {self.name}",)

    def encode(self, values: Series) -> np.ndarray:
        """The logarithms (n, 1), NaN where there is no number above 0."""
        number = as_numbers(values)
        usable = np.isfinite(number) & (number > 0)
        return np.where(usable, np.log(np.where(usable, number, 1.0)), np.nan)[:, None]

    def unusable(self, values: Series) -> np.ndarray:
        """Which values another stands for (n,)."""
        return np.isnan(self.encode(values)[:, 0])


@dataclass(frozen=True)
class Category:
    """A column of categories: 1 for the level that a row has; the commonest one is what others are compared with.

    Attributes:
        name: Of the column.
        base: The commonest level.
        levels: Those with a column of their own. All others, and values that are missing or were never seen, are as
            the commonest, unless `others` is set.
        others: Whether rare levels share a column; then so do values that were never seen.
    """

    kind: ClassVar[str] = "category"
    name: str
    base: str
    levels: tuple[str, ...]
    others: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Of the numbers that it becomes."""
        return tuple(f"{self.name}={level}" for level in (*self.levels, *(["(other)"] if self.others else [])))

    def encode(self, values: Series) -> np.ndarray:
        """0 and 1 (n, levels)."""
        own = as_words(values)
        found = np.stack([own == level for level in self.levels], 1) if self.levels else np.zeros((len(own), 0), bool)
        if self.others:
            rest = values.notna().to_numpy() & (own != self.base) & ~found.any(1)
            found = np.column_stack([found, rest])
        return found.astype(np.float64)

    def unusable(self, values: Series) -> np.ndarray:
        """Which values another stands for (n,): those that are missing, and where none share a column, strange ones."""
        own = as_words(values)
        return (own == "") | (~np.isin(own, [self.base, *self.levels]) & (not self.others))


@dataclass(frozen=True)
class Tags:
    """A column of several words each, such as `Comedy|Drama`: 1 for every tag that a row has."""

    kind: ClassVar[str] = "tags"
    name: str
    separator: str
    levels: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Of the numbers that it becomes."""
        return tuple(f"{self.name}={level}" for level in self.levels)

    def encode(self, values: Series) -> np.ndarray:
        """0 and 1 (n, tags)."""
        codes, distinct = distinct_values(as_words(values))
        own = [set(map(str.strip, text.split(self.separator))) for text in distinct]
        table = np.array([[level in tags for level in self.levels] for tags in own], dtype=np.float64)
        return table.reshape(len(own), len(self.levels))[codes]

    def unusable(self, values: Series) -> np.ndarray:
        """Which values another stands for (n,): none, for a row may have no tag."""
        return np.zeros(len(values), dtype=bool)


@dataclass(frozen=True)
class Date:
    """A column of dates: days, and where in the year and in the week."""

    kind: ClassVar[str] = "date"
    name: str

    @property
    def names(self) -> tuple[str, ...]:
        """Of the numbers that it becomes."""
        turns = [f"{self.name}: {turn}" for turn in ("year cos", "year sin", "week cos", "week sin")]
        return (f"{self.name}: days", *turns)

    def encode(self, values: Series) -> np.ndarray:
        """The numbers (n, 5), NaN where there is no date."""
        import pandas as pd

        dates = pd.to_datetime(values, errors="coerce", utc=True, format=None if _is_date(values) else "mixed")
        days = ((dates - pd.Timestamp("2000-01-01", tz="UTC")) / pd.Timedelta(days=1)).to_numpy(float)
        year = 2 * math.pi * (days / 365.2425)
        week = 2 * math.pi * (np.floor(days) / 7)
        return np.column_stack([days, np.cos(year), np.sin(year), np.cos(week), np.sin(week)])

    def unusable(self, values: Series) -> np.ndarray:
        """Which values another stands for (n,)."""
        return np.isnan(self.encode(values)[:, 0])


Column = Number | Log | Category | Tags | Date
KINDS: dict[str, type[Column]] = {kind.kind: kind for kind in (Number, Log, Category, Tags, Date)}


class Recognised(NamedTuple):
    """What a column is, None where it is left out; and what there is to say about it."""

    column: Column | None
    notes: tuple[str, ...]


def recognise(name: str, sums: ColumnSums, log_target: bool = False) -> Recognised:
    """Tell what a column is.

    Args:
        name: Of the column.
        sums: What is known of it.
        log_target: Whether it is the logarithm of the target that is learnt: then effects multiply, and columns of
            numbers above 0 are taken as logarithms too, even if they are not skewed.
    """
    if not sums.known:
        return Recognised(None, (f"column '{name}' has no values: it is left out",))
    missing = sums.rows - sums.known
    notes = [f"column '{name}': {missing:,} of {sums.rows:,} values are missing, and filled in"] if missing else []
    if sums.native or sums.dates >= MOSTLY * sums.known:
        return Recognised(Date(name), tuple(notes))
    if sums.numbers >= MOSTLY * sums.known:
        if sums.words:
            notes.append(f"column '{name}' holds numbers, but for {_times(sums.words)} such as '{sums.sample}'")
        return _number(name, sums, log_target, notes)
    return _words(name, sums, notes)


def _number(name: str, sums: ColumnSums, log_target: bool, notes: list[str]) -> Recognised:
    if not sums.squarable:
        return Recognised(None, (f"column '{name}' holds numbers too large to be squared: it is left out",))
    if sums.levels is not None and len(sums.levels) == 1:
        return Recognised(None, (f"column '{name}' is the same in all rows: it is left out",))
    few = sums.levels is not None and len(sums.levels) <= CODES
    if sums.levels is not None and few and len(sums.levels) > 2 and sums.curved > CURVED:
        notes.append(
            f"column '{name}': its {len(sums.levels)} whole numbers are taken for categories; as numbers they would "
            f"leave out {sums.curved:.0%} of the target's variation"
        )
        return Recognised(_category(name, sums.levels), tuple(notes))
    if not few and (sums.skewed or (log_target and sums.scattered)):
        why = "skewed" if sums.skewed else "the target's logarithm is learnt"
        notes.append(f"column '{name}' is above 0, and {why}: its logarithm is used")
        return Recognised(Log(name), tuple(notes))
    return Recognised(Number(name), tuple(notes))


def _words(name: str, sums: ColumnSums, notes: list[str]) -> Recognised:
    for pattern, hint in UNCLEAR.items():
        if re.match(pattern, sums.sample):
            return Recognised(None, (f"column '{name}' {hint.format(sums.sample)}: it is left out",))
    levels = sums.levels
    if levels is not None and (tags := _tags(name, levels)):
        return Recognised(tags, tuple(notes))
    if levels is None or len(levels) > max(LEVELS, NAMES * sums.known):
        many = f"over {COUNTED:,}" if levels is None else f"{len(levels):,}"
        hint = "it is left out as a name or free text; give it fewer values to have it used"
        if DECORATED.match(sums.sample):
            hint = f"it is left out; if '{sums.sample}' is a number, write digits and a decimal point only"
        return Recognised(None, (f"column '{name}' has {many} different words in {sums.known:,} rows: {hint}",))
    if len(levels) == 1:
        return Recognised(None, (f"column '{name}' is the same in all rows: it is left out",))
    found = _category(name, levels)
    if found.others:
        rest = len(levels) - 1 - len(found.levels)
        notes.append(f"column '{name}' has {len(levels)} levels: the rarest {rest} share a column")
    return Recognised(found, tuple(notes))


def _category(name: str, levels: dict[str, Level]) -> Category:
    """The commonest level is the base: yes of yes and no, so that a coefficient is that of `yes`, is the exception."""
    order = sorted(levels, key=lambda v: (-levels[v].rows, v))
    if {v.lower() for v in order} in YES_NO:
        order.sort(key=lambda v: v.lower() in ("yes", "y", "true", "t"))
    own = order[1 : LEVELS + 1]
    return Category(name, order[0], tuple(sorted(own, key=in_order)), others=len(order) > len(own) + 1)


def _tags(name: str, levels: dict[str, Level]) -> Tags | None:
    """Tags, if the values of a column are made of a few of them again and again."""
    for separator in SEPARATORS:
        split = {v: [t for t in map(str.strip, v.split(separator)) if t] for v in levels}
        if sum(len(t) > 1 for t in split.values()) < len(levels) / 4:
            continue
        counts: Counter[str] = Counter()
        for value, tags in split.items():
            counts.update(dict.fromkeys(tags, int(levels[value].rows)))
        if len(counts) < len(levels):
            common = sorted(counts, key=lambda t: (-counts[t], t))[:LEVELS]
            return Tags(name, separator, tuple(sorted(common)))
    return None


def _is_date(values: Any) -> bool:
    import pandas as pd

    return pd.api.types.is_datetime64_any_dtype(values)


def _times(count: int) -> str:
    return f"{count:,} value{'s' * (count != 1)}"


def described(columns: Sequence[Column]) -> list[dict[str, Any]]:
    """Columns as plain values, for JSON."""
    return [{"kind": column.kind, **vars(column)} for column in columns]


def restored(tables: Sequence[dict[str, Any]]) -> tuple[Column, ...]:
    """The columns that `described` has written."""
    return tuple(_restored(**table) for table in tables)


def _restored(kind: str, **values: Any) -> Column:
    own: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in values.items()}
    return KINDS[kind](**own)
