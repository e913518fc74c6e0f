"""Many clients at once on one device: `torch.func.vmap` over chunks of clients of like size."""

from __future__ import annotations

import timeit
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._python_dispatch import TorchDispatchMode

from coterie.client import ClientStep, Local, Reply
from coterie.cohort import Cohort
from coterie.executors.graphs import Replayed
from coterie.executors.store import Store, free_memory
from coterie.tree import leaves, nbytes, take, tree_map

PADDING = 1.25  # clients share a chunk only if none is padded by more than this
SHARE = 0.4  # of the free memory, for one chunk
CACHED = 32 * 2**20  # bytes of work per chunk on a CPU: larger chunks leave the cache and run slower


LONG = 1.0  # seconds of work from which on it pays to try whether clients are faster one by one

RECORDING = ("cuda",)  # devices whose operations can be recorded

Work = Callable[[Tensor], Any]  # something to be done for the clients at these positions


class Vectorised(Cohort):
    """Chunks of clients, each a single batched computation; sums are added chunk by chunk.

    Clients are sorted by size, so that a small client is never padded to the length of a large one. How many go into
    a chunk follows from the free memory and from what one client was seen to need. Models that vmap cannot batch, or
    only slows down, are done client by client. Every such choice is in the log; one of a kind is done so unasked.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._store = Store(self.federation, self.device, self.ledger.messages)
        self._cuts: dict[str, tuple[Tensor, list[Tensor]]] = {}
        self._recorded: dict[str, tuple[Replayed, Replayed]] = {}  # of chunks, and of single clients

    def _replies(self, step: ClientStep, name: str, shared: Any, rows: Tensor | None) -> Iterator[tuple[Tensor, Reply]]:
        def answer(sent: Any, local: Local) -> Reply:
            return self.uplink(step.run(sent, local))

        several, one = vmap(answer, in_dims=(None if rows is None else 0, 0)), answer
        if step.many:  # so much more is computed for more models that chunks are sized for each number of them
            name = f"{name} on {nbytes(shared) / 2**20:.2f} MiB that are sent,"
        recorded = step.many and rows is None and self.device.type in RECORDING
        if recorded:
            several, single = self._recorded.setdefault(name, (Replayed(several), Replayed(answer)))
            one = single if len(self) == 1 else answer  # a recording keeps its memory: not one for every large client

        def together(at: Tensor) -> Reply:
            sent = shared if rows is None else take(shared, rows[at])
            with self._arithmetic():
                return several(sent, self._local(step, at))

        def alone(at: Tensor) -> Reply:
            sent = shared if rows is None else take(shared, rows[at][0])
            local = tree_map(lambda x: x[0], self._local(step, at))
            with self._arithmetic():
                return tree_map(lambda x: x[None], one(sent, local))

        for at, work in self._chunks(name, together, CACHED, alone, timed=not recorded):
            reply = work(at)
            self._remember(at, reply.memory)
            yield at, reply

    def _chunks(
        self, name: str, together: Work, cached: int, alone: Work | None = None, *, timed: bool = True
    ) -> Iterator[tuple[Tensor, Work]]:
        """Positions of clients that go together, all buckets of them, and how they are to be done."""
        for bucket in self._buckets():
            size = self._chunk(name, bucket, together, cached, alone, timed)
            for at in bucket.split(size or 1):
                yield at, alone if size == 0 and alone is not None else together

    def _buckets(self) -> list[Tensor]:
        """All clients by size; while the same clients take part and remember nothing, it need not be done again."""
        clients, cut = self._cuts.get(self.part, (None, []))
        if clients is not self.clients or self.ledger.memory:
            cut = buckets(self.sizes, known=self._has_memory())
            self._cuts[self.part] = self.clients, cut
        return cut

    def _local(self, step: ClientStep, at: Tensor) -> Local:
        clients, draws, memory = self.clients[at], (), ()
        if step.draw is not None:
            each = zip(clients.tolist(), self.sizes[at].tolist(), strict=True)
            draws = tree_map(lambda x: x.to(self.device), _stack_draws([self._draws(step, i, n) for i, n in each]))
        if self.ledger.memory:
            memory = _stack_draws([self.ledger.memory.get(i, ()) for i in clients.tolist()])
        return Local(self._store.rows(self.part, clients), draws, memory)

    def _has_memory(self) -> Tensor:
        kept = self.ledger.memory
        if not kept:
            return torch.zeros(len(self), dtype=torch.bool)
        return torch.tensor([i in kept for i in self.clients.tolist()])

    def _remember(self, at: Tensor, memory: Any) -> None:
        if leaves(memory):
            for position, i in enumerate(self.clients[at].tolist()):
                self.ledger.memory[i] = take(memory, position)

    def _chunk(self, name: str, bucket: Tensor, together: Work, cached: int, alone: Work | None, timed: bool) -> int:
        """Clients per chunk for this step and client size; 0 to do them one by one."""
        if alone is not None and len(bucket) == 1 and (timed or len(self) == 1):
            return 0
        label = f"{name} on up to {size_class(int(self.sizes[bucket].max()))} {self.part} rows"
        if label not in self.ledger.chunks:
            size, why = self._measured(label, bucket, together, cached, alone, timed)
            self.ledger.chunks[label] = size
            way = f"in chunks of {min(size, len(bucket))}" if size else "one by one"
            self.ledger.messages.append(f"vectorised: {label}: {len(bucket)} clients {way} ({why})")
        return self.ledger.chunks[label]

    def _measured(
        self, label: str, bucket: Tensor, together: Work, cached: int, alone: Work | None, timed: bool
    ) -> tuple[int, str]:
        """What fits in memory, and on a CPU no more than its cache likes; or 0, where one by one is faster; and why."""
        try:  # once before, so that what is made once and kept is not counted
            together(bucket[:2])
        except RuntimeError as error:
            if alone is None or isinstance(error, torch.OutOfMemoryError):
                raise
            alone(bucket[:1])  # if that fails too, it is the model's own fault
            return 0, f"vmap cannot batch this model: {str(error).splitlines()[0]}"
        with Peak() as probe:  # two clients, so that every batched operation is really batched
            together(bucket[:2])
        each = max(1, probe.peak // len(bucket[:2]))
        free = free_memory(self.device)
        room = free * SHARE if self.device.type != "cpu" else min(free * SHARE, cached)
        if each > free:
            raise ValueError(
                f"{label}: one client needs about {each / 2**20:,.0f} MiB, but {self.device} has only "
                f"{free / 2**20:,.0f} MiB free"
            )
        size = max(1, min(int(room // each), self._store.most(self.part, int(self.sizes[bucket].max()))))
        why = f"{each / 2**20:.2f} MiB a client, {free / 2**30:.1f} GiB free on {self.device}"
        if alone is not None and size == 1:
            return 0, why
        if timed and alone is not None and self._seconds(together, bucket[:2]) / 2 * len(bucket) > LONG:
            batched = self._seconds(together, bucket[:size]) / len(bucket[:size])
            single = self._seconds(alone, bucket[:1])
            if single < batched:
                return 0, f"{1e3 * single:.0f} ms a client, {1e3 * batched:.0f} in chunks of {len(bucket[:size])}"
        return size, why

    def _seconds(self, work: Work, at: Tensor) -> float:
        """The shorter of two tries."""
        return min(timeit.repeat(lambda: (work(at), self._wait()), number=1, repeat=2))

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def size_class(rows: int) -> int:
    """The next of some sizes that are a quarter apart: clients of one class get chunks of one size.

    Example:
        >>> [size_class(n) for n in (1, 5, 50, 60, 1000)]
        [1, 5, 51, 63, 1113]
    """
    size = 1
    while size < rows:
        size = max(size + 1, int(PADDING * size))
    return size


def buckets(sizes: Tensor, known: Tensor) -> list[Tensor]:
    """Positions of clients, largest first, cut where padding to the largest of the bucket would waste too much.

    Clients that remember something (`known`) are kept apart from those that do not yet.

    Example:
        >>> [b.tolist() for b in buckets(torch.tensor([10, 100, 9, 90]), torch.zeros(4, dtype=torch.bool))]
        [[1, 3], [0, 2]]
    """
    out: list[Tensor] = []
    for side in (known, ~known):
        at = side.nonzero().flatten()
        at = at[sizes[at].argsort(descending=True, stable=True)]
        while len(at):
            own = sizes[at]
            end = int((own * PADDING >= own[0]).sum())
            out.append(at[:end].sort().values if bool((own[:end] == own[0]).all()) else at[:end])
            at = at[end:]
    return out


def _stack_draws(draws: list[Any]) -> Any:
    """Stack clients' draws; integer tensors of unequal shapes are padded with -1, which means no row."""

    def join(*xs: Tensor) -> Tensor:
        shape = [max(lengths) for lengths in zip(*(x.shape for x in xs), strict=True)]
        return torch.stack([x if list(x.shape) == shape else _pad(x, shape) for x in xs])

    return tree_map(join, *draws)


def _pad(x: Tensor, shape: list[int]) -> Tensor:
    padded = x.new_full(shape, -1)
    padded[tuple(slice(n) for n in x.shape)] = x
    return padded


class Peak(TorchDispatchMode):
    """Counts the bytes of live tensors made inside the `with` block, and the most that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage().data_ptr() for x in leaves((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        self._seen |= given  # what was there before, and views of it, cost nothing
        for tensor in leaves(out):
            storage = tensor.untyped_storage()
            if (mark := storage.data_ptr()) not in self._seen:
                self._seen.add(mark)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._gone, mark, storage.nbytes())
        return out

    def _gone(self, mark: int, size: int) -> None:
        self._seen.discard(mark)
        self.live -= size
