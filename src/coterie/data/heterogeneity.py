"""Functions that make clients differ. Each takes a federation and returns a new one with its true groups.

They compose: `dirichlet(rotate(digits(80), 4), alpha=0.5)`. A change that makes groups splits every existing group; a
change that redistributes rows does so within each group, so that it never mixes groups.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from coterie.core.federation import Federation, Packed
from coterie.core.key import Key
from coterie.data.source import change

Groups = int | tuple[int, ...]  # how many groups of equal size, or the size of each


@change
def rotate(federation: Federation, groups: Groups = 4) -> Federation:
    """Rotate images by 90 degrees times the number of the client's group.

    Args:
        federation: Clients whose rows are images.
        groups: Number of new groups, 1 to 4, into which every existing group is split; or their sizes.
    """
    if not 1 <= number_of(groups) <= 4:
        raise ValueError(f"rotate: groups must be 1 to 4, the quarter turns there are, got {number_of(groups)}")
    if federation.train.x.dim() < 3:
        raise ValueError(f"rotate: rows must be images, got rows of shape {tuple(federation.train.x.shape[1:])}")
    part = parts(federation, groups)
    turned = federation.map(lambda i, x, y: (torch.rot90(x, int(part[i]), (-2, -1)), y))
    return replace(turned, groups=crossed(federation.groups, part))


@change
def random_background(federation: Federation, seed: int = 0) -> Federation:
    """Replace every black pixel (below 0.01) by a random grey value.

    A density model of such images depends more on the strokes than on the background.

    Args:
        federation: Clients whose rows are images with pixels from 0 to 1.
        seed: Seed of the grey values.
    """

    def greyed(i: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        noise = torch.randint(256, x.shape, generator=Key.of(seed).fold(i).generator()) / 255
        return torch.where(x < 0.01, noise, x), y

    return federation.map(greyed)


@change
def swap_labels(federation: Federation, groups: Groups = 4, seed: int = 0) -> Federation:
    """Swap two labels, a different pair in every group (the CFL paper's label swap).

    Args:
        federation: Clients with one class label per row.
        groups: Number of new groups into which every existing group is split, or their sizes; at most as many as there
            are pairs of labels.
        seed: Seed of the choice of pairs.
    """
    classes, number = class_count(federation), number_of(groups)
    pairs = torch.combinations(torch.arange(classes))
    if not 1 <= number <= len(pairs):
        raise ValueError(f"swap_labels: groups must be 1 to {len(pairs)} for {classes} classes, got {number}")
    chosen = pairs[torch.randperm(len(pairs), generator=Key.of(seed).generator())[:number]]
    tables = torch.arange(classes).repeat(number, 1)
    for g, (a, b) in enumerate(chosen.tolist()):
        tables[g, a], tables[g, b] = b, a
    return _relabel(federation, tables, groups)


@change
def permute_labels(federation: Federation, groups: Groups = 4, seed: int = 0) -> Federation:
    """Permute the labels, with a different permutation in every group.

    Args:
        federation: Clients with one class label per row.
        groups: Number of new groups into which every existing group is split, or their sizes; at most as many as there
            are permutations.
        seed: Seed of the permutations.
    """
    classes, number = class_count(federation), number_of(groups)
    if not 1 <= number <= (most := math.factorial(classes)):
        raise ValueError(f"permute_labels: groups must be 1 to {most} for {classes} classes, got {number}")
    draws: list[Tensor] = []
    g = Key.of(seed).generator()
    while len(draws) < number:  # repeats are rare unless nearly all permutations are requested
        draw = torch.randperm(classes, generator=g)
        if not any(torch.equal(draw, old) for old in draws):
            draws.append(draw)
    return _relabel(federation, torch.stack(draws), groups)


@change
def quantity_skew(federation: Federation, alpha: float = 0.5, seed: int = 0) -> Federation:
    """Redistribute the rows of every group so that clients' shares follow a symmetric Dirichlet distribution.

    Args:
        federation: The clients whose rows are redistributed.
        alpha: Concentration of the distribution; smaller values make the clients' sizes more unequal.
        seed: Seed of the shares and of the shuffling.
    """
    return _deal_anew(federation, alpha, seed, by_label=False)


@change
def dirichlet(federation: Federation, alpha: float = 0.5, seed: int = 0) -> Federation:
    """Redistribute the rows of every group so that each label's rows are shared by a Dirichlet distribution.

    Shares are drawn once, and a client without training rows gets one from the largest client, so there is no retry
    that might not end.

    Args:
        federation: The clients whose rows are redistributed; one class label per row.
        alpha: Concentration of the distribution; smaller values give a client fewer labels.
        seed: Seed of the shares and of the shuffling.
    """
    return _deal_anew(federation, alpha, seed, by_label=True)


@change
def mixture(federation: Federation, p: float = 1.0, seed: int = 0) -> Federation:
    """Keep a fraction p of each client's rows; pool the others over all groups and distribute them at random.

    Args:
        federation: The clients whose rows are mixed.
        p: With 1 every client has rows of its own group only; with 0 all clients are alike.
        seed: Seed of the choice of rows and of the shuffling.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"mixture: p must be between 0 and 1, got {p}")

    def mixed(part: Packed, stream: int) -> Packed:
        owner = torch.repeat_interleave(torch.arange(len(federation)), part.sizes)
        g = Key.of(seed).fold(stream).generator()
        noise = torch.rand(len(owner), generator=g)
        rank = (owner + noise).argsort().argsort() - part.offsets[owner]  # a random position within the client
        loose = (rank >= (p * part.sizes[owner]).round()).nonzero().flatten()
        order = torch.arange(len(owner))
        order[loose] = loose[torch.randperm(len(loose), generator=g)]
        return part._replace(x=part.x[order], y=part.y[order])

    return replace(federation, train=mixed(federation.train, 0), test=federation.test and mixed(federation.test, 1))


@change
def mixed_groups(federation: Federation, p: float = 0.5, seed: int = 0) -> Federation:
    """Give every client rows of two groups: clients of different groups exchange rows in pairs.

    Partners are drawn at random. The groups of clients stay those that they had.

    Args:
        federation: Clients of several groups, of which none has more than half of the clients. If their number is odd,
            one has no partner and keeps its rows.
        p: The fraction of its rows that a client keeps; the larger of two partners keeps more.
        seed: Seed of the choice of partners and rows.

    Example:
        >>> from coterie.data.digits import digits
        >>> federation = mixed_groups(rotate(digits(8), 4), p=0.5)
        >>> federation.groups.tolist(), federation.train.sizes.tolist()[:2]
        ([0, 0, 1, 1, 2, 2, 3, 3], [180, 180])
    """
    if not 0 <= p <= 1:
        raise ValueError(f"mixed_groups: p must be between 0 and 1, got {p}")
    pairs = _partners(federation, Key.of(seed))

    def mixed(part: Packed, stream: int) -> Packed:
        order = torch.arange(len(part.x))
        for i, j in pairs:
            few = round((1 - p) * int(min(part.sizes[i], part.sizes[j])))
            drawn = (
                torch.randperm(int(part.sizes[c]), generator=Key.of(seed).fold(stream, c).generator()) for c in (i, j)
            )
            mine, yours = (part.offsets[c] + rows[:few] for c, rows in zip((i, j), drawn, strict=True))
            order[mine], order[yours] = yours, mine
        return part._replace(x=part.x[order], y=part.y[order])

    return replace(federation, train=mixed(federation.train, 0), test=federation.test and mixed(federation.test, 1))


@change
def keep_labels(federation: Federation, blocks: int = 2) -> Federation:
    """Split the clients into equal blocks, each of which keeps only the rows of its own labels.

    Such clients differ but are congruent (the CFL paper's word): one model fits them all, so the true groups do not
    change. Every existing group is split into all blocks.

    Args:
        federation: Clients with one class label per row. Training and test rows of other labels are dropped.
        blocks: Number of blocks. Block b keeps the b-th part of the labels: of ten labels in two blocks, 0 to 4 and
            5 to 9.

    Example:
        >>> from coterie.data.digits import digits
        >>> kept = keep_labels(digits(4))
        >>> [kept.train.client(i)[1].unique().tolist() for i in (1, 2)], kept.groups.tolist()
        ([[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]], [0, 0, 0, 0])
    """
    classes = class_count(federation)
    if not 1 <= blocks <= classes:
        raise ValueError(f"keep_labels: blocks must be 1 to {classes}, the classes there are, got {blocks}")
    part = parts(federation, blocks)

    def own(i: int, y: Tensor) -> Tensor:
        return y * blocks // classes == part[i]

    for i in range(len(federation)):
        if not bool(own(i, federation.train.client(i)[1]).any()):
            labels = [c for c in range(classes) if c * blocks // classes == part[i]]
            raise ValueError(f"keep_labels: {federation.name(i)} has no train rows with labels {labels}")
    return federation.map(lambda i, x, y: (x[own(i, y)], y[own(i, y)]))


def _partners(federation: Federation, key: Key) -> list[tuple[int, int]]:
    """Random pairs of clients of different groups: always of the two that have most clients without a partner."""
    m, g = len(federation), key.generator()
    groups = torch.zeros(m, dtype=torch.long) if federation.groups is None else federation.groups
    order = torch.randperm(m, generator=g)
    piles = [order[groups[order] == own].tolist() for own in groups.unique()]
    if 2 * (most := max(map(len, piles))) > m + 1:
        raise ValueError(f"mixed_groups: no group may have more than half of the {m} clients, but one has {most}")
    pairs: list[tuple[int, int]] = []
    for _ in range(m // 2):
        left = torch.tensor([len(pile) for pile in piles]) + torch.rand(len(piles), generator=g)
        i, j = (piles[own].pop() for own in left.topk(2).indices.tolist())
        pairs.append((i, j))
    return pairs


def number_of(groups: Groups) -> int:
    """How many groups are meant."""
    return groups if isinstance(groups, int) else len(groups)


def parts(federation: Federation, groups: Groups) -> Tensor:
    """Split every existing group into blocks, of equal or of given sizes, and return the block of each client (m,).

    Example:
        >>> from coterie.data.digits import digits
        >>> parts(digits(4), 2).tolist(), parts(digits(4), (1, 3)).tolist()
        ([0, 0, 1, 1], [0, 1, 1, 1])
    """
    if number_of(groups) < 1:
        raise ValueError(f"groups must be at least 1, got {groups}")
    old = federation.groups if federation.groups is not None else torch.zeros(len(federation), dtype=torch.long)
    part = torch.empty(len(federation), dtype=torch.long)
    for g in old.unique():
        at = (old == g).nonzero().flatten()
        part[at] = _blocks(len(at), groups)
    return part


def _blocks(clients: int, groups: Groups) -> Tensor:
    """The block of each of so many clients."""
    if isinstance(groups, int):
        if clients < groups:
            raise ValueError(f"{clients} clients cannot form {groups} groups")
        return torch.arange(clients) * groups // clients
    if min(groups) < 1 or sum(groups) != clients:
        raise ValueError(f"groups must be sizes of at least 1 that add up to {clients} clients, got {list(groups)}")
    return torch.arange(len(groups)).repeat_interleave(torch.tensor(groups))


def crossed(old: Tensor | None, part: Tensor) -> Tensor:
    """Return the group of each client, numbering the pairs (old group, new block) that occur."""
    return part if old is None else (old * (part.max() + 1) + part).unique(return_inverse=True)[1]


def class_count(federation: Federation) -> int:
    """How many classes the labels of a federation's rows are from."""
    y = federation.train.y
    if y.is_floating_point() or y.dim() != 1:
        raise ValueError(f"labels must be whole numbers, one per row, got {y.dtype} of shape {tuple(y.shape)}")
    return int(y.max()) + 1


def _relabel(federation: Federation, tables: Tensor, groups: Groups) -> Federation:
    part = parts(federation, groups)
    changed = federation.map(lambda i, x, y: (x, tables[part[i]][y]))
    return replace(changed, groups=crossed(federation.groups, part))


def _deal_anew(federation: Federation, alpha: float, seed: int, *, by_label: bool) -> Federation:
    if alpha <= 0:
        raise ValueError(f"alpha must be above 0, got {alpha}")
    classes = class_count(federation) if by_label else 1
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
    """Return shares (clients, classes) that sum to one over the clients."""
    import numpy as np

    draws = np.random.default_rng(key.seed()).dirichlet(np.full(clients, alpha), size=classes)
    return torch.as_tensor(draws.T)


def _cut(rows: Tensor, kind: Tensor, shares: Tensor, least: int) -> list[Tensor]:
    """Split the rows of each kind by the clients' shares; the largest gives rows to clients with fewer than `least`."""
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
