"""Theorem 2 of Su, Xu and Yang (2022): near the truth FedX contracts geometrically, down to a floor.

The theorem's factor is 1 - C₁sηρ/κ with an unspecified constant; it is shown with C₁ = 1. Lemma 1 has no constant: with
every client in its true cluster the error is multiplied by I - ηK_j, whose eigenvalues follow from the data. For
FedAvg, κ is sγ/(1 - (1 - γ)^s), which Lemma 1 implies and which tends to 1 as γ tends to 0; the paper's text has γ^s
instead of sγ. The paper's loss is half the mean squared error, so its η is twice the `lr` of `FedX`.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie import FedX
from coterie.core.federation import Federation
from coterie.core.key import Key
from coterie.core.pytree import Params, take
from coterie.runs import plots
from coterie.runs.metrics import matched_accuracy
from coterie_lab.reproduce.notebook import Notebook
from coterie_lab.reproduce.regressions import Regression
from coterie_lab.reproduce.rounds import last_state, states

NEAR = 3  # times the oracle's error; once the error is below it, rounds are not used for the factor


def run(spec: dict[str, Any], device: str, notebook: Notebook) -> dict[str, Any]:
    """Measure errors over rounds for every step size and method, then the final error for more and larger clients.

    Args:
        spec: Table of the experiment.
        device: "auto", "cpu" or "cuda".
        notebook: Stores the parts that are done.
    """
    rows, curves, seeds = [], {}, list(range(spec["seeds"]))
    for gamma, method in itertools.product(spec["gammas"], spec["methods"]):
        name = f"{method['name']}, γ = {gamma:g}"
        runs = notebook.entry(name, lambda g=gamma, m=method: [_decay(spec, g, m, seed, device) for seed in seeds])
        mean = {what: float(np.mean([r[what] for r in runs])) for what in runs[0] if what != "errors"}
        rows.append({"method": method["name"], "γ": gamma, **mean})
        curves[name] = np.mean([r["errors"] for r in runs], 0).tolist()
    ends = []
    for change in spec["floors"]:
        runs = notebook.entry(f"{change}", lambda c=change: [_floor(spec, c, seed, device) for seed in seeds])
        ends.append({"M": change["rest"], "rows": change["rest_rows"]} | {
            what: float(np.mean([r[what] for r in runs])) for what in runs[0]
        })  # fmt: skip
    return {"seeds": seeds, "rows": rows, "curves": curves, "floors": ends}


def _decay(spec: dict[str, Any], gamma: float, method: dict[str, Any], seed: int, device: str) -> dict[str, Any]:
    """Return the errors of one run, and its factor per round as measured, by Lemma 1 and by the theorem."""
    problem = Regression.of(spec["data"], seed)
    eta, refine, s = gamma / _sharpest(problem.federation), method["refine"], method.get("tau", 1)
    models = _near(problem, spec["off"], seed)
    algorithm = FedX(len(models), lr=eta / 2, refine=refine, tau=s, normalise="all", init=models)
    found = states(algorithm, problem.task, problem.federation, spec["rounds"], seed, device)
    errors = [problem.error([take(state.theta, j) for j in range(len(models))]) for state in found]
    oracle = problem.oracle(problem.federation)
    slowest, mean = _lemma(problem.federation, len(models), eta, refine, s)
    return {
        "errors": errors,
        "measured": _factor(errors, NEAR * oracle),
        "Lemma 1, mean": mean,
        "Lemma 1, slowest": slowest,
        "theorem": 1 - s * eta * _rho(problem.federation) / _kappa(refine, gamma, s),
        "κ": _kappa(refine, gamma, s),
        "end": errors[-1],
        "oracle": oracle,
    }


def _floor(spec: dict[str, Any], change: dict[str, Any], seed: int, device: str) -> dict[str, float]:
    """Return the final error of FedAvg with ten steps and γ = 0.9, and the theorem's bound with constants of one."""
    problem = Regression.of({**spec["data"], **change}, seed)
    federation, models = problem.federation, _near(problem, spec["off"], seed)
    groups = federation.groups
    assert groups is not None
    s, gamma = 10, 0.9
    algorithm = FedX(len(models), refine="fedavg", tau=s, init=models)
    state = last_state(algorithm, problem.task, federation, spec["floor_rounds"], seed, device)
    nu = _nu(federation.train.sizes, *problem.truth.shape)
    bound = spec["data"]["sigma"] * _kappa("fedavg", gamma, s) / _rho(federation) * nu * (1 - math.log(nu))
    rows = federation.train.sizes
    return {
        "ν": nu,
        "wrong": 1 - matched_accuracy(*(np.repeat(x.numpy(), rows.numpy()) for x in (state.labels, groups))),
        "error": problem.error([take(state.theta, j) for j in range(len(models))]),
        "oracle": problem.oracle(federation),
        "bound": bound / problem.delta,
    }


def _near(problem: Regression, off: float, seed: int) -> list[Params]:
    """Return the true models, each moved by `off` times Δ in a random direction."""
    noise = torch.randn(problem.truth.shape, generator=Key.of(seed).fold(2).generator()).double()
    moved = problem.truth + off * problem.delta * noise / noise.norm(dim=1, keepdim=True)
    return [{"weight": theta[None].float()} for theta in moved]


def _factor(errors: list[float], near: float) -> float:
    """Return the geometric mean of the factor per round until the error is below `near`, or until the end."""
    last = next((t for t, error in enumerate(errors) if error < near), len(errors) - 1)
    return (errors[last] / errors[0]) ** (1 / last)


# --- the quantities in the theorem -----------------------------------------------------------------------------------


def _by_size(federation: Federation) -> list[tuple[Tensor, Tensor]]:
    """Return for every number of rows n the features of the clients with n rows (c, n, d), and their groups (c,)."""
    train, groups = federation.train, federation.groups
    assert groups is not None
    of_row, d = train.sizes.repeat_interleave(train.sizes), train.x.shape[1]
    return [
        (train.x[of_row == n].double().reshape(-1, int(n), d), groups[train.sizes == n]) for n in train.sizes.unique()
    ]


def _sharpest(federation: Federation) -> float:
    """Return the largest ‖φ(x_i)‖²/n_i of all clients; γ is η times this."""
    return max(float(torch.linalg.matrix_norm(x, 2).square().max()) / x.shape[1] for x, _ in _by_size(federation))


def _kappa(refine: str, gamma: float, s: int) -> float:
    return s * gamma / (1 - (1 - gamma) ** s) if refine == "fedavg" else 1 + gamma


def _rho(federation: Federation) -> float:
    """Return the fraction of all rows that the smallest cluster has."""
    assert federation.groups is not None
    rows = torch.bincount(federation.groups, weights=federation.train.sizes.double())
    return float(rows.min() / rows.sum())


def _nu(sizes: Tensor, k: int, d: int) -> float:
    """Return the second term of eq. (10) with C = 1; the first term falls exponentially in the rows of clients."""
    n = sizes.double()
    skew = float(len(n) * n.square().sum() / n.sum() ** 2)  # χ²(n) + 1
    return math.sqrt(d * k * math.log(k) / len(n) * skew)


def _lemma(federation: Federation, k: int, eta: float, refine: str, s: int) -> tuple[float, float]:
    """Return the largest eigenvalue of I - ηK_j over all clusters, and the largest mean of its eigenvalues."""
    d = federation.train.x.shape[1]
    total = torch.zeros(k, d, d, dtype=torch.float64)  # ηN K_j
    for x, groups in _by_size(federation):
        values, vectors = torch.linalg.eigh(x @ x.mT / x.shape[1])
        values = values.clamp(min=1e-12)
        own = (1 - (1 - eta * values) ** s) / values if refine == "fedavg" else eta / (1 + eta * values)  # of ηP_i
        seen = vectors.mT @ x
        each = seen.mT @ (own[:, :, None] * seen)  # (c, d, d)
        total.index_add_(0, groups, each)
    values = 1 - torch.linalg.eigvalsh(total / int(federation.train.sizes.sum()))
    return float(values.max()), float(values.mean(1).max())


# --- the picture -----------------------------------------------------------------------------------------------------


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw errors over rounds, a panel per γ, with the lines of the theorem and the lemma; then the floors against ν.

    Args:
        result: The result of `run`.
        path: The picture.
    """
    gammas = list(dict.fromkeys(r["γ"] for r in result["rows"]))
    fig = plots.figure(3.9 * (len(gammas) + 1), 3.9)
    *panels, last = fig.subplots(1, len(gammas) + 1)
    for axes, gamma in zip(panels, gammas, strict=True):
        _draw_decay(axes, [r for r in result["rows"] if r["γ"] == gamma], result["curves"])
        axes.set_title(f"γ = {gamma:g}", fontsize=10)
        axes.sharey(panels[0])
    panels[0].set_ylabel("error d(θ_t, θ*) / Δ")
    panels[-1].plot([], [], color="black", lw=0.9, ls=":", label="Lemma 1, mean")
    panels[-1].plot([], [], color="black", lw=0.9, ls="--", label="theorem, C₁ = 1")
    panels[-1].legend(fontsize=7, frameon=False, loc="upper right")
    _draw_floors(last, result["floors"])
    for axes in (*panels, last):
        plots.tidy(axes)
    plots.save(fig, path)


def _draw_decay(axes: Any, rows: list[dict[str, Any]], curves: dict[str, list[float]]) -> None:
    for row, colour in zip(rows, plots.COLOURS, strict=False):
        errors = np.array(curves[f"{row['method']}, γ = {row['γ']:g}"])
        t = np.arange(len(errors))
        axes.semilogy(t, errors, color=colour, lw=1.8, label=row["method"])
        for key, style in (("theorem", "--"), ("Lemma 1, mean", ":")):
            line = errors[0] * row[key] ** t
            axes.semilogy(t[line > row["end"]], line[line > row["end"]], style, color=colour, lw=0.9)
    axes.axhline(rows[0]["oracle"], color=plots.COLOURS[7], lw=1)
    axes.set_ylim(bottom=rows[0]["oracle"] * 0.8)
    axes.set_xlabel("round; grey: oracle least squares")


def _draw_floors(axes: Any, rows: list[dict[str, Any]]) -> None:
    rows = sorted(rows, key=lambda r: r["ν"])
    for n, kind in enumerate(dict.fromkeys(_sizes(r["rows"]) for r in rows)):
        own, colour = [r for r in rows if _sizes(r["rows"]) == kind], plots.COLOURS[n]
        nu = [r["ν"] for r in own]
        axes.loglog(nu, [r["error"] for r in own], "o-", ms=4, color=colour, label=f"{kind} rows per client")
        axes.loglog(nu, [r["oracle"] for r in own], "_", ms=9, mew=1.5, color=colour)
    axes.loglog([r["ν"] for r in rows], [r["bound"] / 100 for r in rows], "k--", lw=0.9, label="theorem / 100")
    axes.plot([], [], "_", ms=9, mew=1.5, color="black", label="oracle least squares")
    marks = [v for v in (0.05, 0.1, 0.2, 0.3, 0.5) if rows[0]["ν"] / 1.2 < v < rows[-1]["ν"] * 1.2]
    axes.set_xticks(marks, [f"{v:g}" for v in marks])
    heights = (0.002, 0.005, 0.01, 0.02)
    axes.set_yticks(heights, [f"{v:g}" for v in heights])
    axes.minorticks_off()
    axes.set_title("where it ends, by number and size of clients", fontsize=10)
    axes.set_xlabel("ν (second term, C = 1)")
    axes.set_ylabel("final error d(θ̂, θ*) / Δ")
    axes.legend(fontsize=7, frameon=False)


def _sizes(rows: list[int]) -> str:
    return ", ".join(str(n) for n in sorted(set(rows)))
