"""Federated moment descent looked into (Su, Xu and Yang 2022, Phase 1): its subspaces, its anchors, and noise on them.

The first iteration's subspace is compared with the span of the true residual errors. In later ones that span collapses
in one direction, since an anchor comes to its own model; there only the anchors' errors are looked at.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie import MomentDescent
from coterie.core.key import Key
from coterie.methods.moment_descent import Anchors
from coterie.runs import plots
from coterie.runs.loop import START
from coterie_lab.reproduce.notebook import Notebook
from coterie_lab.reproduce.regressions import Regression, distance
from coterie_lab.reproduce.rounds import everybody


def run(spec: dict[str, Any], device: str, notebook: Notebook) -> dict[str, Any]:
    """The sine of the largest angle against m, the anchors' errors against T, and both against noise."""
    rows = []
    for way, m in itertools.product(spec["subspaces"], spec["clients"]):
        found = notebook.entry(f"{way}, m = {m}", lambda w=way, m=m: _first_only(spec, m, w, device))
        rows.append({"part": "subspace", "m": m, "subspace": way, "T": 1, "noise": 0.0, **_summary(found)})
    for m in spec["descents"]:
        found = notebook.entry(f"descent, m = {m}", lambda m=m: _errors(spec, m, spec["iterations"], 0.0, device))
        own = {"part": "descent", "m": m, "subspace": "auto", "noise": 0.0}
        rows += [{**own, "T": t, **_summary(at, found[0])} for t, at in enumerate(found, 1)]
    for noise, m in itertools.product(spec["noise"], spec["noisy"]):
        name, t = f"noise {noise}, m = {m}", spec["noisy_iterations"]
        found = notebook.entry(name, lambda n=noise, m=m, t=t: _errors(spec, m, t, n, device))
        own = {"part": "noise", "m": m, "subspace": "auto", "noise": noise, "T": t}
        rows.append({**own, **_summary(found[-1], found[0])})
    return {"seeds": list(range(spec["seeds"])), "rows": rows}


def _first_only(spec: dict[str, Any], m: int, way: Any, device: str) -> list[dict[str, float]]:
    """One iteration per seed."""
    descent = MomentDescent(rounds=1, clients=m, ell=spec["ell"], subspace=way)
    return [next(_told(spec, descent, m, seed, device)) for seed in range(spec["seeds"])]


def _errors(spec: dict[str, Any], m: int, iterations: int, noise: float, device: str) -> list[list[dict[str, float]]]:
    """For every iteration, the figures of every seed."""
    descent = MomentDescent(rounds=iterations, clients=m, ell=spec["ell"], noise=noise)
    return [list(at) for at in zip(*(_told(spec, descent, m, s, device) for s in range(spec["seeds"])), strict=True)]


def _told(spec: dict[str, Any], descent: MomentDescent, m: int, seed: int, device: str) -> Iterator[dict[str, float]]:
    rows = 2 * spec["ell"] * descent.rounds
    data = {**spec["data"], "pairs": m * descent.rounds, "rest": 0, "anchor_rows": rows}
    problem = Regression.of(data, seed)
    cohort = everybody(problem.task, problem.federation, seed, device).at(0)
    for now in descent.descent(len(problem.truth), problem.task, cohort, Key.of(seed).fold(START)):
        yield _judged(problem, descent, now)


def _judged(problem: Regression, descent: MomentDescent, now: Anchors) -> dict[str, float]:
    groups, truth = problem.federation.groups, problem.truth
    assert groups is not None
    errors = (now.theta.double() - truth[groups[now.at]]).norm(dim=1) / problem.delta
    merged = descent.centres(now, len(truth))
    return {
        "sine": sine(now.subspace[0], truth.T),  # θ_0 = 0 and Σ_j = I: the residual errors are the models themselves
        "anchor": float(errors.median()),
        "worst anchor": float(errors.max()),
        "merged": distance(merged, truth) / problem.delta,
    }


def sine(found: Tensor, true: Tensor) -> float:
    """The sine of the largest angle between the column spaces of two matrices with as many columns.

    Example:
        >>> round(sine(torch.eye(3)[:, :2], torch.tensor([[1.0, 0.0], [0.0, 3.0], [0.0, 4.0]])), 6)
        0.8
    """
    one, two = (torch.linalg.qr(x.double())[0] for x in (found, true))
    least = float(torch.linalg.svdvals(one.T @ two)[-1])
    return max(0.0, 1 - least**2) ** 0.5


def _summary(found: list[dict[str, float]], first: list[dict[str, float]] | None = None) -> dict[str, float]:
    """Over seeds: medians, and the worst of the anchors. The sine is of the first iteration."""
    sines = [t["sine"] for t in first or found]
    return {
        "sine": float(np.median(sines)),
        "sine, worst": max(sines),
        "anchor": float(np.median([t["anchor"] for t in found])),
        "anchor, worst": max(t["worst anchor"] for t in found),
        "merged": float(np.median([t["merged"] for t in found])),
        "merged, worst": max(t["merged"] for t in found),
    }


def draw(result: dict[str, Any], path: Path) -> None:
    """Left the sine against m, in the middle the anchors against T, right both against noise."""
    fig = plots.figure(11, 3.6)
    left, middle, right = fig.subplots(1, 3)
    panels = {"subspace": (left, _draw_sines), "descent": (middle, _draw_descents), "noise": (right, _draw_noise)}
    for part, (axes, show) in panels.items():
        show(axes, [r for r in result["rows"] if r["part"] == part])
        axes.legend(fontsize=8, frameon=False)
        plots.tidy(axes)
    plots.save(fig, path)


def _draw_sines(axes: Any, rows: list[dict[str, Any]]) -> None:
    for way, colour in zip(dict.fromkeys(r["subspace"] for r in rows), plots.COLOURS, strict=False):
        own = [r for r in rows if r["subspace"] == way]
        axes.loglog([r["m"] for r in own], [r["sine"] for r in own], "o-", ms=4, color=colour, label=way)
    sizes = [r["m"] for r in rows if r["subspace"] == rows[-1]["subspace"]]
    last = rows[-1]["sine"]
    axes.loglog(sizes, [last * (sizes[-1] / m) ** 0.5 for m in sizes], "k--", lw=1, label="1/√m")
    marks = [v for v in (0.05, 0.1, 0.2, 0.5, 1) if last / 1.2 < v]
    axes.set_yticks(marks, [f"{v:g}" for v in marks])
    axes.set_xticks(sizes[::2], [f"{m:,}" for m in sizes[::2]])
    axes.minorticks_off()
    axes.set_xlabel("clients of an iteration, m")
    axes.set_ylabel("sine of the largest angle, first iteration")


def _draw_descents(axes: Any, rows: list[dict[str, Any]]) -> None:
    for m, colour in zip(dict.fromkeys(r["m"] for r in rows), plots.COLOURS, strict=False):
        own = [r for r in rows if r["m"] == m]
        axes.plot([r["T"] for r in own], [r["anchor"] for r in own], "o-", ms=4, color=colour, label=f"m = {m:,}")
        axes.plot([r["T"] for r in own], [r["anchor, worst"] for r in own], ":", lw=1.2, color=colour)
    axes.axhline(0.25, color="black", lw=0.8, ls="--")
    axes.set_ylim(0, 1.05 * max(r["anchor, worst"] for r in rows))
    axes.set_xlabel("iterations T; dotted: the worst anchor; dashed: ¼")
    axes.set_ylabel("error of the anchors / Δ")


def _draw_noise(axes: Any, rows: list[dict[str, Any]]) -> None:
    for m, colour in zip(dict.fromkeys(r["m"] for r in rows), plots.COLOURS, strict=False):
        own = sorted((r for r in rows if r["m"] == m), key=lambda r: r["noise"])
        across = range(len(own))
        axes.plot(across, [r["anchor"] for r in own], "o-", ms=4, color=colour, label=f"anchors, m = {m:,}")
        axes.plot(across, [r["sine"] for r in own], "s--", ms=3, color=colour, label=f"sine, m = {m:,}")
        axes.set_xticks(across, [f"{r['noise']:g}" for r in own])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("standard deviation of the noise")
    axes.set_ylabel("error of the anchors / Δ; sine")
