"""Points that count for every cluster, each by how likely it is to be in it: the mixture of the clusters' models.

Who assigns every point to one cluster, and fits models to these, finds clusters too narrow and too far apart where
they overlap, and large ones too small. Under the mixture, a cluster's share of the points counts too. It is another one
at every client, so each finds its own, and keeps it to itself.
"""

from __future__ import annotations

from torch import Tensor

FAR = 1e6  # as unlikely as a point can be, so that a model that has diverged leaves all sums finite
PRIOR = 3.0  # points that the shares of all clients together count for, in those of one client
STEPS = 10  # by which a client finds its own shares


def own_shares(losses: Tensor, share: Tensor, mask: Tensor) -> Tensor:
    """The clusters' likeliest shares of one client's points (…, k): the steps of EM for them alone.

    With few points, they stay near those of all clients.

    Args:
        losses: The negative log-likelihood of every point under every model (…, k, n).
        share: Those of all clients' points (…, k).
        mask: 1 for the points that count (n,).

    Example:
        >>> import torch
        >>> losses = torch.tensor([[0.0, 0.0, 0.0, 9.0], [9.0, 9.0, 9.0, 0.0]]).repeat(1, 25)
        >>> own_shares(losses, torch.tensor([0.5, 0.5]), torch.ones(100))
        tensor([0.7428, 0.2572])
    """
    found = share
    for _ in range(STEPS):
        inside = joint(losses, found).softmax(-2) @ mask
        found = (inside + PRIOR * share) / (mask.sum() + PRIOR)
    return found


def joint(losses: Tensor, share: Tensor) -> Tensor:
    """The log-likelihood of every point together with every cluster (…, k, n); finite unless a share is 0."""
    return share.log()[..., None] - losses.nan_to_num(nan=FAR, posinf=FAR, neginf=FAR).clamp(max=FAR)
