"""Clients that change group while a run goes on, and a group that appears: whether `Run.update` finds them.

A run is trained on a first batch of rows of every client, and updated with one batch of fresh rows after the other. In
one of the updates nothing happens, a third of the clients change to another group, or a fourth group appears, of new
clients and of old ones that change to it. Cells (a problem, what happens and a seed) are independent, and are computed
side by side on all cores.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.core.federation import Federation
from coterie.core.key import Key
from coterie.data import digits
from coterie.runs import plots
from coterie.runs.config import build_algorithm, build_task
from coterie.runs.fit import fit
from coterie.runs.run import Run
from coterie_lab.reproduce.notebook import Notebook
from coterie_lab.reproduce.workers import pool

Cell = dict[str, Any]
Batch = Callable[[list[int], Key], list[tuple[Tensor, Tensor]]]
"""Fresh rows of clients, given the group of each."""

TRUTH, ROWS = 0, 1  # streams under a seed's key
GROUPS = 3  # at first
STEADY, CHANGE, APPEAR = "nothing happens", "a third change group", "a fourth group appears"
COMING = 12  # clients that are new in the fourth group
TURNING = 8  # clients that change to it
SOON = 5  # updates in which changes must be found, the one in which they happen being the first


def run(spec: dict[str, Any], device: str, notebook: Notebook) -> dict[str, Any]:
    """Every problem with whatever happens, with every seed.

    Args:
        spec: Table of the experiment.
        device: Not used: cells are small, and there are many.
        notebook: Stores the parts that are done.
    """
    rows, curves = [], []
    with pool() as workers:
        waiting = [
            (problem, event, _cells(workers, spec, problem, event, notebook))
            for problem in spec["problems"]
            for event in (STEADY, CHANGE, APPEAR)
        ]
        for problem, event, cells in waiting:
            name = _name(problem, event)
            found = notebook.entry(name, lambda cells=cells: [cell.result() for cell in cells])
            rows.append(_row(problem, event, found, spec))
            curves.append(_curves(problem, event, found))
    return {"seeds": spec["seeds"], "change": spec["change"], "rows": rows, "curves": curves}


def _cells(
    workers: Executor, spec: dict[str, Any], problem: dict[str, Any], event: str, notebook: Notebook
) -> list[Future[Cell]]:
    """The cells of a problem and an event, one for every seed; none if they are known from before."""
    if _name(problem, event) in notebook.entries:
        return []
    return [workers.submit(cell, spec, problem, event, seed) for seed in spec["seeds"]]


def _name(problem: dict[str, Any], event: str) -> str:
    return f"{problem['name']}: {event}"


# --- one cell -------------------------------------------------------------------------------------------------------


def cell(spec: dict[str, Any], problem: dict[str, Any], event: str, seed: int) -> Cell:
    """A run and its updates: what was found in each.

    Args:
        spec: Table of the experiment.
        problem: Table of the problem.
        event: What happens.
        seed: Of the rows, and of the run.
    """
    batch, before = BATCHES[problem["data"]["name"]](problem["data"], seed), _groups(problem["data"]["clients"])
    after, algorithm, task = _changed(before, event), build_algorithm(problem["algorithm"]), build_task(problem["task"])
    federation = _federation(batch, before, seed, 0)
    first = done = fit(algorithm, task, federation, rounds=problem["rounds"], seed=seed, device="cpu", evaluations=1)
    group_of = _majority(first.labels.tolist(), before)
    wrong, right, alone = set[str | int](), list[list[bool]](), list[float]()
    for number in range(1, spec["updates"] + 1):
        groups = before if number < spec["change"] else after
        federation = _federation(batch, groups, seed, number)
        alone.append(first.evaluate(federation=federation).mean)
        done = done.update(federation, rounds=spec["rounds"], patience=spec["patience"])
        right.append([j == g for j, g in zip(_named(done, group_of, groups), groups, strict=True)])
        here = dict(zip(federation.ids or (), right[-1], strict=True))
        wrong |= {move.client for move in done.moved if not here[str(move.client)]}
    changed = [i for i, g in enumerate(after) if i >= len(before) or g != before[i]]
    others = [i for i in range(len(before)) if i not in changed]
    found = [[each[i] for i in changed] for each in right[spec["change"] - 1 :]] if changed else []
    return {
        "seed": seed,
        "ari": first.ari,
        "found": [statistics.fmean(each) for each in found],
        "right": [statistics.fmean(each) for each in right],
        "others": len(others),
        "others moved": sum(f"client-{i}" in wrong for i in others),
        "new": [each["new_groups"] for each in done.updates],
        "score": [each["before"] for each in done.updates],
        "alone": alone,
    }


def _groups(clients: int) -> list[int]:
    return [i % GROUPS for i in range(clients)]


def _changed(before: list[int], event: str) -> list[int]:
    """The group of every client after the event; new clients come last."""
    m = len(before)
    if event == CHANGE:
        return [(g + 1) % GROUPS if i < m // 3 else g for i, g in enumerate(before)]
    if event == APPEAR:
        return [GROUPS if i < TURNING else g for i, g in enumerate(before)] + [GROUPS] * COMING
    return before


def _federation(batch: Batch, groups: list[int], seed: int, number: int) -> Federation:
    rows = batch(groups, Key.of(seed).fold(ROWS, number))
    return Federation.from_clients(rows, groups=groups, ids=[f"client-{i}" for i in range(len(groups))])


def _majority(labels: list[int], groups: list[int]) -> dict[int, int]:
    """The commonest true group of every cluster."""
    return {
        j: Counter(g for i, g in zip(labels, groups, strict=True) if i == j).most_common(1)[0][0] for j in set(labels)
    }


def _named(done: Run, group_of: dict[int, int], groups: list[int]) -> list[int]:
    """Every client's group by its cluster: those of the first run as they were then, later ones by their clients."""
    now = _majority(done.labels.tolist(), groups)
    return [group_of.get(j, now[j]) for j in done.labels.tolist()]


# --- fresh rows -----------------------------------------------------------------------------------------------------


def _regressions(data: dict[str, Any], seed: int) -> Batch:
    """Regressions y = ⟨x, θ_i⟩ + ε as in `varying_regression`; a client's model is at its place about any centre."""
    d, n, sigma, distance = (data[name] for name in ("features", "rows", "sigma", "distance"))
    g = Key.of(seed).fold(TRUTH).generator()
    centres = distance / 2**0.5 * torch.linalg.qr(torch.randn(d, GROUPS + 1, generator=g)).Q.T
    most = data["clients"] + COMING
    off = data.get("spread", 0.0) * distance * torch.randn(most, d, generator=g) / d**0.5

    def batch(groups: list[int], key: Key) -> list[tuple[Tensor, Tensor]]:
        def rows(i: int, j: int) -> tuple[Tensor, Tensor]:
            own = key.fold(i).generator()
            x = torch.randn(n, d, generator=own)
            return x, x @ (centres[j] + off[i]) + sigma * torch.randn(n, generator=own)

        return [rows(i, j) for i, j in enumerate(groups)]

    return batch


def _digits(data: dict[str, Any], seed: int) -> Batch:
    """Images drawn anew from all training images, rotated by 90 degrees times the group.

    With `alpha`, every client has shares of the labels of its own, drawn from a symmetric Dirichlet distribution.
    """
    x, y = digits(clients=1, seed=seed).train.client(0)
    shares = np.ones((data["clients"] + COMING, 10))
    if alpha := data.get("alpha"):
        shares = np.random.default_rng(Key.of(seed).fold(TRUTH).seed()).dirichlet(np.full(10, alpha), len(shares))

    def batch(groups: list[int], key: Key) -> list[tuple[Tensor, Tensor]]:
        def rows(i: int, j: int) -> tuple[Tensor, Tensor]:
            weight = torch.tensor(shares[i])[y] + 1e-9  # a client with few labels has few images of them to draw from
            own = torch.multinomial(weight, data["rows"], generator=key.fold(i).generator())
            return torch.rot90(x[own], j, (-2, -1)), y[own]

        return [rows(i, j) for i, j in enumerate(groups)]

    return batch


BATCHES: dict[str, Callable[[dict[str, Any], int], Batch]] = {"regressions": _regressions, "rotated digits": _digits}


# --- the table and the picture --------------------------------------------------------------------------------------


def _row(problem: dict[str, Any], event: str, cells: list[Cell], spec: dict[str, Any]) -> dict[str, Any]:
    """One line of the table."""
    steady = [n for c in cells for i, n in enumerate(c["new"], 1) if event != APPEAR or i < spec["change"]]
    late = [sum(c["new"][spec["change"] - 1 :]) for c in cells]
    soon = [c["found"][min(SOON, len(c["found"])) - 1] for c in cells if c["found"]]
    return {
        "problem": problem["name"],
        "event": event,
        "of": len(cells),
        "began right": sum(c["ari"] == 1 for c in cells),
        "found (%)": 100 * statistics.fmean(soon) if soon else None,
        "all found": sum(x == 1 for x in soon) if soon else None,
        "one new group": sum(n == 1 for n in late) if event == APPEAR else None,
        "others moved (%)": 100 * sum(c["others moved"] for c in cells) / sum(c["others"] for c in cells),
        "false groups (% of updates)": 100 * statistics.fmean(n > 0 for n in steady),
    }


def _curves(problem: dict[str, Any], event: str, cells: list[Cell]) -> dict[str, Any]:
    """Means over seeds by update: who is in its group, and the score on fresh rows, with updates and without."""
    means = {what: np.mean([c[what] for c in cells], 0).tolist() for what in ("right", "score", "alone")}
    return {"problem": problem["name"], "event": event, **means}


def draw(result: dict[str, Any], path: Path) -> None:
    """A column for every problem: how many clients are in their group over the updates, and how they are served.

    Args:
        result: The result of `run`.
        path: The picture.
    """
    problems = list(dict.fromkeys(curve["problem"] for curve in result["curves"]))
    fig = plots.figure(max(6.5, 2.4 * len(problems) + 0.6), 4.6)
    above, below = fig.subplots(2, len(problems), squeeze=False, sharex=True)
    for groups, scores, problem in zip(above, below, problems, strict=True):
        own = [curve for curve in result["curves"] if curve["problem"] == problem]
        for curve, colour in zip(own, plots.COLOURS, strict=False):
            at, style = np.arange(1, len(curve["right"]) + 1), {"color": colour, "lw": 1.4}
            groups.plot(at, [100 * x for x in curve["right"]], label=curve["event"], marker="o", ms=3.5, **style)
            scores.plot(at, curve["score"], marker="o", ms=3.5, **style)
            scores.plot(at, curve["alone"], ls=":", **style)
        groups.set_title(problem, fontsize=10)
        scores.set_xticks(range(2, len(own[0]["right"]) + 1, 2))
        for axes in (groups, scores):
            axes.axvline(result["change"], color="0.8", lw=1, zorder=0)
            plots.tidy(axes)
    above[0].set_ylabel("in their group (%)")
    below[0].set_ylabel("score on fresh rows")
    fig.supxlabel("update (dotted: the models of the first run, of which clients choose anew)", fontsize=9)
    fig.legend(*above[-1].get_legend_handles_labels(), loc="outside upper center", fontsize=8, frameon=False, ncols=3)
    plots.save(fig, path)
