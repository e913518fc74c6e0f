"""The commands of `coterie_lab`, a separate package that is imported when one of them runs."""

from __future__ import annotations

import importlib
import json
import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli import bench_tables, flower
from coterie.cli import show as display
from coterie.cli.files import write_json
from coterie.cli.options import Device, Json
from coterie.engines import find_device


def lab(name: str) -> Any:
    """Import a module of `coterie_lab`.

    Args:
        name: Name of the module within the package.
    """
    return importlib.import_module(f"coterie_lab.{name}")


def reproduce(
    name: Annotated[str, typer.Argument(help="An experiment: see `coterie list`.")],
    quick: Annotated[bool, typer.Option("--quick", help="A small version that shows that it runs.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the result.")] = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Run the experiment behind a table or figure of a paper, and compare with the paper's numbers."""
    result = lab("reproduce").reproduce(name, quick=quick, out=out, device=device)
    display.emit(result, as_json, lambda: display.experiment(result))


bench = typer.Typer(help="Measure speed, as ratios in one run, scale, and what attacks cost.", no_args_is_help=True)


@bench.callback()
def _log_to_stderr(context: typer.Context) -> None:
    """Log each result to stderr as soon as it is measured, because a benchmark takes minutes."""
    log, handler = logging.getLogger("coterie"), logging.StreamHandler()
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    context.call_on_close(lambda: log.removeHandler(handler))


@bench.command()
def speed(
    quick: Annotated[bool, typer.Option("--quick", help="Few clients and smaller networks.")] = False,
    device: Device = "auto",
    only: Annotated[str, typer.Option(help="Time workloads with this in their name; others stay in the file.")] = "",
    out: Annotated[Path | None, typer.Option(help="Folder for speed-cpu.json or speed-cuda.json.")] = None,
    as_json: Json = False,
) -> None:
    """Time one round on every executor and in other libraries, against a plain loop and the arithmetic minimum."""
    rows = lab("bench.speed").measure(device, quick=quick, only=only)
    if out:
        file = out / f"speed-{find_device(device).type}.json"
        before = json.loads(file.read_text(encoding="utf-8")) if only and file.exists() else []
        works = dict.fromkeys(row["workload"] for row in [*before, *rows])  # in their old order
        timed = {row["workload"] for row in rows}
        write_json(file, [row for w in works for row in (rows if w in timed else before) if row["workload"] == w])
    display.emit(rows, as_json, lambda: bench_tables.speeds(rows))


@bench.command()
def scale(
    quick: Annotated[bool, typer.Option("--quick", help="Up to 10,000 clients.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for scale.json and the picture, scale.png.")] = None,
    as_json: Json = False,
) -> None:
    """Measure seconds per round and peak memory against the number of clients, from 100 to a million."""
    rows, slope = lab("bench.scale").measure(quick=quick), lab("bench.scale").slope
    if out:
        write_json(out / "scale.json", rows)
        lab("bench.pictures").scale(out / "scale.png", rows, slope(rows))
    display.emit(rows, as_json, lambda: bench_tables.scales(rows, slope(rows)))


@bench.command()
def secure(
    quick: Annotated[bool, typer.Option("--quick", help="Up to 20 clients.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for secure.json.")] = None,
    as_json: Json = False,
) -> None:
    """Measure seconds and bytes of one session of the secure sum, against what clients send in the open."""
    rows = lab("bench.secure").measure(quick=quick)
    if out:
        write_json(out / "secure.json", rows)
    display.emit(rows, as_json, lambda: bench_tables.sessions(rows))


@bench.command()
def attacks(
    quick: Annotated[bool, typer.Option("--quick", help="One attack, two rules, one seed.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for attacks.json and the picture, attacks.png.")] = None,
    as_json: Json = False,
) -> None:
    """Measure what hostile clients cost honest ones, by attack and robust mean."""
    rows = lab("bench.attacks").measure(quick=quick)
    if out:
        write_json(out / "attacks.json", rows)
        lab("bench.pictures").attacks(out / "attacks.png", rows)
    display.emit(rows, as_json, lambda: bench_tables.attacks(rows))


@bench.command(name="flower")
def bench_flower(
    quick: Annotated[bool, typer.Option("--quick", help="One node only.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for flower.json and the picture, flower.png.")] = None,
    as_json: Json = False,
) -> None:
    """Measure seconds per round of a real federation on this machine, and the bytes that it transfers."""
    flower.check_installed()
    rows = lab("bench.flower").measure(quick=quick)
    if out:
        write_json(out / "flower.json", rows)
        lab("bench.pictures").federations(out / "flower.png", rows)
    display.emit(rows, as_json, lambda: bench_tables.federations(rows))
