"""The folder of an analysed table: what `coterie fit` writes, and what `predict` and `assign` need of it.

report.md, *.png     for people
summary.json         the same for programs
labels.csv           one line per client
preparation.json     how rows of the table become numbers
serving.safetensors  the models of groups, and of clients that have their own
model/               the run folder of the recommended method
groups/              that of the groups, where the recommended method has none
"""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy.special import softmax

from coterie.analysis.report import write_report
from coterie.analysis.table_fit import FOUND, MODEL, TableFit
from coterie.estimators.clients import UNKNOWN
from coterie.estimators.serving import Serving, module_value
from coterie.runs.load import load
from coterie.runs.run import Run, assign
from coterie.storage.reading import read_json, read_tensors
from coterie.storage.snapshot import discard, write_tensors, write_text
from coterie.tables.column_sums import in_order
from coterie.tables.preparation import Preparation
from coterie.tables.rows import as_pandas

if TYPE_CHECKING:
    import pandas as pd

PREPARATION, SERVING, SUMMARY, LABELS = "preparation.json", "serving.safetensors", "summary.json", "labels.csv"
OWN, SHARED = "own.", "models."  # how the tensors of clients and of groups are called


@contextmanager
def new_folder(path: Path, overwrite: bool) -> Iterator[Path]:
    """A folder that gets its name once everything is in it, so that one that fails leaves nothing behind.

    Args:
        path: What it is to be called.
        overwrite: Whether it may take the place of one that is there.

    Raises:
        ValueError: There is something else, or nothing may be replaced.
    """
    if path.exists():
        if not path.is_dir():
            raise ValueError(f"{path} is a file: give another --out")
        if any(path.iterdir()) and not overwrite:
            raise ValueError(f"{path} is not empty: give another --out, or --overwrite")
        if any(path.iterdir()) and not is_table_fit(path):
            raise ValueError(f"{path} is no folder that `coterie fit` has written, so --overwrite leaves it alone")
    part = path.with_name(f".{path.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        discard(path)
        part.rename(path)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_folder(found: TableFit, folder: Path) -> Path:
    """Write everything but the run folders, which are there already.

    Args:
        found: What was found.
        folder: Where to.

    Returns:
        The report.
    """
    ids = list(found.federation.ids or ())
    serving = Serving.of(found.run, lambda theta: theta)
    own = {} if serving.own is None else {OWN + n: x.contiguous() for n, x in serving.own.items()}
    tensors = own | {SHARED + n: x.contiguous() for n, x in serving.models.items()}
    arrays = {"population": serving.population, "which": serving.which, "shares": serving.shares}
    tensors |= {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in arrays.items()}
    write_tensors(folder / SERVING, tensors)
    write_text(folder / PREPARATION, json.dumps({**found.preparation.plain(), "clients": ids}, ensure_ascii=False))
    write_text(folder / LABELS, csv_of(labels_of(found)))
    write_text(folder / SUMMARY, json.dumps(summary(found), indent=1, ensure_ascii=False) + "\n")
    return write_report(found, folder)


def labels_of(found: TableFit) -> list[dict[str, Any]]:
    """One line per client: its group, whether that is sure, and its rows."""
    sizes = found.federation.train.sizes.tolist()
    lines = zip(found.federation.ids or (), found.labels.tolist(), found.unsure.tolist(), sizes, strict=True)
    return [{"client": name, "group": j, "unsure": int(doubt), "rows": n} for name, j, doubt, n in lines]


def summary(found: TableFit) -> dict[str, Any]:
    """What was found, as plain values."""
    target = found.preparation.target
    return {
        "client": found.preparation.layout.client,
        "target": target.name,
        "classes": list(target.classes) or None,
        "clients": len(found.federation),
        "rows": len(found.federation.train.x),
        "columns": list(found.preparation.names),
        "groups": found.groups.count,
        "sure": found.groups.sure,
        "verdict": found.groups.verdict,
        "sizes": np.bincount(found.labels, minlength=found.groups.count).tolist(),
        "unsure": int(found.unsure.sum()),
        "recommended": found.recommended,
        "reason": None if found.comparison is None else found.comparison.reason,
        "metric": found.ways[0].known.metric,
        "ways": [
            {"name": w.name, "known": _plain(w.score), "new": None if w.new is None else _plain(w.new_score)}
            for w in found.ways
        ],
        "differs": None if found.differences is None else [found.differences.names[c] for c in found.differences.order],
        "attributes": [each._asdict() for each in found.associations],
        "notes": list(found.preparation.notes),
    }


def is_table_fit(folder: Path) -> bool:
    """Whether a folder is one of an analysed table."""
    return (folder / PREPARATION).is_file()


def predict_table(folder: Path, frame: Any) -> pd.DataFrame:
    """Predict the rows of a table.

    Known clients are served by their own model, or by that of their group. A client that was not there is served by
    all groups' models, mixed by their shares; if some of its rows have a target, and others have not, it is placed by
    these first.

    Args:
        folder: Of an analysed table.
        frame: The rows; the target may be missing.

    Returns:
        A row for every row: the client, whether it is known, the prediction, and of classes their probabilities.
    """
    import pandas as pd

    preparation, ids = read_preparation(folder)
    rows = as_pandas(frame)
    x, names = preparation.features(rows), preparation.clients(rows)
    at = _positions(names, ids)
    run = _model(folder)
    serving, target = _serving(folder), preparation.target

    def value(model: Any, part: np.ndarray) -> np.ndarray:
        out = module_value(run.task, model, part)
        return softmax(out, axis=1) if target.classes else out

    out = serving.values(x, at, max(1, len(target.classes)), value)
    for own, placed in _placed(preparation, run, rows, x, names, at):
        out[own] = placed
    told = {preparation.layout.client: names, "known": at != UNKNOWN}
    if not target.classes:
        return pd.DataFrame({**told, target.name: target.decode(out[:, 0])})
    chosen = np.array(target.classes, dtype=object)[out.argmax(1)]
    return pd.DataFrame({**told, target.name: chosen, **{f"p({c})": out[:, i] for i, c in enumerate(target.classes)}})


def assign_table(folder: Path, frame: Any) -> list[dict[str, Any]]:
    """The group of every client of a table, old or new, by its rows that have a target; without any it is left out.

    Args:
        folder: Of an analysed table.
        frame: The rows, with targets.
    """
    preparation, _ = read_preparation(folder)
    rows = as_pandas(frame)
    x, names = preparation.features(rows), preparation.clients(rows)
    y, there = preparation.targets(rows)
    run = _grouped(folder)
    found = []
    for name in sorted({*names} - {""}, key=in_order):
        own = (names == name) & there
        if own.any():
            label = 0 if run is None else assign(run.algorithm, run.state, run.task, x[own], y[own])
            found.append({"client": name, "rows": int(own.sum()), "group": int(label)})
    if not found:
        raise ValueError(f"no client has a row with a value of '{preparation.target.name}' to be placed by")
    return found


# --- what is read -----------------------------------------------------------------------------------------------------


def read_preparation(folder: Path) -> tuple[Preparation, list[str]]:
    """How rows of an analysed table become numbers, and its clients."""
    path = folder / PREPARATION
    if not path.is_file():
        raise ValueError(f"{folder} is no folder that `coterie fit` has written: it has no {PREPARATION}")
    try:
        table = read_json(path, {"clients": [str]})
        return Preparation.from_plain(table), [str(name) for name in table["clients"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error})") from None


def _serving(folder: Path) -> Serving:
    path = folder / SERVING
    tensors, _ = read_tensors(path)
    try:
        own = {n.removeprefix(OWN): x for n, x in tensors.items() if n.startswith(OWN)}
        models = {n.removeprefix(SHARED): x for n, x in tensors.items() if n.startswith(SHARED)}
        population, which, shares = (tensors[name].numpy() for name in ("population", "which", "shares"))
        return Serving(models, population, own or None, which, shares)
    except KeyError as error:
        raise ValueError(f"{path} is damaged (it has no {error})") from None


def _model(folder: Path) -> Run:
    run = load(folder / MODEL)
    if run.task.functions is None:
        raise ValueError(f"{folder} was made from Python with a module of its own: use ct.load(folder, task=…) there")
    return run


def _grouped(folder: Path) -> Run | None:
    """The run that knows the groups; None where there is one group."""
    if read_json(folder / SUMMARY, {"groups": int})["groups"] == 1:
        return None
    return load(folder / FOUND) if (folder / FOUND).is_dir() else _model(folder)


def _positions(names: np.ndarray, ids: list[str]) -> np.ndarray:
    """Where every row's client is among those that are known (n,)."""
    at = {name: i for i, name in enumerate(ids)}
    return np.array([at.get(name, UNKNOWN) for name in names])


def _placed(
    preparation: Preparation, run: Run, rows: pd.DataFrame, x: np.ndarray, names: np.ndarray, at: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """New clients with targets in some of their rows: their rows, and what the model that they are placed at says."""
    if preparation.target.name not in rows.columns:
        return
    y, there = preparation.targets(rows)
    for name in sorted({*names[(at == UNKNOWN) & ~there]} & {*names[(at == UNKNOWN) & there]} - {""}):
        own, known = names == name, (names == name) & there
        pair = torch.from_numpy(x[known]), torch.from_numpy(y[known])
        out = run.predict(torch.from_numpy(x[own]), client=pair, probabilities=bool(preparation.target.classes))
        yield own, np.asarray(out).reshape(int(own.sum()), -1)


def _plain(figure: Any) -> dict[str, float]:
    return {"mean": figure.mean, "se": figure.se}


def csv_of(lines: list[dict[str, Any]]) -> str:
    """Lines with the same keys as a table of comma-separated values."""
    text = io.StringIO()
    table = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(lines)
    return text.getvalue()
