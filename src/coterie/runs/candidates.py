"""Ways to share that are worth comparing, from one model for all to one each, and which of them is simpler."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from coterie.core.features import is_linear
from coterie.core.federation import Federation
from coterie.core.method import Method
from coterie.core.registry import known, named
from coterie.core.task import Task

LR = 0.1
STEP = 0.45  # of the inverse of the largest curvature: what gradient descent on squared loss is sure to bear
TINY = 1e-12  # curvature that is none
LOOKED_AT = 1000  # clients at most whose curvature is looked at
MANY = 10**6  # groups, for the order, where the method finds out how many

ALL, PERSONAL, EFFECTS, GROUPS, PERSONAL_GROUPS, SOFT, MIXED, ALONE = range(8)


class Simplicity(NamedTuple):
    """Where a method stands from simple to complicated: less is simpler.

    In this order: one model for all; the same with personal models; random effects about one model; hard groups; these
    with personal models; soft groups; groups of random effects; one model each. Among groups, fewer are simpler; those
    of a method that finds out how many there are come last.
    """

    kind: int
    k: int = 1

    @classmethod
    def of(cls, method: Method) -> Simplicity:
        """Where a method stands.

        Example:
            >>> import coterie as ct
            >>> order = [ct.FedAvg(), ct.IFCA(k=2), ct.IFCA(k=3), ct.CFL(), ct.LocalOnly()]
            >>> sorted(order, key=Simplicity.of) == order
            True
        """
        name, inner = named(type(method)), getattr(method, "method", None)
        if name == "local_only":
            return cls(ALONE)
        if name == "personal" and isinstance(inner, Method):
            under = cls.of(inner)
            return cls({ALL: PERSONAL, GROUPS: PERSONAL_GROUPS}.get(under.kind, under.kind), under.k)
        k = 1 if name == "fedavg" else getattr(method, "k", MANY)
        k = k if isinstance(k, int) else MANY
        if name == "mixed_effects":
            return cls(EFFECTS if k == 1 else MIXED, k)
        if k == 1:
            return cls(ALL)
        soft = name == "fedem" or bool(getattr(method, "soft", False))
        return cls(SOFT if soft else GROUPS, k)


def candidates(task: Task, federation: Federation, k: int = 4, lr: float | None = None) -> dict[str, Method]:
    """The candidates that `compare` takes where none are given; a dict, to which others may be added.

    One model for all, hard groups (2 to k of them, and as many as CFL finds), each of these also with personal models,
    soft groups, random effects where the model is linear, and one model each. Of a linear regression, groups are those
    of `FedX`, which are solved for; of other models those of `IFCA`.

    Args:
        task: What is learnt.
        federation: Whose clients' rows say how large steps may be.
        k: The most groups.
        lr: The step size of what is trained by steps; None takes 0.1, or of a linear regression what its curvature
            bears.
    """
    linear = is_linear(task, federation.train.x[:2])
    size, single = _bearable(task, federation) if linear and lr is None else (lr or LR,) * 2
    most = range(2, min(k, len(federation) // 2) + 1)
    if linear:
        hard = {"one for all": _made("fedx", k=1), **{f"{j} groups": _made("fedx", k=j) for j in most}}
    else:
        hard = {"one for all": _made("fedavg", lr=size), **{f"{j} groups": _made("ifca", k=j, lr=size) for j in most}}
    hard["CFL"] = _made("cfl", lr=size)
    found: dict[str, Method | None] = {**hard}
    found |= {f"{name} + personal": _made("personal", method=method) for name, method in hard.items()}
    found |= {f"{j} soft groups": _made("fedem", k=j, lr=single) for j in most}
    if linear:
        found["random effects"] = _made("mixed_effects")
        found["groups of random effects"] = _made("mixed_effects", k="auto")
    found["one each"] = _made("local_only", lr=size, refine="least_squares" if linear else "steps")
    there = {name: method for name, method in found.items() if method is not None}
    return dict(sorted(there.items(), key=lambda entry: Simplicity.of(entry[1])))


def _made(name: str, **settings: Any) -> Method | None:
    cls = known("method").get(name)
    return None if cls is None else cls(**settings)


def _bearable(task: Task, federation: Federation) -> tuple[float, float]:
    """The step sizes that squared loss bears: on the rows of every client, and on every single row."""
    assert task.features is not None
    clients, rows = TINY, TINY
    for i in range(0, len(federation), -(-len(federation) // LOOKED_AT)):
        phi = task.features(federation.train.client(i)[0])
        clients = max(clients, float(torch.linalg.matrix_norm(phi, 2)) ** 2 / len(phi))
        rows = max(rows, float(phi.square().sum(1).max()))
    return STEP / clients, STEP / rows
