"""Several processes, each with a share of the clients: as many cores, GPUs or machines as torchrun was started with.

    torchrun --nproc-per-node 4 -m coterie run config.toml

Every process, or rank, runs the whole program and holds the server's state; only the clients' work is divided. What
the method gets back has always been through an exchange between the ranks, so it is the same on every rank, bit for
bit. Hence each can do the server's part for itself, and they stay in step.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from coterie.core.engine import Engine, Exchange, Ledger
from coterie.core.federation import Federation
from coterie.core.key import Key
from coterie.core.precision import Precision
from coterie.core.pytree import leaves, stack, take, tree_map
from coterie.core.step import Reply
from coterie.core.sums import Sums
from coterie.core.task import Task
from coterie.core.uplink import Uplink
from coterie.engines import ranks
from coterie.engines.vectorised import Vectorised


class Sharded(Engine):
    """The vectorised engine on a share of the clients per rank; without torchrun, on all of them."""

    name = "sharded"

    def __init__(
        self,
        federation: Federation,
        task: Task,
        key: Key,
        device: torch.device,
        uplink: Uplink | None = None,
        precision: Precision = "float32",
    ) -> None:
        super().__init__(federation, task, key, ranks.join(device), precision)
        self._inner = Vectorised(federation, task, key, self.device, uplink, precision)
        self.leads = ranks.rank() == 0
        self._logged = ranks.world() == 1

    def combine(self, exchange: Exchange) -> Sums:
        """Run the step on every client, each rank on its share, and add the weighted updates up by slot."""
        if ranks.world() == 1:
            return self._inner.combine(exchange)

        def work(share: Exchange) -> tuple[Any, Any]:
            sums = self._inner.combine(share)
            return (sums.update, sums.weight), sums.note

        (update, weight), note = self._divide(exchange, work)
        return Sums(update, weight, note)

    def gather(self, exchange: Exchange) -> Reply:
        """Run the step on every client, each rank on its share, and return every reply in the clients' order."""
        if ranks.world() == 1:
            return self._inner.gather(exchange)
        return self._divide(exchange, lambda share: ((), self._inner.gather(share)))[1]

    def _divide(self, exchange: Exchange, work: Callable[[Exchange], tuple[Any, Any]]) -> tuple[Any, Any]:
        """Do this rank's share of the work and put it together with the others'.

        Args:
            exchange: With all clients.
            work: Given the exchange with some of them, returns what is summed over all and what is stacked by client.
        """
        if not self._logged:
            exchange.ledger.messages.append(
                f"sharded: {ranks.world()} processes; what follows is the first one's share"
            )
            self._logged = True
        dealt = deal(self.sizes(exchange), ranks.world())
        idle = not len(dealt[ranks.rank()])
        at = torch.tensor([0]) if idle else dealt[ranks.rank()]  # an idle rank does one, to know an answer's shape
        share = _share(exchange, at)
        summed, stacked, trouble = (), (), ""
        try:
            summed, stacked = work(share)
        except ValueError as error:
            trouble = str(error)
        memory, spent = _newly_kept(exchange.ledger, share), share.ledger
        if idle:
            spent = Ledger()
            summed = tree_map(torch.zeros_like, summed)
        with ranks.exchange():
            self._settle(exchange, spent, trouble)
            summed = ranks.total(summed, self.device)
            stacked, memory = ranks.joined((stacked, memory), [len(d) for d in dealt], self.device)
        if leaves(memory):
            for position, i in enumerate(exchange.clients.tolist()):
                exchange.ledger.memory[i] = take(memory, position)
        return summed, stacked

    def _settle(self, exchange: Exchange, spent: Ledger, trouble: str) -> None:
        """Charge what the shares of all ranks cost. Where one has failed, all fail, with its message."""
        words = trouble.encode()
        moment = self._moment(exchange)
        down, up, lengths, moments = zip(*ranks.tell(spent.bytes_down, spent.bytes_up, len(words), moment), strict=True)
        if len(set(moments)) > 1:
            raise ValueError(
                "sharded: the processes are out of step; all of them must be given the same configuration, data and "
                "run folder"
            )
        if any(lengths):
            said = ranks.joined(torch.tensor(list(words), dtype=torch.uint8), list(lengths), self.device)
            raise ValueError(bytes(said.tolist())[: next(n for n in lengths if n)].decode())
        exchange.ledger.charge(sum(down), sum(up))

    def _moment(self, exchange: Exchange) -> int:
        """A number that differs where ranks are not at the same work."""
        return zlib.crc32(
            self.sizes(exchange).numpy().tobytes(), zlib.crc32(repr((exchange.when, exchange.part)).encode())
        )


def _share(exchange: Exchange, at: Tensor) -> Exchange:
    """The clients at these positions, with bytes and memories of their own until all ranks have theirs."""
    ledger = exchange.ledger
    own = replace(ledger, bytes_down=0, bytes_up=0, memory=dict(ledger.memory))
    return exchange.only(at)._replace(ledger=own, everybody=exchange.everybody)


def _newly_kept(before: Ledger, share: Exchange) -> Any:
    """What the clients of a share have put into their memories, stacked; () where it is nothing."""
    after = share.ledger.memory
    clients = share.clients.tolist() if after else []
    kept = [after[i] for i in clients if after.get(i) is not before.memory.get(i)]
    return stack(kept) if kept else ()


def deal(sizes: Tensor, count: int) -> list[Tensor]:
    """Positions of clients, cut into so many runs of about equal rows; of few clients some runs get none.

    Example:
        >>> [run.tolist() for run in deal(torch.tensor([10, 10, 20, 10, 30]), 2)]
        [[0, 1, 2], [3, 4]]
    """
    middle = 2 * sizes.cumsum(0) - sizes  # of each client, in half rows
    cuts = torch.searchsorted(middle, 2 * sizes.sum() * torch.arange(1, count) // count)
    return list(torch.arange(len(sizes)).tensor_split(cuts.tolist()))
