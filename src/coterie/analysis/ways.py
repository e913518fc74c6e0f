"""What ways to share come to on rows and clients that trained nothing, and who is sure of its group."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from coterie.core.federation import Federation
from coterie.core.method import Method
from coterie.core.task import Task
from coterie.methods.local_only import LocalOnly
from coterie.runs.candidates import ALL, ALONE, EFFECTS, GROUPS, PERSONAL, Simplicity
from coterie.runs.comparison import Comparison, Figure
from coterie.runs.fit import fit
from coterie.runs.hurt import Hurt
from coterie.runs.run import Run
from coterie.runs.scores import Scores

SURE = math.log(19.0)  # of the odds: a client with less for its group than 95 % is not sure


class Way(NamedTuple):
    """A way to share, trained on the training rows and scored on others.

    Attributes:
        name: Its name.
        run: The run.
        known: The scores of clients that took part, on their test rows.
        new: Those of clients that did not, each placed by a few of its rows; None without any.
    """

    name: str
    run: Run
    known: Scores
    new: Scores | None

    @property
    def score(self) -> Figure:
        """The mean score of known clients, with its standard error over clients."""
        return Figure.of(self.known.per_client[None])

    @property
    def new_score(self) -> Figure:
        """The same of new clients."""
        return Figure(float("nan"), float("nan")) if self.new is None else Figure.of(self.new.per_client[None])

    def hurt(self, than: Way) -> Hurt:
        """The clients that are served worse than in another way."""
        return self.known.hurt(than=than.known)


def shown(comparison: Comparison) -> list[str]:
    """The candidates that are trained on all training rows: one of every kind, and the one that is recommended.

    Of several numbers of groups it is the one that did best on held-out rows.
    """
    order = sorted(comparison.rows, key=lambda row: row.more.mean)
    kinds: dict[int, str | None] = dict.fromkeys((ALL, PERSONAL, EFFECTS, GROUPS, ALONE))
    for row in order:
        kind = Simplicity.of(comparison.methods[row.name]).kind
        if row.failed is None and kinds.get(kind, "none") is None:
            kinds[kind] = row.name
    chosen = {name for name in kinds.values() if name is not None} | {comparison.recommended}
    return [name for name in comparison.methods if name in chosen]


def scored(
    name: str, method: Method, task: Task, federation: Federation, new: Federation | None, options: dict[str, Any]
) -> Way:
    """Train a method on the training rows, and score known clients and new ones.

    Args:
        name: Of the way.
        method: The method.
        task: What is learnt.
        federation: The clients, with test rows.
        new: Clients that take no part, with the rows by which they are placed and others that score them.
        options: Those of `fit`.
    """
    run = fit(method, task, federation, evaluations=1, **options)
    if new is None:
        return Way(name, run, run.scores, None)
    if isinstance(method, LocalOnly):  # they have nothing but their few rows
        alone = fit(method, task, new, evaluations=1, **options)
        return Way(name, run, run.scores, alone.scores)
    return Way(name, run, run.scores, run.evaluate(federation=new))


def unsure(run: Run) -> np.ndarray:
    """Which clients could as well be in another group (m,): the odds of theirs are below 19 to 1.

    Odds follow from how much worse the best other group's model serves a client's training rows: of squared loss, for
    the noise that is left on average.
    """
    rows = run._cohort.federation.train.sizes.numpy()
    nats = run.margins * rows
    if run.task.metric == "mse":
        loss = np.nanmean(run.scores.loss)
        nats = nats / max(2 * float(loss), np.finfo(float).tiny)
    return ~(nats >= SURE)
