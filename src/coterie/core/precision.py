"""How exactly matrix products are done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

Precision = Literal["float32", "tf32", "bfloat16"]


def check_precision(precision: str, device: torch.device) -> Precision:
    """The precision of that name, if the device has it."""
    known = get_args(Precision)
    if precision not in known:
        raise ValueError(f"precision must be one of {', '.join(known)}, got {precision!r}")
    if precision == "tf32" and device.type != "cuda":
        raise ValueError(f"precision 'tf32' is a format of GPUs, and the device is {device}; use float32 or bfloat16")
    return known[known.index(precision)]


@contextmanager
def arithmetic(precision: Precision, device: torch.device) -> Iterator[None]:
    """Products and convolutions in this precision, whatever torch was set to; all else stays in float32."""
    switches = _switches() if device.type == "cuda" else []
    before = [getattr(place, name) for place, name, _, _ in switches]
    for place, name, exact, rough in switches:  # with bfloat16 rough too, for what is not cast to it
        setattr(place, name, exact if precision == "float32" else rough)
    short = precision == "bfloat16"
    try:
        with torch.autocast(device.type, torch.bfloat16, enabled=short), whole_convolutions(precision):
            yield
    finally:
        for (place, name, _, _), value in zip(switches, before, strict=True):
            setattr(place, name, value)


def whole_convolutions(precision: Precision) -> AbstractContextManager[Any]:
    """In here, convolutions are in bfloat16 as a whole where that is the precision, as autocast would have them.

    vmap takes them apart before autocast sees them: into one with operands of two kinds, which some versions of torch
    refuse, or into one without a bias that is added in float32, so that all that follows takes twice the memory.
    """
    return _WholeConvolutions() if precision == "bfloat16" else nullcontext()


class _WholeConvolutions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CONVOLUTIONS:
            args, kwargs = tree_map_only(Tensor, shortened, (args, kwargs))
        return func(*args, **(kwargs or {}))


_CONVOLUTIONS = (
    torch.conv1d, torch.conv2d, torch.conv3d, torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d,
)  # fmt: skip


def shortened(x: Tensor) -> Tensor:
    """An operand of a product as autocast has it: where it is on, a float32 number loses bits."""
    kind = x.device.type
    whole = x.dtype != torch.float32 or not torch.is_autocast_enabled(kind)
    return x if whole else x.to(torch.get_autocast_dtype(kind))


def _switches() -> list[tuple[Any, str, Any, Any]]:
    """Where torch keeps what a GPU may do: the place, its name there, and its values for float32 and for tf32."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    if hasattr(cudnn, "conv"):  # torch 2.9 on
        return [(place, "fp32_precision", "ieee", "tf32") for place in (matmul, cudnn.conv)]
    return [(place, "allow_tf32", False, True) for place in (matmul, cudnn)]
