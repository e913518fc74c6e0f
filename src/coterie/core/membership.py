"""Who takes part in a run: seen by the loop alone. In a simulation it is everybody, always."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from coterie.core.cohort import Cohort
from coterie.core.engine import Engine

Result = TypeVar("Result")

Admit = Callable[[Cohort, Any], str]
"""Given the cohort of all, new clients last, and the new roster: lets them in and says how, or raises ValueError."""


class Membership:
    """The clients of a run that are all in this process, from the first round to the last.

    Args:
        everyone: The cohort of all clients.
    """

    def __init__(self, everyone: Cohort) -> None:
        self.everyone = everyone

    @property
    def engine(self) -> Engine:
        """Carries out all exchanges."""
        return self.everyone.engine

    def wrapped(self, wrap: Callable[[Any], Engine]) -> Membership:
        """The same clients, reached through an engine around this one."""
        return Membership(Cohort(wrap(self.engine), self.everyone.ledger))

    def perform(self, work: Callable[[Cohort], Result], unit: int | None = None) -> Result:
        """Do a piece of work with all clients; if some fail, again from its beginning without them.

        Args:
            work: Is given the cohort.
            unit: Which piece it is: 0 for the start, t + 1 for round t. None for work that changes nothing.
        """
        return work(self.everyone)

    def renew(self, admit: Admit | None = None, unit: int = 0) -> bool:
        """At the beginning of a round: reach clients that are back, and let new ones in; whether anything changed.

        Args:
            admit: Takes new clients in; they wait where it is not given.
            unit: The last piece of work: what new clients keep counts as if they had kept it then, so that a second
                attempt at this round does not void it.
        """
        return False

    def restrict(self, clients: int) -> None:
        """Go back to the membership when there were so many clients, before others joined.

        Raises:
            ValueError: There never were.
        """
        raise ValueError(f"the run was made with {clients} clients, but there are {len(self.everyone)}")

    def roster(self) -> dict[str, Any] | None:
        """Who the clients are, as a table for JSON by which a resumed run knows them; None where they do not change."""
        return None
