"""Benchmark of scale: seconds per round and peak memory against the number of clients, whose rows are in files."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from coterie import IFCA, MixedEffects
from coterie.core.federation import Federation
from coterie.core.task import Task
from coterie.data.synthetic import linear_truth
from coterie.models import Linear
from coterie.runs.fit import fit
from coterie.storage.packed import Packed
from coterie_lab.bench.speed import peak_mib

SIZES = tuple(10**e for e in range(2, 7))
QUICK = SIZES[:3]
ROWS, FEATURES, GROUPS = 10, 20, 2
ROUNDS = 6  # the first, which also tries out chunk sizes, is not counted; the median of the others is
WRITTEN = 10_000  # clients that are generated and written together


def measure(*, quick: bool = False) -> list[dict[str, Any]]:
    """Return one row per number of clients, as `coterie bench scale --json` prints them.

    The method is IFCA with k=2 on a linear model, with 10 rows of 20 features per client; all clients take part in
    every round, on a CPU. Beside it is a round of MixedEffects with k=1, an iteration of EM. Each size runs in a
    separate process, so that its peak memory is measured separately.

    Args:
        quick: Whether to measure up to 10,000 clients only.
    """
    return [_in_a_process(m) for m in (QUICK if quick else SIZES)]


def slope(rows: list[dict[str, Any]]) -> float:
    """Return the power of the number of clients with which seconds grow, from 1,000 clients on: 1 is linear.

    Args:
        rows: The rows that `measure` returned.

    Example:
        >>> rows = [{"clients": 10**e, "seconds": 5.0 * 100**e} for e in (3, 4, 5)]
        >>> round(slope(rows), 3)
        2.0
    """
    large = [row for row in rows if row["clients"] >= 1000]
    found = statistics.linear_regression(
        [math.log(row["clients"]) for row in large], [math.log(row["seconds"]) for row in large]
    )
    return found.slope


def one_size(clients: int, folder: Path) -> dict[str, Any]:
    """Write a federation, train on it, and return the time and memory that this took.

    Args:
        clients: Number of clients.
        folder: Folder for the federation, which must not exist yet.
    """
    begin = time.perf_counter()
    federation = Federation.create(folder, mixture(clients), groups=(i % GROUPS for i in range(clients)))
    written = time.perf_counter() - begin
    algorithm = IFCA(GROUPS, lr=0.02, init="random")
    task = Task.regressor(Linear(FEATURES, 1))
    run = fit(algorithm, task, federation, rounds=ROUNDS, device="cpu")
    peak = peak_mib(torch.device("cpu"))
    effects = fit(MixedEffects(tol=0), task, federation, rounds=ROUNDS, device="cpu", evaluations=1)
    return {
        "clients": clients,
        "seconds": statistics.median(row["seconds"] for row in run.history[1:]),
        "effects_seconds": statistics.median(row["seconds"] for row in effects.history[1:]),
        "peak_mib": peak,
        "file_mib": sum(file.stat().st_size for file in folder.iterdir()) / 2**20,
        "write_seconds": written,
        "ari": run.ari,
    }


def mixture(clients: int) -> Iterator[Packed]:
    """Yield the clients of a mixture of linear regressions in pieces; consecutive clients are in different groups.

    Args:
        clients: Number of clients.
    """
    g = torch.Generator().manual_seed(0)
    theta = linear_truth(FEATURES, GROUPS, scale=1.0, seed=0)
    for first in range(0, clients, WRITTEN):
        own = torch.arange(first, min(first + WRITTEN, clients))
        x = torch.randn(len(own) * ROWS, FEATURES, generator=g)
        y = (x * theta[own % GROUPS].repeat_interleave(ROWS, 0)).sum(1)
        yield Packed(x, y, torch.arange(len(own) + 1) * ROWS)


def _in_a_process(clients: int) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", __name__, str(clients), f"{folder}/federation"]
        return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(one_size(int(sys.argv[1]), Path(sys.argv[2]))))
