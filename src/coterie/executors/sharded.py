"""Several processes, each with a share of the clients: as many cores, GPUs or machines as torchrun was told to use.

    torchrun --nproc-per-node 4 -m coterie run config.toml

Every process, or rank, runs the whole program and holds the server's state; only the clients' work is divided. What
the algorithm gets back has always been through an exchange, so it is the same on every rank, bit for bit. Hence each
can do the server's part for itself, and they stay in step.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor

from coterie.client import Reply
from coterie.cohort import Ledger, Step, Sums
from coterie.executors import ranks
from coterie.executors.fused import Fused
from coterie.federation import Federation
from coterie.key import Key
from coterie.task import Task
from coterie.tree import stack, tree_map


class Sharded(Fused):
    """The vectorised executor on a share of the clients per rank; without torchrun, on all of them."""

    def __init__(
        self, federation: Federation, task: Task, key: Key, device: torch.device, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(federation, task, key, ranks.join(device), *args, **kwargs)
        self.leads = ranks.rank() == 0
        self._of_all = False  # whether this is a rank's share of all clients
        if ranks.world() > 1:
            self.ledger.messages.append(f"sharded: {ranks.world()} processes; what follows is the first one's share")

    def combine(self, step: Step, shared: Any, *, slots: int = 1, rows: Tensor | None = None) -> Sums:
        """Run `step` on every client, each rank on its share, and add the weighted updates up by slot."""
        if ranks.world() == 1:
            return super().combine(step, shared, slots=slots, rows=rows)

        def work(share: Self, at: Tensor) -> tuple[Any, Any]:
            sums = Fused.combine(share, step, shared, slots=slots, rows=None if rows is None else rows[at])
            return (sums.update, sums.weight), sums.note

        (update, weight), note = self._divide(work)
        return Sums(update, weight, note)

    def gather(self, step: Step, shared: Any, *, slots: int = 1, rows: Tensor | None = None) -> Reply:
        """Run `step` on every client, each rank on its share, and return every reply in the cohort's order."""
        if ranks.world() == 1:
            return super().gather(step, shared, slots=slots, rows=rows)

        def work(share: Self, at: Tensor) -> tuple[Any, Any]:
            return (), Fused.gather(share, step, shared, rows=None if rows is None else rows[at])

        return self._divide(work)[1]

    def _divide(self, work: Callable[[Self, Tensor], tuple[Any, Any]]) -> tuple[Any, Any]:
        """Do this rank's share of the work and put it together with the others'.

        Args:
            work: Given some clients and their positions, returns what is summed over all and what is stacked by client.
        """
        dealt = deal(self.sizes, ranks.world())
        idle = not len(dealt[ranks.rank()])
        at = torch.tensor([0]) if idle else dealt[ranks.rank()]  # an idle rank does one, to know an answer's shape
        share = self._share(at)
        summed, stacked, trouble = (), (), ""
        try:
            summed, stacked = work(share, at)
        except ValueError as error:
            trouble = str(error)
        memory = self._newly_kept(share)
        if idle:
            share.ledger = Ledger()
            summed = tree_map(torch.zeros_like, summed)
        with ranks.exchange():
            self._settle(share.ledger, trouble)
            summed = ranks.total(summed, self.device)
            stacked, memory = ranks.joined((stacked, memory), [len(d) for d in dealt], self.device)
        self._remember(torch.arange(len(self)), memory)
        return summed, stacked

    def _share(self, at: Tensor) -> Self:
        """The clients at these positions, with bytes and memories of their own until all ranks have theirs."""
        own = replace(self.ledger, bytes_down=0, bytes_up=0, memory=dict(self.ledger.memory))
        return self._but(clients=self.clients[at], ledger=own, _of_all=len(self) == self.population)

    @property
    def _everybody(self) -> bool:
        return self._of_all or super()._everybody

    def _newly_kept(self, share: Self) -> Any:
        """What the clients of a share have put into their memories, stacked; () where it is nothing."""
        before, after = self.ledger.memory, share.ledger.memory
        clients = share.clients.tolist() if after else []
        kept = [after[i] for i in clients if after.get(i) is not before.get(i)]
        return stack(kept) if kept else ()

    def _settle(self, spent: Ledger, trouble: str) -> None:
        """Charge what the shares of all ranks cost. Where one has failed, all fail, with its words."""
        words = trouble.encode()
        down, up, lengths, moments = zip(
            *ranks.tell(spent.bytes_down, spent.bytes_up, len(words), self._moment()), strict=True
        )
        if len(set(moments)) > 1:
            raise ValueError(
                "sharded: the processes are out of step; all of them must be given the same configuration, data and "
                "run folder"
            )
        if any(lengths):
            said = ranks.joined(torch.tensor(list(words), dtype=torch.uint8), list(lengths), self.device)
            raise ValueError(bytes(said.tolist())[: next(n for n in lengths if n)].decode())
        self._charge(sum(down), sum(up))

    def _moment(self) -> int:
        """A number that differs where ranks are not at the same work."""
        return zlib.crc32(self.sizes.numpy().tobytes(), zlib.crc32(repr((self.when, self.part)).encode()))


def deal(sizes: Tensor, count: int) -> list[Tensor]:
    """Positions of clients, cut into so many runs of about equal rows; of few clients some runs get none.

    Example:
        >>> [run.tolist() for run in deal(torch.tensor([10, 10, 20, 10, 30]), 2)]
        [[0, 1, 2], [3, 4]]
    """
    middle = 2 * sizes.cumsum(0) - sizes  # of each client, in half rows
    cuts = torch.searchsorted(middle, 2 * sizes.sum() * torch.arange(1, count) // count)
    return list(torch.arange(len(sizes)).tensor_split(cuts.tolist()))
