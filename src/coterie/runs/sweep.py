"""A sweep: one configuration over a grid of settings and several seeds, each run in a process and a folder of its own.

sweep.toml                the configuration, and the grid and the seeds of the last command
algorithm.k=2,seed=0/     a run folder
algorithm.k=2,seed=0.log  what the run wrote to standard error, if it wrote anything
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
from collections.abc import Generator, Iterable
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch

from coterie.core.settings import check_type
from coterie.engines import find_device, find_engine
from coterie.runs.compare import SEED, flattened, short
from coterie.runs.config import build, build_callbacks, build_federation, build_settings, set_value
from coterie.runs.fit import fit
from coterie.runs.folder import is_run, to_toml
from coterie.storage.reading import read_toml
from coterie.storage.snapshot import write_text

DESCRIPTION = "sweep.toml"
GRACE = 20  # seconds that a run has to write its checkpoint when it is stopped
PRELOADED = (  # what most runs import, some of it only when they need it: together several seconds
    "coterie.runs.sweep", "coterie.methods", "sklearn.datasets", "sklearn.metrics", "torch._dynamo"
)  # fmt: skip
PLAIN = re.compile(r"[\w.+-]{1,40}")  # a value that can be a part of a folder's name as it is


class Point(NamedTuple):
    """One run of a sweep.

    Attributes:
        name: The name of its folder.
        tables: Its configuration.
    """

    name: str
    tables: dict[str, Any]


def points_of(tables: dict[str, Any], grid: dict[str, list[Any]], seeds: int) -> list[Point]:
    """Return every run of a sweep: each combination of the values, with each seed.

    Args:
        tables: The configuration.
        grid: The values of every setting that is varied, by dotted name.
        seeds: How many seeds, counted up from that of the configuration.

    Example:
        >>> [point.name for point in points_of({"run": {"seed": 3}}, {"algorithm.k": [2, 4]}, seeds=2)]
        ['algorithm.k=2,seed=3', 'algorithm.k=2,seed=4', 'algorithm.k=4,seed=3', 'algorithm.k=4,seed=4']
    """
    first = _first_seed(tables)
    found = []
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        for seed in range(first, first + seeds):
            own = copy.deepcopy(tables)
            for name, value in {**chosen, SEED: seed}.items():
                set_value(own, name, value)
            words = [f"{name}={_in_a_name(value)}" for name, value in {**chosen, "seed": seed}.items()]
            found.append(Point(",".join(words), own))
    if len({point.name for point in found}) < len(found):
        raise ValueError("a value stands twice in the grid")
    return found


def check(points: list[Point]) -> None:
    """Refuse a sweep with a run whose configuration is bad. Every data set is made once.

    Args:
        points: The runs.

    Raises:
        ValueError: A configuration is bad.
    """
    for point in points:
        _check_apart(build_callbacks(point.tables.get("callbacks", [])))
    by_data: dict[str, list[Point]] = {}
    for point in points:
        by_data.setdefault(json.dumps(point.tables.get("data"), sort_keys=True), []).append(point)
    for sharing in by_data.values():
        built = [build_settings(point.tables) for point in sharing]
        federation = build_federation(sharing[0].tables["data"])
        for algorithm, task, run in built:
            algorithm.check_task(task)
            federation.check(task)
            find_device(run.get("device", "auto"))
            find_engine(run.get("executor", "vectorised"))


def _check_apart(callbacks: list[Any]) -> None:
    """Refuse callbacks by which all runs would write to one folder."""
    for callback in callbacks:
        if getattr(callback, "folder", None) is not None:
            raise ValueError(
                f"[[callbacks]] {type(callback).__name__}: all runs of a sweep would write to the folder "
                f"'{callback.folder}'; leave it out, and each run folder has its own"
            )


def default_jobs(points: list[Point]) -> int:
    """Return how many runs to do at once: one per core, or one where they share a GPU and its memory.

    Args:
        points: The runs.
    """
    devices = {point.tables["run"].get("device", "auto") for point in points}
    if any(find_device(device).type == "cuda" for device in devices):
        return 1
    return max(1, min(torch.get_num_threads(), len(points)))


def describe_sweep(folder: Path, tables: dict[str, Any], description: dict[str, Any]) -> None:
    """Write what a sweep is, or refuse a folder that is of another one.

    Args:
        folder: The sweep's folder.
        tables: Its configuration, which must be that of all its runs.
        description: Its grid and its seeds, which may grow from one command to the next.

    Raises:
        ValueError: The folder holds something else, or a sweep of another configuration.
    """
    tables = {name: table for name, table in tables.items() if name != "callbacks"}  # which a resumed run may change
    if (folder / DESCRIPTION).is_file():
        _check_same(folder, tables)
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not the folder of a sweep; choose another with --out")
    write_text(folder / DESCRIPTION, to_toml({**tables, "sweep": description}))


def execute(points: Iterable[Point], folder: Path, jobs: int) -> Generator[tuple[Point, str | None], None, None]:
    """Do runs in processes of their own, several at once; unfinished ones are resumed.

    Args:
        points: The runs.
        folder: The sweep's folder.
        jobs: How many to do at once. They share the threads that one run would have.

    Yields:
        Every run as soon as it has ended, with its error in one line, or None if it is finished.
    """
    context = _context()
    threads = max(1, torch.get_num_threads() // jobs)
    waiting = iter(points)
    running: dict[BaseProcess, Point] = {}
    try:
        while True:
            for point in itertools.islice(waiting, jobs - len(running)):
                process = context.Process(target=_work, args=(point, folder, threads), daemon=True)
                process.start()
                running[process] = point
            if not running:
                return
            ended = wait([process.sentinel for process in running])
            for process in [process for process in running if process.sentinel in ended]:
                process.join()
                point = running.pop(process)
                yield point, _error(process.exitcode, _log(folder, point))
    finally:
        _stop(running)


def _work(point: Point, folder: Path, threads: int) -> None:
    """Do a run: all that a process of a sweep does."""
    with _log(folder, point).open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the first one stops the others
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the loop writes a checkpoint
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    out = folder / point.name
    try:
        built = build(point.tables)
        keep = {"out": out, "resume": is_run(out), "callbacks": built.callbacks}
        fit(built.algorithm, built.task, built.federation, **keep, **built.run)
    except (ValueError, OSError) as error:
        sys.stderr.write(" ".join(str(error).split()) + "\n")
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _stop_with_parent() -> None:
    """Stop this process when the one that started it is gone: two must not write to one run folder."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def _stop(running: dict[BaseProcess, Point]) -> None:
    """Stop processes, and leave them time to write their checkpoints."""
    for process in running:
        process.terminate()
    for process in running:
        process.join(GRACE)
        process.kill()
        process.join()


def _error(code: int | None, log: Path) -> str | None:
    """Return the last line that a failed process wrote; None if it did its work."""
    written = log.read_text(encoding="utf-8", errors="replace").strip() if log.is_file() else ""
    if not written:
        log.unlink(missing_ok=True)
    if code == 0:
        return None
    if code == 1 and written:
        return written.splitlines()[-1]
    return f"its process was killed by signal {-code}" if code and code < 0 else f"its process ended with code {code}"


def _context() -> ForkServerContext | SpawnContext:
    """Return how processes are started: on Linux as copies of one that has imported everything already."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def _log(folder: Path, point: Point) -> Path:
    return folder / f"{point.name}.log"


def _first_seed(tables: dict[str, Any]) -> int:
    run = tables.get("run")
    seed = run.get("seed", 0) if isinstance(run, dict) else 0
    check_type("[run] seed", seed, int)
    return seed


def _in_a_name(value: Any) -> str:
    """Return a value as a part of a folder's name; one with other characters ends with a digest of it."""
    text = short(value)
    if PLAIN.fullmatch(text):
        return text
    digest = hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=3).hexdigest()
    return "-".join([*re.findall(r"[\w.+]+", text[:40]), digest])


def _check_same(folder: Path, tables: dict[str, Any]) -> None:
    described = read_toml(folder / DESCRIPTION, {str: {}})
    described.pop("sweep", None)
    old, new = flattened(described), flattened(tables)
    for name in [*old, *new]:
        if old.get(name) != new.get(name):
            raise ValueError(
                f"{folder} holds a sweep with {name} = {old.get(name)!r}, now it is {new.get(name)!r}; "
                "choose another folder with --out, or delete its runs with --overwrite"
            )
