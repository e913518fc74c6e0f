"""Figures of clients: how many there are of each cluster, what they score, how sure the choice is, who is hurt."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from coterie.report.figure import CLUSTERS, INK, Figure
from coterie.report.svg import WIDTH, Frame, chart, colour, element, spread
from coterie.runs.hurt import errors
from coterie.runs.view import View

BARS = 40  # clusters at most whose sizes are drawn
SHOWN = 24  # groups or clusters at most that are held against each other
DOTS = 1500  # clients at most that are drawn one by one
BINS = 30  # of a histogram
WORDS = 76  # from which width on the name of a cluster fits over a column, on a phone too
ONE_FOR_ALL, ALONE = ("fedavg", "fedprox"), ("local_only",)  # what sharing by groups is held against


def sizes(view: View) -> Figure | None:
    """How many clients, or points, each cluster has."""
    counted = view.sizes
    if len(counted) < 2:
        return None
    shown = list(counted.items())[:BARS]
    frame = Frame((-0.5, len(shown) - 0.5), (0, max(counted.values()) * 1.08), ("cluster", view.members))
    bars = []
    for place, (j, n) in enumerate(shown):
        score = view.per_cluster.get(j)
        said = f"cluster {j}: {n}" + ("" if score is None else f", {view.metric} {score:.4g}")
        bars.append(frame.bar(place, 0.7, 0, n, colour(j), said))
        if len(shown) <= CLUSTERS:
            x, y = frame.at(place, n)
            bars.append(element("text", f"{n:,}", x=x, y=y - 5, text_anchor="middle", class_="tick"))
    more = f"The first {BARS} of {len(counted)} are drawn." if len(counted) > BARS else ""
    return Figure("sizes", "Sizes of the clusters", chart(f"{view.members} of each cluster", frame.axes(), *bars), more)


def groups(view: View) -> Figure | None:
    """The true groups against those found, of clients or of points."""
    if (found := contingency(view)) is None or max(found.counts.shape) > SHOWN or found.counts.shape[1] < 2:
        return None
    ari = view.result.get("ari") if view.result else None
    names = [f"group {g}" for g in found.groups], [f"cluster {j}" for j in found.clusters]
    says = "" if ari is None else f"Adjusted Rand index {ari:.3f}: 1 is exact, 0 is chance."
    return Figure("groups", "True groups and clusters", _matrix(found.counts, *names), says)


class Contingency(NamedTuple):
    """How many clients, or points, of every true group are in every cluster (groups, clusters)."""

    counts: np.ndarray
    groups: list[int]
    clusters: list[int]


def contingency(view: View) -> Contingency | None:
    """The true groups against the clusters; None where the folder does not say both."""
    table = view.result.get("table") if view.result else None
    if table:
        count = np.array(table, dtype=int).T
        return Contingency(count, list(range(count.shape[0])), list(range(count.shape[1])))
    if view.groups is None or view.labels is None:
        return None
    true, found = np.unique(view.groups).tolist(), sorted(view.sizes)
    count = [[int(((view.groups == g) & (view.labels == j)).sum()) for j in found] for g in true]
    return Contingency(np.array(count), true, found)


def _matrix(count: np.ndarray, rows: list[str], columns: list[str]) -> Markup:
    """Numbers in cells, the darker the larger their share of the row."""
    left, top = 90, 26
    wide = (WIDTH - left - 10) / len(columns)
    high = min(40.0, max(20.0, 220 / len(rows)))
    parts = [
        element("text", name, x=left + (x + 0.5) * wide, y=top - 9, text_anchor="middle", class_="tick")
        for x, name in enumerate(columns if wide > WORDS else [c.split()[-1] for c in columns])
    ]
    for y, name in enumerate(rows):
        parts.append(element("text", name, x=left - 8, y=top + (y + 0.62) * high, text_anchor="end", class_="tick"))
        for x, n in enumerate(count[y].tolist()):
            share = n / max(count[y].sum(), 1)
            cell = {"x": left + x * wide + 1, "y": top + y * high + 1, "width": wide - 2, "height": high - 2}
            said = element("title", f"{name}, {columns[x]}: {n}")
            parts.append(element("rect", said, **cell, rx=3, style=f"fill:var(--c0);opacity:{0.06 + 0.94 * share:.2f}"))
            ink = "cell dark" if share > 0.55 else "cell"
            if n:
                parts.append(element("text", f"{n:,}", x=left + (x + 0.5) * wide, y=top + (y + 0.62) * high,
                                     text_anchor="middle", class_=ink))  # fmt: skip
    return chart("true groups against clusters", *parts, height=top + high * len(rows) + 8)


def certainty(view: View) -> Figure | None:
    """By how much each client's cluster serves it better than the next best one."""
    margins = numbers(view, "margins")
    if margins is None or view.labels is None or len(view.sizes) < 2:
        return None
    kept = np.isfinite(margins)
    low, high = float(margins[kept].min()), float(np.quantile(margins[kept], 0.995))
    edges = np.linspace(min(low, 0.0), max(high, 1e-9), BINS + 1)
    clusters = sorted(view.sizes)[:CLUSTERS]
    count = np.array([np.histogram(margins[kept & (view.labels == j)].clip(max=edges[-1]), edges)[0] for j in clusters])
    what = "loss with the next best cluster's model, less the own", "clients"
    frame = Frame((edges[0], edges[-1]), (0, count.sum(0).max() * 1.06), what, whole=False)
    bars, base = [], np.zeros(BINS)
    for j, own in zip(clusters, count, strict=True):
        for b in np.flatnonzero(own):
            said = f"cluster {j}: {own[b]} clients from {edges[b]:.3g} to {edges[b + 1]:.3g}"
            middle, wide = (edges[b] + edges[b + 1]) / 2, edges[1] - edges[0]
            bars.append(frame.bar(middle, wide, base[b], base[b] + own[b], colour(j), said))
        base += own
    unsure = int((margins[kept] < 0.05 * np.median(margins[kept])).sum())
    nearly = "nearly as well served by another cluster (a margin under a twentieth of the median)"
    says = f"{unsure} of {int(kept.sum())} clients are {nearly}."
    names = [(colour(j), f"cluster {j}") for j in clusters]
    drawing = chart("margins", frame.axes(), *bars, names=names)
    return Figure("certainty", "How sure the choice is", drawing, says)


def gains(view: View, other: View) -> Figure | None:
    """Every client's error less that in another run: who gains, and who is hurt."""
    mine, theirs = errors_of(view), errors_of(other)
    if mine is None or theirs is None or len(mine) != len(theirs):
        return None
    less = theirs - mine
    order = np.argsort(less)[np.isfinite(np.sort(less))]
    values, step = less[order], max(1, -(-len(less) // DOTS))
    name = other.config["algorithm"]["name"]
    alone = name in ALONE
    what = "a model each" if alone else "one model for all"
    frame = Frame(
        (0, max(len(values) - 1, 1)), spread([*values, 0.0]), ("clients, from the one that loses most", "gain")
    )
    labels = view.labels if view.labels is not None else np.zeros(len(less), int)
    hurt = int((values < 0).sum())
    dots = []
    for place in range(0, len(values), step):
        i = int(order[place])
        x, y = frame.at(place, float(values[place]))
        said = element("title", f"{view.names[i]}: {values[place]:+.3g}")
        dots.append(element("circle", said, cx=float(x), cy=float(y), r=2.6, style=f"fill:{colour(int(labels[i]))}"))
    worst = f", the worst by {-values[0]:.3g}" if hurt else ""
    share = f"{hurt} of {len(values)} clients ({hurt / max(len(values), 1):.0%})"
    mean = f"the mean gain is {values.mean():+.3g} ({_error_name(view)})"
    says = f"{share} are worse off than with {what}{worst}; {mean}."
    drawing = chart(f"gain of every client beside {what}", frame.axes(), frame.level(0.0, INK), *dots)
    kind = "alone" if alone else "for-all"
    return Figure(f"gain-{kind}", f"Who gains and who is hurt, beside {what}", drawing, says)


def errors_of(view: View) -> np.ndarray | None:
    """Every client's error, so that less is better."""
    score, own = numbers(view, "per_client"), numbers(view, "losses")
    return None if score is None or own is None else errors(view.metric, score, own)


def _error_name(view: View) -> str:
    return "accuracy" if view.metric == "accuracy" else "error"


def numbers(view: View, key: str) -> np.ndarray | None:
    """A list of the result, one number a client, as floats; None where there is none."""
    values = None if view.result is None else view.result.get(key)
    if not values:
        return None
    found = np.array([float("nan") if v is None else v for v in values], dtype=float)
    return found if np.isfinite(found).any() else None


def clients(view: View) -> Figure | None:
    """Every client's score, by cluster."""
    score = numbers(view, "per_client")
    if score is None or view.labels is None:
        return None
    shown = sorted(view.sizes)[:CLUSTERS]
    frame = Frame((-0.6, len(shown) - 0.4), spread(score), ("cluster", f"{view.metric} of each client"))
    step = max(1, len(score) // DOTS)
    rng, dots = np.random.default_rng(0), []  # only to set dots apart that would hide each other
    for place, j in enumerate(shown):
        for i in np.flatnonzero((view.labels == j) & np.isfinite(score))[::step]:
            x, y = frame.at(place + float(rng.uniform(-0.3, 0.3)), float(score[i]))
            said = element("title", f"{view.names[i]}: {score[i]:.4g}")
            dots.append(element("circle", said, cx=float(x), cy=float(y), r=2.4, style=f"fill:{colour(j)};opacity:.7"))
    worst = view.result.get("worst_decile") if view.result else None
    says = (
        ""
        if worst is None
        else f"The tenth of the clients that is served worst has {view.metric} {worst:.4g} on average."
    )
    return Figure("clients", "Every client's score", chart("score of every client", frame.axes(), *dots), says)
