"""The reference: a plain loop over the clients. Every other engine is measured against its answers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from coterie.core.engine import Exchange
from coterie.core.pytree import tree_map
from coterie.core.step import Reply
from coterie.core.train import own_rows
from coterie.engines.errors import explained
from coterie.engines.local import LocalEngine


class Sequential(LocalEngine):
    """One client after the other."""

    name = "sequential"

    def replies(self, exchange: Exchange) -> Iterator[tuple[Tensor, Reply]]:
        """Run the step, as a function of one client, on each."""
        stages, rows = self.stages(exchange), exchange.rows
        answer = self.answer(stages)
        for position, i in enumerate(exchange.clients.tolist()):
            message = own_rows(exchange.message, rows[position]) if isinstance(rows, Tensor) else exchange.message
            at = torch.tensor([position])
            with explained(self, exchange, i), self.arithmetic():
                reply = answer(message, tree_map(lambda x: x[0], self.local(stages, exchange, at)))
            if reply.memory != ():
                exchange.ledger.memory[i] = reply.memory
            yield at, tree_map(lambda x: x[None], reply)
