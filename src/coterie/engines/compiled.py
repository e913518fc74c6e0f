"""Losses and training steps of many clients as compiled graphs, in which convolutions may be matrix products.

Where clients choose, they were sent the same models: convolutions are dense, and what is gained comes of fusing norms,
activations and losses. Where they train, each has weights of its own. vmap makes grouped convolutions of theirs, for
which GPU libraries have slow kernels where channels are few. As a *product*, a convolution copies the pixels under its
kernel side by side, with channels last, and multiplies them with the weights: one batched product per layer for all
clients, and two for its gradients. Images have so few channels that their convolution always is one.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from coterie.core.local import LocalStep, Way, all_losses
from coterie.core.precision import Precision, shortened, whole_convolutions
from coterie.core.task import Task

KEPT = 32  # graphs at most
_PLAIN = (bool, int, float, str, type(None))
ALIGNED = 8  # numbers of which a GPU wants rows to have a multiple, in any precision
FEW = 8  # channels up to which a grouped convolution is slower than a product: a GPU multiplies so many at a time

Function = Callable[..., tuple[Tensor, ...]]
Found = dict[str, tuple[int, str]]  # the number of a way, and why it was taken, by the clients it is for
Dims = tuple[int | None, ...]


class Compiled:
    """What clients that vmap has stacked compute; graphs are kept by task, precision and shapes, the last `KEPT`."""

    def __init__(self) -> None:
        self._graphs: OrderedDict[Any, tuple[Function, TreeSpec, Any]] = OrderedDict()
        self._found: dict[Any, Found] = {}

    def found(self, task: Task, *step: Any) -> Found:
        """Which way was the fastest for a step of a task, which later runs need not find out again."""
        key = id(task), *step
        if key not in self._found:
            self._found[key] = {}
            weakref.finalize(task, self._found.pop, key, None).atexit = False  # another task may get its id
        return self._found[key]

    def way(self, precision: Precision, *, products: float = FEW) -> Way:
        """The way to compute a function, where convolutions of up to `products` channels train as matrix products."""
        return partial(self._call, precision, products)

    def _call(self, precision: Precision, products: float, function: Callable[..., Any], task: Task, *args: Any) -> Any:
        given, spec = tree_flatten(args)
        at = tuple(i for i, x in enumerate(given) if isinstance(x, Tensor))  # a seed may be None
        rest = tuple(None if isinstance(x, Tensor) else x for x in given)
        call = _Call(self, function, task, spec, at, rest, precision, 0 if function is all_losses else products)
        if isinstance(function, LocalStep):  # its first argument is stacked from the second step on
            call = replace(call, stacking=sum(isinstance(x, Tensor) for x in tree_flatten(args[0])[0]))
        found = _Lifted.apply(call, *(given[i] for i in at))
        return tree_unflatten(list(found), call.ends[-1])

    def run(self, call: _Call, args: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The outputs of a call whose clients are stacked (c, …), from its graph; that is made the first time."""
        # Two arguments that are one tensor would be one argument of the graph, also where later they are two.
        args = [x.clone() if any(x is y for y in args[:i]) else x for i, x in enumerate(args)]
        shapes = tuple((x.shape, x.dtype, x.device) for x in args)
        of = call.precision, _told_apart(call.function), call.products, call.rest
        key = id(call.task), *of, str(call.spec), call.at, call.dims, shapes
        if key in self._graphs:
            self._graphs.move_to_end(key)
            graph, end, _ = self._graphs[key]
            call.ends.append(end)
            return tuple(graph(*args))
        graph = compiled(make_fx(call.stacked())(*args))
        self._graphs[key] = graph, call.ends[-1], call.function  # which keeps what the key knows by its id
        weakref.finalize(call.task, self._graphs.pop, key, None).atexit = False  # another task may get its id
        while len(self._graphs) > KEPT:
            self._graphs.popitem(last=False)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # the precision is the user's to set
            return tuple(graph(*args))


GRAPHS = Compiled()  # of all runs of a process: those that differ by their seed have the same


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
        rest: The others, at their places.
        precision: Of the arithmetic around the call.
        products: Channels up to which convolutions are matrix products.
        stacking: How many of the first tensors are copied for every client, where all have the same: later calls have
            their own, and one graph is for both.
        dims: The stacked dimension of every tensor, for each vmap around the call, innermost first.
        ends: Once it was computed, how its outputs are put together.
    """

    by: Compiled
    function: Callable[..., Any]
    task: Task
    spec: TreeSpec
    at: tuple[int, ...]
    rest: tuple[Any, ...]
    precision: Precision
    products: float
    stacking: int = 0
    dims: tuple[Dims, ...] = ()
    ends: list[TreeSpec] = field(default_factory=list)

    def stacked(self) -> Function:
        """What is to be compiled: the function of flat arguments, for as many clients as are stacked."""
        function: Function = self._one
        for dims in self.dims:
            function = vmap(function, in_dims=dims)
        return function

    def _one(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = list(self.rest)
        for i, tensor in zip(self.at, tensors, strict=True):
            given[i] = tensor
        # A mode that was on around the call is not on in here: torch takes it off while a mode looks at the call.
        with whole_convolutions(self.precision), Products(self.products) if self.products else nullcontext():
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
        (call, *tensors), dims = args, list(in_dims[1:])
        for i in range(call.stacking):
            if dims[i] is None:
                tensors[i], dims[i] = tensors[i].expand(info.batch_size, *tensors[i].shape).contiguous(), 0
        found = _Lifted.apply(replace(call, dims=(*call.dims, tuple(dims))), *tensors)
        return found, (0,) * len(found)


def _told_apart(function: Callable[..., Any]) -> Any:
    """What graphs of a function are kept by: of a step, all that its optimiser holds, declared as a setting or not."""
    if not isinstance(function, LocalStep):
        return function
    held = tuple((name, repr(x) if _is_plain(x) else id(x)) for name, x in vars(function.optimiser).items())
    return function.prox, function.clip, function.ragged, type(function.optimiser), held


def _is_plain(value: Any) -> bool:
    """Whether its repr tells all of it, which that of a tensor does not."""
    return all(map(_is_plain, value)) if isinstance(value, tuple | list) else isinstance(value, _PLAIN)


# --- convolutions as products ----------------------------------------------------------------------------------------


class Products(TorchFunctionMode):
    """Computes `conv2d` as a matrix product, where it is not grouped and images have no more channels than this."""

    def __init__(self, channels: float = math.inf) -> None:
        super().__init__()
        self.channels = channels

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = _convolved(self.channels, *args, **(kwargs or {})) if func is torch.conv2d else None
        return func(*args, **(kwargs or {})) if own is None else own


Sides = int | Sequence[int]


class _Window(NamedTuple):
    """Where a convolution looks: its kernel, stride and dilation, and the pixels of 0 on every side of the image."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    padding: tuple[int, int, int, int]  # left, right, top, bottom; negative ones cut pixels off

    @property
    def reach(self) -> tuple[int, int]:
        """Pixels from the first to the last one under the kernel."""
        (high, wide), (down, right) = self.kernel, self.dilation
        return down * (high - 1), right * (wide - 1)

    def places(self, size: Sequence[int]) -> tuple[int, int]:
        """At how many places, down and to the right, the kernel lies on images of this height and width."""
        left, right, top, bottom = self.padding
        height, width = size[0] + top + bottom, size[1] + left + right
        return (height - self.reach[0] - 1) // self.stride[0] + 1, (width - self.reach[1] - 1) // self.stride[1] + 1

    def under(self, x: Tensor) -> Tensor:
        """The pixels under the kernel at each of its places (n, height, width, kernel…, channels)."""
        x = functional.pad(x.permute(0, 2, 3, 1), (0, 0, *self.padding))
        for at, (reach, stride, dilation) in enumerate(zip(self.reach, self.stride, self.dilation, strict=True), 1):
            x = x.unfold(at, reach + 1, stride)[..., ::dilation]
        return x.permute(0, 1, 2, 4, 5, 3)

    def backwards(self, size: Sequence[int], places: Sequence[int]) -> _Window:
        """Where to look at the gradient, its pixels a stride apart, for that of images of this height and width."""
        (left, _, top, _), (down, right) = self.padding, self.reach
        height, width = ((n - 1) * s + 1 for n, s in zip(places, self.stride, strict=True))
        # On the left and above, as far as the kernel sees; then as much as it takes for an image of this size.
        padding = (right - left, size[1] - width + left, down - top, size[0] - height + top)
        return _Window(self.kernel, (1, 1), self.dilation, padding)


class _Convolution(torch.autograd.Function):
    """A convolution whose gradients are products too: that of the images is a convolution of the gradient.

    Torch would add the gradient of every slice of an image to it in turn. Where there are few channels, the pixels
    under the kernel are kept from the one to the other.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, rows: Tensor | None, weight: Tensor, window: _Window) -> Tensor:
        return _product(_rows(x, window) if rows is None else rows, weight, window.places(x.shape[2:]))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, rows, weight, ctx.window = inputs
        ctx.save_for_backward(x, rows, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, Tensor, None]:
        (gradient,), window, (x, rows, weight) = gradients, ctx.window, ctx.saved_tensors
        out, channels, *_ = weight.shape
        at_rows = gradient.permute(0, 2, 3, 1).flatten(1, 2).to(x.dtype)
        if rows is None:
            rows, at_rows = (each.flatten(0, 1)[None] for each in (_rows(x, window), at_rows))
        # Of few channels it is a small matrix, which a GPU would not share out: it does so image by image.
        at_weight = (rows.mT @ at_rows).sum(0)[: weight[0].numel()]
        at_weight = at_weight.reshape(*window.kernel, channels, out).permute(3, 2, 0, 1)
        at_weight = at_weight.clone(memory_format=torch.contiguous_format)  # a graph is of one order in memory
        if not ctx.needs_input_grad[0]:  # they are clients' images, and their gradient would take much memory
            return None, None, at_weight.to(weight.dtype), None
        apart = _apart(gradient, window.stride)
        turned, back = weight.flip(2, 3).transpose(0, 1), window.backwards(x.shape[2:], gradient.shape[2:])
        at_x = _product(_rows(apart, back), turned, back.places(apart.shape[2:]))
        return at_x.to(x.dtype), None, at_weight.to(weight.dtype), None


def _rows(x: Tensor, window: _Window) -> Tensor:
    """The pixels at each place side by side (n, places, pixels), with zeros at the end."""
    return _aligned(window.under(x).flatten(3).flatten(1, 2))


def _product(rows: Tensor, weight: Tensor, places: tuple[int, int]) -> Tensor:
    """Images (n, channels, height, width) convolved, as one product of all places."""
    found = rows.flatten(0, 1) @ _aligned(weight.permute(0, 2, 3, 1).flatten(1)).T
    return found.unflatten(0, (len(rows), *places)).permute(0, 3, 1, 2)


def _aligned(x: Tensor) -> Tensor:
    """Zeros at the end of every row, to a length that a GPU reads as a whole: else its products are much slower."""
    return functional.pad(x, (0, -x.shape[-1] % ALIGNED)) if x.shape[-1] % ALIGNED else x


def _apart(x: Tensor, stride: tuple[int, int]) -> Tensor:
    """Images with zeros between their pixels, so that these are a stride apart."""
    if stride == (1, 1):
        return x
    n, c, h, w = x.shape
    x = functional.pad(x.reshape(n, c, h, 1, w, 1), (0, stride[1] - 1, 0, 0, 0, stride[0] - 1))
    x = x.reshape(n, c, h * stride[0], w * stride[1])
    return x[:, :, : (h - 1) * stride[0] + 1, : (w - 1) * stride[1] + 1]


def _convolved(
    channels: float,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sides = 1,
    padding: Sides | str = 0,
    dilation: Sides = 1,
    groups: int = 1,
) -> Tensor | None:
    """`conv2d` of rows (n, c, h, w), with channels last in memory; None for what is left to torch."""
    if groups != 1 or input.dim() != 4 or input.shape[1] > channels or input.shape[1] != weight.shape[1]:
        return None
    input, weight = shortened(input), shortened(weight)  # before pixels are copied, which are many more
    window = _Window((weight.shape[2], weight.shape[3]), _pair(stride), _pair(dilation), (0, 0, 0, 0))
    window = window._replace(padding=_padding(padding, window.reach))
    rows = _rows(input, window) if input.shape[1] <= FEW else None  # of more they would take much memory
    found = _Convolution.apply(input, rows, weight, window)
    return found if bias is None else found + shortened(bias)[:, None, None]


def _padding(padding: Sides | str, reach: tuple[int, int]) -> tuple[int, int, int, int]:
    """Pixels to the left, right, top and bottom, for a kernel that reaches so far."""
    height, width = reach
    if padding == "same":
        return width // 2, width - width // 2, height // 2, height - height // 2
    ph, pw = (0, 0) if isinstance(padding, str) else _pair(padding)
    return pw, pw, ph, ph


def _pair(sides: Sides) -> tuple[int, int]:
    both = (sides, sides) if isinstance(sides, int) else tuple(sides)
    return both[0], both[-1]
