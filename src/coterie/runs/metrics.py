"""How well found labels match true groups. Label numbers mean nothing, so every score here ignores them."""

from __future__ import annotations

import numpy as np


def contingency(labels: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """How many clients carry each found label (rows) and each true group (columns)."""
    found, truth = (np.unique(a, return_inverse=True)[1] for a in (labels, groups))
    table = np.zeros((found.max() + 1, truth.max() + 1), dtype=np.int64)
    np.add.at(table, (found, truth), 1)
    return table


def of_table(table: np.ndarray) -> dict[str, float]:
    """All scores of a table of counts, found labels (rows) against true groups (columns).

    Example:
        >>> of_table(np.array([[2, 0], [1, 1]]))["purity"]
        0.75
    """
    found, truth = (np.repeat(at, table.ravel()) for at in np.indices(table.shape).reshape(2, -1))
    scores = {"ari": ari, "nmi": nmi, "purity": purity, "matched": matched_accuracy}
    return {name: score(found, truth) for name, score in scores.items()}


def matched_accuracy(labels: np.ndarray, groups: np.ndarray) -> float:
    """Share of clients labelled rightly under the best one-to-one matching of labels to groups (Hungarian).

    Example:
        >>> matched_accuracy(np.array([5, 5, 2, 2]), np.array([0, 0, 1, 0]))
        0.75
    """
    from scipy.optimize import linear_sum_assignment

    table = contingency(labels, groups)
    return float(table[linear_sum_assignment(-table)].sum() / table.sum())


def purity(labels: np.ndarray, groups: np.ndarray) -> float:
    """Share of clients that belong to the commonest group of their label.

    Example:
        >>> purity(np.array([0, 1, 2, 3]), np.array([0, 0, 1, 1]))
        1.0
    """
    table = contingency(labels, groups)
    return float(table.max(1).sum() / table.sum())


def ari(labels: np.ndarray, groups: np.ndarray) -> float:
    """Adjusted Rand index: 1 for equal partitions, about 0 for unrelated ones."""
    from sklearn.metrics import adjusted_rand_score

    return float(adjusted_rand_score(groups, labels))


def nmi(labels: np.ndarray, groups: np.ndarray) -> float:
    """Normalised mutual information."""
    from sklearn.metrics import normalized_mutual_info_score

    return float(normalized_mutual_info_score(groups, labels))
