"""Parameters and other trees of tensors.

`Params` is a dict of tensors. A leading axis is always clusters (k), restarts (r) or clients (m), never a batch of
examples. Every other tree (a state, a reply) is built of dicts, tuples and NamedTuples with tensors at the leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["Params", "flat", "leaves", "nbytes", "stack", "take", "to_device", "tree_map"]

Params = dict[str, Tensor]


def leaves(tree: Any) -> list[Tensor]:
    """The tensors of a tree, in a fixed order; everything else in it is passed over."""
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def stack(trees: Sequence[Any]) -> Any:
    """Stack trees of one shape along a new leading axis.

    Example:
        >>> stack([{"w": torch.zeros(3)}, {"w": torch.ones(3)}])["w"].shape
        torch.Size([2, 3])
    """
    return tree_map(lambda *xs: torch.stack(xs), *trees)


def take(tree: Any, index: int | Tensor) -> Any:
    """The rows `index` of every tensor; an index of shape s turns (k, …) into s + (…).

    Plain `x[index]` asks a 0-d tensor for its value, which vmap forbids; `index_select` does not.

    Example:
        >>> take({"w": torch.arange(6).reshape(3, 2)}, torch.tensor(2))["w"]
        tensor([4, 5])
    """

    def rows(x: Tensor) -> Tensor:
        at = torch.as_tensor(index, device=x.device)
        return x.index_select(0, at.reshape(-1)).reshape(at.shape + x.shape[1:])

    return tree_map(rows, tree)


def flat(tree: Any, axes: int = 1) -> Tensor:
    """All tensors of a tree side by side, keeping the first `axes` axes: (m, P).

    Example:
        >>> flat({"w": torch.zeros(5, 2, 3), "b": torch.zeros(5, 2)}).shape
        torch.Size([5, 8])
    """
    return torch.cat([x.flatten(axes) if x.dim() > axes else x.unsqueeze(-1) for x in leaves(tree)], axes)


def nbytes(tree: Any) -> int:
    """Bytes of all tensors of a tree.

    Example:
        >>> nbytes({"w": torch.zeros(5, 2), "b": torch.zeros(5)})
        60
    """
    return sum(x.numel() * x.element_size() for x in leaves(tree))


def to_device(tree: Any, device: torch.device) -> Any:
    """Floating-point tensors of a tree on a device; labels and counts stay on the CPU, where the server works."""
    return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) and x.is_floating_point() else x, tree)
