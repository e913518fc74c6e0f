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
from coterie.core.step import Reply
from coterie.core.sums import Sums
from coterie.core.task import Task
from coterie.core.train import own_rows
from coterie.core.uplink import Uplink
from coterie.flower import checks
from coterie.flower.checks import Asked, Verb
from coterie.flower.enrolment import plain_task
from coterie.flower.grid import Grid, TooFew, brief, exchange
from coterie.flower.records import get_tree, put_tree
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
        other._unit, other._attempt, other._counted = unit, secrets.token_hex(8), dict(ledger.memory)
        return other

    def credit(self, sites: Iterable[int], ledger: Ledger) -> None:
        """Have what these sites' clients keep in this attempt count, unless the work as a whole comes to nothing."""
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
        online = set(self.grid.get_node_ids())
        return {s: "its node is not there" for s in sites if self.roster.nodes[s] not in online}

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
            return f"it did not answer within {self.deadline:g} s"
        return f"it failed: {message.error.reason}" if message.has_error() else ""

    def settle(self, faults: Mapping[int, str], clients: Tensor, ledger: Ledger) -> None:
        """Name the sites that are left out; where there are any, the work must be done without them.

        An exchange may be with a few sites only. If all of those fail, the others can still do the work.
        """
        at = self.by_site(clients)
        self.blame(faults, ledger)
        left, needed = self.present - len(faults), min(self.min_replies, len(self.roster.sites))
        if not at or (faults and left < needed):
            raise TooFew(f"flower: {left} of {self.present} nodes have answered, {self.min_replies} are needed")
        if faults:
            raise Absent(torch.cat([clients[at[s]] for s in sorted(faults)]))

    def blame(self, faults: Mapping[int, str], ledger: Ledger) -> None:
        """Name and count the sites that are left out."""
        for s, why in sorted(faults.items()):
            self.faults[name] = self.faults[name := self.roster.sites[s]] + 1
            ledger.left_out.append(name)
            ledger.messages.append(
                f"flower: site '{name}' is left out, for the {self.faults[name]}. time: {brief(why)}"
            )

    def _ask(self, verb: Verb, asking: Exchange) -> list[tuple[Tensor, dict[str, Any]]]:
        """Every site's positions in the exchange and its answer, in the order of the sites; or an exception."""
        at, ledger = self.by_site(asking.clients), asking.ledger
        self.settle(self.away(at), asking.clients, ledger)  # before anything is sent
        requests = {s: (self.roster.nodes[s], TYPE[verb], self.request(asking, own)) for s, own in at.items()}
        answers, faults = dict[int, Any](), dict[int, str]()
        for s, message in exchange(self.grid, requests, self.deadline).items():
            asked = Asked(verb, asking.slots, len(at[s]), asking.part)
            answers[s], faults[s] = self._read(message, asked, types_of(asking.step), ledger)
        believed = _believed(answers, faults, at)
        self.settle({s: why for s, why in faults.items() if why}, asking.clients, ledger)
        self.credit(believed, ledger)
        self.alone.update(believed if len(believed) == 1 < len(self.roster.sites) else ())
        return [(at[s], answers[s]) for s in believed]

    def _read(
        self, message: Message | None, asked: Asked, types: Mapping[str, type], ledger: Ledger
    ) -> tuple[Any, str]:
        """A node's answer, and what is wrong with it."""
        if message is None or message.has_error():
            return None, self.silence(message)
        try:
            answer = get_tree(message.content, "answer", types)
        except ValueError as error:
            return None, str(error)
        ledger.charge(0, nbytes(answer))
        return answer, checks.fault(answer, asked)


def _believed(answers: dict[int, Any], faults: dict[int, str], at: dict[int, Tensor]) -> list[int]:
    """The sites whose answers stand up to comparison with the others', in order; writes why the rest do not."""
    fine = [s for s in sorted(answers) if not faults[s]]
    for s, odd in zip(fine, checks.unlike([answers[s] for s in fine]), strict=True):
        faults[s] = "its answer is not shaped as the others' are" if odd else ""
    fine = [s for s in fine if not faults[s]]
    for s, odd in zip(fine, checks.absurd([answers[s] for s in fine], [len(at[s]) for s in fine]), strict=True):
        faults[s] = "its answer is out of all proportion to the others'" if odd else ""
    return [s for s in fine if not faults[s]]


def _in_order(parts: Sequence[tuple[Tensor, Any]]) -> Any:
    """What sites sent for each of their clients, as one tree in the clients' order."""
    order = torch.cat([at for at, _ in parts]).argsort()
    return tree_map(lambda *xs: torch.cat(xs)[order], *(tree for _, tree in parts))
