"""Points that are held out, to choose between models by how likely these find them."""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.core.key import Key
from coterie.core.step import Local
from coterie.parts.mixture import FAR, joint

HELD_OUT = 0.2  # of the points
_STREAM = 7  # under a client's key


def held_out(n: int, key: Key) -> Tensor:
    """1 for a client's points that train no model by which they are judged, the same in every round (n,).

    Each is drawn by itself: of clients with few points too, one in five is held out on average.

    Example:
        >>> from coterie.core.key import Key
        >>> held_out(10, Key.of(0)).tolist()
        [0, 0, 0, 1, 0, 0, 0, 0, 0, 0]
    """
    return (torch.rand(n, generator=key.fold(_STREAM).generator()) < HELD_OUT).long()


def surprise(losses: Tensor, share: Tensor, local: Local) -> Tensor:
    """How unlikely every held-out point is under each mixture (m, n); 0 for the other points.

    Not under the models that they are assigned to: those who assigned them would be preferred.

    Args:
        losses: Of every point under a mixture's models (m, k, n).
        share: Of the clusters (m, k).
        local: Tells which points are held out.
    """
    unlikely = -joint(losses, share).logsumexp(1).clamp(min=-FAR)
    return torch.where(local.draws["held"] * local.data.mask > 0, unlikely, 0.0)
