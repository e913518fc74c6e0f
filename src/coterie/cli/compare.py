"""The command `compare`: finished runs side by side, or the candidates of a configuration."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from coterie.cli import show as display
from coterie.cli.files import read_toml, write_json
from coterie.cli.options import Json
from coterie.engines import ranks


def compare(
    paths: Annotated[
        list[Path], typer.Argument(help="Run folders, sweeps, or other folders with runs in them; or one TOML file.")
    ],
    picture: Annotated[Path | None, typer.Option(help="Also draw the scores over the rounds of runs: a PNG.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="The folder of a TOML file's comparison; default runs/FILE-compare.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="How many runs of a TOML file at once; default one per core.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare runs side by side, or train the candidates of a TOML file on the same splits and recommend one.

    Runs that differ only in their seed are one row: mean ± standard deviation. The picture and the figures of a TOML
    file's candidates are written to a folder; run the same command again to go on with one that was stopped.
    """
    files = [path for path in paths if path.suffix == ".toml"]
    if not files:
        if out or jobs:
            raise ValueError("compare: --out and --jobs go with a TOML file; runs in folders are only read")
        _folders(paths, picture, as_json)
    elif len(paths) > 1:
        raise ValueError(f"compare: give run folders or one TOML file, got {', '.join(str(path) for path in paths)}")
    elif picture:
        raise ValueError("compare: --picture goes with run folders; the picture of a TOML file is written to --out")
    else:
        _file(files[0], out or Path("runs") / f"{files[0].stem}-compare", jobs, as_json)


def _folders(folders: list[Path], picture: Path | None, as_json: bool) -> None:
    """Compare finished runs."""
    from coterie.runs import plots
    from coterie.runs.compare import find_runs, group_runs, is_finished

    runs = find_runs(folders)
    for run in (run for run in runs if not is_finished(run)):
        sys.stderr.write(f"coterie: {run} is not finished and is left out\n")
    groups = group_runs(run for run in runs if is_finished(run))
    if not groups:
        raise ValueError("there is no finished run to compare")
    display.emit([group.as_dict() for group in groups], as_json, lambda: display.compare(groups))
    if picture:
        plots.comparison(picture, groups)


def _file(config: Path, out: Path, jobs: int | None, as_json: bool) -> None:
    """Compare the candidates of a configuration, and write what is found."""
    from coterie.runs.choosing import compare as compare_candidates
    from coterie.runs.config import build_comparison

    if ranks.world() > 1:
        raise ValueError("a comparison starts its own processes; start it without torchrun")
    asked = build_comparison(read_toml(config))
    try:
        found = compare_candidates(asked.candidates, asked.task, asked.federation, jobs=jobs, out=out, **asked.options)
    except KeyboardInterrupt:
        sys.stderr.write(f"interrupted; what is done is in {out}: to go on, run the same command again\n")
        raise
    content = found.as_dict()
    write_json(out / "comparison.json", content)
    found.plot(out / "comparison.png")
    display.emit(content, as_json, lambda: display.text(f"{found}\n\npicture: {out / 'comparison.png'}"))
