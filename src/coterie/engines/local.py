"""What all engines of this process share: replies become sums, and an error names its step, client and round."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from coterie.core.step import ClientStep, Local, Reply, derived
from coterie.core.sums import Sums, slot_sum
from coterie.core.task import Task
from coterie.core.uplink import Uplink
from coterie.engines.features import features_of
from coterie.engines.store import Store


class Stage(NamedTuple):
    """A step of an exchange, the rows on which it runs, and how many of them each client has."""

    step: ClientStep
    part: str
    sizes: Tensor


class Part(NamedTuple):
    """What some clients of an exchange have added up to."""

    at: Tensor  # their positions in the exchange
    sums: Sums
    bytes_up: int


Answer = Callable[[Any, Sequence[Local]], Reply]  # what one client does, given what it was sent


class LocalEngine(Engine):
    """Clients simulated in this process; a subclass says how their replies are computed.

    Attributes:
        work: The task as clients' steps do it: on features in place of rows where the model's first layers are frozen.

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
        self._said = ""
        if store is None:
            features, self._said = features_of(federation, self.task, device, precision)
            store = Store(federation, device, features)
        self.store = store
        self.work = self.task if store.features is None else store.features.trunk.head

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
        reply, finish = self.stacked(exchange, self.replies(exchange)), derived(exchange.step, self.work).finish
        if finish is None:
            return reply
        return finish(reply, [self.client_key(i).fold(*exchange.when) for i in exchange.clients.tolist()])

    def delivered(self, exchange: Exchange) -> Exchange:
        """The exchange with its message on the device, and its clients' features there."""
        if self._said:
            exchange.ledger.messages.append(f"{self.name}: {self._said}")
            self._said = ""
        for part in {exchange.part, *([] if exchange.first is None else [exchange.first.part])}:
            self.store.prepare(part, exchange.clients)
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

    def stages(self, exchange: Exchange) -> list[Stage]:
        """What a client does, one thing after the other; each gets what the one before it would have sent."""
        first = [] if exchange.first is None else [exchange.first]
        return [
            Stage(derived(step, self.work), part, self.federation.part(part).sizes[exchange.clients])
            for step, part in (*first, (exchange.step, exchange.part))
        ]

    def answer(self, stages: list[Stage]) -> Answer:
        """All stages as one function of what a client is sent, and of what it may look at in each of them."""

        def run(sent: Any, local: Sequence[Local]) -> Reply:
            for stage, own in zip(stages[:-1], local[:-1], strict=True):
                sent = stage.step.run(sent, own).update
            return self.uplink(stages[-1].step.run(sent, local[-1]))

        return run

    def local(self, stages: list[Stage], exchange: Exchange, at: Tensor) -> tuple[Local, ...]:
        """What the clients at these positions may look at in each stage, stacked and padded."""
        clients, kept = exchange.clients[at], exchange.ledger.memory
        memory = stack_padded([kept.get(i, ()) for i in clients.tolist()]) if kept else ()
        rows = [self.store.rows(stage.part, clients, as_they_are=stage.step.as_they_are) for stage in stages]
        return tuple(
            Local(own, self.draws(stage, exchange, at), memory) for own, stage in zip(rows, stages, strict=True)
        )

    def draws(self, stage: Stage, exchange: Exchange, at: Tensor) -> Any:
        """The random numbers of the clients at these positions in one stage, stacked."""
        draw = stage.step.draw
        if draw is None:
            return ()
        clients = zip(exchange.clients[at].tolist(), stage.sizes[at].tolist(), strict=True)
        each = [draw(n, self.client_key(i), exchange.when) for i, n in clients]
        return tree_map(lambda x: x.to(self.device), stack_padded(each))

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


def stack_padded(trees: list[Any]) -> Any:
    """Stack clients' draws or memories; integer tensors of unequal shapes are padded with -1, which means no row."""

    def join(*xs: Tensor) -> Tensor:
        shape = [max(lengths) for lengths in zip(*(x.shape for x in xs), strict=True)]
        return torch.stack([x if list(x.shape) == shape else _pad(x, shape) for x in xs])

    return tree_map(join, *trees)


def _pad(x: Tensor, shape: list[int]) -> Tensor:
    padded = x.new_full(shape, -1)
    padded[tuple(slice(n) for n in x.shape)] = x
    return padded
