"""Functions that make a problem harder: noise, clients that belong to no group, shifted inputs and targets.

Like those of `heterogeneity`, each takes a federation and returns a new one.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from coterie.core.federation import Federation, Packed
from coterie.core.key import Key
from coterie.data.heterogeneity import Groups, class_count, crossed, number_of, parts
from coterie.data.source import change

NOBODY = -1  # the group of a client that belongs to none; clusterings are scored without it


@change
def noisy_labels(federation: Federation, share: float = 0.2, seed: int = 0) -> Federation:
    """Draw some labels of the training rows anew, of all classes; test rows stay as they are.

    Args:
        federation: Clients with one class label per row.
        share: Share of the rows whose label is drawn.
        seed: Seed of the choice of rows and of their labels.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"noisy_labels: share must be between 0 and 1, got {share}")
    y, g = federation.train.y, Key.of(seed).generator()
    drawn = torch.randint(class_count(federation), y.shape, generator=g)
    wrong = torch.rand(y.shape, generator=g) < share
    return replace(federation, train=federation.train._replace(y=torch.where(wrong, drawn, y)))


@change
def outliers(federation: Federation, clients: int = 5, seed: int = 0) -> Federation:
    """Give some clients random labels: there is nothing to be learnt from them, and they belong to no group (-1).

    Args:
        federation: Clients with one class label per row.
        clients: How many of them.
        seed: Seed of the choice of clients and of their labels.
    """
    if not 0 <= clients <= len(federation):
        raise ValueError(f"outliers: clients must be 0 to {len(federation)}, the clients there are, got {clients}")
    classes, key = class_count(federation), Key.of(seed)
    odd = torch.zeros(len(federation), dtype=torch.bool)
    odd[torch.randperm(len(federation), generator=key.generator())[:clients]] = True

    def drawn(part: Packed, stream: int) -> Packed:
        owner = torch.repeat_interleave(torch.arange(len(federation)), part.sizes)
        y = torch.randint(classes, part.y.shape, generator=key.fold(stream).generator())
        return part._replace(y=torch.where(odd[owner], y, part.y))

    groups = torch.zeros(len(federation), dtype=torch.long) if federation.groups is None else federation.groups
    test = federation.test and drawn(federation.test, 1)
    return replace(federation, train=drawn(federation.train, 0), test=test, groups=groups.masked_fill(odd, NOBODY))


@change
def shift_features(federation: Federation, groups: Groups = 4, scale: float = 1.0, seed: int = 0) -> Federation:
    """Add a random vector to the rows of every group, the same to all rows of one.

    Args:
        federation: Clients with rows of real numbers.
        groups: Number of new groups into which every existing group is split, or their sizes.
        scale: Standard deviation of the vectors' entries.
        seed: Seed of the vectors.
    """
    if not federation.train.x.is_floating_point():
        raise ValueError(f"shift_features: rows must be of real numbers, got {federation.train.x.dtype}")
    part, row = parts(federation, groups), federation.train.x.shape[1:]
    shift = scale * torch.randn(number_of(groups), *row, generator=Key.of(seed).generator())
    shifted = federation.map(lambda i, x, y: (x + shift[part[i]], y))
    return replace(shifted, groups=crossed(federation.groups, part))


@change
def offset_targets(federation: Federation, by: float = 5.0) -> Federation:
    """Add a number to the targets of all rows.

    Args:
        federation: Clients with real targets.
        by: The number.
    """
    if not federation.train.y.is_floating_point():
        raise ValueError(f"offset_targets: targets must be real numbers, got {federation.train.y.dtype}")

    def moved(i: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x, y + by

    return federation.map(moved)
