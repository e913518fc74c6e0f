"""A federation: m clients of unequal size, packed end to end and readable one client at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from coterie.task import Data, Task

Array = np.ndarray | Tensor


class Packed(NamedTuple):
    """The rows of all clients end to end; client i owns rows offsets[i] to offsets[i+1]."""

    x: Tensor
    y: Tensor
    offsets: Tensor  # (m+1,)

    @property
    def sizes(self) -> Tensor:
        """Rows per client (m,)."""
        return self.offsets.diff()

    def client(self, i: int) -> tuple[Tensor, Tensor]:
        """The rows of client i."""
        rows = slice(int(self.offsets[i]), int(self.offsets[i + 1]))
        return self.x[rows], self.y[rows]

    @classmethod
    def of(cls, clients: Sequence[tuple[Array, Array]]) -> Packed:
        """Pack a list of (x, y) pairs."""
        pairs = [(torch.as_tensor(x), torch.as_tensor(y)) for x, y in clients]
        sizes = torch.tensor([0] + [len(x) for x, _ in pairs])
        return cls(torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs]), sizes.cumsum(0))


@dataclass(frozen=True)
class Federation:
    """m clients, their rows for training and for testing, and what is known about them.

    Attributes:
        train: The rows clients learn from; every client has at least one.
        test: The rows clients are scored on, None where there are none.
        groups: The true group of every client (m,), when a generator knows it. Used only to score.
        ids: The clients' names; their positions where None. A client's random numbers follow its name, so
            renumbering the clients changes nothing.
        source: A plain description from which the command line can build the federation again.

    Example:
        >>> fed = Federation.from_clients([(np.zeros((3, 2)), np.zeros(3)), (np.ones((5, 2)), np.ones(5))])
        >>> len(fed), fed.train.sizes.tolist()
        (2, [3, 5])
    """

    train: Packed
    test: Packed | None = None
    groups: Tensor | None = None
    ids: tuple[str, ...] | None = None
    source: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        m = len(self.train.offsets) - 1
        if m < 1:
            raise ValueError("Federation: there must be at least one client, got 0")
        self._check_rows(self.train, "train", least=1)
        if self.test is not None:
            self._check_rows(self.test, "test", least=0)
        for name, given in (("test", self.test and self.test.sizes), ("groups", self.groups), ("ids", self.ids)):
            if given is not None and len(given) != m:
                raise ValueError(f"Federation: {name} is given for {len(given)} clients, but there are {m}")
        if self.ids is not None and len(set(self.ids)) < m:
            twice = next(i for n, i in enumerate(self.ids) if i in self.ids[:n])
            raise ValueError(f"Federation: two clients are called '{twice}'")

    def __len__(self) -> int:
        return len(self.train.offsets) - 1

    @classmethod
    def from_clients(
        cls,
        train: Sequence[tuple[Array, Array]],
        test: Sequence[tuple[Array, Array]] | None = None,
        groups: Array | Sequence[int] | None = None,
        ids: Sequence[str] | None = None,
        source: dict[str, Any] | None = None,
    ) -> Federation:
        """A federation from one (x, y) pair per client; float64 becomes float32.

        Raises:
            ValueError: Clients differ in the shape of a row, one is empty, or a value is not finite; names the client.
        """
        names = tuple(str(i) for i in ids) if ids is not None else None
        pairs = _as_tensors(train, names, "rows")
        tests = None if test is None else _as_tensors(test, names, "test rows", like=pairs[0][0] if pairs else None)
        if not pairs:
            raise ValueError("Federation: there must be at least one client, got 0")
        truth = None if groups is None else torch.as_tensor(groups, dtype=torch.long)
        return cls(Packed.of(pairs), Packed.of(tests) if tests else None, truth, names, source or {})

    def name(self, i: int) -> str:
        """What client i is called in messages."""
        return f"client {i}" if self.ids is None else f"client '{self.ids[i]}'"

    @cached_property
    def numbers(self) -> Tensor:
        """The integers that the clients' keys are folded with (m,): each follows from the client's name."""
        if self.ids is None:
            return torch.arange(len(self))
        return torch.tensor([_number(name) for name in self.ids])

    def split(self, name: str) -> Packed:
        """The rows called "train" or "test"; a federation without test rows is tested on its training rows."""
        return self.test if name == "test" and self.test is not None and len(self.test.x) else self.train

    def select(self, clients: Sequence[int] | Tensor) -> Federation:
        """The federation of these clients, in this order, under their old names."""
        keep = torch.as_tensor(clients, dtype=torch.long).tolist()
        return Federation(
            Packed.of([self.train.client(i) for i in keep]),
            self.test and Packed.of([self.test.client(i) for i in keep]),
            None if self.groups is None else self.groups[keep],
            tuple(str(i) if self.ids is None else self.ids[i] for i in keep),
        )

    def map(self, change: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]], **source: Any) -> Federation:
        """Every client's rows, train and test, put through `change(i, x, y)`."""

        def apply(part: Packed) -> Packed:
            return Packed.of([change(i, *part.client(i)) for i in range(len(self))])

        told = {**self.source, **source} if self.source else {}
        return replace(self, train=apply(self.train), test=self.test and apply(self.test), source=told)

    def check(self, task: Task) -> None:
        """Refuse data that the task's model cannot take, naming the first client at fault."""
        for part, where in ((self.train, ""), (self.test, "test rows: ")):
            if part is None or _complaint(task, part.x, part.y) is None:
                continue
            for i in range(len(self)):
                if len(part.client(i)[0]) and (wrong := _complaint(task, *part.client(i))):
                    raise ValueError(f"{self.name(i)}: {where}{wrong}")

    def _check_rows(self, part: Packed, where: str, least: int) -> None:
        if bool((small := part.sizes < least).any()):
            raise ValueError(f"{self.name(int(small.nonzero()[0]))}: has no {where} rows, needs at least {least}")
        for what, values in (("x", part.x), ("y", part.y)):
            if values.is_floating_point() and not bool(torch.isfinite(values).all()):
                bad = ~torch.isfinite(values).flatten(1).all(1) if values.dim() > 1 else ~torch.isfinite(values)
                first = int(bad.nonzero()[0])
                i = int(torch.searchsorted(part.offsets, first, right=True)) - 1
                own = bad[int(part.offsets[i]) : int(part.offsets[i + 1])]
                raise ValueError(
                    f"{self.name(i)}: {int(own.sum())} of its {len(own)} {where} rows have a value of {what} that is "
                    f"NaN or infinite (the first is row {first - int(part.offsets[i])})"
                )


def _number(name: str) -> int:
    """A name as an integer; a client named by its old position keeps it."""
    if name.isdecimal() and len(name) < 16:
        return int(name)
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")


def _complaint(task: Task, x: Tensor, y: Tensor) -> str | None:
    return task.check(Data(x, y, torch.ones(len(x))))


def _kind(y: Tensor) -> str:
    return f"{y.dtype} of shape {tuple(y.shape[1:])} per row"


def _as_tensors(
    clients: Sequence[tuple[Array, Array]], names: tuple[str, ...] | None, what: str, like: Tensor | None = None
) -> list[tuple[Tensor, Tensor]]:
    def name(i: int) -> str:
        return f"client '{names[i]}'" if names is not None and i < len(names) else f"client {i}"

    def tensor(i: int, a: Array) -> Tensor:
        try:
            t = torch.as_tensor(a)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name(i)}: its {what} cannot be read as an array of numbers ({error})") from None
        if t.dim() == 0:
            raise ValueError(f"{name(i)}: its {what} must be an array with one entry per row, got a single number")
        return t.float() if t.dtype == torch.float64 else t

    def label(y: Tensor) -> Tensor:
        return y if y.is_floating_point() else y.long()  # bytes and booleans are labels too

    pairs = [(tensor(i, x), label(tensor(i, y))) for i, (x, y) in enumerate(clients)]
    for i, (x, y) in enumerate(pairs):
        first = pairs[0][0] if like is None else like
        if y.shape[1:] != pairs[0][1].shape[1:] or y.dtype != pairs[0][1].dtype:
            raise ValueError(f"{name(i)}: its targets are {_kind(y)}, those of {name(0)} {_kind(pairs[0][1])}")
        if len(x) != len(y):
            raise ValueError(f"{name(i)}: has {len(x)} {what} of x but {len(y)} of y")
        if x.shape[1:] != first.shape[1:]:
            shapes = tuple(x.shape[1:]), tuple(first.shape[1:])
            raise ValueError(f"{name(i)}: its {what} have shape {shapes[0]}, the rows of {name(0)} {shapes[1]}")
    return pairs
