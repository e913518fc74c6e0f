"""Units for the columns of a table: mean 0 and standard deviation 1, from sums that add up over parts of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

ROUNDING = 1e-12  # of the mean's square: less variance is what rounding leaves of a constant column


@dataclass(frozen=True)
class Moments:
    """Count, sum and sum of squares of rows: all that a scale is made of, and the same whoever adds up what.

    Attributes:
        count: The number of rows that have a value, of the shape of a row.
        total: Their sum, of the same shape.
        squares: The sum of their squares.

    Example:
        >>> first, second = np.array([[1.0], [2.0], [np.nan]]), np.array([[6.0]])
        >>> Moments.of(first) + Moments.of(second)
        Moments(count=array([3]), total=array([9.]), squares=array([41.]))
    """

    count: np.ndarray
    total: np.ndarray
    squares: np.ndarray

    @classmethod
    def of(cls, x: np.ndarray) -> Self:
        """Add up the rows of an array; what is missing (NaN) does not count.

        Args:
            x: Rows (n, …), of any kind of numbers.
        """
        exact = np.asarray(x, dtype=np.float64)
        there = ~np.isnan(exact)
        known = np.where(there, exact, 0.0)
        return cls(there.sum(0), known.sum(0), np.square(known).sum(0))

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.count + other.count, self.total + other.total, self.squares + other.squares)


@dataclass(frozen=True)
class Scale:
    """From the units of the data to those in which columns have mean 0 and standard deviation 1, and back.

    Attributes:
        mean: Of each column.
        deviation: The standard deviation of each column; 0 where it is constant.

    Example:
        >>> x = np.array([[1.0, 5.0], [3.0, 5.0]])
        >>> scale = Scale.of(Moments.of(x))
        >>> scale(x)
        array([[-1., 0.], [ 1., 0.]])
        >>> scale.undo(scale(x))
        array([[1., 5.], [3., 5.]])
    """

    mean: np.ndarray
    deviation: np.ndarray

    @classmethod
    def of(cls, moments: Moments) -> Self:
        """Make the scale in which the rows that were added up have mean 0 and standard deviation 1.

        Args:
            moments: Of these rows.
        """
        count = np.maximum(moments.count, 1)
        mean = moments.total / count
        variance = moments.squares / count - np.square(mean)
        varies = variance > ROUNDING * np.square(mean)
        return cls(mean, np.where(varies, np.sqrt(np.where(varies, variance, 1.0)), 0.0))

    @property
    def unit(self) -> np.ndarray:
        """What a column is divided by: its deviation, or 1 where it is constant."""
        return np.where(self.deviation > 0, self.deviation, 1.0)

    @classmethod
    def none(cls, *shape: int) -> Self:
        """Make the scale that leaves rows as they are.

        Args:
            shape: Of a row.
        """
        return cls(np.zeros(shape), np.ones(shape))

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Return rows in units of the scale.

        Args:
            x: Rows (n, …) in units of the data.
        """
        return (x - self.mean) / self.unit

    def undo(self, z: np.ndarray) -> np.ndarray:
        """Return rows in units of the data.

        Args:
            z: Rows (n, …) in units of the scale.
        """
        return z * self.unit + self.mean
