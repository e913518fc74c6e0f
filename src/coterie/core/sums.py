"""Sums of replies by slot, and the mean of every slot."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.core.pytree import Outer, formed, is_outer, leaves, take, tree_map
from coterie.core.step import Reply


class Sums(NamedTuple):
    """What `Cohort.combine` returns.

    Attributes:
        update: The weighted sums by slot (slots, …).
        weight: The summed weights (slots,).
        note: Every participant's diagnostics, in the cohort's order. From a secure sum: the mean over all in
            everybody's place, and -1 for what is hidden.
        members: How many clients have added to each slot (slots,), where the notes do not say: from a secure sum.
    """

    update: Any
    weight: Tensor
    note: dict[str, Tensor]
    members: Tensor | None = None


def slot_sum(reply: Reply, slots: int) -> Sums:
    """Add stacked replies (c, …), each of one or several parts, up by slot."""
    parts = reply.slot.dim()
    update = tree_map(lambda x: x.flatten(0, parts - 1), reply.update)
    return Sums(*weighted_sums(reply.slot, reply.weight, slots, update), note=reply.note)


def weighted_sums(slot: Tensor, weight: Tensor, slots: int, rows: Any) -> tuple[Any, Tensor]:
    """Add rows (b, …) of a tree up by slot (slots, …), for b slots and weights of any shape; and the weights."""
    device = next((x.device for x in leaves(rows)), weight.device)  # a weight of 1 may have been made on the CPU
    weight, slot = weight.flatten().to(device), slot.flatten().to(device)
    share = (slot[:, None] == torch.arange(slots, device=slot.device)) * weight[:, None]
    single = len(slot) == 1 and device.type == "cpu"  # of one row, a matrix product is five times slower there

    def total(x: Tensor | Outer) -> Tensor:
        if single:
            return apart(formed(x))
        if isinstance(x, Outer):
            return _product_sums(x, share)
        # One matrix product: on a GPU index_add would add in an order that changes from run to run.
        return (share.T.to(x.dtype) @ x.reshape(len(slot), -1)).reshape(slots, *x.shape[1:])

    def apart(x: Tensor) -> Tensor:
        each = x * weight.reshape(-1, *[1] * (x.dim() - 1)).to(x.dtype)
        if single and slots == 1:
            return each
        return torch.zeros(slots, *x.shape[1:], dtype=x.dtype, device=x.device).index_add_(0, slot, each)

    sums = tree_map(total, rows, is_leaf=is_outer)
    finite = [] if slots == 1 or single else [torch.isfinite(x).all() for x in leaves(sums)]
    if finite and not bool(torch.stack(finite).all()):  # 0 · ∞ has carried one slot's infinity into the others
        sums = tree_map(apart, formed(rows))
    return sums, share.sum(0)


def _product_sums(x: Outer, share: Tensor) -> Tensor:
    """The sums by slot of products (b, …) that are given by their factors, weighted by `share` (b, slots)."""

    def total(weight: Tensor) -> Tensor:
        own, weight = x, weight.to(x.left.dtype)
        if not bool((weight == 1).all()):
            some = weight.nonzero().flatten()  # what is of other slots need not be multiplied by 0
            own, weight = take(x, some), weight[some]
            own = Outer(own.left * weight.reshape(-1, *[1] * (x.left.dim() - 1)), own.right)
        end_to_end = (part.movedim(0, -3).flatten(-3, -2) for part in own)  # (…, b·n, left) and (…, b·n, right)
        return Outer(*end_to_end).product()

    return torch.stack([total(weight) for weight in share.T])


def slot_mean(sums: Sums, otherwise: Any) -> Any:
    """The weighted mean of every slot; a slot that nobody chose keeps what it had.

    Args:
        sums: The sums by slot (slots, …).
        otherwise: What a slot had before. Its axis of slots may be folded into several, such as restarts and clusters.

    Example:
        >>> sums = Sums({"w": torch.tensor([6.0, 0.0])}, torch.tensor([3.0, 0.0]), {})
        >>> slot_mean(sums, otherwise={"w": torch.tensor([9.0, 7.0])})["w"]
        tensor([2., 7.])
    """
    return tree_map(lambda total, old: mean_of(total, sums.weight, old), sums.update, otherwise)


def mean_of(total: Tensor, weight: Tensor, otherwise: Tensor) -> Tensor:
    """Sums over weights (s,), slot by slot, shaped as `otherwise`, which stays where there is no weight."""
    weight = weight.reshape(-1, *[1] * (total.dim() - 1))
    mean = total / weight.clamp(min=torch.finfo(total.dtype).tiny)
    return torch.where(weight > 0, mean, otherwise.to(total).reshape(total.shape)).reshape(otherwise.shape)
