"""Assign the clients or points of a file to clusters, using only a run folder."""

from __future__ import annotations

import csv
import logging
from pathlib import Path
from typing import Any

import numpy as np

from coterie.analysis.folder import assign_table, csv_of, is_table_fit
from coterie.core.federation import Federation
from coterie.core.method import Method
from coterie.core.task import Task
from coterie.runs.folder import read_config, read_result
from coterie.runs.load import load
from coterie.runs.run import Run, assign
from coterie.storage import snapshot
from coterie.storage.archives import read_npz
from coterie.storage.tables import Names, order
from coterie.tables.reading import read_table

log = logging.getLogger("coterie")


def assign_file(run: Path, data: Path) -> list[dict[str, Any]]:
    """Return the cluster of every client in a file, or of every row if the run groups points.

    Args:
        run: The folder of a finished run, or of an analysed table.
        data: A .npz or .csv file; a table, if the folder is one of `coterie fit`.

    Returns:
        Dicts of client, rows, cluster; or of client, row, cluster if the run groups points.
    """
    if is_table_fit(run):
        return assign_table(run, read_table(data))
    loaded = restored(run)
    algorithm, task, state = loaded.algorithm, loaded.task, loaded.state
    columns = _columns(run, data)
    if algorithm.needs.points:
        return _assign_points(algorithm, task, state, data, columns)
    kind = read_config(run)["task"]["kind"]
    labels = kind not in ("regressor", "counts")
    clients = read_clients(data, labels=labels, words=kind == "language_model", columns=columns)
    clients.check(task)
    found = []
    for i, name in enumerate(clients.ids or ()):
        x, y = clients.train.client(i)
        found.append({"client": name, "rows": len(x), "cluster": assign(algorithm, state, task, x, y)})
    return found


def _columns(run: Path, data: Path) -> Names | None:
    """Return the names of the columns that a run was trained on; None if it does not know them."""
    if names := read_result(run).get("columns"):
        return tuple(names)
    if data.suffix == ".csv":
        log.warning("%s does not know the names of its columns: those of %s are taken in the file's order", run, data)
    return None


def _assign_points(
    algorithm: Method, task: Task, state: Any, path: Path, columns: Names | None
) -> list[dict[str, Any]]:
    """Return the cluster of every row as dicts of client, row, cluster, in the file's order; y is not used."""
    x, _, client = _read(path, targets=False, columns=columns)
    clients = _by_client(x.astype(np.float32), np.zeros(len(x), dtype=np.int64), client)
    clients.check(task)
    labels = np.empty(len(x), dtype=np.int64)
    for name in np.unique(client):  # a client's points tell its shares of the clusters
        labels[client == name] = assign(algorithm, state, task, x[client == name].astype(np.float32), None)
    pairs = zip(client.tolist(), labels.tolist(), strict=True)
    return [{"client": str(name), "row": row, "cluster": cluster} for row, (name, cluster) in enumerate(pairs)]


def write_csv(found: list[dict[str, Any]], path: Path) -> None:
    """Write assignments to a CSV file, one line each.

    Args:
        found: The assignments that `assign_file` returned.
        path: The file.
    """
    snapshot.write_text(path, csv_of(found))


def restored(run: Path) -> Run:
    """Load a finished run, with its task.

    Args:
        run: The run folder.
    """
    found = load(run)
    if found.task.functions is None and found.task.spec["kind"] != "distance":
        raise ValueError(f"{run} was trained from Python on a model of its own; use ct.load(folder, task=…) there")
    return found


def read_clients(path: Path, *, labels: bool, words: bool = False, columns: Names | None = None) -> Federation:
    """Read the clients of a .npz or .csv file; without client names all rows belong to one client.

    Args:
        path: The file.
        labels: Whether y holds class labels, which are integers.
        words: Whether x holds words, which are integers.
        columns: The names of the features of a .csv, in the order to put them in; None takes the file's order.
    """
    x, y, client = _read(path, targets=True, columns=columns)
    if labels and not np.array_equal(y, y.astype(np.int64)):
        raise ValueError(f"{path}: labels must be whole numbers, got {y[y != y.astype(np.int64)][0]}")
    return _by_client(x.astype(np.int64 if words else np.float32), y.astype(np.int64 if labels else np.float32), client)


def _by_client(x: np.ndarray, y: np.ndarray, client: np.ndarray) -> Federation:
    names = list(dict.fromkeys(client.tolist()))
    rows = [(x[client == name], y[client == name]) for name in names]
    return Federation.from_clients(rows, ids=[str(name) for name in names])


def _read(path: Path, *, targets: bool, columns: Names | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Read x, y and client of a file, one entry per row; y may be missing if `targets` are not needed."""
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    if path.suffix not in (".npz", ".csv"):
        raise ValueError(f"{path} must be .npz or .csv")
    x, y, client = _read_npz(path, targets) if path.suffix == ".npz" else _read_csv(path, targets, columns)
    if not len(x) == len(y) == len(client) > 0:
        raise ValueError(
            f"{path}: x, y and client must be as long as each other, got {len(x)}, {len(y)}, {len(client)}"
        )
    return x, y, client


def _read_npz(path: Path, targets: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    arrays = read_npz(path)
    needed = ["x", "y"] if targets else ["x"]
    if not set(needed) <= set(arrays):
        what = "arrays x and y" if targets else "an array x"
        raise ValueError(f"{path} must hold {what}, it holds {', '.join(arrays) or 'none'}")
    if arrays["x"].dtype.kind not in "biuf":
        raise ValueError(f"{path}: x must hold numbers, got {arrays['x'].dtype}")
    rows = len(arrays["x"])
    return arrays["x"], arrays.get("y", np.zeros(rows)), arrays.get("client", np.full(rows, path.stem))


def _read_csv(path: Path, targets: bool, names: Names | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Read a CSV file with a header: a column y if needed, a column client if there are several, and features."""
    with path.open(newline="", encoding="utf-8") as f:
        header, *lines = list(csv.reader(f)) or [[]]
    if (targets and "y" not in header) or not set(header) - {"y", "client"} or not lines:
        wanted = "a column 'y' and columns of features" if targets else "columns of features"
        raise ValueError(
            f"{path} needs a header with {wanted}, and rows; its columns are {', '.join(header) or 'none'}"
        )
    for number, line in enumerate(lines, 2):
        if len(line) != len(header):
            raise ValueError(f"{path}: line {number} has {len(line)} values, the header {len(header)}")
    columns = dict(zip(header, zip(*lines, strict=True), strict=True))
    client = np.array(columns.pop("client", (path.stem,) * len(lines)))
    values: dict[str, np.ndarray] = {}
    for name, cells in columns.items():
        try:
            values[name] = np.array(cells, dtype=np.float32)
        except ValueError as error:
            raise ValueError(f"{path}: column '{name}': {error}") from None
    y = values.pop("y", np.zeros(len(lines), dtype=np.float32))
    x = np.stack(list(values.values()), 1)
    return x if names is None else x[:, order(list(values), names, str(path))], y, client
