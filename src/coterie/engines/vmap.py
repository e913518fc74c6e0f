"""Many clients at once on one device: `torch.func.vmap` over chunks of clients of like size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any

from torch import Tensor
from torch.func import vmap

from coterie.core.engine import Exchange
from coterie.core.key import Key
from coterie.core.local import Way, stacked_by
from coterie.core.pytree import leaves, take, tree_map
from coterie.core.step import Reply, step_name
from coterie.core.train import Models, Train, own_rows
from coterie.engines.chunks import Chunks, Ways
from coterie.engines.compiled import GRAPHS
from coterie.engines.errors import FAULTS, explained, is_own_fault
from coterie.engines.graphs import Replayed
from coterie.engines.local import Answer, LocalEngine
from coterie.engines.pooling import ChannelsLast
from coterie.engines.refusal import is_refusal

CACHED = 32 * 2**20  # bytes of work per chunk on a CPU
RECORDING = ("cuda",)  # devices whose operations can be recorded
COMPILING = ("cuda",)  # devices on which graphs of convolutions may be faster than one operation after the other


class Vmap(LocalEngine):
    """Chunks of clients, each a single batched computation; sums are added chunk by chunk."""

    name = "vmap"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.chunks = Chunks(self.store)
        self._recorded: dict[tuple[str, int, str], tuple[Any, Replayed, Replayed]] = {}
        self._graphs = {
            "as a graph": GRAPHS.way(self.precision),
            "as a graph of products": GRAPHS.way(self.precision, products=math.inf),
        }

    def replies(self, exchange: Exchange) -> Iterator[tuple[Tensor, Reply]]:
        """Run the step, as a function of one client, on chunks of clients."""
        stages, rows, message = self.stages(exchange), exchange.rows, exchange.message
        several, one = self._functions(self.answer(stages), exchange)

        def together(at: Tensor, several: Answer = several) -> Reply:
            sent = message if not isinstance(rows, Tensor) else own_rows(message, rows[at])
            with self.arithmetic():
                return several(sent, self.local(stages, exchange, at))

        def compiled(at: Tensor, way: Way, several: Answer) -> Reply:
            with stacked_by(way):
                return together(at, several)

        def alone(at: Tensor) -> Reply:
            sent = message if not isinstance(rows, Tensor) else own_rows(message, rows[at][0])
            with explained(self, exchange, int(exchange.clients[at[0]])), self.arithmetic():
                local = tree_map(lambda x: x[0], self.local(stages, exchange, at))
                return tree_map(lambda x: x[None], one(sent, local))

        # More is computed for more models, so chunks are sized for each size of what a client is sent.
        steps = " after ".join(step_name(s) for s in (exchange.step, exchange.first and exchange.first.step) if s)
        name = f"{steps} (message of {exchange.bytes_down() / 2**20:.2f} MiB)"
        ways = Ways(name, naming_clients(together, alone), alone, CACHED)
        if self._compiles(exchange):
            graphs = {
                how: partial(compiled, way=way, several=self._functions(self.answer(stages), exchange, how)[0])
                for how, way in self._graphs.items()
            }
            found = GRAPHS.found(self.task, self.precision, self.device, repr(exchange.step(self.task)))
            ways = ways._replace(compiled=graphs, found=found)
        for at, work in self.chunks.of(exchange, self.sizes(exchange), ways):
            reply = work(at)
            self._remember(exchange, at, reply.memory)
            yield at, reply

    @contextmanager
    def arithmetic(self) -> Iterator[None]:
        """For what clients compute, with images as the device likes them."""
        images = ChannelsLast() if self.device.type == "cpu" and self._convolves else nullcontext()
        with super().arithmetic(), images:
            yield

    def _compiles(self, exchange: Exchange) -> bool:
        """Whether clients train convolutions of images, on a device for which these are worth compiling."""
        return self.device.type in COMPILING and isinstance(exchange.step(self.task), Train) and self._convolves

    @cached_property
    def _convolves(self) -> bool:
        """Whether the task's module has kernels of images."""
        return self.task.functions is not None and any(p.dim() == 4 for p in self.task.init(Key.of(0)).values())

    def _functions(self, answer: Answer, exchange: Exchange, way: str = "vmap") -> tuple[Answer, Answer]:
        """The step for a stacked chunk of clients, and for one; on a GPU recorded, if it is many small operations."""
        own = isinstance(exchange.rows, Tensor)

        def common(sent: Any, local: Any) -> Reply:
            return vmap(lambda each: answer(sent, each))(local)  # an argument would be taken apart and put together

        several = vmap(answer, in_dims=(_own_dims(exchange.message), 0)) if own else common
        if own or exchange.first or self.device.type not in RECORDING:
            return several, answer
        # A method may be changed between two exchanges: a recording is of one method's step, which it keeps alive.
        owner = getattr(exchange.step, "__self__", None)
        key = step_name(exchange.step), id(owner), way
        _, many, single = self._recorded.setdefault(key, (owner, Replayed(several), Replayed(answer)))
        return many, single if len(exchange.clients) == 1 else answer  # not one for every large client

    def _remember(self, exchange: Exchange, at: Tensor, memory: Any) -> None:
        if leaves(memory):
            for position, i in enumerate(exchange.clients[at].tolist()):
                exchange.ledger.memory[i] = take(memory, position)


def naming_clients(together: Callable[[Tensor], Any], alone: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """Work on a chunk that, where it fails by a fault of the step's, fails with the name of the client."""

    def work(at: Tensor) -> Any:
        try:
            return together(at)
        except FAULTS as error:
            if not is_own_fault(error) or is_refusal(error):
                raise
            for i in at:  # whose fault it is
                alone(i.reshape(1))
            raise RuntimeError(f"vmap fails where single clients do not: {error}") from error

    return work


def _own_dims(message: Any) -> Any:
    """Which parts of a message are the clients' own: of `Models`, the models and labels; else everything."""
    if not isinstance(message, Models):
        return 0
    return Models(theta=0, lr=0 if message.lr_each else None, label=0, common=None)  # pyright: ignore
