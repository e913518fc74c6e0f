"""A node's resident worker, in a process of its own."""

import json
import shutil
import socket
import subprocess
import sys
import time

import pytest
from flwr.app import ConfigRecord, Context, RecordDict

import coterie as ct
from coterie.flower import resident
from coterie.flower.client_app import respond
from coterie.flower.data_file import forget
from coterie.flower.enrolment import plain_task
from coterie.flower.node import node_of

DATA = """
from pathlib import Path
import torch
from beside import ROWS
from coterie.core.federation import Federation

def federation(context):
    log = Path(__file__).with_name("loaded")
    log.write_text(log.read_text() + "x" if log.exists() else "x")
    if "broken" in context.run_config:
        raise KeyError("age")
    return Federation.from_clients([(torch.ones(ROWS, 3), torch.arange(ROWS) % 2)])
"""


@pytest.fixture
def app(tmp_path):
    folder = tmp_path / "app"
    folder.mkdir()
    (folder / "data.py").write_text(DATA)
    (folder / "beside.py").write_text("ROWS = 5\n")
    yield folder / "data.py"
    forget(folder)


@pytest.fixture
def worker(tmp_path):
    folder = tmp_path / "worker"
    process = subprocess.Popen([sys.executable, "-m", "coterie.flower.worker", str(folder)])
    end = time.monotonic() + 60
    while not (folder / resident.ADDRESS).exists():
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.05)
    yield folder
    process.kill()
    process.wait()


@pytest.fixture
def content():
    task = ct.Task.classifier(ct.models.Linear(3, 2))
    return RecordDict({"task": ConfigRecord({"task": plain_task(task)})})


def context(run=1, **run_config):
    return Context(run, 7, {"site": "ward"}, RecordDict(), run_config)


def enrolled(answer):
    return json.loads(answer["site"]["site"])


def test_it_answers_as_the_node_would_and_loads_its_data_once_a_run(worker, app, content):
    one, two = (resident.ask(worker, "query.enrol", content, context(), app) for _ in range(2))
    assert app.with_name("loaded").read_text() == "x"
    assert enrolled(one) == enrolled(two) == enrolled(node_of(context(), app).respond("query.enrol", content))
    assert enrolled(one)["name"] == "ward" and enrolled(one)["train"]["sizes"] == [5]
    app.with_name("beside.py").write_text("ROWS = 64\n")
    assert enrolled(resident.ask(worker, "query.enrol", content, context(2), app))["train"]["sizes"] == [64]


def test_one_apps_helpers_are_not_taken_for_anothers(worker, app, content, tmp_path):
    resident.ask(worker, "query.enrol", content, context(), app)
    other = tmp_path / "other"
    shutil.copytree(app.parent, other)
    (other / "beside.py").write_text("ROWS = 31\n")
    assert enrolled(resident.ask(worker, "query.enrol", content, context(), other / "data.py"))["train"]["sizes"] == [
        31
    ]


def test_one_who_says_nothing_keeps_nobody_waiting(worker, app, content):
    port = json.loads((worker / resident.ADDRESS).read_text())["port"]
    with socket.create_connection(("127.0.0.1", port)):
        assert enrolled(resident.ask(worker, "query.enrol", content, context(), app))["name"] == "ward"


def test_what_goes_wrong_is_told_and_the_worker_stays(worker, app, content):
    with pytest.raises(ValueError, match="KeyError: 'age'"):
        resident.ask(worker, "query.enrol", content, context(broken=True), app)
    with pytest.raises(ValueError, match="the message has no 'step'"):
        resident.ask(worker, "train.step", content, context(), app)
    assert enrolled(resident.ask(worker, "query.enrol", content, context(), app))["name"] == "ward"


def test_its_token_is_for_its_user_alone_and_without_it_nobody_is_answered(worker, app, content):
    address = worker / resident.ADDRESS
    assert address.stat().st_mode & 0o077 == 0
    right = address.read_text()
    address.write_text(json.dumps({**json.loads(right), "token": "00" * 32}))
    with pytest.raises(resident.NoWorker):
        resident.ask(worker, "query.enrol", content, context(), app)
    address.write_text(right)
    assert enrolled(resident.ask(worker, "query.enrol", content, context(), app))["name"] == "ward"


def test_without_a_worker_the_client_app_does_it_itself(app, content, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(app.parent))
    monkeypatch.delitem(sys.modules, "data", raising=False)
    here = Context(1, 7, {"site": "ward", "worker": str(tmp_path / "nobody")}, RecordDict(), {})
    assert enrolled(respond("query.enrol", content, here))["name"] == "ward"
