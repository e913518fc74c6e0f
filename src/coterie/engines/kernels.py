"""The CUDA kernel of descend.cu, compiled for the sizes at hand."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import torch

from coterie.core.first_layer import Head
from coterie.core.train import Descend
from coterie.engines.descent import Moved, Work

CLASSES, THREADS = 32, 512  # with more, a thread gets too few registers
SIZES = 16  # for which it is compiled at most; that takes a second or two each

log = logging.getLogger("coterie")


def fits(head: Head, work: Work) -> bool:
    """Whether `descend_on_chip` can do this: a client's z and what goes with it must fit a multiprocessor."""
    n, h, classes = work.x.shape[1], work.z.shape[3], work.rest[head.weight].shape[2]
    size, limit = _sizes(n, h, classes), torch.cuda.get_device_properties(work.z.device).shared_memory_per_block_optin
    if work.kernel is None or classes > CLASSES or size["THREADS"] > THREADS or size["bytes"] > limit:
        return False
    return _compiled(n, h, classes, work.z.device) is not None


def descend_on_chip(head: Head, by: Descend, work: Work) -> Moved:
    """What `descent.descend` does, where it `fits`."""
    c, r, n, h = work.z.shape
    assert work.kernel is not None
    weight, bias = work.rest[head.weight], work.rest[head.bias]
    size = _sizes(n, h, weight.shape[2])
    moved, loss = work.z.new_empty(work.z.shape), work.z.new_empty(c, r)
    ended = {n: p.new_empty(p.shape) for n, p in ((head.weight, weight), (head.bias, bias))}
    kernel = _compiled(n, h, weight.shape[2], work.z.device)
    kernel(
        grid=(c * r, 1, 1),
        block=(size["THREADS"], 1, 1),
        args=[
            *(v.contiguous() for v in (work.z, work.kernel, work.y, work.shares, weight, bias)),
            work.lr, float(by.prox), by.tau, r, moved, *ended.values(), loss,
        ],
        shared_mem=size["bytes"],
    )  # fmt: skip
    return Moved(moved, None, ended, loss)


def _sizes(n: int, h: int, classes: int) -> dict[str, int]:
    """What descend.cu is to be compiled with, and the bytes of its `Shared`."""
    parts = 4 if n <= 64 else 2
    wide, rows, outs = _up(h) + (4 if _up(h) // 4 % 2 == 0 else 0), _up(n), _up(classes)
    floats = (2 * n + classes) * wide + n * rows + n * outs * (1 + parts) + outs + n
    return {"N": n, "H": h, "C": classes, "THREADS": _up(h, 32), "PARTS": parts, "bytes": 4 * floats}


def _up(n: int, by: int = 4) -> int:
    """The next multiple."""
    return -(-n // by) * by


@functools.cache
def _compiled(n: int, h: int, classes: int, device: torch.device) -> Any:
    """The kernel; None where it cannot be compiled, or was for so many sizes that waiting for one more does not pay."""
    if _compiled.cache_info().currsize >= SIZES:
        return None
    size = _sizes(n, h, classes)
    source = "".join(f"#define {name} {value}\n" for name, value in size.items() if name != "bytes")
    source += Path(__file__).with_name("descend.cu").read_text(encoding="utf-8")
    try:
        with torch.cuda.device(device):
            kernel = torch.cuda._compile_kernel(source, "descend")
            kernel.set_shared_memory_config(size["bytes"])
    except (RuntimeError, OSError, AttributeError) as error:  # no NVRTC, or a torch before 2.9
        log.info("descend.cu cannot be compiled: %s", error)
        return None
    return kernel
