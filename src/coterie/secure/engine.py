"""The engine of the secure sum: clients mask their replies, and a method gets only the sums."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from coterie.core.engine import Engine, Exchange
from coterie.core.pytree import leaves, take, tree_map
from coterie.core.step import Reply, Secrecy, derived, step_name
from coterie.core.sums import Sums
from coterie.secure import SecureSum
from coterie.secure.client import Client
from coterie.secure.masks import simulated
from coterie.secure.messages import Opened, Sheet, Terms, Transcript
from coterie.secure.protocol import Answering, Session

MOST = 256  # clients per session: masks and shares are made for every pair of clients
ROOM = 62  # bits for the largest sum, of the 63 that a signed number has
LEAST = 20  # fractional bits; with fewer, sums would not be exact enough
_PARTS = 6  # stream under the key of all clients, and under each one's

Witness = Callable[[Transcript], None]


class Secure(Engine):
    """An engine that runs the clients of another engine in sessions of the secure sum.

    The clients' steps run on the inner engine. Each client's part of the protocol (key pairs, masks) is done by its own
    `Client` object, and the server's part by a `Server`, which sees nothing but a transcript.

    Args:
        inner: The engine that runs the clients' steps.
        settings: Settings of the secure sum.
        answering: Given the name of an exchange and the clients that are asked, returns those that answer; by default
            all of them.
        witness: Called with the transcript of every session, which holds everything that the server sees.
    """

    def __init__(
        self,
        inner: Engine,
        settings: SecureSum,
        answering: Answering = lambda exchange, asked: asked,
        witness: Witness = lambda transcript: None,
    ) -> None:
        super().__init__(inner.federation, inner.task, inner.key, inner.device, inner.precision)
        self.name, self.leads, self.remote = inner.name, inner.leads, inner.remote
        self.inner, self._settings, self._answering, self._witness = inner, settings, answering, witness
        self._sessions = itertools.count()

    def in_the_open(self) -> Engine:
        """Return the inner engine, for messages that a real federation would not exchange and that need no masks."""
        return self.inner

    def combine(self, exchange: Exchange) -> Sums:
        """Run the step on every client and sum the weighted updates per slot, in one session of the secure sum."""
        session = Session(*self._parties(exchange), self._answering)
        here = session.agree()
        position = {i: at for at, i in enumerate(exchange.clients.tolist())}
        present = exchange.only(torch.tensor([position[i] for i in here], dtype=torch.long))  # dropped ones do nothing
        taking_part = present.only(self._decided(present))
        reply = self._replies(taking_part, present)
        secrecy = derived(exchange.step, self.task).secrecy
        everybody = len(exchange.clients)
        code = Code.of(self._settings.clip, everybody, reply, exchange.slots, step_name(exchange.step), secrecy)
        # Up to the session every row of `reply` belongs to its own client, and the server has none of them.
        sheets = {i: code.nothing() for i in here}
        for row, i in enumerate(taking_part.clients.tolist()):
            sheets[i] = code.sheet(take(reply, row), self.federation.name(i))
        opened = session.add(sheets)
        self._account(exchange, session.server.transcript, exchange.bytes_down() * len(here), opened)
        return tree_map(lambda x: x.to(self.device), code.sums(opened, everybody))

    def invite(self, numbers: Tensor, when: tuple[int, ...], fraction: float) -> tuple[Tensor, float]:
        """Everybody, to decide in secret; of more clients than a session can hold, one of several fixed parts of them.

        The parts are always the same: counts of parts that overlap would tell of single clients.
        """
        wanted = fraction * len(numbers)
        if not self._settings.hide_sample or wanted > MOST:
            return super().invite(numbers, when, fraction)
        parts = self.key.fold(_PARTS).shuffle(numbers).tensor_split(math.ceil(len(numbers) / MOST))
        asked = parts[self.key.fold(_PARTS, *when).seed() % len(parts)].sort().values
        return asked, min(1.0, wanted / len(asked))

    def gather(self, exchange: Exchange) -> Reply:
        """Raise a ValueError: in a secure sum the server gets nothing but sums."""
        raise ValueError(
            f"secure sum: {step_name(exchange.step)} needs every client's own reply (gather), and of a secure sum the "
            "server gets nothing but sums; choose another method or start, or leave secure out"
        )

    def least(self, exchange: Exchange) -> int:
        """Return how many clients' replies a sum holds at least."""
        wanted = self._settings
        return max(math.floor(wanted.threshold * len(exchange.clients)) + 1, wanted.min_members)

    def rounding(self, exchange: Exchange) -> float:
        """Return the unit to whose multiples replies are rounded."""
        return 2.0 ** -fractional_bits(max(1, len(exchange.clients)), self._settings.clip)

    def _parties(self, exchange: Exchange) -> tuple[dict[int, Client], Terms]:
        n, wanted, needed = len(exchange.clients), self._settings, self.least(exchange)
        if n < needed:
            raise ValueError(f"secure sum: at least {needed} clients must take part, got {n}")
        if n > MOST:
            raise ValueError(f"secure sum: at most {MOST} clients can take part at once, got {n}; set fraction lower")
        terms, when = Terms(n, needed, wanted.min_members, exchange.slots), (next(self._sessions), *exchange.when)
        clients = exchange.clients.tolist()
        return {i: Client(i, terms, simulated(self.client_key(i).fold(*when))) for i in clients}, terms

    def _decided(self, exchange: Exchange) -> Tensor:
        """Positions of the clients that take part; each decides for itself, and the same in all of a moment."""
        if exchange.share >= 1:
            return torch.arange(len(exchange.clients))
        keys = [self.client_key(i).fold(_PARTS, *exchange.when) for i in exchange.clients.tolist()]
        return torch.tensor([key.seed() < exchange.share * 2.0**56 for key in keys]).nonzero().flatten()

    def _replies(self, taking_part: Exchange, present: Exchange) -> Reply:
        """What clients reply in the open, uncharged: the session's messages are what is charged.

        Where nobody takes part, the form of the reply is that of somebody who is there and keeps nothing of it.
        """
        quiet = replace(present.ledger, bytes_down=0, bytes_up=0)
        if len(taking_part.clients):
            return self.inner.gather(taking_part._replace(ledger=quiet))
        quiet.memory = dict(quiet.memory)
        one = self.inner.gather(present.only(torch.tensor([0]))._replace(ledger=quiet))
        return tree_map(lambda x: x[:0], one)

    def _account(self, exchange: Exchange, transcript: Transcript, down: int, opened: Opened) -> None:
        """Count bytes, and log clients that dropped out and slots that were not opened."""
        ledger, everybody = exchange.ledger, len(exchange.clients)
        ledger.charge(down + transcript.bytes_down, transcript.bytes_up)
        self._witness(transcript)
        if gone := everybody - len(opened.clients):
            ledger.messages.append(
                f"secure sum: {gone} of {everybody} clients were gone; the sums are those of the others"
            )
        least = self._settings.min_members
        if small := [j for j, n in enumerate(opened.members.tolist()) if 0 < n < least]:
            which = ", ".join(map(str, small))
            ledger.messages.append(f"secure sum: fewer than {least} clients chose slot {which}: not opened")


class Code(NamedTuple):
    """The encoding of replies as integers modulo 2⁶⁴, and the decoding of their sums."""

    clip: float
    bits: int  # fractional bits
    slots: int
    update: Any  # the form of what is summed in one slot: tensors with a shape but no numbers
    note: dict[str, Tensor]  # the form of one client's notes
    secrecy: Mapping[str, Secrecy]  # what the server gets in place of each note

    @classmethod
    def of(cls, clip: float, clients: int, reply: Reply, slots: int, name: str, secrecy: Mapping[str, Secrecy]) -> Code:
        """Return the code for replies of a given form.

        Args:
            clip: The largest absolute value that a client may send.
            clients: Number of clients whose replies are summed.
            reply: Replies, of which only the shapes and types are used; there may be none.
            slots: Number of sums.
            name: Name of the client step, for messages.
            secrecy: What the server gets in place of each note: its mean over all clients, or nothing.

        Raises:
            ValueError: The step has a note that would have to be sent as it is, or `clip` is too large.
        """
        for note in reply.note:
            if note not in secrecy:
                raise ValueError(
                    f"secure sum: {name} tells the server every client's '{note}', and of a secure sum it gets nothing "
                    "but sums; choose another method, or leave secure out"
                )
        bits = fractional_bits(clients, clip)
        if bits < LEAST:
            raise ValueError(f"secure sum: clip = {clip:g} leaves {clients} clients too few bits; lower it")
        update = tree_map(lambda x: x.new_empty(x.shape[reply.slot.dim() :], device="meta"), reply.update)
        note = tree_map(lambda x: x.new_empty(x.shape[1:], device="meta"), reply.note)
        return cls(clip, bits, slots, update, note, secrecy)

    @property
    def head(self) -> int:
        """The length of the head of a sheet: whether the client chose each slot, whether it takes part, and notes."""
        return self.slots + 1 + sum(self.note[n].numel() for n in self._averaged())

    @property
    def width(self) -> int:
        """The length of each row of the body of a sheet: the numbers of an update, and the weight."""
        return sum(x.numel() for x in leaves(self.update)) + 1

    def sheet(self, reply: Reply, who: str) -> Sheet:
        """Encode one client's reply; this happens on the client.

        Args:
            reply: The reply.
            who: Name of the client, for messages.
        """
        slot, weight = reply.slot.reshape(-1).cpu(), reply.weight.reshape(-1).cpu()
        parts = [x.reshape(len(slot), -1).cpu().double() for x in leaves(reply.update)]
        numbers = torch.cat([*parts, torch.ones(len(slot), 1)], 1) * weight[:, None]  # the last one is the weight
        numbers[weight == 0] = 0  # also if it is NaN
        body = np.zeros((self.slots, numbers.shape[1]), np.uint64)
        np.add.at(body, slot.numpy(), self._encode(numbers, who))
        chosen = torch.zeros(self.slots, dtype=torch.long).index_put_((slot[weight > 0],), torch.tensor(1))
        noted = torch.cat([torch.zeros(0), *(reply.note[n].flatten().cpu() for n in self._averaged())])
        told = torch.cat([chosen, torch.ones(1).long()]).numpy().view(np.uint64)
        return Sheet(np.concatenate([told, self._encode(noted, who)]), body)

    def nothing(self) -> Sheet:
        """The sheet of a client that does not take part."""
        return Sheet(np.zeros(self.head, np.uint64), np.zeros((self.slots, self.width), np.uint64))

    def require_room(self, opened: Opened) -> None:
        """Check that no number is larger than any sum can be: it would be a mask that was removed with wrong shares.

        Args:
            opened: The opened sums.

        Raises:
            ValueError: There is such a number.
        """
        if (np.abs(opened.sheet.body.astype(float)) > 2.0**ROOM).any():
            raise ValueError("secure sum: the sums make no sense, so somebody has not kept to the protocol")

    def sums(self, opened: Opened, participants: int) -> Sums:
        """Decode the opened sums for the method; this happens on the server.

        Args:
            opened: The opened sums.
            participants: Number of clients that were invited, for each of which there is a row of notes.
        """
        body, head = (self._decode(x) for x in (opened.sheet.body, opened.sheet.head[self.slots + 1 :]))
        taking_part = max(int(opened.sheet.head[self.slots]), 1)
        rest = iter(body[:, :-1].split([x.numel() for x in leaves(self.update)], 1))
        update = tree_map(lambda x: next(rest).reshape(self.slots, *x.shape).to(x.dtype), self.update)
        means = iter((head / taking_part).split([self.note[n].numel() for n in self._averaged()]))
        everybody = {n: next(means).reshape(self.note[n].shape).float() for n in self._averaged()}
        everybody |= {n: torch.full(x.shape, -1) for n, x in self.note.items() if self.secrecy[n] == "hidden"}
        note = {n: everybody[n].expand(participants, *x.shape) for n, x in self.note.items()}
        return Sums(update, body[:, -1].float(), note, torch.from_numpy(opened.members))

    def _averaged(self) -> list[str]:
        return [n for n in self.note if self.secrecy[n] == "mean"]

    def _encode(self, numbers: Tensor, who: str) -> np.ndarray:
        if not bool(torch.isfinite(numbers).all()):
            raise ValueError(f"secure sum: what {who} would send is not finite; a smaller lr usually helps")
        if numbers.numel() and (largest := float(numbers.abs().max())) > self.clip:
            raise ValueError(f"secure sum: what {who} would send reaches {largest:.4g}, above clip = {self.clip:g}")
        return (numbers.double() * 2.0**self.bits).round().long().numpy().view(np.uint64)

    def _decode(self, numbers: np.ndarray) -> Tensor:
        return torch.from_numpy(numbers).double() / 2.0**self.bits


def fractional_bits(clients: int, clip: float) -> int:
    """Return how many fractional bits there is room for, in a sum over clients of numbers up to `clip`."""
    return math.floor(ROOM - math.log2(clients * clip))
