"""Pictures of runs, drawn from run folders."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from coterie.core.federation import Federation
from coterie.runs.compare import Group
from coterie.runs.folder import read_history, read_result
from coterie.runs.view import View
from coterie.storage.names import printable
from coterie.storage.snapshot import atomic

COLOURS = ("#1b6ca8", "#d1495b", "#edae49", "#3f8f5f", "#7a5195", "#5c4d3c", "#2f9e9e", "#9a9a9a")
INK = "#222222"
FORMATS = ("png", "jpg", "jpeg", "svg", "pdf")
LISTED = 8  # clusters that a legend names
FEW = 40  # clients at most that are written by name
STRIP = 240  # places of a strip at most; where there are more clients, several share one
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
    """Write a picture whole or not at all."""
    kind = picture_format(path)
    with atomic(path) as part:
        fig.savefig(part, format=kind)


def picture_format(path: Path) -> str:
    """The format that a file's suffix asks for.

    Raises:
        ValueError: There is no such format.
    """
    if (kind := path.suffix.lstrip(".").lower()) not in FORMATS:
        raise ValueError(f"{path}: a picture must end in {', '.join(f'.{f}' for f in FORMATS[:-1])} or .{FORMATS[-1]}")
    return kind


def colour(cluster: int) -> tuple[float, ...]:
    """The colour of a cluster in all pictures: seven, then the same lighter, then darker."""
    from matplotlib.colors import to_rgb

    hues = len(COLOURS) - 1  # the last one is that of no cluster
    paper, share = ((1.0, 0.0), (1.0, 0.45), (0.0, 0.4))[cluster // hues % 3]
    return tuple((1 - share) * part + share * paper for part in to_rgb(COLOURS[cluster % hues]))


def distinct(clusters: int) -> bool:
    """Whether there are colours for so many clusters."""
    return clusters <= 3 * (len(COLOURS) - 1)


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
    """The picture of a run, finished or not: its score over the rounds, its tree if it has one, and who is where."""
    view = View.of(folder)
    if not view.history:
        raise ValueError(f"{folder} has no round yet that could be drawn")
    fig = figure(15 if view.tree else 10.5, 4.2)
    fig.suptitle(view.title, fontsize=12)
    left, *middle, right = fig.subplots(1, 3 if view.tree else 2)
    score(left, view.history, view.metric, view.sizes)
    left.set_title("Score over the rounds", fontsize=10)
    if view.tree:
        tree(middle[0], view.tree, len(view.history))
        middle[0].set_title("Tree of models", fontsize=10)
    who(right, view)
    save(fig, path)


def score(
    axes: Any, history: list[dict[str, Any]], metric: str, sizes: dict[int, int], each: str = "per_cluster"
) -> None:
    """A run's score over its rounds: a thick line for all clients, and a thin one for each cluster, in its colour.

    Args:
        axes: Where to draw.
        history: The rounds, one dict each.
        metric: The name of the score, or another column.
        sizes: The members of every cluster, for the legend.
        each: The column that has it for each cluster.
    """
    rows = [row for row in history if row.get(metric) is not None]
    rounds = [row["round"] for row in rows]
    marker = "" if len(rows) > 1 else "."  # a line needs two points
    clusters = _by_cluster(rows, each)
    if len(clusters) > 1 and distinct(len(clusters)):
        labels = [f"cluster {j} ({sizes.get(j, 0):,})" for j in range(min(len(clusters), LISTED))]
        if (more := len(clusters) - LISTED) > 0:
            labels.append(f"and {more} more")
        for j, own in enumerate(clusters):
            label = labels[j] if j < len(labels) else None
            axes.plot(rounds, own, color=colour(j), lw=1, marker=marker, label=label)
    axes.plot(rounds, [row[metric] for row in rows], color=INK, lw=2, marker=marker, label="mean over clients")
    axes.set_xlabel("round")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel(metric)
    axes.margins(x=0.02)
    axes.legend(frameon=False, fontsize=8)
    tidy(axes)


def _by_cluster(rows: list[dict[str, Any]], key: str) -> list[list[float]]:
    """The scores of every cluster, NaN where it has none; there may be more clusters from round to round."""
    each = [row.get(key) or [] for row in rows]
    most = max(map(len, each), default=0)
    return [[np.nan if j >= len(own) or own[j] is None else own[j] for own in each] for j in range(most)]


def who(axes: Any, view: View) -> None:
    """Who is in which cluster: clients by name where they are few, else as a strip; or only how many there are."""
    shown = [j for j in view.sizes if distinct(j + 1)]
    labels = view.labels
    title = "Who is in which cluster"
    if labels is None:
        title = "Members of each cluster"
        axes.barh(range(len(shown)), [view.sizes[j] for j in shown], color=[colour(j) for j in shown])
        axes.set_xlabel("members")
    elif len(labels) <= FEW:
        _names(axes, view, labels, shown)
    else:
        _strip(axes, view, labels, shown)
    if more := len(view.sizes) - len(shown):
        title += f" (the first {len(shown)}; {more:,} more)"
    axes.set_title(title, fontsize=10)
    axes.set_yticks(range(len(shown)), [f"cluster {j} ({view.sizes[j]:,})" for j in shown], fontsize=8)
    axes.set_ylim(max(len(shown), 3) - 0.5, -0.5)  # the row of a single one would be too high
    tidy(axes)
    axes.grid(visible=False)


def _names(axes: Any, view: View, labels: np.ndarray, shown: list[int]) -> None:
    """Every client's name beside its cluster."""
    for y, j in enumerate(shown):
        names = ", ".join(printable(view.names[i]) for i in np.flatnonzero(labels == j))
        lines = textwrap.wrap(names, 44, max_lines=max(1, 16 // len(shown)), placeholder=" …")
        axes.text(0.02, y, "\n".join(lines), color=colour(j), va="center", fontsize=9, parse_math=False)
    axes.set_xlim(0, 1)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)


def _strip(axes: Any, view: View, labels: np.ndarray, shown: list[int]) -> None:
    """A row for each cluster, in which its clients are marked at their places; by true groups where those are known."""
    m, groups = len(labels), view.groups
    order = np.arange(m) if groups is None else np.argsort(groups, kind="stable")
    places = np.arange(m) * min(m, STRIP) // m
    image = np.ones((len(shown), places[-1] + 1, 4))
    for y, j in enumerate(shown):
        image[y, :, :3] = colour(j)
        image[y, :, 3] = np.bincount(places, labels[order] == j) / np.bincount(places)
    axes.imshow(image, aspect="auto", interpolation="nearest", extent=(0, m, len(shown) - 0.5, -0.5))
    axes.hlines(np.arange(len(shown)) + 0.5, 0, m, color="white", lw=3)
    if groups is None:
        axes.set_xlabel("clients, in their order")
        return
    names, first, count = np.unique(groups[order], return_index=True, return_counts=True)
    for start in first[1:]:
        axes.axvline(start, color=COLOURS[7], lw=0.6, ls=":")
    if len(names) <= 12:
        axes.set_xticks(first + count / 2, [str(g) for g in names])
    axes.set_xlabel("clients, by true group")


def comparison(path: Path, groups: list[Group]) -> None:
    """The scores of groups of runs over the rounds: the mean over seeds, in a band of ± sd. A metric has a panel."""
    panels: dict[str, list[Group]] = {}
    for group in groups:
        panels.setdefault(group.metric, []).append(group)
    heights = [max(4, 1 + 0.18 * sum(_legend(g).count("\n") + 1.3 for g in own)) for own in panels.values()]
    fig = figure(7.5, sum(heights))
    grid = fig.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (metric, own) in zip(grid, panels.items(), strict=True):
        bands(axes, own, metric)
        # Beside the curves, which fill the panel from corner to corner.
        axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1, 1))
    save(fig, path)


def bands(axes: Any, groups: list[Group], metric: str) -> None:
    """The scores of groups of runs by one metric over the rounds.

    Args:
        axes: Where to draw.
        groups: The groups.
        metric: The name of the score.
    """
    for i, group in enumerate(groups):
        _band(axes, group, COLOURS[i % len(COLOURS)], STYLES[i // len(COLOURS) % len(STYLES)])
    axes.set_title(f"Score over the rounds{_averaged(groups)}", fontsize=11)
    axes.set_xlabel("round")
    axes.set_ylabel(f"mean {metric} over clients")
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axes.margins(x=0.01)
    tidy(axes)


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
    place = places(nodes)
    for v, row in nodes.items():
        x, end = place[v], ends[v] or last
        own = COLOURS[7] if row["cluster"] is None else colour(row["cluster"])
        width = 1.5 + 10 * len(row["clients"]) / len(nodes[0]["clients"])
        axes.plot([x, x], [row["round"], end], color=own, lw=width, solid_capstyle="butt")
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


def places(nodes: dict[int, dict[str, Any]]) -> dict[int, float]:
    """Leaves side by side in the order of the tree, every inner node over the middle of its children."""
    place: dict[int, float] = {}

    def put(v: int) -> float:
        below = [put(child) for child in nodes[v]["children"]]
        place[v] = sum(below) / len(below) if below else float(sum(not nodes[u]["children"] for u in place))
        return place[v]

    put(0)
    return place
