"""The ClientApp: name it in a pyproject.toml as `clientapp = "coterie.flower.client_app:app"`.

The app's folder must hold a `data.py` with one function, which tells what this node has:

    def federation(context: Context) -> Federation: ...
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from coterie.federation import Federation
from coterie.flower.node import Node
from coterie.flower.steps import STEPS

Find = Callable[[Context], Node]


def make_app(find: Find) -> ClientApp:
    """A ClientApp that answers for the node that `find` finds."""
    app = ClientApp()

    def enrol(message: Message, context: Context) -> Message:
        return Message(find(context).enrol(message.content), reply_to=message)

    def answer(message: Message, context: Context) -> Message:
        category = message.metadata.message_type.partition(".")[0]
        return Message(find(context).answer(category, message.content), reply_to=message)

    app.query("enrol")(enrol)
    for step in STEPS:
        app.train(step)(answer)
        app.query(step)(answer)
    return app


def node_of(context: Context) -> Node:
    """This node, as its node config and the app's data.py say.

    Keys of the node config: `site`, its name (`partition-id` where it is not given, or else Flower's number of the
    node); `memory`, the folder where clients keep what they remember; `device`.

    Raises:
        ValueError: There is no data.py, or it does not give a Federation.
    """
    config = context.node_config
    site = str(config.get("site", config.get("partition-id", context.node_id)))
    memory = Path(str(config["memory"])) if "memory" in config else None
    return Node(site, _own(context), memory, str(config.get("device", "cpu")))


def _own(context: Context) -> Federation:
    try:
        module = importlib.import_module("data")  # the user's own file, beside the app's pyproject.toml
    except ModuleNotFoundError as error:
        if error.name != "data":  # something that it imports is missing: that must be told as it is
            raise
        module = None
    if module is None or not hasattr(module, "federation"):
        raise ValueError("the app needs a data.py with a function federation(context) -> Federation")
    if not isinstance(federation := module.federation(context), Federation):
        raise ValueError(f"data.py: federation() must return a Federation, got {type(federation).__name__}")
    return federation


app = make_app(node_of)
