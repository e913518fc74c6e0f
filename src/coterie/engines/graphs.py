"""CUDA graphs: record a function's kernels once, then replay them without the cost of launching each from Python."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

PLAIN = 2  # calls with the same shapes before one is recorded: recording pays only for what recurs
KEPT = 8  # recordings at most; each holds memory of its own
MUCH = 5e-4  # seconds that a call must take for a recording to pay
WORTH = 0.8  # of a plain call's time, which a replay may take at most
BOUND = 0.8  # the share of a call's time that Python spends launching, from which on the GPU waits for it


class Recording(NamedTuple):
    """Kernels that read `inputs` and write `outputs` when replayed."""

    replay: Callable[[], None]
    inputs: list[Tensor]
    outputs: Any


def _sort(x: Any) -> Any:
    """What must be the same for a recording to serve."""
    if isinstance(x, Tensor):
        return x.shape, x.dtype
    return x if isinstance(x, int | float | str | None) else id(x)


class Replayed:
    """A function of trees of tensors, replayed from a recording once the same shapes have come up a few times.

    The function must be pure. One that looks at the values of tensors cannot be recorded, and one that keeps the GPU
    busy need not be: both are called each time.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._calls: dict[Any, int] = {}
        self._seconds: dict[Any, float] = {}  # of a plain call
        self._recordings: dict[Any, Recording | None] = {}

    def __call__(self, *args: Any) -> Any:
        """Call the function, from its recording if there is one."""
        flat, spec = tree_flatten(args)
        shapes = (str(spec), *(_sort(x) for x in flat))
        seen = self._calls[shapes] = self._calls.get(shapes, 0) + 1
        if shapes not in self._recordings:
            if sum(r is not None for r in self._recordings.values()) == KEPT:
                return self.function(*args)
            if seen < PLAIN:
                return self.function(*args)
            if seen == PLAIN:
                found, self._seconds[shapes], waits = self._timed(*args)
                if not waits:
                    self._recordings[shapes] = None
                return found
            self._recordings[shapes] = self._faster(self.record(flat, spec), self._seconds[shapes])
        recording = self._recordings[shapes]
        if recording is None:
            return self.function(*args)
        for own, given in zip(recording.inputs, (x for x in flat if isinstance(x, Tensor)), strict=True):
            own.copy_(given)
        recording.replay()
        # The next replay writes to the same memory.
        return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, recording.outputs)

    def _faster(self, recording: Recording | None, plain: float) -> Recording | None:
        """A recording, if its replay is clearly faster than a plain call was: of large kernels it may be slower."""
        return recording if recording and min(map(self._replayed_in, [recording] * 2)) < WORTH * plain else None

    def _replayed_in(self, recording: Recording) -> float:
        """Seconds of a replay."""
        torch.cuda.synchronize()
        begin = time.perf_counter()
        recording.replay()
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    def _timed(self, *args: Any) -> tuple[Any, float, bool]:
        """Call the function; also its seconds, and whether the GPU waits for Python more than it works."""
        torch.cuda.synchronize()
        begin = time.perf_counter()
        found = self.function(*args)
        launched = time.perf_counter() - begin
        torch.cuda.synchronize()
        total = time.perf_counter() - begin
        return found, total, total > MUCH and launched > BOUND * total

    def record(self, flat: list[Any], spec: Any) -> Recording | None:
        """Run the function once on copies of its arguments, keeping its kernels; None if it looks at values."""
        own = [x.clone() if isinstance(x, Tensor) else x for x in flat]
        args = tree_unflatten(own, spec)
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # once outside of the recording, where libraries choose their algorithms
            fit = _waits_for_nothing(self.function, args)
        torch.cuda.current_stream().wait_stream(aside)
        if not fit:
            return None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = self.function(*args)
        return Recording(graph.replay, [x for x in own if isinstance(x, Tensor)], outputs)


def _waits_for_nothing(function: Callable[..., Any], args: Any) -> bool:
    """Call the function; whether it never stopped for a value from the device. A recording must not find that out."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")  # torch calls it a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        function(*args)
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return False
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return True
