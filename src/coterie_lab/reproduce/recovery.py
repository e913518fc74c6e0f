"""Whether the models of a mixed regression are found (Su, Xu and Yang 2022), over data sets and over starts.

Phase 1 runs on all clients. Phase 2 runs on all of them too, or on those of a setting's `phase2`, so that the data that
the analysis wants fresh for Phase 1 need not be carried through every round. A method knows nothing of the truth.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from coterie import IFCA, FedX
from coterie.core.federation import Federation
from coterie.core.key import Key
from coterie.core.pytree import Params, take
from coterie.parts.starts import find_start
from coterie.runs import plots
from coterie.runs.config import build_algorithm
from coterie.runs.fit import fit
from coterie.runs.loop import START
from coterie_lab.reproduce.notebook import Notebook
from coterie_lab.reproduce.regressions import Regression
from coterie_lab.reproduce.rounds import everybody

FOUND = 0.05  # d(θ̂, θ*)/Δ from which on a run has not found the models


def run(spec: dict[str, Any], device: str, notebook: Notebook) -> dict[str, Any]:
    """Every method in every setting, from every start on every data set."""
    runs: list[dict[str, Any]] = []
    for setting in spec["settings"]:
        for method in setting.get("methods", spec.get("methods")):
            name = f"{setting['name']}: {method['name']}"
            runs += notebook.entry(name, lambda s=setting, m=method: _every_run(s, m, device))
    pairs = dict.fromkeys((r["setting"], r["method"]) for r in runs)
    rows = [_row([r for r in runs if (r["setting"], r["method"]) == pair]) for pair in pairs]
    return {"seeds": list(range(max(s["seeds"] for s in spec["settings"]))), "rows": rows, "runs": runs}


def _every_run(setting: dict[str, Any], method: dict[str, Any], device: str) -> list[dict[str, Any]]:
    runs = []
    for seed in range(setting["seeds"]):
        problem = Regression.of(setting["data"], seed)
        for start in range(method.get("starts", setting.get("starts", 1))):
            labels = {"setting": setting["name"], "method": method["name"], "seed": seed, "start": start}
            runs.append(labels | _one(problem, setting, method, seed, start, device))
    return runs


def _one(
    problem: Regression, setting: dict[str, Any], method: dict[str, Any], seed: int, start: int, device: str
) -> dict[str, Any]:
    algorithm, second = _algorithm(setting, method), _second(problem.federation, setting)
    begin = time.process_time()
    models = _first(algorithm, problem, seed, start, device)
    algorithm = replace(algorithm, init=models)
    if isinstance(algorithm, IFCA):
        algorithm = replace(algorithm, lr=_step_size(models, problem, second, device))
    rounds = method.get("rounds", setting["rounds"])
    done = fit(algorithm, problem.task, second, rounds=rounds, seed=seed, device=device, evaluations=1)
    spent = time.process_time() - begin
    return {
        "phase 1": problem.error(models),
        "error": problem.error(done.models),
        "oracle": problem.oracle(second),
        "labels": done.scores.clustering["matched"],
        "cpu": spent,
    }


def _algorithm(setting: dict[str, Any], method: dict[str, Any]) -> Any:
    """The method for as many clusters as there are, with the setting's own Phase 1."""
    table = {**method["algorithm"], "k": setting["data"]["k"]}
    if isinstance(table.get("init"), dict):
        table["init"] = table["init"] | setting.get("phase1", {})
    return build_algorithm(table)


def _second(federation: Federation, setting: dict[str, Any]) -> Federation:
    return federation.select(range(*setting["phase2"])) if "phase2" in setting else federation


def _first(algorithm: Any, problem: Regression, seed: int, start: int, device: str) -> list[Params]:
    """The models that Phase 2 starts from; a start has draws of its own."""
    cohort = everybody(problem.task, problem.federation, seed, device).at(0)
    key = Key.of(seed).fold(START, start)
    theta = find_start(algorithm.init, algorithm.k)(algorithm.k, algorithm.lr, problem.task, cohort, key)
    return [take(theta, j) for j in range(algorithm.k)]


def _step_size(models: list[Params], problem: Regression, federation: Federation, device: str) -> float:
    """That which FedX finds: IFCA has none of its own."""
    cohort = everybody(problem.task, federation, 0, device).at(0)
    return FedX(len(models), init=models).start(problem.task, cohort, Key.of(0)).lr


def _row(runs: list[dict[str, Any]]) -> dict[str, Any]:
    errors, ratios = [r["error"] for r in runs], [r["error"] / r["oracle"] for r in runs]
    return {
        "setting": runs[0]["setting"],
        "method": runs[0]["method"],
        "runs": len(runs),
        "found": sum(e < FOUND for e in errors),
        "at most 0.01": sum(e <= 0.01 for e in errors),
        "at most 1.5 oracle": sum(ratio <= 1.5 for ratio in ratios),
        "phase 1": float(np.median([r["phase 1"] for r in runs])),
        "phase 1, worst": max(r["phase 1"] for r in runs),
        "error": float(np.median(errors)),
        "error, worst": max(errors),
        "oracle": float(np.median([r["oracle"] for r in runs])),
        "ratio, worst": max(ratios),
        "labels, worst": min(r["labels"] for r in runs),
        "cpu": float(np.median([r["cpu"] for r in runs])),
    }


def draw(result: dict[str, Any], path: Path) -> None:
    """The error of every run, settings across and methods side by side; a black line is the oracle's."""
    settings = list(dict.fromkeys(r["setting"] for r in result["rows"]))
    methods = list(dict.fromkeys(r["method"] for r in result["rows"]))
    fig = plots.figure(2.2 + 1.25 * len(settings), 3.8)
    axes = fig.subplots()
    for x, setting in enumerate(settings):
        rows = [r for r in result["rows"] if r["setting"] == setting]
        for n, row in enumerate(rows):
            own = [r["error"] for r in result["runs"] if (r["setting"], r["method"]) == (setting, row["method"])]
            colour = plots.COLOURS[methods.index(row["method"])]
            _strip(axes, x + 0.8 * (n + 0.5) / len(rows) - 0.4, 0.3 / len(rows), row, own, colour)
        axes.plot([x - 0.42, x + 0.42], [rows[0]["oracle"]] * 2, color="black", lw=1.2, zorder=3)
    for n, method in enumerate(methods):
        axes.plot([], [], "o", ms=4, color=plots.COLOURS[n], label=method)
    axes.plot([], [], color="black", lw=1.2, label="oracle least squares")
    axes.axhline(FOUND, color=plots.COLOURS[7], lw=1, ls="--", label=f"found, below {FOUND:g}")
    axes.set_yscale("log")
    top = max(2 * FOUND, *(r["error, worst"] * 2.2 for r in result["rows"]))  # room for the counts
    axes.set_ylim(top=top)
    marks = [v for v in (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1) if axes.get_ylim()[0] < v < top]
    axes.set_yticks(marks, [f"{v:g}" for v in marks])
    axes.minorticks_off()
    axes.set_xlim(-0.6, len(settings) - 0.4)
    axes.set_xticks(range(len(settings)), [s.replace(", ", "\n") for s in settings], fontsize=8)
    axes.set_ylabel("error d(θ̂, θ*) / Δ")
    fig.legend(loc="outside upper center", fontsize=8, frameon=False, ncols=2)
    plots.tidy(axes)
    plots.save(fig, path)


def _strip(axes: Any, x: float, wide: float, row: dict[str, Any], own: list[float], colour: str) -> None:
    """A dot per run, and how many found the models."""
    at = x + wide * np.linspace(-1, 1, len(own)) if len(own) > 1 else [x]
    axes.plot(at, own, "o", ms=3, alpha=0.7, mew=0, color=colour)
    axes.text(x, max(own) * 1.25, f"{row['found']} of {row['runs']}", ha="center", fontsize=7, color=colour)
