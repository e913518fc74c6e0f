"""A session of the secure sum: a client's side, the server's side, and what passes between them.

Practical Secure Aggregation for Privacy-Preserving Machine Learning
    Keith Bonawitz, Vladimir Ivanov, Ben Kreuter, Antonio Marcedone, H. Brendan McMahan, Sarvar Patel, Daniel Ramage,
    Aaron Segal, Karn Seth. CCS 2017, Figure 4.

Each client hides its numbers, modulo 2⁶⁴, under masks of two kinds: one that it has in common with each other client,
which the one adds and the other subtracts, so that they cancel in the sum; and masks of its own, whose seeds the others
hold in shares. The server gets shares of a client's own seeds if its numbers have arrived, or of its secret key, from
which its common masks follow, if they have not; never both.

Here a client has a seed for every slot. Counts are opened first, and the clients keep their shares of the seeds of a
slot that too few have chosen. So there are five exchanges, one more than in the paper:

    0  keys    up: two public keys                    down: everybody's
    1  shares  up: sealed shares for every other      down: those that are addressed to one
    2  sheets  up: the masked numbers                 down: whose have arrived
    3  counts  up: a share of each client's seed for  down: how many chose each slot
               counts, or of its secret key
    4  sums    up: shares of the seeds of the slots that enough have chosen

A party may also speak for several clients, as a node of a federation does for its own: its numbers are their sum.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
from cryptography.exceptions import InvalidTag

from coterie.secure.masks import SECRET, Entropy, Pair, mask, seal, unseal
from coterie.secure.shamir import SHARE, join, split

EXCHANGES = ("keys", "shares", "sheets", "counts", "sums")
NUMBER = 8  # bytes of a count, or of a client's number

Payload = dict[int, bytes]  # by the client that it is for or about

Answering = Callable[[str, list[int]], list[int]]  # of the clients asked in an exchange, those that answer


class TooFewLeft(ConnectionError):
    """Too few clients have kept to the protocol for a sum to be opened. No cluster's sum was opened."""


class Terms(NamedTuple):
    """What all parties to a session know beforehand.

    Attributes:
        invited: How many parties are asked.
        needed: How many must answer every exchange.
        min_members: How many clients must have chosen a slot for its sum to be opened.
        slots: How many sums there are.
        who: What the parties are, for messages: "clients", or the "nodes" that speak for several.
    """

    invited: int
    needed: int
    min_members: int
    slots: int
    who: str = "clients"


class Sheet(NamedTuple):
    """A client's numbers modulo 2⁶⁴, or a sum of several clients'.

    Attributes:
        head: What is opened always: whether it chose each slot (slots,), and whatever else concerns everybody.
        body: What it adds to each slot (slots, width): zeros, but for the one that it chose.
    """

    head: np.ndarray
    body: np.ndarray

    def flat(self) -> np.ndarray:
        """All numbers one after the other."""
        return np.concatenate([self.head, self.body.ravel()])

    @classmethod
    def of(cls, numbers: np.ndarray, head: int, slots: int) -> Sheet:
        """The sheet that has these numbers."""
        return cls(numbers[:head], numbers[head:].reshape(slots, -1))


class Opened(NamedTuple):
    """What the server learns.

    Attributes:
        sheet: The sums, as signed numbers; zeros where a slot is not opened.
        members: How many chose each slot (slots,).
        clients: Whose numbers are in the sums.
    """

    sheet: Sheet
    members: np.ndarray
    clients: list[int]


class Message(NamedTuple):
    """Something that a client has sent to the server."""

    exchange: str
    client: int
    payload: Payload


@dataclass
class Transcript:
    """Everything that reaches the server in a session, and how many bytes go either way."""

    messages: list[Message] = field(default_factory=list)
    bytes_down: int = 0

    @property
    def bytes_up(self) -> int:
        """Bytes that the clients have sent."""
        return sum(len(part) for message in self.messages for part in message.payload.values())

    def of(self, exchange: str) -> dict[int, Payload]:
        """What was sent in one exchange, by client."""
        return {m.client: m.payload for m in self.messages if m.exchange == exchange}


class Client:
    """One client in one session. Nothing of it is used again: a mask that hides two sheets hides neither.

    Args:
        me: Its number, which is no secret.
        terms: What was agreed on.
        random: Where its secrets come from.
    """

    def __init__(self, me: int, terms: Terms, random: Entropy = os.urandom) -> None:
        self.me, self._terms, self._random = me, terms, random
        self._channel, self._masking = Pair(random(SECRET)), Pair(random(SECRET))
        self._seeds = [random(SECRET) for _ in range(1 + terms.slots)]  # for the head, and for each row of the body
        self._keys: dict[int, bytes] = {}  # the other clients'
        self._held: dict[int, list[bytes]] = {}  # shares of everybody's secrets
        self._arrived: list[int] | None = None

    def to_plain(self) -> dict[str, Any]:
        """All that it must remember between two exchanges, for JSON. It is secret.

        Example:
            >>> one = Client(0, Terms(invited=2, needed=2, min_members=2, slots=3))
            >>> Client.from_plain(one.to_plain()).keys() == one.keys()
            True
        """
        drawn = [self._channel.secret, self._masking.secret, *self._seeds]
        return {
            "me": self.me,
            "terms": list(self._terms),
            "drawn": [secret.hex() for secret in drawn],
            "keys": [[i, key.hex()] for i, key in self._keys.items()],
            "held": [[i, [share.hex() for share in shares]] for i, shares in self._held.items()],
            "arrived": self._arrived,
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Client:
        """The client that `to_plain` described. What is drawn from now on comes from the system."""
        drawn = iter(bytes.fromhex(secret) for secret in plain["drawn"])
        client = cls(plain["me"], Terms(*plain["terms"]), lambda length: next(drawn))
        client._random = os.urandom
        client._keys = {i: bytes.fromhex(key) for i, key in plain["keys"]}
        client._held = {i: [bytes.fromhex(share) for share in shares] for i, shares in plain["held"]}
        client._arrived = plain["arrived"]
        return client

    def keys(self) -> Payload:
        """Exchange 0: the public keys for sealing shares and for masks.

        There are two, because the second one's secret may come to be opened.
        """
        return {self.me: self._channel.public + self._masking.public}

    def shares(self, keys: Mapping[int, bytes]) -> Payload:
        """Exchange 1: shares of the own secrets, sealed for each other client."""
        self._require(keys)
        self._keys = {i: key for i, key in keys.items() if i != self.me}
        secrets = [self._masking.secret, *self._seeds]
        pieces = [split(secret, list(keys), self._terms.needed, self._random) for secret in secrets]
        self._held[self.me] = [piece[self.me] for piece in pieces]
        return {i: self._seal(i, b"".join(piece[i] for piece in pieces)) for i in self._keys}

    def sheet(self, sealed: Mapping[int, bytes], sheet: Sheet) -> Payload:
        """Exchange 2: the own numbers under all masks.

        A share that cannot be opened is done without: it is the sender who has not kept to the protocol, and enough
        others may hold shares of its secrets.
        """
        self._held |= {i: _cut(text) for i in sealed if (text := self._unseal(i, sealed[i])) is not None}
        self._require(self._held)
        total = sheet.flat() + _own_masks(self._seeds, sheet)
        for i in sealed:
            _add_common_mask(total, self.me, i, self._masking, self._keys[i][SECRET:])
        return {self.me: total.astype("<u8").tobytes()}

    def counts(self, arrived: Sequence[int]) -> Payload:
        """Exchange 3: of each client a share of its seed for the head, or of its secret key; never of both."""
        self._require(arrived)
        if self._arrived is not None:
            raise ValueError(f"secure sum: client {self.me} has been asked twice whose sheets have arrived")
        self._arrived = list(arrived)
        return {i: held[1 if i in self._arrived else 0] for i, held in self._held.items()}

    def sums(self, count: Sequence[int]) -> Payload:
        """Exchange 4: shares of the seeds of those slots that enough clients have chosen."""
        wanted, arrived = _large_enough(count, self._terms), self._arrived or []
        return {i: b"".join(self._held[i][2 + j] for j in wanted) for i in arrived if i in self._held}

    def _require(self, clients: Iterable[int]) -> None:
        """A client goes no further with too few others; it need not believe the server that they are enough."""
        if (found := len(list(clients))) < self._terms.needed:
            who, needed = self._terms.who, self._terms.needed
            raise TooFewLeft(f"secure sum: {who[:-1]} {self.me} knows of {found} {who}, {needed} are needed")

    def _seal(self, to: int, text: bytes) -> bytes:
        return seal(self._channel.agree(self._keys[to][:SECRET], b"shares"), self.me, to, text)

    def _unseal(self, sender: int, text: bytes) -> bytes | None:
        try:
            return unseal(self._channel.agree(self._keys[sender][:SECRET], b"shares"), sender, self.me, text)
        except InvalidTag:
            return None


class Server:
    """The server in one session. All that it knows of clients is in its transcript.

    Args:
        terms: What was agreed on.
        speaking: For how many clients each party speaks; for itself, unless told otherwise.
        names: What parties are called in messages, where not by their number.
    """

    def __init__(
        self, terms: Terms, speaking: Mapping[int, int] | None = None, names: Mapping[int, str] | None = None
    ) -> None:
        self.terms, self.speaking, self.names = terms, speaking or {}, names or {}
        self.transcript = Transcript()

    def receive(self, exchange: str, payloads: Mapping[int, Payload]) -> None:
        """Take the answers to an exchange.

        Raises:
            TooFewLeft: They are not enough to go on.
        """
        self.transcript.messages += [Message(exchange, i, payload) for i, payload in payloads.items()]
        self.require(exchange, len(payloads))

    def require(self, exchange: str, answers: int) -> None:
        """Go no further with too few answers to an exchange."""
        if answers < self.terms.needed:
            opened = "only the head, with counts and mean losses," if exchange == EXCHANGES[-1] else "nothing"
            raise TooFewLeft(
                f"secure sum: {answers} of {self.terms.invited} {self.terms.who} answered exchange "
                f"{EXCHANGES.index(exchange)} ({exchange}), but {self.terms.needed} are needed; {opened} was opened"
            )

    def keys(self) -> dict[int, bytes]:
        """For everybody after exchange 0: all public keys."""
        keys = {i: payload[i] for i, payload in self.transcript.of("keys").items()}
        self.transcript.bytes_down += len(keys) * sum(NUMBER + len(key) for key in keys.values())
        return keys

    def shares(self, receiver: int) -> dict[int, bytes]:
        """For one client after exchange 1: what the others have addressed to it."""
        sent = self.transcript.of("shares")
        own = {i: payload[receiver] for i, payload in sent.items() if i != receiver}
        self.transcript.bytes_down += sum(NUMBER + len(text) for text in own.values())
        return own

    def arrived(self) -> list[int]:
        """For everybody after exchange 2: whose sheets have arrived."""
        arrived = list(self.transcript.of("sheets"))
        self.transcript.bytes_down += len(arrived) * len(arrived) * NUMBER
        return arrived

    def counts(self, head: int) -> tuple[Sheet, list[int]]:
        """For everybody after exchange 3: how many chose each slot; and the sum, of which only the head is open.

        Raises:
            ValueError: Somebody has not kept to the protocol.
        """
        sheets, answers = self.transcript.of("sheets"), self.transcript.of("counts")
        total: np.ndarray = reduce(np.add, (np.frombuffer(payload[i], dtype="<u8") for i, payload in sheets.items()))
        for i in self.transcript.of("shares"):
            secret = self._joined(answers, i)
            if i in sheets:
                total[:head] -= mask(secret, head)
            else:
                self._cancel(total, i, Pair(secret))
        count = total[: self.terms.slots].astype(np.int64).tolist()
        most = sum(self.speaking.get(i, 1) for i in sheets)
        if any(not 0 <= n <= most for n in count):
            raise ValueError("secure sum: the counts make no sense, so somebody has not kept to the protocol")
        self.transcript.bytes_down += len(answers) * self.terms.slots * NUMBER
        return Sheet.of(total, head, self.terms.slots), count

    def sums(self, sheet: Sheet, count: Sequence[int]) -> Opened:
        """After exchange 4: the sums of slots that enough clients have chosen.

        Raises:
            ValueError: Somebody has not kept to the protocol.
        """
        wanted, arrived = _large_enough(count, self.terms), list(self.transcript.of("sheets"))
        body = np.zeros_like(sheet.body)
        body[wanted] = sheet.body[wanted]
        answers = self.transcript.of("sums")
        for at, j in enumerate(wanted):
            for i in arrived:
                body[j] -= mask(self._joined(answers, i, at), body.shape[1])
        return Opened(Sheet(sheet.head.view(np.int64), body.view(np.int64)), np.array(count), arrived)

    def _cancel(self, total: np.ndarray, gone: int, pair: Pair) -> None:
        """Add the masks that a client who is gone would have added, so that they cancel with the others'."""
        keys = self.transcript.of("keys")
        for i in self.transcript.of("sheets"):
            _add_common_mask(total, gone, i, pair, keys[i][i][SECRET:])

    def _joined(self, answers: Mapping[int, Payload], client: int, at: int = 0) -> bytes:
        """A secret of a client, from the first shares of it that suffice."""
        holders = [i for i, payload in answers.items() if client in payload][: self.terms.needed]
        name = self.names.get(client, f"{self.terms.who[:-1]} {client}")
        if len(holders) < self.terms.needed:
            raise ValueError(
                f"secure sum: too few {self.terms.who} could open their shares of the secrets of {name}: "
                f"{len(holders)}, and {self.terms.needed} are needed"
            )
        try:
            return join({i: _cut(answers[i][client])[at] for i in holders})
        except ValueError:
            raise ValueError(
                f"secure sum: the shares of a secret of {name} do not fit together, so it or one of those that hold "
                "them has not kept to the protocol"
            ) from None


class Session:
    """All parties to one session, with the server's messages between them.

    Args:
        clients: Those that are invited, by number.
        terms: What was agreed on.
        answering: Who answers an exchange: everybody, unless told otherwise.

    Example:
        >>> terms = Terms(invited=4, needed=3, min_members=2, slots=2)
        >>> session = Session({i: Client(i, terms) for i in range(4)}, terms)
        >>> def sheet(i):
        ...     return Sheet(np.eye(2, dtype=np.uint64)[i % 2], np.eye(2, dtype=np.uint64)[i % 2][:, None] * (10 + i))
        >>> opened = session.add({i: sheet(i) for i in session.agree()})
        >>> opened.members.tolist(), opened.sheet.body.tolist()      # 10 + 12 and 11 + 13
        ([2, 2], [[22], [24]])
    """

    def __init__(
        self, clients: Mapping[int, Client], terms: Terms, answering: Answering = lambda exchange, asked: asked
    ) -> None:
        self.clients, self.server, self.answering = clients, Server(terms), answering

    def agree(self) -> list[int]:
        """Exchanges 0 and 1; returns the clients that are there to send a sheet."""
        self._ask("keys", list(self.clients), Client.keys)
        keys = self.server.keys()
        self._ask("shares", list(keys), lambda client: client.shares(keys))
        here = self.answering("sheets", list(self.server.transcript.of("shares")))
        self.server.require("sheets", len(here))  # before anybody computes what would go into a sheet
        return here

    def add(self, sheets: Mapping[int, Sheet]) -> Opened:
        """Exchanges 2 to 4: the sum of the sheets of those who are there."""
        server, clients = self.server, self.clients
        masked = {i: clients[i].sheet(server.shares(i), sheet) for i, sheet in sheets.items()}
        server.receive("sheets", masked)
        arrived = server.arrived()
        self._ask("counts", arrived, lambda client: client.counts(arrived))
        sheet, count = server.counts(head=len(next(iter(sheets.values())).head))
        self._ask("sums", list(server.transcript.of("counts")), lambda client: client.sums(count))
        return server.sums(sheet, count)

    def _ask(self, exchange: str, asked: list[int], answer: Callable[[Client], Payload]) -> None:
        here = self.answering(exchange, asked)
        self.server.receive(exchange, {i: answer(self.clients[i]) for i in here})


def _add_common_mask(total: np.ndarray, me: int, other: int, pair: Pair, public: bytes) -> None:
    """Add the mask that two clients have in common; of the two, the one with the higher number subtracts it."""
    common = mask(pair.agree(public, b"masks"), len(total))
    (np.add if me < other else np.subtract)(total, common, out=total)


def _own_masks(seeds: Sequence[bytes], sheet: Sheet) -> np.ndarray:
    rows = [mask(seed, sheet.body.shape[1]) for seed in seeds[1:]]
    return np.concatenate([mask(seeds[0], len(sheet.head)), *rows])


def _large_enough(count: Sequence[int], terms: Terms) -> list[int]:
    return [j for j, n in enumerate(count) if n >= terms.min_members]


def _cut(shares: bytes) -> list[bytes]:
    return [shares[at : at + SHARE] for at in range(0, len(shares), SHARE)]
