"""A real SuperLink and real SuperNodes on loopback."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("flwr")

from coterie.flower.credentials import make_certificates, make_node_key
from coterie.flower.lab import LINK, Lab

pytestmark = [
    pytest.mark.flower,
    pytest.mark.skipif(shutil.which("ps") is None, reason="there is no ps"),
]


def until(true, seconds, what):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"{what}: not within {seconds} s"
        time.sleep(0.5)


def coterie(*args):
    asked = subprocess.run([sys.executable, "-m", "coterie", *args], capture_output=True, text=True, timeout=180)
    assert asked.returncode == 0, asked.stderr
    return asked.stdout


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab") / "federation"
    lab = Lab(folder)
    try:
        rows = json.loads(coterie("flower", "up", "-n", "2", "--dir", str(folder), "--json"))
        assert [r["process"] for r in rows] == [LINK, "site0", "site1"]
        yield lab
        pids = [told["pid"] for told in lab.processes().values()]
    except BaseException:
        lab.stop()
        raise
    assert coterie("flower", "down", "--dir", str(folder)).startswith("stopped the federation")
    assert not any(alive(pid) for pid in pids if pid) and not lab.processes()
    assert "no federation is running" in coterie("flower", "down", "--dir", str(folder))


def test_nodes_are_online_and_up_does_nothing_twice(lab):
    assert lab.online() == ["site0", "site1"]
    before = lab.processes()
    told = coterie("flower", "up", "-n", "2", "--dir", str(lab.folder))
    assert lab.processes() == before and "site1      online" in told
    with pytest.raises(ValueError, match="holds a local federation of 2 nodes, not 3"):
        lab.prepare(3)


def test_keys_are_for_their_owner_alone(lab):
    for key in (*(lab.folder / "keys").iterdir(), lab.folder / "certificates" / "server.key"):
        assert key.stat().st_mode & 0o077 == 0


def test_an_unregistered_key_is_refused(lab, tmp_path):
    make_node_key(tmp_path / "stranger")
    command = [str(tmp_path / "stranger") if "keys" in part else part for part in lab.commands()["site0"]]
    command[command.index("--port") + 1] = "0"
    tried = subprocess.run(command, env=lab.environment, capture_output=True, text=True, timeout=60)
    assert tried.returncode != 0 and lab.online() == ["site0", "site1"]


def test_a_wrong_certificate_is_refused(lab, tmp_path):
    make_certificates(tmp_path)
    command = [str(tmp_path / "ca.crt") if part.endswith("ca.crt") else part for part in lab.commands()["site0"]]
    command[command.index("--port") + 1] = "0"
    tried = subprocess.run(
        [*command, "--max-retries", "1"], env=lab.environment, capture_output=True, text=True, timeout=90
    )
    assert tried.returncode != 0 and "certificate" in (tried.stdout + tried.stderr).lower()


def test_a_node_that_dies_is_started_again(lab):
    pid = lab.processes()["site1"]["pid"]
    os.kill(pid, signal.SIGKILL)
    until(lambda: (lab.processes()["site1"]["pid"] or pid) != pid, 30, "a new process")
    assert lab.processes()["site1"]["starts"] >= 2 and lab.processes()["site0"]["starts"] == 1
