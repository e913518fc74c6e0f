"""Clients spread over the nodes of a Flower federation, each of which may hold many.

An exchange is one message per node. Answers are added up in the order of the sites' names, so the result does not
depend on who is first.
"""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import torch
from flwr.app import ConfigRecord, Message, RecordDict
from torch import Tensor

from coterie.client import ClientStep, Reply
from coterie.cohort import Absent, Admit, Cohort, Step, Sums
from coterie.flower import checks
from coterie.flower.checks import Asked, Verb
from coterie.flower.desk import Desk
from coterie.flower.enrolment import ask_sites, plain_task
from coterie.flower.grid import Grid, TooFew, brief, exchange
from coterie.flower.records import get_tree, put_tree
from coterie.flower.roster import Roster, Site
from coterie.key import Key
from coterie.precision import Precision
from coterie.task import Task
from coterie.tree import nbytes, take, tree_map

OUTSIDE = 2**31  # later than every piece of work: an evaluation finds what clients kept last
TYPE = {"combine": "train", "gather": "query"}  # Flower's categories of messages


class Language(NamedTuple):
    """How a step is put into words that nodes understand. It is passed in: an executor knows no algorithm.

    Attributes:
        describe: A step as a table of words.
        types: The NamedTuples of which its trees may be made.
    """

    describe: Callable[[Step], Mapping[str, str]]
    types: Callable[[Step], Mapping[str, type]]


class Flower(Cohort):
    """The clients of all nodes that have enrolled.

    Args:
        grid: Flower's.
        roster: Who is there; see `enrol`.
        task: What is learnt. It must have a plain description, for nodes build it for themselves.
        key: The run's.
        language: How steps are put into words.
        run: A name of the run, the same after a resume: nodes keep their clients' memories under it.
        min_replies: Nodes that must answer in every exchange; with fewer the run stops.
        deadline: Seconds that nodes have to answer.
        precision: Of matrix products on the nodes.
    """

    remote = True

    def __init__(
        self,
        grid: Grid,
        roster: Roster,
        task: Task,
        key: Key,
        language: Language,
        *,
        run: str,
        min_replies: int = 1,
        deadline: float = 600.0,
        precision: Precision = "float32",
    ) -> None:
        super().__init__(roster.federation, task, key, torch.device("cpu"), precision=precision)
        self.grid, self.roster, self.language = grid, roster, language
        self.run, self.min_replies, self.deadline = run, min_replies, deadline
        self.faults: Counter[str] = Counter()  # exchanges from which each site was left out
        self._task, self._desk = plain_task(task), Desk()
        self._unit, self._attempt = OUTSIDE, secrets.token_hex(8)
        self._counted: dict[int, Any] | None = None  # each site's last try that counted when this one began
        self._present = len(roster.sites)  # those that have not failed in this piece of work
        self._alone = set[int]()  # sites whose answers in this piece of work could be compared with nobody's

    def attempt(self, unit: int) -> Self:
        """The cohort at a new try at a piece of work: nodes forget what clients kept in earlier tries at it."""
        return self._but(_unit=unit, _attempt=secrets.token_hex(8), _counted=dict(self.ledger.memory))

    def credit(self, sites: Iterable[int]) -> None:
        """Have what these sites' clients keep in this try count, unless the work as a whole comes to nothing."""
        if self._unit != OUTSIDE:
            self.ledger.memory.update(dict.fromkeys(sites, (self._unit, self._attempt)))

    def without(self, clients: Tensor) -> Self:
        """The cohort less the clients of sites that have failed."""
        rest = super().without(clients)
        return rest._but(_present=len(self.roster.site[rest.clients].unique()))

    def do(self, work: Callable[[Self], Any]) -> Any:
        """Do a piece of work. What an algorithm cannot use is the fault of those who were believed unseen."""
        self._alone.clear()
        try:
            with self._whole():
                return work(self)
        except (LookupError, RuntimeError, TypeError, ValueError) as error:
            if not self._alone:
                raise
            why = f"its answer, which could be compared with nobody's, is of no use: {type(error).__name__}: {error}"
            self._settle(dict.fromkeys(self._alone, why), self.by_site())

    def renewed(self, admit: Admit | None = None) -> Self:
        """Ask nodes that are not in the roster who they are: known sites are back, others are new and come last."""
        online = set(self.grid.get_node_ids())
        strangers = self._desk.strangers(online, self.roster.nodes)
        known = self.roster.federation.groups is not None  # new sites tell their true groups if the others have
        told, faults = ask_sites(self.grid, self.task, strangers, self.deadline, groups=known)
        for node, why in faults.items():
            self._turn_away(node, f"node {node} cannot take part: {why}")
        for node, site in told.items():
            self._desk.claim(node, site)
        cohort = self
        for node, site in self._desk.claims():
            if site.name in cohort.roster.sites:
                cohort = cohort._returned(node, site, online)
            elif admit is not None:
                cohort = cohort._joined(node, site, admit)
        return cohort

    def first(self, clients: int) -> Self:
        """The cohort of all as it was when there were so many: those who joined later have to join again."""
        return self._over(self.roster.first(clients))

    def listed(self) -> dict[str, Any]:
        """The roster, and the name under which nodes keep what belongs to this run."""
        return {"run": self.run, **self.roster.to_plain()}

    def combine(self, step: Step, shared: Any, *, slots: int = 1, rows: Tensor | None = None) -> Sums:
        """Run `step` on every client and add the nodes' sums up, in the order of their names."""
        found = self._ask("combine", step, shared, slots, rows)
        update, weight = found[0][1]["update"], found[0][1]["weight"]
        for _, more in found[1:]:
            update = tree_map(torch.add, update, more["update"])
            weight = weight + more["weight"]
        return Sums(update, weight, self._in_order([(at, answer["note"]) for at, answer in found]))

    def gather(self, step: Step, shared: Any, *, slots: int = 1, rows: Tensor | None = None) -> Reply:
        """Run `step` on every client and return every reply, stacked in the cohort's order."""
        return Reply(**self._in_order(self._ask("gather", step, shared, slots, rows)))

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Of work that fails no site's part counts."""
        before = dict(self.ledger.memory)
        try:
            yield
        except BaseException:
            self.ledger.memory = before
            raise

    def _returned(self, node: int, site: Site, online: set[int]) -> Self:
        """The cohort with a known site on this node; without, if the site is on another or is not what it was."""
        old = self.roster.nodes[self.roster.sites.index(site.name)]
        if old in online:  # it may be an impostor, or Flower has not noticed yet that the old node is gone
            self._say(
                node, f"node {node} has to wait: it says that it is site '{site.name}', whose node {old} is there"
            )
            return self
        try:
            cohort = self._over(self.roster.returned(node, site))
        except ValueError as why:
            self._turn_away(node, f"site '{site.name}' is back, but cannot take part: {why}")
            return self
        self._desk.let_in(node)
        self.tell(f"flower: site '{site.name}' is back, as node {node}")
        return cohort

    def _joined(self, node: int, site: Site, admit: Admit) -> Self:
        """The cohort with a new site, if there is a place for it."""
        try:
            cohort = self._over(self.roster.joined(node, site))
            with self._whole():
                placed = admit(cohort)
        except Exception as error:  # whatever a stranger sends, the run goes on
            known = isinstance(error, ValueError | OSError)
            why = error if known else f"what it sent does not fit ({type(error).__name__}: {error})"
            self._turn_away(node, f"site '{site.name}' cannot join: {why}")
            return self
        self._desk.let_in(node)
        self.tell(f"flower: site '{site.name}' joined with {placed}")
        return cohort

    def _turn_away(self, node: int, message: str) -> None:
        self._desk.turn_away(node)
        self._say(node, message)

    def _say(self, node: int, message: str) -> None:
        """Have the log tell something about a node that is not in the roster, once."""
        if self._desk.is_news(node, message):
            self.tell(f"flower: {brief(message)}")

    def _over(self, roster: Roster) -> Self:
        """The cohort of all clients of a roster."""
        everybody = torch.arange(len(roster.federation))
        return self._but(roster=roster, federation=roster.federation, clients=everybody, _present=len(roster.sites))

    def _replies(self, step: ClientStep, name: str, shared: Any, rows: Tensor | None) -> Iterator[tuple[Tensor, Reply]]:
        raise NotImplementedError("flower: clients' steps run on the nodes")

    def _ask(
        self, verb: Verb, step: Step, shared: Any, slots: int, rows: Tensor | None
    ) -> list[tuple[Tensor, dict[str, Any]]]:
        """Every site's positions in the cohort and its answer, in the order of the sites; or an exception."""
        at = self.by_site()
        self._settle(self.away(at), at)  # before anything is sent
        kind = f"{TYPE[verb]}.{step.__name__}"
        requests = {
            s: (self.roster.nodes[s], kind, self.request(step, shared, slots, own, rows)) for s, own in at.items()
        }
        answers, faults = dict[int, Any](), dict[int, str]()
        for s, message in exchange(self.grid, requests, self.deadline).items():
            asked = Asked(verb, slots, len(at[s]), self.part)
            answers[s], faults[s] = self._read(message, asked, self.language.types(step))
        believed = self._believed(answers, faults, at)
        self._settle({s: why for s, why in faults.items() if why}, at)
        self.credit(believed)
        self._alone.update(believed if len(believed) == 1 < len(self.roster.sites) else ())
        return [(at[s], answers[s]) for s in believed]

    def by_site(self) -> dict[int, Tensor]:
        """The positions in the cohort of each site's clients."""
        sites = self.roster.site[self.clients]
        return {int(s): (sites == s).nonzero().flatten() for s in sites.unique()}

    def away(self, sites: Iterable[int]) -> dict[int, str]:
        """Which of these sites cannot be asked, and why."""
        online = set(self.grid.get_node_ids())
        return {s: "its node is not there" for s in sites if self.roster.nodes[s] not in online}

    def request(self, step: Step, shared: Any, slots: int, at: Tensor, rows: Tensor | None) -> RecordDict:
        """The message for a site with the clients at these positions: of `shared`, only the rows that they need."""
        content, site = RecordDict(), int(self.roster.site[self.clients[at[0]]])
        counted = self.ledger.memory if self._counted is None else self._counted
        if rows is not None:
            needed, own = rows[at].unique(return_inverse=True)
            shared = take(shared, needed)
            put_tree(content, "rows", own)
        put_tree(content, "shared", shared)
        content["step"] = ConfigRecord(
            {
                **self.language.describe(step),
                "task": self._task,
                "clients": self.roster.place[self.clients[at]].tolist(),
                "mark": self.roster.told[site].mark,
                "slots": slots,
                "part": self.part,
                "when": json.dumps(self.when),
                "key": json.dumps(self.key.path),
                "precision": self.precision,
                "run": self.run,
                "unit": self._unit,
                "attempt": self._attempt,
                "after": json.dumps(counted.get(site)),
            }
        )
        self._charge(nbytes(shared), 0)
        return content

    def _read(self, message: Message | None, asked: Asked, types: Mapping[str, type]) -> tuple[Any, str]:
        """A node's answer, and what is wrong with it."""
        if message is None or message.has_error():
            return None, self.silence(message)
        try:
            answer = get_tree(message.content, "answer", types)
        except ValueError as error:
            return None, str(error)
        self._charge(0, nbytes(answer))
        return answer, checks.fault(answer, asked)

    def silence(self, message: Message | None) -> str:
        """Why there is no answer to read; "" where there is one."""
        if message is None:
            return f"it did not answer within {self.deadline:g} s"
        return f"it failed: {message.error.reason}" if message.has_error() else ""

    def _believed(self, answers: dict[int, Any], faults: dict[int, str], at: dict[int, Tensor]) -> list[int]:
        """The sites whose answers stand up to comparison with the others', in order; says of the rest why not."""
        fine = [s for s in sorted(answers) if not faults[s]]
        for s, odd in zip(fine, checks.unlike([answers[s] for s in fine]), strict=True):
            faults[s] = "its answer is not shaped as the others' are" if odd else ""
        fine = [s for s in fine if not faults[s]]
        for s, odd in zip(fine, checks.absurd([answers[s] for s in fine], [len(at[s]) for s in fine]), strict=True):
            faults[s] = "its answer is out of all proportion to the others'" if odd else ""
        return [s for s in fine if not faults[s]]

    def _settle(self, faults: dict[int, str], at: dict[int, Tensor]) -> None:
        """Name the sites that are left out; where there are any, the work must be done without them.

        An exchange may be with a few sites only. If all of those fail, the others can still do the work.
        """
        self.blame(faults)
        left, needed = self._present - len(faults), min(self.min_replies, len(self.roster.sites))
        if not at or (faults and left < needed):
            raise TooFew(f"flower: {left} of {self._present} nodes have answered, {self.min_replies} are needed")
        if faults:
            raise Absent(torch.cat([self.clients[at[s]] for s in sorted(faults)]))

    def blame(self, faults: Mapping[int, str]) -> None:
        """Name and count the sites that are left out."""
        for s, why in sorted(faults.items()):
            self.faults[name] = self.faults[name := self.roster.sites[s]] + 1
            self.ledger.left_out.append(name)
            self.tell(f"flower: site '{name}' is left out, for the {self.faults[name]}. time: {brief(why)}")

    def _in_order(self, parts: Sequence[tuple[Tensor, Any]]) -> Any:
        """What sites sent for each of their clients, as one tree in the cohort's order."""
        order = torch.cat([at for at, _ in parts]).argsort()
        return tree_map(lambda *xs: torch.cat(xs)[order], *(tree for _, tree in parts))
