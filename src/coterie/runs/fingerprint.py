"""What a run was made from, as a few hashes: a run may be resumed only with the same rows and the same model."""

from __future__ import annotations

import hashlib
from typing import Any

from torch import Tensor

from coterie.core.engine import Engine
from coterie.core.federation import Federation, Packed
from coterie.core.key import Key
from coterie.core.pytree import Params
from coterie.core.task import Task
from coterie.storage.packed import raw_bytes

WHOLE = 64 * 2**20  # bytes of rows up to which all are hashed; of more, one row per client
SAMPLED = 100_000  # clients of whom a row is hashed, evenly spaced

WHAT = {
    "clients": "other clients: their number, names or sizes differ",
    "rows": "other data: clients' rows differ",
    "parameters": "another model: its parameters differ in names or shapes",
    "frozen": "another model: its frozen parameters or constants differ",
}


def fingerprint(engine: Engine) -> dict[str, str]:
    """Hashes of the clients, of their rows, of the names and shapes of the model's parameters, and of frozen values.

    Where the rows are on other machines only the model's are known.
    """
    found = {"parameters": _of_model(engine.task), **_of_frozen(engine.task)}
    return found if engine.remote else {**found, **_of_clients(engine.federation)}


def difference(before: dict[str, str], now: dict[str, str]) -> str | None:
    """What has changed, in words; None if nothing has that both know of."""
    both = [name for name in WHAT if name in before and name in now]
    found = next((name for name in both if before[name] != now[name]), None)
    if found == "parameters" and ("frozen" in before) != ("frozen" in now):
        frozen = "some of its layers are frozen" if "frozen" in before else "none of its layers is frozen"
        return f"another model: {frozen}, other than in this task; ct.freeze makes a task with frozen layers"
    return found and WHAT[found]


def _of_clients(federation: Federation) -> dict[str, str]:
    clients, rows = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)
    clients.update(repr(federation.ids).encode())
    for part in (federation.train, federation.test):
        if part is not None:
            clients.update(part.offsets.numpy().tobytes())
            for values in _looked_at(part):
                rows.update(f"{values.dtype}{tuple(values.shape[1:])}".encode())
                rows.update(raw_bytes(values))
    return {"clients": clients.hexdigest(), "rows": rows.hexdigest()}


def _looked_at(part: Packed) -> tuple[Tensor, Tensor]:
    """All rows and targets, or of many the first of each client."""
    size = len(part.x) * (part.x[:1].nbytes + part.y[:1].nbytes)
    if part.pages is None and size <= WHOLE:
        return part.x, part.y
    filled = part.offsets[:-1][part.sizes > 0]
    at = filled[:: -(-len(filled) // SAMPLED)]
    return part.x[at], part.y[at]


def _of_model(task: Task) -> str:
    try:
        shapes: Any = {n: tuple(p.shape) for n, p in task.init(Key.of(0)).items()}
    except ValueError:  # k-FED's centres have no beginning
        shapes = ()
    return hashlib.blake2b(repr(shapes).encode(), digest_size=16).hexdigest()


def _of_frozen(task: Task) -> dict[str, str]:
    """A hash of what nobody trains or sends, if there is any."""
    fixed = {} if task.functions is None else task.functions.pure.fixed
    return {"frozen": digest(fixed)} if fixed else {}


def digest(values: Params) -> str:
    """A hash of tensors and their names."""
    hashed = hashlib.blake2b(digest_size=16)
    for name in sorted(values):
        hashed.update(name.encode())
        hashed.update(raw_bytes(values[name]))
    return hashed.hexdigest()
