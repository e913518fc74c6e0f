"""How exactly matrix products are done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch

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
    """Matrix products in this precision, whatever torch was set to before; all else stays in float32."""
    before = torch.get_float32_matmul_precision()
    rough = precision != "float32" and device.type == "cuda"  # with bfloat16, for what is not cast to it
    torch.set_float32_matmul_precision("high" if rough else "highest")
    try:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
