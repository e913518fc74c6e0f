"""Messages over Flower's `Grid`, of which only `get_node_ids`, `push_messages` and `pull_messages` are used."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

from flwr.app import Error, Message, RecordDict
from google.protobuf.message import DecodeError

POLL = 1.0  # seconds; asking more often gains nothing: a reply that is not complete yet makes Flower wait a second
TOLD = 500  # letters of what a node says that are repeated
# What Flower raises where the bytes of an answer are nonsense. Its errors of the connection are others.
NONSENSE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, DecodeError)


class Grid(Protocol):
    """What is asked of Flower's `Grid`."""

    def get_node_ids(self) -> Any:
        """The numbers of the nodes that are there."""
        ...

    def push_messages(self, messages: Any) -> Any:
        """Send messages; their numbers."""
        ...

    def pull_messages(self, message_ids: Any) -> Any:
        """The answers to these messages that have come."""
        ...


class TooFew(ConnectionError):
    """Fewer nodes than `min_replies` have answered."""


def wait_for(grid: Grid, nodes: int, deadline: float) -> list[int]:
    """Wait until so many nodes are there; the numbers of all that are.

    Raises:
        TooFew: They have not come in time.
    """
    end = time.monotonic() + deadline
    while len(there := sorted(grid.get_node_ids())) < nodes:
        if time.monotonic() > end:
            raise TooFew(f"flower: {len(there)} of {nodes} nodes came within {deadline:g} s")
        time.sleep(POLL)
    return there


def exchange(
    grid: Grid, requests: Mapping[int, tuple[int, str, RecordDict]], deadline: float
) -> dict[int, Message | None]:
    """Send a message (node, type, content) for each key; its answer, or None where none came in time.

    Messages are asked for one by one. What an answer says it answers, and who sent it, its node has written; the
    SuperLink knows. And one that cannot be read takes no other with it.
    """
    messages = [Message(c, dst_node_id=n, message_type=t, ttl=deadline) for n, t, c in requests.values()]
    numbers = list(grid.push_messages(messages)) if messages else []
    waiting = {key: (i, message) for i, key, message in zip(numbers, requests, messages, strict=False) if i}
    answers: dict[int, Message | None] = dict.fromkeys(requests)
    end = time.monotonic() + deadline
    while waiting:
        began = time.monotonic()
        for key, (number, message) in list(waiting.items()):
            if (answer := _pulled(grid, number, message)) is not None:
                answers[key] = answer
                del waiting[key]
        now = time.monotonic()
        if not waiting or now > end:
            break
        time.sleep(max(0.0, began + POLL - now))  # to pull what has come may have taken longer
    return answers


def _pulled(grid: Grid, number: str, message: Message) -> Message | None:
    """The answer to one message, if it has come."""
    try:
        return next(iter(grid.pull_messages([number])), None)
    except NONSENSE as error:
        return Message(Error(0, f"its answer cannot be read: {type(error).__name__}: {error}"), reply_to=message)


def brief(why: str) -> str:
    """The beginning of what a node says, on one line and without what would move a cursor: it may say anything."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(why[:TOLD].split()))
