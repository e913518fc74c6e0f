"""CFL's Algorithm 1: cut clients in two so that the most similar pair across the cut is as dissimilar as can be.

Clustered Federated Learning: Model-Agnostic Distributed Multi-Task Optimization under Privacy Constraints
    Felix Sattler, Klaus-Robert Müller, Wojciech Samek. 2019 (arXiv:1910.01991), Section II and Algorithm 1.

Algorithm 1 merges the most similar clients until two sets are left. That is single linkage, or cutting the weakest edge
of the maximum spanning tree, which takes O(m²) in place of the O(m³) of the printed loops. Similarities are kept as
scipy keeps distances, the upper triangle row by row.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

ROWS = 512  # of the similarity matrix, computed at a time

Linkage = Literal["single", "complete"]


class Halves(NamedTuple):
    """Two halves of some clients."""

    second: np.ndarray  # (m,): whether a client is in the second half
    cross: float  # α_cross, the largest similarity of two clients from different halves


def cosines(vectors: Tensor) -> np.ndarray:
    """α of every pair of rows, the upper triangle of the matrix row by row.

    Example:
        >>> cosines(torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 3.0]])).round(3).tolist()
        [0.0, 0.707, 0.707]
    """
    m = len(vectors)
    unit = vectors / vectors.norm(dim=1, keepdim=True).clamp(min=torch.finfo(vectors.dtype).tiny)
    alpha, at = np.empty(m * (m - 1) // 2), 0
    for first in range(0, m, ROWS):
        block = (unit[first : first + ROWS] @ unit.T).clamp(-1, 1).cpu().numpy()
        for i, row in enumerate(block, first):
            alpha[at : at + m - 1 - i] = row[i + 1 :]
            at += m - 1 - i
    return alpha


def bipartition(alpha: np.ndarray, linkage: Linkage = "single") -> Halves:
    """The optimal bi-partition (25) of clients with these similarities.

    Args:
        alpha: Similarities, the upper triangle of the matrix row by row.
        linkage: "single" is Algorithm 1 and optimal. "complete", as in the authors' code, is not, but bears more noise.

    Example:
        >>> halves = bipartition(np.array([0.9, -0.5, -0.6, -0.4, -0.7, 0.8]))
        >>> halves.second.tolist(), halves.cross
        ([False, False, True, True], -0.4)
    """
    from scipy.cluster.hierarchy import linkage as merge

    merges = merge(1 - alpha, linkage)[:, :2].astype(int)  # row i makes set m + i of two earlier ones
    m = len(merges) + 1
    second, below = np.zeros(m, dtype=bool), [merges[-1, 1]]
    while below:
        v = below.pop()
        if v < m:
            second[v] = True
        else:
            below += [*merges[v - m]]
    if second[0]:  # so that the halves' order does not depend on how they were found
        second = ~second
    return Halves(second, max(_across(alpha, second)))


def contrast(updates: Tensor, second: Tensor) -> float:
    """How far apart the means of two halves are, squared, over what the scatter within the halves gives by chance.

    About 1 for halves of clients that differ by noise only, if the model has some fifty parameters or more; with fewer,
    the best cut of noise may have 2 and more. Infinite for two single clients, which show no scatter.

    Example:
        >>> noise = torch.randn(20, 1000, generator=torch.Generator().manual_seed(0))
        >>> half = torch.arange(20) < 10
        >>> round(contrast(noise, half)), round(contrast(noise + half[:, None], half))
        (1, 6)
    """
    if len(updates) < 3:
        return torch.inf
    halves = [updates[half.to(updates.device)] for half in (~second, second)]
    apart = (halves[0].mean(0) - halves[1].mean(0)).square().sum()
    scatter = [(x - x.mean(0)).square().sum() / max(len(x) - 1, 1) for x in halves]
    length = [x.square().sum(1).mean() for x in halves]
    for one, other in ((0, 1), (1, 0)):
        if len(halves[one]) == 1:  # a single client shows no scatter: as much of its length as of the others'
            scatter[one] = scatter[other] * length[one] / length[other]
    return float(apart / sum(s / len(x) for s, x in zip(scatter, halves, strict=True)))


def separation_gap(alpha: np.ndarray, groups: np.ndarray) -> float:
    """g(α) of Definition 2: the least similarity within a group minus α_cross; the cut is right if it is positive.

    Where every group is a single client there is no pair within, and that term is taken at its bound, 1.
    """
    first, second = np.triu_indices(len(groups), 1)
    within = alpha[groups[first] == groups[second]]
    return float(within.min() if len(within) else 1.0) - bipartition(alpha).cross


def _across(alpha: np.ndarray, second: np.ndarray) -> list[float]:
    """The largest similarity of each client with a later one of the other half."""
    m, at, found = len(second), 0, []
    for i in range(m - 1):
        row = alpha[at : at + m - 1 - i][second[i + 1 :] != second[i]]
        found += [float(row.max())] if len(row) else []
        at += m - 1 - i
    return found
