"""Who was in which cluster after every round, from what the rounds of a history say of clients that moved."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

TRACKED = 10_000  # clients at most whose moves a history names: of more it would be larger than the models


def moved(before: Tensor, after: Tensor) -> dict[str, list[int]] | None:
    """The clients that are in another cluster than before, by the cluster that they are in now.

    Args:
        before: Every client's cluster (m,), -1 for none.
        after: The same, a round later.

    Returns:
        Positions of clients, by the name of a cluster as JSON has it; None where there are too many clients to name.

    Example:
        >>> import torch
        >>> moved(torch.tensor([0, 0, 1, -1]), torch.tensor([0, 2, 1, 2]))
        {'2': [1, 3]}
    """
    if len(after) > TRACKED:
        return None
    other = (before != after).nonzero().flatten().tolist()
    found: dict[str, list[int]] = {}
    for client in other:
        found.setdefault(str(int(after[client])), []).append(client)
    return found


def timeline(history: list[dict[str, Any]]) -> np.ndarray | None:
    """Every client's cluster before the first round and after each (rounds + 1, m), -1 for none.

    Clients that came later are in no cluster before.

    Args:
        history: The rounds.

    Returns:
        None where the rounds do not say who moved.

    Example:
        >>> timeline([{"moved": {"0": [0, 2], "1": [1]}}, {"moved": {"1": [2]}}]).tolist()
        [[-1, -1, -1], [0, 1, 0], [0, 1, 1]]
    """
    moves = [row.get("moved") for row in history]
    named = [client for own in moves for clients in (own or {}).values() for client in clients]
    if not named or any(own is None for own in moves):
        return None
    labels = np.full((len(history) + 1, max(named) + 1), -1)
    for t, own in enumerate(moves, 1):
        labels[t] = labels[t - 1]
        for cluster, clients in (own or {}).items():
            labels[t, clients] = int(cluster)
    return labels


def settled(labels: np.ndarray) -> np.ndarray:
    """The round after which each client never moved again (m,).

    Args:
        labels: As `timeline` returns them.

    Example:
        >>> settled(np.array([[-1, -1], [0, 1], [1, 1], [1, 1]])).tolist()
        [2, 1]
    """
    moves = np.diff(labels, axis=0) != 0
    rounds = np.arange(1, len(labels))[:, None]
    return (moves * rounds).max(0, initial=0)
