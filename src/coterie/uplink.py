"""Between a client's reply and the server's sum: the place for clipping, quantising, noise and masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from coterie.client import Reply
from coterie.tree import formed


@dataclass(frozen=True)
class Uplink:
    """What is done to every reply before it is added up; nothing, by default.

    Algorithms do not know of it. Each transform is applied on the client, in order, inside the same traced function
    as the step itself, so it must be pure and traceable under `torch.func.vmap`.

    Example:
        >>> import torch
        >>> double = Uplink((lambda reply: reply._replace(weight=2 * reply.weight),))
        >>> int(double(Reply((), torch.ones(()), torch.tensor(0), {})).weight)
        2
    """

    transforms: tuple[Callable[[Reply], Reply], ...] = ()

    def __call__(self, reply: Reply) -> Reply:
        """Put one client's reply through every transform."""
        if self.transforms:
            reply = reply._replace(update=formed(reply.update))
        for transform in self.transforms:
            reply = transform(reply)
        return reply
