"""Parts of an experiment that do not depend on each other, side by side: on all cores, or sharing a GPU."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor
from typing import Any

import torch

from coterie.engines import find_device
from coterie.engines.store import free_memory
from coterie_lab.reproduce.notebook import Notebook

SHARERS = 3  # processes that share a GPU at most: while one prepares its next kernels, those of another run
ROOM = 40 * 2**30  # bytes of a GPU's memory for each of them


def pool(device: str = "cpu") -> Executor:
    """Processes that compute with one thread each: one for each core, or some that share a GPU.

    Args:
        device: "auto", "cpu" or "cuda".
    """
    place, count = find_device(device), os.cpu_count()
    if place.type == "cuda":
        count = max(1, min(SHARERS, free_memory(place) // ROOM))
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(count, context, initializer=torch.set_num_threads, initargs=(1,))


def side_by_side(
    work: Callable[..., Any], cells: Mapping[str, tuple[Any, ...]], device: str, notebook: Notebook
) -> list[Any]:
    """Return what `work` gives for the arguments of every cell.

    Args:
        work: A function that another process can import.
        cells: The arguments, by the name under which the result is stored.
        device: "auto", "cpu" or "cuda".
        notebook: Stores the cells that are done.
    """
    with pool(device) as workers:
        waiting = {n: workers.submit(work, *args) for n, args in cells.items() if n not in notebook.entries}
        return [notebook.entry(name, lambda name=name: waiting[name].result()) for name in cells]
