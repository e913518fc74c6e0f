"""A run in figures, as its folder keeps it."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import torch

from coterie.runs.run import Run
from coterie.runs.scores import PointScores


def summary(run: Run) -> dict[str, Any]:
    """A run in figures, for its folder."""
    names = run._cohort.federation.ids
    return {
        "metric": run.scores.metric,
        "score": run.score,
        "clusters": len(run.algorithm.members(run.state)),
        "worst_decile": worst if math.isfinite(worst := run.scores.worst_decile) else None,
        **run.scores.clustering,
        "per_cluster": {str(j): v for j, v in run.scores.per_cluster.items()},
        "per_client": _listed(run.scores.per_client),
        "losses": _listed(run.scores.loss),
        "margins": _listed(run.margins),
        "rows": run._cohort.federation.train.sizes.tolist(),
        "labels": run.labels.tolist(),
        "row": list(run._cohort.federation.train.x.shape[1:]),
        "inputs": None if (inputs := run._cohort.federation.inputs) is None else inputs.plain(),
        "ids": list(names) if names else None,
        "columns": list(columns) if (columns := run._cohort.federation.columns) else None,
        "groups": None if run.scores.groups is None else run.scores.groups.tolist(),
        "table": run.scores.table.tolist() if isinstance(run.scores, PointScores) else None,
        "tree": None if (tree := run.algorithm.tree(run.state)) is None else tree.outline(),
        "seconds": sum(row["seconds"] for row in run.history),
        "bytes_down": sum(row["bytes_down"] for row in run.history),
        "bytes_up": sum(row["bytes_up"] for row in run.history),
        "left_out": dict(Counter(site for row in run.history for site in row.get("left_out", []))),
        "report": run.algorithm.report(run.state),
        "coefficients": [c._asdict() for c in run.algorithm.coefficients(run.state)],
        "warnings": run.warnings,
        "executor": run._cohort.engine.name,
        "device": _device_name(run._cohort.engine.device),
    }


def _listed(values: np.ndarray) -> list[float | None]:
    """Numbers for JSON, which has none that are not finite."""
    return [v if math.isfinite(v) else None for v in values.tolist()]


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
