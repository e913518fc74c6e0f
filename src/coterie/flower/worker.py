"""A node's resident worker: it has torch and the node's data loaded, and answers message after message.

`python -m coterie.flower.worker FOLDER` runs beside the SuperNode whose node config says `worker="FOLDER"`.
"""

from __future__ import annotations

import json
import logging
import secrets
import sys
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict

from coterie.flower.compat import from_bytes, to_bytes
from coterie.flower.data_file import forget
from coterie.flower.node import Node, node_of
from coterie.flower.resident import ADDRESS
from coterie.storage.snapshot import write_private

log = logging.getLogger("coterie")

KEPT = 4  # runs at once whose data stay loaded


class Worker:
    """Answers for one node.

    Its data are loaded once in a run: the next run may find others.
    """

    def __init__(self) -> None:
        self._nodes: dict[str, Node] = {}  # by all that they depend on
        self._folders: set[Path] = set()  # of apps whose modules are loaded

    def answer(self, request: dict[str, Any], content: RecordDict) -> RecordDict:
        """The node's answer to a message."""
        kind = str(request.pop("kind"))
        return self._found(request).respond(kind, content)

    def _found(self, request: dict[str, Any]) -> Node:
        key = json.dumps(request, sort_keys=True)
        if key not in self._nodes:
            for old in list(self._nodes)[: 1 - KEPT]:
                del self._nodes[old]
            file = Path(request.pop("file"))
            for folder in self._folders | {file.parent}:  # one app's helpers must not be taken for another's
                forget(folder)
            self._folders = {file.parent}
            self._nodes[key] = node_of(Context(**request, state=RecordDict()), file)
        return self._nodes[key]


def serve(folder: Path) -> None:
    """Answer whoever knows the token that is written to the folder, until the process is ended."""
    token, worker, one_at_a_time = secrets.token_bytes(32), Worker(), threading.Lock()

    def listen_to(connection: Connection) -> None:
        try:
            with connection:
                deliver_challenge(connection, token)
                answer_challenge(connection, token)
                _converse(connection, worker, one_at_a_time)
        except (OSError, EOFError, AuthenticationError) as error:  # whoever it was is gone, or had no right to ask
            log.warning("worker: %s: %s", type(error).__name__, error)

    with Listener(("127.0.0.1", 0)) as listener:
        write_private(folder / ADDRESS, json.dumps({"port": listener.address[1], "token": token.hex()}))
        while True:  # each in a thread of its own: one that says nothing keeps nobody waiting
            threading.Thread(target=listen_to, args=(listener.accept(),), daemon=True).start()


def _converse(connection: Connection, worker: Worker, one_at_a_time: threading.Lock) -> None:
    request, content = json.loads(connection.recv_bytes()), from_bytes(connection.recv_bytes())
    try:
        with one_at_a_time:
            answer = to_bytes(worker.answer(request, content))
    except Exception as error:  # whatever happens, the ClientApp tells it, as it would its own
        connection.send_bytes(f"{type(error).__name__}: {error}".encode())
        return
    connection.send_bytes(b"")
    connection.send_bytes(answer)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
