"""The secure sum on the nodes of a Flower federation, each of which is one party and speaks for all of its clients.

A session is six messages per node. A node that fails on the way is not asked again until the next session, and the
sums are those of the others: nothing is done again.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

import torch
from flwr.app import ConfigRecord, RecordDict
from torch import Tensor

from coterie.core.engine import Engine, Exchange, OwnChoice
from coterie.core.step import Reply, Secrecy, derived, step_name
from coterie.core.sums import Sums
from coterie.flower import checks
from coterie.flower.checks import Asked
from coterie.flower.engine import TYPE, FlowerEngine
from coterie.flower.grid import exchange
from coterie.flower.records import get_tree, put_tree
from coterie.flower.secure import SECURE, get_payload, put_payload, sent_alike
from coterie.flower.steps import describe_step, types_of
from coterie.secure import SecureSum
from coterie.secure.client import KEYS
from coterie.secure.engine import MOST, Code, Secure, Witness
from coterie.secure.masks import SECRET, SIGNATURE, TAG, usable
from coterie.secure.messages import NUMBER, Opened, Payload, Terms, TooFewLeft
from coterie.secure.server import Server
from coterie.secure.shamir import SHARE

LEAST = 2  # nodes: of one alone, sums and counts say where its clients are

Fits = Callable[[int, Payload], bool]  # whether a payload is what a site was asked for


class SecureFlower(Secure):
    """The clients of all nodes, in sessions of the secure sum.

    Args:
        inner: The same clients in the open.
        settings: Of the secure sum; `threshold` is the share of nodes, `min_members` and `clip` are about clients.
        witness: Is given the transcript of every session, which is all that nodes have said in it.
    """

    sums_only = True

    def __init__(self, inner: FlowerEngine, settings: SecureSum, witness: Witness = lambda transcript: None) -> None:
        super().__init__(inner, settings, witness=witness)
        self._nodes = inner

    def in_the_open(self) -> Engine:
        """The same engine: on real nodes every exchange is a real one, and stays secret."""
        return self

    def invite(self, numbers: Tensor, when: tuple[int, ...], fraction: float) -> tuple[Tensor, float]:
        """Everybody, to decide in secret: it is nodes that a session can hold only so many of."""
        if not self._settings.hide_sample:
            return super().invite(numbers, when, fraction)
        return torch.arange(len(numbers)), fraction

    def combine(self, exchange: Exchange) -> Sums:
        """Run the step on every client and add the weighted updates up by slot, in one session of the secure sum."""
        session = Session(self._nodes, self._settings, self._terms(exchange), exchange)
        session.agree()
        code = session.collect()
        opened = session.open(code)
        self._nodes.credit(opened.clients, exchange.ledger)
        here = torch.cat([exchange.clients[session.at[s]] for s in opened.clients])  # whom the nodes have spoken for
        opened = opened._replace(clients=here.tolist())
        self._account(exchange, session.server.transcript, 0, opened)
        return code.sums(opened, len(exchange.clients))

    def least(self, exchange: Exchange) -> int:
        """Return how many clients' replies a sum holds at least: those of the smallest nodes that must answer."""
        sizes = sorted(len(own) for own in self._nodes.by_site(exchange.clients).values())
        return sum(sizes[: self._terms(exchange).needed])

    def _terms(self, exchange: Exchange) -> Terms:
        nodes, clients, wanted = len(self._nodes.by_site(exchange.clients)), len(exchange.clients), self._settings
        if nodes < LEAST or clients < wanted.min_members:
            raise ValueError(
                f"secure sum: at least {LEAST} nodes and {wanted.min_members} clients must take part, "
                f"got {nodes} and {clients}"
            )
        if nodes > MOST:
            raise ValueError(f"secure sum: at most {MOST} nodes can take part at once, got {nodes}; set fraction lower")
        needed = max(math.floor(wanted.threshold * nodes) + 1, min(self._nodes.min_replies, nodes))
        return Terms(nodes, needed, wanted.min_members, exchange.slots, who="nodes")


class Session:
    """The server's messages in one session, and what nodes say to them.

    Args:
        nodes: Where the clients are.
        settings: Of the secure sum.
        terms: What all parties know.
        exchange: What clients are to do.
    """

    def __init__(self, nodes: FlowerEngine, settings: SecureSum, terms: Terms, exchange: Exchange) -> None:
        self.nodes, self.exchange, self.terms, self.clip = nodes, exchange, terms, settings.clip
        self.at = nodes.by_site(exchange.clients)
        names = {s: f"site '{nodes.roster.sites[s]}'" for s in self.at}
        self.server = Server(terms, {s: len(own) for s, own in self.at.items()}, names)
        self._words: dict[str, Any] = {"run": nodes.run, "session": secrets.token_hex(16)}
        self._faults: dict[int, str] = {}

    def agree(self) -> None:
        """Exchanges 0 and 1: nodes learn each other's public keys, and share their secrets."""
        server, away = self.server, self.nodes.away(self.at)
        self._blame(away)
        found = self._ask("keys", {s: self._invitation(s) for s in self.at if s not in away})
        self._receive("keys", found, _are_keys)
        keys = server.keys()
        found = self._ask("shares", {s: _payload(keys) for s in keys})
        size = (2 + self.terms.slots) * SHARE + SECRET + TAG
        self._receive("shares", found, lambda s, p: _is_about(p, keys.keys() - {s}, size))

    def collect(self) -> Code:
        """Exchange 2: the nodes' clients do their step, and the nodes send masked sheets; returns how to read them."""
        contents = {}
        for s in self.server.transcript.of("shares"):
            put_payload(content := self._request(self.at[s]), self.server.shares(s))
            contents[s], self.server.sent = content, sent_alike(content)
        code, found = self._code(self._ask("sheets", contents))
        size = NUMBER * (code.head + self.terms.slots * (1 + code.width))
        self._receive("sheets", found, lambda s, p: _is_about(p, {s}, size))
        return code

    def open(self, code: Code) -> Opened:
        """Exchanges 3 to 5: all agree on whose sheets are there; counts; then sums of slots that enough have chosen."""
        server = self.server
        arrived, everybody = server.arrived(), set(server.transcript.of("shares"))
        found = self._ask("lists", {s: _numbers(arrived) for s in arrived})
        self._receive("lists", found, lambda s, p: _is_about(p, {s}, SIGNATURE))
        signed = server.signed()
        found = self._ask("counts", {s: _payload(signed) for s in signed})
        self._receive("counts", found, lambda s, p: _is_about(p, everybody, SHARE))
        with self._breaking_off():
            sheet, counts = server.counts(code.head)
        told = {j: count.to_bytes() for j, count in enumerate(counts)}
        found = self._ask("sums", {s: _payload(told) for s in server.transcript.of("counts")})
        size = SHARE * sum(count.members >= self.terms.min_members for count in counts)
        self._receive("sums", found, lambda s, p: _is_about(p, set(arrived), size))
        with self._breaking_off():
            opened = server.sums(sheet, counts)
            code.require_room(opened)
        return opened

    def _request(self, at: Tensor) -> RecordDict:
        """The message to a site with the clients at these positions. What a client chooses stays with its node."""
        content = self.nodes.request(self.exchange, at)
        if isinstance(self.exchange.rows, OwnChoice):
            choose, part = self.exchange.rows
            content["choose"] = ConfigRecord({**describe_step(choose), "on": part})
        return content

    def _invitation(self, site: int) -> RecordDict:
        """What a node gets to know beforehand; it keeps it until the end of the session."""
        about = {
            "me": site,
            "step": step_name(self.exchange.step),
            "clip": self.clip,
            "clients": len(self.exchange.clients),
            "share": float(self.exchange.share),
            "deadline": float(self.nodes.deadline),
        }
        terms = {n: getattr(self.terms, n) for n in ("invited", "needed", "min_members", "slots")}
        return RecordDict({SECURE: ConfigRecord({**about, **terms})})

    def _ask(self, name: str, contents: Mapping[int, RecordDict]) -> dict[int, RecordDict]:
        """Send a message to each of these sites; what those say that answer."""
        for content in contents.values():
            about: Any = content.get(SECURE, {})
            content[SECURE] = ConfigRecord({**about, **self._words, "exchange": name})
        nodes = self.nodes.roster.nodes
        requests = {s: (nodes[s], TYPE["combine"], content) for s, content in contents.items()}
        answers = exchange(self.nodes.grid, requests, self.nodes.deadline)
        self._blame({s: why for s, message in answers.items() if (why := self.nodes.silence(message))})
        return {s: m.content for s, m in answers.items() if m is not None and not m.has_error()}

    def _code(self, found: Mapping[int, RecordDict]) -> tuple[Code, dict[int, RecordDict]]:
        """How the sheets are to be read, and the answers of those sites that agree on it."""
        asked = Asked("gather", self.terms.slots, clients=0, part=self.exchange.part)
        forms, faults = dict[int, Any](), dict[int, str]()
        for s, content in found.items():
            try:
                form = get_tree(content, "form", types_of(self.exchange.step))
                forms[s], faults[s] = form, checks.fault(form, asked)
            except ValueError as error:
                faults[s] = str(error)
        fine = [s for s in sorted(forms) if not faults[s]]
        for s, odd in zip(fine, checks.unlike([forms[s] for s in fine]), strict=True):
            faults[s] = "its sums are not shaped as the others' are" if odd else ""
        self._blame({s: why for s, why in faults.items() if why})
        fine = [s for s in fine if not faults[s]]
        self._require("sheets", len(fine))
        form = Reply(**forms[fine[0]])
        name, clients = step_name(self.exchange.step), len(self.exchange.clients)
        code = Code.of(self.clip, clients, form, self.terms.slots, name, self._secrecy())
        return code, {s: found[s] for s in fine}

    def _secrecy(self) -> Mapping[str, Secrecy]:
        return derived(self.exchange.step, self.nodes.task).secrecy

    def _receive(self, name: str, found: Mapping[int, RecordDict], fits: Fits) -> None:
        """Give the server what nodes have sent, as far as it is what was asked for."""
        payloads, faults = dict[int, Payload](), dict[int, str]()
        for s, content in sorted(found.items()):
            try:
                payload = get_payload(content)
            except ValueError as error:
                faults[s] = str(error)
                continue
            if fits(s, payload):
                payloads[s] = payload
            else:
                faults[s] = f"it has not sent what exchange '{name}' of the secure sum asks for"
        self._blame(faults)
        self._require(name, len(payloads))
        self.server.receive(name, payloads)

    def _require(self, name: str, answers: int) -> None:
        with self._breaking_off():
            self.server.require(name, answers)

    @contextmanager
    def _breaking_off(self) -> Iterator[None]:
        """What nodes have said cannot be opened: the run stops, with what is known of each node, and can be resumed."""
        try:
            yield
        except (TooFewLeft, ValueError) as error:
            said = (f"site '{self.nodes.roster.sites[s]}': {why}" for s, why in sorted(self._faults.items()))
            raise TooFewLeft("; ".join([str(error), *said])) from None

    def _blame(self, faults: Mapping[int, str]) -> None:
        self._faults.update(faults)
        self.nodes.blame(faults, self.exchange.ledger)


def _is_about(payload: Payload, about: Set[int], size: int) -> bool:
    """Whether a payload has a part of so many bytes about each of these parties, and about no other."""
    return payload.keys() == about and all(len(part) == size for part in payload.values())


def _are_keys(site: int, payload: Payload) -> bool:
    """Whether a site has sent its public keys. One that nobody can use would make every other node refuse."""
    return _is_about(payload, {site}, KEYS) and all(usable(payload[site][at:][:SECRET]) for at in (0, SECRET))


def _payload(payload: Mapping[int, bytes]) -> RecordDict:
    put_payload(content := RecordDict(), payload)
    return content


def _numbers(numbers: list[int]) -> RecordDict:
    put_tree(content := RecordDict(), "numbers", torch.tensor(numbers, dtype=torch.long))
    return content
