"""Pictures of runs, drawn from run folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from coterie.federation import Federation
from coterie.record import read_history, read_result
from coterie.snapshot import atomic

COLOURS = ("#1b6ca8", "#d1495b", "#edae49", "#3f8f5f", "#7a5195", "#5c4d3c", "#2f9e9e", "#9a9a9a")


def figure(width: float, height: float) -> Any:
    """An empty figure that no window system knows of."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", dpi=150)


def tidy(axes: Any) -> None:
    """Take away what carries no information."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)


def save(fig: Any, path: Path) -> None:
    """Write a PNG whole or not at all."""
    with atomic(path) as part:
        fig.savefig(part, format="png")


def curves(axes: Any, runs: dict[str, Path]) -> None:
    """The score of every run over its rounds; thin lines are its clusters."""
    for (name, path), colour in zip(runs.items(), COLOURS, strict=False):
        metric = read_result(path)["metric"]
        rows = [row for row in read_history(path) if row.get(metric) is not None]
        rounds, score = [r["round"] for r in rows], [r[metric] for r in rows]
        axes.plot(rounds, score, color=colour, lw=2)
        clusters = list(zip(*(r["per_cluster"] or [] for r in rows), strict=True))
        for own in clusters if len(clusters) <= len(COLOURS) else ():
            axes.plot(rounds, [np.nan if v is None else v for v in own], color=colour, lw=0.8, alpha=0.5)
        axes.annotate(f" {name} {score[-1]:.3f}", (rounds[-1], score[-1]), color=colour, va="center", fontsize=9)
        axes.set_ylabel(f"mean {metric} over clients")
    axes.set_xlabel("round")
    axes.margins(x=0)
    tidy(axes)


def groups(fig: Any, run: Path, federation: Federation, samples: int = 12) -> None:
    """One row per group that a run found: images from its clients, and how many it has."""
    result = read_result(run)
    labels = np.array(result["labels"])
    found = np.unique(labels)
    grid = fig.subplots(len(found), 1, squeeze=False)[:, 0]
    for axes, j in zip(grid, found, strict=True):
        clients = np.flatnonzero(labels == j)
        picked = [federation.train.client(int(clients[n % len(clients)]))[0][n // len(clients)] for n in range(samples)]
        strip = np.concatenate([np.pad(image.squeeze().numpy(), 1) for image in picked], axis=1)
        axes.imshow(strip, cmap="gray_r")
        axes.set_axis_off()
        score = result["per_cluster"].get(str(int(j)), float("nan"))
        axes.set_title(f"group {j}: {len(clients)} clients, {result['metric']} {score:.3f}", loc="left", fontsize=9)


def demo(path: Path, runs: dict[str, Path], clustered: str, federation: Federation) -> None:
    """The demo's picture: what the groups look like, and what they are worth."""
    fig = figure(11, 4.2)
    left, right = fig.subfigures(1, 2, width_ratios=(1.15, 1))
    groups(left, runs[clustered], federation)
    left.suptitle("The groups it found; no image left its client", fontsize=11)
    axes = right.subplots()
    curves(axes, runs)
    axes.set_title("One model per group, for all, or each", fontsize=11)
    axes.set_xlim(right=axes.get_xlim()[1] * 1.28)  # room for the names
    axes.set_xticks([t for t in axes.get_xticks() if t <= len(read_history(runs[clustered]))])
    save(fig, path)
