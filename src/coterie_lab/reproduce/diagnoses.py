"""Whether a diagnosis is right: about groups, and about clients that merely vary.

Clients are simulated by a table of settings, of which all but a few are the same for every kind of federation. A
verdict is right if it supports k groups where there are k or more, and does not where there are fewer. There may be no
verdict, which is neither right nor wrong. Cells (a kind, a k and a seed) are independent, and are computed side by side
on all cores.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from coterie import IFCA, Federation, FedX, Task, diagnose, fit, models
from coterie.runs import plots
from coterie_lab.reproduce.notebook import Notebook
from coterie_lab.reproduce.workers import pool

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


def _cells(workers: Executor, kind: Kind, k: int, seeds: list[int], notebook: Notebook) -> list[Future[Cell]]:
    """The cells of a kind and a k, one for every seed; none if they are known from before."""
    return [] if _name(kind, k) in notebook.entries else [workers.submit(cell, kind, k, seed) for seed in seeds]


def cell(kind: Kind, k: int, seed: int) -> Cell:
    """One diagnosis, and whether it is right (None if it has no verdict)."""
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
        "right": None if found.supported is None else found.supported == (k <= kind["groups"]),
        "groups": found.groups,
        "merge": value.get("against a merge"),
        "valley": value.get("valley"),
    }


# --- clients ---------------------------------------------------------------------------------------------------------


def simulated(kind: Kind, seed: int) -> Federation:
    """Clients of a kind: y = ⟨x, θ_i⟩ + a_i + noise, or classes with such logits.

    Args:
        kind: The settings. `clients`, `rows` and `d` are ranges to draw from; `groups` is how many there are, `shares`
            their sizes, and `differ` in what: "all", "one coefficient" or "intercept"; `within` the root mean square
            distance of θ_i from its group's model, of the smallest distance between groups (of 1 where there is one
            group), `spreads` by what that is multiplied in each group, `tails` the degrees of freedom of θ_i; `line`
            the half length of a uniform distribution of θ_i, `disc` the radius of one in a ball, `skew` the mean of an
            exponential one, `two_piece` the deviation of a normal one to one side, which is four times that to the
            other; `intercept` the deviation of a_i; `noise` that of rows, `noises` by what it is multiplied in each
            group, `noise_by_client` the deviation of its logarithm, `dof` its degrees of freedom; `scales` the
            deviation of the logarithm of clients' features, `correlation` that of any two features, `modes` the
            distance of the first feature's mean from 0, to either side by client; `outliers` clients with a model like
            no other's; `classes` how many, 0 for a regression. What is 0 or empty is not there.
        seed: Of all draws.
    """
    rng = np.random.default_rng([seed, zlib.crc32(kind["name"].encode())])
    m, d = (int(rng.integers(low, high + 1)) for low, high in (kind["clients"], kind["d"]))
    width = max(kind["classes"], 1)
    centres, level, apart = _models(rng, kind, d * width)
    z = _labels(rng, m, kind)
    theta = centres[z] + apart * _deviations(rng, kind, z, d * width) + _continuum(rng, kind, m, d * width)
    client = Clients(theta, level[z], np.array(kind["noises"] or [1.0] * kind["groups"])[z])
    odd = rng.permutation(m)[: kind["outliers"]]
    theta[odd], z[odd] = 3 * rng.normal(size=(len(odd), d * width)), -1
    draw = _classes if kind["classes"] else _targets
    train = [draw(rng, kind, own, width) for own in _draws(rng, kind, client)]
    test = [draw(rng, kind, own, width) for own in _draws(rng, kind, client)]
    return Federation.from_clients(train, test if kind["classes"] else None, groups=z)


class Clients(NamedTuple):
    """What all rows of a client have in common; one entry for every client."""

    theta: np.ndarray  # (m, d)
    level: np.ndarray  # the intercept of its group
    noise: np.ndarray  # of its group, beside others


class Own(NamedTuple):
    """The same of one client, with what is drawn for it."""

    theta: np.ndarray
    rows: int
    scale: float  # of features
    intercept: float
    noise: float  # its deviation
    mode: float  # the mean of its first feature


def _models(rng: np.random.Generator, kind: Kind, d: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Groups' models (k, d), their intercepts (k,), and the smallest distance between groups."""
    k, differ = kind["groups"], kind["differ"]
    if differ == "all":
        centres, apart = _centres(rng, k, d)
        return centres, np.zeros(k), apart
    alone, apart = _centres(rng, k, 1)
    alike = np.repeat(_centres(rng, 1, d)[0], k, 0)
    if differ == "intercept":
        return alike, alone[:, 0], apart
    alike[:, 0] = alone[:, 0]
    return alike, np.zeros(k), apart


def _centres(rng: np.random.Generator, k: int, d: int) -> tuple[np.ndarray, float]:
    """Models of length 1 that are not too close, and the smallest distance."""
    while True:
        centres = rng.normal(size=(k, d))
        centres /= np.linalg.norm(centres, axis=1, keepdims=True)
        apart = np.linalg.norm(centres[:, None] - centres, axis=2)[np.triu_indices(k, 1)].min(initial=1.0)
        if apart > APART:
            return centres, float(apart)


def _deviations(rng: np.random.Generator, kind: Kind, z: np.ndarray, d: int) -> np.ndarray:
    """Of clients' models from their group's, where groups are 1 apart."""
    spread, dof = np.array(kind["spreads"] or [1.0] * kind["groups"])[z, None], kind["tails"]
    far = kind["within"] * spread / np.sqrt(d) * rng.normal(size=(len(z), d))
    return far * np.sqrt((dof - 2) / rng.chisquare(dof, size=(len(z), 1))) if dof else far


def _continuum(rng: np.random.Generator, kind: Kind, m: int, d: int) -> np.ndarray:
    """How clients' models vary where that is not normal."""
    along = rng.normal(size=d)
    far = kind["line"] * rng.uniform(-1, 1, size=(m, 1)) + kind["skew"] * rng.exponential(size=(m, 1))
    if kind["two_piece"]:
        right = rng.uniform(size=(m, 1)) < 0.8  # so that density has no step
        far += kind["two_piece"] * np.where(right, 4, -1) * np.abs(rng.normal(size=(m, 1)))
    theta = far * along / np.linalg.norm(along)
    if kind["disc"]:
        ball = rng.normal(size=(m, d))
        theta += kind["disc"] * rng.uniform(size=(m, 1)) ** (1 / d) * ball / np.linalg.norm(ball, axis=1, keepdims=True)
    return theta


def _labels(rng: np.random.Generator, m: int, kind: Kind) -> np.ndarray:
    shares = np.array(kind["shares"] or [1 / kind["groups"]] * kind["groups"])
    ends = np.round(shares.cumsum() / shares.sum() * m).astype(int)
    return rng.permutation(np.searchsorted(ends, np.arange(m), side="right"))


def _draws(rng: np.random.Generator, kind: Kind, clients: Clients) -> Iterator[Own]:
    low, high = kind["rows"]
    for i, (theta, level, noise) in enumerate(zip(*clients, strict=True)):
        n, scale = int(rng.integers(low, high + 1)), np.exp(kind["scales"] * rng.normal())
        noise *= kind["noise"] * np.exp(kind["noise_by_client"] * rng.normal())
        yield Own(theta, n, scale, level + kind["intercept"] * rng.normal(), noise, kind["modes"] * (-1) ** i)


def _features(rng: np.random.Generator, kind: Kind, own: Own, d: int) -> np.ndarray:
    x = rng.normal(size=(own.rows, d))
    if r := kind["correlation"]:
        x = np.sqrt(1 - r) * x + np.sqrt(r) * rng.normal(size=(own.rows, 1))
    x[:, 0] += own.mode
    return own.scale * x


def _targets(rng: np.random.Generator, kind: Kind, own: Own, width: int) -> tuple[np.ndarray, np.ndarray]:
    x, dof = _features(rng, kind, own, len(own.theta)), kind["dof"]
    noise = rng.standard_t(dof, own.rows) * np.sqrt((dof - 2) / dof) if dof else rng.normal(size=own.rows)
    return x.astype(np.float32), (x @ own.theta + own.intercept + own.noise * noise).astype(np.float32)


def _classes(rng: np.random.Generator, kind: Kind, own: Own, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Classes by logits that are as much as `noise` says larger than noise."""
    theta = own.theta.reshape(-1, width)
    x = _features(rng, kind, own, len(theta))
    return x.astype(np.float32), (x @ theta / own.noise + rng.gumbel(size=(own.rows, width))).argmax(1)


# --- the table and the picture ---------------------------------------------------------------------------------------


def _row(kind: Kind, k: int, cells: list[Cell]) -> dict[str, Any]:
    seeds = {right: [c["seed"] for c in cells if c["right"] is right] for right in (True, False, None)}
    known = [c["groups"] for c in cells if c["groups"] is not None]
    return {
        "kind": kind["name"],
        "groups": kind["groups"],
        "k": k,
        "seeds": len(cells),
        "right": len(seeds[True]),
        "wrong": seeds[False],
        "no verdict": seeds[None],
        "groups found": {str(n): known.count(n) for n in sorted(set(known))},
    }


def draw(result: dict[str, Any], path: Path) -> None:
    """A bar for every kind and k: right verdicts, then seeds without a verdict; wrong ones are left white.

    Args:
        result: The result of `run`.
        path: The picture.
    """
    rows = result["rows"]
    fig = plots.figure(7.2, 0.6 + 0.19 * len(rows))
    axes, at = fig.subplots(), np.arange(len(rows))
    yes = np.array([r["k"] <= r["groups"] for r in rows])
    right, none = (
        100 * np.array(counts) / [r["seeds"] for r in rows]
        for counts in ([r["right"] for r in rows], [len(r["no verdict"]) for r in rows])
    )
    for colour, own, name in ((plots.COLOURS[0], yes, "supported"), (plots.COLOURS[1], ~yes, "not supported")):
        axes.barh(at[own], right[own], 0.7, color=colour, alpha=0.8, label=f"{name} is right")
    axes.barh(at, none, 0.7, left=right, color="0.8", label="no verdict")
    axes.axvline(95, color="black", lw=0.8, ls=(0, (2, 1)))
    axes.set_yticks(at, [f"{r['kind']}, k = {r['k']}" for r in rows], fontsize=7)
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.invert_yaxis()
    axes.set_xlabel("seeds (%)")
    fig.legend(loc="outside upper center", fontsize=8, frameon=False, ncols=3)
    plots.tidy(axes)
    plots.save(fig, path)
