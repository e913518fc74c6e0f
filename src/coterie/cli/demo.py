"""The demo: find hidden groups of clients in rotated digits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import coterie as ct
from coterie import report
from coterie.runs import plots
from coterie.runs.folder import read_result
from coterie.storage.snapshot import write_text

CLIENTS, ROUNDS, SEED = 80, 60, 0
METHODS: dict[str, ct.FedAvg | ct.LocalOnly | ct.IFCA] = {
    "global": ct.FedAvg(),
    "local": ct.LocalOnly(),
    "ifca": ct.IFCA(k=4, patience=5),
}


def run(out: Path, device: str) -> list[dict[str, Any]]:
    """Train the three methods, draw a picture, write a report, and return one row per method, as in summary.json.

    Args:
        out: Folder for the runs, summary.json, the picture and the report.
        device: "auto", "cpu" or "cuda".
    """
    federation = ct.data.rotated_digits(clients=CLIENTS, seed=SEED)
    task = ct.Task.classifier(ct.models.MLP(64, 32, 10))
    folders = {name: out / name for name in METHODS}
    rows = []
    for name, algorithm in METHODS.items():
        if (out / "summary.json").exists():  # an earlier demo; fit refuses to overwrite any other run
            shutil.rmtree(folders[name], ignore_errors=True)
        ct.fit(algorithm, task, federation, rounds=ROUNDS, seed=SEED, device=device, out=folders[name])
        result = read_result(folders[name])
        columns = ("ari", "seconds", "bytes_up", "bytes_down")
        rows.append({"method": name, "accuracy": result["score"], **{key: result[key] for key in columns}})
    plots.demo(out / "demo.png", folders, "ifca", federation)
    report.write(list(folders.values()), out / "report.html")
    write_text(out / "summary.json", json.dumps(rows, indent=1) + "\n")
    return rows
