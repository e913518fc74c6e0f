"""Benchmark of attacks: what hostile clients cost honest ones, by robust mean, attack and share of hostile clients."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from coterie import IFCA, Buckets, Clipped, GeometricMedian, Krum, Median, Trimmed
from coterie.core.cohort import Cohort
from coterie.core.key import Key
from coterie.core.membership import Membership
from coterie.core.task import Task
from coterie.core.uplink import Uplink
from coterie.data import rotated_digits
from coterie.engines import find_engine
from coterie.models import MLP
from coterie.robust.rules import Aggregate
from coterie.runs.fit import fit_on
from coterie_lab.bench.hostile import ATTACKS, Hostile, flipped, hostile_clients

log = logging.getLogger("coterie")

CLIENTS, GROUPS, ROUNDS = 80, 4, 20
SHARES = (0.2, 0.1)
SEEDS = range(5)
RULES: dict[str, Aggregate | None] = {
    "mean": None,
    "clipped": Clipped(),
    "median": Median(),
    "trimmed": Trimmed(),
    "geometric_median": GeometricMedian(),
    "krum": Krum(),
    "buckets": Buckets(count=10),
}


class Case(NamedTuple):
    """An attack, and the start that IFCA makes under it."""

    attack: str
    init: str = "tournament"

    def __str__(self) -> str:
        return self.attack if self.init == "tournament" else f"{self.attack}, {self.init}"


NONE = Case("none")
CASES = (
    Case("sign × 10"),
    Case("noise"),
    Case("flipped labels"),
    Case("wrong cluster"),
    Case("hostile start"),
    Case("hostile start", "farthest_first"),
    Case("a little"),
)
QUICK = CASES[:1]


def measure(*, quick: bool = False) -> list[dict[str, Any]]:
    """Return one row per attack, share of hostile clients and rule, as `coterie bench attacks --json` prints them.

    The method is IFCA with k=4 on rotated digits: 80 clients of 72 rows, a 64-32-10 MLP, 20 rounds of 10 steps. The
    hostile clients are a random share of all. The accuracy is that of honest clients, each by its own cluster's model
    on test rows: the mean over seeds, and the lowest.

    Args:
        quick: Whether to measure one attack, two rules and one seed only.
    """
    rules = ("mean", "median") if quick else tuple(RULES)
    return list(_rows(QUICK if quick else CASES, rules, SEEDS[:1] if quick else SEEDS, SHARES[:1] if quick else SHARES))


def _rows(cases: tuple[Case, ...], rules: tuple[str, ...], seeds: range, shares: tuple[float, ...]) -> Iterator[Any]:
    starts = dict.fromkeys(case.init for case in cases)
    everything = [(NONE._replace(init=init), 0.0) for init in starts] + [(c, share) for share in shares for c in cases]
    for case, share in everything:
        for rule in rules:
            found = [accuracy(case, RULES[rule], share, seed) for seed in seeds]
            row = {"attack": str(case), "hostile": share, "rule": rule, "accuracy": statistics.fmean(found)}
            log.info("%s, %.0f %% hostile, %s: %.3f", case, 100 * share, rule, row["accuracy"])
            yield {**row, "lowest": min(found)}


def accuracy(case: Case, rule: Aggregate | None, share: float, seed: int) -> float:
    """The mean test accuracy of honest clients.

    Args:
        case: The attack, and IFCA's start.
        rule: The robust mean; None takes the mean.
        share: Share of hostile clients.
        seed: Of the data, of who is hostile, and of the run.
    """
    federation = rotated_digits(clients=CLIENTS, seed=seed, groups=GROUPS)
    hostile = hostile_clients(federation, share, Key.of(seed))
    if case.attack == "flipped labels":
        federation = flipped(federation, hostile)
    task = Task.classifier(MLP(64, 32, 10))

    def members(key: Key) -> Membership:
        clients = find_engine("vectorised")(federation, task, key, torch.device("cpu"), Uplink())
        return Membership(Cohort(Hostile(clients, hostile, ATTACKS[case.attack])))

    method = IFCA(GROUPS, init=case.init)
    run = fit_on(members, method, rounds=ROUNDS, seed=seed, evaluations=1, aggregate=rule)
    return float(run.scores.per_client[~hostile.numpy()].mean())
