"""The output of the command line, all of it read from run folders."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.console import Group as Column
from rich.live import Live
from rich.table import Table
from rich.text import Text

from coterie.core.card import in_bytes
from coterie.core.model_tree import drawn
from coterie.runs.compare import Group, Spread
from coterie.runs.folder import read_config, read_history, read_result
from coterie.runs.view import View
from coterie.storage.names import printable


class PlainConsole(Console):
    """A console to which names that others gave are only text: no markup, and nothing in them steers the terminal."""

    def __init__(self) -> None:
        super().__init__(markup=False, emoji=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a string, or the cell of a table, as it is printed."""
        return super().render_str(printable(text), **options)


console = PlainConsole()
PAUSE = 1.0  # seconds between two looks at a run that is watched


def emit(content: Any, as_json: bool, draw: Callable[[], None]) -> None:
    """Print a result as JSON for scripts, or as tables for people.

    Args:
        content: The result, for JSON.
        as_json: Whether to print JSON.
        draw: Prints the tables.
    """
    if as_json:
        sys.stdout.write(json.dumps(content, indent=1) + "\n")
    else:
        draw()


def summary(path: Path) -> dict[str, Any]:
    """Return the configuration and the result of a finished run.

    Args:
        path: The run folder.
    """
    result, history = read_result(path), read_history(path)
    return {"run": str(path), "rounds": len(history), "config": read_config(path), "result": result}


def standing(path: Path) -> dict[str, Any]:
    """Return what is known of a run: its summary, or as long as it is not finished its last round.

    Args:
        path: The run folder.
    """
    view = View.of(path)
    if view.result is not None:
        return {**summary(path), "finished": True}
    last = view.history[-1] if view.history else None
    return {"run": str(path), "rounds": len(view.history), "config": view.config, "last": last, "finished": False}


def show(path: Path) -> None:
    """Print a run, finished or not: its result, its clusters and some of its rounds.

    Args:
        path: The run folder.
    """
    console.print(_page(View.of(path)))


def watch(path: Path) -> None:
    """Print a run again and again, in place, until it is finished.

    Args:
        path: The run folder.
    """
    with Live(_page(view := View.of(path)), console=console, auto_refresh=False) as live:
        while view.result is None:
            time.sleep(PAUSE)
            view = View.of(path)
            live.update(_page(view), refresh=True)


def _page(view: View) -> Column:
    """All that is printed of a run."""
    parts: list[Any] = [_run_lines(view)]
    if view.sizes:
        parts.append(_clusters(view))
    if view.tree:
        parts.append(_text("\n".join(drawn(view.tree)) + "\n"))
    if view.result and view.result.get("report"):
        parts.append(_text(view.result["report"] + "\n"))
    if view.history:
        parts.append(_rounds(view.history, view.metric))
    return Column(*parts, _text(f"settings: {view.config['algorithm']}", style="dim"))


def _rounds(history: list[dict[str, Any]], metric: str) -> Table:
    """List about eight rounds, evenly spaced, with the last."""
    rounds = table_of(">round", ">loss", f">{metric}", ">changed", "members", ">down", ">up", ">s")
    scored = [r for r in history if r.get(metric) is not None]
    shown = scored if len(scored) >= 8 else history
    step = max(1, len(shown) // 8)
    for r in shown[step - 1 :: step] + ([] if len(shown) % step == 0 else shown[-1:]):
        score = "" if r.get(metric) is None else f"{r[metric]:.4f}"
        listed = r["members"] or []
        members = ", ".join(str(n) for n in listed[:8]) + (" …" if len(listed) > 8 else "")
        sizes = (in_bytes(r["bytes_down"]), in_bytes(r["bytes_up"]))
        rounds.add_row(
            str(r["round"]),
            "" if r["loss"] is None else f"{r['loss']:.4f}",
            score,
            str(r["changed"]),
            members,
            *sizes,
            f"{r['seconds']:.3f}",
        )
    return rounds


def compare(groups: list[Group]) -> None:
    """Print groups of runs, one row each; a table per metric.

    Args:
        groups: The groups.
    """
    for metric in dict.fromkeys(group.metric for group in groups):
        table = table_of("method", "settings", ">seeds", f">{metric}", ">ARI", ">found", ">s", ">up")
        table.columns[0].no_wrap = True
        for group in (group for group in groups if group.metric == metric):
            clusters, seconds, up = (group.spread(figure) for figure in ("found", "seconds", "bytes_up"))
            table.add_row(
                group.method, group.settings, str(len(group.runs)), _spread(group.spread("score"), 4),
                _spread(group.spread("ari"), 2), "" if clusters is None else f"{round(clusters.mean, 1):g}",
                "" if seconds is None else f"{seconds.mean:.2f}", "" if up is None else in_bytes(up.mean),
            )  # fmt: skip
        console.print(table)


def _clusters(view: View) -> Table:
    """Make a table of the clusters with their points, or their clients, or only the number of their members."""
    if view.result is None or (view.labels is None and not view.result.get("table")):
        return _counted(view)
    return _points(view.result["table"]) if view.labels is None else _clients(view.result)


def _counted(view: View) -> Table:
    """List every cluster with its size in the last round: who its members are is not known yet, or a secret."""
    table = table_of("cluster", ">members", f">{view.metric}")
    for j, n in view.sizes.items():
        score = view.per_cluster.get(j)  # missing if nobody was scored yet, or the cluster is too small to be opened
        table.add_row(str(j), str(n), "" if score is None else f"{score:.4f}")
    return table


def _clients(result: dict[str, Any]) -> Table:
    """List every cluster with its number of clients, and how many of them belong to each true group."""
    found = sorted(set(result["labels"]))
    more = f" (the first 40 of {len(found)})" if len(found) > 40 else ""
    known = ["true groups"] if result["groups"] else []
    table = table_of(f"cluster{more}", ">clients", f">{result['metric']}", *known)
    for j in found[:40]:
        members = [i for i, label in enumerate(result["labels"]) if label == j]
        true = Counter(result["groups"][i] for i in members).most_common(4) if result["groups"] else []
        score = result["per_cluster"].get(str(j))  # missing if no member has test rows
        groups = [", ".join(f"{g} ({n})" for g, n in true)] if known else []
        table.add_row(str(j), str(len(members)), "" if score is None else f"{score:.4f}", *groups)
    return table


def _points(counts: list[list[int]]) -> Table:
    """List every cluster with its number of points, and how many of them belong to each true cluster."""
    table = table_of("cluster", ">points", "true clusters")
    for j, row in enumerate(counts):
        true = ", ".join(f"{g} ({n})" for g, n in Counter(dict(enumerate(row))).most_common(4) if n)
        table.add_row(str(j), str(sum(row)), true)
    return table


def demo(rows: list[dict[str, Any]], out: Path) -> None:
    """Print the demo's table and the path of its picture.

    Args:
        rows: One row per method.
        out: The demo's folder.
    """
    names = {"global": "one model for all (FedAvg)", "local": "one model each", "ifca": "one model per group (IFCA)"}
    console.print("80 clients, 4 hidden groups", style="bold")
    table = table_of("", ">accuracy", ">ARI", ">sent down", ">sent up", ">seconds")
    for r in rows:
        cells = (f"{r['accuracy']:.3f}", in_digits(r["ari"]), in_bytes(r["bytes_down"]), in_bytes(r["bytes_up"]))
        table.add_row(
            names[r["method"]], *cells, f"{r['seconds']:.1f}", style="bold" if r["method"] == "ifca" else None
        )
    console.print(table)
    console.print(f"picture: {out / 'demo.png'}   runs: coterie show {out / 'ifca'}")
    console.print(f"report: {out / 'report.html'}")


def assigned(found: list[dict[str, Any]]) -> None:
    """Print clients and their clusters, or the number of points of each cluster and the clients they belong to.

    Args:
        found: The assignments of clients or points.
    """
    if "row" in found[0]:
        console.print(_assigned_points(found))
        return
    cluster = "group" if "group" in found[0] else "cluster"
    table = table_of("client", ">rows", f">{cluster}")
    for row in found:
        table.add_row(_text(row["client"]), str(row["rows"]), str(row[cluster]))
    console.print(table)


def _assigned_points(found: list[dict[str, Any]]) -> Table:
    table = table_of("cluster", ">points", "clients")
    for j in sorted({row["cluster"] for row in found}):
        clients = Counter(row["client"] for row in found if row["cluster"] == j)
        more = f" and {len(clients) - 4} more" if len(clients) > 4 else ""
        listed = ", ".join(f"{name} ({n})" for name, n in clients.most_common(4))
        table.add_row(str(j), str(clients.total()), _text(listed + more))
    return table


def text(content: str) -> None:
    """Print text without any formatting.

    Args:
        content: The text.
    """
    console.print(content, highlight=False, soft_wrap=True)


def experiment(result: dict[str, Any]) -> None:
    """Print the rows of an experiment, with the paper's numbers.

    Args:
        result: The result of the experiment.
    """
    console.print(_text(result["name"], style="bold"), result["title"], sep="  ")
    rows = result["rows"]
    same = [n for n in rows[0] if len(rows) > 1 and all(r[n] == rows[0][n] for r in rows)]
    if common := [f"{n} {rows[0][n]}" for n in same if rows[0][n] is not None]:
        console.print("in all rows: " + ", ".join(common), style="dim")
    columns = [n for n in rows[0] if n not in same]
    table = table_of(*[n if isinstance(rows[0][n], str) else f">{n}" for n in columns])
    for row in rows:
        cells = [row[n] for n in columns]
        table.add_row(*[in_digits(v) if isinstance(v, float) or v is None else str(v) for v in cells])
    console.print(table)
    console.print(
        f"{result['seconds']:.0f} s on {result['device']}, commit {result['commit']}; written to {result['path']}"
    )


def tables(found: dict[str, dict[str, str]]) -> None:
    """Print names with a one-line description of each, in a table per kind.

    Args:
        found: The descriptions by kind and name.
    """
    for kind, entries in found.items():
        table = table_of(kind, "")
        for name, line in entries.items():
            table.add_row(name, line)
        console.print(table)


def table_of(*columns: str) -> Table:
    """An empty table with these columns; one that begins with ">" is for numbers.

    Args:
        columns: Their names.
    """
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        if name.startswith(">"):  # a number is not wrapped
            table.add_column(name.lstrip(">"), justify="right", no_wrap=len(name) < 12, min_width=5)
        else:
            table.add_column(name, overflow="fold")
    return table


def _run_lines(view: View) -> Text:
    r = view.result
    score = [] if view.score is None else [_text(f"{view.metric} {view.score:.4f}", style="bold")]
    parts = [_text(view.name, style="bold")]
    score += [] if view.privacy is None else [_text(view.privacy)]
    if r is None:
        return Text("\n").join([*parts, _text(view.standing or "", style="yellow"), *score])
    clients = f"{len(r['labels'])} clients, {len(view.history)} rounds"
    parts += [_text(f"{clients}, {r['seconds']:.1f} s on {r['device']}"), *score]
    if r.get("worst_decile") is not None:
        parts.append(_text(f"worst tenth of the clients {r['worst_decile']:.4f}"))
    if "ari" in r:
        figures = f"NMI {r['nmi']:.3f}, purity {r['purity']:.3f}, matched {r['matched']:.3f}"
        parts.append(_text(f"ARI {r['ari']:.3f}, {figures}"))
    parts += [_text(f"warning: {warning}", style="yellow") for warning in r.get("warnings", [])]
    return Text("\n").join(parts)


def _text(content: str, style: str = "") -> Text:
    """Text in one style, highlighted nowhere."""
    return Text(printable(content), style)


def _spread(spread: Spread | None, digits: int) -> str:
    if spread is None:
        return ""
    return f"{spread.mean:.{digits}f}" + ("" if spread.sd is None else f" ± {spread.sd:.{digits}f}")


def in_digits(value: float | None) -> str:
    """A number with three digits; nothing where there is none.

    Args:
        value: The number.
    """
    return "" if value is None else f"{value:.3f}"
