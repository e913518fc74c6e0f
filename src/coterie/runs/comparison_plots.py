"""Pictures of comparisons: of ways to share, and of numbers of groups."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np

from coterie.runs import plots

SPREAD = 5  # times by which scores may differ on one axis; more is left out, or the axis is logarithmic


def candidates(rows: list[dict[str, Any]], metric: str, recommended: str, reason: str) -> Any:
    """The picture of a comparison: the scores of all candidates with standard errors, and whom they hurt.

    Args:
        rows: A row per candidate, from the simplest on.
        metric: The name of the score.
        recommended: The candidate that has a bar behind it.
        reason: What is said of it, at the top.
    """
    rows = [row for row in rows if not row["failed"]]
    fig = plots.figure(10, 1.9 + 0.32 * len(rows))
    fig.suptitle(textwrap.fill(reason, 98), fontsize=11, x=0.01, ha="left")
    left, right = fig.subplots(1, 2, sharey=True, width_ratios=(1.7, 1))
    y = np.arange(len(rows))
    for axes in (left, right):
        axes.axhspan(*(at := next(i for i, r in enumerate(rows) if r["name"] == recommended)) + np.array([-0.5, 0.5]),
                     color=plots.COLOURS[2], alpha=0.25, lw=0)  # fmt: skip
        plots.tidy(axes)
    _scores(left, rows, metric)
    _hurt(right, rows)
    left.set_yticks(y, [row["name"] for row in rows])
    left.get_yticklabels()[at].set_fontweight("bold")
    left.set_ylim(len(rows) - 0.5, -0.5)
    return fig


def _scores(axes: Any, rows: list[dict[str, Any]], metric: str) -> None:
    """A dot with its standard error for every candidate: on known clients' rows, and below it on new clients.

    Values many times the least one would leave no room for the others: they are written at the edge.
    """
    new = any(np.isfinite(row["new"]) for row in rows)
    kinds = [("known", "rows of known clients", plots.COLOURS[0], "o")]
    kinds += [("new", "new clients", plots.COLOURS[1], "D")] if new else []
    least = min(row[key] for row in rows for key, *_ in kinds if np.isfinite(row[key]))
    edge = SPREAD * least if least > 0 else np.inf
    for at, (key, label, colour, marker) in enumerate(kinds):
        y = np.arange(len(rows)) + (at - (len(kinds) - 1) / 2) * 0.3
        values, errors = (np.array([row[name] for row in rows]) for name in (key, f"{key}_se"))
        near, style = values <= edge, {"fmt": marker, "ms": 5, "elinewidth": 1.6, "capsize": 2}
        axes.errorbar(values[near], y[near], xerr=errors[near], color=colour, label=label, **style)
        for value, height in zip(values[values > edge], y[values > edge], strict=True):
            axes.annotate(f"{value:.3g} ▸", (edge, height), color=colour, fontsize=8, ha="right", va="center")
    if any(row[key] > edge for row in rows for key, *_ in kinds):
        axes.set_xlim(right=edge)
    axes.set_xlabel(f"{metric}, ± one standard error")
    axes.legend(frameon=False, fontsize=9, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)


def _scale(rows: list[dict[str, Any]]) -> str:
    """Logarithmic where scores differ many times over."""
    shown = [row[key] for row in rows for key in ("known", "new") if np.isfinite(row[key])]
    return "log" if min(shown) > 0 and max(shown) > SPREAD * min(shown) else "linear"


def _hurt(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Two bars for every candidate: the share of the clients that it hurts beside one model for all, and one each."""
    for shift, key, label, colour in (
        (-0.17, "hurt", "than with one for all", plots.COLOURS[3]),
        (0.17, "hurt_alone", "than alone", plots.COLOURS[7]),
    ):
        own = [(i, 100 * row[key]) for i, row in enumerate(rows) if row[key] is not None]
        axes.barh([i + shift for i, _ in own], [share for _, share in own], 0.32, color=colour, label=label)
    axes.set_xlim(0, 100)
    axes.set_xlabel("clients that are worse off (%)")
    axes.tick_params(left=False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=9, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)


def numbers_of_groups(rows: list[dict[str, Any]], metric: str, chosen: int) -> Any:
    """The score against the number of groups, on known clients' rows and on new clients.

    Args:
        rows: A row per number.
        metric: The name of the score.
        chosen: The number that is marked.
    """
    fig = plots.figure(6, 3.6)
    axes, k = fig.subplots(), [row["k"] for row in rows]
    axes.axvline(chosen, color=plots.COLOURS[2], alpha=0.35, lw=12)
    for key, label, colour, marker in (
        ("known", "rows of known clients", plots.COLOURS[0], "o"),
        ("new", "new clients", plots.COLOURS[1], "D"),
    ):
        if any(np.isfinite(row[key]) for row in rows):
            values, errors = ([row[name] for row in rows] for name in (key, f"{key}_se"))
            axes.errorbar(k, values, errors, fmt=f"{marker}-", color=colour, label=label, capsize=2, lw=1.6, ms=5)
    axes.set_yscale(_scale(rows))
    axes.set_xticks(k)
    axes.set_xlabel("groups")
    axes.set_ylabel(f"{metric}, ± one standard error")
    axes.set_title(f"k = {chosen}: the fewest groups that are as good as the best number", fontsize=11)
    axes.legend(frameon=False, fontsize=9)
    plots.tidy(axes)
    return fig
