"""Losses and gradients of many clients as compiled graphs, in which convolutions may be matrix products.

Where clients choose, they were sent the same models: convolutions are dense, and what is gained comes of fusing norms,
activations and losses. Where they train, each has weights of its own. vmap makes grouped convolutions of theirs, for
which GPU libraries have slow kernels where channels are few. As *products*, a convolution gathers the pixels under its
kernel by slicing, with channels last, and multiplies them with the weights: one batched product per layer for all
clients. Without fusing, the slices would be slower than what they replace.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from coterie.core.local import Way, one_gradient
from coterie.core.task import Task

Function = Callable[..., tuple[Tensor, ...]]
Dims = tuple[int | None, ...]


class Compiled:
    """What clients that vmap has stacked compute, for one task and one precision; graphs are kept by their shapes."""

    def __init__(self) -> None:
        self._graphs: dict[Any, tuple[Function, TreeSpec]] = {}

    def way(self, *, products: bool) -> Way:
        """The way to compute a function; with `products`, convolutions of gradients are matrix products."""
        return partial(self._call, products)

    def _call(self, products: bool, function: Callable[..., Any], task: Task, *args: Any) -> Any:
        given, spec = tree_flatten(args)
        at = [i for i, x in enumerate(given) if isinstance(x, Tensor)]  # a seed may be None
        call = _Call(self, function, task, spec, tuple(at), products and function is one_gradient)
        found = _Lifted.apply(call, *(given[i] for i in at))
        return tree_unflatten(list(found), call.ends[-1])

    def run(self, call: _Call, args: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The outputs of a call whose clients are stacked (c, …), from its graph; that is made the first time."""
        name = call.function.__name__, call.products
        key = (*name, str(call.spec), call.dims, tuple((x.shape, x.dtype) for x in args))
        if key in self._graphs:
            graph, end = self._graphs[key]
            call.ends.append(end)
            return tuple(graph(*args))
        graph = compiled(make_fx(call.stacked())(*args))
        self._graphs[key] = graph, call.ends[-1]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # the precision is the user's to set
            return tuple(graph(*args))


def compiled(graph: torch.fx.GraphModule) -> Function:
    """A graph with its operations fused."""
    return torch.compile(graph, dynamic=False)


@dataclass(frozen=True, eq=False)
class _Call:
    """One call of a function: what is computed of one client, and which of its tensors vmap has stacked.

    Attributes:
        by: Who was asked.
        function: Of a task and of trees of tensors.
        task: The task.
        spec: How the arguments are put together.
        at: Which of them are tensors.
        products: Whether convolutions are matrix products.
        dims: The stacked dimension of every tensor, for each vmap around the call, innermost first.
        ends: Once it was computed, how its outputs are put together.
    """

    by: Compiled
    function: Callable[..., Any]
    task: Task
    spec: TreeSpec
    at: tuple[int, ...]
    products: bool
    dims: tuple[Dims, ...] = ()
    ends: list[TreeSpec] = field(default_factory=list)

    def stacked(self) -> Function:
        """What is to be compiled: the function of flat arguments, for as many clients as are stacked."""
        function: Function = self._one
        for dims in self.dims:
            function = vmap(function, in_dims=dims)
        return function

    def _one(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given: list[Any] = [None] * self.spec.num_leaves
        for i, tensor in zip(self.at, tensors, strict=True):
            given[i] = tensor
        with Slices() if self.products else nullcontext():
            flat, end = tree_flatten(self.function(self.task, *tree_unflatten(given, self.spec)))
        self.ends.append(end)
        return tuple(flat)


class _Lifted(torch.autograd.Function):
    """A call under vmap: each vmap that is around it hands over its stacked tensors, the last one computes."""

    @staticmethod
    def forward(call: _Call, *args: Tensor) -> tuple[Tensor, ...]:
        return call.by.run(call, args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        call, *tensors = args
        found = _Lifted.apply(replace(call, dims=(*call.dims, tuple(in_dims[1:]))), *tensors)
        return found, (0,) * len(found)


# --- convolutions by slicing ----------------------------------------------------------------------------------------


class Slices(TorchFunctionMode):
    """Computes `conv2d` by slices and a matrix product, where it is not grouped."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = _sliced(*args, **(kwargs or {})) if func is torch.conv2d else None
        return func(*args, **(kwargs or {})) if own is None else own


Sides = int | Sequence[int]


def _sliced(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sides = 1,
    padding: Sides | str = 0,
    dilation: Sides = 1,
    groups: int = 1,
) -> Tensor | None:
    """`conv2d` of rows (n, c, h, w), with channels last in memory; None for what is left to torch."""
    if groups != 1 or input.dim() != 4:
        return None
    (sh, sw), (dh, dw) = _pair(stride), _pair(dilation)
    out, channels, kh, kw = weight.shape
    left, right, top, bottom = _padding(padding, (kw - 1) * dw, (kh - 1) * dh)
    x = functional.pad(input.permute(0, 2, 3, 1), (0, 0, left, right, top, bottom))
    height, width = (x.shape[1] - dh * (kh - 1) - 1) // sh + 1, (x.shape[2] - dw * (kw - 1) - 1) // sw + 1
    under = [
        x[:, i * dh : i * dh + sh * (height - 1) + 1 : sh, j * dw : j * dw + sw * (width - 1) + 1 : sw]
        for i in range(kh)
        for j in range(kw)
    ]
    size = kh * kw * channels
    found = torch.cat(under, -1).reshape(-1, size) @ weight.permute(2, 3, 1, 0).reshape(size, out)
    found = found if bias is None else found + bias
    return found.reshape(len(input), height, width, out).permute(0, 3, 1, 2)


def _padding(padding: Sides | str, width: int, height: int) -> tuple[int, int, int, int]:
    """Pixels to the left, right, top and bottom, for a kernel that reaches so far."""
    if padding == "same":
        return width // 2, width - width // 2, height // 2, height - height // 2
    ph, pw = (0, 0) if isinstance(padding, str) else _pair(padding)
    return pw, pw, ph, ph


def _pair(sides: Sides) -> tuple[int, int]:
    both = (sides, sides) if isinstance(sides, int) else tuple(sides)
    return both[0], both[-1]
