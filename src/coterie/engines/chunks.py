"""How many clients are computed together: by their sizes, the free memory, and what two of them were seen to need."""

from __future__ import annotations

import functools
import math
import time
import timeit
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from coterie.core.engine import Exchange, Ledger
from coterie.core.pytree import joined
from coterie.engines.refusal import is_refusal
from coterie.engines.store import Store, free_memory

PADDING = 1.25  # clients share a chunk only if none is padded by more than this, unless there is little to do at all
LITTLE = 2**21  # multiplications that take no longer than it takes to tell torch what to do
SMALL = 2**19  # multiplications for which there is memory in any case, and that take less time than measuring them
SHARE = 0.4  # of the free memory, for one chunk
LONG = 1.0  # seconds of work from which on it pays to try whether clients are faster one by one
PATIENCE = 60.0  # seconds that work of one shape must have taken before graphs are compiled, which takes about as long
TRIES = 4  # of work that recurs: a GPU may record the third call and replay it from then on, which is what counts
FAILED = "it cannot be compiled"  # as the log says it
BY_VMAP = "by vmap"  # how the way without a graph is called in the log

Work = Callable[[Tensor], Any]  # something to be done for the clients at these positions


@contextmanager
def compiling_after(seconds: float | None) -> Iterator[None]:
    """In here, graphs are compiled once work has taken so long, for runs that are known to take long; None: as ever."""
    global PATIENCE
    before, PATIENCE = PATIENCE, PATIENCE if seconds is None else seconds
    try:
        yield
    finally:
        PATIENCE = before


class Ways(NamedTuple):
    """The ways in which some clients can be computed.

    Attributes:
        name: Of the work, for the log.
        together: All at once.
        alone: One by one; None where that is never done.
        cached: Bytes of work per chunk on a CPU: larger chunks leave the cache and run slower.
        compiled: All at once, by graphs that take long to compile, by their names.
        found: With graphs, which of them was the fastest for which clients, and why, in this run or one before it.
    """

    name: str
    together: Work
    alone: Work | None
    cached: int
    compiled: Mapping[str, Work] = {}
    found: MutableMapping[str, tuple[int, str]] | None = None


class Chunks:
    """Cuts the clients of an exchange into chunks that are computed together.

    Clients are sorted by size, so that a small client is never padded to the length of a large one. How many go into a
    chunk follows from the free memory and from what two clients were seen to need. Models that vmap cannot batch, or
    only slows down, are done client by client. Every such choice is in the log, and in the checkpoint: sums are added
    chunk by chunk, so that a resumed run must cut its chunks as before to end with the same bits.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._cuts: dict[tuple[str, int], tuple[Tensor, list[Tensor]]] = {}
        self._spent: dict[str, float] = {}  # seconds, on work that could be compiled

    def of(self, exchange: Exchange, sizes: Tensor, ways: Ways) -> Iterator[tuple[Tensor, Work]]:
        """Positions of clients that go together, all buckets of them, and how they are to be done."""
        for bucket in self._buckets(exchange, sizes):
            if (name := self._small(exchange, sizes, bucket, ways)) and exchange.ledger.chunks.get(name) != 0:
                yield bucket, lambda at, name=name: _at_once(name, ways, exchange.ledger, at)
                continue
            size = 0 if name else self._size(exchange, sizes, bucket, ways)
            work = ways.alone if size == 0 and ways.alone is not None else ways.together
            for at in bucket.split(size or 1):
                yield at, self._fastest(exchange, sizes, at, ways) if ways.compiled and size else work

    def _buckets(self, exchange: Exchange, sizes: Tensor) -> list[Tensor]:
        """All clients by size; while the same clients take part and remember nothing, it need not be done again."""
        x = self.store.part(exchange.part).x
        free = LITTLE // _each(exchange, x)
        clients, cut = self._cuts.get((exchange.part, free), (None, []))
        memory = exchange.ledger.memory
        if clients is not exchange.clients or memory:
            forms = _forms([memory.get(i) for i in exchange.clients.tolist()]) if memory else torch.zeros_like(sizes)
            cut = buckets(sizes, forms, free)
            self._cuts[exchange.part, free] = exchange.clients, cut
        return cut

    def _small(self, exchange: Exchange, sizes: Tensor, bucket: Tensor, ways: Ways) -> str | None:
        """A name for work on clients that have so little to do that nothing need be measured; None for all other."""
        x = self.store.part(exchange.part).x
        if self.store.device.type != "cpu" or (ways.alone is not None and len(bucket) == 1):
            return None
        rows = len(bucket) * int(sizes[bucket].max())
        return f"{ways.name} on few {exchange.part} rows" if rows * _each(exchange, x) <= SMALL else None

    def _size(self, exchange: Exchange, sizes: Tensor, bucket: Tensor, ways: Ways) -> int:
        """Clients per chunk for this work and client size; 0 to do them one by one."""
        if ways.alone is not None and len(bucket) == 1:
            return 0
        ledger, label = exchange.ledger, _label(exchange, sizes, bucket, ways)
        if label not in ledger.chunks:
            size, why = self._measured(label, exchange, sizes, bucket, ways)
            ledger.chunks[label] = size
            how = f"in chunks of {min(size, len(bucket))}" if size else "one by one"
            ledger.messages.append(f"vectorised: {label}: {len(bucket)} clients {how} ({why})")
        return ledger.chunks[label]

    def _measured(self, label: str, exchange: Exchange, sizes: Tensor, bucket: Tensor, ways: Ways) -> tuple[int, str]:
        """What fits in memory, and on a CPU no more than its cache likes; or 0, where one by one is faster; and why."""
        device, pair, begin = self.store.device, bucket[:2], time.perf_counter()
        free = free_memory(device)
        room = free * SHARE if device.type != "cpu" else min(free * SHARE, ways.cached)
        try:
            with Peak() as probe:  # two clients, so that every batched operation is really batched
                ways.together(pair)
        except RuntimeError as error:
            if ways.alone is None or not is_refusal(error):
                raise
            return 0, _why_refused(error)
        seconds = (time.perf_counter() - begin) / len(pair)
        if probe.peak * len(bucket) > room * len(pair):  # then what is made once and kept must not be counted
            with Peak() as probe:
                ways.together(pair)
        each = max(1, probe.peak // len(pair))
        if each > free:
            raise ValueError(
                f"{label}: one client needs about {each / 2**20:,.0f} MiB, but {device} has only "
                f"{free / 2**20:,.0f} MiB free"
            )
        size = max(1, min(int(room // each), self.store.most(exchange.part, int(sizes[bucket].max()))))
        why = f"{each / 2**20:.2f} MiB a client, {free / 2**30:.1f} GiB free on {device}"
        if ways.alone is not None and size == 1:
            return 0, why
        # The first time may be longer than all others, so that what it says is tried again only if it is too long.
        if ways.alone is None or seconds * len(bucket) <= LONG:
            return size, why
        chunk = bucket[:size]
        batched = self._seconds(ways.together, chunk)
        if batched * len(bucket) > LONG:
            single = min(self._seconds(ways.alone, bucket[:1]) for _ in range(2))
            if single < batched and single < (batched := self._seconds(ways.together, chunk)):
                return 0, f"{1e3 * single:.0f} ms a client, {1e3 * batched:.0f} in chunks of {len(chunk)}"
        return size, why

    def _fastest(self, exchange: Exchange, sizes: Tensor, at: Tensor, ways: Ways) -> Work:
        """The fastest way to do these clients at once.

        A graph is of one shape. It is tried when all work of that shape has taken as long as compiling would; a later
        run of the same step begins with what was found then.
        """
        ledger, found, most = exchange.ledger, ways.found, int(sizes[at].max())
        assert found is not None
        label = f"{ways.name} of {len(at)} clients with up to {most} {exchange.part} rows, compiled"
        if label not in ledger.chunks:
            if label not in found:
                if self._spent.get(label, 0.0) < PATIENCE:
                    return lambda at: self._timed(label, ways.together, at)
                ledger.chunks[label], why = self._tried(ways, at)
                if ledger.chunks[label] or FAILED not in why:  # for want of memory, say, which another run may have
                    found[label] = ledger.chunks[label], why
            else:
                ledger.chunks[label], why = found[label]
            ledger.messages.append(f"vectorised: {label}: {why}")
        if not (which := ledger.chunks[label]):
            return ways.together
        return lambda at: _by_graph(label, list(ways.compiled.values())[which - 1], ways, ledger, at)

    def _timed(self, label: str, work: Work, at: Tensor) -> Any:
        """Do it, and add the seconds to those of its kind."""
        begin = time.perf_counter()
        done = work(at)
        self._wait()
        self._spent[label] = self._spent.get(label, 0.0) + time.perf_counter() - begin
        return done

    def _tried(self, ways: Ways, chunk: Tensor) -> tuple[int, str]:
        """Which way is the fastest, 0 for the one without a graph, and what was found."""
        tries = [self._try(name, work, chunk) for name, work in ways.compiled.items()]
        plain = min(self._seconds(ways.together, chunk) for _ in range(TRIES))
        seconds = [plain, *(seconds for seconds, _ in tries)]
        best = seconds.index(min(seconds))
        found = "; ".join(said for _, said in tries)
        return best, f"{[BY_VMAP, *ways.compiled][best]} ({1e3 * plain:.1f} ms a client {BY_VMAP}; {found})"

    def _try(self, name: str, work: Work, chunk: Tensor) -> tuple[float, str]:
        """Seconds a client by a graph, infinitely many if it fails, and what there is to say of it."""
        begin = time.perf_counter()
        try:
            work(chunk)
            took = time.perf_counter() - begin
            seconds = min(self._seconds(work, chunk) for _ in range(TRIES))
        except Exception as error:  # there is no compiler, or not enough memory, or it fails: nothing depends on it
            return math.inf, f"{name} {FAILED}: {_first_line(error)}"
        return seconds, f"{1e3 * seconds:.1f} {name}, {took:.0f} s to compile"

    def _seconds(self, work: Work, at: Tensor) -> float:
        """Of one try, for each client."""
        return timeit.timeit(lambda: (work(at), self._wait()), number=1) / len(at)

    def _wait(self) -> None:
        if self.store.device.type == "cuda":
            torch.cuda.synchronize(self.store.device)


def _label(exchange: Exchange, sizes: Tensor, bucket: Tensor, ways: Ways) -> str:
    """A name for work on clients of about this size."""
    return f"{ways.name} on up to {size_class(int(sizes[bucket].max()))} {exchange.part} rows"


def _each(exchange: Exchange, x: Tensor) -> int:
    """Multiplications for one of these rows: every number that a client is sent meets it about once."""
    return max(1, x[:1].numel() + exchange.bytes_down() // 4)


def _at_once(name: str, ways: Ways, ledger: Ledger, at: Tensor) -> Any:
    """What little work there is, together; one by one if vmap cannot batch it, now and from then on."""
    try:
        done = ways.together(at)
    except RuntimeError as error:
        if ways.alone is None or not is_refusal(error):
            raise
        ledger.chunks[name] = 0
        ledger.messages.append(f"vectorised: {name}: {len(at)} clients one by one ({_why_refused(error)})")
        return joined([ways.alone(i.reshape(1)) for i in at])
    if name not in ledger.chunks:
        ledger.chunks[name] = len(at)
        ledger.messages.append(f"vectorised: {name}: {len(at)} clients in chunks of {len(at)} (there is little to do)")
    return done


def _by_graph(label: str, graph: Work, ways: Ways, ledger: Ledger, at: Tensor) -> Any:
    """What a graph does; without it, now and from then on, where a run is resumed that can no longer compile it."""
    try:
        return graph(at)
    except Exception as error:
        ledger.chunks[label] = 0
        ledger.messages.append(f"vectorised: {label}: {BY_VMAP} ({_first_line(error)})")
        if ways.found is not None:
            ways.found.pop(label, None)
        return ways.together(at)


def _why_refused(error: Exception) -> str:
    return f"vmap cannot batch this model: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


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


def _forms(memories: list[Any]) -> Tensor:
    """A number for each client: those with the same one remember the same kinds of things, and can be stacked."""
    forms = [tuple(kept) if isinstance(kept, dict) else (type(kept),) for kept in memories]
    number = {form: i for i, form in enumerate(dict.fromkeys(forms))}
    return torch.tensor([number[form] for form in forms])


def buckets(sizes: Tensor, forms: Tensor, free: int = 0) -> list[Tensor]:
    """Positions of clients, largest first, cut where padding to the largest of the bucket would waste too much.

    Clients that remember other kinds of things, or nothing yet, are kept apart: their `forms` differ. A bucket of up to
    `free` rows, padding among them, costs no less than a smaller one does, and is not cut.

    Example:
        >>> sizes, new = torch.tensor([10, 100, 9, 90]), torch.zeros(4)
        >>> [b.tolist() for b in buckets(sizes, new)], [b.tolist() for b in buckets(sizes, new, free=400)]
        ([[1, 3], [0, 2]], [[1, 3, 0, 2]])
    """
    out: list[Tensor] = []
    for form in forms.unique():
        at = (forms == form).nonzero().flatten()
        at = at[sizes[at].argsort(descending=True, stable=True)]
        while len(at):
            own = sizes[at]
            end = max(int((own * PADDING >= own[0]).sum()), min(len(at), free // max(1, int(own[0]))))
            out.append(at[:end].sort().values if bool((own[:end] == own[0]).all()) else at[:end])
            at = at[end:]
    return out


class Peak(TorchDispatchMode):
    """Counts the bytes of live tensors made inside the `with` block, and the most that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would load its compiler to do so, which takes a second or two, and nothing is compiled in here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if _is_of_arguments(func):  # views, and what is changed in place, cost nothing
            return out
        for tensor in _tensors(out):
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


@functools.cache
def _is_of_arguments(func: Any) -> bool:
    """Whether an operation gives its arguments back, or views of them."""
    return any(given.alias_info is not None for given in func._schema.returns)


def _tensors(given: Any) -> Iterator[Tensor]:
    """All tensors in the results of an operation, which are in lists and tuples at most."""
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, tuple | list):
        for part in given:
            yield from _tensors(part)
