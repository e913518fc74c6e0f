"""CFL over its splits (CFL, Figures 8 and 9): every client's score and every leaf's separation gap, round by round."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np

from coterie.methods.cfl import State
from coterie.parts.bipartition import cosines, separation_gap
from coterie.runs import plots
from coterie.runs.config import build_algorithm, build_federation, build_task
from coterie.runs.evaluate import evaluate
from coterie_lab.reproduce.notebook import Notebook
from coterie_lab.reproduce.rounds import everybody, states_of

SCALE = {
    "accuracy": ("test accuracy (%)", lambda score: 100 * score),
    "nats": ("perplexity on the test rows", np.exp),
}


def run(spec: dict[str, Any], device: str, notebook: Notebook) -> dict[str, Any]:
    """Every method on the same clients from the same start; the first method is CFL."""
    federation = build_federation({**spec["data"], "seed": spec["seed"]})
    assert federation.groups is not None
    groups = federation.groups.numpy()
    runs = {
        method["name"]: notebook.entry(method["name"], lambda m=method: _rounds(spec, m, federation, device))
        for method in spec["methods"]
    }
    rows = [_row(spec, runs, groups, g) for g in range(groups.max() + 1)]
    rows.append({
        **{what: None for what in rows[0]},
        "group": "mean over clients",
        **_scores(spec, runs, np.ones(len(groups), dtype=bool)),
        "found": f"{sum(r['found'] == 'yes' for r in rows)} of {len(rows)}",
    })  # fmt: skip
    return {
        "seeds": [spec["seed"]],
        "rows": rows,
        "metric": next(iter(runs.values()))["metric"],
        "groups": groups.tolist(),
        "names": spec["names"],
        "runs": {name: {k: v for k, v in run.items() if k != "metric"} for name, run in runs.items()},
    }


def _rounds(spec: dict[str, Any], method: dict[str, Any], federation: Any, device: str) -> dict[str, Any]:
    """All rounds of one method. Clients are scored every `every` rounds; gaps are taken in every round."""
    algorithm, task = build_algorithm(method["algorithm"]), build_task(spec["task"])
    cohort = everybody(task, federation, spec["seed"], device, spec["precision"])
    label, scale = SCALE[task.metric]
    result: dict[str, Any] = {"metric": label, "rounds": [], "scores": []}
    tree: dict[str, Any] = {"gaps": {}, "splits": []}
    found = states_of(algorithm, cohort, spec["rounds"], spec["seed"])
    for t, (before, after) in enumerate(itertools.pairwise(found), 1):
        if isinstance(after, State):
            _watch(tree, before, after, t, federation.groups.numpy())
        if t % spec["every"] == 0 or t == spec["rounds"]:
            scores = scale(evaluate(algorithm, after, cohort.at(t)).per_client.astype(float))
            result["rounds"].append(t)
            result["scores"].append(scores.round(3).tolist())
    return result | tree


def _watch(tree: dict[str, Any], before: State, after: State, t: int, groups: np.ndarray) -> None:
    """Write down what a round did to the tree: the gap of every leaf, before any split, and who is where."""
    for v, gap in _gaps(before, after, groups).items():
        tree["gaps"].setdefault(str(v), {"first": t, "gap": []})["gap"].append(round(gap, 4))
    tree["splits"] += [t] if len(after.leaves) > len(before.leaves) else []
    tree["leaf"] = after.node.tolist()
    tree["clients"] = {str(v): node.clients.tolist() for v, node in after.tree.items()}


def _gaps(before: State, after: State, groups: np.ndarray) -> dict[int, float]:
    """g(α) of every leaf there was before a round, from the updates of that round."""
    gaps = {}
    for v in before.leaves:
        own = (before.node == v).nonzero().flatten()
        if len(own) > 1:
            gaps[v] = separation_gap(cosines(after.reports.updates[own]), groups[own.numpy()])
    return gaps


def _row(spec: dict[str, Any], runs: dict[str, Any], groups: np.ndarray, g: int) -> dict[str, Any]:
    """What came of the clients of one true group."""
    own, cfl = groups == g, next(iter(runs.values()))
    leaf = np.array(cfl["leaf"])
    alone = len(set(leaf[own])) == 1 and not np.isin(leaf[~own], leaf[own]).any()
    gap = cfl["gaps"].get(str(leaf[own][0]), {"gap": [None]})["gap"][-1]
    return {
        "group": spec["names"][g],
        **_scores(spec, runs, own),
        "gap at the end": gap,
        "found": "yes" if alone else "no",
    }


def _scores(spec: dict[str, Any], runs: dict[str, Any], own: np.ndarray) -> dict[str, Any]:
    """Means over some clients: CFL at its first split and at the end, the other methods at the end, and the paper's."""
    (name, cfl), *others = runs.items()
    mean = [float(np.array(scores)[own].mean()) for scores in cfl["scores"]]
    first = max([i for i, t in enumerate(cfl["rounds"]) if t <= min(cfl["splits"], default=0)], default=0)
    out = {f"{name}, first split": mean[first], f"{name}, end": mean[-1], "ratio": mean[-1] / mean[first]}
    for other, run in others:
        end = float(np.array(run["scores"][-1])[own].mean())
        out |= {f"{other}, end": end, f"ratio to {other}": mean[-1] / end}
    return out | {f"paper, {what}": value for what, value in spec["paper"].items()}


def draw(result: dict[str, Any], path: Path) -> None:
    """Top every client's score, a line each in the colour of its true group; bottom the gap of every leaf."""
    fig = plots.figure(8, 6)
    top, bottom = fig.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    groups, cfl = np.array(result["groups"]), next(iter(result["runs"].values()))
    for i, line in enumerate(np.array(cfl["scores"]).T):
        first = i == int(np.flatnonzero(groups == groups[i])[0])
        name = result["names"][groups[i]] if first else None
        top.plot(cfl["rounds"], line, color=plots.COLOURS[groups[i]], lw=0.9, alpha=0.8, label=name)
    for name, run in list(result["runs"].items())[1:]:
        top.plot(run["rounds"], np.array(run["scores"]).mean(1), "k:", lw=1.8, label=f"{name}, mean over clients")
    for v, line in cfl["gaps"].items():
        held = set(groups[cfl["clients"][v]])
        colour = plots.COLOURS[held.pop()] if len(held) == 1 else "#444444"
        bottom.plot(np.arange(len(line["gap"])) + line["first"], line["gap"], color=colour, lw=1.2)
    bottom.plot([], [], color="#444444", lw=1.2, label="leaf of several groups")
    bottom.axhline(0, color="black", lw=0.8)
    for axes in (top, bottom):
        for t in cfl["splits"]:
            axes.axvline(t, color="grey", lw=0.8, ls="--")
        axes.margins(x=0.01)
        axes.legend(fontsize=8, frameon=False)
        plots.tidy(axes)
    top.set_ylabel(result["metric"])
    if "perplexity" in result["metric"]:  # the first rounds would hide all others
        late = np.concatenate([np.array(run["scores"])[len(run["scores"]) // 5 :] for run in result["runs"].values()])
        top.set_ylim(late.min() * 0.95, late.max() * 1.05)
    bottom.set_ylabel("separation gap g(α)")
    bottom.set_xlabel("round; dashed: a split")
    plots.save(fig, path)
