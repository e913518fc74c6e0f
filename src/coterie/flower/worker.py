"""A node's resident worker: it has torch and the node's data loaded, and answers message after message.

`python -m coterie.flower.worker FOLDER` runs beside the SuperNode whose node config says `worker="FOLDER"`.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict

from coterie.flower.data_file import forget
from coterie.flower.node import Node, node_of
from coterie.flower.resident import ADDRESS, from_bytes, to_bytes

log = logging.getLogger("coterie")


class Worker:
    """Answers for one node.

    Its data are loaded once in a run: the next run may find others.
    """

    def __init__(self) -> None:
        self._key: Any = None
        self._node: Node | None = None

    def answer(self, told: dict[str, Any], content: RecordDict) -> RecordDict:
        """The node's answer to a message."""
        return self._found(told).respond(str(told["kind"]), content)

    def _found(self, told: dict[str, Any]) -> Node:
        key = {name: value for name, value in told.items() if name != "kind"}
        if self._node is None or key != self._key:
            if self._key is not None:
                forget(Path(self._key["file"]).parent)
            self._key, self._node = None, None
            context = Context(
                run_id=told["run_id"], node_id=told["node_id"], node_config=told["node_config"], state=RecordDict(),
                run_config=told["run_config"],
            )  # fmt: skip
            self._node = node_of(context, Path(told["file"]))
            self._key = key
        return self._node


def serve(folder: Path) -> None:
    """Answer whoever knows the token that is written to the folder, until the process is ended."""
    token, worker = secrets.token_bytes(32), Worker()
    with Listener(("127.0.0.1", 0), authkey=token) as listener:
        _tell(folder, {"port": listener.address[1], "token": token.hex()})
        while True:
            try:
                with listener.accept() as connection:
                    _converse(connection, worker)
            except (OSError, EOFError, AuthenticationError) as error:  # whoever it was is gone, or had no right to ask
                log.warning("worker: %s: %s", type(error).__name__, error)


def _converse(connection: Connection, worker: Worker) -> None:
    told, content = json.loads(connection.recv_bytes()), from_bytes(connection.recv_bytes())
    try:
        answer = to_bytes(worker.answer(told, content))
    except Exception as error:  # whatever happens, the ClientApp tells it, as it would its own
        connection.send_bytes(f"{type(error).__name__}: {error}".encode())
        return
    connection.send_bytes(b"")
    connection.send_bytes(answer)


def _tell(folder: Path, address: dict[str, Any]) -> None:
    """Write how to reach the worker, for its own user only."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".{ADDRESS}.{os.getpid()}"
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(json.dumps(address))
    draft.replace(folder / ADDRESS)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
