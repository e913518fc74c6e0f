"""Groups of points of which only the distances are known: hierarchical clustering, and where to cut it."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

Linkage = Literal["ward", "average", "complete", "single"]

REFERENCES = 39  # sets of points without groups that a cut is compared with: one in 40 such sets is cut all the same
MOST = 20  # groups that are tried
FLAT = 1e-9  # of the largest eigenvalue: a direction with less is rounding


def merges(apart: np.ndarray, linkage: Linkage) -> np.ndarray:
    """The tree of merges as scipy has it (m - 1, 4), from distances (m, m)."""
    from scipy.cluster.hierarchy import linkage as merge
    from scipy.spatial.distance import squareform

    return merge(squareform(apart, checks=False), linkage)


def cut(tree: np.ndarray, k: int) -> np.ndarray:
    """The last k groups (m,), also where merges are at the same height.

    Example:
        >>> x = np.array([0.0, 0.1, 5.0, 9.0])
        >>> cut(merges(abs(x - x[:, None]), "average"), 3).tolist()
        [0, 0, 1, 2]
    """
    from scipy.cluster.hierarchy import cut_tree

    return cut_tree(tree, n_clusters=k)[:, 0]


def cut_below(tree: np.ndarray, threshold: float) -> np.ndarray:
    """The groups that merges up to a height make (m,)."""
    from scipy.cluster.hierarchy import fcluster

    return fcluster(tree, threshold, "distance") - 1


def cut_by_silhouette(apart: np.ndarray, linkage: Linkage, generator: torch.Generator) -> np.ndarray:
    """The cut with the largest silhouette, or one group if points without groups have one as large (m,).

    Points without groups are drawn from a normal distribution with the covariance of the given ones, `REFERENCES`
    times; each time the largest silhouette of all cuts counts. Cuts into 2 to `MOST` groups are tried, of two points
    each in the mean. As in the significance of clustering by Liu, Hayes, Nobel and Marron (JASA 2008), a covariance
    that groups have stretched is no evidence of groups; a valley between them is.

    Args:
        apart: Distances (m, m).
        linkage: How groups are merged.
        generator: Draws the points without groups.

    Example:
        >>> x = np.array([0.0, 0.1, 0.2, 5.0, 5.1, 5.2])
        >>> cut_by_silhouette(abs(x - x[:, None]), "ward", torch.Generator().manual_seed(0)).tolist()
        [0, 0, 0, 1, 1, 1]
    """
    tree, m = merges(apart, linkage), len(apart)
    tried = _silhouettes(apart, tree)
    if not tried:
        return np.zeros(m, dtype=int)
    k = max(tried, key=lambda k: tried[k])
    deviation = embedded(apart).std(0)
    for _ in range(REFERENCES):
        drawn = torch.randn(m, len(deviation), generator=generator, dtype=torch.float64) * torch.from_numpy(deviation)
        without = torch.cdist(drawn, drawn).numpy()
        if max(_silhouettes(without, merges(without, linkage)).values()) >= tried[k]:
            return np.zeros(m, dtype=int)
    return cut(tree, k)


def _silhouettes(apart: np.ndarray, tree: np.ndarray) -> dict[int, float]:
    """The silhouette of the cuts that are tried, by their number of groups."""
    from scipy.cluster.hierarchy import cut_tree

    numbers = range(2, min(MOST, len(apart) // 2) + 1)
    cuts = cut_tree(tree, n_clusters=list(numbers)).T if numbers else ()
    return {k: silhouette(apart, label) for k, label in zip(numbers, cuts, strict=True)}


def silhouette(apart: np.ndarray, label: np.ndarray) -> float:
    """The mean over points of (b - a) / max(a, b), where a and b are the mean distances to its own and the next group.

    A point that is alone in its group counts 0.

    Example:
        >>> x = np.array([0.0, 1.0, 10.0, 11.0])
        >>> round(silhouette(abs(x - x[:, None]), np.array([0, 0, 1, 1])), 4)  # (9.5/10.5 + 8.5/9.5) / 2
        0.8997
    """
    own = label[:, None] == np.arange(label.max() + 1)
    total, size = apart @ own, own.sum(0)
    mine = size[label]
    a = total[own] / np.maximum(mine - 1, 1)
    b = np.where(own, np.inf, total / size).min(1)
    score = (b - a) / np.maximum(np.maximum(a, b), np.finfo(float).tiny)
    return float(np.where(mine > 1, score, 0.0).mean())


def embedded(apart: np.ndarray) -> np.ndarray:
    """Points (m, d) with these distances (m, m), about their mean; as near as can be where there are none such.

    Example:
        >>> embedded(np.array([[0.0, 2.0], [2.0, 0.0]])).round(6).ravel().tolist() in ([1.0, -1.0], [-1.0, 1.0])
        True
    """
    squares = apart**2
    mean = squares.mean(0)
    value, vector = np.linalg.eigh(-(squares - mean - mean[:, None] + mean.mean()) / 2)
    kept = value > FLAT * max(value[-1], 0.0)
    return vector[:, kept] * np.sqrt(value[kept])
