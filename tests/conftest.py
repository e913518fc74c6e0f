import functools
import importlib
import json
import logging
import os
import subprocess
import sys
from contextlib import contextmanager
from itertools import pairwise

import pytest
import typer.main
from xdist.scheduler import LoadScopeScheduling

import coterie as ct
from coterie import testing
from coterie.cli.main import main
from coterie.core.key import Key
from coterie.flower.engine import FlowerEngine
from coterie.flower.enrolment import enrol
from coterie.flower.lab import LINK, Lab
from coterie.flower.local import LocalGrid
from coterie.flower.membership import FlowerMembership
from coterie.flower.node import Node

# Tests of real Flower processes, which mostly wait: two groups, so that two processes of the tests have them while the
# others compute. The longest come first.
REAL = {
    "test_flower_kill.py": "flower that is killed",
    "test_flower_versions.py": "flower that is killed",
    "test_flower_real.py": "flower",
    "test_flower_lab.py": "flower",
    "test_flower_proxy.py": "flower",
}


# Files whose tests look at one run that takes long: each process that has any of them would do it again.
ONE_RUN = {"test_analysis.py": "one table", "test_notebook.py": "one notebook"}


class Together(LoadScopeScheduling):
    """Tests one by one to whoever is free, but those of a group in one place; real Flower processes come first."""

    def _split_scope(self, nodeid):
        return next((group for name, group in (REAL | ONE_RUN).items() if name in nodeid), nodeid)

    def _assign_work_unit(self, node):
        for group in reversed(dict.fromkeys(REAL.values())):
            if group in self.workqueue:
                self.workqueue.move_to_end(group, last=False)
        super()._assign_work_unit(node)


def pytest_xdist_make_scheduler(config, log):
    return Together(config, log)


@pytest.fixture(autouse=True)
def _quiet():
    logging.getLogger("coterie").setLevel(logging.WARNING)


@pytest.fixture(scope="session", autouse=True)
def _mnist_is_read_once():
    """Half a second each time, in many tests; the arrays are never written to."""
    module = importlib.import_module("coterie.data.mnist")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_idx", functools.cache(module._idx))
        yield


@pytest.fixture(scope="session", autouse=True)
def _commands_are_made_once():
    """A quarter of a second each time, for hundreds of command lines in one process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
        yield


@pytest.fixture(scope="session")
def task():
    return ct.Task.classifier(ct.models.MLP(64, 16, 10))


@pytest.fixture(scope="session")
def ragged():
    """Twelve clients of very unequal size in three well separated groups."""
    return testing.ragged()


@pytest.fixture(scope="session")
def regression():
    """Forty clients of very unequal size in three mixed regressions, and the task to learn them."""
    return ct.Task.regressor(ct.models.Linear(4, 1)), testing.regressions()


@pytest.fixture(scope="session")
def points():
    """Eight clients of very unequal size with points of three clusters, half of each client's of one."""
    return testing.points()


@pytest.fixture
def on_flower(tmp_path):
    """Makes the membership of a federation's clients on three nodes of a Grid in this process."""

    def make(federation, task, key=None, *, spoil=None, run="test", **options):
        m = len(federation)
        cuts = [0, m // 4, m // 2, m]
        shares = [federation.select(range(a, b)) for a, b in pairwise(cuts)]
        sites = {f"site-{i}": share for i, share in enumerate(shares)}
        nodes = {9 - i: Node(site, share, tmp_path / "nodes") for i, (site, share) in enumerate(sites.items())}
        grid = LocalGrid(nodes)
        roster = enrol(grid, task, nodes=3, deadline=10)
        grid.spoil = spoil
        key = Key.of(0).fold(1) if key is None else key
        return FlowerMembership(FlowerEngine(grid, roster, task, key, run=run, **{"deadline": 10, **options}))

    return make


@pytest.fixture
def coterie(monkeypatch, capsys):
    """Runs a command line; returns (exit code, standard output, standard error)."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["coterie", *map(str, words)])
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        else:
            code = 0
        return code, *capsys.readouterr()

    return call


@pytest.fixture(scope="session")
def command_line():
    """Runs a command of coterie's and returns what it prints."""

    def run(*args):
        asked = subprocess.run([sys.executable, "-m", "coterie", *args], capture_output=True, text=True, timeout=180)
        assert asked.returncode == 0, asked.stderr
        return asked.stdout

    return run


@contextmanager
def federation_in(folder, nodes, command_line):
    """A SuperLink and some SuperNodes on loopback, all of whose processes are gone at the end."""
    lab = Lab(folder)
    try:
        rows = json.loads(command_line("flower", "up", "-n", str(nodes), "--dir", str(folder), "--json"))
        assert [r["process"] for r in rows if "worker" not in r["process"]] == [
            LINK,
            *(f"site{i}" for i in range(nodes)),
        ]
        yield lab
        pids = [told["pid"] for told in lab.processes().values() if told["pid"]]
        assert command_line("flower", "down", "--dir", str(folder)) == f"stopped the federation in {folder}\n"
    finally:
        lab.stop()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.fixture(scope="session")
def federation():
    """Starts a federation in a folder: `with federation(folder, nodes, command_line) as lab`."""
    return federation_in


@pytest.fixture(scope="session")
def lab(tmp_path_factory, command_line):
    """A federation of two nodes that tests share, so none may harm it. Each message to a node costs over a second."""
    with federation_in(tmp_path_factory.mktemp("lab") / "federation", 2, command_line) as lab:
        yield lab


@pytest.fixture
def lab_to_kill(tmp_path, command_line):
    """A federation of three nodes for one test alone."""
    with federation_in(tmp_path / "federation", 3, command_line) as lab:
        yield lab
