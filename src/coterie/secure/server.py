"""The server in a session of the secure sum: it opens sums, and what it learns of clients is in its transcript.

`coterie.secure.protocol` describes the exchanges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

import numpy as np

from coterie.secure.client import add_common_mask, large_enough, masking_key
from coterie.secure.masks import Pair, mask
from coterie.secure.messages import (
    EXCHANGES,
    NUMBER,
    Count,
    Message,
    Opened,
    Payload,
    Sheet,
    Terms,
    TooFewLeft,
    Transcript,
)
from coterie.secure.shamir import SHARE, join


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
        self.sent = b""  # what all clients were sent to work with, or a digest of it
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

    def signed(self) -> dict[int, bytes]:
        """Return the signatures of the list of arrived sheets, which every client gets after exchange 3."""
        signed = {i: payload[i] for i, payload in self.transcript.of("lists").items()}
        self.transcript.bytes_down += len(signed) * sum(NUMBER + len(signature) for signature in signed.values())
        return signed

    def counts(self, head: int) -> tuple[Sheet, list[Count]]:
        """Return the sum, of which only the head is unmasked, and the counts that every client gets after exchange 4.

        Args:
            head: Length of the head of a sheet.

        Raises:
            ValueError: A party has not followed the protocol.
        """
        sheets, answers = self.transcript.of("sheets"), self.transcript.of("counts")
        total: np.ndarray = reduce(np.add, (np.frombuffer(payload[i], dtype="<u8") for i, payload in sheets.items()))
        slots = self.terms.slots
        masked = head + slots  # tags follow the head
        for i in self.transcript.of("shares"):
            secret = self._joined(answers, i)
            if i in sheets:
                total[:masked] -= mask(secret, masked)
            else:
                self._cancel(total, i, Pair(secret))
        most = sum(self.speaking.get(i, 1) for i in sheets)
        if (total[:slots] > most).any():
            raise ValueError("secure sum: the counts make no sense, so somebody has not kept to the protocol")
        counts = [Count(*pair) for pair in zip(total[:slots].tolist(), total[head:masked].tolist(), strict=True)]
        self.transcript.bytes_down += len(answers) * slots * 2 * NUMBER
        return Sheet.of(np.delete(total, np.s_[head:masked]), head, slots), counts

    def sums(self, sheet: Sheet, counts: Sequence[Count]) -> Opened:
        """Return the sums of the slots that enough clients have chosen, after exchange 5.

        Args:
            sheet: The sum that `counts` returned.
            counts: Number of clients that chose each slot.

        Raises:
            ValueError: A party has not followed the protocol.
        """
        members, arrived = [count.members for count in counts], list(self.transcript.of("sheets"))
        wanted = large_enough(members, self.terms)
        body = np.zeros_like(sheet.body)
        body[wanted] = sheet.body[wanted]
        answers = self.transcript.of("sums")
        for at, j in enumerate(wanted):
            for i in arrived:
                body[j] -= mask(self._joined(answers, i, at), body.shape[1])
        return Opened(Sheet(sheet.head.view(np.int64), body.view(np.int64)), np.array(members), arrived)

    def _cancel(self, total: np.ndarray, gone: int, pair: Pair) -> None:
        """Add the masks that a dropped client would have added, so that they cancel with those of the others."""
        keys = self.transcript.of("keys")
        for i in self.transcript.of("sheets"):
            add_common_mask(total, gone, i, pair, masking_key(keys[i][i]), self.sent)

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
            return join({i: answers[i][client][SHARE * at : SHARE * (at + 1)] for i in holders})
        except ValueError:
            raise ValueError(
                f"secure sum: the shares of a secret of {name} do not fit together, so it or one of those that hold "
                "them has not kept to the protocol"
            ) from None
