"""Whole runs on a real SuperLink and two real SuperNodes, against the simulator."""

import json
import shutil
import tomllib

import pytest
import torch
from typer.testing import CliRunner

import coterie as ct
from coterie.cli.main import app as cli
from coterie.core.pytree import stack
from coterie.flower.submit import submit, watch
from coterie.runs.config import build_algorithm, build_task
from coterie.runs.folder import read_events, read_history, read_models, read_result

pytestmark = pytest.mark.flower

DIGITS = '[task]\nkind = "classifier"\nmodel = { name = "mlp", sizes = [64, 16, 10] }\n'
TWICE = "[run]\nrounds = 2\nevaluations = 1\n"  # and scored once
CONFIGS = {
    "fedavg": f'{DIGITS}[algorithm]\nname = "fedavg"\ntau = 5\n[run]\nrounds = 1\n',
    "ifca": f'{DIGITS}[algorithm]\nname = "ifca"\nk = 4\ntau = 20\nlr = 0.5\ninit = "random"\n{TWICE}',
    "cfl": f'{DIGITS}[algorithm]\nname = "cfl"\ntau = 20\nlr = 0.3\nschedule = [1]\nholdout = 0.0\n{TWICE}',
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
        evaluations = 1
    """,
}
# Several algorithms can share a run: those whose nodes have the same data.
TOGETHER = {"digits": ("ifca", "cfl"), "regression": ("mixed_regression",), "points": ("kfed", "uifca")}
SEVERAL = """
from dataclasses import replace
from pathlib import Path
from coterie.flower.server_app import Settings, read_tables, serve
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    settings = Settings.of(context.run_config)
    for name in read_tables(settings.config)["several"]:
        serve(grid, replace(settings, out=str(Path(settings.out) / name)), read_tables(f"{name}.toml"))
"""
DATA = '''
import coterie as ct

def whole(name):
    """The clients of all nodes."""
    if name == "regression":
        return ct.data.mixed_regression(
            k=2, d=3, seed=1, anchors=6, anchor_rows=60, pairs=14, rest=22, rest_rows=(2, 3, 6, 11)
        )
    if name == "points":
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


@pytest.fixture(scope="module")
def several(app, tmp_path_factory):
    """The same app with a ServerApp of its own, which does one algorithm after the other."""
    folder = shutil.copytree(app, tmp_path_factory.mktemp("several") / "mine")
    (folder / "several.py").write_text(SEVERAL)
    project = (folder / "pyproject.toml").read_text()
    assert project.count("coterie.flower.server_app:app") == 1
    (folder / "pyproject.toml").write_text(project.replace("coterie.flower.server_app:app", "several:app"))
    for data, names in TOGETHER.items():
        (folder / f"{data}.toml").write_text(f"several = {json.dumps(names)}\n")
    return folder


def assert_as_simulated(name, data, out):
    """The simulator is asked to do the same, with the clients of all nodes."""
    tables = tomllib.loads(CONFIGS[name])
    algorithm = build_algorithm(tables["algorithm"])
    task = build_task(tables["task"]) if "task" in tables else algorithm.default_task()
    space = {}
    exec(DATA, space)
    run = ct.fit(algorithm, task, space["whole"](data), **tables["run"])
    models = algorithm.models(run.state)
    assert read_result(out)["labels"] == run.labels.tolist()
    found = stack(read_models(out))
    assert found.keys() == models.keys()
    for n, x in models.items():
        assert torch.allclose(found[n], x, rtol=1e-5, atol=1e-5), n
    assert [r["participants"] for r in read_history(out)] == [r["participants"] for r in run.history]


def test_the_command_line_trains_and_tells(lab, app, tmp_path, command_line):
    out, at = tmp_path / "fedavg", ("--dir", str(lab.folder))
    told = command_line("flower", "run", str(app / "fedavg.toml"), "--out", str(out), *at)
    assert told.startswith("fedavg on flower\n12 clients, 1 rounds")
    assert_as_simulated("fedavg", "digits", out)
    rows = json.loads(command_line("flower", "status", "--json", *at))
    assert [r["process"] for r in rows if r["online"]] == ["site0", "site1"]
    refused = CliRunner().invoke(cli, ["flower", "run", str(app / "fedavg.toml"), "--out", str(out), *at])
    assert "already holds a run; resume it with --resume" in str(refused.exception)


@pytest.fixture(scope="module")
def runs(lab, several, tmp_path_factory):
    """All algorithms' run folders: three runs side by side, and in each one algorithm after the other."""
    out = tmp_path_factory.mktemp("runs")
    numbers = {data: submit(lab, several / f"{data}.toml", out / data, resume=False) for data in TOGETHER}
    for data, number in numbers.items():
        watch(lab, number, out / data, lambda event: None)
    return out


@pytest.mark.parametrize(("data", "name"), [(data, name) for data, names in TOGETHER.items() for name in names])
def test_an_algorithm_does_on_nodes_what_it_does_in_the_simulator(data, name, runs):
    out = runs / data / name
    assert_as_simulated(name, data, out)
    events = read_events(out)
    assert not [e for e in events if e["event"] == "log" and "left out" in e["message"]], events


def test_every_algorithm_is_tried():
    assert {"fedavg", *(name for names in TOGETHER.values() for name in names)} == set(CONFIGS)
