"""`coterie report`: run folders as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli import show as display


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders that contain some.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file, which must end in .html.")] = Path("report.html"),
) -> None:
    """Write one HTML file about a run, or about several beside each other: it can be mailed, and opens from disk."""
    from coterie.report import write

    write(runs, out)
    display.text(f"report: {out}")
