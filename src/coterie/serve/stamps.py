"""When the files of a run folder were last written, and whether they may be read at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import NamedTuple

from coterie.runs.folder import CONFIG, EVENTS, RESULT


class Stamp(NamedTuple):
    """What tells two versions of a file apart."""

    inode: int
    size: int
    changed: int  # in nanoseconds


class Stamps(NamedTuple):
    """The stamps of the files that a run is shown from; None for one that is not there."""

    config: Stamp | None
    events: Stamp | None
    result: Stamp | None

    @classmethod
    def of(cls, folder: str | Path) -> Stamps:
        """Look at a folder.

        Args:
            folder: Any folder.
        """
        return cls(*(_stamp(f"{folder}/{name}") for name in (CONFIG, EVENTS, RESULT)))

    @property
    def of_a_run(self) -> bool:
        """Whether it is, or should be, a run folder."""
        return self.config is not None or self.events is not None

    @property
    def changed(self) -> float:
        """When the last of the files was written, in seconds since 1970."""
        return max((stamp.changed for stamp in self if stamp is not None), default=0) / 1e9

    @property
    def version(self) -> str:
        """One word for this version of a run."""
        return "-".join("0" if stamp is None else f"{stamp.inode:x}.{stamp.size:x}.{stamp.changed:x}" for stamp in self)


def obstacle(folder: Path) -> str | None:
    """Why the files of a run folder may not be read: links lead out, and pipes never end; None where they may.

    Args:
        folder: The run folder.
    """
    for name, is_right in (
        (CONFIG, stat.S_ISREG),
        (EVENTS, stat.S_ISREG),
        ("final", stat.S_ISDIR),
        (RESULT, stat.S_ISREG),
    ):
        try:
            mode = os.lstat(folder / name).st_mode
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if not is_right(mode):
            return f"{name} is a link, or no plain file or folder, and is not read"
    return None


def _stamp(path: str) -> Stamp | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return Stamp(found.st_ino, found.st_size, found.st_mtime_ns)
