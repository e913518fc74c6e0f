"""Who is there: what nodes tell about their clients when they enrol, and the table that the server makes of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from coterie.core.federation import Federation
from coterie.core.key import Key
from coterie.core.task import Task
from coterie.storage.inputs import Inputs
from coterie.storage.packed import Packed

AWAY = -1  # in place of Flower's number of a node that has not come back yet
PARTS = ("train", "test")
LONGEST = 200  # letters of a name
LARGEST = 2**24  # values of a row, for the server holds one
TYPES = {str(t).removeprefix("torch."): t for t in (torch.float32, torch.float64, torch.float16, torch.long)} | {
    str(t).removeprefix("torch."): t for t in (torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
}


@dataclass(frozen=True)
class Rows:
    """What a node tells about its training or its test rows: how many and of what kind, not what is in them.

    Attributes:
        sizes: Rows of each client.
        x: The shape of a row.
        y: The shape of a target.
        x_type: The type of a row.
        y_type: The type of a target.
        label: The largest label, -1 where targets are no labels.
    """

    sizes: tuple[int, ...]
    x: tuple[int, ...]
    y: tuple[int, ...]
    x_type: str
    y_type: str
    label: int

    @classmethod
    def of(cls, packed: Packed) -> Rows:
        """The description of these rows."""
        x, y = packed.x, packed.y
        labels = not y.is_floating_point() and y.dim() == 1 and len(y) > 0 and bool((y >= 0).all())
        kinds = (str(values.dtype).removeprefix("torch.") for values in (x, y))
        sizes = tuple(packed.sizes.tolist())
        return cls(
            sizes, tuple(x.shape[1:]), tuple(y.shape[1:]), *kinds, label=min(int(y.max()), 2**31 - 1) if labels else -1
        )

    def __post_init__(self) -> None:
        for name, values in (("sizes", self.sizes), ("x", self.x), ("y", self.y), ("label", (self.label,))):
            low = -1 if name == "label" else 0
            if not isinstance(values, tuple) or not all(type(v) is int and low <= v < 2**31 for v in values):
                raise ValueError(f"'{name}' must be whole numbers")
        if self.x_type not in TYPES or self.y_type not in TYPES:
            raise ValueError(f"rows of {self.x_type} with targets of {self.y_type} are not known here")
        if max(math.prod(self.x), math.prod(self.y)) > LARGEST:
            raise ValueError(f"a row has more than {LARGEST} values")

    @property
    def kind(self) -> tuple[Any, ...]:
        """What must be the same on all nodes."""
        return self.x, self.y, self.x_type, self.y_type


@dataclass(frozen=True)
class Site:
    """What a node tells when it enrols.

    Attributes:
        name: The name of the site; the order of names is the order of the federation.
        clients: The names of its clients.
        train: About their training rows.
        test: About their test rows, None where there are none.
        groups: Their true groups, where a generator knows them; used only to score.
        inputs: The inputs that lie side by side in a row, None where a row is one.
    """

    name: str
    clients: tuple[str, ...]
    train: Rows
    test: Rows | None
    groups: tuple[int, ...] | None
    inputs: Inputs | None = None

    @classmethod
    def of(cls, name: str, federation: Federation) -> Site:
        """What a node with these clients tells.

        Example:
            >>> rows = [(torch.zeros(3, 2), torch.zeros(3)), (torch.ones(5, 2), torch.ones(5))]
            >>> site = Site.of("a", Federation.from_clients(rows))
            >>> site.clients, site.train.sizes
            (('a/0', 'a/1'), (3, 5))
        """
        test = None if federation.test is None else Rows.of(federation.test)
        groups = None if federation.groups is None else tuple(federation.groups.tolist())
        names = named(name, federation).ids or ()
        return cls(name, names, Rows.of(federation.train), test, groups, federation.inputs)

    def __post_init__(self) -> None:
        "".join((self.name, *self.clients)).encode()  # half of a character has no bytes, and names are hashed
        for name in (self.name, *self.clients):
            if not (name.isprintable() and 0 < len(name) <= LONGEST):
                raise ValueError(f"names must be of 1 to {LONGEST} printable letters, got {name[:LONGEST]!r}")
        m = len(self.clients)
        given = (self.train.sizes, self.test and self.test.sizes, self.groups)
        if any(values is not None and len(values) != m for values in given):
            raise ValueError(f"it tells about {m} clients, but not the same number of sizes or groups")
        if not m or min(self.train.sizes) < 1:
            raise ValueError("it has no client, or one without rows")
        if self.test and self.test.kind != self.train.kind:
            raise ValueError(f"its test rows are {self.test.kind}, its training rows {self.train.kind}")
        if self.inputs is not None and self.train.x != (self.inputs.width,):
            raise ValueError(f"its rows are {self.train.x}, but its inputs {self.inputs}")

    @property
    def form(self) -> str:
        """The shape and type of its rows, in words: the same on all nodes of a federation."""
        kind = self.train.kind
        return f"{kind[2]} {kind[0]} with targets {kind[3]} {kind[1]}, {_layout(self)}"

    @property
    def mark(self) -> str:
        """A few characters that tell these clients, in this order, from others."""
        return mark(self.clients)

    def check(self, task: Task) -> None:
        """Refuse rows that the task's model cannot take. One of every client is enough: all are the same.

        Raises:
            ValueError: Says what is wrong with them.
        """
        one = (1,) * len(self.clients)
        train, test = (part and dataclasses.replace(part, sizes=one) for part in (self.train, self.test))
        assert train is not None
        Roster.of([(AWAY, dataclasses.replace(self, train=train, test=test))]).federation.check(task)

    def to_plain(self) -> dict[str, Any]:
        """The same as a table for JSON."""
        plain = None if self.inputs is None else self.inputs.plain()
        return {**dataclasses.asdict(dataclasses.replace(self, inputs=None)), "inputs": plain}

    @classmethod
    def from_plain(cls, table: Any) -> Site:
        """The site that `to_plain` described.

        Raises:
            ValueError: It is not what `to_plain` writes.
        """
        try:
            parts = {part: table[part] and Rows(**_tuples(table[part])) for part in PARTS}
            names = [str(c) for c in table["clients"]]
            groups = None if table["groups"] is None else tuple(int(g) for g in table["groups"])
            inputs = None if table.get("inputs") is None else _inputs(table["inputs"])
            return cls(str(table["name"]), tuple(names), parts["train"], parts["test"], groups, inputs)
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"it does not say who its clients are ({type(error).__name__}: {error})") from error


def _inputs(tables: Any) -> Inputs:
    """The layout of rows that a site tells, which may be anything."""
    inputs = Inputs.from_plain(tables)
    for part in inputs.parts:
        if not isinstance(part.name, str | None) or not all(type(n) is int and n >= 0 for n in part.shape):
            raise ValueError("its inputs have no names or shapes")
    return inputs


def _tuples(table: dict[str, Any]) -> dict[str, Any]:
    return {n: tuple(v) if isinstance(v, list) else v for n, v in table.items()}


def mark(names: Iterable[str]) -> str:
    """A few characters that are others where a name is, or the order of names.

    Example:
        >>> mark(["a", "b"]) == mark(("a", "b")), mark(["a", "b"]) == mark(["b", "a"])
        (True, False)
    """
    return hashlib.blake2b(json.dumps(list(names)).encode(), digest_size=8).hexdigest()


def named(site: str, federation: Federation) -> Federation:
    """A node's clients under names that no other node's have: their own, or the site's and a number."""
    if federation.ids is not None:
        return federation
    return dataclasses.replace(federation, ids=tuple(f"{site}/{i}" for i in range(len(federation))))


@dataclass(frozen=True)
class Roster:
    """All clients of all nodes. It never changes: `returned`, `joined` and `first` make another one.

    Attributes:
        entries: What every site has reported about itself, in the order of their names; then those that joined later.
        nodes: Flower's number of each site's node, `AWAY` where there is none.
        federation: The clients' names, sizes and groups, with rows that say nothing: every one is the same, and every
            target is the largest label. They take no memory.
        site: The position of each client's site (m,).
        place: The position of each client at its site (m,).
    """

    entries: tuple[Site, ...]
    nodes: tuple[int, ...]
    federation: Federation
    site: Tensor
    place: Tensor

    @classmethod
    def of(cls, entries: Sequence[tuple[int, Site]]) -> Roster:
        """The table of what nodes have reported, in the order of the sites' names.

        Raises:
            ValueError: Two sites, or two clients, have one name, or rows differ in kind.
        """
        return cls.listed(sorted(entries, key=lambda each: each[1].name))

    @classmethod
    def listed(cls, entries: Sequence[tuple[int, Site]]) -> Roster:
        """The table of what nodes have reported, in this order.

        Raises:
            ValueError: As for `of`.
        """
        sites = [site for _, site in entries]
        for what, names in (("sites", [s.name for s in sites]), ("clients", [c for s in sites for c in s.clients])):
            name, count = Counter(names).most_common(1)[0] if names else ("", 0)
            if count > 1:
                raise ValueError(f"two {what} are called '{name}'; names must differ over all nodes")
        if not sites:
            raise ValueError("no node has enrolled")
        for site in sites:
            if site.inputs != sites[0].inputs:
                raise ValueError(_unlike(site, sites[0]))
        whole = all(s.groups is not None for s in sites)
        groups = torch.tensor([g for s in sites for g in s.groups or ()]) if whole else None
        test = [s.test for s in sites if s.test is not None]
        federation = Federation(
            train=_blank([s.train for s in sites], [s.name for s in sites]),
            test=_blank(test, [s.name for s in sites]) if len(test) == len(sites) else None,
            groups=groups,
            ids=tuple(c for s in sites for c in s.clients),
            inputs=sites[0].inputs,
            source={"name": "flower"},  # not the sites: they come and go, and are in the run folder's roster
        )
        counts = torch.tensor([len(s.clients) for s in sites])
        place = torch.cat([torch.arange(int(n)) for n in counts])
        site = torch.arange(len(sites)).repeat_interleave(counts)
        return cls(tuple(sites), tuple(node for node, _ in entries), federation, site, place)

    @property
    def sites(self) -> tuple[str, ...]:
        """The names of the sites."""
        return tuple(site.name for site in self.entries)

    def returned(self, node: int, site: Site) -> Roster:
        """The table once a known site is back, on a node with this number.

        Raises:
            ValueError: Its clients are others than before, or their rows of another kind.
        """
        at = self.sites.index(site.name)
        if why := _changed(self.entries[at], site):
            raise ValueError(why)
        both = list(zip(self.nodes, self.entries, strict=True))
        return Roster.listed([*both[:at], (node, site), *both[at + 1 :]])

    def joined(self, node: int, site: Site) -> Roster:
        """The table with one more site, whose clients come last: the positions of all others stay.

        Raises:
            ValueError: As for `of`.
        """
        return Roster.listed([*zip(self.nodes, self.entries, strict=True), (node, site)])

    def first(self, clients: int) -> Roster:
        """The table as it was when it had so many clients.

        Raises:
            ValueError: It never had.
        """
        ends = list(accumulate(len(site.clients) for site in self.entries))
        if clients not in ends:
            raise ValueError(f"the run was made with {clients} clients, which are not the first of these {ends[-1]}")
        count = ends.index(clients) + 1
        return Roster.listed(list(zip(self.nodes[:count], self.entries, strict=False)))

    def to_plain(self) -> dict[str, Any]:
        """What the sites have reported, and Flower's numbers of their nodes, as a table for JSON."""
        return {"nodes": list(self.nodes), "sites": [site.to_plain() for site in self.entries]}

    @classmethod
    def from_plain(cls, table: Any) -> Roster:
        """The table that `to_plain` described. A node that has got another number since enrols again.

        Example:
            >>> rows = [(torch.zeros(3, 2), torch.zeros(3))]
            >>> roster = Roster.of([(5, Site.of("b", Federation.from_clients(rows)))])
            >>> Roster.from_plain(json.loads(json.dumps(roster.to_plain()))).nodes
            (5,)

        Raises:
            ValueError: It is not what `to_plain` writes.
        """
        if not isinstance(table, dict) or not isinstance(sites := table.get("sites"), list):
            raise ValueError("it lists no sites")
        nodes = table.get("nodes")
        if not isinstance(nodes, list) or len(nodes) != len(sites) or not all(type(n) is int for n in nodes):
            raise ValueError("it does not list a node for every site")
        return cls.listed([(node, Site.from_plain(site)) for node, site in zip(nodes, sites, strict=True)])


def _changed(before: Site, now: Site) -> str:
    """What is different about a site's clients; "" if nothing is. They may have more or fewer rows."""
    if len(now.clients) != len(before.clients):
        return f"it has {len(now.clients)} clients, and had {len(before.clients)} when it enrolled first"
    if now.train.kind != before.train.kind:
        return f"its rows are {now.train.kind}, and were {before.train.kind} when it enrolled first"
    if now.inputs != before.inputs:
        return f"its rows are {_layout(now)}, and were {_layout(before)} when it enrolled first"
    for i, (old, new) in enumerate(zip(before.clients, now.clients, strict=True)):
        if old != new:
            return f"its client {i} is called '{new}', and was '{old}' when it enrolled first"
    return ""


def _unlike(one: Site, other: Site) -> str:
    return f"rows of site '{one.name}' are {_layout(one)}, those of site '{other.name}' {_layout(other)}"


def _layout(site: Site) -> str:
    return "one input" if site.inputs is None else f"inputs {site.inputs}"


def _blank(rows: Sequence[Rows], names: Sequence[str]) -> Packed:
    """Rows of the right number and kind, which are all one: strides of 0, so that they take no memory."""
    first = rows[0]
    for name, own in zip(names, rows, strict=True):
        if own.kind != first.kind:
            raise ValueError(f"rows of site '{name}' are {own.kind}, those of site '{names[0]}' {first.kind}")
    offsets = torch.tensor([0, *(n for own in rows for n in own.sizes)]).cumsum(0)
    total = int(offsets[-1])
    x_type, y_type = TYPES[first.x_type], TYPES[first.y_type]
    drawn = torch.rand(math.prod(first.x), generator=Key.of(0).generator()).reshape(first.x)
    x = drawn.to(x_type) if x_type.is_floating_point else torch.zeros(first.x, dtype=x_type)
    label = min(own.label for own in rows) if any(own.label < 0 for own in rows) else max(own.label for own in rows)
    y = torch.full(first.y, 0.0 if y_type.is_floating_point else label, dtype=y_type)
    return Packed(x.expand(total, *first.x), y.expand(total, *first.y), offsets)
