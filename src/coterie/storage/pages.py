"""A file mapped into memory: read where it is touched, and given back when it is no longer needed."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import torch
from torch import Tensor

NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)  # named from Python 3.13 on


class Pages:
    """The pages of one file, which must not be empty.

    The mapping is private: who writes to it changes a copy, never the file. No memory is set aside for such copies, or
    the system would refuse to map a file that is larger than memory.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as f:
            flags, prot = mmap.MAP_PRIVATE | NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
            self._map = mmap.mmap(f.fileno(), 0, flags=flags, prot=prot)

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """The whole file as rows of this type and shape (rows, …); nothing is read yet."""
        return torch.frombuffer(self._map, dtype=dtype).reshape(-1, *shape)

    def forget(self, start: int, stop: int) -> None:
        """Give the memory of these bytes back, where the system can; when touched, they are read again."""
        first = start - start % mmap.PAGESIZE
        if stop > start and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, first, stop - first)
