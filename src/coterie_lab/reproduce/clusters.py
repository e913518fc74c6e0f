"""One method with several numbers of clusters: its accuracy, how many clusters stay alive, and what `choose_k` says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from coterie.runs import plots
from coterie.runs.choosing import choose_k
from coterie.runs.config import build_algorithm
from coterie_lab.reproduce import table
from coterie_lab.reproduce.notebook import Notebook
from coterie_lab.reproduce.pretraining import heads
from coterie_lab.reproduce.rounds import seeded


def run(spec: dict[str, Any], device: str, notebook: Notebook) -> dict[str, Any]:
    """Train with every number of clusters and every seed, and choose one on held-out rows of training rows.

    Args:
        spec: Table of the experiment.
        device: "auto", "cpu" or "cuda".
        notebook: Stores the parts that are done.
    """
    ways = [
        {"name": f"k={k}", "rounds": spec["rounds"], "algorithm": {**spec["algorithm"], "k": k}} for k in spec["ks"]
    ]
    found = table.run({**spec, "choose_on": "train", "methods": ways}, device, notebook)
    chosen = notebook.entry("choose_k", lambda: _chosen(spec, device))
    rows = [
        {"k": k, "accuracy": row["ours"], "±": row["±"], "clusters alive": row["clusters"], **held_out}
        for k, row, held_out in zip(spec["ks"], found["rows"], chosen["rows"], strict=True)
    ]
    return {**found, "rows": rows, "chosen": chosen["k"], "reason": chosen["reason"]}


def _chosen(spec: dict[str, Any], device: str) -> dict[str, Any]:
    """The number that `choose_k` finds; it is not given the test rows."""
    seed = spec["seeds"][0]
    federation = replace(seeded(spec["columns"][0]["data"], seed), test=None)
    found = choose_k(
        build_algorithm({**spec["algorithm"], "k": 1}),
        heads(spec),
        federation,
        ks=spec["ks"],
        rounds=spec["choosing"]["rounds"],
        seeds=spec["choosing"]["seeds"],
        seed=seed,
        device=device,
    )
    rows = [{"held-out rows": 100 * row.known.mean, "new clients": 100 * row.new.mean} for row in found.rows]
    return {"k": found.k, "reason": found.reason, "rows": rows}


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw accuracy, and the clusters that stay alive, against k.

    Args:
        result: The result of `run`.
        path: The picture.
    """
    rows = result["rows"]
    k = [row["k"] for row in rows]
    fig = plots.figure(9, 3.6)
    left, right = fig.subplots(1, 2)
    test = [[row[name] for row in rows] for name in ("accuracy", "±")]
    left.errorbar(k, *test, fmt="o-", color=plots.COLOURS[0], capsize=3, label="test rows, ± deviation over seeds")
    for n, name in enumerate(("held-out rows", "new clients"), 1):
        values = [row[name] for row in rows]
        left.plot(k, values, "D--", color=plots.COLOURS[n], ms=4, lw=1, label=f"{name}, as choose_k sees them")
    left.axvline(result["chosen"], color=plots.COLOURS[2], alpha=0.3, lw=10)
    left.set_title(f"choose_k takes k = {result['chosen']}", fontsize=10)
    left.set_ylabel("accuracy (%)")
    low, high = left.get_ylim()
    left.set_ylim(low, high + 0.4 * (high - low))  # room for the legend
    left.legend(frameon=False, fontsize=8, loc="upper right")
    right.plot(k, k, color="0.6", lw=1, ls=":")
    right.plot(k, [row["clusters alive"] for row in rows], "o-", color=plots.COLOURS[0])
    right.set_ylabel("clusters with clients, mean over seeds")
    for axes in (left, right):
        axes.set_xticks(k)
        axes.set_xlabel("k")
        plots.tidy(axes)
    plots.save(fig, path)
