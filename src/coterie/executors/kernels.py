"""The CUDA kernel of descend.cu, compiled for the sizes at hand."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from coterie.client import Plan
from coterie.executors.descent import Moved, Work
from coterie.split import Head

CLASSES = 32  # more than so many take too many registers


def fits(head: Head, plan: Plan, work: Work) -> bool:
    """Whether `descend_on_chip` can do this: a client's z and what goes with it must fit a multiprocessor."""
    n, h, classes = work.x.shape[1], work.z.shape[3], work.rest[head.weight].shape[2]
    if work.kernel is None or plan.gradient or classes > CLASSES or not hasattr(torch.cuda, "_compile_kernel"):
        return False
    limit = torch.cuda.get_device_properties(work.z.device).shared_memory_per_block_optin
    return _sizes(n, h, classes)["bytes"] <= limit


def descend_on_chip(head: Head, plan: Plan, work: Work) -> Moved:
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
            work.lr, float(plan.prox), plan.tau, r, moved, *ended.values(), loss,
        ],
        shared_mem=size["bytes"],
    )  # fmt: skip
    return Moved(moved, None, ended, loss)


def _sizes(n: int, h: int, classes: int) -> dict[str, int]:
    """Threads and columns per thread, and the bytes of `Shared` in descend.cu."""
    cols = 2 if n <= 64 else 1
    threads = _up(_up(h, cols) // cols, 32)
    parts = 4 if n <= 64 else 2
    wide, rows, outs = _up(h) + (4 if _up(h) // 4 % 2 == 0 else 0), _up(n), _up(classes)
    floats = 2 * n * wide + classes * wide + n * rows + n * outs * (1 + parts) + outs + n
    return {"COLS": cols, "THREADS": threads, "PARTS": parts, "bytes": 4 * floats}


def _up(n: int, by: int = 4) -> int:
    """The next multiple."""
    return -(-n // by) * by


@functools.cache
def _compiled(n: int, h: int, classes: int, device: torch.device) -> Any:
    size = _sizes(n, h, classes)
    defined = {"N": n, "H": h, "C": classes, **{k: size[k] for k in ("COLS", "THREADS", "PARTS")}}
    source = "".join(f"#define {k} {v}\n" for k, v in defined.items())
    source += Path(__file__).with_name("descend.cu").read_text(encoding="utf-8")
    with torch.cuda.device(device):
        kernel = torch.cuda._compile_kernel(source, "descend")
        kernel.set_shared_memory_config(size["bytes"])
    return kernel
