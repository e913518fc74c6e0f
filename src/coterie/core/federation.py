"""A federation: m clients of unequal size, packed end to end and readable one client at a time."""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.core import federation_display
from coterie.core.partitions import held_out as held_out_rows
from coterie.core.partitions import read_partitions
from coterie.core.task import Data, Task
from coterie.storage import mapped
from coterie.storage.clients import Given, Reader, one_per_client
from coterie.storage.inputs import Inputs
from coterie.storage.packed import Array, Packed, check_rows, client_name, take_in
from coterie.storage.tables import plain_clients
from coterie.tables.preparation import Preparation
from coterie.tables.rows import held_out, usable
from coterie.tables.target import Kind, Target

__all__ = ["Array", "Federation", "Packed"]

CHECKED = 256 * 2**20  # bytes of rows that are shown to a task together; of x it looks at a single row


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
        inputs: The inputs that lie side by side in a row of x, where a module takes several; None where a row is one.
        columns: The names of the entries of a row of x, None where they have none.
        preparation: How rows of a table became rows of x, where it was made from one.

    Example:
        >>> fed = Federation.from_clients([(torch.zeros(3, 2), torch.zeros(3)), (torch.ones(5, 2), torch.ones(5))])
        >>> len(fed), fed.train.sizes.tolist()
        (2, [3, 5])
    """

    train: Packed
    test: Packed | None = None
    groups: Tensor | None = None
    ids: tuple[str, ...] | None = None
    source: dict[str, Any] = field(default_factory=dict)
    inputs: Inputs | None = None
    columns: tuple[str, ...] | None = None
    preparation: Preparation | None = None

    def __post_init__(self) -> None:
        m = len(self.train.offsets) - 1
        if m < 1:
            raise ValueError("Federation: there must be at least one client, got 0")
        for name, part in (("train", self.train), ("test", self.test)):
            if part is not None and part.pages is None:  # what lies in files was checked when it was written
                for first, piece in part.pieces():
                    check_rows(piece, name, lambda i, first=first: self.name(first + i))
        for name, given in (("test", self.test and self.test.sizes), ("groups", self.groups), ("ids", self.ids)):
            if given is not None and len(given) != m:
                raise ValueError(f"Federation: {name} is given for {len(given)} clients, but there are {m}")
        if self.ids is not None and len(set(self.ids)) < m:
            raise ValueError(f"Federation: two clients are called '{Counter(self.ids).most_common(1)[0][0]}'")
        shape = tuple(self.train.x.shape[1:])
        if self.inputs is not None and shape != (self.inputs.width,):
            raise ValueError(f"Federation: rows have shape {shape}, but inputs take {self.inputs.width} numbers apart")
        if self.columns is not None and shape != (len(self.columns),):
            raise ValueError(f"Federation: {len(self.columns)} columns are named, but rows of x have shape {shape}")

    def __repr__(self) -> str:
        return str(federation_display.card(self))

    def _repr_html_(self) -> str:
        return federation_display.card(self).html()

    def __len__(self) -> int:
        return len(self.train.offsets) - 1

    @classmethod
    def from_clients(
        cls,
        train: Sequence[Given],
        test: Sequence[Given] | None = None,
        groups: Array | Sequence[int] | Sequence[str] | None = None,
        ids: Sequence[str] | None = None,
        source: dict[str, Any] | None = None,
        columns: Sequence[str] | None = None,
    ) -> Federation:
        """A federation from what users have of each client; float64 becomes float32.

        A client is one of these:

        - a pair (x, y) of arrays; y is None for unlabelled points. x may be a tuple or a dict of arrays, which are the
          inputs of a module by position or by keyword; or a table of pandas', whose columns are put in the order of
          `columns`, or of the first client's;
        - a dict of arrays, with targets under "labels", "label", "y", "target" or "targets";
        - a `torch.utils.data.Dataset` whose items are (x, y), (x1, x2, …, y) or such dicts;
        - a `torch.utils.data.DataLoader` with such batches. How it shuffles makes no difference.

        Args:
            train: One per client.
            test: The same for the rows to score on.
            groups: The true group of every client. Names, such as ["north", "south", "north"], are numbered in the
                order in which they come first: [0, 1, 0]. They are not kept.
            ids: The clients' names.
            source: From what the command line can build the federation again.
            columns: The names of the entries of a row. A run keeps them, and `coterie assign` goes by them.

        Raises:
            ValueError: Clients differ in the shape of a row, one is empty, or a value is not finite; names the client.
        """
        names = tuple(str(i) for i in ids) if ids is not None else None
        reader, name = Reader(), lambda i: client_name(i, names)
        named = None if columns is None else tuple(str(c) for c in columns)
        train, named = plain_clients(one_per_client(train, "train"), named, name)
        test, named = plain_clients(one_per_client(test, "test"), named, name)
        own = _packed(take_in(train, name, "rows", reader.read))
        if own is None:
            raise ValueError("Federation: there must be at least one client, got 0")
        tests = _packed(take_in(test or (), name, "test rows", reader.read, like=(own.x, own.y)))
        truth = None if groups is None else _numbered(groups)
        return cls(own, tests, truth, names, source or {}, reader.inputs, named)

    @classmethod
    def from_table(
        cls,
        frame: Any,
        client: str,
        target: str,
        *,
        kind: Kind = "auto",
        test: float = 0.25,
        time: str | None = None,
        seed: int = 0,
        preparation: Preparation | None = None,
    ) -> Federation:
        """A federation from one table with a column that says whose a row is.

        Numbers are standardised, categories become columns of 0 and 1, missing values the mean, dates several numbers.
        All of this follows from sums over the training rows, and is kept: `federation.preparation.features(rows)` does
        the same to other rows, and `federation.preparation.notes` says what was done.

        Args:
            frame: The rows: a table of pandas', or any that narwhals knows, such as those of polars.
            client: The column that says whose a row is.
            target: The column that is to be predicted. Words, and any two values, are classes; numbers are
                standardised, or their logarithms if they are above 0 and skewed.
            kind: What the target is, where it is not to be found out: "number", "log" or "classes".
            test: The share of each client's rows that are test rows, at least one of several; 0 for none.
            time: A column that orders the rows of a client; the last ones are the test rows. None draws them.
            seed: Of that draw.
            preparation: That of other rows, to be used in place of one of these.

        Raises:
            ValueError: A column is not there, or cannot be what it is said to be; says which.

        Example:
            >>> import pandas as pd
            >>> shops = {"shop": list("aaabbb"), "price": [1.0, 2, 3, 2, 3, 4], "sales": [9.0, 7, 5, 4, 4, 3]}
            >>> rows = pd.DataFrame(shops)
            >>> federation = Federation.from_table(rows, client="shop", target="sales")
            >>> federation.ids, federation.columns, federation.train.sizes.tolist()
            (('a', 'b'), ('price',), [2, 2])
        """
        rows = usable(frame, client, target)
        held = held_out(rows, test, time, seed)
        own = preparation or Preparation.of_table(rows.frame[~held], client, target, kind)
        if own.target.classes and preparation is None:  # test rows may have a class that others have not
            own = own.with_classes(Target.of_rows(rows.frame[target], "classes").classes)
        names, code = rows.by_client()
        x, (y, known) = own.features(rows.frame), own.targets(rows.frame)
        if not known.all():
            lost = int((~known).sum())
            raise ValueError(f"target '{target}' is infinite or no number in {lost:,} row{'s' * (lost > 1)}")
        train, tests = (_by_client(x, y, code, part, len(names)) for part in (~held, held))
        described = replace(own, about_rows=rows.notes)
        return cls(train, tests if held.any() else None, ids=names, columns=own.names, preparation=described)

    @classmethod
    def from_partitioner(
        cls, partitioner: Any, x: str = "image", y: str = "label", *, test: float = 0.25, seed: int = 0
    ) -> Federation:
        """A federation from a Partitioner of Flower Datasets (`flwr_datasets.partitioner`): one client per partition.

        Images become (channels, height, width) with numbers from 0 to 1, as other bytes do; other arrays keep their
        axes. Clients of a partitioner by natural ids have these as names.

        Args:
            partitioner: Its `dataset` is set; or one of `FederatedDataset.partitioners`.
            x: The column of the features.
            y: The column of the labels.
            test: The share of each client's rows that are test rows, at least one of several; 0 for none.
            seed: Of their draw.

        Raises:
            ValueError: A column is not there, or its values differ in shape; names the client.
        """
        if not 0 <= test < 1:
            raise ValueError(f"test must be a share from 0 to below 1, got {test!r}")
        rows, ids = read_partitions(partitioner, x, y)
        whole = cls.from_clients(rows, ids=ids)
        if not test:
            return whole
        train, tests = held_out_rows(whole.train, test, whole.numbers, seed)
        return replace(whole, train=train, test=tests)

    @classmethod
    def create(
        cls,
        path: str | Path,
        train: Iterable[Given],
        test: Iterable[Given] | None = None,
        groups: Iterable[int] | None = None,
        ids: Iterable[str] | None = None,
    ) -> Federation:
        """Write a federation to a new folder, client by client, and open it: it may be larger than memory.

        Everything may be a generator. All of `train` is drawn first, each client's name with it, then `test`, then
        `groups`. The rows are checked here, once, and a write that fails leaves nothing behind.

        Args:
            path: The folder, which must not be there yet.
            train: What `from_clients` takes per client, or pieces of many clients each, which are written faster.
            test: The same for the rows to score on.
            groups: The true group of every client.
            ids: The clients' names.

        Raises:
            ValueError: As `from_clients`, and if the folder is there already.

        Example:
            >>> from tempfile import TemporaryDirectory
            >>> with TemporaryDirectory() as folder:
            ...     clients = ((torch.ones(n, 2), torch.ones(n)) for n in (3, 5))
            ...     fed = Federation.create(f"{folder}/ones", clients)
            ...     fed.train.sizes.tolist(), sorted(file.name for file in Path(f"{folder}/ones").iterdir())
            ([3, 5], ['federation.json', 'train.offsets', 'train.x', 'train.y'])
        """
        with mapped.new_folder(Path(path)) as folder:
            mapped.write(folder, train, test, groups, ids)
            cls.open(folder)  # compares the counts, before the folder gets its name
        return cls.open(path)

    @classmethod
    def open(cls, path: str | Path) -> Federation:
        """The federation that `create` wrote to a folder, mapped into memory: rows are read when they are used.

        Raises:
            ValueError: The folder holds none, or a file of it is missing or cut short; says in which client it ends.
        """
        return cls(**mapped.read(Path(path))._asdict(), source={"name": "mapped", "path": str(path)})

    def name(self, i: int) -> str:
        """What client i is called in messages."""
        return client_name(i, self.ids)

    @cached_property
    def numbers(self) -> Tensor:
        """The integers that the clients' keys are folded with (m,): each follows from the client's name."""
        if self.ids is None:
            return torch.arange(len(self))
        return torch.tensor([_number(name) for name in self.ids])

    def part(self, name: str) -> Packed:
        """The rows called "train" or "test"; a federation without test rows is tested on its training rows."""
        return self.test if name == "test" and self.test is not None and len(self.test.x) else self.train

    def split(self, name: str) -> Packed:
        """The old name of `part`, for one release."""
        warnings.warn("Federation.split is Federation.part now", DeprecationWarning, stacklevel=2)
        return self.part(name)

    def select(self, clients: Sequence[int] | Tensor) -> Federation:
        """The federation of these clients, in this order, under their old names."""
        given = clients.tolist() if isinstance(clients, Tensor | np.ndarray) else list(clients)
        keep = [int(i) for i in given if isinstance(i, int | np.integer) and not isinstance(i, bool)]
        if len(keep) < len(given) or not all(0 <= i < len(self) for i in keep) or not keep:
            what = f"whole numbers from 0 to {len(self) - 1}, at least one"
            wrong = next((i for i in given if i not in range(len(self)) or isinstance(i, bool)), given)
            raise ValueError(f"Federation.select: clients must be {what}, got {wrong!r}")
        return Federation(
            Packed.of([self.train.client(i) for i in keep]),
            self.test and Packed.of([self.test.client(i) for i in keep]),
            None if self.groups is None else self.groups[keep],
            tuple(str(i) if self.ids is None else self.ids[i] for i in keep),
            inputs=self.inputs,
            columns=self.columns,
            preparation=self.preparation,
        )

    def map(self, change: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]], **source: Any) -> Federation:
        """Every client's rows, train and test, put through `change(i, x, y)`."""

        def changed(i: int, part: Packed) -> tuple[Tensor, Tensor]:
            rows = change(i, *part.client(i))
            if not isinstance(rows, tuple) or len(rows) != 2:
                raise ValueError(
                    f"Federation.map: {self.name(i)}: change must return a pair (x, y), got {type(rows).__name__}"
                )
            return rows

        def apply(part: Packed) -> Packed:
            clients = [changed(i, part) for i in range(len(self))]
            shapes = [tuple(tuple(np.shape(rows)[1:]) for rows in own) for own in clients]
            if other := next((i for i, shape in enumerate(shapes) if shape != shapes[0]), None):
                own, first = (f"{self.name(i)} has rows and targets of shapes {shapes[i]}" for i in (other, 0))
                raise ValueError(f"Federation.map: after the change {own}, but {first}")
            return Packed.of(clients)

        described = {**self.source, **source} if self.source else {}
        train, test = apply(self.train), self.test and apply(self.test)
        columns = self.columns if train.x.shape[1:] == self.train.x.shape[1:] else None
        return replace(self, train=train, test=test, source=described, columns=columns)

    def check(self, task: Task) -> None:
        """Refuse data that the task's model cannot take, naming the first client at fault."""
        task = task.taking(self.inputs)
        for part, where in ((self.train, ""), (self.test, "test rows: ")):
            for first, piece in part.pieces(CHECKED) if part else ():
                if fault := _fault(task, piece):
                    raise ValueError(f"{self.name(first + fault[0])}: {where}{fault[1]}")


def _packed(clients: Iterable[Packed]) -> Packed | None:
    """All clients in one piece; None if there is none. Their own pieces are not kept."""
    own = list(clients)
    return Packed.of(own) if own else None


def _by_client(x: np.ndarray, y: np.ndarray, code: np.ndarray, which: np.ndarray, m: int) -> Packed:
    """Some rows of a table, those of client 0 first."""
    at = np.flatnonzero(which)
    at = at[np.argsort(code[at], kind="stable")]
    offsets = torch.zeros(m + 1, dtype=torch.long)
    offsets[1:] = torch.from_numpy(np.bincount(code[at], minlength=m)).cumsum(0)
    return Packed(torch.from_numpy(x[at]), torch.from_numpy(y[at]), offsets)


def _numbered(groups: Array | Sequence[Any]) -> Tensor:
    """Groups as whole numbers (m,).

    Example:
        >>> _numbered(["north", "south", "north"]), _numbered([1.0, 0.0])
        (tensor([0, 1, 0]), tensor([1, 0]))
    """
    values = groups.tolist() if isinstance(groups, Tensor | np.ndarray) else list(groups)
    if values and all(isinstance(v, str) for v in values):
        number = {name: i for i, name in enumerate(dict.fromkeys(values))}
        return torch.tensor([number[name] for name in values])
    try:
        whole = torch.tensor([int(v) for v in values])
    except (TypeError, ValueError):
        whole = torch.tensor([])
    if whole.tolist() != values:
        raise ValueError(f"Federation: groups must be whole numbers, or all of them names, got {values[:5]}")
    return whole


def _number(name: str) -> int:
    """A name as an integer; a client named by its old position keeps it."""
    if name.isdecimal() and len(name) < 16:
        return int(name)
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")


def _fault(task: Task, rows: Packed) -> tuple[int, str] | None:
    """The first client whose rows the task's model cannot take, and why; found by halving."""
    m, n = len(rows.offsets) - 1, len(rows.x)
    if not n or not (wrong := task.check(Data(rows.x, rows.y, torch.ones(1).expand(n)))):
        return None
    if m == 1:
        return 0, wrong
    later = m // 2
    if fault := _fault(task, rows.clients(0, later)):
        return fault
    fault = _fault(task, rows.clients(later, m))
    return fault and (later + fault[0], fault[1])
