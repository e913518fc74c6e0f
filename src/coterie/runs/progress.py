"""One bar that tells how a run is going, in a terminal or a notebook."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

from coterie.core.bars import bar_class, in_notebook, stream, watched

FORMAT = "{desc} |{bar}| round {n_fmt}/{total_fmt}{postfix} [{elapsed}<{remaining}]"  # fits into 80 columns


class Progress:
    """A bar that is updated in place after every round, as long as its `with` block lasts.

    It is shown to people only: where standard error is neither a terminal nor a notebook's, nothing is written. The
    block ends with a whole line, however it is left, so that an error message begins on a line of its own.

    Args:
        name: Of the method.
        rounds: How many rounds there are to do.
        metric: The name of the score, as in the rows.
        device: Where the run takes place.
        hidden: Whether to show nothing at all, as in a process that helps another one with a run.
    """

    def __init__(self, name: str, rounds: int, metric: str, device: str, *, hidden: bool = False) -> None:
        self.name, self.rounds, self.metric, self.device = name, rounds, metric, device
        self.hidden = hidden
        self._told: dict[str, str] = {}

    def __enter__(self) -> Self:
        self._bar = bar_class()(
            desc=self.name,
            total=self.rounds,
            bar_format=FORMAT,
            disable=self.hidden or not watched(),
            file=stream(),
            dynamic_ncols=not in_notebook(),
            miniters=1,
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        bar = self._bar
        if kind is None and bar.n < self.rounds:  # it needed no more: not the red bar of a failure
            bar.total = bar.n
            bar.set_postfix_str(f"{self._line()}, done early", refresh=False)
        bar.leave = bar.n > 0  # a run that could not begin leaves no bar
        bar.close()

    def __call__(self, row: dict[str, Any]) -> None:
        """Show this row of the history."""
        if row["loss"] is not None:
            self._told["loss"] = f"loss {row['loss']:.4f}"
        if row.get(self.metric) is not None:
            self._told["score"] = f"{self.metric} {row[self.metric]:.3f}"
        self._told["groups"] = f"{row['groups']} group{'' if row['groups'] == 1 else 's'}"
        bar = self._bar
        if not bar.n:  # a run that is resumed begins later, and its speed is that of its own rounds
            bar.n = bar.initial = row["round"] - 1
        bar.set_postfix_str(self._line(), refresh=False)
        bar.update(row["round"] - bar.n)

    def aside(self) -> AbstractContextManager[None]:
        """Take the bar away while others write; below what they have written it goes on."""
        return nullcontext() if self._bar.disable else self._bar.external_write_mode(file=sys.stderr)

    def _line(self) -> str:
        told = (self._told.get(name) for name in ("loss", "score", "groups"))
        return ", ".join([*filter(None, told), self.device])
