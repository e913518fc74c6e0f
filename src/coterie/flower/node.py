"""What a node does with a message: rebuild the step, run it on its own clients, and send back what was asked for."""

from __future__ import annotations

import dataclasses
import json
import math
import secrets
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, RecordDict

from coterie.core.cohort import Cohort
from coterie.core.engine import First, Ledger
from coterie.core.federation import Federation
from coterie.core.key import Key
from coterie.core.pytree import all_on, tree_map
from coterie.core.step import Reply, Secrecy, Step, derived
from coterie.core.task import Task
from coterie.engines import find_device, simulated
from coterie.flower import secure
from coterie.flower.data_file import load_federation
from coterie.flower.memory import Memory, Moment
from coterie.flower.policy import Policy
from coterie.flower.records import get_tree, put_tree
from coterie.flower.roster import Site, mark, named
from coterie.flower.secure import Seat
from coterie.flower.steps import rebuild_step, rebuild_uplink, types_of
from coterie.privacy.bounded import Bounded
from coterie.runs.config import build_task

LEAST_NOISE = 0.1  # standard deviation of the noise of a private step over the longest contribution of a client


class Node:
    """The clients of one site.

    Args:
        site: Its name.
        federation: Its clients and their rows.
        memory: The folder where clients keep what they remember; None if there is none.
        device: Where steps run: "auto", "cpu" or "cuda".
        policy: On what conditions it takes part in runs.
    """

    def __init__(
        self,
        site: str,
        federation: Federation,
        memory: Path | None = None,
        device: str = "cpu",
        policy: Policy | None = None,
    ) -> None:
        self.policy = policy or Policy()
        self.site, self.federation = site, named(site, federation)
        self.memory = Memory(memory, site)
        self.device = find_device(device)
        self._latest: Cohort | None = None  # which keeps the features of frozen layers, if there are any

    def enrol(self, content: RecordDict) -> RecordDict:
        """Say who the clients are, and how many rows each has."""
        fields = _words(content, "task")
        self.federation.check(_task(str(fields["task"])))
        tell = fields.get("groups", True) and not self.policy.secure_only
        known = self.federation if tell else dataclasses.replace(self.federation, groups=None)
        site = Site.of(self.site, known)
        return RecordDict({"site": ConfigRecord({"site": json.dumps(site.to_plain())})})

    def respond(self, kind: str, content: RecordDict) -> RecordDict:
        """The answer to a message of this type, such as "train.step"."""
        category, _, action = kind.partition(".")
        return self.enrol(content) if action == "enrol" else self.answer(category, content)

    def answer(self, category: str, content: RecordDict) -> RecordDict:
        """Run a step on the clients that are asked for: sums for "train", every reply for "query".

        A message of a secure sum is answered with nothing but what that says, whatever its category.
        """
        if secure.SECURE in content:
            fields = _words(content, secure.SECURE)
            return secure.answer(
                self.memory, self.policy, fields, content, lambda seat: self._secret_step(content, seat)
            )
        self.policy.check_open()
        reply = RecordDict()
        put_tree(reply, "answer", self._step(category, content))
        return reply

    def _secret_step(self, content: RecordDict, seat: Seat) -> tuple[Reply, Mapping[str, Secrecy]]:
        """The replies of the clients that take part, which stay here, and what the server may get of their notes.

        Who takes part is drawn from the system, not from the run's key, which the server knows. If nobody does, one
        client does its step for the form of its reply, and keeps nothing of it.
        """
        fields = _words(content, "step")
        step = rebuild_step(fields)
        self._check_secret(step, fields, seat)
        self.policy.check_asked(len(fields["clients"]), len(self.federation), picked="rows" in content)
        secrecy = derived(step, _task(str(fields["task"]))).secrecy
        some = [at for at, _ in enumerate(fields["clients"]) if secrets.randbelow(2**53) < seat.share * 2.0**53]
        if some:
            return Reply(**self._step("query", content, some)), secrecy
        return tree_map(lambda x: x[:0], Reply(**self._step("query", content, [0], keep=False))), secrecy

    def _check_secret(self, step: Step, fields: Mapping[str, Any], seat: Seat) -> None:
        """Refuse a step by whose sums or errors a server could tell more than by those of the session it invited to."""
        if int(fields["slots"]) != seat.slots:
            raise ValueError(f"secure sum: a step with {fields['slots']} sums, in a session of {seat.slots}")
        owner = getattr(step, "__self__", None)
        if isinstance(owner, Bounded) and owner.noise:
            noise = owner.noise[0] * math.sqrt(seat.clients) / owner.clip
            if noise < LEAST_NOISE:  # every client is in every cluster then, so that `min_members` protects nobody
                raise ValueError(f"secure sum: the noise of a private step is {noise:.2g}, {LEAST_NOISE} at least")

    def _step(
        self, category: str, content: RecordDict, some: list[int] | None = None, *, keep: bool = True
    ) -> dict[str, Any]:
        """What clients do in a step: those that the message names, or of those the ones at some positions."""
        fields = _words(content, "step")
        if fields.get("mark") != mark(self.federation.ids or ()):
            raise ValueError(f"site '{self.site}' has other clients now than when it enrolled")
        step = rebuild_step(fields)
        first = _first(_words(content, "first")) if "first" in content else None
        types = types_of(step) | ({} if first is None else types_of(first.step))
        message = get_tree(content, "message", types)
        rows = get_tree(content, "rows", {}) if "rows" in content else None
        moment = Moment.of(fields)
        cohort = self._cohort(fields)
        if some is not None and len(some) < len(cohort):
            cohort, rows = cohort.only(some), None if rows is None else rows[some]
        self._recall(cohort.ledger, moment, types)
        if "choose" in content:
            rows = _chosen(cohort, _words(content, "choose"), message, int(fields["slots"]))
        memory, chunks = dict(cohort.ledger.memory), len(cohort.ledger.chunks)
        how = {"slots": int(fields["slots"]), "rows": rows, "first": first}
        answer = _run(category, cohort, step, message, **how)
        if keep and any(kept is not memory.get(i) for i, kept in cohort.ledger.memory.items()):
            self.memory.save(moment, {self.federation.name(i): kept for i, kept in cohort.ledger.memory.items()})
        if len(cohort.ledger.chunks) > chunks:
            self.memory.save_chunks(moment.run, cohort.ledger.chunks)
        return answer

    def _recall(self, ledger: Ledger, moment: Moment, types: dict[str, type]) -> None:
        """Have clients remember what they kept, whatever their order was then."""
        before = all_on(self.device, self.memory.load(moment, types))
        names = {i: self.federation.name(i) for i in range(len(self.federation))} if before else {}
        ledger.memory = {i: before[name] for i, name in names.items() if name in before}
        ledger.chunks = self.memory.load_chunks(moment.run)

    def _cohort(self, fields: dict[str, Any]) -> Cohort:
        """The clients that are asked for, at the moment of the server: their draws are the simulator's."""
        key = Key(tuple(int(i) for i in json.loads(str(fields["key"]))))
        when = [int(i) for i in json.loads(str(fields["when"]))]
        uplink, precision = rebuild_uplink(str(fields.get("uplink", "[]"))), str(fields["precision"])
        task = _task(str(fields["task"]))
        cohort = simulated(self.federation, task, key, device=self.device, uplink=uplink, precision=precision)
        self._latest = cohort
        some = torch.tensor([int(i) for i in fields["clients"]])
        if not len(some) or int(some.min()) < 0 or int(some.max()) >= len(self.federation):
            raise ValueError(f"site '{self.site}' has {len(self.federation)} clients, others were asked for")
        if len(some.unique()) < len(some):  # in a sum it would count, and weigh, as several
            raise ValueError(f"site '{self.site}': a client was asked for twice")
        everybody = torch.equal(some, torch.arange(len(self.federation)))
        cohort = cohort.fold(*when).on("test" if fields["part"] == "test" else "train")
        return cohort if everybody else cohort.only(some)


def node_of(context: Context, file: Path) -> Node:
    """The node that its node config and the app's data.py tell of."""
    config = context.node_config
    site = str(config.get("site", config.get("partition-id", context.node_id)))
    memory = Path(str(config["memory"])) if "memory" in config else None
    policy = Policy.of(config)
    return Node(site, load_federation(file, context), memory, str(config.get("device", "cpu")), policy)


def _run(category: str, cohort: Cohort, step: Step, message: Any, **how: Any) -> dict[str, Any]:
    if category == "train":
        sums = cohort.combine(step, message, **how)
        return {"update": sums.update, "weight": sums.weight, "note": sums.note}
    reply = cohort.gather(step, message, **how)
    return {"update": reply.update, "weight": reply.weight, "slot": reply.slot, "note": reply.note}


def _chosen(cohort: Cohort, fields: dict[str, Any], message: Any, slots: int) -> torch.Tensor:
    """The row of what was sent that every client takes, as it finds on its own."""
    return cohort.on(_part(fields)).gather(rebuild_step(fields), message.theta, slots=slots).slot


def _first(fields: dict[str, Any]) -> First:
    """What clients do before their step."""
    return First(rebuild_step(fields), _part(fields))


def _part(fields: dict[str, Any]) -> str:
    return "test" if fields["on"] == "test" else "train"


def _words(content: RecordDict, name: str) -> dict[str, Any]:
    record = content.get(name)
    if not isinstance(record, ConfigRecord):
        raise ValueError(f"the message has no '{name}'")
    return dict(record)


@lru_cache(maxsize=8)
def _task(plain: str) -> Task:
    return build_task(json.loads(plain))
