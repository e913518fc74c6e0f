"""Is each of a run's models needed? Judged by rows that they were not trained on, for models of any kind.

Every cluster's model is trained on for some rounds by its own clients, as is, beside, one model for the two clusters
whose models are the most alike, and one for all clients. If the clients' test rows are served no better by k models
than by one fewer, or by one, then k models are not needed. Where they are served better, but chance may be the reason,
it is open.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.core.cohort import Cohort
from coterie.core.method import Method, PointMethod
from coterie.core.pytree import Params, exact, stack, stacked, take
from coterie.methods.fedavg import FedAvg
from coterie.methods.fedavg import State as OneModel
from coterie.runs.answers import answer, every
from coterie.runs.candidates import bearable, is_linear_in_counts
from coterie.runs.evaluate import Scorer

ROUNDS = 15  # of training on, of all models alike
CLEARLY = 3.0  # standard errors by which the mean loss of clients must be lower
HARDLY = 1.0  # standard errors up to which it is no lower


class Gain(NamedTuple):
    """How much lower the mean loss of some clients is with models of their own clusters."""

    mean: float
    error: float  # its standard error over clients

    @property
    def real(self) -> bool | None:
        """Whether chance is no likely reason; None where it may be."""
        return answer(self.mean, HARDLY * self.error, CLEARLY * self.error)


class HeldOut(NamedTuple):
    """What test rows say."""

    loss: float  # mean over clients, with the models of the run, trained on
    members: Tensor  # clients of each cluster (k,)
    clients: int
    closest: tuple[int, int]  # the clusters that were made one; (0, 0) where there is one only
    merge: Gain  # over one model for these two, for their clients
    one: Gain  # over one model for all

    @property
    def supported(self) -> bool | None:
        """Whether each of the models is needed; None where that is open."""
        return len(self.members) == 1 or every(bool((self.members > 1).all()), self.merge.real, self.one.real)


def held_out(cohort: Cohort, algorithm: Method, state: Any) -> HeldOut:
    """Compare a run's models with one fewer, and with one.

    Args:
        cohort: The clients, who must have test rows.
        algorithm: The method; its settings of local training are those with which models are trained on.
        state: What it has learnt.
    """
    if isinstance(algorithm, PointMethod):
        raise ValueError(f"diagnose: {type(algorithm).__name__} groups points, not clients: there is nothing to judge")
    if cohort.federation.test is None:
        raise ValueError(
            "diagnose: the model is no linear regression, so it is judged by test rows, which the federation does "
            "not have: give it some, as by Federation.from_clients(…, test=…)"
        )
    models, labels = algorithm.models(state), algorithm.place(state, cohort)
    k = stacked(models)
    losses = _losses(cohort, models)
    members = labels.bincount(minlength=k)
    train = _trainer(algorithm, cohort)
    own = _trained(train, cohort, models, labels)
    alone = _losses(cohort, own).gather(1, labels[:, None])[:, 0]
    if int((members > 0).sum()) < 2:
        return HeldOut(float(alone.nanmean()), members, len(cohort), (0, 0), Gain(0.0, math.inf), Gain(0.0, math.inf))
    (a, b), best = _closest(losses, labels, members)
    both = ((labels == a) | (labels == b)).nonzero().flatten()
    merged = _served(train, cohort.only(both), take(models, best))
    biggest = int(members.argmax())
    single = merged if len(both) == len(cohort) else _served(train, cohort, take(models, biggest))
    return HeldOut(
        loss=float(alone.nanmean()),
        members=members,
        clients=len(cohort),
        closest=(a, b),
        merge=_gain(merged - alone[both]),
        one=_gain(single - alone),
    )


def _losses(cohort: Cohort, models: Params) -> Tensor:
    """Every client's mean loss under every model on its test rows (m, k), NaN where it has none."""
    losses = exact(cohort.on("test").gather(Scorer().losses, models).note["losses"])
    return losses.where((cohort.on("test").sizes > 0)[:, None], torch.nan)


def _closest(losses: Tensor, labels: Tensor, members: Tensor) -> tuple[tuple[int, int], int]:
    """The two clusters whose clients lose least if one model serves both, and that model."""
    excess = losses - losses.gather(1, labels[:, None])
    by_cluster = torch.stack([excess[labels == j].nansum(0) for j in range(len(members))])  # (from, to)
    real = (members > 0)[:, None] & (members > 0) & ~torch.eye(len(members), dtype=torch.bool)
    a, b = divmod(int(by_cluster.where(real, torch.inf).argmin()), len(members))
    return (min(a, b), max(a, b)), b


def _trainer(algorithm: Method, cohort: Cohort) -> FedAvg:
    """FedAvg with the settings of local training that the method has; of counts, any one step size may be too large."""
    known = {f.name for f in fields(FedAvg)} - {"fraction"}
    shared = {f.name: getattr(algorithm, f.name) for f in fields(algorithm) if f.name in known}  # type: ignore[arg-type]
    given = {name: value for name, value in shared.items() if value is not None}
    if "lr" not in given and is_linear_in_counts(cohort.task, cohort.federation):
        given["lr"] = bearable(cohort.task, cohort.federation)[0]
    return FedAvg(**given)


def _trained(train: FedAvg, cohort: Cohort, models: Params, labels: Tensor) -> Params:
    """Every model (k, …) after some more rounds with the clients of its cluster."""
    k = stacked(models)
    return stack([_on(train, cohort.only((labels == j).nonzero().flatten()), take(models, j)) for j in range(k)])


def _served(train: FedAvg, cohort: Cohort, model: Params) -> Tensor:
    """Every client's loss (m,) under one model that all of them train on."""
    return _losses(cohort, stack([_on(train, cohort, model)]))[:, 0]


def _on(train: FedAvg, cohort: Cohort, model: Params) -> Params:
    if not len(cohort):
        return model
    theta = stack([model])
    state = OneModel(theta, len(cohort), 0, train.begin_server(theta, cohort.task))
    for t in range(ROUNDS):
        state, _ = train.round(state, cohort.at(t))
    return take(state.theta, 0)


def _gain(by_client: Tensor) -> Gain:
    known = by_client[~by_client.isnan()]
    return Gain(float(known.mean()), float(known.std() / math.sqrt(len(known))) if len(known) > 1 else math.inf)
