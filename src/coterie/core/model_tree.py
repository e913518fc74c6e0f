"""The tree of models that recursive splitting leaves behind: the most general at the root, one cluster's at a leaf."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any, NamedTuple

from coterie.core.pytree import Params


class Branch(NamedTuple):
    """A node of the tree."""

    parent: int | None
    children: tuple[int, ...]
    clients: list[int]  # all that are at it or below
    cluster: int | None  # of a leaf
    round: int  # in which it was made, 0 for the root
    cross: float | None  # the largest similarity across its split
    similar: list[list[float]] | None  # of all its clients, those of the first child before those of the second
    norms: tuple[float, float] | None  # at its split: of the mean of its clients' updates, and of the longest of them
    model: Params


class ModelTree(NamedTuple):
    """The nodes by number; 0 is the root."""

    nodes: dict[int, Branch]

    def path(self, cluster: int) -> list[Branch]:
        """From the root, whose model is that of plain federated learning, down to the leaf of a cluster."""
        v = next((v for v, b in self.nodes.items() if b.cluster == cluster), None)
        if v is None:
            raise ValueError(f"there is no cluster {cluster}; there are 0 to {len(self.nodes) // 2}")
        found = []
        while v is not None:
            found.insert(0, self.nodes[v])
            v = self.nodes[v].parent
        return found

    def outline(self) -> list[dict[str, Any]]:
        """The tree without its models, as plain values."""
        return [
            {"node": v, **{n: x for n, x in b._asdict().items() if n != "model"}, "children": list(b.children)}
            for v, b in self.nodes.items()
        ]

    def __repr__(self) -> str:
        return "\n".join(drawn(self.outline()))

    def _repr_html_(self) -> str:
        return f"<pre>{escape(repr(self))}</pre>"


def drawn(outline: list[dict[str, Any]]) -> list[str]:
    """An outline in lines of text.

    Example:
        >>> leaf = {"children": [], "cross": None, "round": 5}
        >>> root = {"node": 0, "children": [1, 2], "clients": [0, 1, 2], "cluster": None, "cross": -0.25, "round": 0}
        >>> left = {"node": 1, "clients": [0, 1], "cluster": 0, **leaf}
        >>> for line in drawn([root, left, {"node": 2, "clients": [2], "cluster": 1, **leaf}]):
        ...     print(line)
        all 3 clients
        ├─ round 5, α_cross -0.250: cluster 0, 2 clients
        └─ round 5, α_cross -0.250: cluster 1, 1 client
    """
    nodes = {row["node"]: row for row in outline}

    def below(v: int, indent: str) -> Iterator[str]:
        for child in nodes[v]["children"]:
            last = child == nodes[v]["children"][-1]
            made = f"round {nodes[child]['round']}, α_cross {nodes[v]['cross']:.3f}: "
            yield f"{indent}{'└─ ' if last else '├─ '}{made}{_told(nodes[child])}"
            yield from below(child, indent + ("   " if last else "│  "))

    return [f"all {_count(nodes[0])}", *below(0, "")]


def _told(row: dict[str, Any]) -> str:
    return _count(row) if row["cluster"] is None else f"cluster {row['cluster']}, {_count(row)}"


def _count(row: dict[str, Any]) -> str:
    n = len(row["clients"])
    return f"{n} client{'' if n == 1 else 's'}"
