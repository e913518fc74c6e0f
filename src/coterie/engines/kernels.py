"""The CUDA kernels of descend.cu and turn.cu, compiled for the sizes at hand."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from coterie.core.first_layer import Head
from coterie.core.train import Descend
from coterie.engines.descent import Moved, Work

CLASSES, THREADS = 32, 512  # with more, a thread gets too few registers
TILE = 32  # rows of z that turn.cu has in shared memory at a time
SIZES = 16  # for which each is compiled at most; that takes a second or two

log = logging.getLogger("coterie")


def fits(head: Head, work: Work) -> bool:
    """Whether `descend_on_chip` can do this: a client's z and what goes with it must fit a multiprocessor."""
    return _can("descend", work.x.shape[1], head, work)


def turns(head: Head, work: Work) -> bool:
    """Whether `descend_by_turns` can do this."""
    return _can("turn", TILE, head, work)


def descend_on_chip(head: Head, by: Descend, work: Work) -> Moved:
    """What `descent.descend` does, where it `fits`."""
    c, r, n, h = work.z.shape
    assert work.kernel is not None
    weight, bias = work.rest[head.weight], work.rest[head.bias]
    moved, loss = work.z.new_empty(work.z.shape), work.z.new_empty(c, r)
    ended = {n: p.new_empty(p.shape) for n, p in ((head.weight, weight), (head.bias, bias))}
    args = [
        *(v.contiguous() for v in (work.z, work.kernel, work.y, work.shares, weight, bias)),
        work.lr, float(by.prox), by.tau, r, moved, *ended.values(), loss,
    ]  # fmt: skip
    _launch("descend", (n, h, weight.shape[2]), c * r, args, work.z.device)
    return Moved(moved, None, ended, loss)


def descend_by_turns(head: Head, by: Descend, work: Work) -> Moved:
    """What `descent.descend` does, where it `turns`: each step is a kernel and a product with XXᵀ + 1."""
    c, r, n, h = work.z.shape
    assert work.kernel is not None
    begin = [work.rest[name].contiguous() for name in (head.weight, head.bias)]
    now = [p.clone() for p in begin]
    z = work.z.contiguous().flatten(0, 1)
    total, pull, losses = torch.zeros_like(z), torch.empty_like(z), z.new_empty(2, c, r)
    given = [*(v.contiguous() for v in (work.y, work.shares)), work.lr, float(by.prox), n, r, *begin]
    kernel = work.kernel if r == 1 else work.kernel.repeat_interleave(r, 0)
    for q in range(by.tau):
        args = [z, *given, total, pull, *now, losses[min(q, 1)]]
        _launch("turn", (TILE, h, begin[0].shape[2]), c * r, args, z.device)
        if q < by.tau - 1:
            z.baddbmm_(kernel, pull)
    moved = total.mul_(-work.lr).unflatten(0, (c, r))
    return Moved(moved, None, dict(zip((head.weight, head.bias), now, strict=True)), losses[0])


def _can(name: str, rows: int, head: Head, work: Work) -> bool:
    """Whether a kernel that has so many rows of z in shared memory can do this, and can be compiled."""
    h, classes, device = work.z.shape[3], work.rest[head.weight].shape[2], work.z.device
    size, limit = _sizes(name, rows, h, classes), torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    if work.kernel is None or classes > CLASSES or size["THREADS"] > THREADS or size["bytes"] > limit:
        return False
    return _compiled(name, rows, h, classes, device) is not None


def _launch(name: str, sizes: tuple[int, int, int], blocks: int, args: list[Any], device: torch.device) -> None:
    """Run a kernel with one block for each client and start."""
    size = _sizes(name, *sizes)
    _compiled(name, *sizes, device)(
        grid=(blocks, 1, 1), block=(size["THREADS"], 1, 1), args=args, shared_mem=size["bytes"]
    )


def _sizes(name: str, n: int, h: int, classes: int) -> dict[str, int]:
    """What a kernel is to be compiled with, and the bytes of its `Shared`."""
    wide, rows, outs, threads = _up(h) + (4 if _up(h) // 4 % 2 == 0 else 0), _up(n), _up(classes), _up(h, 32)
    parts = (4 if n <= 64 else 2) if name == "descend" else min(8, max(1, threads // n))
    floats = (n + classes) * wide + n * outs * (1 + parts) + outs + n
    floats += n * (wide + rows) if name == "descend" else 0  # the sum of the gradients at z, and XXᵀ + 1
    return {"N": n, "H": h, "C": classes, "THREADS": threads, "PARTS": parts, "bytes": 4 * floats}


def _up(n: int, by: int = 4) -> int:
    """The next multiple."""
    return -(-n // by) * by


_sizes_of: Counter[str] = Counter()  # for which a kernel was compiled


@functools.cache
def _compiled(name: str, n: int, h: int, classes: int, device: torch.device) -> Any:
    """The kernel; None where it cannot be compiled, or was for so many sizes that waiting for one more does not pay."""
    _sizes_of[name] += 1
    if _sizes_of[name] > SIZES:
        return None
    size = _sizes(name, n, h, classes)
    source = "".join(f"#define {key} {value}\n" for key, value in size.items() if key != "bytes")
    source += "".join(Path(__file__).with_name(f"{part}.cu").read_text(encoding="utf-8") for part in ("head", name))
    try:
        with torch.cuda.device(device):
            kernel = torch.cuda._compile_kernel(source, name)
            kernel.set_shared_memory_config(size["bytes"])
    except (RuntimeError, OSError, AttributeError) as error:  # no NVRTC, or a torch before 2.9
        log.info("%s.cu cannot be compiled: %s", name, error)
        return None
    return kernel
