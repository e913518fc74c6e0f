"""A lock on a file that whoever holds it gives back by ending, however that comes about."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


class Held(Exception):
    """Another process holds the lock."""


@contextmanager
def alone(path: Path, patience: float) -> Iterator[None]:
    """Hold the lock on a file, which is made where it is not there.

    Args:
        path: The file.
        patience: Seconds to wait for another holder.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "lock"
        >>> with alone(path, 0), alone(path, 0):
        ...     pass
        Traceback (most recent call last):
        coterie.flower.lock.Held: ...

    Raises:
        Held: It is held by another all that time.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        end = time.monotonic() + patience
        while not _taken(file):
            if time.monotonic() >= end:
                raise Held(f"{path} is held by another process")
            time.sleep(0.2)
        yield


def _taken(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
