"""Ways to share that are worth comparing, from one model for all to one each, and which of them is simpler."""

from __future__ import annotations

from typing import NamedTuple

import torch

from coterie.core.features import is_linear
from coterie.core.federation import Federation
from coterie.core.method import Method
from coterie.core.task import Task
from coterie.methods.cfl import CFL
from coterie.methods.fedavg import FedAvg
from coterie.methods.fedem import FedEM
from coterie.methods.fedx import FedX
from coterie.methods.ifca import IFCA
from coterie.methods.local_only import LocalOnly
from coterie.methods.mixed_effects import MixedEffects
from coterie.methods.personal import Personal

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
        if isinstance(method, LocalOnly):
            return cls(ALONE)
        if isinstance(method, Personal):
            under = cls.of(method.method)
            return cls({ALL: PERSONAL, GROUPS: PERSONAL_GROUPS}.get(under.kind, under.kind), under.k)
        given = 1 if isinstance(method, FedAvg) else getattr(method, "k", None)
        k = given if isinstance(given, int) else MANY
        if isinstance(method, MixedEffects):
            return cls(EFFECTS if k == 1 else MIXED, k)
        if k == 1:
            return cls(ALL)
        soft = isinstance(method, FedEM) or bool(getattr(method, "soft", False))
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
    one: Method = FedX(k=1) if linear else FedAvg(lr=size)
    groups = {f"{j} groups": FedX(k=j) if linear else IFCA(k=j, lr=size) for j in most}
    hard = {"one for all": one, **groups, "CFL": CFL(lr=size)}
    found: dict[str, Method] = {**hard, **{f"{name} + personal": Personal(method) for name, method in hard.items()}}
    found |= {f"{j} soft groups": FedEM(k=j, lr=single) for j in most}
    if linear:
        found |= {"random effects": MixedEffects(), "groups of random effects": MixedEffects(k="auto")}
    found["one each"] = LocalOnly(lr=size, refine="least_squares" if linear else "steps")
    return dict(sorted(found.items(), key=lambda entry: Simplicity.of(entry[1])))


def _bearable(task: Task, federation: Federation) -> tuple[float, float]:
    """The step sizes that squared loss bears: on the rows of every client, and on every single row."""
    assert task.features is not None
    clients, rows = TINY, TINY
    for i in range(0, len(federation), -(-len(federation) // LOOKED_AT)):
        phi = task.features(federation.train.client(i)[0])
        clients = max(clients, float(torch.linalg.matrix_norm(phi, 2)) ** 2 / len(phi))
        rows = max(rows, float(phi.square().sum(1).max()))
    return STEP / clients, STEP / rows
