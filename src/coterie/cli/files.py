"""The files that the command line reads and writes."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from coterie.storage import reading


def read_toml(path: Path) -> dict[str, Any]:
    """Read a configuration.

    Args:
        path: A TOML file.
    """
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    text = reading.read_text(path)
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None


def write_json(path: Path, content: Any) -> None:
    """Write a result atomically.

    Args:
        path: The file.
        content: Anything that JSON can represent.
    """
    from coterie.storage.snapshot import write_text

    write_text(path, json.dumps(content, indent=1) + "\n")
