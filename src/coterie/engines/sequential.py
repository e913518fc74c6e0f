"""The reference: a plain loop over the clients. Every other engine is measured against its answers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from coterie.core.engine import Exchange
from coterie.core.pytree import tree_map
from coterie.core.step import Local, Reply, derived
from coterie.core.train import own_rows
from coterie.engines.errors import explained
from coterie.engines.local import LocalEngine


class Sequential(LocalEngine):
    """One client after the other."""

    name = "sequential"

    def replies(self, exchange: Exchange) -> Iterator[tuple[Tensor, Reply]]:
        """Run the step, as a function of one client, on each."""
        step, memory, rows = derived(exchange.step, self.task), exchange.ledger.memory, exchange.rows
        sizes = self.sizes(exchange).tolist()
        for position, (i, n) in enumerate(zip(exchange.clients.tolist(), sizes, strict=True)):
            message = own_rows(exchange.message, rows[position]) if isinstance(rows, Tensor) else exchange.message
            data = tree_map(lambda x: x[0], self.store.rows(exchange.part, torch.tensor([i])))
            with explained(self, exchange, i), self.arithmetic():
                draws = tree_map(lambda x: x.to(self.device), self.draws(step, exchange, i, n))
                reply = self.uplink(step.run(message, Local(data, draws, memory.get(i, ()))))
            if reply.memory != ():
                memory[i] = reply.memory
            yield torch.tensor([position]), tree_map(lambda x: x[None], reply)
