"""Soft labels: a client has a share λ_j in every cluster, by likelihood, and adds to each of them accordingly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from coterie.core.local import mean_loss
from coterie.core.pytree import Outer, Params, is_outer, tree_map
from coterie.core.step import ClientStep, Local, Reply
from coterie.core.task import Data, Task
from coterie.core.train import SECRECY


class Soft(NamedTuple):
    """The message of a round with soft labels."""

    theta: Params  # (k, …)
    lr: Tensor
    temperature: Tensor


def softly(task: Task, k: int, part: Callable[[Params, Data, Tensor], Any]) -> ClientStep:
    """A client step that is sent `Soft`: what a client adds to k clusters, λ_j ∝ exp(-Σ loss / temperature) of it.

    Args:
        task: Gives the loss.
        k: The clusters.
        part: `part(theta, rows, lr)`: what it would add to the cluster of this model if it were in no other.

    Returns:
        The update is λ times that ("moved"), λ itself ("share") and λ times the loss ("loss").
    """

    def run(sent: Soft, local: Local) -> Reply:
        rows = local.data.mask.sum()
        losses = vmap(lambda t: mean_loss(task, t, local.data))(sent.theta).nan_to_num(nan=torch.inf)
        above = (losses - losses.amin()) * rows
        share = (-above / sent.temperature.clamp(min=torch.finfo(above.dtype).tiny)).softmax(0)
        each = vmap(lambda t: part(t, local.data, sent.lr))(sent.theta)
        moved = tree_map(lambda x: _times(share, x), each, is_leaf=is_outer)
        update = {"moved": moved, "share": share, "loss": _times(share, losses)}
        note = {"label": losses.argmin(), "loss": losses.amin()}
        return Reply(update, rows.expand(k), torch.arange(k, device=share.device), note)

    return ClientStep(run, secrecy=SECRECY)


def _times(share: Tensor, x: Tensor | Outer) -> Any:
    """Each model's part (k, …) times its λ; nothing of a model that has none, not even if it has diverged."""
    if isinstance(x, Outer):
        return Outer(_times(share, x.left), x.right)
    share = share.reshape(-1, *[1] * (x.dim() - 1))
    return torch.where(share > 0, share * x, 0.0)
