"""A lock on a file that whoever holds it gives back by ending, however that comes about."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # on Windows, where nothing is locked
    fcntl = None


class Held(OSError):
    """Another process holds the lock."""


@contextmanager
def alone(path: Path, patience: float) -> Iterator[None]:
    """Hold the lock on a file, which is made for that, and removed at the end.

    Args:
        path: The file.
        patience: Seconds to wait for another holder.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "lock"
        >>> with alone(path, 0), alone(path, 0):
        ...     pass
        Traceback (most recent call last):
        coterie.storage.lock.Held: ...

    Raises:
        Held: It is held by another all that time.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + patience
    while (held := _taken(path)) is None:
        if time.monotonic() >= end:
            raise Held(f"{path} is held by another process")
        time.sleep(0.2)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # before it is given back: whoever waits for this file then makes another
        os.close(held)


def _taken(path: Path) -> int | None:
    """A descriptor of the file, locked; None where another process has it."""
    while True:
        found = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        try:
            if fcntl is not None:
                fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(found)
            return None
        if path.exists() and os.path.samestat(os.fstat(found), path.stat()):
            return found
        os.close(found)  # its holder has removed it meanwhile
