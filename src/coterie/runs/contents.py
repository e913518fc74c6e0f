"""What the files of a run folder must hold for others to rely on, whoever wrote them."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from coterie.core.key import Key
from coterie.core.method import Method
from coterie.core.pytree import stacked
from coterie.core.task import Task
from coterie.runs.timeline import TRACKED
from coterie.storage.reading import Damaged
from coterie.storage.shapes import misfit

NUMBERS = [(None, float)]

CONFIG = {
    "algorithm": {"name": str},
    "task": {"kind": str},
    "data": {"name": str},
    "run": {"rounds": int, "seed": int},
}

EVENT = {"event": str, "round?": int, "time?": str, "coterie?": str, "commit?": (None, str)}
ROUND = {
    "round": int, "loss": (None, float), "loss_per_cluster?": (None, NUMBERS), "per_cluster": (None, NUMBERS),
    "changed": int, "moved?": (None, {str: [int]}), "groups": int, "members": (None, [int]), "participants": int,
    "seconds": float, "bytes_down": int, "bytes_up": int, "left_out?": [str], "update?": {},
}  # fmt: skip

BRANCH = {
    "node": int, "parent": (None, int), "children": [int], "clients": [int], "cluster": (None, int), "round": int,
    "cross": (None, float), "similar": (None, [[float]]), "norms?": (None, [float]),
}  # fmt: skip
COEFFICIENT = {"name": str, "cluster": int, "mean": float, "error": (None, float)}
RESULT = {
    "metric": str, "score": (None, float), "clusters": int, "worst_decile?": (None, float), "ari?": float,
    "nmi?": float, "purity?": float, "matched?": float, "per_cluster": {str: float}, "per_client": NUMBERS,
    "losses": NUMBERS, "margins?": NUMBERS, "rows": [int], "labels": [int], "row": [int], "inputs?": (None, {}),
    "ids": (None, [str]), "columns?": (None, [str]), "groups": (None, [int]), "table": (None, [[int]]),
    "tree?": (None, [BRANCH]), "seconds": float, "bytes_down": int, "bytes_up": int, "left_out?": {str: int},
    "report?": (None, str), "coefficients?": [COEFFICIENT], "warnings?": [str], "executor": str, "device": str,
}  # fmt: skip
EACH = ("rows", "labels", "per_client", "losses", "margins", "ids", "groups")  # of which every client has an entry

DEEPEST = 100  # splits of a tree in each other
LONG, MUCH = 1e12, 2**60  # seconds, and bytes or numbers, that no run has


def wrong_history(history: list[dict[str, Any]]) -> str | None:
    """What is wrong with the rounds of a run, in words; None if nothing is.

    Args:
        history: The rounds.
    """
    for t, row in enumerate(history, 1):
        if wrong := misfit(row, ROUND):
            return f"round {t}: {wrong}"
        if row["round"] != t:
            return f"round {row['round']} comes where round {t} should"
        others = {name: value for name, value in row.items() if name not in ROUND and f"{name}?" not in ROUND}
        if wrong := misfit(others, {str: (None, float)}):
            return f"round {t}: {wrong}"
        sent = row["bytes_down"], row["bytes_up"]
        if not 0 <= row["seconds"] < LONG or min(sent) < 0 or max(sent) >= MUCH:
            return f"round {t}: no run takes so many seconds or bytes"
        if wrong := _wrong_moves(row.get("moved") or {}):
            return f"round {t}: {wrong}"
    return None


def _wrong_moves(moved: dict[str, list[int]]) -> str | None:
    if not all(name.removeprefix("-").isdecimal() and len(name) < 10 for name in moved):
        return "moved has a name that is no cluster's"
    named = [client for clients in moved.values() for client in clients]
    return None if all(0 <= i < TRACKED for i in named) else "moved names a client that cannot be"


def wrong_result(result: dict[str, Any]) -> str | None:
    """What is wrong with the result of a run, which has the shape of one; None if nothing is.

    Args:
        result: As result.json has it.
    """
    m = len(result["labels"])
    if other := next((name for name in EACH if result.get(name) and len(result[name]) != m), None):
        return f"{other} has {len(result[other])} entries, labels {m}"
    if m and not -1 <= min(result["labels"]) <= max(result["labels"]) < max(result["clusters"], 0):
        return f"labels are not of {result['clusters']} clusters"
    if len(missing := {"ari", "nmi", "purity", "matched"} - result.keys()) in (1, 2, 3):
        return f"{min(missing)} is missing"
    if min([*result["rows"], *result["row"]], default=0) < 0:
        return "rows and row must be numbers of rows and a shape"
    if sum(result["rows"]) * math.prod(max(n, 1) for n in result["row"]) >= MUCH:
        return "no machine has so many rows"
    if not all(name.isdecimal() and len(name) < 10 for name in result["per_cluster"]):
        return "per_cluster has a name that is no cluster's"
    if any(not 0 <= row["cluster"] < result["clusters"] for row in result.get("coefficients") or []):
        return f"coefficients are not of {result['clusters']} clusters"
    if len({len(row) for row in result["table"] or []}) > 1 or any(n < 0 for row in result["table"] or [] for n in row):
        return "table must have rows of the same length, of numbers of points"
    return _wrong_tree(result["tree"], m) if result.get("tree") else None


def _wrong_tree(outline: list[dict[str, Any]], m: int) -> str | None:
    """Whether nodes below a root that is there are each below one other, which has split before."""
    nodes = {row["node"]: row for row in outline}
    below = Counter(child for row in outline for child in row["children"])
    if len(nodes) != len(outline) or below != Counter(v for v in nodes if v != 0) or 0 not in nodes:
        return "tree must have each node but the root below one other"
    depth = {0: 0}
    for v in sorted(nodes):
        row = nodes[v]
        if v not in depth or depth[v] > DEEPEST or not nodes[0]["clients"]:
            return "tree must begin at the root"
        if any(child <= v for child in row["children"]) or len(row["children"]) not in (0, 2):
            return f"tree: node {v} has other children than two that were made after it"
        if row["children"] and row["cross"] is None:
            return f"tree: node {v} has children, and no cross"
        if not all(0 <= i < m for i in row["clients"]) or _ragged(row["similar"] or []):
            return f"tree: node {v} has other clients than the run"
        depth |= dict.fromkeys(row["children"], depth[v] + 1)
    return None


def _ragged(matrix: list[list[float]]) -> bool:
    return any(len(row) != len(matrix) for row in matrix)


def check_checkpoint(content: Any, method: Method, task: Task, file: Path) -> None:
    """Refuse what is no state of a method, or one whose models are not finite, which no round leaves behind.

    Args:
        content: Of a checkpoint.
        method: The method.
        task: What is learnt.
        file: Its file, for messages.

    Raises:
        Damaged: It is something else.
    """
    try:
        wrong = _wrong_checkpoint(content, method, task)
    except Exception as error:  # a state that is none of the method's raises anything
        wrong = f"it holds no state of {type(method).__name__}: {type(error).__name__}"
    if wrong:
        raise Damaged(f"{file} is damaged ({wrong})")


def _wrong_checkpoint(content: Any, method: Method, task: Task) -> str | None:
    done, memory, chunks, state = (content[name] for name in ("done", "memory", "chunks", "state"))
    if type(done) is not int or done < 0 or not isinstance(memory, dict) or not isinstance(chunks, dict):
        return "it does not say after how many rounds, or what clients remember"
    models, labels = method.models(state), method.labels(state)
    if labels.dtype != torch.long or labels.ndim != 1 or not models:
        return f"it holds no state of {type(method).__name__}"
    if not all(bool(torch.isfinite(x).all()) for x in models.values()):
        return "a model is not finite"
    if labels.numel() and int(labels.max()) >= stacked(models):
        return "a client is in a cluster that is not there"
    expected = _shapes(task)
    if expected is not None and {n: (x.shape[1:], x.dtype) for n, x in models.items()} != expected:
        return "its models are of another shape than the task's"
    return None


def _shapes(task: Task) -> dict[str, Any] | None:
    """The shapes of a model's parameters; None where nobody knows them before a run."""
    try:
        return {n: (x.shape, x.dtype) for n, x in task.init(Key.of(0)).items()}
    except ValueError:
        return None
