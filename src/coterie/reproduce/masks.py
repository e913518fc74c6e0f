"""Whether flows trained on one digit each tell the digits apart, by the mask of their couplings (Table 4.2)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from coterie import plots
from coterie.algorithms.uifca import UIFCA, Disturbed
from coterie.config import build_algorithm, build_task
from coterie.data import random_background
from coterie.data.mnist import images
from coterie.federation import Federation
from coterie.reproduce.notebook import Notebook
from coterie.reproduce.rounds import seeded
from coterie.run import fit


def run(spec: dict[str, Any], device: str, notebook: Notebook) -> dict[str, Any]:
    """One cluster round from the true assignment, for every mask and background."""
    rows = []
    for case in spec["cases"]:
        found = notebook.entry(case["label"], lambda case=case: _accuracies(spec, case, device))
        rows.append({"case": case["label"], **found, "report": case.get("report")})
    return {"seeds": [spec["seed"]], "rows": rows}


def _accuracies(spec: dict[str, Any], case: dict[str, Any], device: str) -> dict[str, float]:
    """The share of images (in %) that are likelier under their own digit's flow: of those seen, and of new ones."""
    change = [{"name": "random_background"}] if case["random background"] else []
    federation = seeded({**spec["data"], "change": change}, spec["seed"])
    algorithm = build_algorithm(spec["algorithm"])
    assert isinstance(algorithm, UIFCA)
    task = build_task({**spec["task"], "model": {**spec["task"]["model"], **case["model"]}})
    done = fit(
        replace(algorithm, init=Disturbed(0.0)), task, federation, rounds=1, seed=spec["seed"], device=device,
        evaluations=1,
    )  # fmt: skip
    new, digit = _new_images(spec["data"], case["random background"], spec["seed"])
    right = torch.from_numpy(done.assign(new)) == digit
    return {"accuracy": 100 * float(done.purity or 0.0), "on new images": 100 * float(right.float().mean())}


def _new_images(data: dict[str, Any], grey: bool, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """MNIST's test images of these digits, and which of them each is."""
    *_, x, y = images()
    own = [x[y == digit][: data.get("points")] for digit in data["digits"]]
    which = torch.cat([torch.full((len(part),), i) for i, part in enumerate(own)])
    federation = Federation.from_clients([(torch.cat(own), which)])
    return (random_background(federation, seed + 1) if grey else federation).train.x, which


def draw(result: dict[str, Any], path: Path) -> None:
    """Bars, with the report's numbers beside them."""
    rows = result["rows"]
    fig = plots.figure(6.4, 2.6)
    axes = fig.subplots()
    bars = (("accuracy", "ours"), ("on new images", "ours, on new images"), ("report", "the report"))
    for i, (name, label) in enumerate(bars):
        at = [x + 0.27 * (i - 1) for x in range(len(rows))]
        heights = [r[name] or 0.0 for r in rows]
        drawn = axes.bar(at, heights, 0.25, color=plots.COLOURS[i], label=label)
        axes.bar_label(drawn, fmt="%.1f", fontsize=6.5, padding=1)
    axes.axhline(50, color="grey", lw=0.8, ls=":", label="chance")
    axes.set_xticks(range(len(rows)), [r["case"].replace(", ", ",\n") for r in rows], fontsize=8)
    axes.set_ylim(0, 112)
    axes.set_ylabel("accuracy (%)")
    axes.legend(fontsize=7, frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.2))
    plots.tidy(axes)
    plots.save(fig, path)
