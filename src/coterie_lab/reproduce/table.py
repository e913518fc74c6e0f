"""A table of methods and data sets, with the mean and standard deviation over seeds in every cell."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

from coterie.runs import plots
from coterie.runs.config import build_algorithm, build_task
from coterie.runs.fit import fit
from coterie_lab.reproduce.notebook import Notebook
from coterie_lab.reproduce.rounds import seeded


def run(spec: dict[str, Any], device: str, notebook: Notebook) -> dict[str, Any]:
    """Train every method on every data set with every seed.

    Args:
        spec: Table of the experiment.
        device: "auto", "cpu" or "cuda".
        notebook: Stores the parts that are done.
    """
    runs = []
    for column in spec["columns"]:
        for seed in spec["seeds"]:
            runs += notebook.entry(
                f"{column['name']}, seed {seed}", lambda c=column, s=seed: _every_method(spec, c, s, device)
            )
    rows = []
    for c, column in enumerate(spec["columns"]):
        for row in spec["methods"]:
            own = [r for r in runs if (r["column"], r["method"]) == (column["name"], row["name"])]
            scores = [r["score"] for r in own]
            paper = row["paper"][c] if "paper" in row else [None, None]
            rows.append({
                "data": column["name"],
                "method": row["name"],
                "ours": statistics.mean(scores),
                "±": statistics.pstdev(scores),
                "paper": paper[0],
                "paper ±": paper[1],
                "all groups": f"{sum(r['found'] for r in own)} of {len(own)}" if own[0]["found"] is not None else "",
                "s a run": statistics.mean(r["seconds"] for r in own),
            })  # fmt: skip
    return {"seeds": spec["seeds"], "rows": rows, "runs": runs}


def _every_method(spec: dict[str, Any], column: dict[str, Any], seed: int, device: str) -> list[dict[str, Any]]:
    federation = seeded(column["data"], seed)
    return [
        {"column": column["name"], "method": row["name"], "seed": seed, **_one(spec, row, federation, seed, device)}
        for row in spec["methods"]
    ]


def _one(spec: dict[str, Any], row: dict[str, Any], federation: Any, seed: int, device: str) -> dict[str, Any]:
    begin = time.monotonic()
    algorithm, task = build_algorithm(row["algorithm"]), build_task(spec["task"])
    done = fit(algorithm, task, federation, rounds=row["rounds"], seed=seed, device=device, evaluations=1)
    scores = done.evaluate(choose_on=spec["choose_on"])
    clustered = hasattr(algorithm, "k") or algorithm.tree(done.state) is not None
    return {
        "score": 100 * scores.mean,
        "purity": scores.clustering["purity"] if clustered else None,
        "found": scores.clustering["ari"] > 0.999 if clustered else None,
        "seconds": time.monotonic() - begin,
    }


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw our scores as bars, and the paper's as dashed lines.

    Args:
        result: The result of `run`.
        path: The picture.
    """
    data = list(dict.fromkeys(r["data"] for r in result["rows"]))
    methods = list(dict.fromkeys(r["method"] for r in result["rows"]))
    fig = plots.figure(3.1 * len(data), 3.6)
    for axes, name in zip(fig.subplots(1, len(data), sharey=True, squeeze=False)[0], data, strict=True):
        rows = [r for r in result["rows"] if r["data"] == name]
        for x, row in enumerate(rows):
            axes.bar(x, row["ours"], yerr=row["±"], color=plots.COLOURS[methods.index(row["method"])], capsize=3)
            axes.text(x, row["ours"] + row["±"] + 0.6, f"{row['ours']:.2f}", ha="center", fontsize=7)
            if row["paper"] is not None:
                axes.plot([x - 0.4, x + 0.4], [row["paper"]] * 2, color="black", lw=1.5, ls=(0, (2, 1)))
        axes.set_xticks(range(len(rows)), [r["method"] for r in rows], rotation=35, ha="right", fontsize=8)
        axes.set_title(name, fontsize=10)
        axes.set_ylim(bottom=min(r["ours"] for r in result["rows"]) - 8)
        plots.tidy(axes)
    compared = any(r["paper"] is not None for r in result["rows"])
    fig.axes[0].set_ylabel("test accuracy (%)" + ("; dashed: paper" if compared else ""))
    plots.save(fig, path)
