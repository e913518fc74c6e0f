"""The desk where nodes come that are not in the roster: sites that are back, sites that are new, and neither."""

from __future__ import annotations

from collections.abc import Collection

from coterie.flower.roster import Site

AGAIN = 10  # rounds after which a node that was turned away is asked again


class Desk:
    """What is known of nodes that are not in the roster. All cohorts of a run share it.

    Example:
        >>> desk = Desk()
        >>> desk.strangers({3, 5}, known=[5])
        [3]
        >>> desk.turn_away(3)
        >>> desk.strangers({3, 5}, known=[5])  # not in every round
        []
        >>> desk.strangers({5}, known=[5]), desk.strangers({3, 5}, known=[5])  # but once it has gone and is back
        ([], [3])
    """

    def __init__(self) -> None:
        self._claims: dict[int, Site] = {}  # who each node says it is, until it is in the roster or turned away
        self._rounds = 0
        self._away: dict[int, int] = {}  # the round in which a node was turned away
        self._logged: dict[int, set[str]] = {}  # what the log has about a node

    def strangers(self, online: Collection[int], known: Collection[int]) -> list[int]:
        """The nodes that are to be asked in this round who they are. Those that have gone are forgotten."""
        self._rounds += 1
        for table in (self._claims, self._away, self._logged):
            for node in table.keys() - online:
                del table[node]
        return sorted(n for n in set(online) - set(known) - self._claims.keys() if self._may_be_asked(n))

    def claim(self, node: int, site: Site) -> None:
        """A node has said who it is."""
        self._claims[node] = site

    def claims(self) -> list[tuple[int, Site]]:
        """The nodes that have said who they are, in the order of the sites' names."""
        return sorted(self._claims.items(), key=lambda each: (each[1].name, each[0]))

    def let_in(self, node: int) -> None:
        """A node is in the roster."""
        del self._claims[node]

    def turn_away(self, node: int) -> None:
        """A node cannot take part: it is asked again after some rounds, or once it has gone and is back."""
        self._claims.pop(node, None)
        self._away[node] = self._rounds

    def is_news(self, node: int, message: str) -> bool:
        """Whether the log does not have this yet about a node."""
        logged = self._logged.setdefault(node, set())
        new = message not in logged
        logged.add(message)
        return new

    def _may_be_asked(self, node: int) -> bool:
        return node not in self._away or self._rounds - self._away[node] >= AGAIN
