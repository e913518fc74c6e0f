"""Figures of what only some methods or federations have: trees, coefficients, effects, nodes that were missing."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from coterie.report import trees
from coterie.report.figure import INK, Figure
from coterie.report.svg import WIDTH, chart, colour, element, numbered, spread, ticks
from coterie.runs.view import View

NAMED = 40  # coefficients at most that are drawn
LOGGED = 100  # lines of the log at most
FLOWER = "flower: "  # with which the log begins what it says of nodes


def tree(view: View) -> Figure | None:
    """The tree of models."""
    if not view.tree or len(view.tree) < 2:
        return None
    says = "Rounds go down; a line is as wide as it has clients. Choose a node to see who is at it."
    return Figure("tree", "Tree of models", trees.drawn(view.tree, len(view.history), view.names), says)


def similarity(view: View) -> Figure | None:
    """How alike clients' updates were at the first split of a tree."""
    found = trees.similar(view.tree, view.labels) if view.tree and view.labels is not None else None
    says = "Of updates at the first split. Clients of one cluster point the same way."
    return None if found is None else Figure("similarity", "Similarity of updates", trees.similarity(found), says)


def coefficients(view: View) -> Figure | None:
    """What each group's linear model makes of each column, with intervals where the method knows them."""
    rows = named(view)
    names = list(dict.fromkeys(row["name"] for row in rows))
    if not names or len(names) > NAMED:
        return None
    each = 1 + max(row["cluster"] for row in rows)
    high, left = 16 + 11.0 * each, 130.0
    low, most = spread([0.0, *(row["mean"] + sign * reach(row) for row in rows for sign in (-1, 1))])
    bottom = 8 + high * len(names)

    def across(value: float) -> float:
        return left + (value - low) / (most - low) * (WIDTH - left - 14)

    parts = []
    for value, text in zip(marks := ticks(low, most), numbered(marks), strict=True):
        x = across(value)
        style = f"stroke:{INK}" if value == 0 else None
        parts.append(element("line", x1=x, x2=x, y1=4.0, y2=bottom, class_="grid", style=style))
        parts.append(element("text", text, x=x, y=bottom + 18, text_anchor="middle", class_="tick"))
    for i, name in enumerate(names):
        text = name if len(name) <= 18 else f"{name[:17]}…"
        parts.append(element("text", text, x=left - 8, y=8 + high * (i + 0.5), text_anchor="end", class_="tick"))
    for row in rows:
        y = 12 + high * names.index(row["name"]) + 11.0 * row["cluster"]
        fill, ends = colour(row["cluster"]), [across(row["mean"] + sign * reach(row)) for sign in (-1, 1)]
        within = f" ± {reach(row):.2g}" if row["error"] is not None else ""
        said = element("title", f"{row['name']}, cluster {row['cluster']}: {row['mean']:.4g}{within}")
        parts.append(element("line", x1=ends[0], x2=ends[1], y1=y, y2=y, style=f"stroke:{fill};stroke-width:2.5"))
        parts.append(element("circle", said, cx=across(row["mean"]), cy=y, r=3.5, style=f"fill:{fill}"))
    keys = [(colour(j), f"cluster {j}") for j in range(each)]
    known = any(row["error"] is not None for row in rows)
    says = "Bars are 95 % intervals, as if it were known who is in which group." if known else ""
    drawing = chart("coefficients of each cluster", *parts, height=bottom + 28, names=keys)
    return Figure("coefficients", "Coefficients of each group", drawing, says)


def reach(row: dict[str, Any]) -> float:
    """How far the 95 % interval of a coefficient reaches to either side; 0 where its error is not known."""
    return 1.96 * (row["error"] or 0.0)


def named(view: View) -> list[dict[str, Any]]:
    """The coefficients of a run; those of a table's columns by the names of these."""
    result = view.result or {}
    rows, columns = result.get("coefficients") or [], result.get("columns")
    known = {f"weight[0, {i}]": name for i, name in enumerate(columns or [])} | {"bias[0]": "intercept"}
    return [{**row, "name": known.get(row["name"], row["name"])} for row in rows]


def effects(view: View) -> Figure | None:
    """What a method reports of itself, such as the effects of a mixed model."""
    report = view.result.get("report") if view.result else None
    return None if not report else Figure("effects", "What the method reports", element("pre", report), wide=True)


def nodes(view: View) -> Figure | None:
    """The nodes of a real federation: in how many rounds each was missing, and what the log says of them all."""
    lost = (view.result.get("left_out") if view.result else None) or {}
    told = [line.removeprefix(FLOWER) for line in view.log if line.startswith(FLOWER)]
    if not lost and not told:
        return None
    rows = [element("tr", element("td", name), element("td", n, class_="number")) for name, n in sorted(lost.items())]
    head = element("tr", element("th", "node"), element("th", "rounds without it", class_="number"))
    table = element("table", element("thead", head), element("tbody", *rows)) if rows else Markup("")
    lines = element("ul", *(element("li", line) for line in told[:LOGGED]), class_="log") if told else Markup("")
    more = f"and {len(told) - LOGGED:,} lines more in events.jsonl" if len(told) > LOGGED else ""
    return Figure("nodes", "Nodes that were lost, refused, late, or came", table + lines, more, wide=True)
