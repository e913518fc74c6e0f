"""The rows of a federation on the device that computes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from coterie.federation import Federation, Packed
from coterie.task import Data
from coterie.tree import nbytes

Kept = TypeVar("Kept")


def free_memory(device: torch.device) -> int:
    """Bytes that can still be had on a device."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return min(_available(), _allowed())


def _available() -> int:
    """What the machine can still give: Linux tells it; elsewhere half of all memory is a fair guess."""
    told = Path("/proc/meminfo")
    for line in told.read_text().splitlines() if told.exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _allowed() -> int:
    """What a container may still take."""
    limit, used = (Path(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    if not limit.exists() or not limit.read_text().strip().isdecimal():
        return sys.maxsize
    return int(limit.read_text()) - int(used.read_text())


class Store:
    """Clients' rows, padded to a common length and stacked, on one device.

    Rows that take less than half of the free memory are moved there once; others are moved chunk by chunk.
    """

    def __init__(self, federation: Federation, device: torch.device) -> None:
        self.federation = federation
        self.device = device
        self._packed: dict[str, Packed] = {}
        self._kept: dict[tuple[str, bytes], Any] = {}

    def rows(self, part: str, clients: Tensor) -> Data:
        """The rows of these clients as one `Data` (c, n, …) with n the size of the largest."""
        packed = self._resident(part)
        start, sizes = packed.offsets[clients], packed.sizes[clients]
        c, width = len(clients), max(1, int(sizes.max()))
        if bool((sizes == width).all()) and bool((start.diff() == width).all()):  # neighbours of one size: a view
            rows = slice(int(start[0]), int(start[0]) + c * width)
            x, y = (a[rows].unflatten(0, (c, width)) for a in (packed.x, packed.y))
            mask = torch.ones(c, width)
        else:  # padding repeats other rows, which the mask takes out again
            step = torch.arange(width)
            at = (start[:, None] + step).clamp(max=len(packed.x) - 1).to(packed.x.device)
            x, y = packed.x[at], packed.y[at]
            mask = (step < sizes[:, None]).float()
        return Data(x.to(self.device), y.to(self.device), mask.to(self.device))

    def kept(self, name: str, clients: Tensor, make: Callable[[], Kept], *, keep: bool) -> Kept:
        """What `make` makes for these clients; with `keep`, kept for the next round while memory allows."""
        key = name, clients.numpy().tobytes()
        if key not in self._kept:
            made = make()
            if not keep or nbytes(list(self._kept.values())) + nbytes(made) > free_memory(self.device) / 4:
                return made
            self._kept[key] = made
        return self._kept[key]

    def _resident(self, part: str) -> Packed:
        if part not in self._packed:
            packed = self.federation.split(part)
            if self.device.type != "cpu" and nbytes(packed) < free_memory(self.device) / 2:
                packed = packed._replace(x=packed.x.to(self.device), y=packed.y.to(self.device))
            self._packed[part] = packed
        return self._packed[part]
