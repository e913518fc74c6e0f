"""Independent pieces of work, several at once in copies of this process."""

from __future__ import annotations

import importlib
import multiprocessing
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar, cast

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

PRELOADED = ("sklearn.metrics", "torch._dynamo")  # what runs import when they need it: once here, not in every copy


def can_copy() -> bool:
    """Whether this process can be copied.

    A copy has all that this process has in memory, so that modules and functions of the user's need no description. It
    does not have its threads, which CUDA cannot do without.
    """
    return sys.platform == "linux" and not torch.cuda.is_available()


def most_jobs() -> int:
    """How many pieces may be done at once: one per thread, or one where processes cannot be copied."""
    return torch.get_num_threads() if can_copy() else 1


def side_by_side(work: Callable[[Item], Result], items: Sequence[Item], jobs: int) -> Iterator[tuple[Item, Result]]:
    """Do a piece of work for every item, and yield each item with its result as soon as it is there.

    Args:
        work: What is done. Its results are sent from process to process.
        items: What it is called with.
        jobs: How many at once, each with one thread; 1 stays in this process.

    Raises:
        ChildProcessError: A copy was killed.
    """
    if jobs == 1:
        yield from ((item, work(item)) for item in items)
        return
    for module in PRELOADED:
        importlib.import_module(module)
    waiting, running = iter(range(len(items))), {}
    copies = [_copy(work, items) for _ in range(jobs)]
    try:
        for pipe, i in zip((pipe for _, pipe in copies), waiting, strict=False):
            pipe.send(i)
            running[pipe] = i
        while running:
            for pipe in cast(list[Connection], wait(list(running))):
                result = _received(pipe)
                yield items[running.pop(pipe)], result
                if (following := next(waiting, None)) is not None:
                    pipe.send(following)
                    running[pipe] = following
    finally:
        for process, pipe in copies:
            pipe.close()
            process.terminate()
            process.join()


def _copy(work: Callable[[Any], Any], items: Sequence[Any]) -> tuple[BaseProcess, Connection]:
    """Start a copy of this process; through the pipe it is told what to do, and sends its results."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(work, items, there), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that threads are not copied: a copy needs none
        process.start()
    there.close()  # so that a copy that is killed ends the pipe
    return process, here


def _serve(work: Callable[[Any], Any], items: Sequence[Any], pipe: Connection) -> None:
    """All that a copy does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the first one stops the others
    torch.set_num_threads(1)
    while True:
        try:
            item = items[pipe.recv()]
        except EOFError:  # the first process is gone
            return
        try:
            pipe.send(work(item))
        except Exception as error:
            pipe.send(error)


def _received(pipe: Any) -> Any:
    try:
        found = pipe.recv()
    except (EOFError, ConnectionError):
        hint = "where memory is short, jobs=1 takes the least"
        raise ChildProcessError(f"a process was killed before its work was done; {hint}") from None
    if isinstance(found, Exception):
        raise found
    return found
