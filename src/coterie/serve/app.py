"""The pages of the server. What they show of a run is the report's: there is one renderer for both."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import re
import time
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote_to_bytes, urlencode

from jinja2 import Environment, PackageLoader
from starlette.applications import Starlette
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from coterie.report import body, page
from coterie.runs.view import View
from coterie.serve.access import Guard, quoted, readable, run_folder
from coterie.serve.index import COLUMNS, PATIENCE, Index, Row, ago, local_time, ordered, reason
from coterie.serve.stamps import Stamps, obstacle
from coterie.serve.stream import changes

FRESH = 1.0  # seconds for which the list is not made again
SHOWN = 50  # runs on a page of the list
KEPT = 100  # pages of the list that are kept until it is made again
COMPARED = 50  # runs at most beside each other

MODEL = re.compile(r"models/(cluster-[0-9]{1,7}\.safetensors)")
SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)
FIRST_DOWN = ("changed", "score", "progress")  # columns that begin with their largest value


def application(
    root: Path, *, host: str, port: int, token: str | None = None, ending: Callable[[], bool] = lambda: False
) -> ASGIApp:
    """Make the server's application.

    Args:
        root: The folder that holds run folders.
        host: What the server binds to.
        port: The same.
        token: What requests must show, None if all may read.
        ending: Whether the server is being stopped.
    """
    register_url_convertor("name", _Name())
    site = Site(root.resolve(), ending)
    routes = [Route("/", site.all_runs), Route("/compare", site.compare), Route("/runs/{rest:name}", site.run)]
    return Guard(Starlette(routes=routes), host=host, port=port, token=token)


class _Name(PathConvertor):
    """The rest of an address, with any characters: of Starlette's own, a line break is no part."""

    regex = r"[\s\S]*"


class _Listing(NamedTuple):
    """The list as it was at a time, and pages of it that were asked for."""

    rows: list[Row]
    now: float
    pages: dict[_Asked, Response]


class _Asked(NamedTuple):
    """Which part of the list is asked for, and in what order."""

    words: str
    column: str
    descending: bool
    number: int

    @classmethod
    def of(cls, request: Request) -> _Asked:
        """What a request asks for; what makes no sense counts as not given."""
        given = request.query_params
        column = given.get("sort", "")
        column = column if column in COLUMNS else "changed"
        order = given.get("order")
        descending = order == "down" if order in ("up", "down") else column in FIRST_DOWN
        number = given.get("page", "")
        words = given.get("q", "")[:200].strip()
        return cls(words, column, descending, int(number) if re.fullmatch("[0-9]{1,6}", number) else 1)

    def address(self, **other: Any) -> str:
        """The address of the list with some of this changed."""
        asked = self._replace(**other)
        order = "down" if asked.descending else "up"
        parts = {"q": asked.words, "sort": asked.column, "order": order, "page": asked.number}
        return "/?" + urlencode({name: value for name, value in parts.items() if value != ""}, errors="replace")


class Site:
    """Answers the requests for one folder."""

    def __init__(self, root: Path, ending: Callable[[], bool]) -> None:
        self.root, self.ending = root, ending
        self.index = Index(root)
        self._listing = _Listing([], 0.0, {})
        self._turn = asyncio.Lock()
        self._reading: asyncio.Task[None] | None = None

    async def all_runs(self, request: Request) -> Response:
        """The list of runs. It is read, and each page of it made, once for all who wait for it."""
        asked = _Asked.of(request)
        async with self._turn:
            if time.time() - self._listing.now > FRESH:
                rows = await asyncio.to_thread(self.index.rows, PATIENCE)
                self._listing = _Listing(rows, time.time(), {})
                if any(row.unread for row in rows) and (self._reading is None or self._reading.done()):
                    self._reading = asyncio.create_task(self._read_on())
            pages = self._listing.pages
            if asked not in pages:
                if len(pages) >= KEPT:
                    pages.clear()
                pages[asked] = await asyncio.to_thread(_list_page, self._listing, asked)
            return pages[asked]

    async def _read_on(self) -> None:
        """Read runs that are not read yet, a few at a time: who asks for the list meanwhile need not wait for all."""
        while not self.ending() and any(row.unread for row in await asyncio.to_thread(self.index.rows, PATIENCE)):
            await asyncio.sleep(0)

    async def run(self, request: Request) -> Response:
        """The live page of a run, or a part of it: the end of the address says which, unless a run is named so."""
        rest = os.fsdecode(unquote_to_bytes(request.scope["raw_path"])).removeprefix("/runs/")
        for count in range(3):
            name, *parts = rest.rsplit("/", count)
            if (folder := self._folder(name)) is not None and len(parts) == count:
                return await self._part(request, name, folder, "/".join(parts))
        return _nothing()

    async def _part(self, request: Request, name: str, folder: Path, part: str) -> Response:
        if model := MODEL.fullmatch(part):
            return _model(folder, model[1])
        if part == "events":
            return self._events(request, folder)
        made = {"": self._live, "body": self._body, "report.html": _report}.get(part)
        return _nothing() if made is None else await asyncio.to_thread(made, name, folder)

    def _folder(self, name: str) -> Path | None:
        """The folder of a run, None if there is no such run."""
        folder = run_folder(self.root, name)
        return folder if folder is not None and Stamps.of(folder).of_a_run else None

    def _live(self, name: str, folder: Path) -> Response:
        seen = Stamps.of(folder).version  # first: a run goes on while it is read
        frame = _template("run.html").render(
            name=readable(name), address=f"/runs/{quoted(name)}", seen=seen, content=self._content(name, folder)
        )
        return _document(f"{readable(name)} – coterie", frame, "live.js")

    def _body(self, name: str, folder: Path) -> Response:
        return HTMLResponse(self._content(name, folder))

    def _content(self, name: str, folder: Path) -> str:
        """What changes on the page of a run while it goes on."""
        row, now = self.index.row(name), time.time()
        told, why = _told([folder])
        if row.damage is not None and not why:  # enough can be read to show something
            why = [row.damage]
        models = sorted((folder / "final").glob("cluster-*.safetensors"), key=lambda f: (len(f.name), f.name))
        names = [file.name for file in models if MODEL.fullmatch(f"models/{file.name}")]
        return _template("body.html").render(
            status=row.status(now), row=row, told=told, why=why, address=f"/runs/{quoted(name)}", models=names
        )

    def _events(self, request: Request, folder: Path) -> Response:
        kind = "text/event-stream"
        if request.method == "HEAD":
            return Response(media_type=kind)
        seen = request.headers.get("last-event-id") or request.query_params.get("seen", "")
        return StreamingResponse(changes(folder, seen, self.ending), media_type=kind)

    async def compare(self, request: Request) -> Response:
        """Several runs beside each other."""
        asked = parse_qsl(request.scope["query_string"].decode("latin-1"), errors="surrogateescape")
        names = list(dict.fromkeys(value for name, value in asked if name == "run"))
        if not 1 <= len(names) <= COMPARED:
            return PlainTextResponse(f"400: choose 1 to {COMPARED} runs to compare\n", 400)
        folders = [self._folder(name) or self._folder(os.fsdecode(unquote_to_bytes(name))) for name in names]
        found = [folder for folder in folders if folder is not None]
        if len(found) < len(folders):
            return _nothing()
        return await asyncio.to_thread(self._compared, found)

    def _compared(self, folders: list[Path]) -> Response:
        told, why = _told(folders)
        chosen = [(quoted(name), readable(name)) for name in (str(f.relative_to(self.root)) for f in folders)]
        frame = _template("compare.html").render(told=told, why=why, chosen=chosen)
        return _document("Compared runs – coterie", frame)


def _told(folders: list[Path]) -> tuple[str, list[str]]:
    """What the report says of runs, and for each that cannot be read why; no content of a file takes the page down."""
    told: list[tuple[View, str]] = []
    why: list[str] = []
    for folder in folders:  # each by itself first: what is wrong with one must not hide the others
        try:
            if (stands := obstacle(folder)) is not None:
                raise ValueError(stands)
            view = View.of(folder)
            told.append((view, body([view])))
        except Exception as error:  # files of any content raise anything
            why.append(f"{readable(folder.name, 80)}: {reason(error, folder)}")
    if len(told) < 2:
        return "".join(text for _, text in told), why
    try:
        return body([view for view, _ in told]), why
    except Exception as error:  # each can be shown, but not together
        return "", [*why, reason(error, folders[0])]


def _list_page(listing: _Listing, asked: _Asked) -> Response:
    rows = ordered(listing.rows, asked.words.lower().split(), asked.column, asked.descending, listing.now)
    pages = max(1, -(-len(rows) // SHOWN))
    asked = asked._replace(number=min(max(asked.number, 1), pages))
    shown = [_cells(row, listing.now) for row in rows[(asked.number - 1) * SHOWN :][:SHOWN]]
    frame = _template("list.html").render(
        rows=shown, asked=asked, found=len(rows), all=len(listing.rows), pages=pages, heads=_heads(asked)
    )
    return _document("Runs – coterie", frame, "list.js")


def _heads(asked: _Asked) -> list[dict[str, str]]:
    """The heads of the columns, each with the address that sorts by it, or turns its order round."""
    names = {"name": "run", "score": "best score", "changed": "last changed"}
    heads = []
    for column in COLUMNS:
        chosen = column == asked.column
        down = not asked.descending if chosen else column in FIRST_DOWN
        order = ("descending" if asked.descending else "ascending") if chosen else ""
        address = asked.address(column=column, descending=down, number=1)
        heads.append({"name": names.get(column, column), "address": address, "order": order})
    return heads


def _cells(row: Row, now: float) -> dict[str, Any]:
    """A row as it is shown."""
    return {
        "name": readable(row.name, 120),
        "key": quoted(row.name),
        "status": row.status(now),
        "damage": row.damage,
        "progress": "" if row.damage is not None or row.unread else f"{row.done} of {row.rounds}",
        "percent": round(100 * row.share),
        "score": "" if row.best is None else f"{row.best:.4g}",
        "metric": row.metric,
        "method": readable(row.method, 60),
        "data": readable(row.data, 60),
        "ago": ago(row.changed, now),
        "time": local_time(row.changed),
    }


def _report(name: str, folder: Path) -> Response:
    """The report of a run as a file to keep."""
    told, why = _told([folder])
    if why:
        return PlainTextResponse(f"409: the run cannot be read: {why[0]}\n", 409)
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:100].strip("-.") or "run"
    headers = {"Content-Disposition": f'attachment; filename="{safe}.html"'}
    return HTMLResponse(page(readable(name), told).encode("utf-8", "backslashreplace"), headers=headers)


def _model(folder: Path, name: str) -> Response:
    file = folder / "final" / name
    if obstacle(folder) is not None or file.is_symlink() or not file.is_file():
        return _nothing()
    return FileResponse(file, media_type="application/octet-stream", filename=name)


def _nothing() -> Response:
    return PlainTextResponse("404: there is no such run here, or it has no such file\n", 404)


def _document(title: str, content: str, script: str | None = None) -> Response:
    """A page. Its policy lets run the scripts that are written here, by their hashes, and none that a run brings in."""
    own = "" if script is None else _text("morph.js") + _text(script)
    policy = (
        f"default-src 'none'; script-src {_hashes(own)}; style-src 'unsafe-inline'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    )
    text = page(title, content, script=own, head=_text("head.html"))
    return HTMLResponse(text.encode("utf-8", "backslashreplace"), headers={"Content-Security-Policy": policy})


@cache
def _hashes(script: str) -> str:
    """The hashes of the scripts of an empty page."""
    found = SCRIPT.findall(page("", "", script=script))
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in found)


@cache
def _environment() -> Environment:
    return Environment(loader=PackageLoader("coterie.serve"), autoescape=True, trim_blocks=True, lstrip_blocks=True)


def _template(name: str) -> Any:
    return _environment().get_template(name)


@cache
def _text(name: str) -> str:
    return (files("coterie.serve") / "templates" / name).read_text(encoding="utf-8")
