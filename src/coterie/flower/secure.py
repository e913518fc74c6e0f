"""A node's side of a secure sum: it is one party, speaks for all of its clients, and keeps its secrets on its disk.

A node has its clients' rows, so nothing need be hidden from it; masks are between nodes and the server. Every message
may start a new process: what a node must remember of a session is in a file until the next message.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import RecordDict
from torch import Tensor

from coterie.core.pytree import take, tree_map
from coterie.core.step import Reply, Secrecy
from coterie.flower.memory import Memory
from coterie.flower.policy import Policy, identity_of
from coterie.flower.records import get_tree, put_tree
from coterie.secure.client import Client
from coterie.secure.engine import Code
from coterie.secure.masks import Identity
from coterie.secure.messages import EXCHANGES, Count, Payload, Refused, Sheet, Terms

SECURE = "secure"  # the record that makes a message one of a session
Work = Callable[["Seat"], tuple[Reply, Mapping[str, Secrecy]]]
FORM = ("update", "weight", "slot", "note")
LEAST_CLIP = 2.0**10
LONGEST = 86400.0  # seconds of a deadline that a server may ask for
OWN = ("clients", "mark", "after")  # fields of a step that differ from node to node

log = logging.getLogger("coterie")


def answer(memory: Memory, policy: Policy, fields: Mapping[str, Any], content: RecordDict, work: Work) -> RecordDict:
    """Answer one exchange of a session.

    Args:
        memory: Where the node keeps things.
        policy: On what conditions it takes part.
        fields: The fields of the message about the session.
        content: All of the message.
        work: Runs the step that the message names on those of the node's clients that take part in the session; needed
            in one exchange only.

    Raises:
        ValueError: It is not this exchange's turn, the terms protect too little, or what is asked would open more than
            it may.
    """
    run, exchange = str(fields["run"]), str(fields["exchange"])
    memory.drop_stale_sessions(time.time(), but=str(fields["session"]))
    who = Known(identity_of(memory), policy.trusted())
    seat = _invited(fields, policy, who) if exchange == EXCHANGES[0] else _seat(memory, fields, who)
    reply = RecordDict()
    try:
        put_payload(reply, _answer(seat, content, work, reply))
    except Refused as error:
        log.warning(str(error))  # here too: whoever runs the node should know
        raise
    if exchange != EXCHANGES[-1]:
        following = EXCHANGES[EXCHANGES.index(exchange) + 1]
        memory.save_session(run, seat._replace(exchange=following).to_plain())
    return reply


def put_payload(content: RecordDict, payload: Mapping[int, bytes]) -> None:
    """Add the parts of a payload, which have one length, to a message.

    Example:
        >>> content = RecordDict()
        >>> put_payload(content, {3: b"key", 0: b"yek"})
        >>> get_payload(content)
        {3: b'key', 0: b'yek'}
    """
    size = len(next(iter(payload.values()), b""))
    rows = np.frombuffer(bytearray().join(payload.values()), np.uint8).reshape(len(payload), size)
    about = torch.tensor(list(payload), dtype=torch.long)
    put_tree(content, "payload", {"about": about, "bytes": torch.from_numpy(rows)})


def get_payload(content: RecordDict) -> Payload:
    """The payload that `put_payload` added.

    Raises:
        ValueError: It is not there, or is not what `put_payload` writes.
    """
    parts = get_tree(content, "payload", {})
    if not isinstance(parts, dict) or parts.keys() != {"about", "bytes"}:
        raise ValueError("a payload has not the parts that it should have")
    about, rows = whole_numbers(parts["about"]), parts["bytes"]
    if not isinstance(rows, Tensor) or rows.dtype != torch.uint8 or rows.dim() != 2 or len(rows) != len(about):
        raise ValueError("the bytes of a payload are of the wrong kind")
    if len(set(about)) < len(about):
        raise ValueError("a payload is about one party twice")
    return {i: row.numpy().tobytes() for i, row in zip(about, rows, strict=True)}


def whole_numbers(x: Any) -> list[int]:
    """A list of numbers that are not negative, as it arrives."""
    if not isinstance(x, Tensor) or x.dtype != torch.long or x.dim() != 1 or bool((x < 0).any()):
        raise ValueError("whole numbers of at least 0 were to be sent")
    return x.tolist()


class Known(NamedTuple):
    """Who a node is to the others, and whom it knows; None where it takes whomever the server names."""

    identity: Identity
    trusted: frozenset[bytes] | None


class Seat(NamedTuple):
    """Where a node stands in a session.

    Attributes:
        session: Which.
        exchange: The one that is next. Each is answered once: a mask that hides two sheets hides neither.
        client: The party that the node is.
        step: What its clients are to do, for messages.
        slots: How many sums there are.
        clip: The largest number that a client may send.
        clients: How many of them are asked, on all nodes together.
        share: How likely each of them takes part.
        until: When the session is over, by the node's clock in seconds, if the server is not heard of again.
    """

    session: str
    exchange: str
    client: Client
    step: str
    slots: int
    clip: float
    clients: int
    share: float
    until: float

    def to_plain(self) -> dict[str, Any]:
        """The same for JSON. It is secret."""
        return {**self._asdict(), "client": self.client.to_plain()}

    @classmethod
    def from_plain(cls, plain: dict[str, Any], who: Known) -> Seat:
        """The seat that `to_plain` described."""
        return cls(**{**plain, "client": Client.from_plain(plain["client"], *who)})


def _invited(fields: Mapping[str, Any], policy: Policy, who: Known) -> Seat:
    """A new session. Its secrets come from the system, not from the run's key, which the server knows."""
    numbers = {name: int(fields[name]) for name in ("invited", "needed", "min_members", "slots")}
    # With another scale or share than the others' a node's numbers would stand out of the sum.
    alike = {"step": str(fields["step"]), **{name: float(fields[name]) for name in ("clip", "clients", "share")}}
    terms = Terms(**numbers, who="nodes", about=json.dumps(alike))
    if not terms.invited < 2 * terms.needed <= 2 * terms.invited or terms.min_members < 2 or terms.slots < 1:
        raise ValueError(
            f"secure sum: more than half of the nodes must be needed and a cluster of one may not be opened, "
            f"got needed = {terms.needed} of {terms.invited} and min_members = {terms.min_members}"
        )
    policy.check_terms(terms, clients=int(fields["clients"]), share=float(fields["share"]))
    if not float(fields["clip"]) >= LEAST_CLIP:  # whether a client's numbers are above it can be seen
        raise ValueError(f"secure sum: clip must be at least {LEAST_CLIP:g} on real nodes, got {fields['clip']}")
    if 3 * terms.needed <= 2 * terms.invited:
        log.info(
            f"secure sum: {terms.needed} of {terms.invited} nodes are needed; against a server that lies together with "
            "other nodes it takes more than two thirds"
        )
    return Seat(
        session=str(fields["session"]),
        exchange=EXCHANGES[0],
        client=Client(int(fields["me"]), terms, identity=who.identity, trusted=who.trusted),
        step=str(fields["step"]),
        slots=terms.slots,
        clip=float(fields["clip"]),
        clients=int(fields["clients"]),
        share=float(fields["share"]),
        until=time.time() + len(EXCHANGES) * min(float(fields["deadline"]), LONGEST),
    )


def _seat(memory: Memory, fields: Mapping[str, Any], who: Known) -> Seat:
    """Where the node stands in a session; it has to be kept anew, for what goes wrong from here on ends it."""
    plain = memory.load_session(str(fields["run"]))
    if plain is None or plain["session"] != fields["session"]:
        raise ValueError(f"site '{memory.site}' does not take part in this secure sum, or no longer")
    if plain["exchange"] != fields["exchange"]:
        raise ValueError(f"secure sum: the next exchange is '{plain['exchange']}', not '{fields['exchange']}'")
    if memory.take_session(str(fields["run"])) != plain:  # another process, which answers another message, was faster
        raise ValueError(f"site '{memory.site}' does not take part in this secure sum, or no longer")
    return Seat.from_plain(plain, who)


def _answer(seat: Seat, content: RecordDict, work: Work, reply: RecordDict) -> Payload:
    client = seat.client
    if seat.exchange == "keys":
        return client.keys()
    if seat.exchange == "shares":
        return client.shares(get_payload(content))
    if seat.exchange == "sheets":
        sealed, (found, secrecy) = get_payload(content), work(seat)
        # The reply of nobody: how replies are formed, from which the server knows how to read the sums.
        put_tree(reply, "form", {name: tree_map(lambda x: x[:0], getattr(found, name)) for name in FORM})
        return client.sheet(sealed, _sheet(seat, found, secrecy), sent_alike(content))
    if seat.exchange == "lists":
        return client.sign(whole_numbers(get_tree(content, "numbers", {})))
    told = get_payload(content)
    if seat.exchange == "counts":
        return client.counts(told)
    return client.sums([Count.from_bytes(told[j]) for j in sorted(told)])


def sent_alike(content: RecordDict) -> bytes:
    """A digest of what all nodes are sent alike: the step, and the models unless clients are sent single ones.

    Args:
        content: Of the message that asks for sheets.
    """
    digest = hashlib.sha256()
    for name in ("step", "choose", "first"):
        fields: Any = content.get(name, {})
        digest.update(json.dumps([name, *sorted((key, str(fields[key])) for key in fields if key not in OWN)]).encode())
    if "rows" not in content:
        arrays: Any = content.get("message", {})
        digest.update(str(dict(content.get("message.tree", {}))).encode())
        for name in sorted(arrays):
            digest.update(json.dumps([name, arrays[name].dtype, list(arrays[name].shape)]).encode() + arrays[name].data)
    return digest.digest()


def _sheet(seat: Seat, found: Reply, secrecy: Mapping[str, Secrecy]) -> Sheet:
    """The sum of the sheets of those of the node's clients that take part."""
    code = Code.of(seat.clip, seat.clients, found, seat.slots, seat.step, secrecy)
    try:
        sheets = [code.sheet(take(found, row), f"client {row}") for row in range(len(found.slot))]
    except ValueError as error:
        log.warning(str(error))  # here, for it says which client and how much
        raise ValueError(
            f"secure sum: what a client sends is not finite or above clip = {seat.clip:g}; its node's log says more"
        ) from None
    nothing = code.nothing()
    return Sheet(sum((s.head for s in sheets), nothing.head), sum((s.body for s in sheets), nothing.body))
