"""Who takes part on Flower: sites fail, come back, and join while a run goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from coterie.core.cohort import Cohort
from coterie.core.engine import Engine, Ledger
from coterie.core.membership import Admit, Membership
from coterie.flower.desk import Desk
from coterie.flower.engine import Absent, FlowerEngine
from coterie.flower.enrolment import ask_sites
from coterie.flower.grid import brief
from coterie.flower.roster import Roster, Site

Result = TypeVar("Result")
Wrap = Callable[[FlowerEngine], Engine]


class FlowerMembership(Membership):
    """The sites of a roster, which grows at its end.

    Some methods exchange several times in a round, and half of a round with a client and half without would be neither:
    so where a site fails, the work is done again from its beginning without its clients.

    Args:
        engine: Reaches the nodes.
        wrap: Puts another engine around it, such as a secure sum's.
    """

    def __init__(self, engine: FlowerEngine, wrap: Wrap = lambda engine: engine) -> None:
        self.nodes, self._wrap, self._ledger, self._desk = engine, wrap, Ledger(), Desk()

    @property
    def everyone(self) -> Cohort:
        """The cohort of all clients."""
        return self._cohort(self.nodes)

    def wrapped(self, wrap: Callable[[Any], Engine]) -> FlowerMembership:
        """The same clients, reached through an engine around this one."""
        return FlowerMembership(self.nodes, lambda nodes: wrap(self._wrap(nodes)))

    def perform(self, work: Callable[[Cohort], Result], unit: int | None = None) -> Result:
        """Do a piece of work with all clients; where sites fail, again from its beginning without them."""
        absent = self.everyone.clients[:0]
        while True:
            engine = self.nodes if unit is None else self.nodes.attempt(unit, self._ledger)
            cohort = self._cohort(engine).without(absent)
            engine.present = len(engine.roster.site[cohort.clients].unique())
            try:
                return self._attempted(work, cohort, engine)
            except Absent as gone:
                absent = absent.new_tensor([*absent.tolist(), *gone.clients.tolist()])
            finally:
                self.nodes.present = len(self.nodes.roster.sites)

    def renew(self, admit: Admit | None = None, unit: int = 0) -> bool:
        """Ask nodes that are not in the roster who they are: known sites are back, others are new and come last."""
        before, online = self.nodes.roster, set(self.nodes.grid.get_node_ids())
        strangers = self._desk.strangers(online, before.nodes)
        known = before.federation.groups is not None  # new sites tell their true groups if the others have
        enrolled, faults = ask_sites(self.nodes.grid, self.nodes.task, strangers, self.nodes.deadline, groups=known)
        for node, why in faults.items():
            self._turn_away(node, f"node {node} cannot take part: {why}")
        for node, site in enrolled.items():
            self._desk.claim(node, site)
        for node, site in self._desk.claims():
            if site.name in self.nodes.roster.sites:
                self._return(node, site, online)
            elif admit is not None:
                self._join(node, site, admit, unit)
        return self.nodes.roster is not before

    def restrict(self, clients: int) -> None:
        """Go back to when there were so many clients: those who joined later have to join again."""
        self.nodes = self.nodes.over(self.nodes.roster.first(clients))

    def roster(self) -> dict[str, Any]:
        """The roster, and the name under which nodes keep what belongs to this run."""
        return self._listed(self.nodes.roster)

    def _listed(self, roster: Roster) -> dict[str, Any]:
        return {"run": self.nodes.run, **roster.to_plain()}

    def _cohort(self, engine: FlowerEngine) -> Cohort:
        return Cohort(self._wrap(engine), self._ledger)

    def _attempted(self, work: Callable[[Cohort], Result], cohort: Cohort, engine: FlowerEngine) -> Result:
        """One attempt. What a method cannot use is the fault of sites whose answers nobody could check."""
        engine.alone.clear()
        try:
            with self._whole():
                return work(cohort)
        except (LookupError, RuntimeError, TypeError, ValueError) as error:
            if not engine.alone:
                raise
            why = f"its answer, which could be compared with nobody's, is of no use: {type(error).__name__}: {error}"
            engine.settle(dict.fromkeys(engine.alone, why), cohort.clients, self._ledger)
            raise  # not reached: `settle` raises where there is a fault

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Of work that fails no site's part counts."""
        before = dict(self._ledger.memory)
        try:
            yield
        except BaseException:
            self._ledger.memory = before
            raise

    def _return(self, node: int, site: Site, online: set[int]) -> None:
        """Reach a known site on this node, unless the site is on another or is not what it was."""
        roster = self.nodes.roster
        old = roster.nodes[roster.sites.index(site.name)]
        if old in online:  # it may be an impostor, or Flower has not noticed yet that the old node is gone
            self._log(
                node, f"node {node} has to wait: it says that it is site '{site.name}', whose node {old} is there"
            )
            return
        try:
            self.nodes = self.nodes.over(roster.returned(node, site))
        except ValueError as why:
            self._turn_away(node, f"site '{site.name}' is back, but cannot take part: {why}")
            return
        self._desk.let_in(node)
        self._ledger.messages.append(f"flower: site '{site.name}' is back, as node {node}")

    def _join(self, node: int, site: Site, admit: Admit, unit: int) -> None:
        """Let a new site in, if there is a place for it."""
        try:
            wider = self.nodes.over(self.nodes.roster.joined(node, site))
            with self._whole():
                placed = admit(self._cohort(wider.attempt(unit, self._ledger)), self._listed(wider.roster))
        except Exception as error:  # whatever a stranger sends, the run goes on
            known = isinstance(error, ValueError | OSError)
            why = error if known else f"what it sent does not fit ({type(error).__name__}: {error})"
            self._turn_away(node, f"site '{site.name}' cannot join: {why}")
            return
        self.nodes = wider
        self._desk.let_in(node)
        self._ledger.messages.append(f"flower: site '{site.name}' joined with {placed}")

    def _turn_away(self, node: int, message: str) -> None:
        self._desk.turn_away(node)
        self._log(node, message)

    def _log(self, node: int, message: str) -> None:
        """Have the log tell something about a node that is not in the roster, once."""
        if self._desk.is_news(node, message):
            self._ledger.messages.append(f"flower: {brief(message)}")
