"""The reference: a plain loop over the clients. Every other executor is measured against its answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from coterie.client import ClientStep, Local, Reply
from coterie.cohort import Cohort
from coterie.executors.store import Store
from coterie.tree import take, tree_map


class Sequential(Cohort):
    """One client after the other."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._store = Store(self.federation, self.device, self.ledger.messages)

    def _replies(self, step: ClientStep, name: str, shared: Any, rows: Tensor | None) -> Iterator[tuple[Tensor, Reply]]:
        memory = self.ledger.memory
        for position, (i, n) in enumerate(zip(self.clients.tolist(), self.sizes.tolist(), strict=True)):
            sent = shared if rows is None else take(shared, rows[position])
            data = tree_map(lambda x: x[0], self._store.rows(self.part, torch.tensor([i])))
            draws = tree_map(lambda x: x.to(self.device), self._draws(step, i, n))
            with self._arithmetic():
                reply = self.uplink(step.run(sent, Local(data, draws, memory.get(i, ()))))
            if reply.memory != ():
                memory[i] = reply.memory
            yield torch.tensor([position]), tree_map(lambda x: x[None], reply)
