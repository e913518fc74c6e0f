"""The figures of a report, each drawn from what a run folder says; None where the folder does not say it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from coterie.core.card import in_bytes
from coterie.report import flow, trees
from coterie.report.svg import WIDTH, Frame, chart, colour, element, legend, numbered, spread, ticks
from coterie.runs.compare import Group
from coterie.runs.hurt import errors
from coterie.runs.timeline import settled, timeline
from coterie.runs.view import View

INK, FAINT = "var(--ink)", "var(--none)"
CLUSTERS = 12  # that are told apart by colour
DOTS = 1500  # clients at most that are drawn one by one
BINS = 30  # of a histogram
NAMED = 40  # coefficients at most that are drawn
ONE_FOR_ALL, ALONE = ("fedavg", "fedprox"), ("local_only",)  # what sharing by groups is held against


class Figure(NamedTuple):
    """A figure of a report.

    Attributes:
        name: Of the file that it is downloaded as.
        title: What it is called.
        drawing: The chart, with what belongs to it.
        says: What it shows, in a sentence.
    """

    name: str
    title: str
    drawing: Markup
    says: str = ""


def of_run(view: View, beside: Sequence[View] = ()) -> list[Figure]:
    """All figures of one run that its folder has the values for.

    Args:
        view: The run.
        beside: Runs on the same clients that it is held against: one model for all, and one each.
    """
    drawn = (scores, loss, membership, churn, sizes, groups, tree, similarity, certainty)
    found = [draw(view) for draw in drawn]
    found += [gains(view, other) for other in beside]
    found += [cost(view), clients(view), coefficients(view), effects(view), left_out(view)]
    return [figure for figure in found if figure is not None]


def scores(view: View) -> Figure | None:
    """The score over the rounds, of all clients and of each cluster."""
    rows = [row for row in view.history if row.get(view.metric) is not None]
    if not rows:
        return None
    rounds, mean = [row["round"] for row in rows], [row[view.metric] for row in rows]
    most = max(len(row["per_cluster"] or []) for row in rows)
    own = [[_at(row["per_cluster"], j) for row in rows] for j in range(most)] if 1 < most <= CLUSTERS else []
    frame = Frame((rounds[0], rounds[-1]), spread(v for line in [mean, *own] for v in line), ("round", view.metric))
    lines = [frame.line(rounds, line, colour(j), 1.2) for j, line in enumerate(own)]
    drawing = chart(f"{view.metric} over the rounds", frame.axes(), *lines, frame.line(rounds, mean, INK, 2.4))
    names = [(INK, "mean over clients"), *((colour(j), f"cluster {j}") for j in range(len(own)))]
    return Figure("score", "Score over the rounds", drawing + legend(names), f"Last: {view.metric} {mean[-1]:.4g}.")


def _at(values: list[Any] | None, j: int) -> float:
    """A value of a list that may be shorter, or have none there."""
    known = values[j] if values and j < len(values) else None
    return float("nan") if known is None else known


def loss(view: View) -> Figure | None:
    """The training loss over the rounds."""
    rows = [row for row in view.history if row["loss"] is not None]
    if not rows:
        return None
    rounds, values = [row["round"] for row in rows], [row["loss"] for row in rows]
    frame = Frame((rounds[0], rounds[-1]), spread(values), ("round", "training loss"))
    return Figure("loss", "Loss over the rounds", chart("training loss over the rounds", frame.axes(),
                                                        frame.line(rounds, values, colour(0), 2)))  # fmt: skip


def membership(view: View) -> Figure | None:
    """Clients flowing between clusters."""
    labels = timeline(view.history)
    if labels is None or labels.max() < 1:
        return None
    still = settled(labels)
    last, share = int(still.max()), float(np.mean(still <= max(1, still.max() // 2)))
    says = (
        f"Nobody moves after round {last}; {share:.0%} of the clients are settled by round {max(1, last // 2)}."
        if last > 1
        else "Nobody moves after the first round."
    )
    return Figure("membership", "Membership over the rounds", flow.drawn(labels), says)


def churn(view: View) -> Figure | None:
    """How many clients changed their cluster in each round."""
    rounds, changed = [row["round"] for row in view.history], [row["changed"] for row in view.history]
    if not any(changed):
        return None
    frame = Frame((0.5, rounds[-1] + 0.5), (0, max(changed) * 1.05), ("round", "clients that moved"), height=180)
    bars = [
        frame.bar(t, 0.8, 0, n, colour(0), f"round {t}: {n} clients") for t, n in zip(rounds, changed, strict=True) if n
    ]
    return Figure("churn", "Who still moves", chart("clients that moved, by round", frame.axes(), *bars, height=180),
                  f"{changed[-1]} moved in the last round.")  # fmt: skip


def sizes(view: View) -> Figure | None:
    """The members of each cluster."""
    counted = view.sizes
    if len(counted) < 2:
        return None
    shown = list(counted.items())[:40]
    frame = Frame((-0.5, len(shown) - 0.5), (0, max(counted.values()) * 1.08), ("cluster", "members"))
    bars = []
    for place, (j, n) in enumerate(shown):
        score = view.per_cluster.get(j)
        said = f"cluster {j}: {n}" + ("" if score is None else f", {view.metric} {score:.4g}")
        bars.append(frame.bar(place, 0.7, 0, n, colour(j), said))
        if len(shown) <= 12:
            x, y = frame.at(place, n)
            bars.append(element("text", f"{n:,}", x=x, y=y - 5, text_anchor="middle", class_="tick"))
    more = f" The first 40 of {len(counted)} are drawn." if len(counted) > 40 else ""
    return Figure("sizes", "Sizes of the clusters", chart("members of each cluster", frame.axes(), *bars), more.strip())


def groups(view: View) -> Figure | None:
    """The true groups against those found."""
    if view.groups is None or view.labels is None or len(view.sizes) < 2:
        return None
    true, found = np.unique(view.groups), sorted(view.sizes)
    if max(len(true), len(found)) > 24:
        return None
    count = np.array([[int(((view.groups == g) & (view.labels == j)).sum()) for j in found] for g in true])
    ari = view.result.get("ari") if view.result else None
    names = [f"group {g}" for g in true.tolist()], [f"cluster {j}" for j in found]
    says = "" if ari is None else f"Adjusted Rand index {ari:.3f}: 1 is exact, 0 is chance."
    return Figure("groups", "True groups and clusters", _matrix(count, *names), says)


def _matrix(count: np.ndarray, rows: list[str], columns: list[str]) -> Markup:
    """Numbers in cells, the darker the larger their share of the row."""
    left, top = 90, 26
    wide = (WIDTH - left - 10) / len(columns)
    high = min(40.0, max(20.0, 220 / len(rows)))
    parts = [
        element("text", name, x=left + (x + 0.5) * wide, y=top - 9, text_anchor="middle", class_="tick")
        for x, name in enumerate(columns if len(columns) <= 8 else [c.split()[-1] for c in columns])
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


def tree(view: View) -> Figure | None:
    """The tree of models."""
    if not view.tree or len(view.tree) < 2:
        return None
    says = "Rounds go down; a line is as wide as it has clients. Choose a node to see who is at it."
    return Figure("tree", "Tree of models", trees.drawn(view.tree, len(view.history), view.names), says)


def similarity(view: View) -> Figure | None:
    """How alike clients' updates were at the first split of a tree."""
    drawing = trees.similarity(view.tree, view.labels) if view.tree and view.labels is not None else None
    says = "Of updates at the first split. Clients of one cluster point the same way."
    return None if drawing is None else Figure("similarity", "Similarity of updates", drawing, says)


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
    return Figure("certainty", "How sure the choice is", chart("margins", frame.axes(), *bars) + legend(names), says)


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
    zero = frame.line([0, max(len(values) - 1, 1)], [0.0, 0.0], INK, 1)
    worst = f", the worst by {-values[0]:.3g}" if hurt else ""
    share = f"{hurt} of {len(values)} clients ({hurt / max(len(values), 1):.0%})"
    mean = f"the mean gain is {values.mean():+.3g} ({_error_name(view)})"
    says = f"{share} are worse off than with {what}{worst}; {mean}."
    return Figure(f"gain-{'alone' if alone else 'for-all'}", f"Who gains and who is hurt, beside {what}",
                  chart(f"gain of every client beside {what}", frame.axes(), zero, *dots), says)  # fmt: skip


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


def cost(view: View) -> Figure | None:
    """The score against what was sent, and against time."""
    rows = [row for row in view.history if row.get(view.metric) is not None]
    if len(rows) < 2:
        return None
    sent = np.cumsum([row["bytes_down"] + row["bytes_up"] for row in view.history])
    time = np.cumsum([row["seconds"] for row in view.history])
    at = [row["round"] - 1 for row in rows]
    score = [row[view.metric] for row in rows]
    drawn = []
    for values, label in ((sent[at] / 1e6, "MB sent in all, down and up"), (time[at], "seconds")):
        frame = Frame((0.0, float(values[-1]) or 1.0), spread(score), (label, view.metric), height=200, whole=False)
        line = frame.line(values.tolist(), score, colour(0), 2)
        drawn.append(chart(f"{view.metric} against {label}", frame.axes(), line, height=200))
    says = f"{in_bytes(float(sent[-1]))} and {time[-1]:.3g} s in {len(view.history)} rounds."
    return Figure("cost", "What the score costs", Markup("").join(drawn), says)


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


def coefficients(view: View) -> Figure | None:
    """What each group's linear model makes of each column, with intervals where the method knows them."""
    rows = named(view)
    names = list(dict.fromkeys(row["name"] for row in rows))
    if not names or len(names) > NAMED:
        return None
    ends = [row["mean"] + sign * 1.96 * (row["error"] or 0) for row in rows for sign in (-1, 1)]
    each = 1 + max(row["cluster"] for row in rows)
    high, left = max(24.0, 11.0 * each), 130.0
    frame = Frame(spread([*ends, 0.0]), (0, 1), ("coefficient", ""), whole=False)

    def across(value: float) -> float:
        return left + (value - frame.x[0]) / (frame.x[1] - frame.x[0]) * (WIDTH - left - 14)

    height = high * len(names) + 46
    zero = across(0.0)
    parts = [element("line", x1=zero, x2=zero, y1=4.0, y2=height - 40, style=f"stroke:{INK};stroke-width:1")]
    for row in rows:
        y = 8 + high * (names.index(row["name"]) + (row["cluster"] + 0.5) / each)
        fill, x = colour(row["cluster"]), across(row["mean"])
        reach = 1.96 * (row["error"] or 0.0)
        said = f"{row['name']}, cluster {row['cluster']}: {row['mean']:.4g}" + (f" ± {reach:.2g}" if reach else "")
        parts.append(element("line", x1=across(row["mean"] - reach), x2=across(row["mean"] + reach), y1=y, y2=y,
                             style=f"stroke:{fill};stroke-width:2.5"))  # fmt: skip
        parts.append(element("circle", element("title", said), cx=x, cy=y, r=3.5, style=f"fill:{fill}"))
    for i, name in enumerate(names):
        text = name if len(name) <= 18 else f"{name[:17]}…"
        parts.append(element("text", text, x=left - 8, y=8 + high * (i + 0.5) + 4, text_anchor="end", class_="tick"))
    marks = ticks(*frame.x)
    parts += [element("text", text, x=across(v), y=height - 24, text_anchor="middle", class_="tick")
              for v, text in zip(marks, numbered(marks), strict=True)]  # fmt: skip
    known = any(row["error"] is not None for row in rows)
    names_of = [(colour(j), f"cluster {j}") for j in range(each)]
    drawing = chart("coefficients of each cluster", *parts, height=height) + legend(names_of)
    return Figure("coefficients", "Coefficients of each group", drawing, "Bars are 95 % intervals." if known else "")


def named(view: View) -> list[dict[str, Any]]:
    """The coefficients of a run; those of a table's columns by the names of these."""
    result = view.result or {}
    rows, columns = result.get("coefficients") or [], result.get("columns")
    known = {f"weight[0, {i}]": name for i, name in enumerate(columns or [])} | {"bias[0]": "intercept"}
    return [{**row, "name": known.get(row["name"], row["name"])} for row in rows]


def effects(view: View) -> Figure | None:
    """What a method reports of itself, such as the effects of a mixed model."""
    report = view.result.get("report") if view.result else None
    return None if not report else Figure("effects", "What the method reports", element("pre", report))


def left_out(view: View) -> Figure | None:
    """The nodes of a real federation whose replies are missing in some rounds."""
    lost = (view.result.get("left_out") if view.result else None) or {}
    if not lost:
        return None
    rows = [element("tr", element("td", name), element("td", n, class_="number")) for name, n in sorted(lost.items())]
    head = element("tr", element("th", "node"), element("th", "rounds without it", class_="number"))
    return Figure(
        "left-out", "Nodes that were left out", element("table", element("thead", head), element("tbody", *rows))
    )


def overlay(compared: list[Group]) -> list[Figure]:
    """The scores of groups of runs over the rounds: a figure for each metric."""
    found = []
    for metric in dict.fromkeys(group.metric for group in compared):
        own = [group for group in compared if group.metric == metric]
        curves = [group.curve() for group in own]
        values = [
            v
            for _, mean, sd in curves
            for v in [*(mean - (0 if sd is None else sd)), *(mean + (0 if sd is None else sd))]
        ]
        last = max(float(rounds[-1]) for rounds, _, _ in curves)
        frame = Frame(
            (min(float(rounds[0]) for rounds, _, _ in curves), last), spread(values), ("round", f"mean {metric}")
        )
        lines = [
            _band(frame, rounds, mean, sd, colour(i)) + frame.line(rounds.tolist(), mean.tolist(), colour(i), 2)
            for i, (rounds, mean, sd) in enumerate(curves)
        ]
        names = [(colour(i), f"{group.method} {group.settings}".strip()) for i, group in enumerate(own)]
        seeds = max(len(group.runs) for group in own)
        says = f"Bands are ± one standard deviation over {seeds} seeds." if seeds > 1 else ""
        drawing = chart(f"{metric} of all runs over the rounds", frame.axes(), *lines) + legend(names, most=12)
        found.append(Figure(f"runs-{metric.replace(' ', '-')}", "All runs over the rounds", drawing, says))
    return found


def _band(frame: Frame, rounds: np.ndarray, mean: np.ndarray, sd: np.ndarray | None, fill: str) -> Markup:
    """What is within a standard deviation of a curve."""
    if sd is None:
        return Markup("")
    above = [frame.at(x, y) for x, y in zip(rounds, mean + sd, strict=True)]
    below = [frame.at(x, y) for x, y in zip(rounds, mean - sd, strict=True)]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in [*above, *reversed(below)]) + "Z"
    return element("path", d=path, style=f"fill:{fill};opacity:.18")
