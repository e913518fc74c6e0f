"""The parts of an experiment that are done, kept while the others are not."""

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
    """Results by name in a JSON file, so that an experiment that was broken off goes on where it was.

    Args:
        path: The file. It is not there before the first entry, nor after `close`.
        spec: What the entries depend on; a file made for another is not used.
        device: What they are made on. It may be another than before: the result names all.

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
        told = json.loads(path.read_text(encoding="utf-8"))
        if told["spec"] == self.spec:
            self.entries = told["entries"]
            log.warning("%s: %d parts are there already", path, len(self.entries))
        else:
            path.rename(aside := path.with_suffix(".old.json"))
            log.warning("%s was made with other settings; it is now %s", path, aside)

    def entry(self, name: str, make: Callable[[], Any]) -> Any:
        """What is written under a name, made now if nothing is."""
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
        """The commits that the entries were made with."""
        return ", ".join(dict.fromkeys(e["commit"] for e in self.entries.values())) or commit()

    @property
    def devices(self) -> str:
        """What the entries were made on."""
        return ", ".join(dict.fromkeys(e["device"] for e in self.entries.values())) or self.device

    @property
    def seconds(self) -> float:
        """What the entries took."""
        return sum(e["seconds"] for e in self.entries.values())

    def close(self) -> None:
        """Remove the file: the whole result is written."""
        self.path.unlink(missing_ok=True)


def commit() -> str:
    """The commit of this checkout, as git knows it; COTERIE_COMMIT comes first, for copies that git knows wrongly."""
    if told := os.environ.get("COTERIE_COMMIT"):
        return told
    ask = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        told = subprocess.run(ask, capture_output=True, text=True).stdout.strip()
    except OSError:  # there is no git here
        told = ""
    return told or "unknown"
