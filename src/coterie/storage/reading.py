"""The reader of files that strangers may have written, such as those of a run folder.

It opens plain files only, so that no pipe or device keeps it waiting, reads up to a size, and has values checked for
their depth and shape. Whatever else is there is one line that names the file.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from safetensors import SafetensorError

from coterie.storage.shapes import misfit, too_deep

if TYPE_CHECKING:
    from torch import Tensor

LARGEST = 2**30  # bytes of a file of text
LARGEST_TOML = 2**20  # of one that is parsed in Python, a megabyte in about a second
DOTS = 1000  # in a key of TOML: the time to parse one grows with the square of their number

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class Damaged(ValueError):
    """A file is truncated, or holds something else than it should."""


class Unreadable(OSError):
    """A file that may well be sound cannot be read, because of permissions or for another reason of the system's."""


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a plain file to be read. A link may lead to one.

    Args:
        path: The file.

    Raises:
        Damaged: It is not there, or is something else: a folder, a pipe, a device, a link that leads nowhere.
        Unreadable: The system does not let it be read, which says nothing about its content.

    Example:
        >>> with opened(Path("/dev/zero")):
        ...     pass
        Traceback (most recent call last):
        coterie.storage.reading.Damaged: /dev/zero is damaged: it is a device, not a file
    """
    try:
        with os.fdopen(_descriptor(path), "rb") as file:
            yield file
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            what = "a link that leads nowhere" if path.is_symlink() else "not there"
            raise Damaged(f"{path} is damaged: it is {what}") from None
        if error.errno == errno.ENXIO:
            raise Damaged(f"{path} is damaged: it is a socket, not a file") from None
        raise Unreadable(f"{path} cannot be read: {error.strerror or error}") from error


def _descriptor(path: Path) -> int:
    # Without O_NONBLOCK a pipe is waited for until somebody writes to it.
    found = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))
    kind = stat.S_IFMT(os.fstat(found).st_mode)
    if kind != stat.S_IFREG:
        os.close(found)
        raise Damaged(f"{path} is damaged: it is {_KINDS.get(kind, 'something else')}, not a file")
    return found


def is_there(path: Path) -> bool:
    """Whether there is anything under a name, be it a link that leads nowhere.

    Args:
        path: The name.
    """
    return os.path.lexists(path)


def read_text(path: Path, most: int = LARGEST) -> str:
    """Return what a file of text holds.

    Args:
        path: The file.
        most: Bytes that it may have.

    Raises:
        Damaged: It is no plain file, too large, or not UTF-8.
        Unreadable: The system does not let it be read.
    """
    with opened(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise Damaged(f"{path} is damaged: it has more than {most:,} bytes")
    with _read(path):
        return content.decode("utf-8")


def read_json(path: Path, shape: Any = object) -> Any:
    """Return what a JSON file holds.

    Args:
        path: The file.
        shape: That it must have, as `misfit` takes it.

    Raises:
        Damaged: It is no plain file, too large, no JSON, too deep, or of another shape.
        Unreadable: The system does not let it be read.
    """
    return parse_json(read_text(path), path, shape)


def parse_json(text: str, path: Path, shape: Any = object) -> Any:
    """Return what a text that was read from a file says.

    Args:
        text: JSON.
        path: The file, for messages.
        shape: That it must have.

    Raises:
        Damaged: It says something else.
    """
    with _read(path):
        return _checked(json.loads(text), shape)


def read_toml(path: Path, shape: Any = object) -> dict[str, Any]:
    """Return what a TOML file holds.

    Args:
        path: The file.
        shape: That it must have.

    Raises:
        Damaged: It is no plain file, too large, no TOML, too deep, or of another shape.
        Unreadable: The system does not let it be read.
    """
    text = read_text(path, LARGEST_TOML)
    with _read(path):
        if any(part.count(".") > DOTS for part in re.split(r"[=\n,{}\[\]]", text)):
            raise ValueError(_TOO_DEEP)
        return _checked(tomllib.loads(text), shape)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a safetensors file by name, and what its header says besides.

    Args:
        path: The file.

    Raises:
        Damaged: It is no plain file, truncated, or holds something else.
        Unreadable: The system does not let it be read.
    """
    import safetensors

    # It is mapped by its name, so that a large one is not in memory twice; by then it is known to be a plain file.
    with opened(path), _read(path), safetensors.safe_open(path, framework="pt") as f:
        # Copied to where tensors begin in memory: products of those that begin elsewhere may have other last bits.
        return {name: f.get_tensor(name).clone() for name in f.keys()}, f.metadata() or {}  # noqa: SIM118 - not a dict


@contextmanager
def _read(path: Path) -> Iterator[None]:
    """Have whatever is wrong with the content of a file say which file it is, in one line."""
    try:
        yield
    except RecursionError:
        raise Damaged(f"{path} is damaged ({_TOO_DEEP})") from None
    except (ValueError, OverflowError, SafetensorError) as error:
        raise Damaged(f"{path} is damaged ({' '.join(str(error).split())})") from None


_TOO_DEEP = "lists or tables are too deep in each other"


def _checked(value: Any, shape: Any) -> Any:
    if isinstance(value, dict | list) and too_deep(value):
        raise ValueError(_TOO_DEEP)
    if wrong := misfit(value, shape):
        raise ValueError(wrong)
    return value
