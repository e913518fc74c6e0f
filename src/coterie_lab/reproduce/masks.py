"""Whether flows trained on one digit each tell the digits apart, by the mask of their couplings (Table 4.2)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from coterie.core.federation import Federation
from coterie.core.local import each_nearest
from coterie.core.pytree import Params
from coterie.core.step import ClientStep, Local, Reply
from coterie.core.task import Task
from coterie.data import random_background
from coterie.data.mnist import images
from coterie.methods.uifca import UIFCA, Disturbed
from coterie.runs import plots
from coterie.runs.config import build_algorithm, build_task
from coterie.runs.fit import fit
from coterie_lab.reproduce.notebook import Notebook
from coterie_lab.reproduce.rounds import everybody, seeded, states_of
from coterie_lab.reproduce.trap import epochs


def run(spec: dict[str, Any], device: str, notebook: Notebook) -> dict[str, Any]:
    """One cluster round from the true assignment, for every mask and background; and some looked at on the way."""
    rows, curves = [], {}
    for case in spec["cases"]:
        label = case["label"]
        row = notebook.entry(label, lambda case=case: _accuracies(spec, case, device))
        ends = dict.fromkeys(("constant steps", "median"))
        if label in spec["constant"]["cases"]:
            curve = notebook.entry(f"{label}, constant steps", lambda case=case: _along(spec, case, device))
            ends = dict(zip(ends, (curve[-1], median(curve)), strict=True))
            curves[label] = curve
        rows.append({"case": label, **row, **ends, "report": case.get("report")})
    return {"seeds": [spec["seed"]], "rows": rows, "curves": curves}


def _setting(spec: dict[str, Any], case: dict[str, Any], changes: dict[str, Any]) -> tuple[UIFCA, Task, Federation]:
    """UIFCA from the true assignment, a flow and the images."""
    change = [{"name": "random_background"}] if case["random background"] else []
    algorithm = build_algorithm({**spec["algorithm"], **changes})
    assert isinstance(algorithm, UIFCA)
    task = build_task({**spec["task"], "model": {**spec["task"]["model"], **case["model"]}})
    return replace(algorithm, init=Disturbed(0.0)), task, seeded({**spec["data"], "change": change}, spec["seed"])


def _accuracies(spec: dict[str, Any], case: dict[str, Any], device: str) -> dict[str, float]:
    """The share of images (in %) that are likelier under their own digit's flow: of those seen, and of new ones."""
    algorithm, task, federation = _setting(spec, case, {})
    done = fit(algorithm, task, federation, rounds=1, seed=spec["seed"], device=device, evaluations=1)
    seen = federation.train.x, federation.train.y
    new = _new_images(spec["data"], case["random background"], spec["seed"])
    accuracy, on_new = (float(np.mean(done.assign(x) == digit.numpy())) for x, digit in (seen, new))
    return {"accuracy": 100 * accuracy, "on new images": 100 * on_new}


def _along(spec: dict[str, Any], case: dict[str, Any], device: str) -> list[float]:
    """That share of the images seen, after every communication round with a step size that does not fall."""
    algorithm, task, federation = _setting(spec, case, spec["constant"]["algorithm"])
    cohort = everybody(task, federation, spec["seed"], device)
    state = next(states_of(algorithm, cohort, 0, spec["seed"]))
    looks = (cohort.combine(right, theta) for theta in epochs(algorithm, state, torch.zeros(1), cohort))
    return [100 * float(sums.update / sums.weight) for sums in looks]


def right(task: Task) -> ClientStep:
    """The share of a client's points that are likeliest under the model of their true cluster."""

    def run(theta: Params, local: Local) -> Reply:
        y, mask = local.data.y, local.data.mask
        own = (each_nearest(task, theta, local.data) == y) * mask
        return Reply(own.sum() / mask.sum(), mask.sum())

    return ClientStep(run)


def _new_images(data: dict[str, Any], grey: bool, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """MNIST's test images of these digits, and which of them each is."""
    *_, x, y = images()
    own = [x[y == digit][: data.get("points")] for digit in data["digits"]]
    which = torch.cat([torch.full((len(part),), i) for i, part in enumerate(own)])
    federation = Federation.from_clients([(torch.cat(own), which)])
    return (random_background(federation, seed + 1) if grey else federation).train.x, which


def draw(result: dict[str, Any], path: Path) -> None:
    """Bars, with the report's numbers beside them; and how accuracy wanders while the step size stays as it is."""
    fig = plots.figure(9.6, 3.0)
    bars, lines = fig.subplots(1, 2, width_ratios=(3, 2))
    _bars(bars, result["rows"])
    for (label, curve), colour in zip(result["curves"].items(), plots.COLOURS[3:], strict=False):
        lines.plot(range(1, len(curve) + 1), curve, color=colour, marker=".", ms=4, lw=1, label=label)
    lines.axhline(50, color="grey", lw=0.8, ls=":", label="chance")
    lines.set_xlabel("communication rounds")
    lines.set_title("with constant steps, seen images", fontsize=9)
    lines.legend(fontsize=7, frameon=False, ncols=3, loc="upper left")
    for axes in (bars, lines):
        axes.set_ylim(0, 124)  # with room for the legend
        axes.set_yticks(range(0, 101, 20))
        plots.tidy(axes)
    plots.save(fig, path)


def _bars(axes: Any, rows: list[dict[str, Any]]) -> None:
    bars = (("accuracy", "seen images"), ("on new images", "new images"), ("report", "the report"))
    for i, (name, label) in enumerate(bars):
        at = [x + 0.27 * (i - 1) for x in range(len(rows))]
        drawn = axes.bar(at, [r[name] or 0.0 for r in rows], 0.25, color=plots.COLOURS[i], label=label)
        axes.bar_label(drawn, fmt="%.1f", fontsize=6.5, padding=1)
    axes.axhline(50, color="grey", lw=0.8, ls=":")
    axes.set_xticks(range(len(rows)), [r["case"].replace(", ", ",\n") for r in rows], fontsize=8)
    axes.set_ylabel("accuracy (%)")
    axes.set_title("with steps that fall", fontsize=9)
    axes.legend(fontsize=7, frameon=False, ncols=3, loc="upper left")
