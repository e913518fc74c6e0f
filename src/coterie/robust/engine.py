"""Engines around another one that take a robust mean of clients' models in place of a sum."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from coterie.core.engine import Engine, Exchange
from coterie.core.pytree import Params, flat, take, tree_map, unflat
from coterie.core.step import Reply, step_name
from coterie.core.sums import Sums
from coterie.core.train import Gradient, Train
from coterie.robust.rules import Aggregate, Buckets, Rule, lengths

LONG = 2.0  # times the median length of all clients' changes, to which longer ones are shortened
FAR = 3.0  # times the median distance to the median of what clients note, to which others are drawn
JUDGED = ("loss", "held", "held_rows")  # notes of a `Train` step by which restarts are compared
_BUCKETS = 3  # stream under the key of all clients


def robust_engine(inner: Engine, aggregate: Aggregate) -> Engine:
    """The engine that takes a robust mean of the replies of another one's clients."""
    return Bucketed(inner, aggregate) if isinstance(aggregate, Buckets) else Robust(inner, aggregate)


class _Around(Engine):
    """What both engines share: they stand for the one inside, and what is gathered has no outliers."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner.federation, inner.task, inner.key, inner.device, inner.precision)
        self.name, self.leads, self.remote, self.sums_only = inner.name, inner.leads, inner.remote, inner.sums_only
        self.inner = inner

    def in_the_open(self) -> Engine:
        """The inner engine's: a score is no model, and nobody takes a mean of it."""
        return self.inner.in_the_open()

    def invite(self, numbers: Tensor, when: tuple[int, ...], fraction: float) -> tuple[Tensor, float]:
        """Whom the inner engine asks."""
        return self.inner.invite(numbers, when, fraction)

    def gather(self, exchange: Exchange) -> Reply:
        """Run the step on every client and return every reply: no change is long, and no voice louder than others."""
        step, reply = exchange.step(self.task), self.inner.gather(exchange)
        if not isinstance(step, Train):
            return reply._replace(note={n: evened(x) for n, x in reply.note.items()})
        sent, changes, like = _changes(exchange, step, reply)
        return reply._replace(update=_tree(sent + changes, like), note=_usual_notes(reply))

    def _trained(self, exchange: Exchange) -> Train:
        """The step, if clients reply with a model; a median of statistics such as XᵀX is one of nobody's."""
        step = exchange.step(self.task)
        if not isinstance(step, Train):
            raise ValueError(
                f"aggregate: {step_name(exchange.step)} has clients send parts of a sum rather than models, of "
                "which there is no robust mean; choose IFCA, FedAvg, or FedX(refine='fedavg'), or leave aggregate out"
            )
        return step


class Robust(_Around):
    """An engine that gathers the replies of another one's clients, and combines those of each slot by a rule.

    Only changes count, from the model that was sent. Those that are longer than twice the median length over all
    clients, whatever their slots, are shortened to that: for a start, too, which gathers trained models.

    Args:
        inner: The engine that runs the clients' steps.
        rule: Makes one change of those of a slot.
    """

    def __init__(self, inner: Engine, rule: Rule) -> None:
        super().__init__(inner)
        self._rule = rule

    def combine(self, exchange: Exchange) -> Sums:
        """Run the step on every client; each slot has the robust mean of its replies, times their weight.

        The weight of a slot is the number of its clients times the median of their weights.
        """
        step, reply = self._trained(exchange), self.inner.gather(exchange)
        sent, changes, like = _changes(exchange, step, reply)
        axes = reply.slot.dim() - 1
        slot, weight = slots_of(exchange, step, reply).flatten(), reply.weight.flatten().to(changes)
        sent, changes = (x.flatten(0, axes) for x in (sent, changes))
        update, total = changes.new_zeros(exchange.slots, changes.shape[-1]), changes.new_zeros(exchange.slots)
        for j in slot[weight > 0].unique().tolist():
            at = ((slot == j) & (weight > 0)).nonzero().flatten()
            total[j] = len(at) * weight[at].median()
            update[j] = (sent[at[0]] + self._rule(changes[at])) * total[j]
        return Sums(_tree(update, like), total, _usual_notes(reply))


class Bucketed(_Around):
    """An engine that has another one combine the replies of random buckets of clients, and takes a median of the means.

    On a real federation a bucket is one of nodes, each with all of its clients.

    Args:
        inner: The engine that combines, perhaps by a secure sum.
        rule: How many buckets there are.
    """

    def __init__(self, inner: Engine, rule: Buckets) -> None:
        super().__init__(inner)
        self._rule = rule

    def combine(self, exchange: Exchange) -> Sums:
        """Run the step on every client, bucket by bucket; each slot has the median of the buckets' means."""
        self._trained(exchange)
        buckets = self._buckets(exchange)
        each = [self.inner.combine(exchange.only(at)) for at in buckets]
        weight = torch.stack([sums.weight for sums in each])  # (buckets, slots)
        added = torch.stack([flat(sums.update) for sums in each])  # (buckets, slots, d)
        update, total = torch.zeros_like(added[0]), torch.zeros_like(weight[0])
        for j in (weight > 0).any(0).nonzero().flatten().tolist():
            at = weight[:, j] > 0
            total[j] = at.sum() * weight[at, j].median()
            update[j] = self._rule.median(added[at, j] / weight[at, j, None]) * total[j]
        like = tree_map(lambda x: x[0], each[0].update)
        order = torch.cat(buckets).argsort()
        note = tree_map(lambda *xs: torch.cat(xs)[order.to(xs[0].device)], *(sums.note for sums in each))
        counts = [sums.members for sums in each if sums.members is not None]
        return Sums(_tree(update, like), total, note, torch.stack(counts).sum(0) if counts else None)

    def _buckets(self, exchange: Exchange) -> list[Tensor]:
        """The positions of each bucket's clients in the exchange, which follow from the key and the moment."""
        party = getattr(self.inner, "inner", self.inner).parties(exchange.clients)
        parties, number = party.unique(return_inverse=True)
        first = torch.stack([self.federation.numbers[exchange.clients[party == p][0]] for p in parties])
        order = self.key.fold(_BUCKETS, *exchange.when).shuffle(first)
        bucket = torch.empty(len(parties), dtype=torch.long)
        bucket[order] = torch.arange(len(parties)) % self._rule.count
        found = [(bucket[number] == b).nonzero().flatten() for b in range(self._rule.count)]
        return [at for at in found if len(at)]


def usual(note: Tensor) -> Tensor:
    """What clients note, with values far from the median drawn nearer, so that nobody's voice is louder than others'.

    Example:
        >>> usual(torch.tensor([1.0, 2.0, 3.0, 4.0, torch.nan, 1e6, -1e6])).tolist()
        [1.0, 2.0, 3.0, 4.0, 9.0, 9.0, -3.0]
    """
    values = note.double().nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    middle = values.median()
    reach = FAR * (values - middle).abs().median()
    if not bool(middle.isfinite() & reach.isfinite()):  # training diverges, and whoever asked is to know
        return note
    return values.clamp(middle - reach, middle + reach).to(note.dtype)


def _usual_notes(reply: Reply) -> dict[str, Tensor]:
    return {n: usual(x) if n in JUDGED else x for n, x in reply.note.items()}


def evened(note: Tensor) -> Tensor:
    """What clients note of several models each (clients, models), at a usual level and no further apart than usual.

    The order of models is as each client says, but its voice in a sum over clients is no louder than the median one's.

    Example:
        >>> evened(torch.tensor([[0.0, 1.0], [1.0, 0.0], [-1e6, 1e6]])).tolist()
        [[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]
    """
    if note.dim() != 2 or not note.is_floating_point():
        return note
    level = note.amin(1, keepdim=True)
    apart = note - level
    widest = apart.amax(1, keepdim=True)
    most = widest.nan_to_num(nan=torch.inf, posinf=torch.inf).median()
    if not bool(most.isfinite()):  # training diverges, and whoever asked is to know
        return note
    return usual(level) + torch.where(widest > most, apart * (most / widest), apart)


def bounded(changes: Tensor) -> Tensor:
    """Changes (clients, …, d), of which those longer than twice the median are shortened to that.

    A change that is not finite is none, unless most are: then training diverges, and whoever asked is to know.

    Example:
        >>> bounded(torch.tensor([[1.0], [-1.0], [1.0], [9.0], [torch.inf]])).flatten().tolist()
        [1.0, -1.0, 1.0, 2.0, 0.0]
    """
    length = lengths(changes).nan_to_num(nan=torch.inf, posinf=torch.inf)
    most = LONG * length.median(0).values
    shortened = changes * (most / length.clamp(min=torch.finfo(length.dtype).tiny)).clamp(max=1)[..., None]
    finite = torch.where(length[..., None].isfinite(), shortened, 0.0)
    return torch.where(most[..., None].isfinite(), finite, changes)


class _Changes(NamedTuple):
    """What clients were sent and by how much they changed it (clients, …, d); and the form of a model."""

    sent: Tensor
    changes: Tensor
    like: Params


def _changes(exchange: Exchange, step: Train, reply: Reply) -> _Changes:
    """The changes that clients reply with, none of them long."""
    axes = reply.slot.dim()
    like = tree_map(lambda x: x[(0,) * axes], reply.update)
    sent = flat(models_sent(exchange, step, reply), axes)
    return _Changes(sent, bounded(flat(reply.update, axes) - sent), like)


def models_sent(exchange: Exchange, step: Train, reply: Reply) -> Params:
    """The model from which each reply counts as a change: that of the slot which it names.

    Where clients reply with a change or a gradient, it is zero.

    Args:
        exchange: What clients were asked.
        step: The step.
        reply: Their replies (clients, …).
    """
    if step.send == "change" or isinstance(step.by, Gradient):
        return tree_map(torch.zeros_like, reply.update)
    message = exchange.message
    theta, index = message.theta, exchange.rows
    if step.choose:
        if step.starts is not None:
            theta = tree_map(lambda x: x.flatten(0, 1), theta)
        theta = {**theta, **tree_map(lambda x: _each(x, step), message.common)}
        index = reply.slot
    if not isinstance(index, Tensor):
        return {n: theta[n].to(x).expand_as(x) for n, x in reply.update.items()}
    return {n: take(theta[n], index).to(x) for n, x in reply.update.items()}


def slots_of(exchange: Exchange, step: Train, reply: Reply) -> Tensor:
    """The slot of each reply: what the client says where it chooses, else that of the model which it was sent.

    Args:
        exchange: What clients were asked.
        step: The step.
        reply: Their replies (clients, …).
    """
    label = exchange.message.label
    if step.choose or not isinstance(label, Tensor) or not isinstance(exchange.rows, Tensor):
        return reply.slot
    own = take(label, exchange.rows).to(reply.slot)
    return own if step.starts is None else own + step.k * torch.arange(step.starts, device=own.device)


def _each(common: Tensor, step: Train) -> Tensor:
    """What all clusters of a start share, once for every slot."""
    return common.expand(step.k, *common.shape) if step.starts is None else common.repeat_interleave(step.k, 0)


def _tree(vectors: Tensor, like: Params) -> Params:
    return {n: x.to(like[n].dtype) for n, x in unflat(vectors, like).items()}
