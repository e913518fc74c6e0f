"""Compressed files that users pass: how much they say they hold is looked at before memory is taken for it."""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np

from coterie.storage.reading import opened

# What a file unpacks to: this much in any case, and beyond it so many times the size of the file. The tables of the
# data folder unpack to 2 to 14 times their size; what is made to fill memory, to a thousand times.
ALWAYS, TIMES = 64 * 2**20, 200
_ERRORS = (ValueError, OSError, EOFError, KeyError, NotImplementedError, RuntimeError, zipfile.BadZipFile, zlib.error)


class TooLarge(ValueError):
    """A compressed file says that it holds more than its size allows."""


def bound(size: int) -> int:
    """How many bytes a compressed file may unpack to.

    Args:
        size: Of the file, in bytes.

    Example:
        >>> bound(10**6)
        200000000
    """
    return max(ALWAYS, TIMES * size)


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """Read the arrays of a .npz file by name; no pickle is loaded.

    Args:
        path: The file.

    Raises:
        TooLarge: It would unpack to more than `bound` allows.
        ValueError: It is none, or damaged.
    """
    with opened(path) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                _check(path, sum(each.file_size for each in archive.infolist()), path.stat().st_size)
                return {each.filename.removesuffix(".npy"): _array(archive, each) for each in archive.infolist()}
        except TooLarge:
            raise
        except _ERRORS as error:
            raise ValueError(f"{path} cannot be read as .npz ({' '.join(str(error).split())})") from None


def _array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> np.ndarray:
    """An array whose header asks for as many bytes as there are."""
    with archive.open(entry) as member:
        content = io.BytesIO(member.read())
    header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    version = np.lib.format.read_magic(content)
    if version not in header:
        raise ValueError(f"{entry.filename} is an array of version {version}")
    shape, _, dtype = header[version](content)
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != len(content.getbuffer()) - content.tell():
        raise ValueError(f"{entry.filename} does not hold an array {shape} of {dtype}")
    content.seek(0)
    return np.lib.format.read_array(content, allow_pickle=False)


class Bounded(io.BufferedReader):
    """The content of a compressed file, which ends with an error where it is more than `bound` allows.

    Args:
        unpacked: The stream of its content.
        path: The file.
    """

    def __init__(self, unpacked: IO[bytes], path: Path) -> None:
        super().__init__(_Counted(unpacked, path))


class _Counted(io.RawIOBase):
    def __init__(self, unpacked: IO[bytes], path: Path) -> None:
        self._unpacked, self._path, self._size, self._read = unpacked, path, path.stat().st_size, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self._unpacked.read(len(buffer))
        buffer[: len(piece)] = piece
        self._read += len(piece)
        _check(self._path, self._read, self._size)
        return len(piece)

    def close(self) -> None:
        self._unpacked.close()
        super().close()


def _check(path: Path, unpacked: int, size: int) -> None:
    if unpacked > (most := bound(size)):
        raise TooLarge(
            f"{path} has {size:,} bytes and unpacks to more than {most:,}: files that users give may unpack to "
            f"{TIMES} times their size, or {ALWAYS // 2**20} MiB; unpack it yourself if it is right"
        )
