"""Figures over the rounds of a run or of several: scores, losses, who is where, who moves, what it costs."""

from __future__ import annotations

from typing import Any

import numpy as np
from markupsafe import Markup

from coterie.core.card import in_bytes
from coterie.report import flow
from coterie.report.figure import CLUSTERS, INK, Figure
from coterie.report.svg import Frame, chart, colour, element, spread
from coterie.runs.compare import Group
from coterie.runs.timeline import settled, timeline
from coterie.runs.view import View


def scores(view: View) -> Figure | None:
    """The score over the rounds, of all clients and of each cluster."""
    rows = [row for row in view.history if row.get(view.metric) is not None]
    if not rows:
        return None
    drawing = _lines(rows, view.metric, "per_cluster", view.metric, "mean over clients")
    return Figure("score", "Score over the rounds", drawing, f"Last: {view.metric} {rows[-1][view.metric]:.4g}.")


def loss(view: View) -> Figure | None:
    """The training loss over the rounds, of all clients and of each cluster."""
    rows = [row for row in view.history if row["loss"] is not None]
    if not rows:
        return None
    drawing = _lines(rows, "loss", "loss_per_cluster", "training loss", "mean over those who took part")
    return Figure("loss", "Loss over the rounds", drawing, f"Last: {rows[-1]['loss']:.4g}.")


def _lines(rows: list[dict[str, Any]], key: str, each: str, label: str, whole: str) -> Markup:
    """A value over the rounds, and the same for each cluster where the rounds list it."""
    rounds, mean = [row["round"] for row in rows], [row[key] for row in rows]
    most = max(len(row.get(each) or []) for row in rows)
    own = [[_at(row.get(each), j) for row in rows] for j in range(most)] if 1 < most <= CLUSTERS else []
    frame = Frame((rounds[0], rounds[-1]), spread(v for line in [mean, *own] for v in line), ("round", label))
    lines = [frame.line(rounds, line, colour(j), 1.2) for j, line in enumerate(own)]
    names = [(INK, whole), *((colour(j), f"cluster {j}") for j in range(len(own)))] if own else []
    lines.append(frame.line(rounds, mean, INK if own else colour(0), 2.4))
    return chart(f"{label} over the rounds", frame.axes(), *lines, names=names)


def _at(values: list[Any] | None, j: int) -> float:
    """A value of a list that may be shorter, or have none there."""
    known = values[j] if values and j < len(values) else None
    return float("nan") if known is None else known


def membership(view: View) -> Figure | None:
    """Clients flowing between clusters."""
    labels = timeline(view.history)
    if labels is None or labels.max() < 1:
        return None
    return Figure("membership", "Membership over the rounds", flow.drawn(labels), _when_settled(labels))


def _when_settled(labels: np.ndarray) -> str:
    still, rounds = settled(labels), len(labels) - 1
    last, half = int(still.max()), max(1, int(still.max()) // 2)
    if last <= 1:
        return "Nobody moves after the first round."
    share = f"{np.mean(still <= half):.0%} of the clients are settled by round {half}"
    if last == rounds:
        n = int((still == last).sum())
        return f"{n:,} client{' moves' if n == 1 else 's move'} in the last round, {last}; {share}."
    return f"Nobody moves after round {last}; {share}."


def churn(view: View) -> Figure | None:
    """How many clients, or points, changed their cluster in each round."""
    rounds, changed = [row["round"] for row in view.history], [row["changed"] for row in view.history]
    if not any(changed):
        return None
    frame = Frame(
        (0.5, rounds[-1] + 0.5), (0, max(changed) * 1.05), ("round", f"{view.members} that moved"), height=180
    )
    bars = [
        frame.bar(t, 0.8, 0, n, colour(0), f"round {t}: {n:,} {view.members}")
        for t, n in zip(rounds, changed, strict=True)
        if n
    ]
    drawing = chart(f"{view.members} that moved, by round", frame.axes(), *bars, height=180)
    return Figure("churn", "Who still moves", drawing, f"{changed[-1]:,} moved in the last round.")


def cost(view: View) -> Figure | None:
    """The score against what was sent, and against time."""
    rows = [row for row in view.history if row.get(view.metric) is not None]
    if len(rows) < 2:
        return None
    at, score = [row["round"] - 1 for row in rows], [row[view.metric] for row in rows]
    spent, drawn = costs(view), []
    for all_rounds, label in spent.values():
        values = all_rounds[at]
        frame = Frame((0.0, float(values[-1]) or 1.0), spread(score), (label, view.metric), height=200, whole=False)
        line = frame.line(values.tolist(), score, colour(0), 2)
        drawn.append(chart(f"{view.metric} against {label}", frame.axes(), line, height=200))
    sent, seconds = (float(values[-1]) for values, _ in spent.values())
    says = f"{in_bytes(1e6 * sent)} and {seconds:.3g} s in {len(view.history)} rounds."
    return Figure("cost", "What the score costs", Markup("").join(drawn), says)


def costs(view: View) -> dict[str, tuple[np.ndarray, str]]:
    """What was sent and how long it took up to each round (rounds,), each with what its axis is called."""
    sent = np.cumsum([row["bytes_down"] + row["bytes_up"] for row in view.history]) / 1e6
    seconds = np.cumsum([row["seconds"] for row in view.history])
    return {"bytes": (sent, "MB sent in all, down and up"), "seconds": (seconds, "seconds")}


def overlay(compared: list[Group]) -> list[Figure]:
    """The scores of groups of runs over the rounds: a figure for each metric."""
    metrics = dict.fromkeys(group.metric for group in compared)
    return [_overlaid(metric, [group for group in compared if group.metric == metric]) for metric in metrics]


def _overlaid(metric: str, groups: list[Group]) -> Figure:
    curves = [group.curve() for group in groups]
    reach = [(mean, 0.0 if sd is None else sd) for _, mean, sd in curves]
    values = np.concatenate([end for mean, sd in reach for end in (mean - sd, mean + sd)]).tolist()
    ends = min(float(rounds[0]) for rounds, _, _ in curves), max(float(rounds[-1]) for rounds, _, _ in curves)
    frame = Frame(ends, spread(values), ("round", f"mean {metric}"))
    lines = [
        _band(frame, rounds, mean, sd, colour(i)) + frame.line(rounds.tolist(), mean.tolist(), colour(i), 2)
        for i, (rounds, mean, sd) in enumerate(curves)
    ]
    names = [(colour(i), f"{group.method} {group.settings}".strip()) for i, group in enumerate(groups)]
    seeds = max(len(group.runs) for group in groups)
    says = f"Bands are ± one standard deviation over {seeds} seeds." if seeds > 1 else ""
    drawing = chart(f"{metric} of all runs over the rounds", frame.axes(), *lines, names=names)
    return Figure(f"runs-{metric.replace(' ', '-')}", "All runs over the rounds", drawing, says)


def _band(frame: Frame, rounds: np.ndarray, mean: np.ndarray, sd: np.ndarray | None, fill: str) -> Markup:
    """What is within a standard deviation of a curve."""
    if sd is None:
        return Markup("")
    above = [frame.at(x, y) for x, y in zip(rounds, mean + sd, strict=True)]
    below = [frame.at(x, y) for x, y in zip(rounds, mean - sd, strict=True)]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in [*above, *reversed(below)]) + "Z"
    return element("path", d=path, style=f"fill:{fill};opacity:.18")
