"""A session of the secure sum: the client's side, the server's side, and the messages between them.

Practical Secure Aggregation for Privacy-Preserving Machine Learning
    Keith Bonawitz, Vladimir Ivanov, Ben Kreuter, Antonio Marcedone, H. Brendan McMahan, Sarvar Patel, Daniel Ramage,
    Aaron Segal, Karn Seth. CCS 2017, Figure 4.

Each client hides its numbers, modulo 2⁶⁴, under masks of two kinds. One kind is shared by a pair of clients: one of
them adds the mask and the other subtracts it, so that they cancel in the sum. The other kind belongs to one client, and
the other clients hold shares of its seeds. If a client's numbers have arrived, the server gets shares of these seeds;
if they have not, it gets shares of the client's secret key, from which its pairwise masks follow; never both.

Here a client has a seed for every slot. Counts are opened (revealed to the server) first, and the clients do not send
their shares of the seeds of a slot that too few clients have chosen. So there are five exchanges, one more than in the
paper:

    0  keys    up: two public keys                    down: the public keys of all clients
    1  shares  up: encrypted shares for every other   down: the shares that are addressed to the client
    2  sheets  up: the masked numbers                 down: the clients whose numbers have arrived
    3  counts  up: a share of each client's seed for  down: how many clients chose each slot
               counts, or of its secret key
    4  sums    up: shares of the seeds of the slots that enough clients have chosen

A party may also stand for several clients, as a node of a federation does for its own: its numbers are their sum.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidTag

from coterie.secure.masks import SECRET, Entropy, Pair, mask, seal, unseal
from coterie.secure.messages import EXCHANGES, NUMBER, Message, Opened, Payload, Sheet, Terms, TooFewLeft, Transcript
from coterie.secure.shamir import SHARE, join, split

Answering = Callable[[str, list[int]], list[int]]  # (exchange, clients that are asked) -> those that answer


class Client:
    """One client in one session. No secret is used in another session: a mask that hides two sheets hides neither.

    Args:
        me: Number of the client, which is not secret.
        terms: Parameters of the session.
        random: Source of random bytes for the secrets.
    """

    def __init__(self, me: int, terms: Terms, random: Entropy = os.urandom) -> None:
        self.me, self._terms, self._random = me, terms, random
        self._channel, self._masking = Pair(random(SECRET)), Pair(random(SECRET))
        self._seeds = [random(SECRET) for _ in range(1 + terms.slots)]  # for the head, and for each row of the body
        self._keys: dict[int, bytes] = {}  # public keys of the other clients
        self._held: dict[int, list[bytes]] = {}  # shares of the secrets of all clients
        self._arrived: list[int] | None = None

    def to_plain(self) -> dict[str, Any]:
        """Return everything that the client must store between two exchanges, for JSON. It is secret.

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
        """Restore a client; from now on its random bytes come from the operating system.

        Args:
            plain: What `to_plain` returned.
        """
        drawn = iter(bytes.fromhex(secret) for secret in plain["drawn"])
        client = cls(plain["me"], Terms(*plain["terms"]), lambda length: next(drawn))
        client._random = os.urandom
        client._keys = {i: bytes.fromhex(key) for i, key in plain["keys"]}
        client._held = {i: [bytes.fromhex(share) for share in shares] for i, shares in plain["held"]}
        client._arrived = plain["arrived"]
        return client

    def keys(self) -> Payload:
        """Answer exchange 0 with the public keys for encrypting shares and for masks.

        There are two key pairs, because the secret key of the second one may be opened.
        """
        return {self.me: self._channel.public + self._masking.public}

    def shares(self, keys: Mapping[int, bytes]) -> Payload:
        """Answer exchange 1 with shares of this client's secrets, encrypted for each other client.

        Args:
            keys: The public keys of all clients, from the server.
        """
        self._require(keys)
        self._keys = {i: key for i, key in keys.items() if i != self.me}
        secrets = [self._masking.secret, *self._seeds]
        pieces = [split(secret, list(keys), self._terms.needed, self._random) for secret in secrets]
        self._held[self.me] = [piece[self.me] for piece in pieces]
        return {i: self._seal(i, b"".join(piece[i] for piece in pieces)) for i in self._keys}

    def sheet(self, sealed: Mapping[int, bytes], sheet: Sheet) -> Payload:
        """Answer exchange 2 with this client's numbers under all masks.

        A share that cannot be decrypted is ignored: its sender has not followed the protocol, and enough other clients
        may hold shares of the sender's secrets.

        Args:
            sealed: The encrypted shares that other clients sent to this one, by sender.
            sheet: This client's numbers.
        """
        self._held |= {i: _cut(text) for i in sealed if (text := self._unseal(i, sealed[i])) is not None}
        self._require(self._held)
        total = sheet.flat() + _own_masks(self._seeds, sheet)
        for i in sealed:
            _add_common_mask(total, self.me, i, self._masking, self._keys[i][SECRET:])
        return {self.me: total.astype("<u8").tobytes()}

    def counts(self, arrived: Sequence[int]) -> Payload:
        """Answer exchange 3 with a share of each client's seed for the head, or of its secret key, but never both.

        Args:
            arrived: The clients whose sheets have arrived, from the server.
        """
        self._require(arrived)
        if self._arrived is not None:
            raise ValueError(f"secure sum: client {self.me} has been asked twice whose sheets have arrived")
        self._arrived = list(arrived)
        return {i: held[1 if i in self._arrived else 0] for i, held in self._held.items()}

    def sums(self, count: Sequence[int]) -> Payload:
        """Answer exchange 4 with shares of the seeds of those slots that enough clients have chosen.

        Args:
            count: Number of clients that chose each slot, from the server.
        """
        wanted, arrived = _large_enough(count, self._terms), self._arrived or []
        return {i: b"".join(self._held[i][2 + j] for j in wanted) for i in arrived if i in self._held}

    def _require(self, clients: Iterable[int]) -> None:
        """Stop if too few clients take part; a client checks this itself and need not trust the server."""
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
    """The server in one session. Everything that it knows about clients is in its transcript.

    Args:
        terms: Parameters of the session.
        speaking: Number of clients that each party stands for; 1 for a party that is not listed.
        names: Names of parties for messages; a party that is not listed is named by its number.
    """

    def __init__(
        self, terms: Terms, speaking: Mapping[int, int] | None = None, names: Mapping[int, str] | None = None
    ) -> None:
        self.terms, self.speaking, self.names = terms, speaking or {}, names or {}
        self.transcript = Transcript()

    def receive(self, exchange: str, payloads: Mapping[int, Payload]) -> None:
        """Store the answers to an exchange.

        Args:
            exchange: Name of the exchange.
            payloads: The answers, by client.

        Raises:
            TooFewLeft: There are too few answers to continue.
        """
        self.transcript.messages += [Message(exchange, i, payload) for i, payload in payloads.items()]
        self.require(exchange, len(payloads))

    def require(self, exchange: str, answers: int) -> None:
        """Check that there are enough answers to an exchange to continue.

        Args:
            exchange: Name of the exchange.
            answers: Number of answers.

        Raises:
            TooFewLeft: There are too few.
        """
        if answers < self.terms.needed:
            opened = "only the head, with counts and mean losses," if exchange == EXCHANGES[-1] else "nothing"
            raise TooFewLeft(
                f"secure sum: {answers} of {self.terms.invited} {self.terms.who} answered exchange "
                f"{EXCHANGES.index(exchange)} ({exchange}), but {self.terms.needed} are needed; {opened} was opened"
            )

    def keys(self) -> dict[int, bytes]:
        """Return all public keys, which every client gets after exchange 0."""
        keys = {i: payload[i] for i, payload in self.transcript.of("keys").items()}
        self.transcript.bytes_down += len(keys) * sum(NUMBER + len(key) for key in keys.values())
        return keys

    def shares(self, receiver: int) -> dict[int, bytes]:
        """Return the encrypted shares that one client gets after exchange 1, by sender.

        Args:
            receiver: The client.
        """
        sent = self.transcript.of("shares")
        own = {i: payload[receiver] for i, payload in sent.items() if i != receiver}
        self.transcript.bytes_down += sum(NUMBER + len(text) for text in own.values())
        return own

    def arrived(self) -> list[int]:
        """Return the clients whose sheets have arrived, which every client gets after exchange 2."""
        arrived = list(self.transcript.of("sheets"))
        self.transcript.bytes_down += len(arrived) * len(arrived) * NUMBER
        return arrived

    def counts(self, head: int) -> tuple[Sheet, list[int]]:
        """Return the sum, of which only the head is unmasked, and the counts that every client gets after exchange 3.

        Args:
            head: Length of the head of a sheet.

        Raises:
            ValueError: A party has not followed the protocol.
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
        """Return the sums of the slots that enough clients have chosen, after exchange 4.

        Args:
            sheet: The sum that `counts` returned.
            count: Number of clients that chose each slot.

        Raises:
            ValueError: A party has not followed the protocol.
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
        """Add the masks that a dropped client would have added, so that they cancel with those of the others."""
        keys = self.transcript.of("keys")
        for i in self.transcript.of("sheets"):
            _add_common_mask(total, gone, i, pair, keys[i][i][SECRET:])

    def _joined(self, answers: Mapping[int, Payload], client: int, at: int = 0) -> bytes:
        """Restore a secret of a client from as many of its shares as are needed."""
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
    """A simulated session: the server and all clients, with the messages between them.

    Args:
        clients: The clients that are invited, by number.
        terms: Parameters of the session.
        answering: Given the name of an exchange and the clients that are asked, returns those that answer; by default
            all of them.

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
        """Run exchanges 0 and 1, and return the clients that will send a sheet."""
        self._ask("keys", list(self.clients), Client.keys)
        keys = self.server.keys()
        self._ask("shares", list(keys), lambda client: client.shares(keys))
        here = self.answering("sheets", list(self.server.transcript.of("shares")))
        self.server.require("sheets", len(here))  # before the clients compute their sheets
        return here

    def add(self, sheets: Mapping[int, Sheet]) -> Opened:
        """Run exchanges 2 to 4, and return the sum of the sheets.

        Args:
            sheets: The sheet of every client that `agree` returned.
        """
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
    """Add the mask that two clients share; the client with the higher number subtracts it instead."""
    common = mask(pair.agree(public, b"masks"), len(total))
    (np.add if me < other else np.subtract)(total, common, out=total)


def _own_masks(seeds: Sequence[bytes], sheet: Sheet) -> np.ndarray:
    rows = [mask(seed, sheet.body.shape[1]) for seed in seeds[1:]]
    return np.concatenate([mask(seeds[0], len(sheet.head)), *rows])


def _large_enough(count: Sequence[int], terms: Terms) -> list[int]:
    return [j for j, n in enumerate(count) if n >= terms.min_members]


def _cut(shares: bytes) -> list[bytes]:
    return [shares[at : at + SHARE] for at in range(0, len(shares), SHARE)]
