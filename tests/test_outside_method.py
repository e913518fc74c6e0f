"""A method in a package of its own, installed beside coterie: examples/fesem, which is also the tutorial."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coterie.core import registry
from coterie.core.pytree import stack
from coterie.core.registry import known
from coterie.runs.folder import read_models
from coterie.testing import Skip, checks

EXAMPLE = Path(__file__).parent.parent / "examples" / "fesem"


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    """A folder as pip leaves it: the module, and metadata with its entry point."""
    folder = tmp_path_factory.mktemp("site-packages")
    (folder / "fesem.py").write_text((EXAMPLE / "fesem.py").read_text())
    info = folder / "coterie_fesem-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: coterie-fesem\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[coterie.methods]\nfesem = fesem:FeSEM\n")
    return folder


COMMANDS = """
import json, sys
from coterie.cli.main import main
for words in json.loads(sys.argv[1]):
    sys.argv = ["coterie", *words]
    try:
        main()
    except SystemExit as stop:
        if stop.code:
            raise
"""


@pytest.fixture(scope="session")
def coterie(installed):
    """Starts a process that runs command lines one after another where the package is installed."""

    def start(*commands):
        environment = {**os.environ, "PYTHONPATH": f"{installed}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        words = json.dumps([[str(word) for word in command] for command in commands])
        command = [sys.executable, "-c", COMMANDS, words]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return start


@pytest.fixture
def fesem(installed, monkeypatch):
    """The method, registered for one test: other tests try all methods that are."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.syspath_prepend(str(installed))
    monkeypatch.delitem(sys.modules, "fesem", raising=False)
    import fesem

    return fesem.FeSEM(k=2, tau=3)


def test_it_is_one_file_of_at_most_a_hundred_lines():
    assert len((EXAMPLE / "fesem.py").read_text().splitlines()) <= 100
    assert 'fesem = "fesem:FeSEM"' in (EXAMPLE / "pyproject.toml").read_text()


def test_the_command_line_lists_it_and_runs_it_and_a_killed_run_goes_on(coterie, tmp_path):
    config, whole, killed = EXAMPLE / "fesem.toml", tmp_path / "whole", tmp_path / "killed"
    process = coterie(["run", config, "--out", killed])
    while process.poll() is None and not list(killed.glob("checkpoints/*.safetensors")):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    resume = ["run", config, "--out", killed, "--resume"]
    process = coterie(["list", "--json"], ["run", config, "--out", whole], resume)
    out, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    assert "fesem" in json.JSONDecoder().raw_decode(out)[0]["methods"]
    assert json.loads((whole / "final" / "result.json").read_text())["ari"] == 1.0
    one, two = (stack(read_models(folder)) for folder in (whole, killed))
    assert all((one[name] == two[name]).all() for name in one)


@pytest.mark.parametrize("name", [check.name for check in checks(known("method")["fedavg"]())])
def test_it_conforms(fesem, name):
    check = next(check for check in checks(fesem) if check.name == name)
    try:
        check.run()
    except Skip as why:
        pytest.skip(str(why))
