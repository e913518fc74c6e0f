"""The commands `fit` and `predict`: one table, analysed, and rows predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer

from coterie.cli import show as display
from coterie.cli.options import Device, Json
from coterie.tables.target import Kind

SHOWN = 10  # rows of predictions that are printed


def fit(
    table: Annotated[Path, typer.Argument(help="A .csv (also .csv.gz, .csv.xz) or .parquet file with a header.")],
    client: Annotated[str, typer.Option(help="The column that says whose a row is.")],
    target: Annotated[str, typer.Option(help="The column to predict.")],
    method: Annotated[str, typer.Option(help="auto, or a method as `coterie list` names it.")] = "auto",
    k: Annotated[str, typer.Option("--k", help="The number of groups, or auto.")] = "auto",
    model: Annotated[str, typer.Option(help="linear or mlp.")] = "linear",
    kind: Annotated[str, typer.Option(help="What the target is: auto, number, log or classes.")] = "auto",
    time: Annotated[str | None, typer.Option(help="A column that orders rows: the last ones test.")] = None,
    about: Annotated[Path | None, typer.Option(help="A table of attributes, one row per client.")] = None,
    out: Annotated[Path | None, typer.Option(help="The folder to write; default runs/TABLE.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is in the folder.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of all draws.")] = 0,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Find out how the clients of a table differ, whether they fall into groups, and train models for them."""
    from coterie.analysis.folder import new_folder, summary, write_folder
    from coterie.analysis.table_fit import fit_table
    from coterie.tables.reading import read_table

    where = out or Path("runs") / table.name.split(".")[0]
    with new_folder(where, overwrite) as folder:
        found = fit_table(
            read_table(table),
            client,
            target,
            method=method,
            k=_number(k),
            model=model,
            kind=cast(Kind, kind),  # it is checked there
            time=time,
            about=None if about is None else read_table(about),
            seed=seed,
            device=device,
            out=folder,
        )
        write_folder(found, folder)
    display.emit(summary(found), as_json, lambda: display.text(f"{found}\n\nreport: {where / 'report.md'}"))


def predict(
    folder: Annotated[Path, typer.Argument(help="A folder that `coterie fit` has written.")],
    table: Annotated[Path, typer.Argument(help="Rows to predict, as `coterie fit` reads them.")],
    out: Annotated[Path | None, typer.Option(help="Write the predictions: a .csv.")] = None,
    as_json: Json = False,
) -> None:
    """Predict the rows of a table: known clients by their own models, others by those of all groups, mixed."""
    from coterie.analysis.folder import predict_table, read_preparation
    from coterie.storage.snapshot import write_text
    from coterie.tables.reading import read_table

    rows = read_table(table)
    found: Any = predict_table(folder, rows)
    notes = "".join(f"note: {note}\n" for note in read_preparation(folder)[0].filled_in(rows))
    if out:
        write_text(out, found.to_csv(index=False))
    new = int((~found["known"]).sum())
    strangers = f" ({new:,} of clients that were not there)" if new else ""
    told = f"{len(found):,} rows predicted{strangers}{f': {out}' if out else ''}"
    if out is None:
        more = f"… and {len(found) - SHOWN:,} more: --out FILE.csv writes them all\n" if len(found) > SHOWN else ""
        told = f"{found.head(SHOWN).to_string(index=False)}\n{more}{told}"
    display.emit(found.to_dict("records"), as_json, lambda: display.text(notes + told))


def _number(k: str) -> int | Literal["auto"]:
    if k == "auto":
        return "auto"
    if not k.isdecimal() or int(k) < 1:
        raise ValueError(f"--k must be auto or a whole number of at least 1, got '{k}'")
    return int(k)
