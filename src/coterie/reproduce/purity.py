"""How purely methods group unlabelled points, over the heterogeneity of the clients (the UIFCA report, Table 4.1)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from coterie import plots
from coterie.config import build_algorithm, build_task
from coterie.reproduce.notebook import Notebook
from coterie.reproduce.rounds import seeded
from coterie.run import fit


def run(spec: dict[str, Any], device: str, notebook: Notebook) -> dict[str, Any]:
    """Every data set, method and p, over all seeds."""
    rows, runs = [], {}
    for data in spec["data"]:
        for method in spec["methods"]:
            for p in spec["p"]:
                name = f"{data['label']}, {method['label']}, p = {p}"
                found = notebook.entry(name, lambda d=data, m=method, p=p: _purities(spec, d, m, p, device))
                runs[name] = found
                rows.append({
                    "data": data["label"], "method": method["label"], "p": p, "purity": 100 * float(np.mean(found)),
                    "worst": 100 * min(found), "100 %": f"{sum(x == 1 for x in found)} of {len(found)}",
                    "report": spec["report"].get(f"{data['label']}, {method['label']}", {}).get(str(p)),
                })  # fmt: skip
    return {"seeds": spec["seeds"], "rows": rows, "runs": runs}


def _purities(spec: dict[str, Any], data: dict[str, Any], method: dict[str, Any], p: float, device: str) -> list[float]:
    found = []
    for seed in data.get("seeds", spec["seeds"]):
        federation = seeded({n: v for n, v in data.items() if n not in ("label", "seeds")}, seed, p=p)
        algorithm = build_algorithm({**method["algorithm"], "k": data["k"]})
        task = build_task(spec["task"]) if method["algorithm"]["name"] != "kfed" else None
        done = fit(algorithm, task, federation, rounds=spec["rounds"], seed=seed, device=device, evaluations=1)
        found.append(float(done.purity or 0.0))
    return found


def draw(result: dict[str, Any], path: Path) -> None:
    """A panel per data set, two in a row; a line per method."""
    panels = list(dict.fromkeys(r["data"] for r in result["rows"]))
    lines = -(-len(panels) // 2)
    fig = plots.figure(6.4, 2.7 * lines)
    grid = fig.subplots(lines, 2, sharex=True, sharey=True, squeeze=False)
    for axes, panel in zip(grid.flat, panels, strict=False):
        _panel(axes, [r for r in result["rows"] if r["data"] == panel])
        axes.set_title(panel, fontsize=10)
    for axes in grid[-1]:
        axes.set_xlabel("heterogeneity p")
    for axes in grid[:, 0]:
        axes.set_ylabel("purity of the points (%)")
    plots.save(fig, path)


def _panel(axes: Any, rows: list[dict[str, Any]]) -> None:
    sizes = (7, 4)  # so that a line under another is seen
    for method, colour, size in zip(dict.fromkeys(r["method"] for r in rows), plots.COLOURS, sizes, strict=False):
        line = [r for r in rows if r["method"] == method]
        axes.plot([r["p"] for r in line], [r["purity"] for r in line], "o-", ms=size, color=colour, label=method)
        told = [(r["p"], r["report"]) for r in line if r["report"] is not None]
        if told:
            axes.plot(*zip(*told, strict=True), "x", color=colour, ms=7, label=f"{method}, the report")
    axes.set_ylim(0, 105)
    axes.legend(fontsize=7, frameon=False, loc="center right")
    plots.tidy(axes)
