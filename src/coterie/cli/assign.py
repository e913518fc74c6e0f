"""Placing clients from a file, with nothing but a run folder."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import numpy as np

from coterie import snapshot
from coterie.config import build_algorithm, build_task
from coterie.record import read_checkpoint, read_config, read_result
from coterie.run import assign


def assign_file(run: Path, data: Path) -> list[dict[str, Any]]:
    """The cluster of every client in a file: a dict of client, rows, cluster."""
    read_result(run)  # says so if the run is not finished
    config = read_config(run)
    if config["task"].get("kind") == "custom" or config["algorithm"].get("init") == "given":
        raise ValueError(f"{run} was trained from Python on a module of its own; use run.assign(x, y) there")
    algorithm, task = build_algorithm(config["algorithm"]), build_task(config["task"])
    content, _ = read_checkpoint(run, snapshot.named_tuples(sys.modules[type(algorithm).__module__]))
    if content is None:
        raise ValueError(f"{run} has no checkpoint that can be read")
    floating = config["task"]["kind"] == "regressor"
    x, y, clients = _read(data)
    y = y.astype(np.float32 if floating else np.int64)
    found = []
    for name in dict.fromkeys(clients.tolist()):
        own = clients == name
        cluster = assign(algorithm, content["state"], task, x[own], y[own])
        found.append({"client": str(name), "rows": int(own.sum()), "cluster": cluster})
    return found


def _read(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, targets and client names of a file; without names all rows are one client's."""
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            if not {"x", "y"} <= set(arrays.files):
                raise ValueError(f"{path} must hold arrays x and y, it holds {', '.join(arrays.files) or 'none'}")
            x, y = arrays["x"].astype(np.float32), arrays["y"]
            return x, y, arrays["client"] if "client" in arrays.files else np.full(len(y), path.stem)
    if path.suffix == ".csv":
        return _read_csv(path)
    raise ValueError(f"{path} must be .npz or .csv")


def _read_csv(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A header; a column y, a column client if there are several, and all other columns are features."""
    with path.open(newline="", encoding="utf-8") as f:
        header, *lines = list(csv.reader(f))
    if "y" not in header or not lines:
        raise ValueError(f"{path} needs a header with a column 'y', and rows; its columns are {', '.join(header)}")
    columns = dict(zip(header, zip(*lines, strict=True), strict=True))
    client = np.array(columns.pop("client", (path.stem,) * len(lines)))
    values: dict[str, np.ndarray] = {}
    for name, cells in columns.items():
        try:
            values[name] = np.array(cells, dtype=np.float32)
        except ValueError as error:
            raise ValueError(f"{path}: column '{name}': {error}") from None
    y = values.pop("y")
    return np.stack(list(values.values()), 1), y, client
