"""When to split (CFL, Figure 7): the lengths in (32) and (33), where one model can serve both clients and where not."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coterie import CFL
from coterie.runs import plots
from coterie.runs.config import build_task
from coterie_lab.reproduce.notebook import Notebook
from coterie_lab.reproduce.rounds import everybody, seeded, states_of

LENGTHS = {"mean": "of the mean update, (32)", "largest": "of the longest update of a client, (33)"}


def run(spec: dict[str, Any], device: str, notebook: Notebook) -> dict[str, Any]:
    """Both lengths over the rounds for every case."""
    curves = {
        case["name"]: notebook.entry(case["name"], lambda c=case: _lengths(spec, c, device)) for case in spec["cases"]
    }
    rows = []
    for name, lines in curves.items():
        for what, line in lines.items():
            most, end = max(line), float(np.mean(line[-max(1, len(line) // 20) :]))
            rows.append({"case": name, "length": what, "most": most, "end": end, "end / most": end / most})
    return {"seeds": spec["seeds"], "rows": rows, "every": spec["every"], "curves": curves}


def _lengths(spec: dict[str, Any], case: dict[str, Any], device: str) -> dict[str, list[float]]:
    """The lengths, averaged over seeds and over `every` rounds at a time."""
    each = [_one(spec, case, seed, device) for seed in spec["seeds"]]
    mean = np.mean(each, axis=0, dtype=float).reshape(2, -1, spec["every"]).mean(-1)
    return {what: line.round(5).tolist() for what, line in zip(LENGTHS, mean, strict=True)}


def _one(spec: dict[str, Any], case: dict[str, Any], seed: int, device: str) -> np.ndarray:
    """Both lengths in every round (2, T) of one run that never splits."""
    federation = seeded(case["data"], seed)
    cohort = everybody(build_task(spec["task"]), federation, seed, device)
    never = (spec["rounds"] + 1,)
    algorithm = CFL(schedule=never, holdout=0.0, lr=spec["lr"], tau=spec["tau"], batch=case["batch"])
    lengths = [
        torch.stack([s.reports.updates.mean(0).norm(), s.reports.updates.norm(dim=1).max()])
        for s in itertools.islice(states_of(algorithm, cohort, spec["rounds"], seed), 1, None)
    ]
    return torch.stack(lengths, 1).cpu().numpy()


def draw(result: dict[str, Any], path: Path) -> None:
    """A panel per case, two to a row."""
    height = -(-len(result["curves"]) // 2)
    fig = plots.figure(9, 0.6 + 2.8 * height)
    panels = fig.subplots(height, 2, sharex=True, sharey=True, squeeze=False)
    for axes, (name, lines) in zip(panels.flat, result["curves"].items(), strict=True):
        for (what, label), colour in zip(LENGTHS.items(), plots.COLOURS, strict=False):
            x = (np.arange(len(lines[what])) + 0.5) * result["every"]
            axes.semilogy(x, lines[what], color=colour, label=label)
        axes.set_title(name, fontsize=10)
        plots.tidy(axes)
    panels[0, -1].legend(fontsize=8, frameon=False)
    fig.supxlabel("round", fontsize=9)
    fig.supylabel("length", fontsize=9)
    plots.save(fig, path)
