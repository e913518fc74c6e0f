"""A real SuperLink and real SuperNodes on loopback."""

import os
import shutil
import signal
import subprocess

import pytest

pytest.importorskip("flwr")

from coterie.flower.credentials import make_certificates, make_node_key
from coterie.flower.lab import free_ports

pytestmark = [
    pytest.mark.flower,
    pytest.mark.skipif(shutil.which("ps") is None, reason="there is no ps"),
]


def test_nodes_are_online_and_up_does_nothing_twice(lab, command_line):
    assert lab.online() == ["site0", "site1"]
    before = lab.processes()
    told = command_line("flower", "up", "-n", "2", "--dir", str(lab.folder))
    assert lab.processes() == before and "site1        online" in told
    with pytest.raises(ValueError, match="holds a local federation of 2 nodes, not 4"):
        lab.prepare(4)


def test_keys_are_for_their_owner_alone(lab):
    for key in (*(lab.folder / "keys").iterdir(), lab.folder / "certificates" / "server.key"):
        assert key.stat().st_mode & 0o077 == 0


def tried(lab, log, old, new):
    """A node with something else in its command line: what it says until it ends, which it must."""
    command = [new if old(part) else part for part in lab.commands()["site0"]]
    command[command.index("--port") + 1] = str(free_ports(1)[0])
    with log.open("wb") as file:  # not a pipe: what the node starts would keep it open
        node = subprocess.Popen(command, env=lab.environment, stdout=file, stderr=file, start_new_session=True)
        try:
            assert node.wait(90) != 0
        finally:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)
    return log.read_text()


def test_an_unregistered_key_is_refused(lab, tmp_path):
    make_node_key(tmp_path / "stranger")
    said = tried(lab, tmp_path / "log", lambda part: part.endswith("keys/site0"), str(tmp_path / "stranger"))
    assert "Failed to activate SuperNode" in said
    assert lab.online() == ["site0", "site1"]


def test_a_wrong_certificate_is_refused_with_a_message_that_says_so(lab, tmp_path):
    make_certificates(tmp_path)
    said = tried(lab, tmp_path / "log", lambda part: part.endswith("ca.crt"), str(tmp_path / "ca.crt"))
    assert "certificate verify failed" in said
