"""CUDA graphs: record a function's kernels once, then replay them without the cost of launching each from Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

WARM_UP = 2  # runs before recording, in which libraries choose their algorithms


class Replayed:
    """A function of trees of tensors, recorded for each set of shapes it meets and replayed after that.

    The function must be pure and must not look at the values of tensors. What it returns lies in the recording's own
    memory, so it is overwritten by the next call with the same shapes.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._recorded: dict[Any, tuple[torch.cuda.CUDAGraph, list[Tensor], Any]] = {}

    def __call__(self, *args: Any) -> Any:
        """Call the function, from its recording if there is one."""
        flat, spec = tree_flatten(args)
        tensors = [x for x in flat if isinstance(x, Tensor)]
        shapes = tuple((x.shape, x.dtype) if isinstance(x, Tensor) else id(x) for x in flat)
        if (shapes, str(spec)) not in self._recorded:
            self._recorded[shapes, str(spec)] = self._record(flat, spec)
        graph, inputs, out = self._recorded[shapes, str(spec)]
        for own, given in zip(inputs, tensors, strict=True):
            own.copy_(given)
        graph.replay()
        return out

    def _record(self, flat: list[Any], spec: Any) -> tuple[torch.cuda.CUDAGraph, list[Tensor], Any]:
        own = [x.clone() if isinstance(x, Tensor) else x for x in flat]
        args = tree_unflatten(own, spec)
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP):
                self.function(*args)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = self.function(*args)
        return graph, [x for x in own if isinstance(x, Tensor)], out
