"""What was found on a table, for people: as text for a terminal, and as a page of Markdown with pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from coterie.analysis.differences import WIDTH, Differences
from coterie.analysis.ways import Way
from coterie.methods.mixed_effects import MixedEffects
from coterie.runs import plots
from coterie.runs.comparison import Figure
from coterie.storage.names import printable
from coterie.storage.snapshot import write_text
from coterie.tables.columns import Category

if TYPE_CHECKING:
    from coterie.analysis.table_fit import TableFit

LISTED = 12  # clients of a group, and columns, that are listed
FAR = 6  # times the median of the scores, beyond which a score is not drawn
CERTAIN = 0.05  # the p below which an association is more than chance

Table = list[list[str]]  # the first row is its head


def text(found: TableFit) -> str:
    """The answers, as lines of plain text."""
    parts = [_summary(found), _columns_of(_scores(found))]
    if found.differences is not None:
        parts += ["What differs between groups:", _columns_of(_differences(found.differences))]
        parts.append(_explained_differences(found))
    if found.associations:
        parts += ["Attributes of clients and the groups:", _columns_of(_associations(found))]
    if found.preparation.notes:
        parts.append("\n".join(f"note: {note}" for note in found.preparation.notes))
    return "\n\n".join(parts)


def write_report(found: TableFit, folder: Path) -> Path:
    """Write `report.md` and its pictures.

    Args:
        found: What was found.
        folder: Where to.

    Returns:
        The page.
    """
    target = found.preparation.target.told
    page = [f"# {target} by {found.preparation.layout.client}", _summary(found, mark="**")]
    draw_scores(found, folder / "scores.png")
    page += ["## What it comes to", "![Scores of the ways to share](scores.png)", _markdown(_scores(found))]
    page.append(_explained_scores(found))
    if found.comparison is not None:
        page += ["## Why this one", found.comparison.reason, _markdown(_compared(found))]
    page += ["## Groups", found.groups.verdict]
    if found.differences is not None:
        page.append(_markdown(_members(found)))
        draw_differences(found, folder / "groups.png")
        page += ["## What differs", "![What differs between groups](groups.png)"]
        page += [_markdown(_differences(found.differences)), _explained_differences(found)]
    if found.associations:
        page += ["## Attributes of clients", _markdown(_associations(found))]
    if found.preparation.notes:
        page += ["## The table", "\n".join(f"- {note}" for note in found.preparation.notes)]
    write_text(folder / "report.md", printable("\n\n".join(part for part in page if part)) + "\n")
    return folder / "report.md"


# --- sentences --------------------------------------------------------------------------------------------------------


def _summary(found: TableFit, mark: str = "") -> str:
    federation = found.federation
    width = len(federation.columns or ())
    size = f"{len(federation):,} clients, {len(federation.train.x):,} rows, {width:,} columns to predict from."
    lines = [
        size,
        *_differ(found, mark),
        f"{mark}Groups:{mark} {_groups(found)}",
        f"{mark}Recommended:{mark} {_recommended(found)}",
    ]
    return "\n".join(lines) if not mark else "\n\n".join(lines)


def _differ(found: TableFit, mark: str) -> list[str]:
    """How much clients differ, where random effects tell."""
    for way in found.ways:
        if isinstance(way.run.algorithm, MixedEffects) and way.run.algorithm.k == 1:
            effects = way.run.algorithm.effects(way.run.state)
            if effects.rest is None:
                continue
            share = effects.within / max(effects.within + effects.rest, np.finfo(float).tiny)
            left = "of the error of one model for all is due to differences between clients, the rest is noise"
            return [f"{mark}Clients differ:{mark} {share:.0%} {left}."]
    return []


def _groups(found: TableFit) -> str:
    groups = found.groups
    sure = "" if groups.sure else " (the data cannot tell for certain)"
    if groups.count == 1:
        return f"one; clients do not fall into groups that differ{sure}."
    sizes = np.bincount(found.labels, minlength=groups.count)
    doubt = int(found.unsure.sum())
    unsure = f"; {doubt} of {len(found.labels)} clients could as well be in another" if doubt else ", all clearly"
    return f"{groups.count}{sure}, of {', '.join(map(str, sizes))} clients{unsure}."


def _recommended(found: TableFit) -> str:
    way = found.way(found.recommended)
    assert way is not None  # it is trained in any case
    said = f"{found.recommended}, {_score_of(found, way.score)} on test rows"
    one = found.way("one for all")
    if one is not None and one is not way:
        hurt = way.hurt(one)
        said += f"; one for all has {_score_of(found, one.score)}, and serves {hurt.share:.0%} of the clients better"
    return said + "."


def _score_of(found: TableFit, figure: Figure) -> str:
    if found.preparation.target.classes:
        return f"accuracy {figure.mean:.3f} ± {figure.se:.3f}"
    return f"MSE {figure.mean:.3f} ± {figure.se:.3f}"


def _explained_scores(found: TableFit) -> str:
    target = found.preparation.target
    placed = "New clients took no part, and are placed by a few of their rows."
    hurt = "'Hurt' is the share of known clients that are served worse than by one model for all, or by one each."
    if target.classes:
        return f"Accuracy is the mean over clients, ± its standard error. {placed} {hurt}"
    return (
        "The mean squared error is the mean over clients, ± its standard error, in units of the variance of "
        f"{target.told}, {target.deviation**2:.4g}: 1 is what the mean of all rows would have. {placed} {hurt}"
    )


def _explained_differences(found: TableFit) -> str:
    """What the numbers are, and what words are compared with."""
    own = found.preparation
    bases = [f"{c.name}={c.base}" for c in own.layout.columns if isinstance(c, Category)]
    compared = f" Words are compared with {', '.join(bases)}." if bases else ""
    if found.differences is not None and found.differences.error is None:
        return f"How much the loss of a group's rows rises if the column is shuffled among them.{compared}"
    what = f"How much {own.target.told} changes with one more of the column, ± 95 %"
    return f"{what}; 'differs' is 95 % over all columns and pairs of groups together.{compared}"


# --- tables -----------------------------------------------------------------------------------------------------------


def _scores(found: TableFit) -> Table:
    metric = found.ways[0].known.metric
    one, each = found.way("one for all"), found.way("one each")
    rows = [["", metric, "new clients", "hurt vs one for all", "vs one each"]]
    for way in found.ways:
        name = f"{way.name} *" if way.name == found.recommended else way.name
        hurt = [_hurt(way, other) for other in (one, each)]
        rows.append([name, _plus_minus(way.score), _plus_minus(way.new_score), *hurt])
    return rows


def _hurt(way: Way, than: Way | None) -> str:
    return "" if than is None or than.name == way.name else f"{way.hurt(than).share:.0%}"


def _compared(found: TableFit) -> Table:
    assert found.comparison is not None  # the caller has looked
    rows = [["candidate", found.comparison.metric, "new clients", "more error"]]
    for row in found.comparison.rows:
        more = "" if row.failed else f"{100 * row.more.mean:+.1f} ± {100 * row.more.se:.1f} %"
        rows.append([row.name, row.failed or _plus_minus(row.known), _plus_minus(row.new), more])
    return rows


def _members(found: TableFit) -> Table:
    rows = [["group", "clients", "unsure", "such as"]]
    names = np.array(found.federation.ids)
    for j in np.unique(found.labels):
        own = found.labels == j
        sure, doubt = names[own & ~found.unsure], names[own & found.unsure]
        listed = ", ".join([*sure, *(f"{name} (?)" for name in doubt)][:LISTED])
        rows.append([str(j), str(int(own.sum())), str(len(doubt)), listed + (", …" if own.sum() > LISTED else "")])
    return rows


def _differences(different: Differences) -> Table:
    k = len(different.value)
    head = ["column", *(f"group {j}" for j in range(k)), "" if different.error is None else "differs"]
    rows = [head]
    for c in different.order[:LISTED]:
        cells = [_interval(different, j, c) for j in range(k)]
        rows.append([different.names[c], *cells, "yes" if different.clear[c] else ""])
    if different.level is not None and different.level_error is not None:
        pairs = zip(different.level, different.level_error, strict=True)
        rows.append(["(an average row)", *(f"{v:.4g} ± {WIDTH * e:.2g}" for v, e in pairs), ""])
    if (more := len(different.names) - LISTED) > 0:
        rows.append([f"… and {more} more", *[""] * (k + 1)])
    return rows


def _interval(different: Differences, j: int, c: int) -> str:
    if different.error is None:
        return f"{different.value[j, c]:.3g}"
    return f"{different.value[j, c]:.4g} ± {WIDTH * different.error[j, c]:.2g}"


def _associations(found: TableFit) -> Table:
    k = len(found.associations[0].by_group)
    rows = [["attribute", *(f"group {j}" for j in range(k)), "strength", "p"]]
    for each in found.associations[:LISTED]:
        mark = " *" if each.p < CERTAIN else ""
        rows.append([each.name, *each.by_group, f"{each.strength:.2f}", f"{each.p:.2g}{mark}"])
    return rows


def _plus_minus(figure: Figure) -> str:
    return "" if math.isnan(figure.mean) else f"{figure.mean:.4f} ± {figure.se:.4f}"


def _columns_of(rows: Table) -> str:
    rows = [[cell.replace("\n", " ") for cell in row] for row in rows]
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(wide[0]), *map(str.rjust, row[1:], wide[1:])]).rstrip() for row in rows]
    return "\n".join(lines)


def _markdown(rows: Table) -> str:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|').replace(chr(10), ' ') for cell in cells)} |"

    rule = "|---|" + "".join("--:|" if _is_figure(column) else "---|" for column in list(zip(*rows, strict=True))[1:])
    return "\n".join([line(rows[0]), rule, *map(line, rows[1:])])


def _is_figure(column: Sequence[str]) -> bool:
    """Whether a column has no words below its head."""
    return not any(any(c.isalpha() for c in cell.replace("e", "")) for cell in column[1:])


# --- pictures ---------------------------------------------------------------------------------------------------------


def draw_scores(found: TableFit, path: Path) -> None:
    """Draw what every way to share comes to, on known clients and on new ones."""
    fig = plots.figure(7, 0.9 + 0.42 * len(found.ways))
    axes = fig.subplots()
    for y, way in enumerate(found.ways):
        own = plots.COLOURS[1] if way.name == found.recommended else plots.COLOURS[0]
        for figure, shift, fill, label in (
            (way.score, -0.12, own, "known clients, test rows"),
            (way.new_score, 0.16, "white", "new clients, placed by a few rows"),
        ):
            if math.isfinite(figure.mean):
                axes.errorbar(figure.mean, y + shift, xerr=figure.se, fmt="o", color=own, mfc=fill, capsize=3,
                              label=label if y == 0 else None)  # fmt: skip
    _cut(axes, found)
    axes.set_yticks(range(len(found.ways)), [f"{w.name}{' *' * (w.name == found.recommended)}" for w in found.ways])
    axes.invert_yaxis()
    axes.set_xlabel(_axis(found), parse_math=False)
    fig.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=8)
    plots.tidy(axes)
    plots.save(fig, path)


def _cut(axes: Any, found: TableFit) -> None:
    """Leave out what lies far beyond the others, and say so at the edge."""
    means = [(y, way.score.mean) for y, way in enumerate(found.ways)]
    means += [(y + 0.16, way.new_score.mean) for y, way in enumerate(found.ways) if math.isfinite(way.new_score.mean)]
    end = FAR * float(np.median([mean for _, mean in means]))
    if max(mean for _, mean in means) <= end:
        return
    shown = max(mean for _, mean in means if mean <= end)
    if shown <= 0:  # all but the far ones make no error
        return
    axes.set_xlim(0, 1.2 * shown)
    for y, mean in means:
        if mean > end:
            axes.annotate(f"{mean:.3g} →", (1.2 * shown, y), ha="right", va="center", fontsize=8)


def _axis(found: TableFit) -> str:
    metric = found.ways[0].known.metric
    return (
        "accuracy"
        if metric == "accuracy"
        else f"mean squared error of {printable(found.preparation.target.name)}, of its variance"
    )


def draw_differences(found: TableFit, path: Path) -> None:
    """Draw what differs: coefficients with intervals, or importance and dependence."""
    different = found.differences
    assert different is not None  # the caller has looked
    shown = [c for c in different.order if different.weight[c] > 0][:LISTED]
    panels = len(different.dependences)
    fig = plots.figure(7 + 2.6 * (panels > 0), max(2.4 + 0.9 * (panels > 0), 0.9 + 0.34 * len(shown)))
    grid = fig.add_gridspec(max(panels, 1), 2 if panels else 1)
    axes = fig.add_subplot(grid[:, 0])
    _bars(axes, different, shown, found)
    for i, dependence in enumerate(different.dependences):
        own = fig.add_subplot(grid[i, 1])
        for j, value in enumerate(dependence.value):
            own.plot(dependence.at, value, color=plots.colour(j), lw=2)
        own.set_xlabel(printable(dependence.name), fontsize=8, parse_math=False)
        plots.tidy(own)
    plots.save(fig, path)


def _bars(axes: Any, different: Differences, shown: list[int], found: TableFit) -> None:
    """One row for every column; a dot for every group, in units in which columns can be compared."""
    own = found.preparation
    unit = np.ones(len(different.names))
    if different.error is not None:
        unit = own.scale.deviation[own.used] / own.target.deviation
    k = len(different.value)
    for j in range(k):
        at = np.arange(len(shown)) + 0.5 * (j - (k - 1) / 2) / k
        error = None if different.error is None else WIDTH * (different.error[j] * unit)[shown]
        axes.errorbar((different.value[j] * unit)[shown], at, xerr=error, fmt="o", ms=4, capsize=2,
                      color=plots.colour(j), label=f"group {j}")  # fmt: skip
    axes.axvline(0, color=plots.INK, lw=0.7)
    names = [printable(different.names[c]) for c in shown]
    axes.set_yticks(range(len(shown)), names, fontsize=8, parse_math=False)  # a name may have dollars
    axes.invert_yaxis()
    name = printable(own.target.told)
    axes.set_xlabel(
        "rise of the loss if the column is shuffled"
        if different.error is None
        else f"deviations of {name} for one deviation of the column",
        parse_math=False,
    )
    axes.legend(frameon=False, fontsize=8)
    plots.tidy(axes)
