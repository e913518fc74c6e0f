"""One bar that tells how a run is going, in a terminal or a notebook."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Self

FORMAT = "{desc} |{bar}| round {n_fmt}/{total_fmt}{postfix} [{elapsed}<{remaining}]"  # fits into 80 columns

_quiet: ContextVar[bool] = ContextVar("quiet", default=False)


@contextmanager
def quietly() -> Iterator[None]:
    """Let runs show no bar and log nothing: they are parts of something that has a bar of its own."""
    log = logging.getLogger("coterie")
    token, before = _quiet.set(True), log.disabled
    log.disabled = True
    try:
        yield
    finally:
        _quiet.reset(token)
        log.disabled = before


def counting(name: str, total: int, done: int) -> Any:
    """A bar of tqdm's that counts pieces of work, shown to people only.

    Args:
        name: Of the work.
        total: How many pieces there are.
        done: How many were done before.
    """
    return _bar_class()(desc=name, total=total, initial=done, disable=not _watched(), file=_stream(), leave=False)


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
        self._bar = _bar_class()(
            desc=self.name,
            total=self.rounds,
            bar_format=FORMAT,
            disable=self.hidden or not _watched(),
            file=_stream(),
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


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")  # a terminal's shell has none, and a library that loads IPython has no shell


def _watched() -> bool:
    """Whether somebody looks at bars here."""
    return not _quiet.get() and (in_notebook() or sys.stderr.isatty())


def _stream() -> Any:
    """Where bars are written; a notebook shows standard error as if something were wrong."""
    return sys.stdout if in_notebook() else sys.stderr


def _bar_class() -> Any:
    """The bar of tqdm that suits this place: a widget in notebooks that can show one, else text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that notebooks could have widgets is no matter for whoever trains
        from tqdm.auto import tqdm
    return tqdm
