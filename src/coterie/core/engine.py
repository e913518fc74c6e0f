"""An engine: where and how clients' steps run. A cohort hands it exchanges, as data; it has two verbs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.core.federation import Federation
from coterie.core.key import Key
from coterie.core.precision import Precision
from coterie.core.pytree import nbytes
from coterie.core.step import Reply, Step
from coterie.core.sums import Sums
from coterie.core.task import Task
from coterie.core.train import own_rows

_CLIENT, SAMPLE = 1, 2  # streams under the key of all clients


class Spent(Exception):
    """The privacy budget of a run does not allow an exchange that its method asks for."""


@dataclass
class Ledger:
    """What is kept over a run: bytes, the clients' memories, and what engines found out. All its cohorts share it."""

    bytes_down: int = 0
    bytes_up: int = 0
    # What each client keeps for itself; on Flower, the last attempt that counted at each site.
    memory: dict[int, Any] = field(default_factory=dict)
    chunks: dict[str, int] = field(default_factory=dict)  # clients per chunk, by step: the same after a resume
    messages: list[str] = field(default_factory=list)  # for the log of the run
    left_out: list[str] = field(default_factory=list)  # sites that failed in this round
    usual: dict[str, float] = field(default_factory=dict)  # on Flower, how far sites usually moved models at most
    account: dict[str, Any] = field(default_factory=dict)  # what a private run has released so far

    def charge(self, down: int, up: int) -> None:
        """Count the bytes of an exchange."""
        self.bytes_down += down
        self.bytes_up += up


class OwnChoice(NamedTuple):
    """Every client is sent the model that it would choose for itself.

    Attributes:
        step: A step that is sent all models (k, …) and replies with a slot.
        part: The rows on which clients choose, "train" or "test".
    """

    step: Step
    part: str


class First(NamedTuple):
    """What each client does before its step, with what it was sent: the update of that reply is what the step gets.

    It stays with the client. So a model can be made of some of its rows and scored on others.

    Attributes:
        step: What it does.
        part: On which of its rows, "train" or "test".
    """

    step: Step
    part: str


class Exchange(NamedTuple):
    """One exchange of the server with some clients.

    Attributes:
        step: What each client does.
        message: What the server sends.
        slots: How many sums there are, or slots to choose from.
        rows: (clients,) or (clients, parts): client i is sent only these rows of the message. None sends everything.
        clients: Who, as positions in the federation.
        part: The rows that are the data of the step: "train" or "test".
        when: The round, and finer moments of it: the clients' random numbers follow from it.
        everybody: Whether these are all clients, or one process's share of all.
        ledger: Where bytes and memories are kept.
        first: What clients do before the step; None where they begin with it.
        share: How likely each client takes part, which it decides in secret; 1 where all do.
        rate: The chance that each client of the federation had to be asked.
    """

    step: Step
    message: Any
    slots: int
    rows: Tensor | OwnChoice | None
    clients: Tensor
    part: str
    when: tuple[int, ...]
    everybody: bool
    ledger: Ledger
    first: First | None = None
    share: float = 1.0
    rate: float = 1.0

    def only(self, at: Tensor) -> Exchange:
        """The same exchange with the clients at these positions alone."""
        rows = self.rows[at] if isinstance(self.rows, Tensor) else self.rows
        whole = self.everybody and len(at) == len(self.clients)
        return self._replace(clients=self.clients[at], rows=rows, everybody=whole)

    def bytes_down(self) -> int:
        """What one client is sent."""
        if not isinstance(self.rows, Tensor):
            return nbytes(self.message)
        return nbytes(own_rows(self.message, self.rows[0]))


class Engine(ABC):
    """Carries out exchanges with the clients of one federation, for one task.

    Attributes:
        name: What users call it.
        remote: Whether clients are on other machines, and can go back no further than to the round before.
        sums_only: Whether the server may be given nothing but sums, not even scores.
        leads: Of several processes that do one run, whether this is the one that writes and logs.
        federation: All clients.
        task: What is learnt.
        key: All clients' random numbers follow from it.
        device: Where the server's state is kept.
        precision: Of the clients' matrix products.
    """

    name: str
    precision: Precision
    remote = False
    sums_only = False
    leads = True

    def __init__(
        self, federation: Federation, task: Task, key: Key, device: torch.device, precision: Precision = "float32"
    ) -> None:
        self.federation, self.key = federation, key
        self.task = task if federation.inputs is None else task.taking(federation.inputs)
        self.device, self.precision = device, precision

    @abstractmethod
    def combine(self, exchange: Exchange) -> Sums:
        """Run the step on every client and add the weighted updates up by slot."""

    @abstractmethod
    def gather(self, exchange: Exchange) -> Reply:
        """Run the step on every client and return every reply, stacked in the clients' order."""

    def invite(self, numbers: Tensor, when: tuple[int, ...], fraction: float) -> tuple[Tensor, float]:
        """Who is asked where a share of some clients is to take part, and how likely each of those then does.

        Args:
            numbers: Of the clients.
            when: The moment.
            fraction: The share, below 1.

        Returns:
            Positions among the clients, and a probability: 1, unless clients decide in secret.
        """
        return sampled(self.key, when, numbers, fraction), 1.0

    def in_the_open(self) -> Engine:
        """The engine for exchanges that a real federation would not make, such as scoring in a simulation."""
        return self

    def told(self, row: dict[str, Any], ledger: Ledger) -> dict[str, Any]:
        """A row of the history as it may be told."""
        return row

    def client_key(self, i: int) -> Key:
        """A client's own key, by its position in the federation."""
        return self.key.fold(_CLIENT, int(self.federation.numbers[i]))

    def parties(self, clients: Tensor) -> Tensor:
        """A number for each of these clients: those with the same are on one machine, which answers for all of them."""
        return clients

    def sizes(self, exchange: Exchange) -> Tensor:
        """Rows of each client of an exchange."""
        return self.federation.part(exchange.part).sizes[exchange.clients]


def sampled(key: Key, when: tuple[int, ...], numbers: Tensor, fraction: float) -> Tensor:
    """Positions of a random share of clients, at least one, that follows from the key, the moment and their numbers."""
    order = key.fold(SAMPLE, *when).shuffle(numbers)
    return order[: max(1, round(fraction * len(numbers)))].sort().values
