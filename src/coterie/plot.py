"""The figures of a report, drawn by matplotlib, for notebooks and papers.

    ct.plot.membership(run)                      # of a run, or of a run folder
    ct.plot.score("runs/ifca", ax=axes[0])       # on axes that are there already

Each returns matplotlib's axes. A figure that a run has no values for says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from coterie.report import flow, trees
from coterie.report.clients import contingency, errors_of, numbers
from coterie.report.details import named, reach
from coterie.report.rounds import costs
from coterie.runs import plots
from coterie.runs.compare import find_runs, group_runs
from coterie.runs.folder import finished
from coterie.runs.run import Run
from coterie.runs.summary import summary
from coterie.runs.timeline import timeline
from coterie.runs.view import View

Source = Run | View | Path | str


def score(run: Source, ax: Any = None) -> Any:
    """The score over the rounds, with a thin line for each cluster.

    Args:
        run: A run, or its folder.
        ax: The axes to draw on; None makes a figure.
    """
    view, ax = _seen(run), _axes(ax)
    plots.score(ax, view.history, view.metric, view.sizes)
    return ax


def loss(run: Source, ax: Any = None) -> Any:
    """The training loss over the rounds, with a thin line for each cluster.

    Args:
        run: A run, or its folder.
        ax: The axes to draw on; None makes a figure.
    """
    view, ax = _seen(run), _axes(ax)
    _some([row for row in view.history if row["loss"] is not None], "loss", view)
    plots.score(ax, view.history, "loss", view.sizes, "loss_per_cluster")
    return _named(ax, "round", "training loss")


def membership(run: Source, ax: Any = None) -> Any:
    """Clients flowing between clusters: a bar for each cluster in some of the rounds, and ribbons between them.

    Args:
        run: A run, or its folder.
        ax: The axes to draw on; None makes a figure.
    """
    view, ax = _seen(run), _axes(ax)
    labels = timeline(view.history)
    if labels is None:
        raise ValueError(f"{view.name}: its rounds do not say who moved")
    rounds, clusters = flow.columns(labels), sorted({int(j) for j in np.unique(labels[1:])})
    gap, m = 0.02 * labels.shape[1], labels.shape[1]
    for at, t in enumerate(rounds):
        tops = _stacked(labels[t], clusters, gap)
        for j in clusters:
            ax.bar(at, (labels[t] == j).sum(), 0.14, bottom=tops[j], color=_colour(j))
        if at:
            _ribbons(ax, labels[rounds[at - 1]], labels[t], clusters, gap, at)
    ax.set_xticks(range(len(rounds)), [str(t) for t in rounds])
    ax.set_ylim(m + gap * len(clusters), -gap)
    ax.set_yticks([])
    return _named(ax, "round", "clients")


def _ribbons(ax: Any, before: np.ndarray, after: np.ndarray, clusters: list[int], gap: float, at: int) -> None:
    """Between the bars of two columns."""
    out, into = _stacked(before, clusters, gap), _stacked(after, clusters, gap)
    x = np.linspace(at - 0.93, at - 0.07, 30)
    ease = (1 - np.cos(np.linspace(0, np.pi, 30))) / 2
    for a in clusters:
        for b in clusters:
            if n := int(((before == a) & (after == b)).sum()):
                low = out[a] + (into[b] - out[a]) * ease
                ax.fill_between(x, low, low + n, color=_colour(a), alpha=0.25 if a == b else 0.55, lw=0)
                out[a], into[b] = out[a] + n, into[b] + n


def _stacked(labels: np.ndarray, clusters: list[int], gap: float) -> dict[int, float]:
    """Where the bar of each cluster begins."""
    counts = [int((labels == j).sum()) for j in clusters]
    ends = np.concatenate([[0.0], np.cumsum(np.array(counts) + gap)])
    return dict(zip(clusters, ends[:-1].tolist(), strict=True))


def churn(run: Source, ax: Any = None) -> Any:
    """How many clients changed their cluster in each round.

    Args:
        run: A run, or its folder.
        ax: The axes to draw on; None makes a figure.
    """
    view, ax = _seen(run), _axes(ax)
    ax.bar([row["round"] for row in view.history], [row["changed"] for row in view.history], color=plots.COLOURS[0])
    return _named(ax, "round", f"{view.members} that moved")


def sizes(run: Source, ax: Any = None) -> Any:
    """The members of each cluster.

    Args:
        run: A run, or its folder.
        ax: The axes to draw on; None makes a figure.
    """
    view, ax = _seen(run), _axes(ax)
    counted = _some(view.sizes, "clusters with members", view)
    ax.bar([str(j) for j in counted], list(counted.values()), color=[_colour(j) for j in counted])
    return _named(ax, "cluster", view.members)


def groups(run: Source, ax: Any = None) -> Any:
    """The true groups against the clusters that were found.

    Args:
        run: A run, or its folder.
        ax: The axes to draw on; None makes a figure.
    """
    view, ax = _seen(run), _axes(ax)
    if (found := contingency(view)) is None:
        raise ValueError(f"{view.name}: the true groups of its clients, or their clusters, are not known")
    ax.imshow(found.counts, cmap="Blues", aspect="auto")
    for (y, x), n in np.ndenumerate(found.counts):
        ax.text(x, y, str(n), ha="center", va="center", color="white" if n > found.counts.max() / 2 else plots.INK)
    ax.set_xticks(range(len(found.clusters)), [str(j) for j in found.clusters])
    ax.set_yticks(range(len(found.groups)), [str(g) for g in found.groups])
    ax.set_xlabel("cluster")
    ax.set_ylabel("true group")
    return ax


def certainty(run: Source, ax: Any = None) -> Any:
    """How much better each client's own cluster serves it than the next best one.

    Args:
        run: A run, or its folder.
        ax: The axes to draw on; None makes a figure.
    """
    view, ax = _seen(run), _axes(ax)
    margins = numbers(view, "margins")
    if margins is None or view.labels is None:
        raise ValueError(f"{view.name}: margins need several clusters, and a run that has come to its end")
    found = sorted(view.sizes)
    ax.hist(
        [margins[(view.labels == j) & np.isfinite(margins)] for j in found], bins=30, stacked=True,
        color=[_colour(j) for j in found], label=[f"cluster {j}" for j in found],
    )  # fmt: skip
    ax.legend(frameon=False, fontsize=8)
    return _named(ax, "loss with the next best cluster's model, less the own", "clients")


def gains(run: Source, than: Source, ax: Any = None) -> Any:
    """What each client gains in place of another run on the same clients; those below zero are hurt.

    Args:
        run: A run, or its folder.
        than: The other one, such as one model for all.
        ax: The axes to draw on; None makes a figure.
    """
    view, other, ax = _seen(run), _seen(than), _axes(ax)
    mine, theirs = errors_of(view), errors_of(other)
    if mine is None or theirs is None or len(mine) != len(theirs):
        raise ValueError(f"{view.name} and {other.name}: they do not have scores of the same clients")
    less = np.sort((theirs - mine)[np.isfinite(theirs - mine)])
    ax.scatter(range(len(less)), less, s=8, c=[plots.COLOURS[1] if v < 0 else plots.COLOURS[0] for v in less])
    ax.axhline(0, color=plots.INK, lw=1)
    return _named(ax, "clients, from the one that loses most", "gain")


def cost(run: Source, ax: Any = None, *, against: Literal["bytes", "seconds"] = "bytes") -> Any:
    """The score against what was sent, or against time.

    Args:
        run: A run, or its folder.
        ax: The axes to draw on; None makes a figure.
        against: "bytes" or "seconds".
    """
    view, ax = _seen(run), _axes(ax)
    rows = _some([row for row in view.history if row.get(view.metric) is not None], "score", view)
    spent, label = costs(view)[against]
    ax.plot(spent[[row["round"] - 1 for row in rows]], [row[view.metric] for row in rows], color=plots.COLOURS[0], lw=2)
    return _named(ax, label, view.metric)


def clients(run: Source, ax: Any = None) -> Any:
    """Every client's score, by cluster.

    Args:
        run: A run, or its folder.
        ax: The axes to draw on; None makes a figure.
    """
    view, ax = _seen(run), _axes(ax)
    own = numbers(view, "per_client")
    if own is None or view.labels is None:
        raise ValueError(f"{view.name}: the scores of its clients, or their clusters, are not known")
    rng = np.random.default_rng(0)  # only to set dots apart that would hide each other
    for at, j in enumerate(sorted(view.sizes)):
        values = own[view.labels == j]
        ax.scatter(at + rng.uniform(-0.3, 0.3, len(values)), values, s=10, color=_colour(j), alpha=0.7)
    ax.set_xticks(range(len(view.sizes)), [str(j) for j in sorted(view.sizes)])
    return _named(ax, "cluster", f"{view.metric} of each client")


def coefficients(run: Source, ax: Any = None) -> Any:
    """The coefficients of each group, with 95 % intervals where the method knows them.

    Args:
        run: A run, or its folder.
        ax: The axes to draw on; None makes a figure.
    """
    view, ax = _seen(run), _axes(ax)
    rows = _some(named(view), "coefficients", view)
    names = list(dict.fromkeys(row["name"] for row in rows))
    each = 1 + max(row["cluster"] for row in rows)
    for row in rows:
        y = names.index(row["name"]) + (row["cluster"] - (each - 1) / 2) * 0.6 / each
        ax.errorbar(row["mean"], y, xerr=reach(row), fmt="o", ms=4, color=_colour(row["cluster"]), capsize=2)
    ax.axvline(0, color=plots.INK, lw=1)
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    return _named(ax, "coefficient", "")


def tree(run: Source, ax: Any = None) -> Any:
    """The tree of models that recursive splitting leaves.

    Args:
        run: A run, or its folder.
        ax: The axes to draw on; None makes a figure.
    """
    view, ax = _seen(run), _axes(ax)
    if not view.tree:
        raise ValueError(f"{view.name}: this method makes no tree")
    plots.tree(ax, view.tree, len(view.history))
    return ax


def similarity(run: Source, ax: Any = None) -> Any:
    """How alike clients' updates were at the first split of a tree, in the order of the clusters.

    Args:
        run: A run, or its folder.
        ax: The axes to draw on; None makes a figure.
    """
    view, ax = _seen(run), _axes(ax)
    found = trees.similar(view.tree, view.labels) if view.tree and view.labels is not None else None
    if found is None:
        raise ValueError(f"{view.name}: it has no similarities, which a tree has that split up to 100 clients")
    image = ax.imshow(found.alpha, cmap="RdBu_r", vmin=-1, vmax=1)
    for edge in found.edges:
        ax.axhline(edge - 0.5, color=plots.INK, lw=1)
        ax.axvline(edge - 0.5, color=plots.INK, lw=1)
    ax.figure.colorbar(image, ax=ax, label="similarity of updates")
    ax.set_xlabel("clients, by cluster")
    ax.set_ylabel("clients, by cluster")
    return ax


def runs(folders: Sequence[Path | str], ax: Any = None) -> Any:
    """The scores of several finished runs over the rounds; those that differ only in their seed are one band.

    Args:
        folders: Run folders, and folders that contain some.
        ax: The axes to draw on; None makes a figure.
    """
    found, ax = group_runs([path for path in find_runs(map(Path, folders)) if finished(path)]), _axes(ax)
    if len(metrics := {group.metric for group in found}) != 1:
        raise ValueError(f"runs: one picture needs finished runs of one metric, got {sorted(metrics) or 'none'}")
    plots.bands(ax, found, metrics.pop())
    ax.legend(frameon=False, fontsize=8)
    return ax


def _seen(run: Source) -> View:
    """What a run's folder says, or what it would say."""
    if isinstance(run, View):
        return run
    if not isinstance(run, Run):
        return View.of(Path(run))
    if run.path is not None:
        return View.of(run.path)
    config = {"algorithm": {"name": type(run.algorithm).__name__}, "data": {"name": "custom"}, "run": {}}
    return View(Path(), config, run.history, summary(run))


def _axes(ax: Any) -> Any:
    """Axes of a new figure where there are none."""
    if ax is not None:
        return ax
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=(6, 3.6), layout="constrained")[1]


def _named(ax: Any, x: str, y: str) -> Any:
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    plots.tidy(ax)
    return ax


def _some(found: Any, what: str, view: View) -> Any:
    if not found:
        raise ValueError(f"{view.name}: there is nothing to draw, it has no {what}")
    return found


def _colour(cluster: int) -> Any:
    return plots.COLOURS[-1] if cluster < 0 else plots.colour(cluster)
