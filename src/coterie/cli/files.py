"""The files that the command line reads and writes."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any


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
    from coterie.storage.snapshot import write_text

    write_text(path, json.dumps(content, indent=1) + "\n")
