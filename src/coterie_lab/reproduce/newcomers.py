"""Clients that come late (CFL, Section V-C): how many Algorithm 4 brings to their own group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from coterie import CFL
from coterie.core.federation import Federation
from coterie.methods.cfl import ROOT
from coterie.runs import plots
from coterie.runs.config import build_algorithm, build_task
from coterie.runs.evaluate import evaluate
from coterie.runs.metrics import purity
from coterie_lab.reproduce.notebook import Notebook
from coterie_lab.reproduce.rounds import everybody, seeded, states_of


def run(spec: dict[str, Any], device: str, notebook: Notebook) -> dict[str, Any]:
    """Every seed: train with some clients, place the others."""
    rows = [notebook.entry(f"seed {seed}", lambda s=seed: _one(spec, s, device)) for seed in spec["seeds"]]
    mean = {what: float(np.mean([r[what] for r in rows])) for what in rows[0]}
    return {"seeds": spec["seeds"], "rows": [*rows, {**mean, "seed": "mean"}]}


def _one(spec: dict[str, Any], seed: int, device: str) -> dict[str, Any]:
    old, new = _parted(seeded(spec["data"], seed), spec["trained"])
    algorithm, task = build_algorithm(spec["algorithm"]), build_task(spec["task"])
    assert isinstance(algorithm, CFL)
    cohort = everybody(task, old, seed, device)
    *_, state = states_of(algorithm, cohort, spec["rounds"], seed)
    scores = evaluate(algorithm, state, cohort.at(spec["rounds"]))
    late = everybody(task, new, seed, device).at(spec["rounds"])
    waiting = state._replace(node=torch.full((len(new),), ROOT))
    found = evaluate(algorithm, waiting, late)
    own = _group_of(scores.labels, _groups(old))
    return {
        "seed": seed,
        "leaves": len(state.leaves),
        "old clients, purity": purity(scores.labels, _groups(old)),
        "old clients, accuracy": 100 * scores.mean,
        "new clients": len(new),
        "rightly placed": float(np.mean([own.get(j) == g for j, g in zip(found.labels, _groups(new), strict=True)])),
        "new clients, accuracy": 100 * found.mean,
    }


def _parted(federation: Federation, trained: int) -> tuple[Federation, Federation]:
    """Equally many clients of every group that train, `trained` in all, and the others."""
    groups = _groups(federation)
    share = trained // (groups.max() + 1)
    old = np.concatenate([np.flatnonzero(groups == g)[:share] for g in range(groups.max() + 1)])
    new = np.setdiff1d(np.arange(len(groups)), old)
    return federation.select(old.tolist()), federation.select(new.tolist())


def _groups(federation: Federation) -> np.ndarray:
    assert federation.groups is not None
    return federation.groups.numpy()


def _group_of(labels: np.ndarray, groups: np.ndarray) -> dict[int, int]:
    """The commonest true group of the clients of every leaf."""
    return {int(j): int(np.bincount(groups[labels == j]).argmax()) for j in np.unique(labels)}


def draw(result: dict[str, Any], path: Path) -> None:
    """A bar per seed."""
    rows = result["rows"][:-1]
    fig = plots.figure(5, 3.2)
    axes = fig.subplots()
    for x, what in enumerate(("old clients, purity", "rightly placed")):
        at = np.arange(len(rows)) + 0.4 * x
        bars = axes.bar(at, [100 * r[what] for r in rows], width=0.38, color=plots.COLOURS[x], label=what)
        axes.bar_label(bars, fmt="%.0f", fontsize=7)
    axes.set_xticks(np.arange(len(rows)) + 0.2, [f"seed {r['seed']}" for r in rows], fontsize=8)
    axes.set_ylim(0, 120)
    axes.set_yticks(range(0, 101, 20))
    axes.set_ylabel("share of clients (%)")
    axes.legend(fontsize=8, frameon=False, loc="upper center", ncols=2)
    plots.tidy(axes)
    plots.save(fig, path)
