"""The command line. It starts runs; all other commands read run folders."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

import coterie
from coterie.cli import compare, flower, lab, report, serve, sweep, tables
from coterie.cli import demo as demo_module
from coterie.cli import show as display
from coterie.cli.files import read_toml
from coterie.cli.options import Device, Json
from coterie.cli.values import name_and_value, parse_value
from coterie.engines import ranks
from coterie.storage.names import printable

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(flower.app, name="flower")
app.add_typer(lab.bench, name="bench")
app.command()(lab.reproduce)
app.command()(sweep.sweep)
app.command()(serve.serve)
app.command()(compare.compare)
app.command()(report.report)
app.command()(tables.fit)
app.command()(tables.predict)

PATIENCE = 10  # seconds that a failed process waits for the first one to report the error


def _print_version(asked: bool) -> None:
    if asked:
        print(f"coterie {coterie.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Find the hidden groups of a federation's clients and train one model per group."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the runs, summary.json and the picture.")] = Path("demo"),
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Find four hidden groups among 80 clients; compare one model per group, one for all, and one per client."""
    rows = demo_module.run(out, device)
    display.emit(rows, as_json, lambda: display.demo(rows, out))


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="A TOML file with [algorithm], [task], [data] and [run].")],
    sets: Annotated[list[str] | None, typer.Option("--set", help="Change a value: algorithm.k=3. Repeatable.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    executor: Annotated[str | None, typer.Option(help="vectorised, vmap, sequential or sharded.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder; default runs/CONFIG.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete an existing run in the folder.")] = False,
    as_json: Json = False,
) -> None:
    """Train what a configuration describes."""
    from coterie.runs.config import build, set_value
    from coterie.runs.fit import fit

    tables = read_toml(config)
    for name, text in (name_and_value(words, "--set", "algorithm.k=3") for words in sets or []):
        set_value(tables, name, parse_value(text))
    where = out or Path("runs") / config.stem
    built = build(tables)
    options = {**built.run, **{n: v for n, v in (("device", device), ("executor", executor)) if v is not None}}
    if ranks.world() > 1:
        _share_out(options)
    keep = {"out": where, "resume": resume, "overwrite": overwrite}
    fit(built.algorithm, built.task, built.federation, callbacks=built.callbacks, **keep, **options)
    if ranks.rank() == 0:  # the process that writes the folder
        display.emit(display.summary(where), as_json, lambda: display.show(where))


@app.command()
def show(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    picture: Annotated[
        Path | None, typer.Option(help="Also draw its scores, its clusters and its tree: a .png, .jpg, .svg or .pdf.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Look again every second until the run is finished.")] = False,
    as_json: Json = False,
) -> None:
    """Show a run, finished or not: its clusters, its scores, its last rounds."""
    from coterie.runs import plots

    if picture:
        plots.picture_format(picture)  # before anything is printed
    if watch and as_json:
        raise ValueError("show takes --watch or --json, not both: what is watched is redrawn")
    draw = display.watch if watch else display.show
    display.emit(display.standing(run), as_json, lambda: draw(run))
    if picture:
        plots.run(picture, run)


@app.command()
def assign(
    run: Annotated[Path, typer.Argument(help="A finished run folder, or one that `coterie fit` has written.")],
    data: Annotated[
        Path, typer.Argument(help=".npz with x, y and optionally client; .csv with a header; or a table as of `fit`.")
    ],
    out: Annotated[Path | None, typer.Option(help="Also write the clusters: a .csv.")] = None,
    as_json: Json = False,
) -> None:
    """Assign new clients to clusters, or points if the run groups points."""
    from coterie.cli.assign import assign_file, write_csv

    found = assign_file(run, data)
    if out:
        write_csv(found, out)
    display.emit(found, as_json, lambda: display.assigned(found))


@app.command()
def diagnose(
    run: Annotated[Path, typer.Argument(help="A finished run folder.")], device: Device = "auto", as_json: Json = False
) -> None:
    """Check whether the data support the groups of a run: yes, no, or no verdict where figures do not decide."""
    from coterie.cli.diagnose import diagnose_folder

    found = diagnose_folder(run, device)
    answer = {"supported": found.supported, "groups": found.groups, "verdict": found.verdict}
    content = answer | {"figures": [f._asdict() for f in found.figures]}
    display.emit(content, as_json, lambda: display.text(str(found)))


@app.command(name="list")
def list_all(as_json: Json = False) -> None:
    """List the available methods, data sets, models and experiments."""
    from coterie.cli.inventory import inventory

    found = inventory(lab.lab("reproduce").experiments())
    display.emit(found, as_json, lambda: display.tables(found))


def main() -> None:
    """Run the command line. Bad input is reported in one line, with exit code 2."""
    with nullcontext() if ranks.rank() == 0 else _behind_the_first():
        try:
            app()
        except (ValueError, OSError) as error:
            sys.stderr.write(f"coterie: {printable(str(error))}\n")
            raise SystemExit(2) from None
        except KeyboardInterrupt:
            raise SystemExit(130) from None


@contextmanager
def _behind_the_first() -> Iterator[None]:
    """Suppress the output of this process of torchrun, so that messages of the first are not repeated N times."""
    errors = io.StringIO()
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(errors):
            yield
    except SystemExit as stop:
        if stop.code == 2:  # given time, the first fails for the same reason, and torchrun ends this one
            time.sleep(PATIENCE)
            sys.stderr.write(errors.getvalue())
        raise


def _share_out(options: dict[str, Any]) -> None:
    """Use the sharded executor, so that several processes divide the work of a run."""
    if options.setdefault("executor", "sharded") != "sharded":
        raise ValueError(
            f"torchrun started {ranks.world()} processes, which would all do the same work with executor "
            f"'{options['executor']}'; leave it out or use 'sharded'"
        )


if __name__ == "__main__":
    main()
