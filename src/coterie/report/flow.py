"""Clients flowing between clusters: a column for some of the rounds, ribbons of those who stay and who move."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from markupsafe import Markup

from coterie.report.svg import KEYS, WIDTH, chart, colour, element

COLUMNS = 12  # at most: more would leave no room between them
HEIGHT, TOP, BAR, GAP = 300, 10, 9, 8


def drawn(labels: np.ndarray) -> Markup:
    """The flow of clients.

    Args:
        labels: Every client's cluster after each round (rounds + 1, m), -1 for none.
    """
    rounds = columns(labels)
    clusters = [j for j in sorted(set(np.unique(labels[rounds]).tolist())) if j >= 0] + [-1]
    clusters = [j for j in clusters if (labels[rounds] == j).any()]
    scale = (HEIGHT - TOP - 40 - GAP * (len(clusters) - 1)) / labels.shape[1]
    place = {t: 40 + n * (WIDTH - 90) / max(len(rounds) - 1, 1) for n, t in enumerate(rounds)}
    tops = {t: _tops(labels[t], clusters, scale) for t in rounds}
    parts: list[Markup] = []
    for a, b in pairwise(rounds):
        parts += _ribbons(labels[a], labels[b], clusters, scale, (place[a] + BAR, place[b]), (tops[a], tops[b]), b)
    for t in rounds:
        parts += _column(labels[t], clusters, scale, place[t], tops[t], t)
    for j in clusters:
        if (n := int((labels[rounds[-1]] == j).sum())) > 0:
            y = tops[rounds[-1]][j] + n * scale / 2 + 4
            parts.append(element("text", f"{n:,}", x=place[rounds[-1]] + BAR + 5, y=y, class_="tick"))
    parts.append(element("text", "round", x=WIDTH / 2, y=HEIGHT - 5, text_anchor="middle", class_="axis"))
    names = [(colour(j), _name(j)) for j in clusters] if len(clusters) <= KEYS else []
    return chart("clients flowing between clusters", *parts, height=HEIGHT, names=names)


def _name(cluster: int) -> str:
    return "no cluster" if cluster < 0 else f"cluster {cluster}"


def columns(labels: np.ndarray) -> list[int]:
    """The rounds that get a column: the first and the last, and between them those by which most has changed.

    Example:
        >>> columns(np.array([[-1, -1], [0, 1], [0, 1], [1, 1], [1, 1]]))
        [1, 2, 3, 4]
    """
    last = len(labels) - 1
    if last <= COLUMNS:
        return list(range(1, last + 1))
    moved = (np.diff(labels[1:], axis=0) != 0).sum(1) + 1e-3 * labels.shape[1]  # where nobody moves, evenly spaced
    share = np.concatenate([[0.0], np.cumsum(moved)]) / moved.sum()
    wanted = np.searchsorted(share, np.linspace(0, 1, COLUMNS) - 1e-9)
    return sorted({1, last, *(min(int(t) + 1, last) for t in wanted)})


def _tops(labels: np.ndarray, clusters: list[int], scale: float) -> dict[int, float]:
    """Where the bar of each cluster begins."""
    tops, y = {}, float(TOP)
    for j in clusters:
        tops[j] = y
        y += float((labels == j).sum()) * scale + GAP
    return tops


def _column(
    labels: np.ndarray, clusters: list[int], scale: float, x: float, tops: dict[int, float], t: int
) -> list[Markup]:
    """The bars of one round."""
    bars = []
    for j in clusters:
        n = int((labels == j).sum())
        said = element("title", f"round {t}: {n:,} clients in {_name(j)}")
        if n:
            bars.append(element("rect", said, x=x, y=tops[j], width=BAR, height=max(n * scale, 0.5),
                                style=f"fill:{colour(j)}", data_round=t, data_cluster=j, data_clients=n))  # fmt: skip
    return [*bars, element("text", t, x=x + BAR / 2, y=HEIGHT - 22, text_anchor="middle", class_="tick")]


def _ribbons(
    before: np.ndarray, after: np.ndarray, clusters: list[int], scale: float, at: tuple[float, float],
    tops: tuple[dict[int, float], dict[int, float]], t: int,
) -> list[Markup]:  # fmt: skip
    """Ribbons from the bars of one column to those of the next, as wide as the clients that take that way."""
    out, into = dict(tops[0]), dict(tops[1])
    found = []
    for a in clusters:
        for b in clusters:
            n = int(((before == a) & (after == b)).sum())
            if not n:
                continue
            high, y0, y1 = n * scale, out[a], into[b]
            out[a], into[b] = y0 + high, y1 + high
            path = f"{_curve('M', at, y0, y1)}{_curve('L', at[::-1], y1 + high, y0 + high)}Z"
            said = f"{n:,} clients in {_name(a)} {'stay' if a == b else f'go to {_name(b)}'} by round {t}"
            style = f"fill:{colour(a)};opacity:{0.28 if a == b else 0.55}"
            found.append(element("path", element("title", said), d=path, style=style))
    return found


def _curve(pen: str, at: tuple[float, ...], y0: float, y1: float) -> str:
    """From one place to another, level at both ends."""
    a, b = at
    middle = (a + b) / 2
    return f"{pen}{a:.1f} {y0:.1f}C{middle:.1f} {y0:.1f} {middle:.1f} {y1:.1f} {b:.1f} {y1:.1f}"
