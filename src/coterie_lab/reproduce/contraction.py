"""Theorem 1 of IFCA: from within Δ/4 of the truth the error halves each round, down to a floor that falls as 1/√(mn').

The setting is that of the theorem: gradient averaging divided by m, step size γ = c₁/p, new rows in every round, half
of them for choosing the cluster and half for the gradient step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie import IFCA
from coterie.core.key import Key
from coterie.core.task import Task
from coterie.data.synthetic import linear_mixture, linear_truth
from coterie.models import Linear
from coterie.runs import plots
from coterie_lab.reproduce.notebook import Notebook
from coterie_lab.reproduce.rounds import states


def run(spec: dict[str, Any], device: str, notebook: Notebook) -> dict[str, Any]:
    """Measure the error of every round, for every (m, n') and seed.

    Args:
        spec: Table of the experiment.
        device: "auto", "cpu" or "cuda".
        notebook: Stores the parts that are done.
    """
    rows, curves = [], {}
    for clients, fresh in spec["sizes"]:
        errors = np.array(
            notebook.entry(
                f"{clients} clients, {fresh} fresh rows",
                lambda m=clients, n=fresh: [_errors(spec, m, n, seed, device) for seed in range(spec["trials"])],
            )
        )  # (seeds, T+1)
        mean = errors.mean(0)
        floor = float(errors[:, -spec["floor_rounds"] :].mean())
        above = [t for t in range(len(mean) - 1) if mean[t + 1] > 3 * floor]  # rounds not yet near the floor
        rows.append({
            "m": clients, "n'": fresh, "mn'": clients * fresh, "start": float(mean[0]),
            "factor a round": float(np.mean([mean[t + 1] / mean[t] for t in above])) if above else None,
            "theorem's factor": 0.5, "floor": floor, "floor·√(mn')": floor * (clients * fresh) ** 0.5,
        })  # fmt: skip
        curves[f"m={clients}, n'={fresh}"] = mean.tolist()
    slope = float(np.polyfit(np.log([r["mn'"] for r in rows]), np.log([r["floor"] for r in rows]), 1)[0])
    return {
        "seeds": list(range(spec["trials"])),
        "rows": rows,
        "curves": curves,
        "slope": slope,
        "theorem's slope": -0.5,
    }


def _errors(spec: dict[str, Any], clients: int, fresh: int, seed: int, device: str) -> list[float]:
    """Return max_j ‖θ_j - θ*_j‖ at the start and after every round."""
    d, k, rounds = spec["features"], spec["groups"], spec["rounds"]
    federation = linear_mixture(clients, 2 * fresh * rounds, d, k, spec["scale"], spec["sigma"], seed)
    truth = linear_truth(d, k, spec["scale"], seed)
    models = [{"weight": theta[None]} for theta in truth + _perturbation(truth, seed)]
    algorithm = IFCA(k, average="gradient", normalise="all", lr=spec["c1"] * k, resample=rounds, init=models)
    task = Task.regressor(Linear(d, 1, bias=False))
    found = states(algorithm, task, federation, rounds, seed, device)
    return [float((s.theta["weight"][0, :, 0].cpu() - truth).norm(dim=1).max()) for s in found]


def _perturbation(truth: Tensor, seed: int) -> Tensor:
    """Return vectors of length Δ/4 in random directions."""
    apart = torch.cdist(truth, truth) + torch.eye(len(truth)) * 1e9
    noise = torch.randn(truth.shape, generator=Key.of(seed).fold(2).generator())
    return apart.min() / 4 * noise / noise.norm(dim=1, keepdim=True)


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the errors over rounds on the left, and the floor against mn' on the right.

    Args:
        result: The result of `run`.
        path: The picture.
    """
    fig = plots.figure(9, 3.6)
    left, right = fig.subplots(1, 2)
    for (name, errors), colour in zip(result["curves"].items(), plots.COLOURS, strict=False):
        left.semilogy(errors, "o-", ms=3, color=colour, label=name)
    first = next(iter(result["curves"].values()))[0]
    left.semilogy([first / 2**t for t in range(8)], "k--", lw=1, label="halved each round")
    left.set_xlabel("round")
    left.set_xticks(range(0, len(next(iter(result["curves"].values()))), 4))
    left.set_ylabel("largest error ‖θ_j − θ*_j‖")
    left.legend(fontsize=7, frameon=False)
    size, floor = [r["mn'"] for r in result["rows"]], [r["floor"] for r in result["rows"]]
    right.loglog(size, floor, "o", color=plots.COLOURS[0], label=f"measured, slope {result['slope']:.2f}")
    line = sorted(set(size))
    right.loglog(line, [floor[0] * (size[0] / s) ** 0.5 for s in line], "k--", lw=1, label="1/√(mn')")
    right.set_xticks(line, [f"{s:,}" for s in line])
    right.minorticks_off()
    marks = [max(floor), (max(floor) * min(floor)) ** 0.5, min(floor)]
    right.set_yticks(marks, [f"{v:.4f}" for v in marks])
    right.set_xlabel("rows of all clients in a round, mn'")
    right.set_ylabel("floor of the error")
    right.legend(fontsize=8, frameon=False)
    for axes in (left, right):
        plots.tidy(axes)
    plots.save(fig, path)
