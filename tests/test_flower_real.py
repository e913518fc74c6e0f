"""Whole runs on a real SuperLink and three real SuperNodes, against the simulator; also if they are killed."""

import json
import os
import shutil
import signal
import subprocess
import tomllib

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import coterie as ct
from coterie.cli.main import app as cli
from coterie.core.key import Key
from coterie.engines.vectorised import Fused
from coterie.flower.lab import LINK
from coterie.flower.submit import submit, watch
from coterie.runs.config import build_algorithm, build_task
from coterie.runs.folder import read_history, read_result
from coterie.runs.loop import CLIENTS, START

pytestmark = pytest.mark.flower

DIGITS = '[task]\nkind = "classifier"\nmodel = { name = "mlp", sizes = [64, 16, 10] }\n'
CONFIGS = {
    "fedavg": f'{DIGITS}[algorithm]\nname = "fedavg"\ntau = 5\n[run]\nrounds = 1\n',
    "ifca": f'{DIGITS}[algorithm]\nname = "ifca"\nk = 4\ntau = 20\nlr = 0.5\ninit = "random"\n[run]\nrounds = 2\n',
    "cfl": f'{DIGITS}[algorithm]\nname = "cfl"\ntau = 20\nlr = 0.3\nschedule = [1]\nholdout = 0.0\n[run]\nrounds = 2\n',
    "mixed_regression": """
        [task]
        kind = "regressor"
        model = { name = "linear", inputs = 3, outputs = 1 }
        [algorithm]
        name = "mixed_regression"
        k = 2
        init = { name = "moment_descent", rounds = 1, reuse = true, ell = 3 }
        [run]
        rounds = 1
    """,
    "kfed": '[algorithm]\nname = "kfed"\nk = 3\n[run]\nrounds = 1\n',
    "uifca": """
        [task]
        kind = "density"
        model = { name = "affine_flow", inputs = 4 }
        [algorithm]
        name = "uifca"
        k = 3
        restarts = 2
        init = "random"
        [run]
        rounds = 2
    """,
}
DATA = '''
import coterie as ct

def whole(name):
    """The clients of all nodes."""
    if name == "mixed_regression":
        return ct.data.mixed_regression(
            k=2, d=3, seed=1, anchors=6, anchor_rows=60, pairs=14, rest=22, rest_rows=(2, 3, 6, 11)
        )
    if name in ("kfed", "uifca"):
        return ct.data.gaussian_clusters(k=3, p=0.5, seed=2, clients=6, points=100, d=4, separation=6.0)
    return ct.data.rotated_digits(clients=12, seed=0)

def federation(context):
    clients = whole(context.run_config["config"].removesuffix(".toml"))
    each = len(clients) // context.node_config["num-partitions"]
    i = context.node_config["partition-id"]
    return clients.select(range(i * each, (i + 1) * each))
'''


@pytest.fixture(scope="module")
def app(tmp_path_factory, command_line):
    """An app with a configuration for each algorithm."""
    folder = tmp_path_factory.mktemp("app") / "mine"
    assert "fill in federation()" in command_line("flower", "init", str(folder))
    (folder / "data.py").write_text(DATA)
    for name, text in CONFIGS.items():
        (folder / f"{name}.toml").write_text(text)
    return folder


def simulated(app, name):
    """What the simulator is asked to do: the same, with the clients of all nodes."""
    tables = tomllib.loads((app / f"{name}.toml").read_text())
    algorithm = build_algorithm(tables["algorithm"])
    task = build_task(tables["task"]) if "task" in tables else algorithm.default_task()
    space = {}
    exec(DATA, space)
    return algorithm, task, space["whole"](name), tables["run"]


def assert_same(out, labels, models):
    assert read_result(out)["labels"] == labels
    found = load_file(out / "final" / "models.safetensors")
    assert found.keys() == models.keys()
    for name, x in models.items():
        assert torch.allclose(found[name], x, rtol=1e-5, atol=1e-5), name


def assert_as_simulated(app, name, out):
    algorithm, task, federation, asked = simulated(app, name)
    run = ct.fit(algorithm, task, federation, **asked)
    assert_same(out, run.labels.tolist(), algorithm.models(run.state))
    assert [r["participants"] for r in read_history(out)] == [r["participants"] for r in run.history]


def test_the_command_line_trains_and_tells(lab, app, tmp_path, command_line):
    out, at = tmp_path / "fedavg", ("--dir", str(lab.folder))
    told = command_line("flower", "run", str(app / "fedavg.toml"), "--out", str(out), *at)
    assert told.startswith("fedavg on flower\n12 clients, 1 rounds")
    assert_as_simulated(app, "fedavg", out)
    rows = json.loads(command_line("flower", "status", "--json", *at))
    assert [r["process"] for r in rows if r["online"]] == ["site0", "site1", "site2"]
    refused = CliRunner().invoke(cli, ["flower", "run", str(app / "fedavg.toml"), "--out", str(out), *at])
    assert "already holds a run; resume it with --resume" in str(refused.exception)


@pytest.mark.parametrize("names", [("ifca", "cfl"), ("mixed_regression", "kfed"), ("uifca",)])
def test_an_algorithm_does_on_nodes_what_it_does_in_the_simulator(names, lab, app, tmp_path):
    runs = {name: submit(lab, app / f"{name}.toml", tmp_path / name, resume=False) for name in names}  # side by side
    for name, number in runs.items():
        events = []
        watch(lab, number, tmp_path / name, events.append)
        assert_as_simulated(app, name, tmp_path / name)
        assert not [e for e in events if e["event"] == "log" and "left out" in e["message"]], events


def server_of(lab):
    """The process of the ServerApp: a child of the process that the SuperLink starts for it."""
    parent = lab.processes()[LINK]["pid"]
    for _ in range(2):
        asked = subprocess.run(["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True, text=True)
        parent = int(asked.stdout.split()[0])
    return parent


class Killed(Exception):
    """Nobody waits until the SuperLink has noticed."""


def test_a_run_outlives_a_node_its_server_and_its_superlink(lab, app, tmp_path):
    app = shutil.copytree(app, tmp_path / "app")
    out, config = tmp_path / "killed", app / "killed.toml"
    config.write_text(CONFIGS["ifca"].replace("rounds = 2", "rounds = 6"))
    project = app / "pyproject.toml"
    patient = (
        project.read_text().replace("deadline = 120.0", "deadline = 60.0").replace("min-replies = 2", "min-replies = 1")
    )
    project.write_text(patient)
    heard = []

    def kill_a_node_then_the_server(event):
        heard.append(event)
        if event["event"] == "round" and event["round"] == 1:
            os.kill(lab.processes()["site2"]["pid"], signal.SIGKILL)
        elif event["event"] == "round":
            os.kill(server_of(lab), signal.SIGKILL)

    def kill_the_superlink(event):
        if event["event"] == "round":
            os.kill(lab.processes()[LINK]["pid"], signal.SIGKILL)
            raise Killed

    # Until the SuperLink has noticed, nodes may wait for the rest of a message that nobody will send.
    with pytest.raises(ValueError, match="go on with --resume"):
        watch(lab, submit(lab, config, out, resume=False), out, kill_a_node_then_the_server)
    assert any("site 'site2' is left out" in e.get("message", "") for e in heard)
    with pytest.raises(Killed):
        watch(lab, submit(lab, config, out, resume=True), out, kill_the_superlink)
    lab.wait()
    watch(lab, submit(lab, config, out, resume=True), out, lambda event: None)

    algorithm, task, federation, _ = simulated(app, "killed")
    cohort = Fused(federation, task, Key.of(0).fold(CLIENTS), torch.device("cpu"))
    state = algorithm.start(task, cohort.at(0), Key.of(0).fold(START))
    history = read_history(out)
    assert history[1]["left_out"] == ["site2"] and read_result(out)["left_out"]["site2"] >= 1
    assert [row["round"] for row in history] == [1, 2, 3, 4, 5, 6]
    assert history[1]["participants"] == 8 and any(row["participants"] == 12 for row in history[2:])
    for t, row in enumerate(history):  # a node may also hang on a message of which the kill has left a part
        away = [int(site.removeprefix("site")) for site in row.get("left_out", [])]
        assert row["participants"] == 12 - 4 * len(away)
        state, _ = algorithm.round(
            state, cohort.without(torch.tensor([4 * s + i for s in away for i in range(4)])).at(t)
        )
    assert_same(out, algorithm.labels(state).tolist(), algorithm.models(state))
