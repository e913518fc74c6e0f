"""The command `coterie flower`: run a Flower federation on this machine."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from coterie.cli import show as display
from coterie.cli.files import read_toml
from coterie.runs.progress import Progress

if TYPE_CHECKING:
    from coterie.flower.lab import Lab

app = typer.Typer(
    help="A Flower federation on this machine, over TLS, with a key for every node.", no_args_is_help=True
)

Folder = Annotated[Path, typer.Option("--dir", help="Folder of its credentials, logs and state.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
HERE = Path("flower-lab")


@app.command()
def up(
    nodes: Annotated[int, typer.Option("--nodes", "-n", min=1, max=64, help="Number of SuperNodes.")] = 3,
    workers: Annotated[bool, typer.Option(help="Whether each node keeps torch and its data loaded.")] = True,
    folder: Folder = HERE,
    as_json: Json = False,
) -> None:
    """Start a SuperLink and some SuperNodes on loopback, and keep them running."""
    lab = _lab(folder)
    lab.prepare(nodes, workers=workers)
    lab.start()
    _wait(lab, nodes)
    display.emit(_rows(lab), as_json, lambda: _print(lab))


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Folder to write to; created if missing.")],
) -> None:
    """Write a small app that works; replace its data.py to use your own data."""
    check_installed()
    from coterie.flower.template import APP, write_app

    write_app(folder)
    print(f"wrote {', '.join(APP)} to {folder}")
    print("fill in federation() in data.py: it returns what a node has. Then:")
    print(f"  coterie flower up -n 3 && coterie flower run {folder / 'ifca.toml'} && coterie flower down")


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="A TOML file with [algorithm], [task] and [run], beside data.py.")],
    out: Annotated[Path | None, typer.Option(help="The run folder; default runs/CONFIG.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint.")] = False,
    folder: Folder = HERE,
    as_json: Json = False,
) -> None:
    """Train what a configuration describes, on the nodes of the federation."""
    lab = _lab(folder)
    from coterie.flower.lab import NAME
    from coterie.flower.server_app import parse
    from coterie.flower.submit import check_app, submit, watch

    check_app(config)
    asked = parse(read_toml(config))  # report a mistake now, not from a remote process
    where = out or Path("runs") / config.stem
    if (where / "config.toml").exists() and not resume:
        raise ValueError(f"{where} already holds a run; resume it with --resume, or choose another folder")
    number = submit(lab, config, where, resume=resume)
    name, metric = type(asked.algorithm).__name__, asked.task.metric
    try:
        with Progress(name, asked.run["rounds"], metric, "flower") as progress:
            watch(lab, number, where, _shower(progress))
    except KeyboardInterrupt:
        lab.flwr("stop", str(number), NAME)
        sys.stderr.write(f"stopped run {number}; go on with --resume\n")
        raise
    display.emit(display.summary(where), as_json, lambda: display.show(where))


@app.command()
def identity(
    site: Annotated[str, typer.Argument(help="The node's name, as in its node config.")],
    memory: Annotated[Path, typer.Option(help="The node's `memory` folder, as in its node config.")],
) -> None:
    """Print the public key by which other nodes know this one in secure sums; for the file `peers` of their configs."""
    check_installed()
    from coterie.flower.memory import Memory
    from coterie.flower.policy import identity_of

    print(identity_of(Memory(memory, site)).public.hex())


@app.command()
def status(folder: Folder = HERE, as_json: Json = False) -> None:
    """Show which processes are running, and which nodes are online."""
    lab = _lab(folder)
    display.emit(_rows(lab), as_json, lambda: _print(lab))


@app.command()
def down(folder: Folder = HERE) -> None:
    """Stop the processes that `up` started, and no others; credentials and the database are kept."""
    stopped = _lab(folder).stop()
    print(f"stopped the federation in {folder}" if stopped else f"no federation is running in {folder}")


def _shower(progress: Progress) -> Callable[[dict[str, Any]], None]:
    """Return a function that prints the events of a run: log messages about nodes, and the progress of rounds."""

    def show(event: dict[str, Any]) -> None:
        if event["event"] == "log":
            with progress.aside():
                sys.stderr.write(f"{event['message']}\n")
        elif event["event"] == "round":
            progress(event)

    return show


def check_installed() -> None:
    """Raise a ValueError if Flower is not installed."""
    if not (importlib.util.find_spec("flwr") and importlib.util.find_spec("cryptography")):
        raise ValueError("this needs Flower: pip install 'coterie[flower]'")


def _lab(folder: Path) -> Lab:
    check_installed()
    from coterie.flower.lab import Lab

    return Lab(folder.resolve())


def _wait(lab: Lab, nodes: int) -> None:
    """Wait until all nodes are online, and show how many are."""
    with Console(stderr=True).status("starting the SuperLink") as line:
        lab.wait(lambda online: line.update(f"{online} of {nodes} nodes online"))


def _rows(lab: Lab) -> list[dict[str, Any]]:
    online = lab.online()
    return [
        {"process": name, "pid": process["pid"], "starts": process["starts"], "online": name in online or None}
        for name, process in lab.processes().items()
    ]


def _print(lab: Lab) -> None:
    rows = _rows(lab)
    if not rows:
        print(f"no federation is running in {lab.folder}")
        return
    wide = max(len(row["process"]) for row in rows)
    for row in rows:
        state = "online" if row["online"] else ("running" if row["pid"] else "starting again")
        print(f"{row['process']:<{wide}} {state:<15} pid {row['pid'] or '-'}, started {row['starts']} times")
    print(f"SuperLink at {lab.address}; logs in {lab.folder / 'logs'}")
    where = "" if lab.folder == HERE.resolve() else f" --dir {lab.folder}"
    print(f"train on it with: coterie flower run examples/flower/ifca.toml{where}")
    print(f"stop it with: coterie flower down{where}")
    print("anyone who can reach that port on this machine can submit apps, which run as you: Flower asks for no login")
