"""Evaluation: every client with its own model, on its own rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from torch import Tensor

from coterie.core.cohort import Cohort
from coterie.core.engine import First, OwnChoice
from coterie.core.local import each_model, mean_loss, membership, personal_of
from coterie.core.method import Method, PointMethod
from coterie.core.model_tree import ModelTree
from coterie.core.pytree import stack, stacked
from coterie.core.registry import register
from coterie.core.step import ClientStep, Local, Reply, client_step
from coterie.core.task import Data, Task
from coterie.core.train import Models
from coterie.parts.choosing import try_all
from coterie.runs.scores import PointScores, Scores, SummedPointScores, SummedScores


@register("scorer", "service")
@dataclass(frozen=True)
class Scorer:
    """The client's side of an evaluation."""

    @client_step
    def score_ensemble(self, task: Task) -> ClientStep:
        """Score the models that were sent, as one ensemble, on the client's rows."""
        return self.score(task.ensemble())

    @client_step
    def score(self, task: Task) -> ClientStep:
        """Score the model that was sent, or made of it, on the client's rows; the slot is the client's cluster."""

        def run(sent: Models, local: Local) -> Reply:
            rows, theta = local.data.mask.sum(), {**sent.theta, **personal_of(local.memory)}
            served = task.serving(theta)
            score = (served.score(theta, local.data) * local.data.mask).sum() / rows
            note = {"score": score, "loss": mean_loss(served, theta, local.data)}
            return Reply(weight=rows, slot=cast(Tensor, sent.label), note=note)

        return ClientStep(run)

    @client_step
    def losses(self, task: Task) -> ClientStep:
        """How each of the models that were sent serves the client."""
        return try_all(task)

    @client_step
    def tally(self, task: Task) -> ClientStep:
        """Add the score on the client's rows to those of its cluster; a client without rows adds nothing."""

        def run(sent: Models, local: Local) -> Reply:
            rows = local.data.mask.sum()
            theta = {**sent.theta, **personal_of(local.memory)}
            score = (task.serving(theta).score(theta, local.data) * local.data.mask).sum() / rows.clamp(min=1)
            return Reply({"score": score}, (rows > 0).float(), cast(Tensor, sent.label))

        return ClientStep(run)


@register("point_scorer", "service")
@dataclass(frozen=True)
class PointScorer:
    """The client's side of an evaluation of points.

    Args:
        algorithm: Tells each point's cluster.
        groups: How many true clusters there are; 0 where they are not known.
    """

    algorithm: PointMethod
    groups: int

    @client_step
    def score(self, task: Task) -> ClientStep:
        """How many points of each true cluster are in each, and what they score there; the slot is the commonest."""
        inner = self.algorithm.points(task)

        def run(sent: Any, local: Local) -> Reply:
            theta, label = self.algorithm.models_asked(sent), inner.run(sent, local).note["label"]
            mask, rows = local.data.mask, local.data.mask.sum()
            own = membership(label, self.algorithm.k, mask)
            each = each_model(lambda t: task.score(t, local.data))(theta).T  # (n, k), or (n, 1) if all have one model
            true = local.data.y[:, None] == torch.arange(self.groups, device=label.device)
            note = {"table": own.T @ true.to(own), "score": (each * own).nan_to_num().sum() / rows}
            return Reply(weight=rows, slot=own.sum(0).argmax(), note=note)

        return ClientStep(run, inner.draw)

    @client_step
    def tally(self, task: Task) -> ClientStep:
        """Add what the client's points score to what all clients' do."""
        inner = self.score(task)

        def run(sent: Any, local: Local) -> Reply:
            rows, own = local.data.mask.sum(), inner.run(sent, local)
            return Reply({"score": own.note["score"].nan_to_num()}, (rows > 0).float())

        return ClientStep(run, inner.draw)


def margins(method: Method, state: Any, cohort: Cohort, labels: np.ndarray) -> np.ndarray:
    """How much worse the best other cluster's model would serve each client, by the loss on its training rows (m,).

    NaN where there is no other, every client has its own, or the server may see sums only; and on other machines, for
    which it is an exchange that the run does not need.
    """
    models = method.models(state)
    k = stacked(models)
    closed = cohort.engine.sums_only or cohort.engine.remote
    if closed or isinstance(method, PointMethod) or not 1 < k < max(3, len(cohort)) or bool((labels < 0).any()):
        return np.full(len(cohort), np.nan, dtype=np.float32)
    losses = cohort.uncharged().gather(Scorer().losses, models).note["losses"].cpu()
    own = torch.from_numpy(labels)[:, None]
    others = losses.scatter(1, own, torch.inf).amin(1)
    return (others - losses.gather(1, own)[:, 0]).numpy()


Along = Literal["leaf", "root", "path"]


def evaluate(
    method: Method,
    state: Any,
    cohort: Cohort,
    choose_on: Literal["train", "test"] = "train",
    along: Along = "leaf",
    *,
    strangers: bool = False,
    labels: Tensor | None = None,
) -> Scores:
    """Let every client choose its cluster, then score that cluster's model, or its own, on its test rows.

    A client that makes a model of its own does so on its training rows, always.

    Args:
        method: The method that made the state.
        state: What it has learnt.
        cohort: The clients; what they exchange here is not charged to the run.
        choose_on: "train" (honest: the test rows only score) or "test" (a client may look at its labelled test rows).
        along: For algorithms that leave a tree of models: a client may also be scored with the model at the "root", or
            with the ensemble of all models on the "path" from there to its leaf.
        strangers: Whether the cohort is of clients that took no part.
        labels: The clients' clusters where they are decided (m,), whatever their rows say; None lets them choose.
    """
    if choose_on not in ("train", "test"):
        raise ValueError(f"choose_on must be 'train' or 'test', got {choose_on!r}")
    aside = cohort.uncharged()
    if cohort.engine.sums_only and along == "leaf":
        return _summed(method, state, aside, choose_on)
    if isinstance(method, PointMethod):
        return _points(method, state, aside, choose_on)
    place = _as_new if strangers else type(method).place
    if along == "leaf":
        served, own, rows = method.served(state), method.own_model(), None
        if not served.whole:
            rows = place(method, state, aside.on(choose_on)) if labels is None else labels
        first = own and First(own, "train")
        clusters = stacked(method.models(state))
        reply = aside.on("test").gather(Scorer().score, served.message, slots=clusters, rows=rows, first=first)
        labels, note = reply.slot if labels is None else labels, reply.note
    else:
        labels = place(method, state, aside.on(choose_on))
        note = _along(method.tree(state), labels, aside.on("test"), along)
    groups = cohort.federation.groups
    return Scores(
        metric=cohort.task.metric,
        per_client=note["score"].cpu().numpy(),
        labels=labels.cpu().numpy(),
        groups=None if groups is None else groups[cohort.clients].numpy(),
        loss=note["loss"].cpu().numpy(),
        chosen_on=choose_on,
    )


def _summed(method: Method, state: Any, cohort: Cohort, choose_on: str) -> SummedScores:
    """Scores by cluster, of clients whose scores and clusters the server may not see."""
    models, test = method.models(state), cohort.on("test")
    k = stacked(models)
    if isinstance(method, PointMethod):
        kind, sums = SummedPointScores, test.combine(PointScorer(method, groups=0).tally, method.asked(state))
    else:
        served, own = method.served(state), method.own_model()
        rows = None if served.whole else _unseen(method, state, cohort.on(choose_on))
        first = own and First(own, "train")
        kind, sums = SummedScores, test.combine(Scorer().tally, served.message, slots=k, rows=rows, first=first)
    nobodys = np.full(len(cohort), np.nan, dtype=np.float32)
    return kind(
        metric=cohort.task.metric,
        per_client=nobodys,
        labels=np.full(len(cohort), -1),
        groups=None,
        loss=nobodys,
        chosen_on=choose_on,
        total=sums.update["score"].cpu().numpy(),
        count=sums.weight.cpu().numpy(),
    )


def _unseen(method: Method, state: Any, cohort: Cohort) -> Tensor | OwnChoice:
    """A client's cluster, which it chooses by itself, or which follows from who it is."""
    choose = method.own_choice()
    return method.place(state, cohort) if choose is None else OwnChoice(choose, cohort.part)


def _as_new(method: Method, state: Any, cohort: Cohort) -> Tensor:
    """The clusters of clients that took no part, each as `assign` finds it."""
    packed, device = cohort.federation.part(cohort.part), cohort.engine.device
    rows = ((x.to(device), y.to(device)) for x, y in map(packed.client, cohort.clients.tolist()))
    found = [method.assign(state, cohort.task, Data(x, y, x.new_ones(len(x)))) for x, y in rows]
    return torch.tensor(found)


def _along(tree: ModelTree | None, labels: Tensor, cohort: Cohort, along: Along) -> dict[str, Tensor]:
    """Score clients with the root's model, or with the ensemble on the way to their leaf."""
    if along not in get_args(Along):
        raise ValueError(f"along must be 'leaf', 'root' or 'path', got {along!r}")
    if tree is None:
        raise ValueError(f"along={along!r} needs a tree of models, which this algorithm does not make")
    note = {name: torch.empty(len(cohort)) for name in ("score", "loss")}
    for c in labels.unique().tolist():
        at = (labels == c).nonzero().flatten()
        path = tree.path(c)[: 1 if along == "root" else None]
        models = Models(stack([branch.model for branch in path]), label=torch.tensor(c))
        found = cohort.only(at).gather(Scorer().score_ensemble, models, slots=c + 1).note
        for name, whole in note.items():
            whole[at] = found[name].cpu()
    return note


def _points(method: PointMethod, state: Any, everybody: Cohort, choose_on: str) -> PointScores:
    """Points choose their cluster and are scored there; they have no labels that could be kept from the choice."""
    cohort = everybody.on("test")
    y = cohort.federation.part(cohort.part).y
    known = not y.is_floating_point() and y.dim() == 1 and bool((y >= 0).all())
    scorer = PointScorer(method, int(y.max()) + 1 if known else 0)
    reply = cohort.gather(scorer.score, method.asked(state), slots=method.k)
    score = reply.note["score"].cpu().numpy()
    same_rows = cohort.federation.part(choose_on) is cohort.federation.part("test")  # k-FED need not look again
    labels = reply.slot if same_rows else method.place(state, everybody.on(choose_on))
    return PointScores(
        metric=cohort.task.metric,
        per_client=score,
        labels=labels.numpy(),
        groups=None,
        loss=score,
        chosen_on=choose_on,
        tables=reply.note["table"].long().cpu().numpy() if known else None,
    )
