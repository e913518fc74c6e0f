"""A cohort: the only way an algorithm reaches clients.

It has two verbs. `combine` returns sums of updates by slot, which is what secure aggregation can compute, and every
client's diagnostics; `gather` returns every client's reply. So the verb that an algorithm uses states what its server
gets to see of the updates.
"""

from __future__ import annotations

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from coterie.client import ClientStep, Reply
from coterie.federation import Federation
from coterie.key import Key
from coterie.precision import Precision, arithmetic
from coterie.task import Task
from coterie.tree import Outer, formed, is_outer, leaves, nbytes, take, tree_map
from coterie.uplink import Uplink

Step = Callable[[Task], ClientStep]  # a method of a frozen dataclass, so that a remote client can rebuild it by name

_CLIENT, _SAMPLE = 1, 2  # streams under the run's key


class Sums(NamedTuple):
    """What `combine` returns.

    Attributes:
        update: The weighted sums by slot (slots, …).
        weight: The summed weights (slots,).
        note: Every participant's diagnostics, in the cohort's order. From a secure sum: the mean of all in everybody's
            place, and -1 for every label.
        members: How many clients have added to each slot (slots,), where the notes do not tell: from a secure sum.
    """

    update: Any
    weight: Tensor
    note: dict[str, Tensor]
    members: Tensor | None = None


@dataclass
class Ledger:
    """What an executor keeps over a run and every cohort of the run shares."""

    bytes_down: int = 0
    bytes_up: int = 0
    # What each client keeps for itself; of clients that are elsewhere, where each site's is to be found.
    memory: dict[int, Any] = field(default_factory=dict)
    chunks: dict[str, int] = field(default_factory=dict)  # clients per chunk, by step: the same after a resume
    messages: list[str] = field(default_factory=list)  # what executor and algorithm have to say, for the log
    left_out: list[str] = field(default_factory=list)  # the sites that were not heard or not believed in this round


class Absent(Exception):
    """Some clients were not heard in an exchange, or not believed: the work must be done again without them.

    Attributes:
        clients: Who, as positions in the federation.
    """

    def __init__(self, clients: Tensor) -> None:
        super().__init__(f"{len(clients)} clients were not heard")
        self.clients = clients


Admit = Callable[["Cohort"], str]  # given all clients, new ones last: lets those in and says how, or raises ValueError


class Cohort(ABC):
    """Some clients of a federation at some moment of a run.

    A cohort never changes: `at`, `fold`, `only`, `sample` and `on` return another one.
    """

    remote = False  # whether clients are elsewhere, and can go back no further than to the round before
    sums_only = False  # whether the server is told nothing but sums, not even to score
    leads = True  # of several processes that do one run, whether this is the one that writes and speaks

    def __init__(
        self,
        federation: Federation,
        task: Task,
        key: Key,
        device: torch.device,
        uplink: Uplink | None = None,
        precision: Precision = "float32",
    ) -> None:
        self.federation = federation
        self.task = task
        self.key = key
        self.device = device
        self.uplink = uplink or Uplink()
        self.precision: Precision = precision
        self.ledger = Ledger()
        self.clients = torch.arange(len(federation))
        self.when: tuple[int, ...] = ()
        self.part = "train"

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def population(self) -> int:
        """m: all clients of the federation, whether in this cohort or not."""
        return len(self.federation)

    @cached_property
    def sizes(self) -> Tensor:
        """Rows of each client of the cohort."""
        return self.federation.split(self.part).sizes[self.clients]

    @property
    def numbers(self) -> Tensor:
        """An integer per client that follows from its name."""
        return self.federation.numbers[self.clients]

    def at(self, t: int) -> Self:
        """The cohort in round t: its clients' draws follow."""
        return self._but(when=(t,))

    def attempt(self, unit: int) -> Self:
        """The cohort at a new try at the start (0) or a round (t + 1), for clients that are reached over a network."""
        return self

    def without(self, clients: Tensor) -> Self:
        """The cohort less some clients, given as positions in the federation."""
        return self.only((~torch.isin(self.clients, clients)).nonzero().flatten())

    def do(self, work: Callable[[Self], Any]) -> Any:
        """Do a piece of work with these clients.

        Raises:
            Absent: Some were not heard, or not believed.
        """
        return work(self)

    def renewed(self, admit: Admit | None = None) -> Self:
        """The cohort at the beginning of a round, where clients come and go: who is back can be reached again.

        Args:
            admit: Takes new clients in; they wait where it is not given.
        """
        return self

    def first(self, clients: int) -> Self:
        """The cohort of all as it was when there were so many, before others joined.

        Raises:
            ValueError: There never were.
        """
        raise ValueError(f"the run was made with {clients} clients, but there are {len(self)}")

    def listed(self) -> dict[str, Any] | None:
        """Who the clients are, as a table for JSON by which a resumed run knows them; None where they do not change."""
        return None

    def fold(self, *more: int) -> Self:
        """The cohort at a finer moment, for algorithms that exchange several times in a round."""
        return self._but(when=self.when + more)

    def on(self, part: str) -> Self:
        """The same clients with their "train" or "test" rows as the data of every step."""
        return self._but(part=part)

    def only(self, positions: Tensor | Sequence[int]) -> Self:
        """The clients at these positions of the cohort."""
        return self._but(clients=self.clients[torch.as_tensor(positions, dtype=torch.long)])

    def sample(self, fraction: float) -> Self:
        """A random share of the clients, at least one; who they are follows from the key and the moment."""
        return self if fraction >= 1 else self.only(sampled(self.key, self.when, self.numbers, fraction))

    @property
    def executor(self) -> str:
        """Where and how the clients' steps run, for the record."""
        return type(self).__name__.lower()

    def client_key(self, i: int) -> Key:
        """A client's own key, by its position in the federation."""
        return self.key.fold(_CLIENT, int(self.federation.numbers[i]))

    def uncharged(self) -> Cohort:
        """The same clients, in exchanges that a real federation would not make: their bytes are not counted."""
        ledger = self.ledger
        return self._but(ledger=dataclasses.replace(ledger, bytes_down=0, bytes_up=0))

    def tell(self, message: str) -> None:
        """Have a message written to the log of the run."""
        self.ledger.messages.append(message)

    def combine(self, step: Step, shared: Any, *, slots: int = 1, rows: Tensor | None = None) -> Sums:
        """Run `step` on every client and add the weighted updates up by slot.

        Args:
            step: A method `step(task) -> ClientStep`.
            shared: What every client is sent.
            slots: The number of sums.
            rows: (clients,) or (clients, parts). Client i is sent only these rows of `shared`.
        """
        update, weight, note = None, torch.zeros(slots, device=self.device), None
        shared, down = self._sent(shared, rows)
        with arithmetic("float32", self.device):
            for at, part, up in self._sums(step(self.task), step_name(step), shared, slots, rows):
                self._charge(down * len(at), up)
                update = part.update if update is None else tree_map(Tensor.add_, update, part.update)
                weight = weight + part.weight.to(self.device)
                note = _put(note, part.note, at, len(self))
        return Sums(update, weight, note or {})

    def gather(self, step: Step, shared: Any, *, slots: int = 1, rows: Tensor | None = None) -> Reply:
        """Run `step` on every client and return every reply, stacked in the cohort's order.

        Args:
            step: A method `step(task) -> ClientStep`.
            shared: What every client is sent.
            slots: How many there are to choose from; a remote client that names another is not believed.
            rows: (clients,) or (clients, parts). Client i is sent only these rows of `shared`.
        """
        replies: Any = None
        shared, down = self._sent(shared, rows)
        with arithmetic("float32", self.device):
            for at, reply in self._replies(step(self.task), step_name(step), shared, rows):
                reply = reply._replace(update=formed(reply.update), memory=())
                self._charge(down * len(at), nbytes(reply))
                replies = _put(replies, reply, at, len(self))
        return replies

    def combine_own(self, step: Step, shared: dict[str, Any], choose: Step, on: str, *, slots: int) -> Sums:
        """As `combine`, where every client is sent the row of `shared` that it would choose for itself.

        Args:
            step: A method `step(task) -> ClientStep`.
            shared: What is sent, among it "theta": one model for each slot.
            choose: A step that is sent these models and replies with a slot.
            on: The rows on which clients choose, "train" or "test".
            slots: The number of sums.
        """
        rows = self.on(on).gather(choose, shared["theta"], slots=slots).slot.cpu()
        return self.combine(step, shared, slots=slots, rows=rows)

    @abstractmethod
    def _replies(self, step: ClientStep, name: str, shared: Any, rows: Tensor | None) -> Iterator[tuple[Tensor, Reply]]:
        """Yield (positions in the cohort, their stacked replies) until every client has replied once."""

    def _sums(
        self, step: ClientStep, name: str, shared: Any, slots: int, rows: Tensor | None
    ) -> Iterator[tuple[Tensor, Sums, int]]:
        """Yield (positions, their sums, bytes they sent) until every client has replied once."""
        for at, reply in self._replies(step, name, shared, rows):
            yield at, slot_sum(reply, slots), nbytes(reply._replace(memory=()))

    def _sent(self, shared: Any, rows: Tensor | None) -> tuple[Any, int]:
        """What is sent, on the device, and its bytes per client."""
        shared = tree_map(lambda x: x.to(self.device) if isinstance(x, Tensor) else x, shared)
        return shared, nbytes(shared if rows is None else take(shared, rows[0].to(self.device)))

    def _arithmetic(self) -> AbstractContextManager[None]:
        """For what a client computes; sums over clients are always done in float32."""
        return arithmetic(self.precision, self.device)

    def _charge(self, down: int, up: int) -> None:
        self.ledger.bytes_down += down
        self.ledger.bytes_up += up

    def _draws(self, step: ClientStep, i: int, n: int) -> Any:
        return () if step.draw is None else step.draw(n, self.client_key(i), self.when)

    def _but(self, **changes: Any) -> Self:
        other = copy.copy(self)
        vars(other).pop("sizes", None)  # other clients or other rows may have others
        vars(other).update(changes)
        return other


def sampled(key: Key, when: tuple[int, ...], numbers: Tensor, fraction: float) -> Tensor:
    """Positions of a random share of clients, at least one, that follows from the key, the moment and their numbers."""
    order = key.fold(_SAMPLE, *when).shuffle(numbers)
    return order[: max(1, round(fraction * len(numbers)))].sort().values


def slot_sum(reply: Reply, slots: int) -> Sums:
    """Add stacked replies (c, …), each of one or several parts, up by slot."""
    parts = reply.slot.dim()
    update = tree_map(lambda x: x.flatten(0, parts - 1), reply.update)
    return Sums(*weighted_sums(reply.slot, reply.weight, slots, update), note=reply.note)


def weighted_sums(slot: Tensor, weight: Tensor, slots: int, rows: Any) -> tuple[Any, Tensor]:
    """Add rows (b, …) of a tree up by slot (slots, …), for b slots and weights of any shape; and the weights."""
    device = next((x.device for x in leaves(rows)), weight.device)  # a weight of 1 may have been made on the CPU
    weight, slot = weight.flatten().to(device), slot.flatten().to(device)
    share = (slot[:, None] == torch.arange(slots, device=slot.device)) * weight[:, None]

    def total(x: Tensor | Outer) -> Tensor:
        if isinstance(x, Outer):
            return _product_sums(x, share)
        # One matrix product: on a GPU index_add would add in an order that changes from run to run.
        return (share.T.to(x.dtype) @ x.reshape(len(slot), -1)).reshape(slots, *x.shape[1:])

    def apart(x: Tensor) -> Tensor:
        each = x * weight.reshape(-1, *[1] * (x.dim() - 1)).to(x.dtype)
        return torch.zeros(slots, *x.shape[1:], dtype=x.dtype, device=x.device).index_add_(0, slot, each)

    sums = tree_map(total, rows, is_leaf=is_outer)
    finite = [torch.isfinite(x).all() for x in leaves(sums)] if slots > 1 else []
    if finite and not bool(torch.stack(finite).all()):  # 0 · ∞ has carried one slot's infinity into the others
        sums = tree_map(apart, formed(rows))
    return sums, share.sum(0)


def _product_sums(x: Outer, share: Tensor) -> Tensor:
    """The sums by slot of products (b, …) that are given by their factors, weighted by `share` (b, slots)."""
    lined_up = x.right.movedim(0, -3).flatten(-3, -2)  # (…, b·n, right)

    def total(weight: Tensor) -> Tensor:
        if bool((weight == 1).all()):
            left = x.left
        else:
            left = x.left * weight.reshape(-1, *[1] * (x.left.dim() - 1)).to(x.left.dtype)
        return Outer(left.movedim(0, -3).flatten(-3, -2), lined_up).product()

    return torch.stack([total(weight) for weight in share.T])


def slot_mean(sums: Sums, otherwise: Any) -> Any:
    """The weighted mean of every slot; a slot that nobody chose keeps what it had.

    Example:
        >>> sums = Sums({"w": torch.tensor([6.0, 0.0])}, torch.tensor([3.0, 0.0]), {})
        >>> slot_mean(sums, otherwise={"w": torch.tensor([9.0, 7.0])})["w"]
        tensor([2., 7.])
    """

    def mean(total: Tensor, old: Tensor) -> Tensor:
        weight = sums.weight.reshape(-1, *[1] * (total.dim() - 1))
        return torch.where(weight > 0, total / weight.clamp(min=torch.finfo(total.dtype).tiny), old)

    return tree_map(mean, sums.update, otherwise)


def step_name(step: Step) -> str:
    """A step's name for messages, such as "IFCA.step"."""
    return getattr(step, "__qualname__", "step")


def _put(whole: Any, part: Any, at: Tensor, m: int) -> Any:
    """Put a stacked chunk at its clients' places in a tree for all m, which is made for the first chunk.

    Chunks are not kept until the last has come: small pieces that stay between large ones that go would keep the
    allocator from giving memory back.
    """
    if whole is None:
        if len(at) == m and bool((at == torch.arange(m)).all()):
            return part
        whole = tree_map(lambda x: x.new_empty(m, *x.shape[1:]), part)
    tree_map(lambda x, own: x.index_copy_(0, at.to(x.device), own), whole, part)
    return whole
