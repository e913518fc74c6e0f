"""Bars of tqdm's for people who look on: where they are shown, and that they are not."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

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


def counting(name: str, total: int, done: int = 0, *, delay: float = 0, hidden: bool = False) -> Any:
    """A bar of tqdm's that counts pieces of work, shown to people only.

    Args:
        name: Of the work.
        total: How many pieces there are.
        done: How many were done before.
        delay: Seconds that it must take to be shown.
        hidden: Whether to show nothing at all.
    """
    hidden = hidden or not watched()
    return bar_class()(desc=name, total=total, initial=done, disable=hidden, file=stream(), leave=False, delay=delay)


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")  # a terminal's shell has none, and a library that loads IPython has no shell


def watched() -> bool:
    """Whether somebody looks at bars here."""
    return not _quiet.get() and (in_notebook() or sys.stderr.isatty())


def stream() -> Any:
    """Where bars are written; a notebook shows standard error as if something were wrong."""
    return sys.stdout if in_notebook() else sys.stderr


def bar_class() -> Any:
    """The bar of tqdm that suits this place: a widget in notebooks that can show one, else text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that notebooks could have widgets is no matter for whoever trains
        from tqdm.auto import tqdm
    return tqdm
