"""One IFCA round, the vectorised executor against the plain loop, in one run: the same work, the same answer.

make bench
"""

from __future__ import annotations

import sys
import time

import torch

import coterie as ct
from coterie.executors import EXECUTORS
from coterie.key import Key
from coterie.tree import flat

MLP = ct.Task.classifier(ct.models.MLP(64, 32, 10))
LINEAR = ct.Task.regressor(ct.models.Linear(20, 1))
WORK = {
    "80 clients × 72 rows, MLP 64-32-10, τ=10": (ct.data.rotated_digits(80), MLP, 4),
    "500 clients × 20 rows, linear d=20, τ=10": (ct.data.linear_mixture(500, 20, 20, 2), LINEAR, 2),
}


def seconds(executor: str, federation: ct.Federation, task: ct.Task, k: int) -> tuple[float, torch.Tensor]:
    """The median of five rounds after one to warm up, and the models after them."""
    algorithm = ct.IFCA(k, lr=0.05, init="random")
    cohort = EXECUTORS[executor](federation, task, Key.of(0), torch.device("cpu"))
    state, times = algorithm.start(task, cohort.at(0), Key.of(0)), []
    for t in range(6):
        begin = time.perf_counter()
        state, _ = algorithm.round(state, cohort.at(t))
        times.append(time.perf_counter() - begin)
    return sorted(times[1:])[2], flat(algorithm.models(state))


for name, (federation, task, k) in WORK.items():
    loop, reference = seconds("sequential", federation, task, k)
    fast, found = seconds("vectorised", federation, task, k)
    gap = float((found - reference).abs().max() / reference.abs().max())
    sys.stdout.write(
        f"{name}: loop {loop:.3f} s, vectorised {fast:.4f} s, {loop / fast:.0f} times faster, gap {gap:.0e}\n"
    )
