"""Sites that did not answer in time. To wait for one costs everybody the deadline, so it is asked ever less often."""

from __future__ import annotations

from collections.abc import Iterable

LONGEST = 64  # rounds between two tries at most


class Silent(str):
    """Why there is no answer: none came in time."""

    __slots__ = ()


class Backoff:
    """Which sites rest, and until when. All cohorts of a run share it.

    A site that was silent is asked again 1 round later, then 2, 4, … rounds, until it answers.

    Example:
        >>> backoff = Backoff()
        >>> for backoff.now in range(7):
        ...     print(backoff.now, backoff.resting(["a"]))
        ...     backoff.silent("a") if not backoff.resting(["a"]) else None
        0 {}
        1 {}
        2 {'a': 3}
        3 {}
        4 {'a': 7}
        5 {'a': 7}
        6 {'a': 7}
    """

    def __init__(self) -> None:
        self.now = 0  # the piece of work: 0 for the start, t + 1 for round t
        self._times: dict[str, int] = {}  # how often each site was silent, one time after the other
        self._due: dict[str, int] = {}  # when it is asked again

    def silent(self, site: str) -> None:
        """A site has not answered in time."""
        self._times[site] = self._times.get(site, 0) + 1
        self._due[site] = self.now + min(2 ** (self._times[site] - 1), LONGEST)

    def forgive(self, sites: Iterable[str]) -> None:
        """Sites have answered, or their nodes have gone and may be back."""
        for site in sites:
            self._times.pop(site, None)
            self._due.pop(site, None)

    def resting(self, sites: Iterable[str]) -> dict[str, int]:
        """Which of these sites are not asked now, and the piece of work in which they are."""
        return {s: self._due[s] for s in sites if self._due.get(s, 0) > self.now}
