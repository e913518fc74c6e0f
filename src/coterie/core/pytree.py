"""Parameters and other trees of tensors.

`Params` is a dict of tensors. A leading axis is always clusters (k), restarts (r) or clients (m), never a batch of
examples. Every other tree (a state, a reply) is built of dicts, tuples and NamedTuples with tensors at the leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as torchs

__all__ = [
    "Outer", "Params", "all_on", "beside", "exact", "flat", "formed", "joined", "leaves", "nbytes", "put_rows", "stack",
    "stacked", "take", "to_device", "to_server", "tree_map", "unflat",
]  # fmt: skip

Params = dict[str, Tensor]


def tree_map(function: Callable[..., Any], tree: Any, *more: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """A tree like the first with `function(x, *others)` at the leaves: the same as torch's, but faster.

    Args:
        function: Of a leaf of each tree.
        tree: The tree.
        more: Others of the same form.
        is_leaf: Whether a part of the first is to be taken for a leaf.

    Example:
        >>> tree_map(lambda x, y: x + y, {"a": (1, 2)}, {"a": (10, 20)})
        {'a': (11, 22)}
    """
    if is_leaf is not None and is_leaf(tree):
        return function(tree, *more)
    kind = type(tree)
    if kind is dict:
        if any(other.keys() != tree.keys() for other in more):
            raise ValueError(f"trees of other forms: {[list(x) for x in (tree, *more)]}")
        return {k: tree_map(function, x, *[other[k] for other in more], is_leaf=is_leaf) for k, x in tree.items()}
    if kind is tuple or kind is list or (isinstance(tree, tuple) and hasattr(kind, "_make")):
        parts = [tree_map(function, *each, is_leaf=is_leaf) for each in zip(tree, *more, strict=True)]
        return kind._make(parts) if hasattr(kind, "_make") else kind(parts)  # pyright: ignore[reportAttributeAccessIssue]
    if kind in torchs.SUPPORTED_NODES:  # what other libraries have told torch of
        return torchs.tree_map(function, tree, *more, is_leaf=is_leaf)
    return function(tree, *more)


def tree_leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """The leaves of a tree, in a fixed order.

    Example:
        >>> tree_leaves({"a": (1, 2), "b": [3]})
        [1, 2, 3]
    """
    found: list[Any] = []
    tree_map(found.append, tree, is_leaf=is_leaf)
    return found


class Outer(NamedTuple):
    """A matrix leftᵀ·right (…, a, b) by its factors (…, n, a) and (…, n, b).

    In a reply it stands for the product, which is what a client sends. Where the products of many clients are added up
    none of them need be formed: their sum is one product of the factors laid end to end.
    """

    left: Tensor
    right: Tensor

    def product(self) -> Tensor:
        """The matrix itself."""
        return self.left.transpose(-1, -2) @ self.right


def formed(tree: Any) -> Any:
    """A tree with every `Outer` replaced by its product.

    Example:
        >>> formed({"a": Outer(torch.ones(3, 2), torch.ones(3, 4)), "b": torch.zeros(1)})["a"].shape
        torch.Size([2, 4])
    """
    return tree_map(lambda x: x.product() if isinstance(x, Outer) else x, tree, is_leaf=is_outer)


def is_outer(tree: Any) -> bool:
    """Whether this is a matrix given by its factors."""
    return isinstance(tree, Outer)


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


def joined(trees: Sequence[Any]) -> Any:
    """Trees of stacked tensors, put end to end along the leading axis.

    Example:
        >>> joined([{"w": torch.zeros(2, 3)}, {"w": torch.ones(1, 3)}])["w"].shape
        torch.Size([3, 3])
    """
    return tree_map(lambda *xs: torch.cat(xs), *trees)


def stacked(models: Params) -> int:
    """How many models are stacked along the first axis.

    Example:
        >>> stacked({"weight": torch.zeros(4, 2, 3), "bias": torch.zeros(4, 2)})
        4
    """
    return len(next(iter(models.values())))


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


def put_rows(tree: Any, index: Tensor, rows: Any) -> Any:
    """A copy of the tree with the rows numbered by `index` (c,) replaced by these (c, …).

    Example:
        >>> put_rows({"w": torch.zeros(3)}, torch.tensor([1]), {"w": torch.ones(1)})["w"]
        tensor([0., 1., 0.])
    """

    def put(old: Tensor, new: Tensor) -> Tensor:
        return old.index_copy(0, index.to(old.device), new.to(old))

    return tree_map(put, tree, rows)


def flat(tree: Any, axes: int = 1) -> Tensor:
    """All tensors of a tree side by side, keeping the first `axes` axes: (m, P).

    Example:
        >>> flat({"w": torch.zeros(5, 2, 3), "b": torch.zeros(5, 2)}).shape
        torch.Size([5, 8])
    """
    return torch.cat([x.flatten(axes) if x.dim() > axes else x.unsqueeze(-1) for x in leaves(tree)], axes)


def unflat(vectors: Tensor, like: Params) -> Params:
    """Parameters shaped as `like` from vectors (…, P): the inverse of `flat`.

    Example:
        >>> like = {"w": torch.zeros(2, 3), "b": torch.zeros(2)}
        >>> {n: tuple(x.shape) for n, x in unflat(torch.zeros(5, 8), like).items()}
        {'w': (5, 2, 3), 'b': (5, 2)}
    """
    parts = vectors.split([x.numel() for x in like.values()], -1)
    return {n: v.reshape(*v.shape[:-1], *x.shape) for (n, x), v in zip(like.items(), parts, strict=True)}


def nbytes(tree: Any) -> int:
    """Bytes of all tensors of a tree, an `Outer` being counted as its product.

    Example:
        >>> nbytes({"w": torch.zeros(5, 2), "b": torch.zeros(5)})
        60
    """
    return sum(_nbytes(x) for x in tree_leaves(tree, is_leaf=is_outer))


def _nbytes(x: Any) -> int:
    if isinstance(x, Outer):
        return x.left[..., 0, :].numel() * x.right.shape[-1] * x.left.element_size()
    return x.numel() * x.element_size() if isinstance(x, Tensor) else 0


def to_device(tree: Any, device: torch.device) -> Any:
    """Floating-point tensors of a tree on a device; labels and counts stay on the CPU, where the server works."""
    return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) and x.is_floating_point() else x, tree)


def all_on(device: torch.device, tree: Any) -> Any:
    """All tensors of a tree on a device, labels and counts too: what a client remembers."""
    return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, tree)


def beside(x: Tensor, tree: Any) -> Any:
    """All tensors of a tree on the device of x, for what is computed with them there."""
    return all_on(x.device, tree)


def to_server(tree: Any) -> Any:
    """All tensors of a tree on the CPU, where the server works."""
    return all_on(torch.device("cpu"), tree)


def exact(x: Tensor) -> Tensor:
    """A tensor as float64 on the CPU, for algebra of the server that needs the digits.

    Example:
        >>> exact(torch.ones(2)).dtype
        torch.float64
    """
    return x.cpu().double()
