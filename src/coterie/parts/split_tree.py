"""The tree that splitting leaves behind (CFL, Section V-C): its nodes, and how it grows and shrinks.

A leaf is a cluster. Every client is at a node: at a leaf or, if nothing was known of it when that node was split, at an
inner one, where it waits to be placed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from coterie.core.model_tree import Branch, ModelTree
from coterie.core.pytree import Params, put_rows, take, tree_map

ROOT = 0
SHOWN = 100  # clients at most whose similarities readers see


class Node(NamedTuple):
    """A node v of the parameter tree and the edge that leads to it."""

    parent: int  # -1 at the root
    children: tuple[int, ...]  # two, or none at a leaf
    theta: Params  # θ*_v, the stationary model before the split; empty at a leaf, whose model is in the state
    clients: Tensor  # c_v
    updates: Tensor  # Δ_e (|c_v|, …): what these clients sent at the parent's θ*; empty at the root
    since: int  # the round in which it was made, -1 at the root
    cross: float = 1.0  # α_cross of its split
    checked: int = -1  # the round in which it was last seen whether to split it, or when it was made
    whole: int = 0  # how often it was found whole, or a split of it was undone
    rival: Any = ()  # while its split is on trial: what its model would be without, and its server's moments (1, …)
    warned: bool = False  # whether the log says why it is not split


class Cut(NamedTuple):
    """Two halves of a cluster's clients: their largest similarity, and how clearly they differ."""

    first: Tensor
    second: Tensor
    cross: float
    contrast: float

    @classmethod
    def of(cls, clients: Tensor, second: np.ndarray, cross: float, contrast: float) -> Cut:
        """The cut of clients into those that are in the second half and the others."""
        half = torch.from_numpy(second)
        return cls(clients[~half], clients[half], cross, contrast)

    @property
    def margin(self) -> float:
        """√((1 - α_cross) / 2)."""
        return max(0.0, (1 - self.cross) / 2) ** 0.5

    def __str__(self) -> str:
        apart = f"α_cross = {self.cross:.3f}, {self.contrast:.1f} times as far apart as by chance"
        return f"{len(self.first)} and {len(self.second)} clients ({apart})"


Tree = dict[int, Node]


def planted(m: int) -> Tree:
    """A tree of the root alone, with all m clients."""
    return {ROOT: Node(-1, (), {}, torch.arange(m), torch.zeros(0, 0), since=-1)}


def grown(tree: Tree, v: int, theta: Params, cut: Cut, updates: Tensor, t: int, rival: Any) -> Tree:
    """The tree after leaf v was split in round t at the model `theta`, by every client's `updates` (m, …)."""
    new = max(tree) + 1
    parent = tree[v]._replace(children=(new, new + 1), theta=theta, cross=cut.cross, rival=rival)
    halves = [Node(v, (), {}, clients, updates[clients], since=t, checked=t) for clients in (cut.first, cut.second)]
    return {**tree, v: parent, new: halves[0], new + 1: halves[1]}


def pruned(tree: Tree, v: int, t: int) -> Tree:
    """The tree after the split of node v was undone in round t: it is a leaf again."""
    leaf = tree[v]._replace(children=(), theta={}, cross=1.0, rival=(), checked=t, whole=tree[v].whole + 1)
    return {u: leaf if u == v else node for u, node in tree.items() if u not in tree[v].children}


def moved_down(node: Tensor, tree: Tree, v: int) -> Tensor:
    """Every client's node (m,) after the split of node v: that of its half, if it is in one."""
    for child in tree[v].children:
        clients = tree[child].clients
        node = put_rows(node, clients, torch.full_like(clients, child))
    return node


def split_rows(rows: Any, c: int, new: Any) -> Any:
    """A tree of rows (k, …), one per leaf, in which leaf c became two: `new` replaces row c and is the last row too."""
    return tree_map(lambda x, own: torch.cat([x[:c], own.to(x)[None], x[c + 1 :], own.to(x)[None]]), rows, new)


def below(tree: Tree, leaves: tuple[int, ...], v: int) -> Tensor:
    """Which leaves are node v or below it (k,)."""

    def is_below(u: int) -> bool:
        return u == v or (u >= 0 and is_below(tree[u].parent))

    return torch.tensor([is_below(leaf) for leaf in leaves])


def cluster_of(tree: Tree, leaves: tuple[int, ...], node: Tensor) -> Tensor:
    """The cluster of every client (m,), by its node; -1 for a client that waits at an inner one."""
    cluster = torch.full((max(tree) + 1,), -1)
    cluster[list(leaves)] = torch.arange(len(leaves))
    return cluster[node]


def model_tree(
    tree: Tree, leaves: tuple[int, ...], node: Tensor, models: Params, inner: Callable[[Params], Params]
) -> ModelTree:
    """The tree for its readers: with every node's model, and all clients at or below it.

    Args:
        tree: The nodes.
        leaves: Those that are leaves, in the order of their models.
        node: Every client's node (m,).
        models: The leaves' models (k, …), as readers see them.
        inner: What readers see of an inner node's model.
    """
    below = {v: list[int]() for v in tree}
    for client, v in enumerate(node.tolist()):
        while v >= 0:
            below[v].append(client)
            v = tree[v].parent

    def branch(v: int, at: Node) -> Branch:
        model = take(models, leaves.index(v)) if v in leaves else inner(at.theta)
        return Branch(
            parent=None if at.parent < 0 else at.parent,
            children=at.children,
            clients=below[v],
            cluster=leaves.index(v) if v in leaves else None,
            round=at.since + 1,
            cross=at.cross if at.children else None,
            similar=_similar([tree[u].updates for u in at.children]),
            norms=_norms([tree[u].updates for u in at.children]),
            model=tree_map(torch.Tensor.cpu, model),
        )

    return ModelTree({v: branch(v, at) for v, at in tree.items()})


def _similar(updates: list[Tensor]) -> list[list[float]] | None:
    """α of all clients at a split, from what those of each half sent; None at a leaf, and where they are many."""
    if not 1 < sum(map(len, updates)) <= SHOWN:
        return None
    unit = normalize(torch.cat(updates).flatten(1).double().cpu())
    return (unit @ unit.T).round(decimals=2).tolist()


def _norms(updates: list[Tensor]) -> tuple[float, float] | None:
    """The lengths at a split, from what the clients of each half sent: of their mean, and the greatest; None at a leaf.

    Example:
        >>> _norms([torch.tensor([[3.0, 0.0]]), torch.tensor([[-1.0, 0.0]])])
        (1.0, 3.0)
    """
    if not sum(map(len, updates)):
        return None
    sent = torch.cat(updates).flatten(1).double()
    return float(sent.mean(0).norm()), float(sent.norm(dim=1).max())
