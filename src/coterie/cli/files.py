"""The files that the command line reads and writes."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

APP = ("pyproject.toml", "data.py", "ifca.toml")  # of examples/flower


def read_toml(path: Path) -> dict[str, Any]:
    """A configuration."""
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from error


def write_json(path: Path, content: Any) -> None:
    """A result."""
    from coterie.snapshot import write_text

    write_text(path, json.dumps(content, indent=1) + "\n")


def write_app(folder: Path) -> None:
    """A copy of the example of an app for Flower; nothing that is there is overwritten."""
    from coterie.snapshot import write_text

    for name in APP:
        if (folder / name).exists():
            raise ValueError(f"{folder / name} is there already; choose another folder")
    package = Path(__file__).resolve().parent.parent
    checkout = package.parent.parent / "examples" / "flower"
    source = checkout if checkout.is_dir() else package / "_flower_app"
    for name in APP:
        write_text(folder / name, (source / name).read_text(encoding="utf-8"))
