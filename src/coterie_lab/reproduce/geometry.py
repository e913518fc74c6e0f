"""How much noise a correct split tolerates (CFL, Figure 3): gradients that sum to zero over groups, plus noise."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coterie.core.key import Key
from coterie.parts.bipartition import bipartition, separation_gap
from coterie.runs import plots
from coterie_lab.reproduce.notebook import Notebook
from coterie_lab.reproduce.separation import is_correct

MEASURES = {"gap": "P(g(α) > 0)", "correct": "P(correct split)"}


def run(spec: dict[str, Any], device: str, notebook: Notebook) -> dict[str, Any]:
    """Measure the fraction of trials with a positive gap, and with a correct split, for every k and γ.

    Args:
        spec: Table of the experiment.
        device: Not used.
        notebook: Stores the parts that are done.
    """
    cells, rows = [], []
    for k in spec["groups"]:
        own = notebook.entry(f"k = {k}", lambda k=k: [_cell(spec, k, noise) for noise in spec["noise"]])
        cells += own
        rows.append({
            "k": k,
            "theorem's γ": theorem(k),
            **{f"{name} at γ = 1": _at(own, what, 1.0) for what, name in MEASURES.items()},
            **{f"γ up to which {name} ≥ 0.95": _up_to(own, what, 0.95) for what, name in MEASURES.items()},
        })  # fmt: skip
    return {"seeds": [0], "trials": spec["trials"], "rows": rows, "cells": cells}


def theorem(k: int) -> float:
    """Return the γ below which (19) and (21) make every split correct.

    With h = arccos H = 2 arcsin γ the bounds are α_intra ≥ cos h and α_cross ≤ cos(π / (k - 1) - h), so that α_intra is
    larger as long as 2h < π / (k - 1).

    Args:
        k: Number of groups.

    Example:
        >>> round(theorem(2), 3), round(theorem(10), 3)
        (0.707, 0.087)
    """
    return math.sin(math.pi / (4 * (k - 1)))


def _cell(spec: dict[str, Any], k: int, noise: float) -> dict[str, float]:
    """Return the fractions of trials with a positive gap and with a correct split, for k groups and noise γ."""
    groups = np.arange(spec["per_group"] * k) % k
    above = np.triu_indices(len(groups), 1)
    similar = _similarities(spec, k, noise, groups)[:, above[0], above[1]]
    gap = [separation_gap(alpha, groups) > 0 for alpha in similar]
    correct = [is_correct(bipartition(alpha).second, groups) for alpha in similar]
    return {"k": k, "noise": noise, "gap": float(np.mean(gap)), "correct": float(np.mean(correct))}


def _similarities(spec: dict[str, Any], k: int, noise: float, groups: np.ndarray) -> np.ndarray:
    """Return the similarity α of every pair of clients in every trial (trials, m, m)."""
    g = Key.of(0).fold(k, round(1000 * noise)).generator()
    truth = torch.randn(spec["trials"], k, spec["features"], generator=g, dtype=torch.float64)
    truth = (truth - truth.mean(1, keepdim=True))[:, groups]  # at a stationary point they sum to zero
    away = torch.randn(truth.shape, generator=g, dtype=torch.float64)
    length = noise * truth.norm(dim=-1, keepdim=True) / away.norm(dim=-1, keepdim=True)
    unit = torch.nn.functional.normalize(truth + length * away, dim=-1)
    return (unit @ unit.mT).clamp(-1, 1).numpy()


def _at(cells: list[dict[str, float]], what: str, noise: float) -> float | None:
    return next((c[what] for c in cells if c["noise"] == noise), None)


def _up_to(cells: list[dict[str, float]], what: str, share: float) -> float | None:
    """Return the largest γ before the first at which the fraction of good trials is below `share`."""
    good = list(itertools.takewhile(lambda c: c[what] >= share, cells))
    return good[-1]["noise"] if good else None


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw both fractions over k and γ, with the region in which the theorem guarantees success.

    Args:
        result: The result of `run`.
        path: The picture.
    """
    fig = plots.figure(9, 3.8)
    ks, noises = (sorted({c[what] for c in result["cells"]}) for what in ("k", "noise"))
    image = None
    for axes, (what, name) in zip(fig.subplots(1, 2, sharey=True), MEASURES.items(), strict=True):
        by = {(c["k"], c["noise"]): c[what] for c in result["cells"]}
        shares = np.array([[by[k, noise] for k in ks] for noise in noises])
        image = axes.pcolormesh(ks, noises, shares, cmap="Blues", vmin=0, vmax=1, shading="nearest")
        line = np.linspace(min(ks), max(ks), 200)
        bound = [theorem(k) for k in line]
        axes.plot(line, bound, color=plots.COLOURS[3], lw=2, label="Theorem 1 holds below")
        axes.fill_between(line, 0, bound, color=plots.COLOURS[3], alpha=0.5, lw=0)
        axes.set_ylim(0, max(noises))
        axes.set_xticks(ks[::3])
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("groups k")
        axes.legend(fontsize=8, frameon=False, loc="upper right")
    fig.axes[0].set_ylabel("noise γ = ‖∇R − ∇r‖ / ‖∇R‖")
    fig.colorbar(image, ax=fig.axes, label="share of trials")
    plots.save(fig, path)
