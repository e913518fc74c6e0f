"""The purity of clusters of unlabelled points against the heterogeneity of clients (UIFCA, Tables 4.1 and 4.3)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from coterie.runs import plots
from coterie.runs.config import build_algorithm, build_task
from coterie.runs.fit import fit
from coterie_lab.reproduce.notebook import Notebook
from coterie_lab.reproduce.rounds import seeded

NOT_DATA = ("label", "seeds", "methods", "over", "clusters")  # in a panel's table; the others describe the data


def run(spec: dict[str, Any], device: str, notebook: Notebook) -> dict[str, Any]:
    """Measure the purity of every panel, method and p, over all seeds.

    Args:
        spec: Table of the experiment.
        device: "auto", "cpu" or "cuda".
        notebook: Stores the parts that are done.
    """
    rows, runs = [], {}
    for panel, method, p in cells(spec):
        name = entry_name(panel, method, p)
        runs[name] = found = notebook.entry(name, lambda a=panel, m=method, p=p: purities(spec, a, m, p, device))
        rows.append({
            "data": panel["label"], "method": method["label"], "p": p, "purity": 100 * float(np.mean(found)),
            "worst": 100 * min(found), "100 %": f"{sum(x == 1 for x in found)} of {len(found)}",
            "report": spec["report"].get(f"{panel['label']}, {method['label']}", {}).get(str(p)),
        })  # fmt: skip
    return {"seeds": spec["seeds"], "rows": rows, "runs": runs}


def cells(spec: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any], float]]:
    """Yield every panel, method and p; a panel may list its own methods, and a method its own values of p.

    Args:
        spec: Table of the experiment.
    """
    for panel in spec["data"]:
        for method in panel.get("methods") or spec["methods"]:
            for p in method.get("p", spec["p"]):
                yield panel, method, p


def entry_name(panel: dict[str, Any], method: dict[str, Any], p: float) -> str:
    """Return the name of a cell of the table.

    Args:
        panel: Table of the panel.
        method: Table of the method.
        p: Heterogeneity.
    """
    return f"{panel['label']}, {method['label']}, p = {p}"


def purities(spec: dict[str, Any], panel: dict[str, Any], method: dict[str, Any], p: float, device: str) -> list[float]:
    """Return the purity of every run of a cell: for all seeds, and all values that the data are averaged over.

    Args:
        spec: Table of the experiment.
        panel: Table of the panel.
        method: Table of the method.
        p: Heterogeneity.
        device: "auto", "cpu" or "cuda".
    """
    data = {n: v for n, v in panel.items() if n not in NOT_DATA}
    over = method.get("over", panel.get("over", {}))
    algorithm = build_algorithm({**method["algorithm"], "k": panel.get("clusters", panel.get("k"))})
    task = None if method["algorithm"]["name"] == "kfed" else build_task(method.get("task") or spec["task"])
    found = []
    seeds = method.get("seeds", panel.get("seeds", spec["seeds"]))
    for values in itertools.product(seeds, *over.values()):
        seed, chosen = values[0], dict(zip(over, values[1:], strict=True))
        federation = seeded({**data, **chosen}, seed, p=p)
        rounds = method.get("rounds", spec["rounds"])
        done = fit(algorithm, task, federation, rounds=rounds, seed=seed, device=device, evaluations=1)
        found.append(float(done.purity or 0.0))
    return found


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw a panel per data set, with a line per method and crosses for the report's numbers.

    Args:
        result: The result of `run`.
        path: The picture.
    """
    panels, methods = (list(dict.fromkeys(r[name] for r in result["rows"])) for name in ("data", "method"))
    lines = -(-len(panels) // 2)
    fig = plots.figure(6.4, 2.7 * lines + 0.3 * -(-len(methods) // 3))
    grid = fig.subplots(lines, 2, sharex=True, sharey=True, squeeze=False)
    for axes, panel in zip(grid.flat, panels, strict=False):
        _panel(axes, [r for r in result["rows"] if r["data"] == panel], methods)
        axes.set_title(panel, fontsize=10)
    for axes in grid[-1]:
        axes.set_xlabel("heterogeneity p")
    for axes in grid[:, 0]:
        axes.set_ylabel("purity of the points (%)")
    crosses = grid.flat[0].plot([], [], "x", color="grey", ms=7)
    handles, labels = grid.flat[0].get_legend_handles_labels()
    fig.legend(
        [*handles, *crosses], [*labels, "the report's"], fontsize=7, frameon=False, ncols=3, loc="outside lower center"
    )
    plots.save(fig, path)


def _panel(axes: Any, rows: list[dict[str, Any]], methods: list[str]) -> None:
    for i, method in enumerate(methods):
        line = sorted((r for r in rows if r["method"] == method), key=lambda r: r["p"])
        size = max(3.0, 7 - 1.5 * i)  # so that a line below another one is visible
        colour = plots.COLOURS[i % len(plots.COLOURS)]
        axes.plot([r["p"] for r in line], [r["purity"] for r in line], "o-", ms=size, color=colour, label=method)
        reported = [(r["p"], r["report"]) for r in line if r["report"] is not None]
        if reported:
            axes.plot(*zip(*reported, strict=True), "x", color=colour, ms=7)
    axes.set_ylim(0, 105)
    plots.tidy(axes)
