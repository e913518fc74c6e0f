"""What the counts of a secure sum tell over rounds: an integer program looks for the cluster of every client.

The server of a secure sum learns how many clients chose each cluster, and whom it has asked. If those are the ones that
take part, every round is a set of equations about who is in which cluster, and some dozens of rounds have one solution.
If clients decide in secret who takes part (`SecureSum.hide_sample`), there is nothing to set up equations with.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import Bounds, LinearConstraint, milp

import coterie as ct
from coterie.core.cohort import Cohort
from coterie.core.federation import Federation
from coterie.core.key import Key
from coterie.core.step import ClientStep, Reply
from coterie.core.task import Task
from coterie.engines import simulated
from coterie.runs import plots
from coterie.secure.engine import Secure
from coterie_lab.reproduce.notebook import Notebook

Round = tuple[np.ndarray, np.ndarray]  # whom the server has asked, and how many chose each cluster
KNOWN, SECRET = "the server samples", "clients decide in secret"
WAYS = {KNOWN: False, SECRET: True}


def run(spec: dict[str, Any], device: str, notebook: Notebook) -> dict[str, Any]:
    """The share of clients whose cluster the program finds, and what hiding the sample costs in accuracy.

    Args:
        spec: Table of the experiment.
        device: Not used: the server's work is on the CPU.
        notebook: Stores the parts that are done.
    """
    rows = []
    for clients in spec["clients"]:
        for way, hide in WAYS.items():
            name = f"{clients} clients, {way}"
            found = [
                notebook.entry(f"{name}, seed {s}", lambda m=clients, h=hide, s=s: _attack(spec, m, h, s))
                for s in spec["seeds"]
            ]
            mean, most = statistics.fmean(found), max(found)
            rows.append(
                {"clients": clients, "sample": way, "clusters found": mean, "most": most, "chance": 1 / spec["k"]}
            )
    costs = []
    for way, hide in WAYS.items():
        scores = [
            notebook.entry(f"accuracy, {way}, seed {s}", lambda h=hide, s=s: _accuracy(spec, h, s))
            for s in spec["seeds"]
        ]
        costs.append({"sample": way, "accuracy": statistics.fmean(scores), "sd": statistics.pstdev(scores)})
    return {"seeds": spec["seeds"], "rows": rows, "costs": costs}


def _attack(spec: dict[str, Any], clients: int, hide: bool, seed: int) -> float:
    """The share of clients whose cluster is found from the counts of real sessions."""
    k = spec["k"]
    labels = torch.arange(clients) % k
    labels = labels[torch.randperm(clients, generator=Key.of(seed).generator())]
    federation = Federation.from_clients([(torch.zeros(1, 1), label[None]) for label in labels])
    inner = simulated(federation, Task.distance(), Key.of(seed), executor="sequential")
    cohort = Cohort(Secure(inner.engine, ct.SecureSum(hide_sample=hide, min_members=2, threshold=0.5)), inner.ledger)
    seen = []
    for t in range(spec["rounds"]):
        some = cohort.at(t).sample(spec["fraction"])
        members = some.combine(_choose, torch.zeros(()), slots=k).members
        assert members is not None  # a secure sum always has them
        seen.append((some.clients.numpy(), members.numpy()))
    return float((likeliest(clients, k, seen, spec["limit"]) == labels.numpy()).mean())


def _choose(task: Task) -> ClientStep:
    """A client's reply goes to the slot that its row names."""
    return ClientStep(lambda message, local: Reply({"w": message}, slot=local.data.y[0]))


def likeliest(clients: int, k: int, seen: list[Round], limit: float) -> np.ndarray:
    """The assignment (clients,) whose counts are off by the least in all rounds together, as far as found in time.

    Args:
        clients: How many there are.
        k: Clusters.
        seen: What the server knows of each round. Where fewer took part than were asked, each of those counts for as
            much less.
        limit: Seconds that the program may take.
    """
    width = clients * k
    told: Any = np.concatenate([count for _, count in seen]).astype(float)
    expected = np.zeros((len(told), width))
    for t, (asked, count) in enumerate(seen):
        for j in range(k):
            expected[t * k + j, asked * k + j] = count.sum() / len(asked)
    off, one_each = np.eye(len(told)), np.kron(np.eye(clients), np.ones(k))
    most: Any = np.concatenate([np.ones(width), np.full(len(told), np.inf)])
    result = milp(
        np.concatenate([np.zeros(width), np.ones(len(told))]),
        integrality=np.concatenate([np.ones(width), np.zeros(len(told))]),
        bounds=Bounds(0, most),
        constraints=[
            LinearConstraint(np.hstack([expected, off]), told, np.inf),
            LinearConstraint(np.hstack([expected, -off]), -np.inf, told),
            LinearConstraint(np.hstack([one_each, np.zeros((clients, len(told)))]), 1, 1),
        ],
        options={"time_limit": limit},
    )
    if result.x is None:  # nothing was found in time
        return np.full(clients, -1)
    return result.x[:width].reshape(clients, k).argmax(1)


def _accuracy(spec: dict[str, Any], hide: bool, seed: int) -> float:
    """Mean accuracy of IFCA under a secure sum."""
    trial = spec["trial"]
    federation = ct.data.rotated_digits(clients=trial["clients"], seed=seed)
    method = ct.IFCA(k=4, init=ct.RandomGroups(rounds=trial["start"]), fraction=spec["fraction"])
    task = Task.classifier(ct.models.MLP(64, 32, 10))
    secure = ct.SecureSum(hide_sample=hide, min_members=2, threshold=0.5)
    return float(
        ct.fit(method, task, federation, rounds=trial["rounds"], seed=seed, evaluations=1, secure=secure).score
    )


def draw(result: dict[str, Any], path: Path) -> None:
    """Clusters found against the number of clients, and chance."""
    fig = plots.figure(6, 3.2)
    axes = fig.subplots()
    for way, colour in zip(WAYS, plots.COLOURS, strict=False):
        own = [row for row in result["rows"] if row["sample"] == way]
        axes.plot(
            [row["clients"] for row in own], [row["clusters found"] for row in own], "o-", color=colour, label=way
        )
    axes.axhline(result["rows"][0]["chance"], color="0.5", lw=1, ls=":", label="chance")
    axes.set_ylim(0, 1.05)
    axes.set_xticks([row["clients"] for row in result["rows"]])
    axes.set_xlabel("clients")
    axes.set_ylabel("share whose cluster is found")
    axes.legend(frameon=False, fontsize=8, loc="center right")
    plots.tidy(axes)
    plots.save(fig, path)
