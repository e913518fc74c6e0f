"""Benchmark of a real Flower federation on this machine: seconds per round and bytes on the wire."""

from __future__ import annotations

import contextlib
import logging
import socket
import statistics
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from coterie.flower.lab import LINK, Lab
from coterie.flower.submit import submit, watch
from coterie.flower.template import write_app
from coterie.runs.folder import read_history

log = logging.getLogger("coterie")

NODES = (1, 3, 6)
ROUNDS = 8  # the first, which includes the start, and the last, with the evaluation, are not counted
CLIENTS, ROWS = 2, 300  # clients per node, and rows per client
CONFIG = f"""
[algorithm]
name = "ifca"
k = 2
tau = 5
lr = 0.1
init = "random"

[task]
kind = "classifier"
model = {{ name = "mlp", sizes = [784, 200, 10] }}

[run]
rounds = {ROUNDS}
evaluations = 1
"""
DATA = f"""
import torch
from coterie.core.federation import Federation

def federation(context):
    g = torch.Generator().manual_seed(context.node_config["partition-id"])
    x, y = torch.randn({CLIENTS}, {ROWS}, 784, generator=g), torch.arange({ROWS}) % 10
    return Federation.from_clients([(own, y) for own in x])
"""


def measure(*, quick: bool = False) -> list[dict[str, Any]]:
    """Return one row per number of nodes, with and without resident workers, as `coterie bench flower --json` prints.

    The method is IFCA with k=2 on a 784-200-10 MLP, whose two models are 1.27 MB; each node has two clients of 300
    rows.

    Args:
        quick: Whether to measure one node only.
    """
    sizes = NODES[:1] if quick else NODES
    return [_one(nodes, workers) for workers in (True, False) for nodes in sizes]


def _one(nodes: int, workers: bool) -> dict[str, Any]:
    with TemporaryDirectory() as folder, _federation(Path(folder) / "lab", nodes, workers) as (lab, meter):
        app, out = Path(folder) / "app", Path(folder) / "run"
        write_app(app)
        (app / "data.py").write_text(DATA)
        (app / "ifca.toml").write_text(CONFIG)
        number = submit(lab, app / "ifca.toml", out, resume=False)
        bytes_at: list[int] = []

        def seen(event: dict[str, Any]) -> None:
            if event["event"] == "round":
                bytes_at.append(meter.bytes)

        watch(lab, number, out, seen)
        history = read_history(out)
    rounds = history[1:-1]
    seconds = [r["seconds"] for r in rounds]
    log.info("%d nodes, %s workers: %.2f s a round", nodes, "with" if workers else "no", statistics.median(seconds))
    return {
        "nodes": nodes,
        "workers": workers,
        "seconds": statistics.median(seconds),
        "slowest": max(seconds),
        "counted_bytes": sum(r["bytes_down"] + r["bytes_up"] for r in rounds),
        "wire_bytes": bytes_at[-2] - bytes_at[0],
    }


@contextlib.contextmanager
def _federation(folder: Path, nodes: int, workers: bool) -> Iterator[tuple[Lab, Meter]]:
    """Start a federation whose nodes connect to the SuperLink through a meter."""
    lab, meter = Lab(folder), Meter()
    lab.prepare(nodes, workers=workers, entrance=meter.port)
    meter.towards(lab.settings["ports"][LINK])
    lab.start()
    try:
        lab.wait()
        yield lab, meter
    finally:
        lab.stop()
        meter.close()


class Meter:
    """A proxy on loopback that forwards connections to another port and counts the bytes in both directions."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.bytes = 0
        self._lock = threading.Lock()

    def towards(self, port: int) -> None:
        """Start to forward connections.

        Args:
            port: The port to forward to.
        """
        threading.Thread(target=self._accept, args=(port,), daemon=True).start()

    def close(self) -> None:
        """Stop accepting connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # otherwise `accept` would keep waiting
        self._listener.close()

    def _accept(self, port: int) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:  # closed
                return
            try:
                far = socket.create_connection(("127.0.0.1", port))
            except OSError:  # the SuperLink is not up yet; the node will retry
                near.close()
                continue
            threading.Thread(target=self._connect, args=(near, far), daemon=True).start()

    def _connect(self, near: socket.socket, far: socket.socket) -> None:
        with near, far:
            back = threading.Thread(target=self._pass_on, args=(far, near), daemon=True)
            back.start()
            self._pass_on(near, far)
            back.join()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                with self._lock:  # count before forwarding, so that received bytes are always counted
                    self.bytes += len(data)
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
