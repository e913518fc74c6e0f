"""The page around the figures: what was run, in words; one run in detail, or several beside each other."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from coterie.callbacks import HIGHER
from coterie.core.card import in_bytes
from coterie.report import figures, rounds
from coterie.report.clients import ALONE, ONE_FOR_ALL
from coterie.runs.compare import Group, find_runs, group_runs
from coterie.runs.view import View
from coterie.storage.names import printable
from coterie.storage.snapshot import write_text

LONG = 120  # characters of a name that are shown
TOLD = 20  # of several runs at most that are told one by one
LOGGED = 200  # lines of the log at most


def write(folders: Sequence[Path], out: Path) -> None:
    """Write a report, whole or not at all.

    Args:
        folders: Run folders, and folders that contain some.
        out: The HTML file.
    """
    if out.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"{out}: a report must end in .html")
    views = [View.of(folder) for folder in find_runs(folders)]
    write_text(out, page(title(views), body(views)))


def title(views: Sequence[View]) -> str:
    """What a report of some runs is called."""
    return shortened(views[0].title) if len(views) == 1 else f"{len(views)} runs"


def shortened(name: str) -> str:
    """A name that fits a heading, without what steers a terminal."""
    shown = printable(name)
    return shown if len(shown) <= LONG else f"{shown[: LONG - 1]}…"


def page(title: str, content: str, *, script: str = "", head: str = "") -> str:
    """A whole document that needs nothing from elsewhere.

    Args:
        title: Its title.
        content: HTML that goes into it as it is.
        script: More JavaScript.
        head: HTML that goes above the content as it is.
    """
    own = {"style": Markup(_text("report.css")), "script": Markup(_text("report.js") + script)}
    shown = {"title": shortened(title), "content": Markup(content), "head": Markup(head)}
    return _templates().get_template("page.html").render(**own, **shown, version=version("coterie"))


def body(views: Sequence[View]) -> str:
    """All that is said of some runs, as HTML: of one its figures, of several a table and their curves first.

    A run with groups is held against those runs on the same clients that have one model for all, or one each.

    Args:
        views: The runs.
    """
    several = len(views) > 1
    shown = [view for view in views if not several or _grouped(view)] or list(views[:1])
    compared = group_runs([view.path for view in views if view.result is not None]) if several else []
    return (
        _templates()
        .get_template("runs.html")
        .render(
            compared=[_row(group) for group in compared],
            beside=_beside(views, compared),
            distinct=any(group.settings for group in compared),
            overlays=rounds.overlay(compared),
            runs=[_told(view, views) for view in shown[:TOLD]],
            more=max(0, len(shown) - TOLD),
            several=several,
        )
    )


def _beside(views: Sequence[View], compared: Sequence[Group]) -> str:
    """What several runs are, and which of them serves clients best, in plain words."""
    data = sorted({view.data for view in views})
    text = f"{len(views)} runs on {', '.join(data[:3])}{' and more' if len(data) > 3 else ''}."
    if len(data) > 1 or len({group.metric for group in compared}) != 1 or len(compared) < 2:
        return text
    metric = compared[0].metric
    ranked = [(found.mean, group) for group in compared if (found := group.spread("score")) is not None]
    mean, best = (max if metric in HIGHER else min)(ranked, key=lambda pair: pair[0])
    name = f"{best.method} {best.settings}".strip()
    return f"{text} Best on average over clients: {name}, with {metric} {mean:.4g}."


def _grouped(view: View) -> bool:
    """Whether a run has several clusters, but fewer than clients."""
    m = len(view.result["labels"]) if view.result else 0
    return 1 < len(view.sizes) < max(m, 2) or (len(view.sizes) > 1 and view.members == "points")


def _told(view: View, views: Sequence[View]) -> dict[str, Any]:
    """What a template needs of one run."""
    return {
        "title": shortened(view.title),
        "sentence": sentence(view),
        "facts": facts(view),
        "warnings": (view.result or {}).get("warnings", []),
        "settings": settings(view.config),
        "figures": figures.of_run(view, _plain_runs(view, views)),
        "log": view.log[:LOGGED],
        "unlogged": max(0, len(view.log) - LOGGED),
    }


def _plain_runs(view: View, views: Sequence[View]) -> list[View]:
    """Which of some runs say what clients would have without groups: one of one model for all, one of a model each.

    They are on the same data, and have the same seed where there is such a run.
    """
    found = []
    for kind in (ONE_FOR_ALL, ALONE):
        alike = [other for other in views if other is not view and _same_data(view, other, kind)]
        alike.sort(key=lambda other: other.config["run"].get("seed") != view.config["run"].get("seed"))
        found += alike[:1]
    return found


def _same_data(view: View, other: View, kind: Sequence[str]) -> bool:
    """Whether another run is of one of some methods, on the same data."""
    of_kind = other.config["algorithm"]["name"] in kind
    return of_kind and other.result is not None and other.config["data"] == view.config["data"]


def sentence(view: View) -> str:
    """What was run and what came of it, in plain words.

    Args:
        view: The run.
    """
    method, m = view.config["algorithm"]["name"], _clients(view)
    who = "clients" if m is None else f"{m:,} client{'' if m == 1 else 's'}"
    done = f"{len(view.history)} round{'s' if len(view.history) != 1 else ''}"
    end = "has finished" if view.result is not None else "has not come to its end"
    text = f"{method} trained {who} of {view.data} for {done} and {end}.{_found(view)}"
    if view.score is not None:
        text += f" A client is served with {view.metric} {view.score:.4g} on average"
        worst = (view.result or {}).get("worst_decile")
        text += "." if worst is None else f", the tenth that is served worst with {worst:.4g}."
    return text


def _found(view: View) -> str:
    """How many clusters there are, and how large."""
    if len(view.sizes) < 2 or view.result is None:
        return ""
    counts, what = sorted(view.sizes.values(), reverse=True), view.members
    if len(set(counts)) == 1:
        one = counts[0] == 1
        return f" It found {len(counts)} clusters of {counts[0]:,} {what.removesuffix('s') if one else what} each."
    few = f"{', '.join(f'{n:,}' for n in counts[:-1])} and {counts[-1]:,}"
    listed = few if len(counts) <= 8 else f"{', '.join(f'{n:,}' for n in counts[:8])} and fewer"
    return f" It found {len(counts)} clusters of {listed} {what}."


def _clients(view: View) -> int | None:
    if view.result is not None:
        return len(view.result["labels"])
    return max((row["participants"] for row in view.history), default=None)


def facts(view: View) -> list[tuple[str, str]]:
    """Figures of a run, with what they are called.

    Args:
        view: The run.
    """
    result, history = view.result or {}, view.history
    sent = [sum(row[key] for row in history) for key in ("bytes_down", "bytes_up")]
    known = {
        "score": "" if view.score is None else f"{view.metric} {view.score:.4g}",
        "worst tenth": "" if result.get("worst_decile") is None else f"{result['worst_decile']:.4g}",
        "clusters": str(len(view.sizes) or ""),
        "ARI": "" if result.get("ari") is None else f"{result['ari']:.3f}",
        "rounds": f"{len(history)} of {view.config['run'].get('rounds', '?')}",
        "seconds": f"{sum(row['seconds'] for row in history):.3g}",
        "sent down, up": f"{in_bytes(sent[0])}, {in_bytes(sent[1])}",
        "device": " ".join(str(result[key]) for key in ("device", "executor") if result.get(key)),
        "begun": str(view.begun.get("time", "")),
        "last change": _changed(view),
        "commit": str(view.begun.get("commit") or "")[:12],
    }
    return [(name, value) for name, value in known.items() if value]


def _changed(view: View) -> str:
    """When the last round was written, by the clock of this machine."""
    events = view.path / "events.jsonl"
    if not events.is_file():
        return ""
    return datetime.datetime.fromtimestamp(events.stat().st_mtime).astimezone().isoformat(" ", "minutes")


def settings(config: dict[str, Any]) -> list[tuple[str, str, str]]:
    """A configuration as rows: table, name, value.

    Args:
        config: As config.toml has it.
    """
    return [(table, name, str(value)) for table, own in config.items() for name, value in own.items()]


def _row(group: Group) -> dict[str, Any]:
    """A group of runs in the table of a comparison."""

    def spread(figure: str, digits: int) -> str:
        found = group.spread(figure)
        if found is None:
            return ""
        if digits == 1 and not found.sd:  # a count that is the same in all
            return f"{found.mean:,.0f}"
        return f"{found.mean:.{digits}f}" + ("" if found.sd is None else f" ± {found.sd:.{digits}f}")

    sent = [group.spread(key) for key in ("bytes_down", "bytes_up")]
    return {
        "method": group.method, "settings": group.settings, "seeds": len(group.runs),
        "metric": group.metric, "score": spread("score", 4), "worst": spread("worst_decile", 4),
        "ari": spread("ari", 3), "clusters": spread("found", 1), "seconds": spread("seconds", 2),
        "sent": in_bytes(sum(s.mean for s in sent if s is not None)),
    }  # fmt: skip


@cache
def _templates() -> Environment:
    loader = PackageLoader("coterie.report")
    return Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=_shown)


def _shown(value: Any) -> Any:
    """What a template shows of a value: text without what steers a terminal, of which names may be full."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


@cache
def _text(name: str) -> str:
    return (files("coterie.report") / "templates" / name).read_text(encoding="utf-8")
