"""Whether methods find the groups as they are by default, on many kinds of problems that nobody tuned them on.

Every problem names how it is scored: by the clients' groups, by the models of a mixed regression, or by the clusters of
points. Cells (a problem, a method and a seed) are independent, and are computed side by side on all cores.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import numpy as np

from coterie import KFED
from coterie.runs import plots
from coterie.runs.config import build_algorithm, build_task
from coterie.runs.fit import fit
from coterie.runs.metrics import purity
from coterie_lab.reproduce.notebook import Notebook
from coterie_lab.reproduce.regressions import Regression
from coterie_lab.reproduce.rounds import seeded
from coterie_lab.reproduce.workers import pool

Cell = dict[str, Any]

BELOW = 0.02  # by which points may be less pure than under a mixture of all of them
NEAR = 1.5  # times the oracle's error, from which on the models of a mixed regression have not been found


def run(spec: dict[str, Any], device: str, notebook: Notebook) -> dict[str, Any]:
    """Every method on every problem of its own, with every seed.

    Args:
        spec: Table of the experiment.
        device: Not used: cells are small, and there are many.
        notebook: Stores the parts that are done.
    """
    rows = []
    with pool() as workers:
        waiting = [
            (problem, method, _cells(workers, spec, problem, method, notebook))
            for problem in spec["problems"]
            for method in _methods(spec, problem)
        ]
        for problem, method, cells in waiting:
            found = notebook.entry(_name(problem, method), lambda cells=cells: [cell.result() for cell in cells])
            rows.append(_row(problem, method, found))
    return {"seeds": spec["seeds"], "rows": rows}


def _cells(
    workers: Executor,
    spec: dict[str, Any],
    problem: dict[str, Any],
    method: dict[str, Any],
    notebook: Notebook,
) -> list[Future[Cell]]:
    """The cells of a problem and a method, one for every seed; none if they are known from before."""
    if _name(problem, method) in notebook.entries:
        return []
    return [workers.submit(SCORES[problem["score"]], problem, method, seed) for seed in spec["seeds"]]


def _methods(spec: dict[str, Any], problem: dict[str, Any]) -> list[dict[str, Any]]:
    """The methods that a problem names, each with the problem's changes to it."""
    return [{**spec["methods"][name], "name": name, **changes} for name, changes in problem["methods"].items()]


def _name(problem: dict[str, Any], method: dict[str, Any]) -> str:
    return f"{problem['name']}: {method['name']}"


# --- scores ---------------------------------------------------------------------------------------------------------


def _groups(problem: dict[str, Any], method: dict[str, Any], seed: int) -> Cell:
    """Right if clients of a group are together, and no others with them; clients of no group may be anywhere."""
    federation = seeded(problem["data"], seed)
    algorithm, task = build_algorithm(method["algorithm"]), build_task(problem["task"])
    done = fit(algorithm, task, federation, rounds=method["rounds"], seed=seed, device="cpu", evaluations=1)
    return {
        "seed": seed,
        "right": done.ari == 1.0,
        "score": done.scores.mean,
        "clusters": len(done.models),
        "bytes": sum(row["bytes_down"] + row["bytes_up"] for row in done.history),
        "warned": len(done.warnings),
    }


def _points(problem: dict[str, Any], method: dict[str, Any], seed: int) -> Cell:
    """Right if points are at most `BELOW` less pure than under the best mixture fitted to all of them at once."""
    from sklearn.mixture import GaussianMixture

    federation = seeded(problem["data"], seed)
    algorithm, k = build_algorithm({**method["algorithm"], "k": problem["data"]["k"]}), problem["data"]["k"]
    points, y = federation.train.x.flatten(1).double().numpy(), federation.train.y.numpy()
    task = build_task({"kind": "density", "model": {"name": "affine_flow", "inputs": points.shape[1]}})
    done = fit(algorithm, task, federation, rounds=method["rounds"], seed=seed, device="cpu", evaluations=1)
    alone = fit(KFED(k), None, federation, rounds=1, seed=seed, device="cpu", evaluations=1)
    mixture = GaussianMixture(k, n_init=10, random_state=seed).fit(points)
    beside = {"mixture": purity(mixture.predict(points), y), "k-FED": float(alone.purity or 0.0)}
    found = float(done.purity or 0.0)
    return {
        "seed": seed,
        "right": found >= beside["mixture"] - BELOW,
        "score": found,
        "beside": beside,
        "bytes": sum(row["bytes_down"] + row["bytes_up"] for row in done.history),
        "warned": len(done.warnings),
    }


def _models(problem: dict[str, Any], method: dict[str, Any], seed: int) -> Cell:
    """Right if the models' error is at most 1.5 times that of least squares on the rows of each true cluster."""
    regression = Regression.of({n: v for n, v in problem["data"].items() if n != "name"}, seed)
    algorithm, federation = build_algorithm(method["algorithm"]), regression.federation
    done = fit(algorithm, regression.task, federation, rounds=method["rounds"], seed=seed, device="cpu", evaluations=1)
    ratio = regression.error(done.models) / regression.oracle(federation)
    return {
        "seed": seed,
        "right": ratio <= NEAR,
        "score": ratio,
        "labels": done.scores.clustering["matched"],
        "clusters": len(done.models),
        "bytes": sum(row["bytes_down"] + row["bytes_up"] for row in done.history),
        "warned": len(done.warnings),
    }


SCORES: dict[str, Callable[[dict[str, Any], dict[str, Any], int], Cell]] = {
    "groups": _groups,
    "models": _models,
    "points": _points,
}


# --- the table and the picture --------------------------------------------------------------------------------------


def _row(problem: dict[str, Any], method: dict[str, Any], cells: list[Cell]) -> dict[str, Any]:
    """One line of the table: how many seeds were right, and the mean score."""
    right = sum(cell["right"] for cell in cells)
    return {
        "problem": problem["name"],
        "method": method["name"],
        "right": f"{right} of {len(cells)}",
        "share": right / len(cells),
        "wrong": [cell["seed"] for cell in cells if not cell["right"]],
        "wanted": method.get("wanted"),
        "score": statistics.fmean(cell["score"] for cell in cells),
        "beside": _beside(cells),
        "warned": sum(cell.get("warned", 0) > 0 for cell in cells),
        "MB": statistics.fmean(cell.get("bytes", 0) for cell in cells) / 1e6,
    }


def _beside(cells: list[Cell]) -> str:
    """The mean scores of what cells are compared with, if anything."""
    names = cells[0].get("beside", {})
    return ", ".join(f"{name} {statistics.fmean(cell['beside'][name] for cell in cells):.3f}" for name in names)


def draw(result: dict[str, Any], path: Path) -> None:
    """A bar for every problem and method, with what was wanted; and how it was before, if that is stored beside it.

    Args:
        result: The result of `run`.
        path: The picture; NAME-before.json in its folder holds an earlier result.
    """
    earlier = path.with_name(f"{path.stem}-before.json")
    before = {}
    if earlier.exists():
        stored = json.loads(earlier.read_text(encoding="utf-8"))
        before = {(r["problem"], r["method"]): r["share"] for r in stored["rows"]}
    methods = list(dict.fromkeys(r["method"] for r in result["rows"] if r["wanted"] is not None))
    counts = [sum(r["method"] == m for r in result["rows"]) for m in methods]
    fig = plots.figure(8.6, 0.9 * len(methods) + 0.22 * sum(counts))
    panels = fig.subplots(len(methods), 1, squeeze=False, sharex=True, height_ratios=counts)[:, 0]
    for axes, method, colour in zip(panels, methods, plots.COLOURS, strict=False):
        _bars(axes, [r for r in result["rows"] if r["method"] == method], before, colour)
        axes.set_title(method, fontsize=10, loc="left")
    panels[-1].set_xlabel("seeds that are right (%)")
    fig.legend(*_legend(panels), loc="outside upper center", fontsize=8, frameon=False, ncols=3)
    plots.save(fig, path)


def _bars(axes: Any, rows: list[dict[str, Any]], before: dict[tuple[str, str], float], colour: str) -> None:
    at = np.arange(len(rows))
    axes.barh(at, [100 * r["share"] for r in rows], 0.7, color=colour, alpha=0.8, label="right")
    old = [
        (y, 100 * before[key]) for y, r in zip(at, rows, strict=True) if (key := (r["problem"], r["method"])) in before
    ]
    axes.plot([x for _, x in old], [y for y, _ in old], "o", ms=4, color="black", mfc="white", label="before")
    wanted = [(y, 100 * r["wanted"]) for y, r in zip(at, rows, strict=True) if r["wanted"] is not None]
    axes.plot([x for _, x in wanted], [y for y, _ in wanted], "|", ms=11, mew=1.6, color="black", label="wanted")
    axes.set_yticks(at, [r["problem"] for r in rows], fontsize=8)
    axes.set_xlim(-1, 104)  # room for marks at the ends
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.invert_yaxis()
    plots.tidy(axes)


def _legend(panels: Any) -> tuple[list[Any], list[str]]:
    """The first panel's entries: those of the others mean the same."""
    handles, labels = panels[0].get_legend_handles_labels()
    return handles, labels
