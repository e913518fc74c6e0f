"""From sharp groups to mere variation: which way of sharing wins where, and whether the number of groups is found."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import numpy as np

from coterie import FedX, LocalOnly
from coterie.core.method import Method
from coterie.methods.mixed_effects import MixedEffects
from coterie.runs import plots
from coterie.runs.config import build_task
from coterie.runs.fit import fit
from coterie_lab.reproduce.notebook import Notebook
from coterie_lab.reproduce.rounds import seeded
from coterie_lab.reproduce.workers import pool

Cell = dict[str, Any]

MIXTURE = "groups of random effects"


def run(spec: dict[str, Any], device: str, notebook: Notebook) -> dict[str, Any]:
    """Every way of sharing on every kind of federation, with every seed.

    Args:
        spec: Table of the experiment.
        device: Not used: cells are small, and there are many.
        notebook: Stores the parts that are done.
    """
    rows, kinds = [], [(k, spread) for k in spec["groups"] for spread in spec["spreads"]]
    with pool() as workers:
        waiting = {
            (k, spread): [workers.submit(cell, spec, k, spread, seed) for seed in spec["seeds"]]
            for k, spread in kinds
            if _name(k, spread) not in notebook.entries
        }
        for k, spread in kinds:
            own = waiting.get((k, spread), [])
            cells = notebook.entry(_name(k, spread), lambda own=own: [each.result() for each in own])
            rows.append(_row(k, spread, cells, spec["data"]["sigma"] ** 2))
    clear = [row for row in rows if row["spread"] <= spec["clear"] or row["groups"] == 1]
    right, asked = (sum(row[what] for row in clear) for what in ("k right", "of"))
    return {"seeds": spec["seeds"], "rows": rows, "clear": spec["clear"], "k right": right, "k asked": asked}


def ways(k: int) -> dict[str, Method]:
    """The ways to share; hard groups are told how many there are, the mixture is not.

    Args:
        k: The true number of groups.
    """
    return {
        "one for all": FedX(k=1),
        "hard groups": FedX(k=k),
        "random effects": MixedEffects(k=1),
        MIXTURE: MixedEffects(k="auto"),
        "one each": LocalOnly(refine="least_squares"),
    }


def _name(k: int, spread: float) -> str:
    return f"{k} groups, spread {spread}"


def cell(spec: dict[str, Any], k: int, spread: float, seed: int) -> Cell:
    """Every way to share on one federation.

    Args:
        spec: Table of the experiment.
        k: Groups.
        spread: Of clients within a group.
        seed: Of all draws.
    """
    federation = seeded({**spec["data"], "groups": k, "spread": spread}, seed)
    task = build_task(
        {"kind": "regressor", "model": {"name": "linear", "inputs": spec["data"]["features"], "outputs": 1}}
    )
    done = {
        name: fit(method, task, federation, rounds=spec["rounds"], seed=seed, device="cpu", evaluations=1)
        for name, method in ways(k).items()
    }
    return {"errors": {name: each.scores.mean for name, each in done.items()}, "k": len(done[MIXTURE].models)}


def _row(k: int, spread: float, cells: list[Cell], noise: float) -> dict[str, Any]:
    """One line: the mean error of every way above that of the noise, and how often the number of groups was found."""
    errors = {name: statistics.fmean(cell["errors"][name] for cell in cells) - noise for name in cells[0]["errors"]}
    return {
        "groups": k,
        "spread": spread,
        **errors,
        "k found": [cell["k"] for cell in cells],
        "k right": sum(cell["k"] == k for cell in cells),
        "of": len(cells),
    }


# --- the picture ----------------------------------------------------------------------------------------------------


def draw(result: dict[str, Any], path: Path) -> None:
    """A panel for every number of groups: errors over spreads, with how often the number of groups was found below.

    Args:
        result: The result of `run`.
        path: The picture.
    """
    counts = list(dict.fromkeys(row["groups"] for row in result["rows"]))
    fig = plots.figure(2.6 * len(counts) + 0.6, 4.0)
    above, below = fig.subplots(2, len(counts), squeeze=False, sharey="row", sharex="col", height_ratios=(4, 1))
    for errors, found, k in zip(above, below, counts, strict=True):
        rows = [row for row in result["rows"] if row["groups"] == k]
        _errors(errors, rows)
        _found(found, rows)
        errors.set_title("one group" if k == 1 else f"{k} groups", fontsize=10)
    above[0].set_ylabel("test MSE above the noise")
    below[0].set_ylabel("k right")
    fig.supxlabel("spread within groups / distance between groups", fontsize=9)
    fig.legend(*above[-1].get_legend_handles_labels(), loc="outside upper center", fontsize=8, frameon=False, ncols=5)
    plots.save(fig, path)


def _errors(axes: Any, rows: list[dict[str, Any]]) -> None:
    """A line per way. The mixture's is wide, and below the others: it often coincides with one of them."""
    at = np.arange(len(rows))
    shown = [name for name in ways(1) if rows[0]["groups"] > 1 or name != "hard groups"]  # one group is one for all
    for name in shown:
        mixture = name == MIXTURE
        colour = plots.COLOURS[list(ways(1)).index(name)]
        style = {"lw": 6, "alpha": 0.45, "zorder": 1} if mixture else {"lw": 1.4, "marker": "o", "ms": 3.5}
        axes.plot(at, [row[name] for row in rows], color=colour, label=name, solid_capstyle="round", **style)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    plots.tidy(axes)


def _found(axes: Any, rows: list[dict[str, Any]]) -> None:
    """A square per spread: in how many federations the number of groups was found."""
    from matplotlib.patches import Rectangle

    for at, row in enumerate(rows):
        share = row["k right"] / row["of"]
        colour = plots.COLOURS[list(ways(1)).index(MIXTURE)]
        axes.add_patch(Rectangle((at - 0.47, 0.05), 0.94, 0.9, color=colour, alpha=0.08 + 0.5 * share, lw=0))
        axes.text(at, 0.5, f"{row['k right']}/{row['of']}", ha="center", va="center", fontsize=7)
    axes.set_xlim(-0.5, len(rows) - 0.5)
    axes.set_xticks(range(len(rows)), [f"{row['spread']:g}" for row in rows], fontsize=8)
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
