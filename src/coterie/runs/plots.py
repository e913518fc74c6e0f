"""Pictures of runs, drawn from run folders."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from coterie.core.federation import Federation
from coterie.runs.compare import Group
from coterie.runs.folder import read_history, read_result
from coterie.storage.snapshot import atomic

COLOURS = ("#1b6ca8", "#d1495b", "#edae49", "#3f8f5f", "#7a5195", "#5c4d3c", "#2f9e9e", "#9a9a9a")
STYLES = ("-", "--", ":")  # of lines, where there are more of them than colours


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
        most = max(len(r["per_cluster"] or []) for r in rows)  # there may be more of them from round to round
        clusters = list(zip(*([*(r["per_cluster"] or []), *[None] * most][:most] for r in rows), strict=True))
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


def run(path: Path, folder: Path) -> None:
    """The picture of a run: its score over the rounds and, where it has one, its tree of models."""
    outline = read_result(folder).get("tree")
    fig = figure(10 if outline else 5.5, 4)
    axes = fig.subplots(1, 2 if outline else 1, squeeze=False)[0]
    curves(axes[0], {folder.name: folder})
    axes[0].set_xlim(right=axes[0].get_xlim()[1] * 1.25)  # room for the name
    if outline:
        tree(axes[1], outline, len(read_history(folder)))
    save(fig, path)


def comparison(path: Path, groups: list[Group]) -> None:
    """The scores of groups of runs over the rounds: the mean over seeds, in a band of ± sd. A metric has a panel."""
    panels: dict[str, list[Group]] = {}
    for group in groups:
        panels.setdefault(group.metric, []).append(group)
    heights = [max(4, 1 + 0.18 * sum(_legend(g).count("\n") + 1.3 for g in own)) for own in panels.values()]
    fig = figure(7.5, sum(heights))
    grid = fig.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (metric, own) in zip(grid, panels.items(), strict=True):
        for i, group in enumerate(own):
            _band(axes, group, COLOURS[i % len(COLOURS)], STYLES[i // len(COLOURS) % len(STYLES)])
        axes.set_title(f"Score over the rounds{_averaged(own)}", fontsize=11)
        axes.set_xlabel("round")
        axes.set_ylabel(f"mean {metric} over clients")
        axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        axes.margins(x=0.01)
        tidy(axes)
        # Beside the curves, which fill the panel from corner to corner.
        axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1, 1))
    save(fig, path)


def _band(axes: Any, group: Group, colour: str, style: str) -> None:
    """The mean curve of a group, and the band around it."""
    rounds, mean, sd = group.curve()
    marker = "o" if len(rounds) == 1 else ""
    axes.plot(rounds, mean, color=colour, ls=style, lw=2, marker=marker, label=_legend(group))
    if sd is not None:
        axes.fill_between(rounds, mean - sd, mean + sd, color=colour, alpha=0.18, lw=0)


def _legend(group: Group) -> str:
    return textwrap.fill(f"{group.method} {group.settings}", 32)


def _averaged(groups: list[Group]) -> str:
    """Over how many seeds the curves of a panel are averaged."""
    seeds = sorted({len(group.runs) for group in groups})
    counted = "–".join(dict.fromkeys(map(str, (seeds[0], seeds[-1]))))
    return "" if seeds[-1] == 1 else f": mean ± sd of {counted} seeds"


def tree(axes: Any, outline: list[dict[str, Any]], rounds: int) -> None:
    """A tree of models after some rounds, which go down; a line is a cluster, as wide as it has clients."""
    nodes = {row["node"]: row for row in outline}
    ends = {v: nodes[row["children"][0]]["round"] if row["children"] else None for v, row in nodes.items()}
    last = max(rounds, 1)
    place = _places(nodes)
    for v, row in nodes.items():
        x, end = place[v], ends[v] or last
        colour = COLOURS[7] if row["cluster"] is None else COLOURS[row["cluster"] % (len(COLOURS) - 1)]
        width = 1.5 + 10 * len(row["clients"]) / len(nodes[0]["clients"])
        axes.plot([x, x], [row["round"], end], color=colour, lw=width, solid_capstyle="butt")
        if row["children"]:
            axes.plot([place[c] for c in row["children"]], [end, end], color=COLOURS[7], lw=1.5)
            axes.annotate(f"α {row['cross']:.2f}", (x, end), (4, 4), textcoords="offset points", fontsize=8)
        else:
            label = f"cluster {row['cluster']}\n{len(row['clients'])} clients"
            axes.annotate(label, (x, end), (0, -4), textcoords="offset points", ha="center", va="top", fontsize=8)
    axes.set_ylim(last * 1.14, 0)
    axes.set_xlim(-0.6, max(place.values()) + 0.6)
    axes.set_ylabel("round")
    axes.set_xticks([])
    axes.set_yticks([t for t in axes.get_yticks() if 0 <= t <= last])
    tidy(axes)
    axes.spines["bottom"].set_visible(False)


def _places(nodes: dict[int, dict[str, Any]]) -> dict[int, float]:
    """Leaves side by side in the order of the tree, every inner node over the middle of its children."""
    place: dict[int, float] = {}

    def put(v: int) -> float:
        below = [put(child) for child in nodes[v]["children"]]
        place[v] = sum(below) / len(below) if below else float(sum(not nodes[u]["children"] for u in place))
        return place[v]

    put(0)
    return place


def scale(path: Path, rows: list[dict[str, Any]], slope: float) -> None:
    """The picture of `coterie bench scale`: a round's seconds and the peak of memory against the number of clients."""
    fig = figure(9, 3.4)
    seconds, memory = fig.subplots(1, 2)
    last = rows[-1]
    straight = [{"clients": r["clients"], "s": last["seconds"] * r["clients"] / last["clients"]} for r in rows]
    _growth(seconds, straight, "s", COLOURS[7], "proportional to the clients", marker="", ls="--", lw=1)
    _growth(seconds, rows, "seconds", COLOURS[0], f"measured: slope {slope:.2f} from 1,000 clients on")
    seconds.set_title("Seconds per round", fontsize=11)
    _growth(memory, rows, "file_mib", COLOURS[7], "the rows, in files")
    _growth(memory, rows, "peak_mib", COLOURS[0], "the process, at its peak")
    memory.set_title("Memory in MiB", fontsize=11)
    for axes in (seconds, memory):
        axes.set_xlabel("clients, all of them in every round")
        axes.legend(frameon=False, fontsize=9, reverse=True)
        tidy(axes)
    save(fig, path)


def federations(path: Path, rows: list[dict[str, Any]]) -> None:
    """The picture of `coterie bench flower`: a round's seconds against the number of nodes."""
    fig = figure(5, 3.2)
    axes = fig.subplots()
    for workers, colour, label in (
        (False, COLOURS[7], "torch in every message"),
        (True, COLOURS[0], "resident workers"),
    ):
        own = [row for row in rows if row["workers"] == workers]
        axes.plot([r["nodes"] for r in own], [r["seconds"] for r in own], "o-", lw=2, color=colour, label=label)
    axes.set_xticks(sorted({row["nodes"] for row in rows}))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("nodes, all on one machine")
    axes.set_title("Seconds per round on a Flower federation", fontsize=11)
    axes.legend(frameon=False, fontsize=9)
    tidy(axes)
    save(fig, path)


def _growth(axes: Any, rows: list[dict[str, Any]], key: str, colour: str, label: str, **style: Any) -> None:
    """One curve against the number of clients, both on logarithmic axes."""
    kept = [row for row in rows if row[key] is not None]
    line = {"marker": "o", "lw": 2, **style}
    axes.loglog([row["clients"] for row in kept], [row[key] for row in kept], color=colour, label=label, **line)
