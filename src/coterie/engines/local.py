"""What all engines of this process share: replies become sums, and an error names its step, client and round."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import _set_vmap_fallback_warning_enabled  # pyright: ignore[reportAttributeAccessIssue]

from coterie.core.engine import Engine, Exchange
from coterie.core.federation import Federation
from coterie.core.key import Key
from coterie.core.precision import Precision, arithmetic
from coterie.core.pytree import formed, nbytes, tree_map
from coterie.core.step import ClientStep, Reply
from coterie.core.sums import Sums, slot_sum
from coterie.core.task import Task
from coterie.core.uplink import Uplink
from coterie.engines.store import Store


class Part(NamedTuple):
    """What some clients of an exchange have added up to."""

    at: Tensor  # their positions in the exchange
    sums: Sums
    bytes_up: int


class LocalEngine(Engine):
    """Clients simulated in this process; a subclass says how their replies are computed.

    Args:
        federation: The clients and their rows.
        task: What is learnt.
        key: The clients' random numbers follow from it.
        device: Where steps run.
        uplink: What is done to a reply before it is added up.
        precision: Of the clients' matrix products; sums over clients are always done in float32.
        store: The rows on the device, where another engine has them already.
    """

    def __init__(
        self,
        federation: Federation,
        task: Task,
        key: Key,
        device: torch.device,
        uplink: Uplink | None = None,
        precision: Precision = "float32",
        store: Store | None = None,
    ) -> None:
        super().__init__(federation, task, key, device, precision)
        self.uplink = uplink or Uplink()
        self.store = store or Store(federation, device)

    @abstractmethod
    def replies(self, exchange: Exchange) -> Iterator[tuple[Tensor, Reply]]:
        """Yield (positions in the exchange, their stacked replies) until every client has replied once.

        The message is on the device already.
        """

    def combine(self, exchange: Exchange) -> Sums:
        """Run the step on every client and add the weighted updates up by slot."""
        exchange = self.delivered(exchange)
        return self.added(exchange, self._parts(exchange))

    def gather(self, exchange: Exchange) -> Reply:
        """Run the step on every client and return every reply, stacked in the clients' order."""
        exchange = self.delivered(exchange)
        return self.stacked(exchange, self.replies(exchange))

    def delivered(self, exchange: Exchange) -> Exchange:
        """The exchange with its message on the device."""
        message = tree_map(lambda x: x.to(self.device) if isinstance(x, Tensor) else x, exchange.message)
        return exchange._replace(message=message)

    def added(self, exchange: Exchange, parts: Iterable[Part]) -> Sums:
        """The sum of all parts, and their notes in the clients' order."""
        update, weight, note = None, torch.zeros(exchange.slots, device=self.device), None
        down = exchange.bytes_down()
        with arithmetic("float32", self.device):
            for part in parts:
                exchange.ledger.charge(down * len(part.at), part.bytes_up)
                update = part.sums.update if update is None else tree_map(Tensor.add_, update, part.sums.update)
                weight = weight + part.sums.weight.to(self.device)
                note = _put(note, part.sums.note, part.at, len(exchange.clients))
        return Sums(update, weight, note or {})

    def stacked(self, exchange: Exchange, replies: Iterable[tuple[Tensor, Reply]]) -> Reply:
        """All replies in the clients' order."""
        whole: Any = None
        down = exchange.bytes_down()
        with arithmetic("float32", self.device):
            for at, reply in replies:
                reply = reply._replace(update=formed(reply.update), memory=())
                exchange.ledger.charge(down * len(at), nbytes(reply))
                whole = _put(whole, reply, at, len(exchange.clients))
        return whole

    @contextmanager
    def arithmetic(self) -> Iterator[None]:
        """For what a client computes.

        An operation that vmap does not know is done client by client, and recurrent layers whose weights lie apart are
        slower on a GPU. torch warns of both, and users can do nothing about it: it is `Chunks` that measures which way
        is faster.
        """
        _set_vmap_fallback_warning_enabled(False)
        try:
            with arithmetic(self.precision, self.device), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
                yield
        finally:
            _set_vmap_fallback_warning_enabled(True)

    def draws(self, step: ClientStep, exchange: Exchange, i: int, n: int) -> Any:
        """The random numbers of client i with n rows."""
        return () if step.draw is None else step.draw(n, self.client_key(i), exchange.when)

    def _parts(self, exchange: Exchange) -> Iterator[Part]:
        for at, reply in self.replies(exchange):
            yield Part(at, slot_sum(reply, exchange.slots), nbytes(reply._replace(memory=())))


def _put(whole: Any, part: Any, at: Tensor, m: int) -> Any:
    """Put a stacked chunk at its clients' places in a tree for all m, which is made for the first chunk.

    Chunks are not kept until the last has come: small pieces that stay between large ones that go would keep the
    allocator from giving memory back.
    """
    if whole is None:
        if len(at) == m and bool((at == torch.arange(m)).all()):
            return part
        whole = tree_map(lambda x: x.new_empty(m, *x.shape[1:]), part)
    tree_map(lambda x, own: x.index_copy_(0, at.to(x.device), own), whole, part)
    return whole
