"""The rows of a federation on the device that computes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from coterie.core.federation import Federation
from coterie.core.pytree import nbytes
from coterie.core.task import Data
from coterie.storage.packed import Packed

if TYPE_CHECKING:
    from coterie.engines.features import Features

STREAMED = 32 * 2**20  # bytes of rows in one chunk on a CPU: what is mapped from a file is in memory chunk by chunk
FEW = 256  # clients whose scattered pages may be in memory at once: Linux brings in 64 KiB around each of them

Kept = TypeVar("Kept")


def free_memory(device: torch.device) -> int:
    """Bytes that can still be had on a device."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return min(_available(), _allowed())


def _available() -> int:
    """What the machine can still give: Linux tells it; elsewhere half of all memory is a fair guess."""
    meminfo = Path("/proc/meminfo")
    for line in meminfo.read_text().splitlines() if meminfo.exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _allowed() -> int:
    """What a container may still take. Pages of files count as taken, but are given up when memory is short."""
    limit, used, kinds = (Path(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current", "stat"))
    if not limit.exists() or not limit.read_text().strip().isdecimal():
        return sys.maxsize
    of = dict(line.split() for line in kinds.read_text().splitlines())
    files = int(of.get("active_file", 0)) + int(of.get("inactive_file", 0))
    return int(limit.read_text()) - int(used.read_text()) + files


class Store:
    """Clients' rows, padded to a common length and stacked, on one device.

    Rows that take less than half of a GPU's free memory are moved there once; others are moved chunk by chunk. Of a
    federation that is mapped from files, no more than a chunk is in memory at any time.

    Args:
        federation: The clients and their rows.
        device: Where they are computed with.
        features: What stands for their rows, where these pass through layers that are frozen.
    """

    def __init__(self, federation: Federation, device: torch.device, features: Features | None = None) -> None:
        self.federation, self.features = federation, features
        self.device = device
        self._logged: set[str] = set()
        self._packed: dict[str, Packed] = {}
        self._kept: dict[tuple[tuple[Any, ...], bytes], Any] = {}
        self._lent: tuple[Packed, slice] | None = None

    def part(self, name: str) -> Packed:
        """What clients' steps get as the "train" or "test" rows, wherever it is."""
        return self.federation.part(name) if self.features is None else self.features.part(name)

    def prepare(self, part: str, clients: Tensor) -> None:
        """Have what stands for these clients' rows computed, if it was not yet."""
        if self.features is not None:
            self.features.see(part, clients)

    def rows(self, part: str, clients: Tensor, *, as_they_are: bool = False) -> Data:
        """The rows of these clients as one `Data` (c, n, …) with n the size of the largest.

        They may be views of a mapped file, whose memory is given back when the next clients are asked for.

        Args:
            part: "train" or "test".
            clients: Whose.
            as_they_are: Not what stands for them.
        """
        if self._lent is not None:
            packed, rows = self._lent
            packed.forget(rows.start, rows.stop)
        packed = self.federation.part(part) if as_they_are and self.features else self._resident(part)
        start = packed.offsets[clients]
        sizes = packed.offsets[clients + 1] - start
        c, width = len(clients), max(1, int(sizes.max()))
        if bool((sizes == width).all()) and bool((start.diff() == width).all()):  # neighbours of one size: a view
            rows = slice(int(start[0]), int(start[0]) + c * width)
            x, y = (a[rows].unflatten(0, (c, width)) for a in (packed.x, packed.y))
            mask = torch.ones(c, width, device=self.device)
            self._lent = packed, rows
        else:  # padding repeats the client's last row, which the mask takes out again
            step = torch.arange(width)
            last = (sizes - 1).clamp(min=0)[:, None]
            x, y = gather(packed, (start[:, None] + step.minimum(last)).clamp(max=len(packed.x) - 1))
            mask = (step < sizes[:, None]).float()
            self._lent = None
        return Data(x.to(self.device), y.to(self.device), mask.to(self.device))

    def most(self, part: str, rows: int) -> int:
        """How many clients of so many rows a chunk may have at most, for the sake of their rows alone."""
        packed = self.part(part)
        each = rows * (packed.x[:1].nbytes + packed.y[:1].nbytes)
        return max(1, STREAMED // max(1, each)) if self.device.type == "cpu" else sys.maxsize

    @property
    def keeps(self) -> bool:
        """Whether anything may be kept: not where rows are mapped from files, for it would grow with the clients."""
        return self._resident("train").pages is None

    def kept(
        self, name: tuple[Any, ...], clients: Tensor, size: int, make: Callable[[], Kept], log: list[str]
    ) -> Kept | None:
        """What `make` makes for these clients, kept from round to round; None where it may not be.

        Nothing is kept for two clients, on whom chunks are tried out: chunks should not depend on it.

        Args:
            name: What it is, as the log will call it, and whatever it depends on.
            clients: For whom.
            size: How many bytes it will take.
            make: Makes it.
            log: Where a message goes, once, if there is no more room.
        """
        key = name, clients.numpy().tobytes()
        if key not in self._kept:
            if not self.keeps or len(clients) <= 2 or not self._has_room(name[0], size, log):
                return None
            self._kept[key] = make()
        return self._kept[key]

    def _has_room(self, what: str, size: int, log: list[str]) -> bool:
        """Whether so many bytes more may be kept; if not, the log says so once."""
        free = free_memory(self.device)
        if nbytes(list(self._kept.values())) + size <= free / 4:
            return True
        if what not in self._logged:
            self._logged.add(what)
            log.append(
                f"vectorised: no more {what} are kept from round to round: they may take a quarter of the free memory, "
                f"which is {free / 2**20:,.0f} MiB"
            )
        return False

    def _resident(self, part: str) -> Packed:
        if part not in self._packed:
            packed = self.part(part)
            here = self.features is not None  # where there is room for them; they are not all known yet
            if not here and self.device.type != "cpu" and nbytes(packed) < free_memory(self.device) / 2:
                packed = move(packed, self.device)
            self._packed[part] = packed
        return self._packed[part]


def gather(packed: Packed, at: Tensor) -> tuple[Tensor, Tensor]:
    """The rows numbered by `at` (c, n), copied; of mapped files, few clients' pages at a time are in memory."""
    index, few = at.to(packed.x.device), FEW if packed.pages else len(at)
    x, y = (values.new_empty(*at.shape, *values.shape[1:]) for values in (packed.x, packed.y))
    for first in range(0, len(at), few):
        some = slice(first, first + few)
        for values, out in ((packed.x, x), (packed.y, y)):
            torch.index_select(values, 0, index[some].flatten(), out=out[some].flatten(0, 1))
        packed.forget(int(at[some].min()), int(at[some].max()) + 1)
    return x, y


def move(packed: Packed, device: torch.device) -> Packed:
    """Rows brought to a device a piece at a time, so that those of a mapped file are never all in memory."""
    x, y = (torch.empty_like(values, device=device) for values in (packed.x, packed.y))
    for first, piece in packed.pieces():
        start = int(packed.offsets[first])
        rows = slice(start, start + len(piece.x))
        x[rows], y[rows] = piece.x, piece.y
    return Packed(x, y, packed.offsets)
