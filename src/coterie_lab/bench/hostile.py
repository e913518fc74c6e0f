"""Hostile clients in a simulation: what they send in place of what they should.

They know all that the server knows, and what honest clients reply.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from coterie.core.engine import Engine, Exchange
from coterie.core.federation import Federation
from coterie.core.key import Key
from coterie.core.pytree import flat, tree_map, unflat
from coterie.core.step import Reply
from coterie.core.sums import Sums, slot_sum
from coterie.core.train import Train
from coterie.parts.starts import Start
from coterie.robust.engine import models_sent

TIMES = 10.0  # by which a reversed change is lengthened
LOUD = 1e6  # a loss that nobody has
DEVIATIONS = 1.5  # from the honest mean, at which a change is still like the others
_WHO, _NOISE = 11, 12  # streams under a key


class Scene(NamedTuple):
    """What hostile clients see before they reply.

    Attributes:
        exchange: What clients are asked.
        step: The step where it trains models, else None.
        reply: What everybody would reply.
        hostile: Whose replies are hostile's (c,).
        key: For random numbers.
    """

    exchange: Exchange
    step: Train | None
    reply: Reply
    hostile: Tensor
    key: Key

    @property
    def starting(self) -> bool:
        """Whether a start asks, before the first round."""
        return isinstance(getattr(self.exchange.step, "__self__", None), Start)

    def by_hostile(self, new: Tensor, old: Tensor) -> Tensor:
        """The new rows for hostile clients (c, …), the old ones for others."""
        return torch.where(self.hostile.reshape(-1, *[1] * (old.dim() - 1)), new.to(old), old)

    def changed(self, change: Callable[[Tensor], Tensor]) -> Reply:
        """The replies with other changes (c, …, d) of hostile clients."""
        if self.step is None:
            return self.reply
        axes, like = self.reply.slot.dim(), self.reply.update
        sent = flat(models_sent(self.exchange, self.step, self.reply), axes)
        honest = flat(like, axes) - sent
        vectors = sent + self.by_hostile(change(honest), honest)
        return self.reply._replace(update=unflat(vectors, tree_map(lambda x: x[(0,) * axes], like)))

    def noise(self, like: Tensor) -> Tensor:
        """Standard normal numbers."""
        return torch.randn(like.shape, generator=self.key.fold(_NOISE, *self.exchange.when).generator()).to(like)

    def honest_moments(self, changes: Tensor) -> tuple[Tensor, Tensor]:
        """The mean and the deviation of honest clients' changes in the slot of each reply (c, …, d)."""
        slot, rows = self.reply.slot.flatten(), changes.flatten(0, -2)
        hostile = self.hostile.reshape(-1, *[1] * (self.reply.slot.dim() - 1)).expand(self.reply.slot.shape).flatten()
        mean, deviation = torch.zeros_like(rows), torch.zeros_like(rows)
        for j in slot.unique():
            own = rows[(slot == j) & ~hostile]
            if len(own) > 1:
                mean[slot == j], deviation[slot == j] = own.mean(0), own.std(0)
        return mean.reshape(changes.shape), deviation.reshape(changes.shape)


Attack = Callable[[Scene], Reply]


def honest(scene: Scene) -> Reply:
    """No attack on replies."""
    return scene.reply


def sign(scene: Scene) -> Reply:
    """The opposite of the change, ten times as long."""
    return scene.changed(lambda change: -TIMES * change)


def noise(scene: Scene) -> Reply:
    """A change of standard normal noise."""
    return scene.changed(scene.noise)


def cluster(scene: Scene) -> Reply:
    """A well-trained model for the next cluster in place of the own."""
    if scene.step is None or scene.step.k == 1:
        return scene.reply
    k, slot = scene.step.k, scene.reply.slot
    return scene.reply._replace(slot=scene.by_hostile(slot // k * k + (slot + 1) % k, slot))


def start(scene: Scene) -> Reply:
    """In the exchanges of a start: opposite changes that are like nobody's, and the loudest complaints."""
    if not scene.starting:
        return scene.reply
    reply = scene.changed(lambda change: -TIMES * change * scene.noise(change).exp())
    return reply._replace(note={n: scene.by_hostile(_complaint(x), x) for n, x in reply.note.items()})


def _complaint(note: Tensor) -> Tensor:
    """A loss beyond all measure; of several models, the worse one is praised."""
    if not note.is_floating_point():
        return note
    return torch.full_like(note, LOUD) if note.dim() == 1 else -LOUD * note


def little(scene: Scene) -> Reply:
    """The honest mean less some deviations, so that it is like the others: a little is enough (Baruch et al. 2019)."""

    def change(changes: Tensor) -> Tensor:
        mean, deviation = scene.honest_moments(changes)
        return mean - DEVIATIONS * deviation

    return scene.changed(change)


ATTACKS: dict[str, Attack] = {
    "none": honest,
    "sign × 10": sign,
    "noise": noise,
    "flipped labels": honest,
    "wrong cluster": cluster,
    "hostile start": start,
    "a little": little,
}


def hostile_clients(federation: Federation, share: float, key: Key) -> Tensor:
    """Who is hostile (m,): a random share of the clients."""
    hostile = torch.zeros(len(federation), dtype=torch.bool)
    hostile[key.fold(_WHO).shuffle(federation.numbers)[: round(share * len(federation))]] = True
    return hostile


def flipped(federation: Federation, hostile: Tensor) -> Federation:
    """The federation in which hostile clients count labels from the other end."""
    train = federation.train
    rows = hostile.repeat_interleave(train.sizes)
    return replace(federation, train=train._replace(y=torch.where(rows, train.y.max() - train.y, train.y)))


class Hostile(Engine):
    """An engine among whose clients some are hostile.

    Args:
        inner: The engine that runs all clients' steps.
        hostile: Who (m,).
        attack: What these reply.
    """

    def __init__(self, inner: Engine, hostile: Tensor, attack: Attack) -> None:
        super().__init__(inner.federation, inner.task, inner.key, inner.device, inner.precision)
        self.name, self._inner, self._hostile, self._attack = inner.name, inner, hostile, attack

    def in_the_open(self) -> Engine:
        """The inner engine: scores are not under attack."""
        return self._inner

    def combine(self, exchange: Exchange) -> Sums:
        """Add up what clients reply, hostile ones among them."""
        return slot_sum(self.gather(exchange), exchange.slots)

    def gather(self, exchange: Exchange) -> Reply:
        """What clients reply, hostile ones among them."""
        step = exchange.step(self.task)
        trained = step if isinstance(step, Train) else None
        reply = self._inner.gather(exchange)
        return self._attack(Scene(exchange, trained, reply, self._hostile[exchange.clients], self.key))
