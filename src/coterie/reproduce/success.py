"""Success probability of IFCA on mixtures of linear regressions (IFCA, Figure 2).

A trial fixes the data; it succeeds if, over all starts and step sizes, one run ends within 0.6 σ of the truth. The
distance is that of the authors' code, the mean over learnt models of the distance to the *nearest* truth. Beside it
are kept success by the matched distance (each truth once) and the share of rightly labelled clients.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie import plots
from coterie.algorithms import IFCA, FarthestFirst
from coterie.algorithms.starts import Start
from coterie.cohort import Cohort
from coterie.data.synthetic import linear_mixture, linear_truth
from coterie.federation import Federation
from coterie.key import Key
from coterie.metrics import matched_accuracy
from coterie.models import Linear
from coterie.reproduce.rounds import last_state
from coterie.task import Task
from coterie.tree import Params

log = logging.getLogger("coterie")


@dataclass(frozen=True)
class Bernoulli(Start):
    """θ⁽⁰⁾ drawn coordinate-wise from Bernoulli(0.5), as in Section 6.1."""

    def __call__(self, k: int, lr: float, task: Task, cohort: Cohort, key: Key) -> Params:
        """Draw k models."""
        like = task.init(key)
        g = key.generator()
        return {n: (torch.rand((k, *x.shape), generator=g) < 0.5).float() for n, x in like.items()}


def run(spec: dict[str, Any], device: str) -> dict[str, Any]:
    """Every panel, scaling, cell and trial."""
    rows = []
    for panel in spec["panels"]:
        axes = [panel[n] for n in ("scaling", "scale", "sigma", "clients", "rows")]
        for scaling, scale, sigma, clients, n in itertools.product(*axes):
            cell = {
                "clients": clients,
                "rows": n,
                "groups": panel["groups"],
                "scale": scale,
                "sigma": sigma,
                "scaling": scaling,
            }
            trials = [_trial(spec, panel, cell, seed, device) for seed in range(spec["trials"])]
            rows.append({
                "panel": panel["name"], **cell, "trials": len(trials),
                "success": float(np.mean([t["random"]["success"] for t in trials])),
                "matched": float(np.mean([t["random"]["matched"] for t in trials])),
                "labels": float(np.mean([t["random"]["labels"] for t in trials])),
                "success, farthest-first": float(np.mean([t["farthest_first"]["success"] for t in trials])),
                "matched, farthest-first": float(np.mean([t["farthest_first"]["matched"] for t in trials])),
                "labels, farthest-first": float(np.mean([t["farthest_first"]["labels"] for t in trials])),
            })  # fmt: skip
            log.warning("%s", rows[-1])
    return {"seeds": list(range(spec["trials"])), "rows": rows}


def _trial(spec: dict[str, Any], panel: dict[str, Any], cell: dict[str, Any], seed: int, device: str) -> dict[str, Any]:
    federation = linear_mixture(features=spec["features"], seed=seed, **cell)
    truth = linear_truth(spec["features"], cell["groups"], cell["scale"], seed, cell["scaling"])
    starts = {"random": (Bernoulli(), spec["restarts"]), "farthest_first": (FarthestFirst(lr=spec["start_lr"]), 1)}
    return {
        name: _best(spec, panel, federation, truth, cell, start, r, seed, device) for name, (start, r) in starts.items()
    }


def _best(
    spec: dict[str, Any], panel: dict[str, Any], federation: Federation, truth: Tensor, cell: dict[str, Any],
    start: Start, restarts: int, seed: int, device: str,
) -> dict[str, Any]:  # fmt: skip
    """The best run over step sizes and starts, by the code's distance."""
    task = Task.regressor(Linear(spec["features"], 1, bias=False))
    groups = torch.as_tensor(federation.groups).numpy()
    limit = 0.6 * cell["sigma"] + panel["slack"]
    best = {"distance": float("inf"), "matched": float("inf"), "labels": 0.0}
    for lr in panel["lr"]:
        algorithm = IFCA(
            k=cell["groups"],
            average="gradient",
            normalise=spec["normalise"],
            lr=lr,
            restarts=restarts,
            holdout=0.0,
            init=start,
        )
        state = last_state(algorithm, task, federation, spec["rounds"], seed, device)
        theta = state.theta["weight"][:, :, 0].cpu()
        for r in range(restarts):
            gap = torch.cdist(theta[r].double(), truth.double()).nan_to_num(nan=torch.inf, posinf=torch.inf)
            distance = float(gap.amin(1).mean())
            if distance < best["distance"]:
                labels = matched_accuracy(state.labels[r].numpy(), groups)
                best = {"distance": distance, "matched": _matched(gap), "labels": labels}
    return {**best, "success": best["distance"] < limit, "matched": best["matched"] < limit}


def _matched(gap: Tensor) -> float:
    from scipy.optimize import linear_sum_assignment

    capped = gap.clamp(max=1e30).numpy()
    return float(capped[linear_sum_assignment(capped)].mean())


def draw(result: dict[str, Any], path: Path) -> None:
    """One panel per column, one scaling per row: success against separation, or against the number of clients."""
    panels = list(dict.fromkeys(r["panel"] for r in result["rows"]))
    scalings = list(dict.fromkeys(r["scaling"] for r in result["rows"]))
    fig = plots.figure(3.3 * len(panels), 2.9 * len(scalings))
    grid = fig.subplots(len(scalings), len(panels), sharey=True, squeeze=False)
    for (s, scaling), (p, panel) in itertools.product(enumerate(scalings), enumerate(panels)):
        axes, rows = grid[s][p], [r for r in result["rows"] if r["panel"] == panel and r["scaling"] == scaling]
        by, across = ("sigma", "scale") if len({r["scale"] for r in rows}) > 2 else ("rows", "clients")
        keys = sorted({(r[by], r["scale"] if across == "clients" else 0) for r in rows})
        for (key, scale), colour in zip(keys, itertools.cycle(plots.COLOURS), strict=False):
            line = [r for r in rows if r[by] == key and (across == "scale" or r["scale"] == scale)]
            name = f"σ = {key}" if by == "sigma" else f"n = {key}, r = {scale}"
            axes.plot([r[across] for r in line], [r["success"] for r in line], "o-", color=colour, label=name, ms=4)
            axes.plot([r[across] for r in line], [r["success, farthest-first"] for r in line], ":", color=colour, lw=2)
        axes.set_title(f"({panel}) k = {rows[0]['groups']}, scaled as the {scaling}", fontsize=9)
        axes.set_xlabel("separation" if across == "scale" else "clients m")
        axes.set_ylim(-0.05, 1.05)
        axes.plot([], [], ":", color="grey", lw=2, label="farthest-first, one start")
        axes.legend(fontsize=6, frameon=False)
        plots.tidy(axes)
    fig.supylabel("success probability", fontsize=9)
    plots.save(fig, path)
