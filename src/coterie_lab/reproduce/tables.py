"""Real tables: what every way of sharing comes to on test rows, and which one `compare` recommends without them."""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from coterie import CFL, IFCA, MixedEffects
from coterie.core.federation import Federation
from coterie.core.method import Method
from coterie.core.task import Task
from coterie.methods.personal import Personal
from coterie.runs import plots
from coterie.runs.candidates import SOFT, Simplicity, candidates
from coterie.runs.choosing import compare
from coterie.runs.config import build_federation, build_task
from coterie.runs.fit import fit
from coterie.runs.hurt import Hurt
from coterie_lab.reproduce.mixed_lm import mixed_lm
from coterie_lab.reproduce.notebook import Notebook

Cell = dict[str, Any]

ALL, EACH, PERSONAL, EFFECTS = "one for all", "one each", "one for all + personal", "random effects"
IFCA_ALONE, IFCA_PERSONAL, IFCA_CAUTIOUS = "IFCA", "IFCA + personal", "IFCA + cautious personal"
CAUTION = 2.0  # standard errors
MIXED_LM, RECOMMENDED = "MixedLM", "recommended"
DRAWN = {  # what the picture shows, and how
    ALL: "one for all",
    EACH: "one each",
    "hard groups": "hard groups, best k",
    PERSONAL: "one + personal",
    EFFECTS: "random effects",
    "groups of random effects": "groups of random effects",
    RECOMMENDED: "recommended",
}


def run(spec: dict[str, Any], device: str, notebook: Notebook) -> dict[str, Any]:
    """Every candidate on every split of every table.

    Args:
        spec: Table of the experiment.
        device: "auto", "cpu" or "cuda".
        notebook: Stores the parts that are done.
    """
    rows, tables = [], []
    for table in spec["tables"]:
        cells = []
        for seed in spec["seeds"]:
            cell = notebook.entry(f"{table}, seed {seed}", lambda t=table, s=seed: _cell(spec, t, s, device))
            beside = notebook.entry(f"{table}, seed {seed}, MixedLM", lambda t=table, s=seed: _beside(spec, t, s))
            cells.append({**cell, "ways": {**cell["ways"], MIXED_LM: beside}})
        rows += _rows(table, cells)
        tables.append(_summary(table, cells))
    return {"seeds": spec["seeds"], "rows": rows, "tables": tables}


# --- one split of one table -----------------------------------------------------------------------------------------


def _cell(spec: dict[str, Any], table: str, seed: int, device: str) -> Cell:
    """All candidates, trained on the training rows and scored on the test rows; and what is recommended."""
    federation, task = _data(table, seed)
    ways = ways_of(spec, task, federation)
    choice = compare(
        ways,
        task,
        replace(federation, test=None),  # the choice is made without the test rows
        rounds=spec["rounds"],
        seeds=spec["splits"],
        seed=seed,
        new=0,  # all clients of a table are known
        device=device,
    )
    done = {name: trained(spec, method, task, federation, seed, device) for name, method in ways.items()}
    return {"table": table, "seed": seed, "ways": done, RECOMMENDED: choice.recommended, "reason": choice.reason}


def _data(table: str, seed: int) -> tuple[Federation, Task]:
    federation = build_federation({"name": "panel", "table": table, "seed": seed})
    model = {"name": "linear", "inputs": federation.train.x.shape[1], "outputs": 1}
    return federation, build_task({"kind": "regressor", "model": model})


def ways_of(spec: dict[str, Any], task: Task, federation: Federation) -> dict[str, Method]:
    """The candidates of `compare` but for CFL and soft groups, and IFCA, whose place FedX has among them.

    What is left out is for other data (groups that differ in direction, clients whose rows are of several kinds), and
    would take most of the time.

    Args:
        spec: Table of the experiment.
        task: What is learnt.
        federation: The clients.
    """
    every = candidates(task, federation, k=spec["k"])
    ways = {n: m for n, m in every.items() if Simplicity.of(m).kind != SOFT and not n.startswith("CFL")}
    stepping = every["CFL"]
    assert isinstance(stepping, CFL)
    ifca = IFCA(k=spec["k"], lr=stepping.lr)  # what the curvature of the rows bears
    return {**ways, IFCA_ALONE: ifca, IFCA_PERSONAL: Personal(ifca), IFCA_CAUTIOUS: Personal(ifca, caution=CAUTION)}


def trained(spec: dict[str, Any], method: Method, task: Task, federation: Federation, seed: int, device: str) -> Cell:
    """The test error of every client with a method, or why it failed.

    Args:
        spec: Table of the experiment.
        method: The method.
        task: What is learnt.
        federation: The clients.
        seed: Of the run.
        device: "auto", "cpu" or "cuda".
    """
    begin = time.process_time()
    try:
        done = fit(method, task, federation, rounds=spec["rounds"], seed=seed, device=device, evaluations=1)
    except ValueError as failure:
        return {"failed": str(failure)}
    seconds = time.process_time() - begin
    return {"error": done.scores.per_client.tolist(), "groups": len(np.unique(done.labels)), "seconds": seconds}


def _beside(spec: dict[str, Any], table: str, seed: int) -> Cell:
    """MixedLM, and the seconds that random effects take on the same machine, once everything is loaded."""
    federation, task = _data(table, seed)
    ours = [trained(spec, MixedEffects(), task, federation, seed, "cpu")["seconds"] for _ in range(3)]
    return {**mixed_lm(federation, spec["limit"]), "ours": min(ours)}


# --- the table ------------------------------------------------------------------------------------------------------


def _rows(table: str, cells: list[Cell]) -> list[dict[str, Any]]:
    """One line per candidate: its error, by how much it is above the best one's, and whom it hurts."""
    best = min(_candidates(cells), key=lambda way: _error(cells, way))
    return [
        {
            "table": table,
            "way": way,
            **{name: None if math.isnan(figure) else figure for name, figure in _figures(cells, way, best).items()},
            RECOMMENDED: f"{sum(cell[RECOMMENDED] == way for cell in cells)} of {len(cells)}",
        }
        for way in cells[0]["ways"]
    ]


def _figures(cells: list[Cell], way: str, best: str) -> dict[str, float]:
    """NaN where there is nothing to tell: JSON has no such number."""
    return {
        "MSE": _error(cells, way),
        "±": float(np.std(_each(cells, way))) if _each(cells, way) else math.nan,
        "above best (%)": _above(_error(cells, way), _error(cells, best)),
        "hurt (%)": _hurt(cells, way, ALL),
        "than alone (%)": _hurt(cells, way, EACH),
        "CPU s": _mean_of(done["seconds"] for cell in cells if "seconds" in (done := cell["ways"][way])),
    }


def _summary(table: str, cells: list[Cell]) -> dict[str, Any]:
    """What the experiment is about, of one table."""
    ways = _candidates(cells)
    best = min(ways, key=lambda way: _error(cells, way))
    hard = [way for way in ways if re.fullmatch(r"\d+ groups", way)]
    groups = min(hard, key=lambda way: _error(cells, way))
    chosen = statistics.fmean(_mean(cell["ways"][cell[RECOMMENDED]]) for cell in cells)
    return {
        "table": table,
        "best": best,
        "hard groups": groups,
        RECOMMENDED: [cell[RECOMMENDED] for cell in cells],
        "recommended MSE": chosen,
        "above best (%)": _above(chosen, _error(cells, best)),
        "above one + personal (%)": _above(chosen, _error(cells, PERSONAL)),
        "IFCA + personal above random effects (%)": _above(_error(cells, IFCA_PERSONAL), _error(cells, EFFECTS)),
        "IFCA + cautious personal above random effects (%)": _above(
            _error(cells, IFCA_CAUTIOUS), _error(cells, EFFECTS)
        ),
        "hurt against where they began (%)": {
            PERSONAL: _hurt(cells, PERSONAL, ALL),
            IFCA_PERSONAL: _hurt(cells, IFCA_PERSONAL, IFCA_ALONE),
            IFCA_CAUTIOUS: _hurt(cells, IFCA_CAUTIOUS, IFCA_ALONE),
            EFFECTS: _hurt(cells, EFFECTS, IFCA_ALONE),
        },
        MIXED_LM: _against(cells),
    }


def _against(cells: list[Cell]) -> dict[str, Any]:
    """Random effects beside MixedLM, on the splits on which that converges; times on those on which it ends."""
    pairs = [(cell["ways"][EFFECTS], cell["ways"][MIXED_LM]) for cell in cells]
    ended = [(ours, theirs) for ours, theirs in pairs if "error" in theirs]
    sound = [(ours, theirs) for ours, theirs in ended if theirs["converged"]]
    above = [_above(_mean(ours), _mean(theirs)) for ours, theirs in sound]
    return {
        "ended": len(ended),
        "converged": len(sound),
        "ours above (%)": above,
        "times faster": [theirs["seconds"] / theirs["ours"] for _, theirs in ended],
        "failed": [theirs["failed"] for _, theirs in pairs if "failed" in theirs],
    }


def _candidates(cells: list[Cell]) -> list[str]:
    """The candidates that have figures on every split."""
    return [way for way in cells[0]["ways"] if way != MIXED_LM and len(_each(cells, way)) == len(cells)]


def _mean(done: Cell) -> float:
    return float(np.mean(done["error"]))


def _each(cells: list[Cell], way: str) -> list[float]:
    """The error on every split on which there is one."""
    return [_mean(cell["ways"][way]) for cell in cells if "error" in cell["ways"][way]]


def _error(cells: list[Cell], way: str) -> float:
    return _mean_of(_each(cells, way))


def _mean_of(values: Iterable[float]) -> float:
    known = list(values)
    return statistics.fmean(known) if known else math.nan


def _above(error: float, than: float) -> float:
    """By how many percent an error is larger."""
    return 100 * (error / than - 1)


def _hurt(cells: list[Cell], way: str, than: str) -> float:
    """The share of clients, in percent, that are served worse than in another way, over all splits."""
    both = [cell["ways"] for cell in cells if all("error" in cell["ways"][name] for name in (way, than))]
    if way == than or not both:
        return math.nan
    ours, theirs = (np.concatenate([ways[name]["error"] for ways in both]) for name in (way, than))
    return 100 * Hurt.of(ours, theirs).share


# --- the picture ----------------------------------------------------------------------------------------------------


def draw(result: dict[str, Any], path: Path) -> None:
    """A panel for every table with a bar for every way; the best is dark.

    Args:
        result: The result of `run`.
        path: The picture.
    """
    fig = plots.figure(2.1 * len(result["tables"]) + 1.4, 3.1)
    panels = fig.subplots(1, len(result["tables"]), sharey=True, squeeze=False)[0]
    for axes, table in zip(panels, result["tables"], strict=True):
        _bars(axes, _drawn(result, table))
        axes.set_title(table["table"].replace("_", " "), fontsize=10)
        axes.set_xlabel("test MSE", fontsize=8)
    panels[0].set_yticks(range(len(DRAWN)), list(DRAWN.values()), fontsize=9)
    panels[0].invert_yaxis()
    plots.save(fig, path)


def _drawn(result: dict[str, Any], table: dict[str, Any]) -> list[float]:
    errors = {row["way"]: row["MSE"] for row in result["rows"] if row["table"] == table["table"]}
    errors |= {"hard groups": errors[table["hard groups"]], RECOMMENDED: table["recommended MSE"]}
    return [float("nan") if errors[way] is None else errors[way] for way in DRAWN]


def _bars(axes: Any, errors: list[float]) -> None:
    """Bars with their figures; one that is far longer than the others is cut off."""
    known = [e for e in errors if not np.isnan(e)]
    end = min(max(known), 3 * statistics.median(known))
    for y, (way, error) in enumerate(zip(DRAWN, errors, strict=True)):
        colour = plots.COLOURS[1] if way == RECOMMENDED else plots.COLOURS[0]
        axes.barh(y, min(error, end), 0.72, color=colour, alpha=1.0 if error <= 1.03 * min(known) else 0.45)
        cut = " →" if error > end else ""
        axes.text(min(error, end) + 0.02 * end, y, f"{error:.3f}{cut}".replace("0.", ".", 1), va="center", fontsize=8)
    axes.set_xlim(0, 1.3 * end)
    plots.tidy(axes)
    axes.grid(axis="y", visible=False)
