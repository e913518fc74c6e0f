"""A file mapped into memory: read on access, and released when it is no longer needed."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import torch
from torch import Tensor

NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)  # has a name from Python 3.13 on


class Pages:
    """The memory mapping of one file, which must not be empty.

    The mapping is private: writing to it changes a copy, never the file. No memory is reserved for such copies,
    because the system would otherwise refuse to map a file that is larger than memory.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as f:
            flags, prot = mmap.MAP_PRIVATE | NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
            self._map = mmap.mmap(f.fileno(), 0, flags=flags, prot=prot)

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Return the whole file as a tensor (rows, …); nothing is read yet.

        Args:
            dtype: Type of the numbers.
            shape: Shape of a row.
        """
        return torch.frombuffer(self._map, dtype=dtype).reshape(-1, *shape)

    def forget(self, start: int, stop: int) -> None:
        """Release the memory of a range of bytes, if the system supports it; on access they are read again.

        Args:
            start: The first byte.
            stop: The byte after the last.
        """
        first = start - start % mmap.PAGESIZE
        if stop > start and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, first, stop - first)
