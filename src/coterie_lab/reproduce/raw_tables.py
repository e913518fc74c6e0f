"""Tables as they come, analysed as by `coterie fit`: how far is what is recommended from the best there is?"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from coterie.analysis.table_fit import fit_table
from coterie.data.panels import file_of
from coterie.runs import plots
from coterie.tables.reading import read_table
from coterie_lab.reproduce.notebook import Notebook
from coterie_lab.reproduce.tables import trained, ways_of

Cell = dict[str, Any]

FAR = 20.0  # times the best error: what is beyond is drawn there, with its figure


def run(spec: dict[str, Any], device: str, notebook: Notebook) -> dict[str, Any]:
    """Every table with every split.

    Args:
        spec: Table of the experiment.
        device: "auto", "cpu" or "cuda".
        notebook: Stores the parts that are done.
    """
    rows = []
    for table in spec["tables"]:
        cells = [
            notebook.entry(f"{table['file']}, seed {seed}", lambda t=table, s=seed: _cell(spec, t, s, device))
            for seed in spec["seeds"]
        ]
        rows.append(_row(table["file"], cells))
    return {"seeds": spec["seeds"], "rows": rows}


def _cell(spec: dict[str, Any], table: dict[str, str], seed: int, device: str) -> Cell:
    frame = read_table(file_of(table["file"]))
    begin = time.monotonic()
    found = fit_table(frame, table["client"], table["target"], seed=seed, device=device)
    seconds = time.monotonic() - begin
    run = found.ways[0].run
    federation = run._cohort.federation  # that it was trained and scored on
    ways = ways_of(spec, run.task, federation)
    done = {name: trained(spec, method, run.task, federation, seed, device) for name, method in ways.items()}
    errors = {name: float(np.mean(way["error"])) for name, way in done.items() if "error" in way}
    way = found.way(found.recommended)
    assert way is not None  # it is trained in any case
    return {
        "groups": found.groups.count,
        "recommended": found.recommended,
        "error": float(way.known.mean),
        "errors": errors,
        "seconds": seconds,
    }


def _row(table: str, cells: list[Cell]) -> dict[str, Any]:
    """One table; the best candidate is the one with the lowest mean over all splits."""
    common = set.intersection(*(set(cell["errors"]) for cell in cells))
    means = {name: statistics.fmean(cell["errors"][name] for cell in cells) for name in sorted(common)}
    best = min(means, key=lambda name: means[name])
    recommended = statistics.fmean(cell["error"] for cell in cells)
    return {
        "table": table,
        "recommended": [cell["recommended"] for cell in cells],
        "groups": [cell["groups"] for cell in cells],
        "MSE": recommended,
        "best": best,
        "its MSE": means[best],
        "above best (%)": 100 * (recommended / means[best] - 1),
        "one for all": means["one for all"],
        "one each": means["one each"],
        "s": statistics.fmean(cell["seconds"] for cell in cells),
    }


def draw(result: dict[str, Any], path: Path) -> None:
    """The error of what is recommended, as a share of the best candidate's, with one for all and one each beside it.

    Args:
        result: The result of `run`.
        path: The picture.
    """
    fig = plots.figure(6.4, 0.5 * len(result["rows"]) + 1.2)
    axes = fig.subplots()
    axes.set_xscale("log")
    names = {"one for all": "one for all", "one each": "one each", "MSE": "recommended by coterie fit"}
    for y, row in enumerate(result["rows"]):
        for i, (name, label) in enumerate(names.items()):
            ratio, colour = row[name] / row["its MSE"], plots.COLOURS[i]
            at, mark = (ratio, "o") if ratio < FAR else (FAR, ">")
            axes.scatter(at, y, s=46, color=colour, marker=mark, label=label if y == 0 else None, zorder=3)
            if ratio >= FAR:
                axes.annotate(f"{ratio:.2g}", (at, y), xytext=(7, -3), textcoords="offset points", fontsize=8)
    axes.set_xlim(0.9, 1.6 * FAR)
    axes.set_xticks([1, 2, 5, 10, FAR], ["1", "2", "5", "10", f"{FAR:g}"])
    axes.minorticks_off()
    axes.axvline(1, color=plots.INK, lw=0.7)
    axes.axvline(1.05, color=plots.INK, lw=0.7, ls=":")
    axes.set_yticks(range(len(result["rows"])), [row["table"].replace("_", " ") for row in result["rows"]])
    axes.invert_yaxis()
    axes.set_xlabel("test error / that of the best candidate (dotted: 5 % above)")
    axes.legend(fontsize=8, frameon=False, loc="center right")
    plots.tidy(axes)
    plots.save(fig, path)
