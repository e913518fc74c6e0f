"""What users have of a client (arrays, a Dataset, a DataLoader), read as rows and targets."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from coterie.storage.inputs import Inputs, Tree
from coterie.storage.packed import Array, Client, Packed, Pair, as_pair

TARGETS = ("labels", "label", "y", "target", "targets")  # where a dict has its targets; the first that is there
BATCH = 256  # items of a dataset that are put together at a time

Given = Client | tuple[Tree, Array | None] | Mapping[str, Any] | Dataset[Any] | DataLoader[Any]
Many = TypeVar("Many", bound=Iterable[Any] | None)


def one_per_client(clients: Many, part: str) -> Many:
    """Refuse a single dataset or loader in the place of one per client: its items would pass for clients.

    Args:
        clients: What the user passes.
        part: "train" or "test".

    Raises:
        ValueError: It is a single one.
    """
    if isinstance(clients, DataLoader | Dataset):
        raise ValueError(f"Federation: {part} must be a list with one entry per client, got a {_type(clients)}")
    return clients


class Reader:
    """Reads one client after the other. The first one tells how several inputs lie in a row.

    Attributes:
        inputs: The layout of a row; None if it is one tensor.
    """

    def __init__(self) -> None:
        self.inputs: Inputs | None = None
        self._first: str | None = None  # the client that the layout is from

    def read(self, given: Given, who: str, what: str) -> list[Pair]:
        """Return the rows and targets of a client, in pieces; none if it has no rows.

        The rows of a loader do not depend on how it shuffles. They are read with the same random numbers every time,
        and the random state of the program, or of a generator of the loader's, is left as it was.

        Args:
            given: What the user passes for the client.
            who: The name of the client, for messages.
            what: What messages call the rows: "rows" or "test rows".

        Raises:
            ValueError: It cannot be read, or does not agree with the first client; names the client.
        """
        if isinstance(given, Dataset) or hasattr(given, "__getitems__"):  # the latter: datasets of Hugging Face
            given = DataLoader(cast(Dataset[Any], given), BATCH, collate_fn=partial(_collate, who=who))
        if isinstance(given, DataLoader):
            with _fixed_random(given):
                return [self._pair(_unzipped(batch, who), who, what) for batch in _in_order(given, who)]
        return [self._pair(_split(given, who) if isinstance(given, Mapping) else given, who, what)]

    def _pair(self, given: Any, who: str, what: str) -> Pair:
        if isinstance(given, Packed):
            self._row(given.x, who)
        elif isinstance(given, tuple | list) and len(given) == 2:
            return as_pair((self._row(given[0], who), given[1]), who, what)
        return as_pair(given, who, what)  # pyright: ignore[reportArgumentType] - which refuses what is no pair

    def _row(self, x: Any, who: str) -> Any:
        """Return x as one array: itself, or its several inputs side by side."""
        several = isinstance(x, Mapping) or _is_tuple_of_arrays(x)
        if several and isinstance(x, tuple) and len(x) == 1:
            several, x = False, x[0]
        try:
            if self._first is None:
                self.inputs, self._first = Inputs.of(x) if several else None, who
            if several != (self.inputs is not None):
                kinds = ("several inputs", "one tensor") if several else ("one tensor", "several inputs")
                raise ValueError(f"a row is {kinds[0]}, of {self._first} it is {kinds[1]}")
            return x if self.inputs is None else self.inputs.pack(x)
        except ValueError as error:
            raise ValueError(f"{who}: {error}") from None


def _is_tuple_of_arrays(x: Any) -> bool:
    return isinstance(x, tuple) and len(x) > 0 and all(getattr(part, "shape", ()) for part in x)


def _split(item: Any, who: str) -> tuple[Any, Any]:
    """Return the inputs and the targets of an item, or of a batch of items."""
    if isinstance(item, Mapping):
        target = next((key for key in TARGETS if key in item), None)
        if target is None:
            raise ValueError(f"{who}: has no targets: none of its keys ({_listed(item)}) is one of {_listed(TARGETS)}")
        return {key: value for key, value in item.items() if key != target}, item[target]
    if not isinstance(item, tuple | list) or len(item) < 2:
        kinds = f"(x, y), (x1, x2, …, y) or a dict with a target under one of {_listed(TARGETS)}"
        raise ValueError(f"{who}: an item of its data must be {kinds}, got a {_type(item)}")
    *x, y = item
    return x[0] if len(x) == 1 else tuple(x), y


def _collate(items: Sequence[Any], who: str) -> tuple[Any, Tensor]:
    """Put the items of a dataset together. Unlike for torch's `default_collate`, a list is a row of numbers."""
    rows, targets = zip(*(_split(item, who) for item in items), strict=True)
    first, y = rows[0], _column(targets, f"{who}: its target")
    if not isinstance(first, Mapping | tuple):
        return _column(rows, f"{who}: its x"), y
    tables = [dict(row if isinstance(row, Mapping) else enumerate(row)) for row in rows]
    if odd := next((table for table in tables if table.keys() != tables[0].keys()), None):
        raise ValueError(f"{who}: its items differ in their inputs: {_listed(tables[0])} and {_listed(odd)}")
    columns = {key: _column([table[key] for table in tables], f"{who}: input {key!r}") for key in tables[0]}
    return columns if isinstance(first, Mapping) else tuple(columns.values()), y


def _column(values: Sequence[Any], which: str) -> Tensor:
    """Return the same entry of many items as one tensor."""
    try:
        shapes = list(dict.fromkeys(tuple(np.shape(value)) for value in values))
        if len(shapes) == 1:
            return torch.stack(list(values)) if isinstance(values[0], Tensor) else torch.as_tensor(np.asarray(values))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{which} cannot be read as an array of numbers ({error})") from None
    raise ValueError(f"{which} has rows of shape {shapes[0]} and of {shapes[1]}; pad them to one length")


def _unzipped(batch: Any, who: str) -> tuple[Any, Any]:
    """Return inputs and targets of a loader's batch.

    From rows that are lists torch's `default_collate` makes a list of columns, and from a tuple of inputs a list.
    """
    x, y = _split(batch, who)
    if isinstance(x, Mapping):
        x = {key: _joined(value) for key, value in x.items()}
    elif isinstance(x, tuple) or _is_tuple_of_arrays(tuple(x) if isinstance(x, list) else x):
        x = tuple(_joined(value) for value in x)
    return x, _joined(y)


def _joined(values: Any) -> Any:
    columns = isinstance(values, list) and all(isinstance(column, Tensor) and column.dim() for column in values)
    return torch.stack(values, 1) if columns and len({column.shape for column in values}) == 1 else values


def _in_order(loader: DataLoader[Any], who: str) -> Iterable[Any]:
    """Return the batches of a loader. Rows that it would shuffle are in the dataset's order, and none is dropped."""
    order = _order(loader, who)
    if order is None:
        return loader
    return DataLoader(
        loader.dataset,
        loader.batch_size,
        sampler=order,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
    )


def _order(loader: DataLoader[Any], who: str) -> Sequence[int] | None:
    """Return the row numbers that a loader shuffles, in order; None if it chooses rows in a way of its own."""
    chooses = loader.batch_size is None and loader.batch_sampler is not None
    if chooses or isinstance(loader.dataset, IterableDataset) or type(loader).__iter__ is not DataLoader.__iter__:
        return None
    sampler = loader.sampler
    if type(sampler) is SubsetRandomSampler:
        return sorted(int(i) for i in sampler.indices)
    if type(sampler) not in (RandomSampler, SequentialSampler):
        return None
    try:
        rows = len(cast(Sized, loader.dataset))
    except (TypeError, NotImplementedError):
        raise ValueError(f"{who}: its {_type(loader.dataset)} must tell its length by __len__") from None
    everything = not getattr(sampler, "replacement", False) and len(cast(Sized, sampler)) == rows
    return range(rows) if everything else None


@contextmanager
def _fixed_random(loader: DataLoader[Any]) -> Iterator[None]:
    """Seed torch, NumPy and Python for a while; their state, and that of the loader's generators, is kept."""
    batches = loader.batch_sampler
    owners = (loader, loader.sampler, batches, getattr(batches, "sampler", None))
    own = [g for owner in owners if isinstance(g := getattr(owner, "generator", None), torch.Generator)]
    states = [g.get_state() for g in own]
    legacy, python = np.random.get_state(), random.getstate()
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(0)  # torch.manual_seed would seed the GPUs too
        np.random.seed(0)
        random.seed(0)
        try:
            yield
        finally:
            np.random.set_state(legacy)
            random.setstate(python)
            for g, state in zip(own, states, strict=True):
                g.set_state(state)


def _listed(keys: Iterable[Any]) -> str:
    return ", ".join(repr(key) for key in keys)


def _type(given: object) -> str:
    return type(given).__name__
