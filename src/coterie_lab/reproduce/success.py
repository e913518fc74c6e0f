"""Success probability of IFCA on mixtures of linear regressions (IFCA, Figure 2).

A trial fixes the data; it succeeds if, over all starts and step sizes, one run ends within 0.6 σ of the truth. The
distance is that of the authors' code, the mean over learnt models of the distance to the *nearest* true model. The
result also contains success by the matched distance (each true model once) and the fraction of correctly labelled
clients.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from coterie import FarthestFirst
from coterie.core.engine import sampled
from coterie.core.key import Key
from coterie.core.task import Task
from coterie.data.synthetic import linear_draws, linear_truth
from coterie.engines import find_device
from coterie.models import Linear
from coterie.runs import plots
from coterie.runs.loop import CLIENTS, START
from coterie.runs.metrics import matched_accuracy
from coterie_lab.reproduce.mixtures import Mixtures, Runs, farthest_first, ifca
from coterie_lab.reproduce.notebook import Notebook

WORK = {"cpu": 2**26, "cuda": 2**29}  # residuals that are held in memory at a time


class Setting(NamedTuple):
    """The parameters that the targets of a trial depend on, besides its rows."""

    scaling: Literal["code", "text"]
    scale: float
    sigma: float


def run(spec: dict[str, Any], device: str, notebook: Notebook) -> dict[str, Any]:
    """Measure every panel, size, setting and trial.

    Args:
        spec: Table of the experiment.
        device: "auto", "cpu" or "cuda".
        notebook: Stores the parts that are done.
    """
    rows = []
    for panel in spec["panels"]:
        settings = [Setting(*s) for s in itertools.product(*(panel[n] for n in ("scaling", "scale", "sigma")))]
        for clients, n in itertools.product(panel["clients"], panel["rows"]):
            trials = notebook.entry(
                f"panel {panel['name']}, {clients} clients of {n} rows",
                lambda p=panel, s=settings, m=clients, n=n: _trials(spec, p, s, m, n, find_device(device)),
            )
            for at, setting in enumerate(settings):
                rows.append({
                    "panel": panel["name"], "clients": clients, "rows": n, "groups": panel["groups"],
                    "scale": setting.scale, "sigma": setting.sigma, "scaling": setting.scaling, "trials": len(trials),
                    **{what: float(np.mean([t[at][what] for t in trials])) for what in trials[0][at]},
                })  # fmt: skip
    return {"seeds": list(range(spec["trials"])), "rows": rows}


def _trials(
    spec: dict[str, Any], panel: dict[str, Any], settings: list[Setting], clients: int, n: int, device: torch.device
) -> list[list[dict[str, float]]]:
    """Return the result of every trial and setting; run as many trials at once as fit, while the next are drawn."""
    width = len(settings) * len(panel["lr"]) * spec["restarts"] * panel["groups"]
    at_once = max(1, WORK[device.type] // (clients * n * width))
    seeds = list(range(spec["trials"]))
    batches = [seeds[i : i + at_once] for i in range(0, len(seeds), at_once)]
    out = []
    with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as pool:
        coming: list[Any] = []
        for now, then in itertools.pairwise([[], *batches, []]):
            drawn = [future.result() for future in coming]
            coming = [pool.submit(_draw, clients * n, spec["features"], seed, device) for seed in then]
            if now:
                out += _batch(spec, panel, settings, now, drawn, (clients, n), device)
    return out


def _draw(rows: int, features: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Draw a trial's rows and copy them to the device while it is computing."""
    aside = torch.cuda.Stream(device) if device.type == "cuda" else None
    with torch.cuda.stream(aside):
        x, noise = (v.to(device) for v in linear_draws(rows, features, seed))
    if aside is not None:
        aside.synchronize()
    return x, noise


def _batch(
    spec: dict[str, Any], panel: dict[str, Any], settings: list[Setting], seeds: list[int],
    drawn: list[tuple[Tensor, Tensor]], size: tuple[int, int], device: torch.device,
) -> list[list[dict[str, float]]]:  # fmt: skip
    """Run some trials, with all settings, starts and step sizes in one computation."""
    d, k = spec["features"], panel["groups"]
    x, noise = (torch.stack([pair[i] for pair in drawn]).unflatten(1, size) for i in (0, 1))
    truth = torch.stack(
        [torch.stack([linear_truth(d, k, s.scale, seed, s.scaling) for s in settings]) for seed in seeds]
    ).to(device)
    sigma = torch.tensor([s.sigma for s in settings], device=device)
    data = Mixtures.of(x, noise, truth, sigma)
    keys = [Key.of(seed).fold(START) for seed in seeds]
    task = Task.regressor(Linear(d, 1, bias=False))
    random = torch.stack([_random_starts(key, k, d, spec["restarts"]) for key in keys]).to(device)
    begin = torch.stack([task.init(key.fold(0, 0))["weight"][0] for key in keys]).to(device)
    lent = data.only(torch.stack([_lenders(seed, size[0], k) for seed in seeds]).to(device))
    starts = {
        "": random[:, None].expand(-1, len(settings), -1, -1, -1),
        ", farthest-first": farthest_first(lent, begin, spec["start_lr"], FarthestFirst().steps, k),
    }
    lr = torch.tensor(panel["lr"], device=device)
    limit = [0.6 * s.sigma + panel["slack"] for s in settings]
    results: list[list[dict[str, float]]] = [[{} for _ in settings] for _ in seeds]
    for name, theta in starts.items():
        models, labels = ifca(data, Runs.every(theta, lr), spec["rounds"], normalise=spec["normalise"])
        by_setting = (len(settings), -1)
        _judge(models.unflatten(1, by_setting), labels.unflatten(1, by_setting), truth, limit, name, results)
    return results


def _lenders(seed: int, clients: int, k: int) -> Tensor:
    """Return the clients that `FarthestFirst` samples for IFCA's first start."""
    share = max(k, FarthestFirst().clients) / clients
    everybody = torch.arange(clients)
    return everybody if share >= 1 else sampled(Key.of(seed).fold(CLIENTS), (0, 0), everybody, share)


def _random_starts(key: Key, k: int, d: int, restarts: int) -> Tensor:
    """Draw θ⁽⁰⁾ (r, k, d) coordinate-wise from Bernoulli(0.5), as in Section 6.1."""
    return torch.stack([(torch.rand(k, d, generator=key.fold(r).generator()) < 0.5).float() for r in range(restarts)])


def _judge(
    theta: Tensor, labels: Tensor, truth: Tensor, limit: list[float], name: str, results: list[list[dict[str, float]]]
) -> None:
    """Add the scores of the best run of every trial and setting, by the code's distance; theta is (t, s, l·r, k, d)."""
    gap = torch.cdist(theta.double(), truth[:, :, None].double()).nan_to_num(nan=1e30, posinf=1e30)
    distance = gap.amin(-1).mean(-1)
    at = distance.argmin(-1, keepdim=True)
    nearest = distance.gather(2, at)[..., 0].cpu().numpy()
    gap = gap.take_along_dim(at[..., None, None], 2)[:, :, 0].cpu().numpy()
    labels = labels.take_along_dim(at[..., None], 2)[:, :, 0].cpu()
    m, k = labels.shape[2], gap.shape[2]
    groups = np.arange(m) // (m // k)
    for t, settings in enumerate(results):
        for s, row in enumerate(settings):
            pairs = linear_sum_assignment(gap[t, s])
            row[f"success{name}"] = float(nearest[t, s] < limit[s])
            row[f"matched{name}"] = float(gap[t, s][pairs].mean() < limit[s])
            row[f"labels{name}"] = matched_accuracy(labels[t, s].numpy(), groups)


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw success against separation or the number of clients, with a column per panel and a row per scaling.

    Args:
        result: The result of `run`.
        path: The picture.
    """
    panels = list(dict.fromkeys(r["panel"] for r in result["rows"]))
    scalings = list(dict.fromkeys(r["scaling"] for r in result["rows"]))
    fig = plots.figure(3.3 * len(panels), 2.9 * len(scalings))
    grid = fig.subplots(len(scalings), len(panels), sharey=True, squeeze=False)
    for (s, scaling), (p, panel) in itertools.product(enumerate(scalings), enumerate(panels)):
        axes, rows = grid[s][p], [r for r in result["rows"] if r["panel"] == panel and r["scaling"] == scaling]
        by, across = ("sigma", "scale") if len({r["scale"] for r in rows}) > 2 else ("rows", "clients")
        keys = sorted({(r[by], r["scale"] if across == "clients" else 0) for r in rows})
        for (key, scale), colour in zip(keys, itertools.cycle(plots.COLOURS), strict=False):
            line = [r for r in rows if r[by] == key and (across == "scale" or r["scale"] == scale)]
            name = f"σ = {key}" if by == "sigma" else f"n = {key}, r = {scale}"
            axes.plot([r[across] for r in line], [r["success"] for r in line], "o-", color=colour, label=name, ms=4)
            axes.plot([r[across] for r in line], [r["success, farthest-first"] for r in line], ":", color=colour, lw=2)
        axes.set_title(f"({panel}) k = {rows[0]['groups']}, scaled as the {scaling}", fontsize=9)
        axes.set_xlabel("separation" if across == "scale" else "clients m")
        axes.set_ylim(-0.05, 1.05)
        axes.plot([], [], ":", color="grey", lw=2, label="farthest-first, one start")
        axes.legend(fontsize=6, frameon=False)
        plots.tidy(axes)
    fig.supylabel("success probability", fontsize=9)
    plots.save(fig, path)
