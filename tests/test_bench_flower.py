import json
import socket
import threading

from typer.testing import CliRunner

from coterie.cli.main import app
from coterie_lab.bench import flower


def serve_once(server):
    """Answer one connection with twice what it says."""
    connection, _ = server.accept()
    with connection:
        while data := connection.recv(1 << 16):
            connection.sendall(2 * data)


def test_a_meter_passes_on_and_counts_both_ways():
    meter = flower.Meter()
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve_once, args=(server,), daemon=True).start()
        meter.towards(server.getsockname()[1])
        with socket.create_connection(("127.0.0.1", meter.port), timeout=10) as near:
            near.sendall(b"x" * 1000)
            heard = b""
            while len(heard) < 2000:
                heard += near.recv(1 << 16)
    meter.close()
    assert heard == b"x" * 2000 and meter.bytes == 3000


def test_a_federation_is_told_as_a_list_and_drawn(monkeypatch, tmp_path):
    def measured(nodes, workers):
        return {"nodes": nodes, "workers": workers, "seconds": 4.0 + nodes, "slowest": 9.0, "counted_bytes": 100,
                "wire_bytes": 104}  # fmt: skip

    monkeypatch.setattr(flower, "_one", measured)
    shown = CliRunner().invoke(app, ["bench", "flower", "--out", str(tmp_path)])
    assert "4.0 %" in shown.stdout
    rows = json.loads((tmp_path / "flower.json").read_text())
    assert [(r["nodes"], r["workers"]) for r in rows] == [(n, w) for w in (True, False) for n in flower.NODES]
    assert (tmp_path / "flower.png").read_bytes().startswith(b"\x89PNG")
