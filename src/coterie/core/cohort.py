"""A cohort: some clients of a federation at some moment of a run, and the only way a method reaches them.

It has two verbs. `combine` returns sums of updates by slot, which is what secure aggregation can compute, and every
client's diagnostics; `gather` returns every client's reply. So the verb that a method uses states what its server gets
to see of the updates.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from coterie.core.engine import Engine, Exchange, First, Ledger, OwnChoice
from coterie.core.federation import Federation
from coterie.core.key import Key
from coterie.core.pytree import tree_map
from coterie.core.step import Reply, Step
from coterie.core.sums import Sums
from coterie.core.task import Task


class Cohort:
    """Some clients of a federation at some moment of a run.

    A cohort never changes: `fold`, `on`, `only`, `sample` and `uncharged` return another one.

    Attributes:
        clients: Who they are, as positions in the federation (c,).
        when: The round, and finer moments of it.
        part: Which of their rows steps run on: "train" or "test".
        share: How likely each of them takes part, which it decides in secret; 1 where all do.
        rate: The chance of each client of the federation to be among them, where they were sampled.

    Args:
        engine: Carries out the exchanges.
        ledger: Where bytes and memories are kept; a new one if None.
    """

    def __init__(self, engine: Engine, ledger: Ledger | None = None) -> None:
        self.engine = engine
        self.ledger = ledger or Ledger()
        self.clients = torch.arange(len(engine.federation))
        self.when: tuple[int, ...] = ()
        self.part = "train"
        self.share = 1.0
        self.rate = 1.0

    # --- who they are --------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def task(self) -> Task:
        """What is learnt."""
        return self.engine.task

    @property
    def federation(self) -> Federation:
        """All clients; on a real federation their rows are not here, but their number, sizes and names are."""
        return self.engine.federation

    @property
    def population(self) -> int:
        """m: all clients of the federation, whether in this cohort or not."""
        return len(self.federation)

    @cached_property
    def sizes(self) -> Tensor:
        """Rows of each client of the cohort."""
        return self.federation.part(self.part).sizes[self.clients]

    @property
    def numbers(self) -> Tensor:
        """An integer per client that follows from its name."""
        return self.federation.numbers[self.clients]

    @property
    def key(self) -> Key:
        """The key that all clients' random numbers follow from."""
        return self.engine.key

    # --- some of them, at another moment -------------------------------------------------------------------------

    def fold(self, *more: int) -> Cohort:
        """The cohort at a finer moment, for methods that exchange several times in a round: clients draw anew."""
        return self._but(when=self.when + more)

    def at(self, t: int) -> Cohort:
        """The cohort in round t."""
        return self._but(when=(t,))

    def on(self, part: str) -> Cohort:
        """The same clients with their "train" or "test" rows as the data of every step."""
        return self._but(part=part)

    def only(self, positions: Tensor | Sequence[int]) -> Cohort:
        """The clients at these positions of the cohort."""
        return self._but(clients=self.clients[torch.as_tensor(positions, dtype=torch.long)])

    def without(self, clients: Tensor) -> Cohort:
        """The cohort less some clients, given as positions in the federation."""
        return self.only((~torch.isin(self.clients, clients)).nonzero().flatten())

    def sample(self, fraction: float) -> Cohort:
        """A random share of the clients; who they are is up to the engine, or their secret."""
        if fraction >= 1:
            return self
        asked, share = self.engine.invite(self.numbers, self.when, fraction)
        return self.only(asked)._but(share=self.share * share, rate=self.rate * fraction)

    def uncharged(self) -> Cohort:
        """The same clients, in exchanges that a real federation would not make: their bytes are not counted."""
        ledger = dataclasses.replace(self.ledger, bytes_down=0, bytes_up=0)
        return self._but(engine=self.engine.in_the_open(), ledger=ledger)

    # --- the two verbs -------------------------------------------------------------------------------------------

    def combine(
        self,
        step: Step,
        message: Any,
        *,
        slots: int = 1,
        rows: Tensor | OwnChoice | None = None,
        first: First | None = None,
    ) -> Sums:
        """Run `step` on every client and add the weighted updates up by slot.

        Args:
            step: A method `step(task)` that is marked with `@client_step`.
            message: What every client is sent.
            slots: The number of sums.
            rows: (clients,) or (clients, parts): client i is sent only these rows of the message. `OwnChoice` sends
                each client the rows that it chooses itself.
            first: What each client does before the step, and on which of its rows.

        Returns:
            Sums and diagnostics. Labels and counts are on the CPU, where the server works.
        """
        if isinstance(rows, OwnChoice) and not self.engine.sums_only:
            rows = self.on(rows.part).gather(rows.step, message.theta, slots=slots).slot
        return _labels_at_home(self.engine.combine(self._exchange(step, message, slots, rows, first)))

    def gather(
        self, step: Step, message: Any, *, slots: int = 1, rows: Tensor | None = None, first: First | None = None
    ) -> Reply:
        """Run `step` on every client and return every reply, stacked in the cohort's order.

        Args:
            step: A method `step(task)` that is marked with `@client_step`.
            message: What every client is sent.
            slots: How many there are to choose from; a reply from a real federation that names another is refused.
            rows: (clients,) or (clients, parts): client i is sent only these rows of the message.
            first: What each client does before the step, and on which of its rows.

        Returns:
            The replies. Labels and counts are on the CPU, where the server works.
        """
        return _labels_at_home(self.engine.gather(self._exchange(step, message, slots, rows, first)))

    def log(self, message: str) -> None:
        """Write a message to the log of the run."""
        self.ledger.messages.append(message)

    def _exchange(
        self, step: Step, message: Any, slots: int, rows: Tensor | OwnChoice | None, first: First | None = None
    ) -> Exchange:
        everybody = len(self) == self.population
        return Exchange(
            step,
            message,
            slots,
            rows,
            self.clients,
            self.part,
            self.when,
            everybody,
            self.ledger,
            first,
            self.share,
            self.rate,
        )

    def _but(self, **changes: Any) -> Cohort:
        other = copy.copy(self)
        vars(other).pop("sizes", None)  # other clients or other rows may have others
        vars(other).update(changes)
        return other


def _labels_at_home(tree: Any) -> Any:
    """The same with all integers on the CPU; what is to be computed with stays on its device."""
    return tree_map(lambda x: x.cpu() if isinstance(x, Tensor) and not x.is_floating_point() else x, tree)
