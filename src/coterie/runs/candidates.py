"""Ways to share that are worth comparing, from one model for all to one each, and which of them is simpler."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from coterie.core.features import is_generalised_linear, is_linear
from coterie.core.federation import Federation
from coterie.core.key import Key
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
TRIED = (2, 3)  # numbers of groups that are tried on a table, whatever was found
RESTARTS = 8  # of groups of random effects, where the number of groups is known
WIDE = 50  # parameters up to which random effects of a classifier are tried
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
    soft groups, random effects where the model is linear and targets are numbers or counts, and one model each. Of a
    linear regression, groups are those of `FedX`, which are solved for; of other models those of `IFCA`.

    Args:
        task: What is learnt.
        federation: Whose clients' rows say how large steps may be.
        k: The most groups.
        lr: The step size of what is trained by steps; None takes 0.1, or of a linear model of numbers or counts what
            its curvature bears.
    """
    linear = is_linear(task, federation.train.x[:2])
    counts = is_linear_in_counts(task, federation)
    size, single = bearable(task, federation) if (linear or counts) and lr is None else (lr or LR,) * 2
    most = range(2, min(k, len(federation) // 2) + 1)
    one: Method = FedX(k=1) if linear else FedAvg(lr=size)
    groups = {f"{j} groups": FedX(k=j) if linear else IFCA(k=j, lr=size) for j in most}
    hard = {"one for all": one, **groups, "CFL": CFL(lr=size)}
    found: dict[str, Method] = {**hard, **{f"{name} + personal": Personal(method) for name, method in hard.items()}}
    found |= {f"{j} soft groups": FedEM(k=j, lr=single) for j in most}
    if linear or counts:
        found |= {"random effects": MixedEffects(), "groups of random effects": MixedEffects(k="auto")}
    found["one each"] = LocalOnly(lr=size, refine="least_squares" if linear else "steps")
    return dict(sorted(found.items(), key=lambda entry: Simplicity.of(entry[1])))


def ways_to_share(
    task: Task, federation: Federation, groups: int | None, k: int, lr: float | None = None
) -> dict[str, Method]:
    """Of these candidates, those that are worth their time on a table: one for all, one each, groups, personal models.

    CFL is left out, which is for models that are trained by steps, and soft groups, which are for clients whose rows
    are of several kinds.

    Args:
        task: What is learnt.
        federation: The clients.
        groups: How many groups there are, where that is known: then these and a few others are tried.
        k: The most groups otherwise.
        lr: As in `candidates`.
    """
    most = k if groups is None else max(groups, *TRIED)
    numbers = set(range(2, k + 1)) if groups is None else {*TRIED, groups}
    found = {n: m for n, m in candidates(task, federation, most, lr).items() if _is_tried(m, numbers)}
    if groups is not None and groups > 1 and is_linear(task, federation.train.x[:2]):
        found[f"{groups} groups of random effects"] = MixedEffects(k=groups, restarts=RESTARTS)
    if task.spec.get("kind") == "classifier" and _is_narrow(task, federation):
        found["random effects"] = MixedEffects()
    return dict(sorted(found.items(), key=lambda entry: Simplicity.of(entry[1])))


def _is_tried(method: Method, numbers: set[int]) -> bool:
    inner = method.method if isinstance(method, Personal) else method
    given = getattr(inner, "k", 1)
    return not isinstance(inner, CFL) and Simplicity.of(method).kind != SOFT and (given == 1 or given in numbers)


def _is_narrow(task: Task, federation: Federation) -> bool:
    """Whether it is a linear model with few parameters, so that random effects of classes take little time."""
    few = sum(p.numel() for p in task.init(Key.of(0)).values()) <= WIDE
    return few and is_generalised_linear(task, federation.train.x[:2])


def is_linear_in_counts(task: Task, federation: Federation) -> bool:
    """Whether a task is one of counts whose model is linear in its parameters."""
    return task.spec.get("kind") == "counts" and is_generalised_linear(task, federation.train.x[:2])


def bearable(task: Task, federation: Federation) -> tuple[float, float]:
    """The step sizes that the loss of a linear model bears: on the rows of every client, and on every single row."""
    clients, rows = TINY, TINY
    for i in range(0, len(federation), -(-len(federation) // LOOKED_AT)):
        phi = _curved(task, *federation.train.client(i))
        clients = max(clients, float(torch.linalg.matrix_norm(phi, 2)) ** 2 / len(phi))
        rows = max(rows, float(phi.square().sum(1).max()))
    return STEP / clients, STEP / rows


def _curved(task: Task, x: Tensor, y: Tensor) -> Tensor:
    """Features (n, d) whose second moments are the curvature of the loss; of counts, where rates are about these."""
    if task.features is not None:
        return task.features(x)
    assert task.jacobian is not None
    return task.jacobian(x)[:, 0] * (y.reshape(-1, 1) + 0.5).sqrt()
