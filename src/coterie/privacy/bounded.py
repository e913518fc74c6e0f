"""What clients do to their replies in a private run: each is bounded and, in a secure sum, noised by its client.

A client's contribution is its weighted update in its slots, its weights, and a bit that says whether the update was
within the bound. Its length, each part divided by its own bound, is what differential privacy calls sensitivity:
whether a client takes part, and which slot it chooses, changes the concatenation of all slots by no more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.core.key import Key
from coterie.core.local import shortened
from coterie.core.pytree import formed, stack, take, tree_map
from coterie.core.registry import register
from coterie.core.step import ClientStep, Local, Reply, Step, client_step, client_steps
from coterie.core.sums import weighted_sums
from coterie.core.task import Task
from coterie.core.train import Descend, Train
from coterie.privacy.discrete import FINE, Source, discrete_gaussian

_NOISE = 5  # stream under a client's key
LIGHT = 1e-6  # a weight that counts for nothing: its inverse would not be finite


@register("bounded", "service")
@dataclass(frozen=True)
class Bounded:
    """A client step whose replies are bounded.

    A model that was trained becomes the change from the one that was sent: the server knows the latter. All clients
    count the same, and a reply in several parts, such as that of soft labels, for no more than 1 in all.

    Args:
        owner: Whose step it is.
        name: Its name.
        clip: The length of a client's update at most.
        noise: The standard deviations of what every client adds, in a secure sum, to its update and to its weight, and
            to its bit where it tells one; none where the server adds the noise.
        slots: How many sums there are.
        seeded: Whether the noise follows from the client's key, as in a simulation: on a real federation the server
            knows that key.
    """

    owner: object
    name: str
    clip: float
    noise: tuple[float, ...] = ()
    slots: int = 1
    seeded: bool = True

    @property
    def inner(self) -> Step:
        """The step itself.

        Raises:
            ValueError: Its owner has no such step.
        """
        if self.name not in client_steps(type(self.owner)):
            raise ValueError(f"{type(self.owner).__name__} has no client step {self.name!r}")
        return getattr(self.owner, self.name)

    @client_step
    def step(self, task: Task) -> ClientStep | Train:
        """The bounded step; one that is described stays so, and as fast."""
        found = self.inner(task)
        if isinstance(found, Train):
            found = replace(found, send="change" if trains(found) else found.send, bound=self.clip, weights="uniform")
            if not self.noise:
                return found
        plain = found if isinstance(found, ClientStep) else found.derive(task)
        bounded = plain if isinstance(found, Train) else _bounded(plain, self.clip)
        hidden = dict.fromkeys(bounded.secrecy, "hidden")
        return bounded._replace(finish=self._noised, secrecy=hidden) if self.noise else bounded

    def _noised(self, reply: Reply, keys: Sequence[Key]) -> Reply:
        """Every client's contribution to all slots, so that nobody can tell to which it has one, with its noise."""
        whole = stack([_spread(take(reply, i), self.slots) for i in range(len(keys))])
        deviations = dict(zip(("update", "weight", "within"), self.noise, strict=False))
        sources = [Source.of(key.fold(_NOISE)) if self.seeded else Source.system() for key in keys]

        def noised(x: Tensor, deviation: float) -> Tensor:
            unit, steps = grid(deviation)
            noise = np.stack([discrete_gaussian(steps, x[0].numel(), source) for source in sources])
            # Towards 0, so that no contribution becomes longer. In units of the grid, all of it is exact.
            on_grid = (x.double() / unit).trunc() + torch.from_numpy(noise).reshape(x.shape).to(x.device)
            return (on_grid * unit).to(x.dtype)

        update = {name: tree_map(lambda x, d=d: noised(x, d), whole[name]) for name, d in deviations.items()}
        every = torch.arange(self.slots).expand(len(keys), -1)
        return Reply(update, torch.ones(every.shape), every, reply.note)


def grid(deviation: float) -> tuple[float, int]:
    """The unit of a grid, a power of two, and a whole number of units that is at least the standard deviation.

    Example:
        >>> unit, steps = grid(0.3)
        >>> 0.3 <= unit * steps < 0.3003, FINE <= steps <= 2 * FINE
        (True, True)
    """
    unit = 2.0 ** math.floor(math.log2(deviation)) / FINE
    return unit, math.ceil(deviation / unit)


def trains(step: Any) -> bool:
    """Whether a step replies with a model that it was sent and has trained."""
    return isinstance(step, Train) and step.send == "model" and isinstance(step.by, Descend)


def _bounded(step: ClientStep, clip: float) -> ClientStep:
    """A free-form step whose weights are no longer than 1, and its weighted update no longer than `clip`."""

    def run(message: Any, local: Local) -> Reply:
        reply = step.run(message, local)
        weight = reply.weight / torch.linalg.vector_norm(reply.weight).clamp(min=1)
        weight = torch.where(torch.isfinite(weight) & (weight > LIGHT), weight, 0.0)
        update = tree_map(lambda x: _times(weight, x), formed(reply.update))
        update, within = shortened(update, clip)
        # What is added up is weight · update.
        update = tree_map(lambda x: _times(torch.where(weight > 0, 1 / weight, 0.0), x), update)
        return reply._replace(update=update, weight=weight, note={**reply.note, "within": within})

    return step._replace(run=run, secrecy={**step.secrecy, "within": "mean"})


def _times(weight: Tensor, x: Tensor) -> Tensor:
    """A factor for each part of a reply, times that part; 0 where it is 0."""
    factor = weight.to(x).reshape(weight.shape + (1,) * (x.dim() - weight.dim()))
    return torch.where(factor != 0, factor * x, 0.0)


def _spread(reply: Reply, slots: int) -> dict[str, Any]:
    """One client's contribution: its sums by slot (slots, …), weights (slots,), and its bit (slots,), in the first."""
    rows = reply.update if reply.slot.dim() else tree_map(lambda x: x[None], reply.update)
    update, weight = weighted_sums(reply.slot, reply.weight, slots, rows)
    bit = reply.note["within"].reshape(-1)[:1] - 0.5
    return {"update": update, "weight": weight, "within": torch.cat([bit, bit.new_zeros(slots - 1)])}
