"""Clients spread over the nodes of a Flower federation, each of which may hold many.

An exchange is one message per node. Answers are added up in the order of the sites' names, so the result does not
depend on who is first.
"""

from __future__ import annotations

import copy
import json
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import torch
from flwr.app import ConfigRecord, Message, RecordDict
from torch import Tensor

from coterie.core.engine import Engine, Exchange, Ledger
from coterie.core.key import Key
from coterie.core.precision import Precision
from coterie.core.pytree import nbytes, tree_map
from coterie.core.step import Reply, derived
from coterie.core.sums import Sums
from coterie.core.task import Task
from coterie.core.train import Train, own_rows
from coterie.core.uplink import Uplink
from coterie.flower import checks, norms
from coterie.flower.backoff import Backoff, Silent
from coterie.flower.checks import Asked, Verb
from coterie.flower.compat import NO_ANSWER
from coterie.flower.enrolment import plain_task
from coterie.flower.grid import Grid, TooFew, brief, exchange
from coterie.flower.norms import Guard
from coterie.flower.records import get_tree, put_tree, size_of
from coterie.flower.roster import Roster
from coterie.flower.steps import describe_step, describe_uplink, types_of

OUTSIDE = 2**31  # later than every piece of work: an evaluation finds what clients kept last
TYPE = {"combine": "train.step", "gather": "query.step"}  # Flower's types of messages


class Absent(Exception):
    """Some sites have failed in an exchange: the work must be done again without their clients.

    Attributes:
        clients: Whose, as positions in the federation.
    """

    def __init__(self, clients: Tensor) -> None:
        super().__init__(f"{len(clients)} clients are absent")
        self.clients = clients


class FlowerEngine(Engine):
    """The clients of all nodes that have enrolled.

    Args:
        grid: Flower's.
        roster: Who is there; see `enrol`.
        task: What is learnt. It must have a plain description, for nodes build it for themselves.
        key: The run's.
        run: A name of the run, the same after a resume: nodes keep their clients' memories under it.
        min_replies: Nodes that must answer in every exchange; with fewer the run stops.
        deadline: Seconds that nodes have to answer.
        uplink: What is done to every reply on its node.
        precision: Of matrix products on the nodes.
    """

    name = "flower"
    remote = True

    def __init__(
        self,
        grid: Grid,
        roster: Roster,
        task: Task,
        key: Key,
        *,
        run: str,
        min_replies: int = 1,
        deadline: float = 600.0,
        uplink: Uplink | None = None,
        precision: Precision = "float32",
    ) -> None:
        super().__init__(roster.federation, task, key, torch.device("cpu"), precision)
        self.grid, self.roster = grid, roster
        self.run, self.min_replies, self.deadline = run, min_replies, deadline
        self.faults: Counter[str] = Counter()  # exchanges from which each site was left out
        self.alone = set[int]()  # sites whose answers in this piece of work could be compared with nobody's
        self.present = len(roster.sites)  # those that have not failed in this piece of work
        self.backoff = Backoff()
        self._task, self._uplink = plain_task(task), describe_uplink(uplink or Uplink())
        self._unit, self._attempt = OUTSIDE, secrets.token_hex(8)
        self._counted: dict[int, Any] | None = None  # each site's last attempt that counted when this one began

    def over(self, roster: Roster) -> Self:
        """The engine for the clients of another roster."""
        other = copy.copy(self)
        other.roster, other.federation, other.present = roster, roster.federation, len(roster.sites)
        return other

    def attempt(self, unit: int, ledger: Ledger) -> Self:
        """The engine in a new attempt at a piece of work: nodes forget what clients kept in earlier ones.

        Args:
            unit: 0 for the start, t + 1 for round t.
            ledger: Of the run, with the last attempt that counted at each site.
        """
        other = copy.copy(self)
        other.backoff.now = unit
        other._unit, other._attempt, other._counted = unit, secrets.token_hex(8), dict(ledger.memory)
        return other

    def credit(self, sites: Iterable[int], ledger: Ledger) -> None:
        """These sites have answered: what their clients keep in this attempt counts, if the work as a whole does."""
        self.backoff.forgive(self.roster.sites[s] for s in sites)
        if self._unit != OUTSIDE:
            ledger.memory.update(dict.fromkeys(sites, (self._unit, self._attempt)))

    def combine(self, exchange: Exchange) -> Sums:
        """Run the step on every client and add the nodes' sums up, in the order of their names."""
        found = self._ask("combine", exchange)
        update, weight = found[0][1]["update"], found[0][1]["weight"]
        for _, more in found[1:]:
            update = tree_map(torch.add, update, more["update"])
            weight = weight + more["weight"]
        return Sums(update, weight, _in_order([(at, answer["note"]) for at, answer in found]))

    def gather(self, exchange: Exchange) -> Reply:
        """Run the step on every client and return every reply, stacked in the clients' order."""
        return Reply(**_in_order(self._ask("gather", exchange)))

    def by_site(self, clients: Tensor) -> dict[int, Tensor]:
        """The positions in an exchange of each site's clients."""
        sites = self.roster.site[clients]
        return {int(s): (sites == s).nonzero().flatten() for s in sites.unique()}

    def parties(self, clients: Tensor) -> Tensor:
        """The site of each of these clients."""
        return self.roster.site[clients]

    def away(self, sites: Iterable[int]) -> dict[int, str]:
        """Which of these sites cannot be asked, and why."""
        online, names = set(self.grid.get_node_ids()), self.roster.sites
        away = {s: "its node is not there" for s in sites if self.roster.nodes[s] not in online}
        self.backoff.forgive(names[s] for s in away)
        resting = {s: at for s in sites if s not in away and (at := self.backoff.resting([names[s]]).get(names[s]))}
        if self.present - len(away) - len(resting) < self.needed:
            return away  # without them there would be too few
        return away | {s: f"it was silent, and is asked again in round {at}" for s, at in resting.items()}

    @property
    def needed(self) -> int:
        """How many sites must answer."""
        return min(self.min_replies, len(self.roster.sites))

    def request(self, exchange: Exchange, at: Tensor) -> RecordDict:
        """The message for a site with the clients at these positions, with only the rows of models that they need."""
        content, clients = RecordDict(), exchange.clients[at]
        site, message = int(self.roster.site[clients[0]]), exchange.message
        counted = exchange.ledger.memory if self._counted is None else self._counted
        if isinstance(exchange.rows, Tensor):
            needed, own = exchange.rows[at].unique(return_inverse=True)
            message = own_rows(message, needed)
            put_tree(content, "rows", own)
        put_tree(content, "message", message)
        content["step"] = ConfigRecord(
            {
                **describe_step(exchange.step),
                "task": self._task,
                "uplink": self._uplink,
                "clients": self.roster.place[clients].tolist(),
                "mark": self.roster.entries[site].mark,
                "slots": exchange.slots,
                "part": exchange.part,
                "when": json.dumps(exchange.when),
                "key": json.dumps(self.key.path),
                "precision": self.precision,
                "run": self.run,
                "unit": self._unit,
                "attempt": self._attempt,
                "after": json.dumps(counted.get(site)),
            }
        )
        if exchange.first is not None:
            content["first"] = ConfigRecord({**describe_step(exchange.first.step), "on": exchange.first.part})
        exchange.ledger.charge(nbytes(message), 0)
        return content

    def silence(self, message: Message | None) -> str:
        """Why there is no answer to read; "" where there is one."""
        if message is None:
            return Silent(f"it did not answer within {self.deadline:g} s")
        if not message.has_error():
            return ""
        why = f"it failed: {brief(str(message.error.reason))}"
        return Silent(why) if message.error.code in NO_ANSWER else why

    def settle(self, faults: Mapping[int, str], clients: Tensor, ledger: Ledger) -> None:
        """Name the sites that are left out; where there are any, the work must be done without them.

        An exchange may be with a few sites only. If all of those fail, the others can still do the work.
        """
        at = self.by_site(clients)
        self.blame(faults, ledger)
        left = self.present - len(faults)
        if not at or (faults and left < self.needed):
            raise TooFew(f"flower: {left} of {self.present} nodes have answered, {self.min_replies} are needed")
        if faults:
            raise Absent(torch.cat([clients[at[s]] for s in sorted(faults)]))

    def blame(self, faults: Mapping[int, str], ledger: Ledger) -> None:
        """Name and count the sites that are left out."""
        for s, why in sorted(faults.items()):
            self.faults[name] = self.faults[name := self.roster.sites[s]] + 1
            if isinstance(why, Silent):
                self.backoff.silent(name)
            ledger.left_out.append(name)
            ledger.messages.append(
                f"flower: site '{name}' is left out, for the {self.faults[name]}. time: {brief(why)}"
            )

    def _ask(self, verb: Verb, asking: Exchange) -> list[tuple[Tensor, dict[str, Any]]]:
        """Every site's positions in the exchange and its answer, in the order of the sites; or an exception."""
        at, ledger = self.by_site(asking.clients), asking.ledger
        self.settle(self.away(at), asking.clients, ledger)  # before anything is sent
        requests = {s: (self.roster.nodes[s], TYPE[verb], self.request(asking, own)) for s, own in at.items()}
        messages = exchange(self.grid, requests, self.deadline)
        asked = {s: self._asked(verb, asking, own) for s, own in at.items()}
        faults = {s: self.silence(message) for s, message in messages.items()}
        self.backoff.forgive(self.roster.sites[s] for s, why in faults.items() if not isinstance(why, Silent))
        faults |= _oversized(messages, asked, asking)
        answers = dict[int, Any]()
        for s, message in messages.items():
            if message is not None and not faults[s]:
                answers[s], faults[s] = self._read(message, asked[s], types_of(asking.step), ledger)
        believed = self._believed(answers, faults, asked, asking)
        self.settle({s: why for s, why in faults.items() if why}, asking.clients, ledger)
        self.credit(believed, ledger)
        self.alone.update(believed if len(believed) == 1 < len(self.roster.sites) else ())
        return [(at[s], answers[s]) for s in believed]

    def _asked(self, verb: Verb, asking: Exchange, at: Tensor) -> Asked:
        """What the site with the clients at these positions is asked for."""
        step, sizes = asking.step(self.task), self.sizes(asking)[at]
        uniform = derived(asking.step, self.task).weights == "uniform"
        worth = torch.ones(len(at)) if uniform else sizes.clamp(min=1)
        sums = (step.starts or 1) if isinstance(step, Train) else None
        by_epochs = getattr(getattr(asking.step, "__self__", None), "epochs", None)  # then steps are as many as rows
        steps = int(sizes.max()) if by_epochs else 1
        rows = asking.rows[at] if isinstance(asking.rows, Tensor) else None
        return Asked(verb, asking.slots, len(at), asking.part, worth, sums, rows, steps)

    def _read(self, message: Message, asked: Asked, types: Mapping[str, type], ledger: Ledger) -> tuple[Any, str]:
        """A node's answer, and what is wrong with it."""
        try:
            answer = get_tree(message.content, "answer", types)
        except ValueError as error:
            return None, str(error)
        ledger.charge(0, nbytes(answer))
        return answer, checks.fault(answer, asked)

    def _believed(
        self, answers: Mapping[int, Any], faults: dict[int, str], asked: Mapping[int, Asked], asking: Exchange
    ) -> list[int]:
        """The sites whose answers stand up to comparison with the others', in order; writes why the rest do not."""

        def fine() -> list[int]:
            return [s for s in sorted(answers) if not faults[s]]

        own = fine()
        for s, odd in zip(own, checks.unlike([answers[s] for s in own]), strict=True):
            faults[s] = "its answer is not shaped as the others' are" if odd else ""
        own = fine()
        for s, odd in zip(own, checks.absurd([answers[s] for s in own], [asked[s].clients for s in own]), strict=True):
            faults[s] = "its answer is out of all proportion to the others'" if odd else ""
        changes = {s: norms.change(answers[s], asking.message, asked[s]) for s in fine()}
        known = {s: c for s, c in changes.items() if c is not None}
        faults |= Guard(asking.ledger.usual, next(iter(asked.values())).verb).faults(known)
        return fine()


def _oversized(messages: Mapping[int, Message | None], asked: Mapping[int, Asked], asking: Exchange) -> dict[int, str]:
    """Which answers are too large to be opened."""
    found = {s: size_of(m.content) for s, m in messages.items() if m is not None and m.has_content()}
    return checks.oversized(found, asked, nbytes(asking.message))


def _in_order(parts: Sequence[tuple[Tensor, Any]]) -> Any:
    """What sites sent for each of their clients, as one tree in the clients' order."""
    order = torch.cat([at for at, _ in parts]).argsort()
    return tree_map(lambda *xs: torch.cat(xs)[order], *(tree for _, tree in parts))
