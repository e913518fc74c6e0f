"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
