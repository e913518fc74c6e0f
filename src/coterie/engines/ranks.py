"""The processes that torchrun started, called ranks: which one this is, and how they put together what each has made.

On CPUs they talk by gloo; on GPUs tensors travel by nccl, and the few numbers that say how each is doing still by gloo.
Nothing is pickled: numbers travel as they are, everything else as rows of bytes.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # here, since once there is a group this import keeps it, and its threads, past the end
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

WAIT = timedelta(minutes=10)  # for the slowest rank; one that takes longer is given up


def world() -> int:
    """The number of ranks; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """The number of this one. Rank 0 writes the run folder and does the talking."""
    return int(os.environ.get("RANK", "0"))


def join(device: torch.device) -> torch.device:
    """Meet the other ranks, once per process, and return the device that is this rank's own.

    Raises:
        ValueError: There are not enough GPUs, or one was named for all ranks.
    """
    if world() == 1:
        return device
    if device.type == "cuda":
        device = _own_gpu(device)
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=WAIT)
        atexit.register(dist.destroy_process_group)
        logging.getLogger("coterie").disabled = rank() > 0
    return device


def _own_gpu(device: torch.device) -> torch.device:
    here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if device.index is not None:
        raise ValueError(f"sharded: every process takes a GPU of its own; say device 'cuda', not '{device}'")
    if here > gpus:
        raise ValueError(
            f"sharded: {here} processes were started on a machine with {gpus} GPU{'s' * (gpus > 1)}; start at most one "
            "per GPU, or use device 'cpu'"
        )
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


@contextmanager
def exchange() -> Iterator[None]:
    """Around everything that ranks tell each other: it happens on all of them, or ends with an error that says why not.

    Ctrl-C is held back to the end, since a rank that left half-way would keep the others waiting.

    Raises:
        ConnectionError: Another rank is gone.
    """
    with _interrupts_held():
        try:
            yield
        except RuntimeError as error:
            traceback.clear_frames(error.__traceback__)  # they too would keep the group
            reason = str(error).splitlines()[0]
            raise ConnectionError(
                f"sharded: rank {rank()} of {world()} lost touch with another, which has failed, was stopped, or took "
                f"longer than {WAIT.seconds // 60} minutes ({reason})"
            ) from error


@contextmanager
def _interrupts_held() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # it is never interrupted
        yield
        return
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if pressed:
            raise KeyboardInterrupt from None  # that another rank was stopped a moment earlier is no news then


def tell(*numbers: int) -> list[tuple[int, ...]]:
    """What every rank tells, by rank."""
    own = torch.tensor(numbers)
    gathered = [torch.empty_like(own) for _ in range(world())]
    dist.all_gather(gathered, own)
    return list(zip(*torch.stack(gathered, 1).tolist(), strict=True))


def total(tree: Any, device: torch.device) -> Any:
    """A tree of tensors summed over the ranks, the same bits on each. One collective per type of number."""
    flat, spec = tree_flatten(tree)
    for dtype in dict.fromkeys(x.dtype for x in flat):
        at = [i for i, x in enumerate(flat) if x.dtype == dtype]
        packed = torch.cat([flat[i].flatten().to(device) for i in at])
        dist.all_reduce(packed)
        for i, part in zip(at, packed.split([flat[i].numel() for i in at]), strict=True):
            flat[i] = part.view_as(flat[i]).to(flat[i].device)
    return tree_unflatten(flat, spec)


def joined(tree: Any, counts: list[int], device: torch.device) -> Any:
    """Trees stacked over clients, the first counts[r] of rank r's, put end to end. One collective.

    Args:
        tree: Stacked tensors (c, …), of any types. Beyond the first axis they have the same shapes on all ranks.
        counts: How many of its c clients each rank has to give.
        device: Where the collective runs.
    """
    flat, spec = tree_flatten(tree)
    if not flat:
        return tree
    own = torch.cat([_as_bytes(x[: counts[rank()]].to(device)) for x in flat], 1)  # (c, bytes of a client)
    padded = own.new_zeros(max(counts), own.shape[1])
    padded[: len(own)] = own
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    whole = torch.cat([part[:n] for part, n in zip(parts, counts, strict=True)])
    columns = whole.split([_as_bytes(x[:0]).shape[1] for x in flat], 1)
    return tree_unflatten([_from_bytes(b, like=x) for b, x in zip(columns, flat, strict=True)], spec)


def _as_bytes(x: Tensor) -> Tensor:
    """Stacked tensors (c, …) as rows of bytes (c, b)."""
    # a clone, for a column counts as contiguous whatever its stride
    return (x.flatten(1) if x.dim() > 1 else x[:, None]).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _from_bytes(rows: Tensor, like: Tensor) -> Tensor:
    whole = rows.clone(memory_format=torch.contiguous_format)  # cut to size, so that a number begins where it may
    return whole.view(like.dtype).reshape(len(rows), *like.shape[1:]).to(like.device)
