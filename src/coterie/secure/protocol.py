"""A session of the secure sum: what clients and the server say to each other, and a simulation of all of them.

Practical Secure Aggregation for Privacy-Preserving Machine Learning
    Keith Bonawitz, Vladimir Ivanov, Ben Kreuter, Antonio Marcedone, H. Brendan McMahan, Sarvar Patel, Daniel Ramage,
    Aaron Segal, Karn Seth. CCS 2017, Figure 4, with the parts that hold against an active adversary.

Each client hides its numbers, modulo 2⁶⁴, under masks of two kinds. One kind is shared by a pair of clients: one of
them adds the mask and the other subtracts it, so that they cancel in the sum. The other kind belongs to one client, and
the other clients hold shares of its seeds. If a client's numbers have arrived, the server gets shares of these seeds;
if they have not, it gets shares of the client's secret key, from which its pairwise masks follow; never both.

Here a client has a seed for every slot. Counts are opened (revealed to the server) first, and the clients do not send
their shares of the seeds of a slot that too few clients have chosen. So there are six exchanges, one more than in the
paper:

    0  keys    up: public keys, signed                down: the public keys of all clients
    1  shares  up: encrypted shares for every other   down: the shares that are addressed to the client
    2  sheets  up: the masked numbers                 down: the clients whose numbers have arrived
    3  lists   up: a signature of that list           down: the signatures of all clients
    4  counts  up: a share of each client's seed for  down: how many clients chose each slot, with a tag that
               counts, or of its secret key                 proves it
    5  sums    up: shares of the seeds of the slots that enough clients have chosen

A party may also stand for several clients, as a node of a federation does for its own: its numbers are their sum.
`coterie.secure.client` says what a client checks, `coterie.secure.server` is the other side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from coterie.secure.client import Client
from coterie.secure.messages import Opened, Payload, Sheet, Terms
from coterie.secure.server import Server

Answering = Callable[[str, list[int]], list[int]]  # (exchange, clients that are asked) -> those that answer


class Session:
    """A simulated session: the server and all clients, with the messages between them.

    Args:
        clients: The clients that are invited, by number.
        terms: Parameters of the session.
        answering: Given the name of an exchange and the clients that are asked, returns those that answer; by default
            all of them.

    Example:
        >>> import numpy as np
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
        """Run exchanges 2 to 5, and return the sum of the sheets.

        Args:
            sheets: The sheet of every client that `agree` returned.
        """
        server, clients = self.server, self.clients
        masked = {i: clients[i].sheet(server.shares(i), sheet) for i, sheet in sheets.items()}
        server.receive("sheets", masked)
        arrived = server.arrived()
        self._ask("lists", arrived, lambda client: client.sign(arrived))
        signed = server.signed()
        self._ask("counts", list(signed), lambda client: client.counts(signed))
        sheet, counts = server.counts(head=len(next(iter(sheets.values())).head))
        self._ask("sums", list(server.transcript.of("counts")), lambda client: client.sums(counts))
        return server.sums(sheet, counts)

    def _ask(self, exchange: str, asked: list[int], answer: Callable[[Client], Payload]) -> None:
        here = self.answering(exchange, asked)
        self.server.receive(exchange, {i: answer(self.clients[i]) for i in here})
