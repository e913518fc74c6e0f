"""Parts of an experiment that do not depend on each other, side by side on all cores."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import torch

from coterie.engines import find_device
from coterie_lab.reproduce.notebook import Notebook


def pool() -> Executor:
    """Processes that compute with one thread each."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(os.cpu_count(), context, initializer=torch.set_num_threads, initargs=(1,))


def side_by_side(
    work: Callable[..., Any], cells: Mapping[str, tuple[Any, ...]], device: str, notebook: Notebook
) -> list[Any]:
    """Return what `work` gives for the arguments of every cell; on a GPU one cell is computed after the other.

    Args:
        work: A function that another process can import.
        cells: The arguments, by the name under which the result is stored.
        device: "auto", "cpu" or "cuda".
        notebook: Stores the cells that are done.
    """
    with ThreadPoolExecutor(1) if find_device(device).type == "cuda" else pool() as workers:
        waiting = {n: workers.submit(work, *args) for n, args in cells.items() if n not in notebook.entries}
        return [notebook.entry(name, lambda name=name: waiting[name].result()) for name in cells]
