"""The command `sweep`: a configuration over a grid of settings and several seeds."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from coterie.cli import show as display
from coterie.cli.files import read_toml
from coterie.cli.options import Json
from coterie.cli.values import name_and_value, parse_values
from coterie.engines import ranks
from coterie.runs.compare import SEED, group_runs, is_finished
from coterie.runs.sweep import DESCRIPTION, Point, check, default_jobs, describe_sweep, execute, points_of
from coterie.storage.snapshot import discard


def sweep(
    config: Annotated[Path, typer.Argument(help="A TOML file, as for `coterie run`.")],
    grid: Annotated[
        list[str] | None, typer.Option("--grid", help="Values to try: algorithm.k=2,3,4. Repeatable: all combinations.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, counted up from the file's.")] = 3,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="How many runs at once; default one per core, or one on a GPU.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The sweep's folder; default runs/CONFIG-sweep.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete an existing sweep in the folder.")] = False,
    as_json: Json = False,
) -> None:
    """Train a configuration with every combination of settings and every seed, and compare the results.

    Run the same command again to go on with a sweep that was stopped. More seeds and values may be added.
    """
    if ranks.world() > 1:
        raise ValueError("a sweep starts its own processes; start it without torchrun")
    tables, axes = read_toml(config), _axes(grid or [])
    points = points_of(tables, axes, seeds)
    check(points)
    where = out or Path("runs") / f"{config.stem}-sweep"
    if overwrite and (where / DESCRIPTION).is_file():
        discard(where)
    describe_sweep(where, tables, {"file": config.name, "grid": grid or [], "seeds": seeds})
    failed = _execute(points, where, jobs or default_jobs(points))
    if groups := group_runs(where / point.name for point in points if is_finished(where / point.name)):
        display.emit([group.as_dict() for group in groups], as_json, lambda: display.compare(groups))
    if failed:
        listed = "".join(f"  {name}: {error}\n" for name, error in failed.items())
        sys.stderr.write(f"coterie: {len(failed)} of {len(points)} runs failed:\n{listed}")
        raise typer.Exit(1)


def _axes(grid: list[str]) -> dict[str, list[Any]]:
    """Read the values of every setting that is varied."""
    axes: dict[str, list[Any]] = {}
    for words in grid:
        name, text = name_and_value(words, "--grid", "algorithm.k=2,3,4")
        values = parse_values(text)
        if not values:
            raise ValueError(f"--grid {words}: a value is missing; give some with commas between them, such as 2,3,4")
        if name in axes:
            raise ValueError(f"--grid {name} is given twice; give all its values at once, with commas between them")
        if name == SEED:
            raise ValueError(f"--grid {name}: seeds are counted up from the file's {name}; say how many with --seeds")
        axes[name] = values
    return axes


def _execute(points: list[Point], folder: Path, jobs: int) -> dict[str, str]:
    """Do the runs that are not finished, under a bar that counts them; return the errors of those that failed."""
    left = [point for point in points if not is_finished(folder / point.name)]
    failed: dict[str, str] = {}
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("runs{task.fields[failed]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar, closing(execute(left, folder, jobs)) as outcomes:
        done = len(points) - len(left)
        task = bar.add_task(folder.name, total=len(points), completed=done, failed="")
        try:
            for point, error in outcomes:
                if error is not None:
                    failed[point.name] = error
                done += 1
                bar.update(task, completed=done, failed=f", [red]{len(failed)} failed[/red]" if failed else "")
        except KeyboardInterrupt:
            bar.console.print(f"interrupted after {done} of {len(points)} runs; to go on, run the same command again")
            raise
    return failed
