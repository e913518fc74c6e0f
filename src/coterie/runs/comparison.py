"""What a comparison of candidates says: a table, a picture, and which candidate to take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from coterie.core.card import in_bytes
from coterie.core.method import Method
from coterie.methods.personal import Personal
from coterie.runs import comparison_plots, plots
from coterie.runs.candidates import ALL, ALONE, Simplicity
from coterie.runs.display import spelled
from coterie.runs.hurt import Hurt, worst_tenth

if TYPE_CHECKING:
    import pandas as pd

TINY = 1e-30  # what nothing is divided by
NEAR, POINT = 0.05, 0.01  # more error, or less accuracy, with which none is as good, however wide the standard error
SAME = 0.001  # more error, with which it is as good, however narrow the standard error


class Cell(NamedTuple):
    """A candidate on one split.

    Attributes:
        score: Each client's score on rows that trained nothing (m,); NaN where it has none.
        error: The same so that less is better (m,).
        new: Whether the client was held out as a whole (m,).
        groups: How many clusters have members.
        seconds: Of training.
        sent: Bytes, up and down.
        warnings: What the run had to say against itself.
        failed: Why there are no scores; None where there are.
    """

    score: np.ndarray
    error: np.ndarray
    new: np.ndarray
    groups: int = 0
    seconds: float = 0.0
    sent: int = 0
    warnings: tuple[str, ...] = ()
    failed: str | None = None


class Figure(NamedTuple):
    """A mean over clients and splits, and its standard error."""

    mean: float
    se: float

    @classmethod
    def of(cls, values: np.ndarray) -> Figure:
        """The mean of values (splits, m), NaN where there is none: over splits for every client, then over clients.

        The standard error is that over clients; where splits differ by more than their clients explain, as those of a
        method do that does not always find the groups, it is the one clustered both ways (Cameron, Gelbach and Miller
        2011): the variances over clients and over splits, less that of single values.

        Example:
            >>> Figure.of(np.array([[1.0, 3.0], [1.0, np.nan]]))
            Figure(mean=2.0, se=1.0)
        """
        scored = ~np.isnan(values)
        if not scored.any():
            return cls(float("nan"), float("nan"))
        clients, splits = _means(values, scored, 0), _means(values, scored, 1)
        both = _variance(clients) + _variance(splits) - _variance(values[scored])
        variance = max(_variance(clients), both if len(splits) > 1 else 0.0)
        return cls(float(clients.mean()), math.sqrt(variance))


class Row(NamedTuple):
    """A candidate of a comparison.

    Attributes:
        name: Its name.
        known: The score on held-out rows of known clients.
        new: The score of clients that were held out as a whole, each placed by a few of its rows.
        more: By how much the error of both is larger than the best candidate's, as a share of that, or in points of
            accuracy; its standard error is that of the paired difference.
        worst: The score of the tenth of known clients that are served worst.
        hurt: Known clients that are served worse than with one model for all; None if that is no candidate.
        hurt_alone: The same beside one model each.
        groups: How many clusters have members, on average.
        seconds: Of training, on average.
        sent: Bytes up and down, on average.
        failed: Why there are no figures; None where there are.
    """

    name: str
    known: Figure
    new: Figure
    more: Figure
    worst: float
    hurt: Hurt | None
    hurt_alone: Hurt | None
    groups: float
    seconds: float
    sent: float
    failed: str | None


@dataclass(frozen=True)
class Comparison:
    """Candidates on the same splits.

    Attributes:
        methods: The candidates by name.
        metric: The name of the score.
        cells: For every candidate, what it came to on each split.
    """

    methods: Mapping[str, Method]
    metric: str
    cells: Mapping[str, list[Cell]]

    def __post_init__(self) -> None:
        if not self._sound:
            raise ValueError(f"compare: all candidates failed: {'; '.join(self._failures())}")

    # --- which one to take ---------------------------------------------------------------------------------------

    @cached_property
    def recommended(self) -> str:
        """The simplest candidate that is as good as the best.

        That is one whose error is larger by no more than one standard error of the paired difference, and by no more
        than 5 %, or a point of accuracy: with few clients a standard error is wide, and simplicity is not worth what it
        then hides. A thousandth counts for nothing. Error is the mean over all clients that score, known and new: the
        share of clients that is held out as a whole is what new clients count.
        """
        near = [n for n in self._sound if self._is_near(self._share(n))]
        return min(near, key=lambda n: (Simplicity.of(self.methods[n]), self._gap(n).mean))

    def _is_near(self, share: Figure) -> bool:
        return share.mean <= min(max(share.se, SAME), POINT if self.metric == "accuracy" else NEAR)

    @property
    def method(self) -> Method:
        """The recommended method."""
        return self.methods[self.recommended]

    @cached_property
    def best(self) -> str:
        """The candidate with the least error."""
        return min(self._sound, key=lambda n: Figure.of(self._errors(n)).mean)

    @cached_property
    def reason(self) -> str:
        """Why the recommended candidate is recommended, in a few sentences."""
        own = Simplicity.of(self.method)
        simpler = [n for n in self._sound if Simplicity.of(self.methods[n]) < own]
        if self.recommended == self.best:
            said = f"{self.recommended} has the least error"
        else:
            said = (
                f"{self.recommended} is the simplest candidate as good as the best, {self.best} "
                f"({_more(self._share(self.recommended))})"
            )
        if simpler:
            nearest = min(simpler, key=lambda n: self._gap(n).mean)
            said += f"; of those that are simpler the best is {nearest}, with {_more(self._share(nearest))}"
        return f"{self._verdict}: {said}."

    @property
    def _verdict(self) -> str:
        if Simplicity.of(self.method).kind == ALONE:
            return "Do not share"
        return "Cluster" if self._row(self.recommended).groups > 1 else "Do not cluster"

    # --- what is shown -------------------------------------------------------------------------------------------

    @cached_property
    def rows(self) -> list[Row]:
        """The candidates, from the simplest to the most complicated."""
        return [self._row(name) for name in sorted(self.methods, key=lambda n: Simplicity.of(self.methods[n]))]

    def __str__(self) -> str:
        lines = [self._columns(), *(self._texts(row) for row in self.rows)]
        wide = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = ["  ".join([line[0].ljust(wide[0]), *map(str.rjust, line[1:], wide[1:])]).rstrip() for line in lines]
        return "\n".join([*table, *self._failures(), "", self.reason])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def line(texts: list[str], tag: str) -> str:
            return "".join(f"<{tag}>{escape(text)}</{tag}>" for text in texts)

        rows = "".join(
            f"<tr>{line(self._texts(row), 'th' if row.name == self.recommended else 'td')}</tr>" for row in self.rows
        )
        said = "".join(f"<p>{escape(text)}</p>" for text in [*self._failures(), self.reason])
        return f"<div><table><tr>{line(self._columns(), 'th')}</tr>{rows}</table>{said}</div>"

    def to_frame(self) -> pd.DataFrame:
        """One row per candidate: its figures, unrounded."""
        import pandas as pd

        return pd.DataFrame([_flat(row) for row in self.rows]).assign(
            recommended=[row.name == self.recommended for row in self.rows]
        )

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values, for JSON."""
        rows = [{k: _plain(v) for k, v in _flat(row).items()} for row in self.rows]
        return {
            "metric": self.metric,
            "clients": next(len(cell.score) for own in self.cells.values() for cell in own),
            "splits": max(len(own) for own in self.cells.values()),
            "recommended": self.recommended,
            "best": self.best,
            "reason": self.reason,
            "candidates": [{**row, "method": spelled(self.methods[row["name"]])} for row in rows],
        }

    def plot(self, path: str | Path | None = None) -> Any:
        """Draw all candidates: their scores with standard errors, and whom they hurt.

        Args:
            path: A .png, .jpg, .svg or .pdf to write; None returns a figure, which a notebook shows by itself.
        """
        fig = comparison_plots.candidates([_flat(row) for row in self.rows], self.metric, self.recommended, self.reason)
        if path is not None:
            plots.save(fig, Path(path))
        return fig

    # --- figures -------------------------------------------------------------------------------------------------

    @cached_property
    def _sound(self) -> list[str]:
        """The candidates that have figures on every split."""
        return [n for n, own in self.cells.items() if all(c.failed is None for c in own)]

    @cached_property
    def _least(self) -> float:
        return Figure.of(self._errors(self.best)).mean

    def _errors(self, name: str) -> np.ndarray:
        """The errors of a candidate (splits, m)."""
        return np.stack([cell.error for cell in self.cells[name]])

    def _gap(self, name: str) -> Figure:
        """By how much a candidate's error is larger than the best's, with the standard error of paired differences."""
        return Figure.of(self._errors(name) - self._errors(self.best))

    def _share(self, name: str) -> Figure:
        """The same as a share of the best's error; of accuracy in points, for the best may make next to no errors."""
        gap, least = self._gap(name), max(self._least, TINY)
        whole = 1.0 if self.metric == "accuracy" else least
        return Figure(gap.mean / whole, gap.se / whole)

    def _known(self, name: str) -> np.ndarray:
        """The errors of a candidate on known clients' rows, by client (m,); NaN for one that was always held out."""
        own = np.where(np.stack([cell.new for cell in self.cells[name]]), np.nan, self._errors(name))
        return _over_splits(own)

    def _hurt(self, name: str, kind: int) -> Hurt | None:
        """Whom a candidate hurts beside the one of a kind; None where there is none, and of that one itself."""
        than = next((n for n in self._sound if Simplicity.of(self.methods[n]).kind == kind), None)
        return None if than in (None, name) else Hurt.of(self._known(name), self._known(than))

    def _row(self, name: str) -> Row:
        own, unknown = self.cells[name], Figure(float("nan"), float("nan"))
        if failed := next((cell.failed for cell in own if cell.failed is not None), None):
            nothing = float("nan")
            return Row(name, unknown, unknown, unknown, nothing, None, None, nothing, nothing, nothing, failed)
        score, new = np.stack([cell.score for cell in own]), np.stack([cell.new for cell in own])
        known = np.where(new, np.nan, score)
        return Row(
            name=name,
            known=Figure.of(known),
            new=Figure.of(np.where(new, score, np.nan)),
            more=self._share(name),
            worst=worst_tenth(_over_splits(known), self._known(name)),
            hurt=self._hurt(name, ALL),
            hurt_alone=self._hurt(name, ALONE),
            groups=float(np.mean([cell.groups for cell in own])),
            seconds=float(np.mean([cell.seconds for cell in own])),
            sent=float(np.mean([cell.sent for cell in own])),
            failed=None,
        )

    # --- text ----------------------------------------------------------------------------------------------------

    def _columns(self) -> list[str]:
        return [
            "candidate", self.metric, "new clients", "more error", "worst tenth",
            "hurt vs all", "vs each", "groups", "s", "sent",
        ]  # fmt: skip

    def _texts(self, row: Row) -> list[str]:
        name = f"{row.name} *" if row.name == self.recommended else row.name
        if row.failed:
            return [name, "failed", *[""] * (len(self._columns()) - 2)]
        return [
            name, _plus_minus(row.known), _plus_minus(row.new), "" if row.name == self.best else _percent(row.more),
            f"{row.worst:.4g}", _of_clients(row.hurt), _of_clients(row.hurt_alone), f"{row.groups:.3g}",
            f"{row.seconds:.2f}", in_bytes(row.sent),
        ]  # fmt: skip

    def _failures(self) -> list[str]:
        failed = {n: next((c.failed for c in own if c.failed), None) for n, own in self.cells.items()}
        return [f"{name} failed: {why}" for name, why in failed.items() if why]


@dataclass(frozen=True, repr=False)
class ChosenK(Comparison):
    """One method with several numbers of groups, on the same splits."""

    @property
    def k(self) -> int:
        """The fewest groups that are as good as the best number of them."""
        return number_of_groups(self.method)

    def plot(self, path: str | Path | None = None) -> Any:
        """Draw the score against the number of groups, with standard errors.

        Args:
            path: A .png, .jpg, .svg or .pdf to write; None returns a figure, which a notebook shows by itself.
        """
        rows = [{**_flat(row), "k": number_of_groups(self.methods[row.name])} for row in self.rows if not row.failed]
        fig = comparison_plots.numbers_of_groups(rows, self.metric, self.k)
        if path is not None:
            plots.save(fig, Path(path))
        return fig


def number_of_groups(method: Method) -> int:
    """The k of a method, or of the one that it wraps.

    Raises:
        ValueError: It has none.
    """
    if isinstance(method, Personal):
        return number_of_groups(method.method)
    if not isinstance(k := getattr(method, "k", None), int):
        raise ValueError(f"choose_k: {type(method).__name__} has no number of groups k that could be chosen")
    return k


def _means(values: np.ndarray, scored: np.ndarray, axis: int) -> np.ndarray:
    """Means along an axis, of what has any values there."""
    count = scored.sum(axis)
    return np.where(scored, values, 0.0).sum(axis)[count > 0] / count[count > 0]


def _over_splits(values: np.ndarray) -> np.ndarray:
    """The mean over splits (m,); NaN for a client that has no value in any."""
    count = (~np.isnan(values)).sum(0)
    return np.where(count > 0, np.nansum(values, 0) / np.maximum(count, 1), np.nan)


def _variance(values: np.ndarray) -> float:
    """Of a mean of these values."""
    return float(values.var(ddof=1) / len(values)) if len(values) > 1 else 0.0


def _flat(row: Row) -> dict[str, Any]:
    """A row in plain columns."""
    return {
        "name": row.name, "known": row.known.mean, "known_se": row.known.se, "new": row.new.mean, "new_se": row.new.se,
        "more": row.more.mean, "more_se": row.more.se, "worst_tenth": row.worst,
        "hurt": row.hurt and row.hurt.share, "hurt_by": row.hurt and row.hurt.mean,
        "hurt_alone": row.hurt_alone and row.hurt_alone.share, "hurt_alone_by": row.hurt_alone and row.hurt_alone.mean,
        "groups": row.groups, "seconds": row.seconds, "bytes": row.sent, "failed": row.failed,
    }  # fmt: skip


def _plain(value: Any) -> Any:
    """A value for JSON, which has no numbers that are not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _plus_minus(figure: Figure) -> str:
    return "" if math.isnan(figure.mean) else f"{figure.mean:.4f} ± {figure.se:.4f}"


def _percent(figure: Figure) -> str:
    return f"{100 * figure.mean:+.1f} ± {100 * figure.se:.1f} %"


def _more(figure: Figure) -> str:
    return f"{100 * figure.mean:.1f} ± {100 * figure.se:.1f} % more error"


def _of_clients(hurt: Hurt | None) -> str:
    return "" if hurt is None else f"{100 * hurt.share:.0f} %"
