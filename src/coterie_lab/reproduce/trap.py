"""Wrongly assigned points in one cluster iteration, epoch by epoch (the UIFCA report, Figures 4.4 and 4.6).

Models are trained on a given assignment, a part of which is wrong, and after every communication round the points are
looked at: are the wrong ones likelier under the other model, so that they would leave, or has their own overfitted
them? Once with every model left to itself, and once with models pulled together by as much as makes held-out points
likeliest. UIFCA itself pulls only once few points move; here it is done in the first iteration, so that both are seen
on the report's picture.

The whole algorithm may be run from the same assignment too, against the Bayes rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from coterie import UIFCA
from coterie.core.cohort import Cohort
from coterie.core.federation import Federation
from coterie.core.local import remembered
from coterie.core.pytree import Params, take, tree_map
from coterie.core.step import ClientStep, Local, Reply
from coterie.core.task import Task
from coterie.data.points import gaussian_centres
from coterie.methods.uifca import State
from coterie.runs import plots
from coterie.runs.config import build_algorithm, build_task
from coterie.runs.fit import fit
from coterie.runs.metrics import purity
from coterie_lab.reproduce.notebook import Notebook
from coterie_lab.reproduce.rounds import everybody, seeded, states_of

MODELS = ("plain", "shrunk")


def run(spec: dict[str, Any], device: str, notebook: Notebook) -> dict[str, Any]:
    """One iteration for every number of points, and the whole algorithm for every case."""
    rows, curves = [], {}
    for m in spec["points"]:
        runs = [
            notebook.entry(f"m = {m}, seed {seed}", lambda m=m, s=seed: _iteration(spec, m, s, device))
            for seed in spec["seeds"]
        ]
        for models in MODELS:
            own = [r[models] for r in runs]
            mean = {name: np.mean([r[name] for r in own], 0) for name in ("loss", "leave", "purity", "given")}
            curves[f"m = {m}, {models}"] = {name: line.tolist() for name, line in mean.items()}
            rows.append({"m": m, "models": models, "pull": ", ".join(f"{r['pull']:g}" for r in own), **_told(mean)})
    whole = [_whole(spec, case, device, notebook) for case in spec.get("cases", [])]
    return {"seeds": spec["seeds"], "picture": spec["picture"], "rows": rows, "whole": whole, "curves": curves}


def _told(mean: dict[str, np.ndarray]) -> dict[str, Any]:
    """What the curves over epochs come to."""
    leave, pure = 100 * mean["leave"], 100 * mean["purity"]
    own, other = mean["loss"][:, 1].T
    return {
        "leave, best": float(leave.max()), "in epoch": int(leave.argmax()) + 1, "leave, last": float(leave[-1]),
        "trapped from": _turn(own, other),
        "given": 100 * float(mean["given"][0]), "purity, best": float(pure.max()), "purity, last": float(pure[-1]),
    }  # fmt: skip


def _turn(own: np.ndarray, other: np.ndarray) -> int | None:
    """The epoch from which wrong points are likelier under their own model for good; None if they never are."""
    free = np.flatnonzero(own >= other)
    first = int(free[-1]) + 2 if len(free) else 1
    return first if first <= len(own) else None


# --- one cluster iteration -------------------------------------------------------------------------------------------


def _iteration(spec: dict[str, Any], m: int, seed: int, device: str) -> dict[str, Any]:
    """Plain and shrunk models from the same start: what is seen after every epoch."""
    algorithm = build_algorithm(spec["algorithm"])
    assert isinstance(algorithm, UIFCA)
    points, task = _points(spec, m, seed), build_task(spec["task"])

    def seen(algorithm: UIFCA) -> dict[str, Any]:
        cohort, pull = everybody(task, points, seed, device), torch.zeros(1)
        state = next(states_of(algorithm, cohort, 0, seed))
        if algorithm.shrink:
            pull = algorithm.chosen(state._replace(shrinks=torch.ones(1, dtype=torch.bool)), cohort)[1]
        return {"pull": float(pull), **_epochs(algorithm, state, pull, cohort)}

    return {"plain": seen(replace(algorithm, shrink=False)), "shrunk": seen(algorithm)}


def _points(spec: dict[str, Any], m: int, seed: int) -> Federation:
    return seeded(spec["data"], seed, points=m // spec["data"]["clients"])


def _epochs(algorithm: UIFCA, state: State, pull: Tensor, cohort: Cohort) -> dict[str, list[Any]]:
    """What is seen after each of the τ communication rounds of a cluster iteration."""
    seen = [_seen(theta, cohort) for theta in epochs(algorithm, state, pull, cohort)]
    return {name: [s[name] for s in seen] for name in seen[0]}


def epochs(algorithm: UIFCA, state: State, pull: Tensor, cohort: Cohort) -> Iterator[Params]:
    """The first restart's models after each of the τ communication rounds of a cluster iteration."""
    theta = state.theta
    for t in range(algorithm.tau):
        one = replace(algorithm, tau=1, lr=algorithm.lr * algorithm.decay**t)
        theta = one.averaged(theta, pull, state.sizes, cohort.at(t))
        yield take(theta, 0)


def _seen(theta: Params, cohort: Cohort) -> dict[str, Any]:
    sums = tree_map(lambda x: x[0].cpu(), cohort.combine(look, theta).update)
    return {
        "loss": (sums["loss"] / sums["first"][:, None]).tolist(),
        "leave": float(sums["left"] / sums["wrong"]),
        "purity": _pure(sums["found"]),
        "given": _pure(sums["given"]),
    }


def look(task: Task) -> ClientStep:
    """Sums over a client's points: the losses of those in cluster 1, rightly and wrongly, and who is where."""

    def run(theta: Params, local: Local) -> Reply:
        y, mask = local.data.y, local.data.mask
        losses = vmap(lambda t: task.loss(t, local.data))(theta)
        clusters = torch.arange(len(losses), device=mask.device)[:, None]
        given, found = remembered(local.memory, len(mask))[0], losses.argmin(0)
        first = torch.stack([(given == 0) & (y == 0), (given == 0) & (y != 0)]) * mask
        wrong, truth = (given != y) * mask, (y == clusters) * mask
        update = {
            "loss": first @ losses.T,
            "first": first.sum(1),
            "wrong": wrong.sum(),
            "left": (wrong * (found != given)).sum(),
            "given": (given == clusters).float() @ truth.T,
            "found": (found == clusters).float() @ truth.T,
        }
        return Reply(update)

    return ClientStep(run)


def _pure(table: Tensor) -> float:
    """The purity of clusters (k, true clusters)."""
    return float(table.amax(1).sum() / table.sum())


# --- the whole algorithm ---------------------------------------------------------------------------------------------


def _whole(spec: dict[str, Any], case: dict[str, Any], device: str, notebook: Notebook) -> dict[str, Any]:
    """The purity at the end of every run of a case, and that of the Bayes rule on the same points."""
    m, task = spec["points"][0], build_task(spec["task"])
    algorithm = build_algorithm({**spec["algorithm"], **case["algorithm"]})

    def end(seed: int) -> float:
        points = _points(spec, m, seed)
        done = fit(algorithm, task, points, rounds=spec["rounds"], seed=seed, device=device, evaluations=1)
        return float(done.purity or 0.0)

    found = [notebook.entry(f"{case['label']}, seed {seed}", lambda s=seed: end(s)) for seed in spec["seeds"]]
    bayes = [_bayes(spec["data"], _points(spec, m, s), s) for s in spec["seeds"]]
    return {
        "m": m, "case": case["label"], "purity": 100 * float(np.mean(found)), "worst": 100 * min(found),
        "Bayes": 100 * float(np.mean(bayes)), "runs": found,
    }  # fmt: skip


def _bayes(data: dict[str, Any], federation: Federation, seed: int) -> float:
    """The purity of the Bayes rule: every point to the nearest of the true centres."""
    centres = gaussian_centres(data["k"], data["d"], data["separation"], seed)
    near = torch.cdist(federation.train.x, centres).argmin(1)
    return purity(near.numpy(), federation.train.y.numpy())


# --- pictures --------------------------------------------------------------------------------------------------------


def draw(result: dict[str, Any], path: Path) -> None:
    """The losses of rightly and wrongly assigned points, or the purity, over the epochs."""
    (_draw_losses if result["picture"] == "loss" else _draw_purity)(result, path)


def _draw_losses(result: dict[str, Any], path: Path) -> None:
    """A row for plain and one for shrunk models, a column for each m; four curves each."""
    sizes = list(dict.fromkeys(r["m"] for r in result["rows"]))
    fig = plots.figure(3.0 * len(sizes) + 0.4, 5.4)
    grid = fig.subplots(len(MODELS), len(sizes), sharex=True, sharey=True, squeeze=False)
    for row, axes in zip(sorted(result["rows"], key=lambda r: MODELS.index(r["models"])), grid.flat, strict=True):
        _loss_panel(axes, np.array(result["curves"][f"m = {row['m']}, {row['models']}"]["loss"]))
        axes.set_title(f"m = {row['m']}, {row['models']}", fontsize=10)
        text = f"in the end {row['leave, last']:.0f} % of\nwrong points would leave"
        axes.text(0.98, 0.97, text, transform=axes.transAxes, ha="right", va="top", fontsize=8)
    for axes in grid[-1]:
        axes.set_xlabel("epoch")
    for axes in grid[:, 0]:
        axes.set_ylabel("mean loss in cluster 1")
    fig.legend(
        *grid[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=len(sizes), fontsize=8, frameon=False
    )
    plots.save(fig, path)


def _loss_panel(axes: Any, loss: np.ndarray) -> None:
    """Losses (epochs, right and wrong, models); shaded where wrong points are likelier under their own model."""
    epochs = np.arange(1, len(loss) + 1)
    for g, kind in enumerate(("right", "wrong")):
        axes.plot(epochs, loss[:, g, 0], color=plots.COLOURS[g], label=f"{kind} points, own model θ₁")
        axes.plot(epochs, loss[:, g, 1], "--", color=plots.COLOURS[g], label=f"{kind} points, other model θ₂")
    own, other = loss[:, 1].T
    shade = {"color": plots.COLOURS[1], "alpha": 0.2, "lw": 0, "label": "wrong points are trapped"}
    axes.fill_between(epochs, own, other, where=own < other, interpolate=True, **shade)
    axes.set_xscale("log")  # most of it happens in the first epochs
    axes.xaxis.set_major_formatter("{x:.0f}")
    plots.tidy(axes)


def _draw_purity(result: dict[str, Any], path: Path) -> None:
    """A panel for each m: the purity of plain and of shrunk models' assignment, and that of the given one."""
    sizes = list(dict.fromkeys(r["m"] for r in result["rows"]))
    fig = plots.figure(3.4 * len(sizes) + 0.4, 3.2)
    grid = fig.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
    for axes, m in zip(grid, sizes, strict=True):
        rows = [r for r in result["rows"] if r["m"] == m]
        for row, colour in zip(rows, plots.COLOURS[1::-1], strict=True):
            pure = 100 * np.array(result["curves"][f"m = {m}, {row['models']}"]["purity"])
            axes.plot(np.arange(1, len(pure) + 1), pure, color=colour, label=row["models"])
        axes.axhline(rows[0]["given"], color="0.4", lw=1, ls=":", label="given assignment")
        axes.set_title(f"m = {m}", fontsize=10)
        axes.set_xlabel("epoch")
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:.0f}")
        plots.tidy(axes)
    grid[0].set_ylabel("purity of the points (%)")
    grid[0].legend(fontsize=8, frameon=False)
    plots.save(fig, path)
