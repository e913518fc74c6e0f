"""A real federation whose node, server and SuperLink are killed while a run goes on, which ends all the same."""

import os
import shutil
import signal
import subprocess
import tomllib

import pytest
import torch

import coterie as ct
from coterie.core.key import Key
from coterie.core.pytree import stack
from coterie.engines import simulated
from coterie.flower.lab import LINK
from coterie.flower.submit import submit, watch
from coterie.flower.template import write_app
from coterie.runs.config import build_algorithm, build_task
from coterie.runs.folder import read_history, read_models, read_result
from coterie.runs.loop import CLIENTS, START

pytestmark = [
    pytest.mark.flower,
    pytest.mark.skipif(shutil.which("ps") is None, reason="there is no ps"),
]

CONFIG = """
[task]
kind = "classifier"
model = { name = "mlp", sizes = [64, 16, 10] }
[algorithm]
name = "ifca"
k = 4
tau = 20
lr = 0.5
init = "random"
[run]
rounds = 4
evaluations = 1
"""


def server_of(lab):
    """The process of the ServerApp: a child of the process that the SuperLink starts for it."""
    parent = lab.processes()[LINK]["pid"]
    for _ in range(2):
        asked = subprocess.run(["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True, text=True)
        parent = int(asked.stdout.split()[0])
    return parent


class Killed(Exception):
    """Nobody waits until the SuperLink has noticed."""


def test_a_run_outlives_a_node_its_server_and_its_superlink(lab_to_kill, tmp_path):
    lab, out, config = lab_to_kill, tmp_path / "killed", tmp_path / "app" / "killed.toml"
    write_app(config.parent)
    config.write_text(CONFIG)
    project = config.parent / "pyproject.toml"
    for old, new in (("deadline = 120.0", "deadline = 30.0"), ("min-replies = 2", "min-replies = 1")):
        assert old in project.read_text()
        project.write_text(project.read_text().replace(old, new))
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

    tables = tomllib.loads(CONFIG)
    algorithm, task = build_algorithm(tables["algorithm"]), build_task(tables["task"])
    cohort = simulated(ct.data.rotated_digits(clients=12, seed=0), task, Key.of(0).fold(CLIENTS))
    state = algorithm.start(task, cohort.at(0), Key.of(0).fold(START))
    history = read_history(out)
    assert history[1]["left_out"] == ["site2"] and read_result(out)["left_out"]["site2"] >= 1
    assert [row["round"] for row in history] == [1, 2, 3, 4]
    assert history[1]["participants"] == 8 and any(row["participants"] == 12 for row in history[2:])
    for t, row in enumerate(history):  # a node may also hang on a message of which the kill has left a part
        away = [int(site.removeprefix("site")) for site in row.get("left_out", [])]
        assert row["participants"] == 12 - 4 * len(away)
        state, _ = algorithm.round(
            state, cohort.without(torch.tensor([4 * s + i for s in away for i in range(4)])).at(t)
        )
    assert read_result(out)["labels"] == algorithm.labels(state).tolist()
    found, models = stack(read_models(out)), algorithm.models(state)
    assert found.keys() == models.keys()
    for n, x in models.items():
        assert torch.allclose(found[n], x, rtol=1e-5, atol=1e-5), n
