"""How many groups clients fall into, as a diagnosis tells before anything is clustered, and how sure that is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from coterie.core.features import is_linear
from coterie.core.federation import Federation
from coterie.core.pytree import exact, flat
from coterie.core.task import Task
from coterie.methods.fedx import FedX
from coterie.runs.fit import fit
from coterie.runs.support import CLEAR, VALLEY, Judged, Support, support

ROUNDS = 10  # of a run of least squares, which needs two
MOST = 11  # groups more than one that are looked for, as long as evidence rises


@dataclass(frozen=True)
class GroupCount:
    """How many groups there are.

    Attributes:
        count: The number; 1 where clients have the same model or merely vary.
        sure: Whether the data say so clearly; None where nothing can be said.
        verdict: The same in words, with the figures.
    """

    count: int
    sure: bool | None
    verdict: str

    def __str__(self) -> str:
        if self.count == 1:
            return "one group: clients do not fall into groups" if self.sure else "no groups that are clear"
        return f"{self.count} groups"


def count_groups(task: Task, federation: Federation, seed: int, device: str) -> GroupCount | None:
    """How many groups the training rows support; None for models that are no linear regression.

    Args:
        task: What is learnt.
        federation: The clients; their test rows play no part.
        seed: Of the run that is diagnosed.
        device: Where it is computed.
    """
    if not is_linear(task, federation.train.x[:2]):
        return None
    rows = replace(federation, test=None)
    one = fit(FedX(k=1), task, rows, rounds=ROUNDS, seed=seed, device=device, evaluations=1)
    theta = exact(flat(one.algorithm.models(one.state)))
    if len(rows) < 2 or len(rows.train.x) <= 2 * theta.numel():
        return GroupCount(1, None, "There are too few rows to look for groups.")
    found = support(one._cohort.uncharged(), theta, torch.ones(1), further=MOST)
    return GroupCount(found.found, None if found.open else True, " ".join(_told(found)))


def _told(found: Support) -> Iterator[str]:
    """The figures that decide, in words."""
    groups, more = found.judged.get(found.found), found.open
    if groups is not None:
        yield f"{found.found} groups {_figures(groups)}."
    else:
        tried = max(found.fits)
        gain = 2 * max((fit.evidence - found.fits[1].evidence for k, fit in found.fits.items() if k > 1), default=0.0)
        yield (
            f"Up to {tried} groups were looked for. None explains clients clearly better than one group whose clients "
            f"vary (at best Δ BIC = {gain:.0f}; over {2 * CLEAR:.0f} is clear), with a valley between groups."
        )
    if more is not None:
        yield f"There may be {more.real}, which {_figures(more)}."


def _figures(groups: Judged) -> str:
    return (
        f"explain clients better than fewer groups do, in which clients vary (Δ BIC = {2 * groups.ahead:.0f}; over "
        f"{2 * CLEAR:.0f} is clear), and there are few clients between any two of them ({groups.valley:.1f} nats "
        f"against a continuum; over {VALLEY:.0f} is clear)"
    )
