"""Ways to make clients differ. Each takes a federation and returns one that knows its true groups.

They compose: `dirichlet(rotate(digits(80), 4), alpha=0.5)`. A change that makes groups splits every group there is
already; one that deals rows anew does so within the groups, so that it never blurs them.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from coterie.core.federation import Federation, Packed
from coterie.core.key import Key
from coterie.data.source import change


@change
def rotate(federation: Federation, groups: int = 4) -> Federation:
    """Turn images by 90 degrees times the group's number."""
    if not 1 <= groups <= 4:
        raise ValueError(f"rotate: groups must be 1 to 4, the quarter turns there are, got {groups}")
    if federation.train.x.dim() < 3:
        raise ValueError(f"rotate: rows must be images, got rows of shape {tuple(federation.train.x.shape[1:])}")
    part = _parts(federation, groups)
    turned = federation.map(lambda i, x, y: (torch.rot90(x, int(part[i]), (-2, -1)), y))
    return replace(turned, groups=_cross(federation.groups, part))


@change
def random_background(federation: Federation, seed: int = 0) -> Federation:
    """Give every black pixel (below 0.01) a random grey, so that a density says more of strokes than of background."""

    def greyed(i: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        noise = torch.randint(256, x.shape, generator=Key.of(seed).fold(i).generator()) / 255
        return torch.where(x < 0.01, noise, x), y

    return federation.map(greyed)


@change
def swap_labels(federation: Federation, groups: int = 4, seed: int = 0) -> Federation:
    """Exchange two labels, another pair in every group (the CFL paper's label swap)."""
    classes = _classes(federation)
    pairs = torch.combinations(torch.arange(classes))
    if not 1 <= groups <= len(pairs):
        raise ValueError(f"swap_labels: groups must be 1 to {len(pairs)} for {classes} classes, got {groups}")
    chosen = pairs[torch.randperm(len(pairs), generator=Key.of(seed).generator())[:groups]]
    tables = torch.arange(classes).repeat(groups, 1)
    for g, (a, b) in enumerate(chosen.tolist()):
        tables[g, a], tables[g, b] = b, a
    return _relabel(federation, tables)


@change
def permute_labels(federation: Federation, groups: int = 4, seed: int = 0) -> Federation:
    """Permute the labels, another permutation in every group."""
    classes = _classes(federation)
    if not 1 <= groups <= (most := math.factorial(classes)):
        raise ValueError(f"permute_labels: groups must be 1 to {most} for {classes} classes, got {groups}")
    draws: list[Tensor] = []
    g = Key.of(seed).generator()
    while len(draws) < groups:  # few repeat unless nearly all there are were asked for
        draw = torch.randperm(classes, generator=g)
        if not any(torch.equal(draw, old) for old in draws):
            draws.append(draw)
    return _relabel(federation, torch.stack(draws))


@change
def quantity_skew(federation: Federation, alpha: float = 0.5, seed: int = 0) -> Federation:
    """Deal the rows of every group anew so that clients' shares follow a symmetric Dirichlet law.

    Args:
        federation: Whose rows are dealt.
        alpha: The smaller, the more unequal the clients.
        seed: Of the draw.
    """
    return _deal_anew(federation, alpha, seed, by_label=False)


@change
def dirichlet(federation: Federation, alpha: float = 0.5, seed: int = 0) -> Federation:
    """Deal the rows of every group anew so that each label's rows are shared among clients by a Dirichlet law.

    It draws once and gives every client at least one row from the largest, so it always ends.

    Args:
        federation: Whose rows are dealt.
        alpha: The smaller, the fewer labels a client has.
        seed: Of the draw.
    """
    return _deal_anew(federation, alpha, seed, by_label=True)


@change
def mixture(federation: Federation, p: float = 1.0, seed: int = 0) -> Federation:
    """Clients keep a share p of their rows; the rest is pooled over all groups and dealt back at random.

    Args:
        federation: Whose rows are mixed.
        p: 1 leaves every client with rows of its own group only, 0 makes all clients alike.
        seed: Of the draw.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"mixture: p must be between 0 and 1, got {p}")

    def mixed(part: Packed, stream: int) -> Packed:
        owner = torch.repeat_interleave(torch.arange(len(federation)), part.sizes)
        g = Key.of(seed).fold(stream).generator()
        noise = torch.rand(len(owner), generator=g)
        rank = (owner + noise).argsort().argsort() - part.offsets[owner]  # a random place within the client
        loose = (rank >= (p * part.sizes[owner]).round()).nonzero().flatten()
        order = torch.arange(len(owner))
        order[loose] = loose[torch.randperm(len(loose), generator=g)]
        return part._replace(x=part.x[order], y=part.y[order])

    return replace(federation, train=mixed(federation.train, 0), test=federation.test and mixed(federation.test, 1))


@change
def keep_labels(federation: Federation, blocks: int = 2) -> Federation:
    """Clients fall into equal blocks, each of which keeps only the rows of its own labels.

    Such clients are unlike but congruent (the CFL paper's word): one model serves them all, so true groups stay what
    they were. Every group there is gets all blocks.

    Args:
        federation: Whose rows are left out, of train and test.
        blocks: Block b keeps the b-th part of the labels: of ten in two blocks 0 to 4, and 5 to 9.

    Example:
        >>> from coterie.data.digits import digits
        >>> kept = keep_labels(digits(4))
        >>> [kept.train.client(i)[1].unique().tolist() for i in (1, 2)], kept.groups.tolist()
        ([[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]], [0, 0, 0, 0])
    """
    classes = _classes(federation)
    if not 1 <= blocks <= classes:
        raise ValueError(f"keep_labels: blocks must be 1 to {classes}, the classes there are, got {blocks}")
    part = _parts(federation, blocks)

    def own(i: int, y: Tensor) -> Tensor:
        return y * blocks // classes == part[i]

    for i in range(len(federation)):
        if not bool(own(i, federation.train.client(i)[1]).any()):
            labels = [c for c in range(classes) if c * blocks // classes == part[i]]
            raise ValueError(f"keep_labels: {federation.name(i)} has no train rows with labels {labels}")
    return federation.map(lambda i, x, y: (x[own(i, y)], y[own(i, y)]))


def _parts(federation: Federation, groups: int) -> Tensor:
    """Split every group there is into `groups` blocks of equal size: the block of each client."""
    if groups < 1:
        raise ValueError(f"groups must be at least 1, got {groups}")
    old = federation.groups if federation.groups is not None else torch.zeros(len(federation), dtype=torch.long)
    part = torch.empty(len(federation), dtype=torch.long)
    for g in old.unique():
        at = (old == g).nonzero().flatten()
        if len(at) < groups:
            raise ValueError(f"{len(at)} clients cannot form {groups} groups")
        part[at] = torch.arange(len(at)) * groups // len(at)
    return part


def _cross(old: Tensor | None, part: Tensor) -> Tensor:
    """Number the pairs (old group, new group) that occur."""
    return part if old is None else (old * (part.max() + 1) + part).unique(return_inverse=True)[1]


def _classes(federation: Federation) -> int:
    y = federation.train.y
    if y.is_floating_point() or y.dim() != 1:
        raise ValueError(f"labels must be whole numbers, one per row, got {y.dtype} of shape {tuple(y.shape)}")
    return int(y.max()) + 1


def _relabel(federation: Federation, tables: Tensor) -> Federation:
    part = _parts(federation, len(tables))
    changed = federation.map(lambda i, x, y: (x, tables[part[i]][y]))
    return replace(changed, groups=_cross(federation.groups, part))


def _deal_anew(federation: Federation, alpha: float, seed: int, *, by_label: bool) -> Federation:
    if alpha <= 0:
        raise ValueError(f"alpha must be above 0, got {alpha}")
    classes = _classes(federation) if by_label else 1
    groups = federation.groups if federation.groups is not None else torch.zeros(len(federation), dtype=torch.long)
    members = {int(g): (groups == g).nonzero().flatten() for g in groups.unique()}
    shares = {g: _dirichlet(len(at), classes, alpha, Key.of(seed).fold(g)) for g, at in members.items()}

    def dealt(part: Packed, stream: int, least: int) -> Packed:
        clients: list[tuple[Tensor, Tensor]] = [(part.x[:0], part.y[:0])] * len(federation)
        for g, at in members.items():
            rows = torch.cat([torch.arange(int(part.offsets[i]), int(part.offsets[i + 1])) for i in at])
            rows = rows[torch.randperm(len(rows), generator=Key.of(seed).fold(g, stream).generator())]
            kind = part.y[rows] if by_label else torch.zeros(len(rows), dtype=torch.long)
            for i, own in zip(at.tolist(), _cut(rows, kind, shares[g], least), strict=True):
                clients[i] = part.x[own], part.y[own]
        return Packed.of(clients)

    test = federation.test and dealt(federation.test, 1, least=0)
    return replace(federation, train=dealt(federation.train, 0, least=1), test=test, groups=groups)


def _dirichlet(clients: int, classes: int, alpha: float, key: Key) -> Tensor:
    """Shares (clients, classes) that sum to one over the clients."""
    import numpy as np

    draws = np.random.default_rng(key.seed()).dirichlet(np.full(clients, alpha), size=classes)
    return torch.as_tensor(draws.T)


def _cut(rows: Tensor, kind: Tensor, shares: Tensor, least: int) -> list[Tensor]:
    """Cut the rows of each kind by the clients' shares; a client short of `least` rows gets some of the largest's."""
    piles: list[list[Tensor]] = [[] for _ in shares]
    for c in range(shares.shape[1]):
        own = rows[kind == c]
        ends = (shares[:, c].cumsum(0) * len(own)).round().long()
        ends[-1] = len(own)
        for pile, piece in zip(piles, own.tensor_split(ends[:-1]), strict=True):
            pile.append(piece)
    clients = [torch.cat(pile) for pile in piles]
    for i in range(len(clients)):
        while len(clients[i]) < least:
            rich = max(range(len(clients)), key=lambda j: len(clients[j]))
            clients[i], clients[rich] = torch.cat([clients[i], clients[rich][-1:]]), clients[rich][:-1]
    return clients
