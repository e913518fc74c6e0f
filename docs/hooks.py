"""What mkdocs writes into pages while it builds them: tables and references that follow from the registry."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

from coterie.core.method import Needs
from coterie.core.registry import known

METHODS = Path(__file__).parent / "methods"
PAPER = re.compile(r"^(\S.*)\n    (\S.*)$", re.MULTILINE)  # a title, then an indented line of authors and venue
SETTING = re.compile(r"^    (\w+): (.*(?:\n     .*)*)", re.MULTILINE)  # in the section "Args:" of a docstring
ENDS = {"low": "at least", "high": "at most"}
OWN_PAGE = re.compile(r"^methods: \[(.*)\]$", re.MULTILINE)  # in a page's front matter: the methods that it describes


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the markers of a page by what they stand for."""
    for marker, make in (("<!-- methods table -->", methods_table), ("<!-- methods reference -->", methods_reference)):
        if marker in markdown:
            markdown = markdown.replace(marker, make())
    return markdown


def methods_table() -> str:
    """Every method of the library, by its class and module alone; installed packages are left out."""
    pages = own_pages()
    rows = ["| method | what it does | paper | needs | the server sees |", "|---|---|---|---|---|"]
    for name, cls in methods().items():
        title = f"[`{cls.__name__}`]({pages[name]})<br>`{name}`"
        cells = (title, _first_line(cls), _papers(cls), _needs(cls.needs), _seen(cls.needs))
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def methods_reference() -> str:
    """Every method's class, and a table of all its settings: those of the parts that it is built from, too."""
    return "\n\n".join(
        f"::: {cls.__module__}.{cls.__qualname__}\n    options:\n      members: false\n"
        "      show_signature: false\n      separate_signature: false\n      show_docstring_parameters: false\n\n"
        + _settings_table(cls)
        for cls in methods().values()
    )


def methods() -> dict[str, type[Any]]:
    """The library's own methods by name."""
    return {name: cls for name, cls in known("method").items() if cls.__module__.startswith("coterie.")}


def own_pages() -> dict[str, str]:
    """The page of every method, by the pages' front matter."""
    pages = {}
    for page in sorted(METHODS.glob("*.md")):
        for listed in OWN_PAGE.findall(page.read_text(encoding="utf-8")):
            pages |= {name.strip(): page.name for name in listed.split(",")}
    if missing := methods().keys() - pages.keys():
        raise ValueError(f"no page in {METHODS} has these methods in its front matter: {', '.join(sorted(missing))}")
    return pages


def _first_line(cls: type) -> str:
    return (cls.__doc__ or "").strip().splitlines()[0]


def _papers(cls: type) -> str:
    found = PAPER.findall(inspect.getmodule(cls).__doc__ or "")  # pyright: ignore[reportOptionalMemberAccess]
    return "<br>".join(f"*{title.strip()}*. {who}" for title, who in found) or "none: a baseline"


def _needs(needs: Needs) -> str:
    wanted = [f"`Task.{needs.task}`" if needs.task else "any task with a loss and a target"]
    if needs.linear:
        wanted.append("a model that is linear in its parameters")
    if needs.points:
        wanted.append("no labels: it groups points")
    return "; ".join(wanted)


def _seen(needs: Needs) -> str:
    return "single clients' replies (`gather`)" if needs.gather else "sums by cluster (`combine`)"


def _settings_table(cls: type) -> str:
    rows, told = ["| setting | default | meaning |", "|---|---|---|"], _settings(cls)
    for f in dataclasses.fields(cls):
        default = "required" if f.default is dataclasses.MISSING else f"`{f.default!r}`"
        ends = [f"{word} {f.metadata[end]:g}" for end, word in ENDS.items() if f.metadata.get(end) is not None]
        meaning = " ".join([told[f.name], f"({', '.join(ends)})" if ends else ""]).strip()
        rows.append(f"| `{f.name}` | {default} | {meaning.replace('|', chr(92) + '|')} |")
    return "\n".join(rows)


def _settings(cls: type) -> dict[str, str]:
    """What the docstrings of a class and of those it inherits from say about settings."""
    found: dict[str, str] = {}
    for base in cls.__mro__:
        args = inspect.cleandoc(base.__dict__.get("__doc__") or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
        for name, text in SETTING.findall(args):
            found.setdefault(name, " ".join(text.split()))
    return found
