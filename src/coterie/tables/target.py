"""What is predicted from a table: a number, the logarithm of one, or one of several classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from coterie.tables.column_sums import ColumnSums, Series, as_numbers, as_words, in_order
from coterie.tables.columns import DECORATED

Kind = Literal["auto", "number", "log", "classes"]
KINDS = ("auto", "number", "log", "classes")
CLASSES = 100  # that a target may have
MOST_WORDS = 0.5  # of the values: with fewer words, the one that is looked at may be an exception among numbers


@dataclass(frozen=True)
class Target:
    """What is predicted.

    Attributes:
        name: The column.
        classes: Its values in their order, where it is one of several; empty where it is a number.
        log: Whether it is the logarithm of a number that is learnt.
        mean: Of what is learnt, over the rows that were summed up.
        deviation: The same.
    """

    name: str
    classes: tuple[str, ...] = ()
    log: bool = False
    mean: float = 0.0
    deviation: float = 1.0

    @classmethod
    def of(cls, name: str, sums: ColumnSums, kind: Kind = "auto") -> Target:
        """Tell what a target is.

        Words, and any two values, are classes. Numbers are learnt as they are; if all are above 0 and stretch far to
        the right, as sales, incomes and waiting times do, their logarithms are.

        Args:
            name: The column.
            sums: What is known of it.
            kind: "number", "log" or "classes" where it is not to be found out.
        """
        if kind not in KINDS:
            raise ValueError(f"kind must be {', '.join(KINDS[:-1])} or {KINDS[-1]}, got {kind!r}")
        if not sums.known:
            raise ValueError(f"target '{name}' has no values")
        two = sums.levels is not None and len(sums.levels) == 2
        if kind == "auto" and sums.words > MOST_WORDS * sums.known and DECORATED.match(sums.sample):
            raise ValueError(
                f"target '{name}' holds '{sums.sample}': if it is a number, write digits and a decimal point only; "
                "if it is a class, say so by kind 'classes'"
            )
        if kind == "classes" or (kind == "auto" and (sums.words or two)):
            return cls(name, _classes(name, sums))
        if sums.words:
            raise ValueError(f"target '{name}' holds words such as '{sums.sample}', and is to be a number")
        if kind == "log" and sums.positive < sums.numbers:
            raise ValueError(f"target '{name}' has numbers that are not above 0, which have no logarithm")
        if not sums.squarable:
            raise ValueError(f"target '{name}' holds numbers too large to be squared")
        log = kind == "log" or (kind == "auto" and sums.skewed)
        total, squares, _ = sums.powers[int(log)]
        mean = total / sums.numbers
        variance = squares / sums.numbers - mean**2
        if variance <= 1e-12 * max(squares / sums.numbers, np.finfo(float).tiny):
            constant = sums.levels is not None and len(sums.levels) == 1
            what = "has one value only" if constant else "varies by less than a millionth of its size"
            raise ValueError(f"target '{name}' {what}: nothing can be learnt")
        return cls(name, (), log, float(mean), float(np.sqrt(variance)))

    @classmethod
    def of_rows(cls, values: Series, kind: Kind = "auto") -> Target:
        """The target of these values.

        Args:
            values: The column.
            kind: "number", "log" or "classes" where it is not to be found out.
        """
        numbers = np.nan_to_num(as_numbers(values), posinf=0.0, neginf=0.0)
        return cls.of(str(values.name), ColumnSums.of(values, numbers), kind)

    @property
    def told(self) -> str:
        """What is learnt, in words."""
        return f"log {self.name}" if self.log else self.name

    def encode(self, values: Series) -> tuple[np.ndarray, np.ndarray]:
        """Targets as a model takes them, and whether there is one (n,)."""
        if not self.classes:
            number = as_numbers(values)
            if self.log:
                if (number <= 0).any():  # NaN is not
                    raise ValueError(f"target '{self.name}' has {number[number <= 0][0]:g}, which has no logarithm")
                number = np.log(number)
            known = np.isfinite(number)
            return ((np.where(known, number, 0) - self.mean) / self.deviation).astype(np.float32), known
        number = {word: i for i, word in enumerate(self.classes)}
        codes = np.array([number.get(word, -1) for word in as_words(values)])
        if (strange := (codes < 0) & values.notna().to_numpy()).any():
            word = as_words(values)[strange][0]
            raise ValueError(f"target '{self.name}' has '{word}', which was not among its values in training")
        return np.maximum(codes, 0), codes >= 0

    def decode(self, values: np.ndarray) -> np.ndarray:
        """What a model says of a number, in the units of the table."""
        own = values * self.deviation + self.mean
        return np.exp(own) if self.log else own


def _classes(name: str, sums: ColumnSums) -> tuple[str, ...]:
    """The values of a target in their order."""
    levels = sums.levels
    if levels is None or len(levels) > CLASSES:
        if sums.numbers > sums.words > 0:
            lost = f"{sums.words:,} value{'s' * (sums.words > 1)} such as '{sums.sample}'"
            raise ValueError(f"target '{name}' holds numbers, but for {lost}: leave them empty or correct them")
        many = "too many" if levels is None else f"{len(levels):,}"
        sample = f", such as '{sums.sample}'" if sums.sample else ""
        raise ValueError(
            f"target '{name}' has {many} different values{sample}; there may be at most {CLASSES} classes: "
            "is it the right column?"
        )
    if len(levels) == 1:
        raise ValueError(f"target '{name}' has one value only, '{next(iter(levels))}': nothing can be learnt")
    return tuple(sorted(levels, key=in_order))
