"""The 1,797 digits (8 × 8) that scikit-learn includes: no download, so the demo and the tests run anywhere."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from coterie.core.federation import Federation
from coterie.data.heterogeneity import permute_labels, rotate
from coterie.data.source import dataset, deal

_TEST = 360  # images kept for testing


@dataset
def digits(clients: int, seed: int = 0, copies: int = 1) -> Federation:
    """Digits distributed to clients at random, as one group.

    Args:
        clients: Number of clients m, a multiple of `copies`.
        seed: Seed of the shuffling.
        copies: Number of equal blocks of clients. Each block gets all images, in a different order.
    """
    return deal(*_images(), clients=clients, seed=seed, copies=copies)


@dataset
def rotated_digits(clients: int, seed: int = 0, groups: int = 4) -> Federation:
    """Digits rotated by 0, 90, 180 or 270 degrees, one angle per group of clients; every image occurs at every angle.

    Args:
        clients: Number of clients m, a multiple of `groups`.
        seed: Seed of the shuffling.
        groups: Number of angles, 1 to 4.

    Example:
        >>> federation = rotated_digits(clients=8, seed=0)
        >>> len(federation), federation.groups.tolist(), tuple(federation.train.x.shape[1:])
        (8, [0, 0, 1, 1, 2, 2, 3, 3], (1, 8, 8))
    """
    return rotate(digits(clients, seed, copies=max(1, groups)), groups)


@dataset
def permuted_digits(clients: int, groups: int = 4, seed: int = 0) -> Federation:
    """Digits whose labels are permuted, with one permutation per group of clients.

    Args:
        clients: Number of clients m, at least `groups`.
        groups: Number of permutations.
        seed: Seed of the shuffling and of the permutations.

    Example:
        >>> permuted_digits(clients=8, groups=2, seed=0).groups.tolist()
        [0, 0, 0, 0, 1, 1, 1, 1]
    """
    return permute_labels(digits(clients, seed), groups, seed=seed)


@functools.cache
def _images() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    x = torch.as_tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.as_tensor(labels, dtype=torch.long)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))  # the split is the same for every seed
    train, test = order[:-_TEST], order[-_TEST:]
    return x[train], y[train], x[test], y[test]
