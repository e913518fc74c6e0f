"""How the ClientApp reaches its node's resident worker: over loopback, with a token that only their user can read.

Bytes go over `multiprocessing.connection`, which proves to each side that the other knows the token without sending it.
Of it only `send_bytes` and `recv_bytes` are used: nothing is pickled.
"""

from __future__ import annotations

import json
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict

from coterie.flower.compat import from_bytes, to_bytes

ADDRESS = "worker.json"  # where a worker writes its port and its token, in its folder


class NoWorker(Exception):
    """There is no worker now."""


def ask(folder: Path, kind: str, content: RecordDict, context: Context, file: Path) -> RecordDict:
    """Have the worker of a folder answer a message.

    Args:
        folder: The worker's.
        kind: The message's type.
        content: What it says.
        context: Flower's, of this node.
        file: The app's data.py.

    Raises:
        NoWorker: It is not there.
        ValueError: It could not answer; says why.
    """
    request: dict[str, Any] = {
        "kind": kind,
        "file": str(file),
        "run_id": context.run_id,
        "node_id": context.node_id,
        "node_config": dict(context.node_config),
        "run_config": dict(context.run_config),
    }
    with _connected(folder) as connection:
        connection.send_bytes(json.dumps(request).encode())
        connection.send_bytes(to_bytes(content))
        fault = connection.recv_bytes().decode()
        if fault:
            raise ValueError(fault)
        return from_bytes(connection.recv_bytes())


def _connected(folder: Path) -> Any:
    try:
        address = json.loads((folder / ADDRESS).read_text(encoding="utf-8"))
        return Client(("127.0.0.1", address["port"]), authkey=bytes.fromhex(address["token"]))
    except (OSError, ValueError, KeyError, EOFError, AuthenticationError) as error:
        raise NoWorker(str(error)) from error
