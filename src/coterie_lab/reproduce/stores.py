"""One table, analysed as `coterie fit` does it: are the groups found, and how far is the truth?

Cells (a number of groups and a seed) are independent, and are computed side by side on all cores.
"""

from __future__ import annotations

import statistics
import time
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import numpy as np

from coterie import data
from coterie.analysis.table_fit import TableFit, fit_table
from coterie.core.federation import Federation
from coterie.runs import plots
from coterie.runs.metrics import ari
from coterie_lab.reproduce.notebook import Notebook
from coterie_lab.reproduce.workers import pool

Cell = dict[str, Any]


def run(spec: dict[str, Any], device: str, notebook: Notebook) -> dict[str, Any]:
    """Every number of groups with every seed.

    Args:
        spec: Table of the experiment.
        device: Not used: cells are small, and there are many.
        notebook: Stores the parts that are done.
    """
    kinds = [(1, spec["one"]), *((k, spec["several"]) for k in spec["groups"])]
    rows = []
    with pool() as workers:
        waiting = [(k, _cells(workers, spec, k, seeds, notebook)) for k, seeds in kinds]
        for k, cells in waiting:
            rows.append(_row(k, notebook.entry(_name(k), lambda cells=cells: [cell.result() for cell in cells])))
    several = [row for row in rows if row["groups"] > 1]
    return {
        "seeds": sorted({*spec["one"], *spec["several"]}),
        "rows": rows,
        "one group": f"{rows[0]['right']} of {rows[0]['of']}",
        "several groups": f"{sum(r['right'] for r in several)} of {sum(r['of'] for r in several)}",
    }


def _name(k: int) -> str:
    return f"{k} group{'s' * (k > 1)}"


def _cells(workers: Executor, spec: dict[str, Any], k: int, seeds: list[int], notebook: Notebook) -> list[Future[Cell]]:
    return [] if _name(k) in notebook.entries else [workers.submit(cell, spec, k, seed) for seed in seeds]


def cell(spec: dict[str, Any], k: int, seed: int) -> Cell:
    """One table: what is found, and what it comes to on test rows.

    Args:
        spec: Table of the experiment.
        k: Kinds of stores.
        seed: Of the table; that of the analysis is 0.
    """
    table = data.stores(stores=spec["stores"], groups=k, rows=tuple(spec["rows"]), seed=seed)
    begin = time.monotonic()
    found = fit_table(table.rows, "store", "sales", device="cpu", jobs=1)
    seconds = time.monotonic() - begin
    train = found.ways[0].run._cohort.federation
    truth = dict(zip(table.about["store"], table.kind.tolist(), strict=True))
    return {
        "seed": seed,
        "groups": found.groups.count,
        "ari": ari(found.labels, table.kind) if k > 1 else None,
        "recommended": found.recommended,
        "errors": {way.name: float(way.known.mean) for way in found.ways},
        "error": _error(found, found.recommended),
        "informed": _informed(train, np.array([truth[name] for name in train.ids or ()])),
        "seconds": seconds,
    }


def _error(found: TableFit, name: str) -> float:
    way = found.way(name)
    assert way is not None  # it is trained in any case
    return float(way.known.mean)


def _informed(federation: Federation, kind: np.ndarray) -> float:
    """The test error of least squares by group, for whoever knows the groups."""
    test, train = federation.part("test"), federation.train
    errors = np.empty(len(federation))
    for j in np.unique(kind):
        own = np.flatnonzero(kind == j).tolist()
        x, y = (np.concatenate([train.client(i)[part].numpy() for i in own]) for part in (0, 1))
        theta, *_ = np.linalg.lstsq(np.column_stack([x, np.ones(len(x))]), y, rcond=None)
        for i in own:
            rows, targets = (part.numpy() for part in test.client(i))
            errors[i] = np.square(targets - rows @ theta[:-1] - theta[-1]).mean()
    return float(errors.mean())


def _row(k: int, cells: list[Cell]) -> dict[str, Any]:
    def above(name: str) -> float:
        return statistics.fmean(100 * (1 - c["error"] / c["errors"][name]) for c in cells)

    return {
        "groups": k,
        "right": sum(c["groups"] == k for c in cells),
        "of": len(cells),
        "found": [c["groups"] for c in cells],
        "least ARI": None if k == 1 else min(c["ari"] for c in cells),
        "of the informed (%)": statistics.fmean(100 * c["error"] / c["informed"] for c in cells),
        "at most (%)": max(100 * c["error"] / c["informed"] for c in cells),
        "below one for all (%)": above("one for all"),
        "below one each (%)": above("one each"),
        "recommended": sorted({c["recommended"] for c in cells}),
        "s": statistics.fmean(c["seconds"] for c in cells),
    }


def draw(result: dict[str, Any], path: Path) -> None:
    """How many groups are found over how many there are, with the error beside that of the model that knows them.

    Args:
        result: The result of `run`.
        path: The picture.
    """
    fig = plots.figure(7, 2.8)
    left, right = fig.subplots(1, 2)
    for row in result["rows"]:
        k = row["groups"]
        for found in sorted(set(row["found"])):
            times = row["found"].count(found)
            left.scatter(k, found, s=12 * times, color=plots.COLOURS[0] if found == k else plots.COLOURS[1])
            left.annotate(str(times), (k, found), xytext=(9, -3), textcoords="offset points", fontsize=7)
    left.set_xlabel("groups there are")
    left.set_ylabel("groups found (how often)")
    at = [row["groups"] for row in result["rows"]]
    right.plot(at, [row["of the informed (%)"] for row in result["rows"]], "o-", color=plots.COLOURS[0])
    right.axhline(100, color=plots.INK, lw=0.7)
    right.set_xlabel("groups there are")
    right.set_ylabel("test error, % of that of the\nmodel that knows the groups")
    for axes in (left, right):
        axes.set_xticks(at)
        plots.tidy(axes)
    plots.save(fig, path)
