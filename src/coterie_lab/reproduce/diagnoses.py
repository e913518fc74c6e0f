"""Whether a diagnosis is right: about groups, and about clients that merely vary.

Clients are simulated by a table of settings, of which all but a few are the same for every kind of federation. A
verdict is right if it supports k groups where there are k or more, and does not where there are fewer. Cells (a kind, a
k and a seed) are independent, and are computed side by side on all cores.
"""

from __future__ import annotations

import zlib
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from coterie import IFCA, Federation, FedX, Task, diagnose, fit, models
from coterie.runs import plots
from coterie_lab.reproduce.notebook import Notebook
from coterie_lab.reproduce.robustness import pool

Cell = dict[str, Any]
Kind = dict[str, Any]

APART = 0.8  # the least distance of groups' models, which have length 1


def run(spec: dict[str, Any], device: str, notebook: Notebook) -> dict[str, Any]:
    """Every kind with every k that it asks for, and every seed.

    Args:
        spec: Table of the experiment.
        device: Not used: cells are small, and there are many.
        notebook: Stores the parts that are done.
    """
    kinds = [(spec["usual"] | kind, k) for kind in spec["kinds"] for k in kind["asked"]]
    rows = []
    with pool() as workers:
        waiting = [(kind, k, _cells(workers, kind, k, spec["seeds"], notebook)) for kind, k in kinds]
        for kind, k, cells in waiting:
            found = notebook.entry(_name(kind, k), lambda cells=cells: [cell.result() for cell in cells])
            rows.append(_row(kind, k, found))
    return {"seeds": spec["seeds"], "rows": rows}


def _name(kind: Kind, k: int) -> str:
    return f"{kind['name']}, k = {k}"


def _cells(
    workers: ProcessPoolExecutor, kind: Kind, k: int, seeds: list[int], notebook: Notebook
) -> list[Future[Cell]]:
    """The cells of a kind and a k, one for every seed; none if they are known from before."""
    return [] if _name(kind, k) in notebook.entries else [workers.submit(cell, kind, k, seed) for seed in seeds]


def cell(kind: Kind, k: int, seed: int) -> Cell:
    """One diagnosis, and whether it is right."""
    federation = simulated(kind, seed)
    d = federation.train.x.shape[1]
    if kind["classes"]:
        task, method, rounds = Task.classifier(models.Linear(d, kind["classes"])), IFCA(k=k, lr=0.5), 20
    else:
        task, method, rounds = Task.regressor(models.Linear(d, 1)), FedX(k=k), 20
    done = fit(method, task, federation, rounds=rounds, seed=seed, device="cpu", evaluations=1)
    found = diagnose(federation, done)
    value = {f.name: f.value for f in found.figures}
    return {
        "seed": seed,
        "right": found.supported == (k <= kind["groups"]),
        "groups": found.groups,
        "merge": value.get("against a merge"),
        "valley": value.get("valley"),
    }


# --- clients ---------------------------------------------------------------------------------------------------------


def simulated(kind: Kind, seed: int) -> Federation:
    """Clients of a kind: y = ⟨x, θ_i⟩ + a_i + noise, or classes with such logits.

    Args:
        kind: The settings. `clients`, `rows` and `d` are ranges to draw from; `groups` is how many there are, and
            `shares` their sizes; `within` the root mean square distance of θ_i from its group's model, of the smallest
            distance between groups (of 1 where there is one group); `line` the half length of a uniform distribution
            of θ_i, `skew` the mean of an exponential one; `intercept` the deviation of a_i; `noise` that of rows;
            `noise_by_client` the deviation of its logarithm; `dof` the degrees of freedom of noise; `scales` the
            deviation of the logarithm of clients' features; `outliers` clients with a model like no other's; `classes`
            how many, 0 for a regression.
        seed: Of all draws.
    """
    rng = np.random.default_rng([seed, zlib.crc32(kind["name"].encode())])
    m, d = (int(rng.integers(low, high + 1)) for low, high in (kind["clients"], kind["d"]))
    width = max(kind["classes"], 1)
    centres, apart = _centres(rng, kind["groups"], d * width)
    z = _labels(rng, m, kind)
    theta = centres[z] + kind["within"] * apart / np.sqrt(d * width) * rng.normal(size=(m, d * width))
    along = rng.normal(size=d * width)
    far = kind["line"] * rng.uniform(-1, 1, size=(m, 1)) + kind["skew"] * rng.exponential(size=(m, 1))
    theta += far * along / np.linalg.norm(along)
    odd = rng.permutation(m)[: kind["outliers"]]
    theta[odd], z[odd] = 3 * rng.normal(size=(len(odd), d * width)), -1
    draw = _classes if kind["classes"] else _targets
    train = [draw(rng, kind, row.reshape(d, width), draws) for row, draws in _draws(rng, kind, theta, kind["rows"])]
    test = [draw(rng, kind, row.reshape(d, width), draws) for row, draws in _draws(rng, kind, theta, kind["rows"])]
    return Federation.from_clients(train, test if kind["classes"] else None, groups=z)


def _centres(rng: np.random.Generator, k: int, d: int) -> tuple[np.ndarray, float]:
    """Models of length 1 that are not too close, and the smallest distance."""
    while True:
        centres = rng.normal(size=(k, d))
        centres /= np.linalg.norm(centres, axis=1, keepdims=True)
        apart = np.linalg.norm(centres[:, None] - centres, axis=2)[np.triu_indices(k, 1)].min(initial=1.0)
        if apart > APART:
            return centres, float(apart)


def _labels(rng: np.random.Generator, m: int, kind: Kind) -> np.ndarray:
    shares = np.array(kind["shares"] or [1 / kind["groups"]] * kind["groups"])
    ends = np.round(shares.cumsum() / shares.sum() * m).astype(int)
    return rng.permutation(np.searchsorted(ends, np.arange(m), side="right"))


def _draws(rng: np.random.Generator, kind: Kind, theta: np.ndarray, rows: tuple[int, int]) -> Any:
    """What is a client's own: its model, and (rows, scale of features, intercept, deviation of noise)."""
    for row in theta:
        n, scale = int(rng.integers(rows[0], rows[1] + 1)), np.exp(kind["scales"] * rng.normal())
        noise = kind["noise"] * np.exp(kind["noise_by_client"] * rng.normal())
        yield row, (n, scale, kind["intercept"] * rng.normal(), noise)


def _targets(rng: np.random.Generator, kind: Kind, theta: np.ndarray, draws: Any) -> tuple[np.ndarray, np.ndarray]:
    n, scale, intercept, deviation = draws
    x, dof = scale * rng.normal(size=(n, len(theta))), kind["dof"]
    noise = rng.standard_t(dof, n) * np.sqrt((dof - 2) / dof) if dof else rng.normal(size=n)
    return x.astype(np.float32), (x @ theta[:, 0] + intercept + deviation * noise).astype(np.float32)


def _classes(rng: np.random.Generator, kind: Kind, theta: np.ndarray, draws: Any) -> tuple[np.ndarray, np.ndarray]:
    """Classes by logits that are as much as `noise` says larger than noise."""
    n, scale, _, deviation = draws
    x = scale * rng.normal(size=(n, len(theta)))
    return x.astype(np.float32), (x @ theta / deviation + rng.gumbel(size=(n, theta.shape[1]))).argmax(1)


# --- the table and the picture ---------------------------------------------------------------------------------------


def _row(kind: Kind, k: int, cells: list[Cell]) -> dict[str, Any]:
    right = sum(c["right"] for c in cells)
    known = [c["groups"] for c in cells if c["groups"] is not None]
    return {
        "kind": kind["name"],
        "groups": kind["groups"],
        "k": k,
        "right": f"{right} of {len(cells)}",
        "share": right / len(cells),
        "wrong": [c["seed"] for c in cells if not c["right"]],
        "groups found": {str(n): known.count(n) for n in sorted(set(known))},
    }


def draw(result: dict[str, Any], path: Path) -> None:
    """A bar for every kind and k.

    Args:
        result: The result of `run`.
        path: The picture.
    """
    rows = result["rows"]
    fig = plots.figure(7.2, 0.6 + 0.19 * len(rows))
    axes, at = fig.subplots(), np.arange(len(rows))
    yes = [r["k"] <= r["groups"] for r in rows]
    for colour, answer, name in ((plots.COLOURS[0], True, "supported"), (plots.COLOURS[1], False, "not supported")):
        own = [i for i in at if yes[i] == answer]
        shares = [100 * rows[i]["share"] for i in own]
        axes.barh(own, shares, 0.7, color=colour, alpha=0.8, label=f"{name} is right")
    axes.axvline(95, color="black", lw=0.8, ls=(0, (2, 1)))
    axes.set_yticks(at, [f"{r['kind']}, k = {r['k']}" for r in rows], fontsize=7)
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.invert_yaxis()
    axes.set_xlabel("seeds on which the verdict is right (%)")
    fig.legend(loc="outside upper center", fontsize=8, frameon=False, ncols=2)
    plots.tidy(axes)
    plots.save(fig, path)
