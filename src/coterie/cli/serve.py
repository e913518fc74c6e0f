"""The command `serve`: a web page on this machine that lists runs and watches them."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer

from coterie.cli import show as display


def serve(
    runs: Annotated[Path, typer.Argument(metavar="RUNS_DIR", help="A folder that holds run folders.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8750,
    host: Annotated[str, typer.Option(help="Any other than this machine's own needs a token.")] = "127.0.0.1",
    token: Annotated[
        str | None, typer.Option(envvar="COTERIE_TOKEN", help="What every request must show.", show_envvar=True)
    ] = None,
) -> None:
    """List runs on a web page, and watch them as they train. Run folders are only read."""
    try:
        import uvicorn

        from coterie.serve import access
        from coterie.serve.app import application
    except ImportError as error:
        raise ValueError(f"serve needs the package {error.name}: pip install coterie[serve]") from None

    access.check(host, token)
    if not runs.is_dir():
        raise ValueError(f"{runs} is not a folder")
    if (runs / "config.toml").is_file():
        raise ValueError(f"{runs} is a run folder itself; serve the folder that holds it")
    with _bound(host, port) as listening:
        bound = listening.getsockname()[1]
        server: uvicorn.Server  # the application asks it whether it ends
        app = application(runs, host=host, port=bound, token=token, ending=lambda: server.should_exit)
        quiet = {"log_level": "error", "access_log": False, "ws": "none", "server_header": False}
        server = uvicorn.Server(uvicorn.Config(app, **quiet))
        shown = f"[{host}]" if ":" in host else host
        display.text(f"http://{shown}:{bound}/{'' if token is None else '?token=' + quote(token)}   Ctrl-C ends it")
        server.run(sockets=[listening])


def _bound(host: str, port: int) -> socket.socket:
    """A socket that listens: before anything is said, so that what is said is true."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=512)
    except OSError as error:
        raise ValueError(f"serve: {host}, port {port} cannot be used: {error.strerror or error}") from None
