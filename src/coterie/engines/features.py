"""Rows as a frozen trunk sees them: computed once for each client, the first time that it is asked."""

from __future__ import annotations

from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from coterie.core.bars import counting
from coterie.core.federation import Federation
from coterie.core.key import Key
from coterie.core.precision import Precision, arithmetic
from coterie.core.task import Task, Trunk
from coterie.engines import ranks
from coterie.engines.chunks import Peak
from coterie.engines.store import free_memory
from coterie.storage.packed import Packed

WORK = 128 * 2**20  # bytes that the trunk may need at a time
SHARE = 0.5  # of the free memory, for all features
LONG = 2  # seconds from which on a bar is shown
THROUGH = "rows pass through the frozen layers in every step"

# Runs that are there at the same time share them; no longer than that are they kept.
_known: WeakKeyDictionary[Trunk, WeakValueDictionary[tuple[int, str, str], Features]] = WeakKeyDictionary()


def features_of(
    federation: Federation, task: Task, device: torch.device, precision: Precision
) -> tuple[Features | None, str]:
    """The features of a federation's rows under the frozen layers of a task, and a line for the log.

    Args:
        federation: The clients and their rows.
        task: What is learnt.
        device: Where they are computed.
        precision: Of matrix products.

    Returns:
        None where the model has to be trained as a whole, and "" where there is nothing to say.
    """
    trunk = task.trunk(federation.train.x[:2])
    if not isinstance(trunk, Trunk):
        return None, "" if trunk is None else f"{THROUGH}: {trunk}"
    if not any(_fit(federation, trunk, place) for place in (device, torch.device("cpu"))):
        size = _size(federation, trunk) / 2**20
        return None, f"{THROUGH}: their features would take {size:,.0f} MiB, more than half of the free memory"
    known = _known.setdefault(trunk, WeakValueDictionary())
    key = id(federation), str(device), precision
    if (features := known.get(key)) is None:
        features = known[key] = Features(federation, trunk, device, precision)
    shape = " × ".join(str(n) for n in trunk.row.shape)
    return features, (
        f"a row passes through the frozen layers once; the {shape} numbers that come out are kept, and "
        f"{', '.join(task.init(Key.of(0)))} trained on them"
    )


def _size(federation: Federation, trunk: Trunk) -> int:
    """Bytes of all features."""
    parts = {id(part.x): len(part.x) for part in (federation.train, federation.part("test"))}
    return trunk.row.nbytes * sum(parts.values())


def _fit(federation: Federation, trunk: Trunk, device: torch.device) -> bool:
    return _size(federation, trunk) <= SHARE * free_memory(device)


class Features:
    """The features of all rows of a federation, and which clients' are known.

    They are on the device if there is room, else in main memory.

    Args:
        federation: The clients and their rows.
        trunk: The frozen layers.
        device: Where they are computed.
        precision: Of matrix products.
    """

    def __init__(self, federation: Federation, trunk: Trunk, device: torch.device, precision: Precision) -> None:
        self.federation, self.trunk = federation, trunk
        self.device = device
        self.precision: Precision = precision
        self.home = device if _fit(federation, trunk, device) else torch.device("cpu")
        self._known: dict[str, tuple[Packed, Tensor]] = {}
        self._at_once = 0

    def part(self, name: str) -> Packed:
        """The features called "train" or "test". Those of clients that `see` was not asked for hold anything."""
        return self._place(name)[0]

    def see(self, name: str, clients: Tensor) -> None:
        """Compute the features of these clients, if they are not known."""
        features, known = self._place(name)
        rows = self.federation.part(name)
        new = torch.zeros_like(known)
        new[clients] = ~known[clients]
        if not bool(new.any()):
            return
        at = new.repeat_interleave(rows.sizes).nonzero().flatten()
        bar = counting("features", len(at), delay=LONG, hidden=ranks.rank() > 0)
        with bar, torch.no_grad(), arithmetic(self.precision, self.device):
            for some in at.split(self._rows_at_once(rows)):
                features.x[some.to(self.home)] = self.trunk.see(rows.x[some].to(self.device)).float().to(self.home)
                rows.forget(int(some.min()), int(some.max()) + 1)
                bar.update(len(some))
        known |= new

    def _place(self, name: str) -> tuple[Packed, Tensor]:
        rows = self.federation.part(name)
        own = "train" if rows is self.federation.train else "test"
        if own not in self._known:
            x = torch.empty(len(rows.x), *self.trunk.row.shape, device=self.home)
            x[:2] = self.trunk.row.to(self.home)  # on which models are tried out, whoever is asked first
            packed = Packed(x, rows.y.to(self.home), rows.offsets)
            self._known[own] = packed, torch.zeros(len(self.federation), dtype=torch.bool)
        return self._known[own]

    def _rows_at_once(self, rows: Packed) -> int:
        """How many rows the trunk is given at a time, from what it was seen to need for one."""
        if not self._at_once:
            with Peak() as probe:
                self.trunk.see(rows.x[:1].to(self.device))
            self._at_once = max(1, WORK // max(1, probe.peak))
        return self._at_once
