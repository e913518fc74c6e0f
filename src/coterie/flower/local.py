"""A Grid in one process, without a network: every message goes through Flower's own serialiser, both ways."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from uuid import uuid4

from flwr.app import Context, Error, Message, RecordDict

from coterie.flower.client_app import make_app
from coterie.flower.compat import act_as_run, get_all_nested_objects, inflate_object_from_contents
from coterie.flower.node import Node

Spoil = Callable[[int, Message], Message | None]


class LocalGrid:
    """Nodes in this process.

    Args:
        nodes: Each node by Flower's number of it.
        spoil: Is given the node's number and its answer, and returns what arrives instead; None where nothing does.
    """

    def __init__(self, nodes: Mapping[int, Node], spoil: Spoil | None = None) -> None:
        self.nodes, self.spoil = dict(nodes), spoil
        self._app = make_app(lambda kind, content, context: self.nodes[context.node_id].respond(kind, content))
        self._arrived: dict[str, Message] = {}
        act_as_run(1)

    def get_node_ids(self) -> list[int]:
        """The numbers of the nodes."""
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Have every message answered, one after the other."""
        return [self._answered(message) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """The answers to these messages that have come."""
        return [self._arrived.pop(i) for i in list(message_ids) if i in self._arrived]

    def _answered(self, message: Message) -> str:
        number, node = str(uuid4()), message.metadata.dst_node_id
        message.metadata.__dict__["_message_id"] = number
        try:
            context = Context(run_id=1, node_id=node, node_config={}, state=RecordDict(), run_config={})
            answer = sent(self._app(sent(message), context))
        except Exception as error:  # whatever happens on a node, Flower tells it as an error
            answer = Message(Error(2, f"{type(error).__name__}: {error}"), reply_to=message)
        arrived = self.spoil(node, answer) if self.spoil else answer
        if arrived is not None:
            arrived.metadata.__dict__["_reply_to_message_id"] = number
            self._arrived[number] = arrived
        return number


def sent(message: Message) -> Message:
    """A message as it arrives: written to bytes by Flower, and read from them."""
    objects = {number: part.deflate() for number, part in get_all_nested_objects(message).items()}
    arrived = inflate_object_from_contents(message.object_id, objects)
    assert isinstance(arrived, Message)
    arrived.metadata.__dict__["_message_id"] = message.metadata.message_id  # the SuperLink gives it, beside the bytes
    return arrived
