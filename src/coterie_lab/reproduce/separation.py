"""How far apart groups are (CFL, Figures 5 and 6): the separation gap against rows per client, and against rounds.

One model is trained for all clients and never split. In the rounds that are looked at, the gap is computed from the
clients' weight updates and, at the same model, from their full gradients.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from coterie import CFL
from coterie.parts.bipartition import bipartition, cosines, separation_gap
from coterie.runs import plots
from coterie.runs.config import build_task
from coterie_lab.reproduce.notebook import Notebook
from coterie_lab.reproduce.rounds import everybody, seeded, states_of

VECTORS = {"update": "weight update", "gradient": "gradient"}


def run(spec: dict[str, Any], device: str, notebook: Notebook) -> dict[str, Any]:
    """The gap for every number of rows, seed and round that is looked at."""
    cells = [
        cell
        for n in spec["rows"]
        for seed in spec["seeds"]
        for cell in notebook.entry(f"{n} rows, seed {seed}", lambda n=n, s=seed: _gaps(spec, n, s, device))
    ]
    rows = []
    for n, t in itertools.product(spec["rows"], spec["at"]):
        own = [c for c in cells if (c["rows"], c["round"]) == (n, t)]
        row: dict[str, Any] = {"rows": n, "round": t}
        for what in VECTORS:
            gaps = [c[what] for c in own]
            row |= {f"gap, {what}": float(np.mean(gaps)), f"±, {what}": float(np.std(gaps))}
            row[f"positive, {what}"] = float(np.mean([gap > 0 for gap in gaps]))
            row[f"correct, {what}"] = float(np.mean([c[f"correct, {what}"] for c in own]))
        rows.append(row)
    return {"seeds": spec["seeds"], "paper": spec["paper"], "rows": rows}


def is_correct(second: np.ndarray, groups: np.ndarray) -> bool:
    """Definition 1: no group has clients in both halves."""
    return not set(groups[second]) & set(groups[~second])


def _gaps(spec: dict[str, Any], n: int, seed: int, device: str) -> list[dict[str, Any]]:
    federation, batch = seeded(spec["data"], seed, rows=n), min(spec["batch"], n)
    assert federation.groups is not None
    groups, cohort = federation.groups.numpy(), everybody(build_task(spec["task"]), federation, seed, device)
    steps, never = spec["epochs"] * -(-n // batch), (spec["rounds"] + 1,)
    algorithm = CFL(schedule=never, holdout=0.0, batch=batch, tau=steps, lr=spec["lr"])
    asking = replace(algorithm, compare="gradient", batch=None, tau=1)  # of its round only the gradients are kept
    cells = []
    for t, (before, after) in enumerate(itertools.pairwise(states_of(algorithm, cohort, max(spec["at"]), seed)), 1):
        if t in spec["at"]:
            gradients = asking.round(before, cohort.at(t - 1))[0].reports.updates
            judged = _judged("update", after.reports.updates, groups) | _judged("gradient", gradients, groups)
            cells.append({"rows": n, "seed": seed, "round": t, **judged})
    return cells


def _judged(name: str, vectors: Tensor, groups: np.ndarray) -> dict[str, Any]:
    alpha = cosines(vectors)
    return {name: separation_gap(alpha, groups), f"correct, {name}": is_correct(bipartition(alpha).second, groups)}


def draw(result: dict[str, Any], path: Path) -> None:
    """The mean gap of either vector with a band of one deviation, against rows per client or against rounds."""
    rows = result["rows"]
    across = "rows" if len({r["rows"] for r in rows}) > 1 else "round"
    fig = plots.figure(5.6, 3.6)
    axes = fig.subplots()
    x = np.array([r[across] for r in rows])
    for (what, name), colour in zip(VECTORS.items(), plots.COLOURS, strict=False):
        gap, by = (np.array([r[f"{key}, {what}"] for r in rows]) for key in ("gap", "±"))
        axes.plot(x, gap, "o-", ms=3, color=colour, label=name)
        axes.fill_between(x, gap - by, gap + by, color=colour, alpha=0.15, lw=0)
    axes.axhline(0, color="black", lw=0.8)
    axes.set_xlabel("rows per client" if across == "rows" else "round")
    axes.set_ylabel("separation gap g(α)")
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    plots.tidy(axes)
    plots.save(fig, path)
