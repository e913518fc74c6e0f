"""A file that stores finished parts of an experiment until all parts are finished."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coterie.storage.snapshot import write_text

log = logging.getLogger("coterie")


class Notebook:
    """Results by name in a JSON file, so that an interrupted experiment can be continued.

    Args:
        path: The file. It exists from the first entry until `close`.
        spec: What the entries depend on; a file that was made for another `spec` is not used.
        device: The device that new entries are computed on. It may differ from that of earlier entries; the result
            names all devices.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "squares.part.json"
        >>> Notebook(path, {}, "cpu").entry("3", lambda: 3 * 3)
        9
        >>> Notebook(path, {}, "cpu").entry("3", lambda: 1 / 0)
        9
    """

    def __init__(self, path: Path, spec: dict[str, Any], device: str) -> None:
        self.path, self.spec, self.device = path, json.loads(json.dumps(spec)), device
        self.entries: dict[str, dict[str, Any]] = {}
        if not path.exists():
            return
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["spec"] == self.spec:
            self.entries = stored["entries"]
            log.warning("%s: %d parts are there already", path, len(self.entries))
        else:
            path.rename(aside := path.with_suffix(".old.json"))
            log.warning("%s was made with other settings; it is now %s", path, aside)

    def entry(self, name: str, make: Callable[[], Any]) -> Any:
        """Return the value that is stored under a name; compute and store it first if there is none.

        Args:
            name: Name of the entry.
            make: Computes the value, which must be valid JSON.
        """
        if name not in self.entries:
            begin, made_with = time.monotonic(), commit()
            self.entries[name] = {
                "value": make(), "commit": made_with, "device": self.device, "seconds": time.monotonic() - begin,
            }  # fmt: skip
            write_text(self.path, json.dumps({"spec": self.spec, "entries": self.entries}) + "\n")
            log.warning("%s: %.1f s", name, self.entries[name]["seconds"])
        return self.entries[name]["value"]

    @property
    def commits(self) -> str:
        """The commits that the entries were computed with."""
        return ", ".join(dict.fromkeys(e["commit"] for e in self.entries.values())) or commit()

    @property
    def devices(self) -> str:
        """The devices that the entries were computed on."""
        return ", ".join(dict.fromkeys(e["device"] for e in self.entries.values())) or self.device

    @property
    def seconds(self) -> float:
        """The time that the entries took."""
        return sum(e["seconds"] for e in self.entries.values())

    def close(self) -> None:
        """Remove the file, once the whole result has been written."""
        self.path.unlink(missing_ok=True)


def commit() -> str:
    """Return the commit of this checkout from git; COTERIE_COMMIT has priority, for copies where git would be wrong."""
    if given := os.environ.get("COTERIE_COMMIT"):
        return given
    ask = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        found = subprocess.run(ask, capture_output=True, text=True).stdout.strip()
    except OSError:  # git is not installed
        found = ""
    return found or "unknown"
