"""Images of which every group of clients sees all, each group rotated by its own angle."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from coterie.core.federation import Federation, Packed
from coterie.core.key import Key


def rotated_by_group(
    images: tuple[Tensor, Tensor, Tensor, Tensor],
    name: str,
    *,
    clients: int,
    rows: int,
    seed: int,
    turns: Sequence[int],
) -> Federation:
    """Distribute images as the IFCA paper does (Section 6.2), in which each group rotates all of them by its own angle.

    In every group all training images are shuffled and split into clients of `rows` images. The group's test images are
    split, unshuffled, into machines of `rows`; each is the test data of equally many clients, so that the mean over
    clients is the paper's mean over test machines.

    Args:
        images: Training images (n, channels, side, side), their labels, test images and their labels.
        name: Of the data set, for messages.
        clients: Number of clients m.
        rows: Number of images per client.
        seed: Seed of the shuffling.
        turns: By how many quarter turns each group is rotated.
    """
    x, y, x_test, y_test = images
    groups = len(turns)
    if clients < groups or clients % groups:
        raise ValueError(f"{name}: clients must be a positive multiple of {groups}, got {clients}")
    if not 1 <= rows <= len(x_test):
        raise ValueError(f"{name}: rows must be 1 to {len(x_test):,}, the test images there are, got {rows}")
    per_group, machines = clients // groups, len(x_test) // rows
    if per_group * rows > len(x):
        raise ValueError(f"{name}: {per_group} clients a group with {rows} rows each want more than {len(x)} images")
    orders = [torch.randperm(len(x), generator=Key.of(seed).fold(g).generator()) for g in range(groups)]
    picked = [order[: per_group * rows] for order in orders]
    tested = (torch.arange(per_group) % machines)[:, None] * rows + torch.arange(rows)

    def packed(x: Tensor, y: Tensor, picks: list[Tensor]) -> Packed:
        turned = torch.cat([torch.rot90(x[at], t, (-2, -1)) for t, at in zip(turns, picks, strict=True)])
        return Packed(turned, torch.cat([y[at] for at in picks]), torch.arange(clients + 1) * rows)

    return Federation(
        train=packed(x, y, picked),
        test=packed(x_test, y_test, [tested.flatten()] * groups),
        groups=torch.arange(clients) // per_group,
    )
