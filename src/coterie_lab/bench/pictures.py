"""Pictures of benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from coterie.runs import plots


def scale(path: Path, rows: list[dict[str, Any]], slope: float) -> None:
    """The picture of `coterie bench scale`: a round's seconds and the peak of memory against the number of clients."""
    fig = plots.figure(9, 3.4)
    seconds, memory = fig.subplots(1, 2)
    last = rows[-1]
    straight = [{"clients": r["clients"], "s": last["seconds"] * r["clients"] / last["clients"]} for r in rows]
    _growth(seconds, straight, "s", plots.COLOURS[7], "proportional to the clients", marker="", ls="--", lw=1)
    _growth(seconds, rows, "seconds", plots.COLOURS[0], f"measured: slope {slope:.2f} from 1,000 clients on")
    seconds.set_title("Seconds per round", fontsize=11)
    _growth(memory, rows, "file_mib", plots.COLOURS[7], "the rows, in files")
    _growth(memory, rows, "peak_mib", plots.COLOURS[0], "the process, at its peak")
    memory.set_title("Memory in MiB", fontsize=11)
    for axes in (seconds, memory):
        axes.set_xlabel("clients, all of them in every round")
        axes.legend(frameon=False, fontsize=9, reverse=True)
        plots.tidy(axes)
    plots.save(fig, path)


def federations(path: Path, rows: list[dict[str, Any]]) -> None:
    """The picture of `coterie bench flower`: a round's seconds against the number of nodes."""
    fig = plots.figure(5, 3.2)
    axes = fig.subplots()
    for workers, colour, label in (
        (False, plots.COLOURS[7], "torch in every message"),
        (True, plots.COLOURS[0], "resident workers"),
    ):
        own = [row for row in rows if row["workers"] == workers]
        axes.plot([r["nodes"] for r in own], [r["seconds"] for r in own], "o-", lw=2, color=colour, label=label)
    axes.set_xticks(sorted({row["nodes"] for row in rows}))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("nodes, all on one machine")
    axes.set_title("Seconds per round on a Flower federation", fontsize=11)
    axes.legend(frameon=False, fontsize=9)
    plots.tidy(axes)
    plots.save(fig, path)


def attacks(path: Path, rows: list[dict[str, Any]]) -> None:
    """The picture of `coterie bench attacks`: honest clients' accuracy by attack, rule and share of hostile."""
    shares = sorted({r["hostile"] for r in rows} - {0})
    rules = list(dict.fromkeys(r["rule"] for r in rows))
    cases = list(dict.fromkeys(r["attack"] for r in rows))
    found = {(r["attack"], r["rule"], r["hostile"]): r["accuracy"] for r in rows}
    fig = plots.figure(1.5 + 4.2 * len(shares), 1.2 + 0.34 * len(cases))
    for axes, share in zip(fig.subplots(1, len(shares), sharey=True, squeeze=False)[0], shares, strict=True):
        values = np.array([[found.get((c, r, share), found.get((c, r, 0))) for r in rules] for c in cases], float)
        axes.imshow(values, cmap="RdYlGn", vmin=0.7, vmax=0.95, aspect="auto", alpha=0.55)
        for y, x in np.ndindex(values.shape):
            axes.text(x, y, f"{values[y, x]:.3f}".lstrip("0"), ha="center", va="center", fontsize=8, color=plots.INK)
        axes.set_xticks(range(len(rules)), [r.replace("_", "\n") for r in rules], fontsize=8)
        axes.set_yticks(range(len(cases)), cases, fontsize=8)
        axes.set_title(f"{100 * share:.0f} % of the clients are hostile", fontsize=10)
        axes.spines[:].set_visible(False)
    fig.suptitle("Accuracy of honest clients, by attack and robust mean", fontsize=11)
    plots.save(fig, path)


def _growth(axes: Any, rows: list[dict[str, Any]], key: str, colour: str, label: str, **style: Any) -> None:
    """One curve against the number of clients, both on logarithmic axes."""
    kept = [row for row in rows if row[key] is not None]
    line = {"marker": "o", "lw": 2, **style}
    axes.loglog([row["clients"] for row in kept], [row[key] for row in kept], color=colour, label=label, **line)
