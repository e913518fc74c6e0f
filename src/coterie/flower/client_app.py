"""The ClientApp: name it in a pyproject.toml as `clientapp = "coterie.flower.client_app:app"`.

The app's folder must hold a `data.py` with one function, which tells what this node has:

    def federation(context: Context) -> Federation: ...

Flower starts a process for every message, so this module loads no torch: where a node has a resident worker, that does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from coterie.flower import resident
from coterie.flower.data_file import find_data_file

Respond = Callable[[str, RecordDict, Context], RecordDict]


def make_app(respond: Respond) -> ClientApp:
    """A ClientApp whose answer to a message of some type and content is what `respond` says."""
    app = ClientApp()

    def answer(message: Message, context: Context) -> Message:
        return Message(respond(message.metadata.message_type, message.content, context), reply_to=message)

    app.query("enrol")(answer)
    app.train("step")(answer)  # which step it is, the message says
    app.query("step")(answer)
    return app


def respond(kind: str, content: RecordDict, context: Context) -> RecordDict:
    """What this node answers: by its resident worker, or, where there is none, in this process.

    Keys of the node config: `site`, its name (`partition-id` where it is not given, or else Flower's number of the
    node); `memory`, the folder where clients keep what they remember; `device`; `worker`, the resident worker's folder;
    and on what conditions it takes part (`coterie.flower.policy`): `secure-only`, `min-members`, `min-nodes`, `peers`,
    `server-picks`.
    """
    file = find_data_file()
    worker = context.node_config.get("worker")
    if worker is not None:
        try:
            return resident.ask(Path(str(worker)), kind, content, context, file)
        except resident.NoWorker:  # it is slower here, but it is done
            pass
    from coterie.flower.node import node_of

    return node_of(context, file).respond(kind, content)


app = make_app(respond)
