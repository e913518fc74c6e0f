"""A table of methods and data sets, with the mean and standard deviation over seeds in every cell.

On CPUs the data sets and seeds are computed side by side. Every run is scored as the authors did: by clusters that are
chosen on the rows that `choose_on` names, after the last round or, if `best_round` says so, after the best one for the
test rows. If that is not how a user would be served, it is scored that way too: by clusters chosen on training rows,
after the last round.
"""

from __future__ import annotations

import json
import statistics
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

from coterie.core.federation import Federation
from coterie.core.task import Task
from coterie.engines import find_device
from coterie.engines.chunks import compiling_after
from coterie.runs import plots
from coterie.runs.config import build_algorithm, build_task
from coterie.runs.fit import fit
from coterie.runs.run import Run
from coterie_lab.reproduce.notebook import Notebook
from coterie_lab.reproduce.pretraining import heads, pretrain
from coterie_lab.reproduce.rounds import seeded
from coterie_lab.reproduce.workers import side_by_side

HONEST = "chosen on training rows, last round"


def run(spec: dict[str, Any], device: str, notebook: Notebook) -> dict[str, Any]:
    """Train every method on every data set with every seed.

    Args:
        spec: Table of the experiment.
        device: "auto", "cpu" or "cuda".
        notebook: Stores the parts that are done.
    """
    if "pretrain" in spec:
        pretrain(spec, device)
    cells = {f"{c['name']}, seed {s}": (spec, c, s, device) for c in spec["columns"] for s in spec["seeds"]}
    runs = [one for own in side_by_side(every_method, cells, device, notebook) for one in own]
    rows = [_row(spec, c, row, runs) for c in range(len(spec["columns"])) for row in spec["methods"]]
    return {"seeds": spec["seeds"], "rows": rows, "runs": runs}


def _row(spec: dict[str, Any], c: int, row: dict[str, Any], runs: list[dict[str, Any]]) -> dict[str, Any]:
    """One method on one data set."""
    column = spec["columns"][c]["name"]
    own = [r for r in runs if (r["column"], r["method"]) == (column, row["name"])]
    paper = row["paper"][c] if "paper" in row else [None, None]
    honest = [r["honest"] for r in own]
    shown = {HONEST: statistics.mean(honest), f"{HONEST} ±": statistics.pstdev(honest)} if _is_other(spec) else {}
    found = [r["found"] for r in own]
    return {
        "data": column,
        "method": row["name"],
        "ours": statistics.mean(r["score"] for r in own),
        "±": statistics.pstdev(r["score"] for r in own),
        "paper": paper[0],
        "paper ±": paper[1],
        **shown,
        "clusters": statistics.mean(r["clusters"] for r in own) if own[0]["clusters"] else None,
        "all groups": f"{sum(found)} of {len(own)}" if None not in found else "",
        "s a run": statistics.mean(r["seconds"] for r in own),
    }


def _is_other(spec: dict[str, Any]) -> bool:
    """Whether the authors score otherwise than users are served."""
    return spec["choose_on"] == "test" or spec.get("best_round", False)


def every_method(spec: dict[str, Any], column: dict[str, Any], seed: int, device: str) -> list[dict[str, Any]]:
    """Every method on one data set with one seed.

    Args:
        spec: Table of the experiment.
        column: The part of it that describes the data set.
        seed: Of the data set and of the runs.
        device: "auto", "cpu" or "cuda".
    """
    federation, task = (
        seeded(column["data"], seed),
        heads(spec) if "pretrain" in spec else _task(json.dumps(spec["task"])),
    )
    scores: list[dict[str, Any]] = []
    kept = None  # a run; with it are the features of frozen layers, which the next one shares
    for row in spec["methods"]:
        begin = time.monotonic()
        with compiling_after(spec.get("compile_after")):
            kept = _trained(spec, row, task, federation, seed, device)
        named = {"column": column["name"], "method": row["name"], "seed": seed}
        scores.append({**named, **_scores(spec, kept), "seconds": time.monotonic() - begin})
    return scores


@lru_cache(maxsize=1)  # seeds that are computed one after the other share what is compiled for it
def _task(table: str) -> Task:
    return build_task(json.loads(table))


def _trained(
    spec: dict[str, Any], row: dict[str, Any], task: Task, federation: Federation, seed: int, device: str
) -> Run:
    place = find_device(device)
    return fit(
        build_algorithm(row["algorithm"]),
        task,
        federation,
        rounds=row["rounds"],
        seed=seed,
        device=device,
        precision=spec.get("precision", "float32") if place.type == "cuda" else "float32",
        evaluations=row.get("evaluations", spec.get("evaluations", 1)),
    )


def _scores(spec: dict[str, Any], done: Run) -> dict[str, Any]:
    """What a run scores, in per cent, and the clusters that it found."""
    scores, best = done.evaluate(choose_on=spec["choose_on"]), spec.get("best_round", False)
    method, known = done.algorithm, done.scores.groups is not None
    clustered = hasattr(method, "k") or method.tree(done.state) is not None
    over_time = [row["accuracy"] for row in done.history if row["accuracy"] is not None]
    return {
        "score": 100 * (max(over_time) if best else scores.mean),
        "honest": 100 * done.scores.mean,
        "clusters": len(set(done.labels.tolist())) if clustered else None,
        "purity": scores.clustering["purity"] if clustered and known else None,
        "ari": scores.clustering["ari"] if clustered and known else None,
        "found": scores.clustering["ari"] > 0.999 if clustered and known else None,
    }


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw our scores as bars, and the paper's as dashed lines.

    Args:
        result: The result of `run`.
        path: The picture.
    """
    data = list(dict.fromkeys(r["data"] for r in result["rows"]))
    methods, lowest = list(dict.fromkeys(r["method"] for r in result["rows"])), min(r["ours"] for r in result["rows"])
    fig = plots.figure(max(3.1, 0.75 * len(methods)) * len(data), 3.6)
    for axes, name in zip(fig.subplots(1, len(data), sharey=True, squeeze=False)[0], data, strict=True):
        rows = [r for r in result["rows"] if r["data"] == name]
        for x, row in enumerate(rows):
            axes.bar(x, row["ours"], yerr=row["±"], color=plots.COLOURS[methods.index(row["method"])], capsize=3)
            plate = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
            axes.text(x, lowest - 7.2, f"{row['ours']:.2f}", ha="center", bbox=plate, fontsize=7)  # clear of the lines
            if row["paper"] is not None:
                axes.plot([x - 0.4, x + 0.4], [row["paper"]] * 2, color="black", lw=1.5, ls=(0, (2, 1)))
        axes.set_xticks(range(len(rows)), [r["method"] for r in rows], rotation=35, ha="right", fontsize=8)
        axes.set_title(name, fontsize=10)
        axes.set_ylim(bottom=lowest - 8)
        plots.tidy(axes)
    compared = any(r["paper"] is not None for r in result["rows"])
    fig.axes[0].set_ylabel("test accuracy (%)" + ("; dashed: paper" if compared else ""))
    plots.save(fig, path)
