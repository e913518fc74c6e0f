"""A real SuperLink and real SuperNodes on loopback."""

import shutil
import subprocess

import pytest

pytest.importorskip("flwr")

from coterie.flower.credentials import make_certificates, make_node_key

pytestmark = [
    pytest.mark.flower,
    pytest.mark.xdist_group("flower"),
    pytest.mark.skipif(shutil.which("ps") is None, reason="there is no ps"),
]


def test_nodes_are_online_and_up_does_nothing_twice(lab, command_line):
    assert lab.online() == ["site0", "site1", "site2"]
    before = lab.processes()
    told = command_line("flower", "up", "-n", "3", "--dir", str(lab.folder))
    assert lab.processes() == before and "site1        online" in told
    with pytest.raises(ValueError, match="holds a local federation of 3 nodes, not 4"):
        lab.prepare(4)


def test_keys_are_for_their_owner_alone(lab):
    for key in (*(lab.folder / "keys").iterdir(), lab.folder / "certificates" / "server.key"):
        assert key.stat().st_mode & 0o077 == 0


def test_an_unregistered_key_is_refused(lab, tmp_path):
    make_node_key(tmp_path / "stranger")
    command = [str(tmp_path / "stranger") if "keys" in part else part for part in lab.commands()["site0"]]
    command[command.index("--port") + 1] = "0"
    tried = subprocess.run(command, env=lab.environment, capture_output=True, text=True, timeout=60)
    assert tried.returncode != 0 and lab.online() == ["site0", "site1", "site2"]


def test_a_wrong_certificate_is_refused(lab, tmp_path):
    make_certificates(tmp_path)
    command = [str(tmp_path / "ca.crt") if part.endswith("ca.crt") else part for part in lab.commands()["site0"]]
    command[command.index("--port") + 1] = "0"
    tried = subprocess.run(
        [*command, "--max-retries", "1"], env=lab.environment, capture_output=True, text=True, timeout=90
    )
    assert tried.returncode != 0 and "certificate" in (tried.stdout + tried.stderr).lower()
