"""The purity of the assignment of points after every cluster round (the UIFCA report, Figure 4.3)."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np

from coterie.runs import plots
from coterie.runs.config import build_algorithm, build_task
from coterie.runs.evaluate import evaluate
from coterie_lab.reproduce.notebook import Notebook
from coterie_lab.reproduce.rounds import everybody, seeded, states_of

PURE = 0.99


def run(spec: dict[str, Any], device: str, notebook: Notebook) -> dict[str, Any]:
    """Measure the purity after each cluster round, for every case, p and seed.

    Args:
        spec: Table of the experiment.
        device: "auto", "cpu" or "cuda".
        notebook: Stores the parts that are done.
    """
    rows, curves = [], {}
    for case in spec["cases"]:
        for p in spec["p"]:
            name = f"{case['label']}, p = {p}"
            found = notebook.entry(name, lambda c=case, p=p: [_purities(spec, c, p, s, device) for s in spec["seeds"]])
            curves[name] = found
            rows.append({"case": case["label"], "p": p, **_summary(found)})
    return {"seeds": spec["seeds"], "rows": rows, "curves": curves}


def _summary(curves: list[list[float]]) -> dict[str, Any]:
    """Return the mean purity after the first and the last round, how many runs become pure, and the mean round."""
    first, last = (100 * float(np.mean([line[t] for line in curves])) for t in (0, -1))
    pure = [next(t for t, x in enumerate(line, 1) if x >= PURE) for line in curves if max(line) >= PURE]
    when = float(np.mean(pure)) if pure else None
    return {"first": first, "last": last, f"{100 * PURE:.0f} %": f"{len(pure)} of {len(curves)}", "in round": when}


def _purities(spec: dict[str, Any], case: dict[str, Any], p: float, seed: int, device: str) -> list[float]:
    """Return the purity after every cluster round of one run; once no point moves, the last value is repeated."""
    algorithm = build_algorithm(case["algorithm"])
    cohort = everybody(build_task(spec["task"]), seeded(spec["data"], seed, p=p), seed, device)
    found: list[float] = []
    for state in itertools.islice(states_of(algorithm, cohort, spec["rounds"], seed), 1, None):
        found.append(evaluate(algorithm, state, cohort).clustering["purity"])
        if algorithm.done(state):
            break
    return found + found[-1:] * (spec["rounds"] - len(found))


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw a panel per case, with a line per p: the mean over seeds, and a band of its standard error.

    Args:
        result: The result of `run`.
        path: The picture.
    """
    cases = list(dict.fromkeys(r["case"] for r in result["rows"]))
    height = -(-len(cases) // 2)
    fig = plots.figure(7.2, 2.8 * height)
    grid = fig.subplots(height, 2, sharex=True, sharey=True, squeeze=False)
    for axes, case in zip(grid.flat, cases, strict=False):
        for row, colour in zip([r for r in result["rows"] if r["case"] == case], plots.COLOURS, strict=False):
            each = 100 * np.array(result["curves"][f"{case}, p = {row['p']}"])
            rounds, mean = np.arange(1, each.shape[1] + 1), each.mean(0)
            error = each.std(0) / max(1, len(each) - 1) ** 0.5
            axes.fill_between(rounds, mean - error, mean + error, color=colour, alpha=0.15, lw=0)
            axes.plot(rounds, mean, color=colour, label=f"p = {row['p']}")
        axes.set_title(case, fontsize=10)
        axes.set_ylim(0, 105)
        plots.tidy(axes)
    for axes in grid[-1]:
        axes.set_xlabel("cluster round")
    for axes in grid[:, 0]:
        axes.set_ylabel("purity of the points (%)")
    grid[0, -1].legend(fontsize=8, frameon=False, loc="center right")
    plots.save(fig, path)
