"""The parameters and messages of a secure sum, and its result on the server.

`coterie.secure.protocol` describes the order of the messages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

EXCHANGES = ("keys", "shares", "sheets", "lists", "counts", "sums")
NUMBER = 8  # bytes of a count, of its tag, or of a client's number

Payload = dict[int, bytes]  # by the client that an entry is for or about


class TooFewLeft(ConnectionError):
    """Too few clients answered, or followed the protocol, for a sum to be opened. No cluster's sum was opened."""


class Refused(ValueError):
    """A client does not go on with a session: what it was told would let the server open more than it may."""


class Terms(NamedTuple):
    """The parameters of a session, which all parties know before it begins.

    Attributes:
        invited: Number of parties that are asked to take part.
        needed: Number of parties that must answer every exchange.
        min_members: Number of clients that must have chosen a slot for its sum to be opened.
        slots: Number of sums.
        who: What messages call the parties: "clients", or "nodes" that stand for several clients each.
        about: Whatever else all parties must have been told alike, such as how numbers are rounded.
    """

    invited: int
    needed: int
    min_members: int
    slots: int
    who: str = "clients"
    about: str = ""


class Sheet(NamedTuple):
    """The numbers that a client sends, modulo 2⁶⁴, or the sum of those of several clients.

    Attributes:
        head: The part that is always opened: whether the client chose each slot (slots,), and numbers that are summed
            over all clients.
        body: What the client adds to each slot (slots, width): zeros, except for the slot that it chose.
    """

    head: np.ndarray
    body: np.ndarray

    def flat(self) -> np.ndarray:
        """Return all numbers as one array."""
        return np.concatenate([self.head, self.body.ravel()])

    @classmethod
    def of(cls, numbers: np.ndarray, head: int, slots: int) -> Sheet:
        """Make a sheet from the array that `flat` returns.

        Args:
            numbers: The array.
            head: Length of the head.
            slots: Number of rows of the body.
        """
        return cls(numbers[:head], numbers[head:].reshape(slots, -1))


class Count(NamedTuple):
    """How many clients chose a slot, with the proof of it that a server cannot make up.

    Attributes:
        members: Number of clients.
        tag: The sum of the tags of all clients, modulo 2⁶⁴ (`coterie.secure.client`).
    """

    members: int
    tag: int

    def to_bytes(self) -> bytes:
        """Return the count as a part of a message.

        Example:
            >>> Count.from_bytes(Count(3, 2**64 - 1).to_bytes())
            Count(members=3, tag=18446744073709551615)
        """
        return self.members.to_bytes(NUMBER, "little") + self.tag.to_bytes(NUMBER, "little")

    @classmethod
    def from_bytes(cls, part: bytes) -> Count:
        """Return the count that `to_bytes` has written.

        Args:
            part: The bytes.
        """
        return cls(int.from_bytes(part[:NUMBER], "little"), int.from_bytes(part[NUMBER:], "little"))


class Opened(NamedTuple):
    """What the server learns in a session.

    Attributes:
        sheet: The sums, as signed numbers; zeros for slots that are not opened.
        members: Number of clients that chose each slot (slots,).
        clients: The clients whose numbers are in the sums.
    """

    sheet: Sheet
    members: np.ndarray
    clients: list[int]


class Message(NamedTuple):
    """A message from a client to the server."""

    exchange: str
    client: int
    payload: Payload


@dataclass
class Transcript:
    """All messages that the server receives in a session, and the number of bytes in each direction."""

    messages: list[Message] = field(default_factory=list)
    bytes_down: int = 0

    @property
    def bytes_up(self) -> int:
        """Number of bytes that the clients have sent."""
        return sum(len(part) for message in self.messages for part in message.payload.values())

    def of(self, exchange: str) -> dict[int, Payload]:
        """Return the payloads of one exchange, by client.

        Args:
            exchange: Name of the exchange.
        """
        return {m.client: m.payload for m in self.messages if m.exchange == exchange}
