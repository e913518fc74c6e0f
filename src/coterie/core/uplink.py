"""Between a client's reply and the server's sum: the place for quantising, clipping, noise and masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.core.pytree import formed, tree_map
from coterie.core.registry import register
from coterie.core.settings import setting
from coterie.core.step import Reply

Transform = Callable[[Reply], Reply]


@dataclass(frozen=True)
class Uplink:
    """What is done to every reply before it is added up; nothing, by default.

    Methods do not know of it. Each transform is applied on the client, in order, inside the same traced function as the
    step itself, so it must be pure and traceable under `torch.func.vmap`. On a real federation it must be a registered
    dataclass, such as `Quantise`, so that nodes can build it from its name and settings.

    Example:
        >>> double = Uplink((lambda reply: reply._replace(weight=2 * reply.weight),))
        >>> int(double(Reply()).weight)
        2
    """

    transforms: tuple[Transform, ...] = ()

    def __call__(self, reply: Reply) -> Reply:
        """Put one client's reply through every transform."""
        if self.transforms:
            reply = reply._replace(update=formed(reply.update))
        for transform in self.transforms:
            reply = transform(reply)
        return reply


@register("quantise", "uplink")
@dataclass(frozen=True)
class Quantise:
    """Round every tensor of an update to 2ᵇ evenly spaced values between its least and its greatest.

    Args:
        bits: b.

    Example:
        >>> Quantise(bits=1)(Reply({"w": torch.tensor([0.0, 0.4, 1.0])})).update["w"]
        tensor([0., 0., 1.])
    """

    bits: int = setting(8, low=1, high=16)

    def __call__(self, reply: Reply) -> Reply:
        """The reply with its update rounded."""
        return reply._replace(update=tree_map(self._rounded, reply.update))

    def _rounded(self, x: Tensor) -> Tensor:
        low = x.amin()
        step = (x.amax() - low) / (2**self.bits - 1)
        return low + torch.where(step > 0, ((x - low) / step.clamp(min=torch.finfo(x.dtype).tiny)).round() * step, 0.0)
