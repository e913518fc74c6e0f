"""The command line as a user types it."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest

import coterie as ct
from coterie.cli import show
from coterie.runs.config import build
from coterie.runs.metrics import ari

CONFIG = """
[algorithm]
name = "ifca"
k = 4

[task]
kind = "classifier"
model = { name = "mlp", sizes = [64, 16, 10] }

[data]
name = "rotated_digits"
clients = 16

[run]
rounds = 8
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "ifca.toml"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The folder of a finished run, which tests may only read."""
    config = build(tomllib.loads(CONFIG))
    out = tmp_path_factory.mktemp("runs") / "whole"
    ct.fit(config.algorithm, config.task, config.federation, out=out, **config.run)
    return out


def test_run_show_compare_resume_overwrite(coterie, config, tmp_path):
    out = tmp_path / "run"
    code, text, _ = coterie("run", config, "--out", out, "--set", "algorithm.tau=5", "--device", "cpu")
    assert code == 0 and "accuracy" in text and "true groups" in text
    code, text, _ = coterie("show", out, "--json")
    shown = json.loads(text)
    assert code == 0 and shown["config"]["algorithm"]["tau"] == 5 and len(shown["result"]["labels"]) == 16
    code, _, errors = coterie("run", config, "--out", out)
    assert code == 2 and errors.count("\n") == 1 and "already holds a run" in errors
    more = ("run", config, "--out", out, "--set", "algorithm.tau=5", "--set", "run.rounds=9", "--resume", "--json")
    assert json.loads(coterie(*more)[1])["rounds"] == 9
    code, text, _ = coterie("run", config, "--out", out, "--overwrite", "--executor", "sequential", "--json")
    assert code == 0 and json.loads(text)["config"]["algorithm"]["tau"] == 10
    code, text, _ = coterie("compare", out, out)
    assert code == 0 and text.count("ifca") == 1  # the same folder


def test_a_run_is_resumed_or_overwritten_but_not_both(coterie, config, tmp_path):
    code, _, errors = coterie("run", config, "--out", tmp_path / "run", "--resume", "--overwrite")
    assert (code, errors.count("\n")) == (2, 1) and "resume" in errors and "overwrite" in errors


def test_a_full_disk_is_told_in_one_line(coterie, config, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    code, _, errors = coterie("run", config, "--out", tmp_path / "run")
    assert (code, errors.count("\n")) == (2, 1) and errors.startswith("coterie: ")
    assert "round-000001.safetensors cannot be written: No space left on device" in errors and "--resume" in errors
    monkeypatch.undo()
    assert coterie("run", config, "--out", tmp_path / "run", "--resume")[0] == 0


def test_assign_places_new_clients(coterie, config, tmp_path):
    out = tmp_path / "run"
    coterie("run", config, "--out", out, "--set", "run.rounds=20")
    labels = json.loads(coterie("show", out, "--json")[1])["result"]["labels"]
    new = ct.data.rotated_digits(4, seed=7)
    np.savez(
        tmp_path / "new.npz", x=new.train.x.numpy(), y=new.train.y.numpy(),
        client=np.repeat(["a", "b", "c", "d"], new.train.sizes.numpy()),
    )  # fmt: skip
    code, text, _ = coterie("assign", out, tmp_path / "new.npz", "--json")
    assert code == 0 and [r["cluster"] for r in json.loads(text)] == [labels[0], labels[4], labels[8], labels[12]]
    x, y = new.train.client(2)
    table = np.column_stack([x.flatten(1).numpy(), y.numpy()])
    header = ",".join([*(f"p{i}" for i in range(64)), "y"])
    np.savetxt(tmp_path / "new.csv", table, delimiter=",", header=header, comments="")
    code, text, _ = coterie("assign", out, tmp_path / "new.csv", "--json")
    assert json.loads(text) == [{"client": "new", "rows": len(x), "cluster": labels[8]}]
    assert coterie("assign", out, tmp_path / "new.csv", "--out", tmp_path / "placed.csv")[0] == 0
    assert (tmp_path / "placed.csv").read_text() == f"client,rows,cluster\nnew,{len(x)},{labels[8]}\n"


def test_assign_goes_by_the_names_of_columns(coterie, tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20, 2)) + 2
    y = {"north": 3 * x[:, 0], "south": -x[:, 1]}
    rows = [(x, y["north"]), (x, y["south"])]
    task = ct.Task.regressor(ct.models.Linear(2, 1))
    for out, columns in (("named", ["a", "b"]), ("unnamed", None)):
        federation = ct.Federation.from_clients(rows, columns=columns)
        run = ct.fit(ct.IFCA(k=2, lr=0.02), task, federation, rounds=20, out=tmp_path / out)

    def write(name, header, values):
        np.savetxt(tmp_path / name, np.column_stack(values), delimiter=",", header=header, comments="")
        return tmp_path / name

    turned = write("turned.csv", "b,y,a", [x[:, 1], y["north"], x[:, 0]])
    code, text, errors = coterie("assign", tmp_path / "named", turned, "--json")
    assert code == 0 and json.loads(text)[0]["cluster"] == run.labels[0] and not errors
    code, _, errors = coterie("assign", tmp_path / "named", write("other.csv", "a,y,c", [x[:, 0], y["north"], x[:, 1]]))
    assert code == 2 and errors.endswith("its columns must be 'a', 'b'; it lacks 'b' and has also 'c'\n")


def test_assign_says_that_a_run_does_not_know_its_columns(coterie, config, tmp_path, caplog):
    assert coterie("run", config, "--out", tmp_path / "run", "--set", "run.rounds=1")[0] == 0
    (tmp_path / "new.csv").write_text(",".join([*(f"p{i}" for i in range(64)), "y"]) + "\n" + "0," * 64 + "1\n")
    assert coterie("assign", tmp_path / "run", tmp_path / "new.csv")[0] == 0
    assert sum("does not know the names of its columns" in r.getMessage() for r in caplog.records) == 1


POINTS = """
[algorithm]
name = "NAME"
k = 3

[task]
TASK

[data]
name = "gaussian_clusters"
k = 3
points = 100
d = 4

[run]
rounds = 5
"""
FLOW = 'kind = "density"\nmodel = { name = "affine_flow", inputs = 4 }'


@pytest.mark.parametrize(("name", "task"), [("kfed", 'kind = "distance"'), ("kfed", ""), ("uifca", FLOW)])
def test_assign_labels_every_point(coterie, tmp_path, name, task):
    (tmp_path / "points.toml").write_text(
        POINTS.replace("NAME", name).replace("[task]\nTASK\n", f"[task]\n{task}\n" if task else "")
    )
    out, clusters = tmp_path / "run", tmp_path / "clusters.csv"
    assert coterie("run", tmp_path / "points.toml", "--out", out)[0] == 0
    points = ct.data.gaussian_clusters(k=3, points=100, d=4).train
    client = np.array(["a", "b"] * 150)  # clients' rows need not be together
    np.savez(tmp_path / "new.npz", x=points.x.numpy(), client=client)
    code, text, _ = coterie("assign", out, tmp_path / "new.npz", "--out", clusters, "--json")
    found = json.loads(text)
    assert code == 0 and [(r["client"], r["row"]) for r in found] == list(zip(client, range(300), strict=True))
    assert ari(np.array([r["cluster"] for r in found]), points.y.numpy()) == 1.0
    lines = clusters.read_text().splitlines()
    assert lines[:2] == ["client,row,cluster", f"a,0,{found[0]['cluster']}"] and len(lines) == 301
    np.savetxt(tmp_path / "new.csv", points.x.numpy(), delimiter=",", header="p,q,r,s", comments="")
    code, text, _ = coterie("assign", out, tmp_path / "new.csv")
    assert code == 0 and text.count("new (") == 3 and "cluster" in text
    np.savez(tmp_path / "bad.npz", x=points.x[:, :3].numpy())
    code, _, errors = coterie("assign", out, tmp_path / "bad.npz")
    assert code == 2 and "rows" in errors and "of shape (3,)" in errors and errors.count("\n") == 1, errors
    np.savez(tmp_path / "words.npz", x=np.array([["a", "b", "c", "d"]]))
    assert "words.npz: x must hold numbers, got <U1" in coterie("assign", out, tmp_path / "words.npz")[2]
    np.savez(tmp_path / "none.npz", y=points.y.numpy())
    assert "must hold an array x, it holds y" in coterie("assign", out, tmp_path / "none.npz")[2]


def test_demo_finds_the_groups(coterie, tmp_path, monkeypatch):
    monkeypatch.setattr("coterie.cli.demo.CLIENTS", 16)
    for rounds in (1, 20):  # a second demo replaces the first
        monkeypatch.setattr("coterie.cli.demo.ROUNDS", rounds)
        code, text, _ = coterie("demo", "--out", tmp_path / "demo")
    rows = {r["method"]: r for r in json.loads((tmp_path / "demo" / "summary.json").read_text())}
    assert code == 0 and "picture" in text and (tmp_path / "demo" / "demo.png").stat().st_size > 10_000
    assert all(set(r) == {"method", "accuracy", "ari", "seconds", "bytes_up", "bytes_down"} for r in rows.values())
    assert rows["ifca"]["ari"] == 1.0
    assert rows["ifca"]["accuracy"] > max(rows["global"]["accuracy"], rows["local"]["accuracy"])


def test_list_names_everything(coterie):
    found = json.loads(coterie("list", "--json")[1])
    assert {"ifca", "fedavg", "local_only"} <= found["methods"].keys()
    assert "ifca-table1-mnist" in found["experiments"] and "rotated_mnist" in found["data sets"]
    assert "farthest_first" in coterie("list")[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("k = 4", "k = 0"), "IFCA: k must be at least 1, got 0"),
        (("k = 4", "k = 17"), "IFCA: k must be at most the number of clients, 16, got 17"),
        (("k = 4", "kk = 4"), "[algorithm] has no key 'kk'; did you mean 'k'?"),
        (("k = 4", ""), "[algorithm] needs k"),
        (('"ifca"', '"ifac"'), "[algorithm] 'ifac' is not known; did you mean 'ifca'?"),
        (("clients = 16", "client = 16"), "[data] has no key 'client'; did you mean 'clients'?"),
        (("clients = 16", "clients = 15"), "clients must be a positive multiple of 4, got 15"),
        (("[run]", "[rum]"), "the configuration has no key 'rum'; did you mean 'run'?"),
        (("sizes = [64, 16, 10]", "sizes = [63, 16, 10]"), "client 0: MLP does not take rows of shape (1, 8, 8)"),
        (
            ("sizes = [64, 16, 10]", "sizes = [64, 16, 5]"),
            "client 0: labels run from 0 to 9, but the model has classes 0 to 4",
        ),
        (("rounds = 8", "rounds = -1"), "rounds must be a whole number of at least 1, got -1"),
        (("rounds = 8", 'rounds = 8\ndevice = "tpu"'), "device must be auto, cpu or cuda, got 'tpu'"),
        (("kind = ", "kin = "), "[task] has no key 'kin'; did you mean 'kind'?"),
        (("k = 4", 'k = 4\ninit = { name = "farthest_first", step = 3 }'), "[algorithm.init] has no key 'step'"),
        (("rounds = 8", "rounds = "), "Invalid value"),
        (("clients = 16", 'clients = "x"'), "[data] clients must be a whole number, got 'x'"),
        (("sizes = [64, 16, 10]", "sizes = 3"), "[task.model] sizes must be a list, got 3"),
        (("sizes = [64, 16, 10]", 'sizes = ["a", 3]'), "[task.model] sizes must be a whole number, got 'a'"),
        (("clients = 16", "clients = 16\nchange = 3"), "[data] change must be a list of tables, got 3"),
        (("[algorithm]", "[[algorithm]]"), "the configuration has no [algorithm] table"),
        (("clients = 16", "clients = 16\ngroups = 0"), "groups must be 1 to 4"),
        (("k = 4", 'k = 4\nlr = 1e9\ninit = "random"'), "is no longer finite"),
    ],
)
def test_bad_configurations_are_one_line_and_exit_code_2(coterie, config, tmp_path, change, message):
    config.write_text(CONFIG.replace(*change))
    code, _, errors = coterie("run", config, "--out", tmp_path / "run")
    assert code == 2 and message in errors and errors.count("\n") == 1, errors


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("show", "nowhere"), "nowhere is not a run folder: it has no config.toml"),
        (("run", "nowhere.toml"), "nowhere.toml: there is no such file"),
        (("reproduce", "ifca-fig1"), "there is no experiment 'ifca-fig1'; did you mean 'ifca-fig2'?"),
        (("assign", "nowhere", "x.npz"), "nowhere is not a run folder"),
    ],
)
def test_bad_commands(coterie, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    code, _, errors = coterie(*words)
    assert code == 2 and message in errors and errors.count("\n") == 1


def test_overwrite_keeps_the_old_run_if_the_new_one_cannot_begin(coterie, config, tmp_path, monkeypatch):
    monkeypatch.setattr("coterie.cli.demo.CLIENTS", 16)
    monkeypatch.setattr("coterie.cli.demo.ROUNDS", 2)
    out = tmp_path / "run"
    coterie("run", config, "--out", out)
    before = (out / "final" / "result.json").read_bytes()
    code, _, errors = coterie("run", config, "--out", out, "--overwrite", "--set", "algorithm.k=17")
    assert code == 2 and "at most the number of clients" in errors
    assert (out / "final" / "result.json").read_bytes() == before
    assert coterie("demo", "--out", tmp_path)[0] == 0  # it has no run of its name yet
    assert (out / "final").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "needs a header with a column 'y'"),
        ("a,y\n1,2,3\n", "line 2 has 3 values, the header 2"),
        ("a,y\nx,2\n", "column 'a': could not convert string to float"),
        ("a,y\n1,0.5\n", "labels must be whole numbers, got 0.5"),
        ("a,y,client\n1,0,b\nnan,0,c\n", "client 'c': 1 of its 1 train rows have a value of x that is NaN"),
        ("a,y,client\n1,0,b\n1,0,c\n", "client 'b': MLP does not take rows of shape (1,)"),
    ],
)
def test_bad_files_to_assign(coterie, whole, tmp_path, content, message):
    (tmp_path / "new.csv").write_text(content)
    code, _, errors = coterie("assign", whole, tmp_path / "new.csv")
    assert code == 2 and message in errors and errors.count("\n") == 1, errors


def test_set_needs_a_table_and_a_value(coterie, config):
    code, _, errors = coterie("run", config, "--set", "k=3")
    assert code == 2 and "--set takes table.key=value" in errors


@pytest.fixture
def half(whole, tmp_path):
    """A run of eight rounds that was stopped after five."""
    half = shutil.copytree(whole, tmp_path / "half")
    shutil.rmtree(half / "final")
    lines = (half / "events.jsonl").read_text().splitlines(keepends=True)
    fifth = next(i for i, line in enumerate(lines) if json.loads(line).get("round") == 5)
    (half / "events.jsonl").write_text("".join(lines[: fifth + 1]))
    return half


def test_show_an_unfinished_run(coterie, whole, half, tmp_path):
    code, text, _ = coterie("show", half, "--picture", tmp_path / "half.png")
    assert code == 0 and "running or stopped after round 5 of 8" in text and "accuracy 0." in text
    last = json.loads((half / "events.jsonl").read_text().splitlines()[-1])
    listed = re.findall(r"^(\d+) +(\d+) +(0\.\d+) *$", text, re.MULTILINE)
    assert [(int(j), int(n), float(score)) for j, n, score in listed] == [
        (j, n, pytest.approx(score, abs=1e-4))
        for j, (n, score) in enumerate(zip(last["members"], last["per_cluster"], strict=True))
    ]
    assert (tmp_path / "half.png").read_bytes().startswith(b"\x89PNG")
    shown = json.loads(coterie("show", half, "--json")[1])
    assert not shown["finished"] and shown["rounds"] == 5 and shown["last"]["members"] == last["members"]
    assert json.loads(coterie("show", whole, "--json")[1])["finished"]


def test_show_a_run_without_rounds(coterie, half, tmp_path):
    (half / "events.jsonl").unlink()
    assert "running or stopped after round 0 of 8" in coterie("show", half)[1]
    code, _, errors = coterie("show", half, "--picture", tmp_path / "x.png")
    assert code == 2 and "has no round yet" in errors and errors.count("\n") == 1


@pytest.mark.parametrize(
    ("suffix", "begin"), [("jpg", b"\xff\xd8\xff"), ("JPEG", b"\xff\xd8\xff"), ("svg", b"<?xml"), ("pdf", b"%PDF")]
)
def test_a_picture_has_the_format_of_its_suffix(coterie, half, suffix, begin):
    picture = half / f"run.{suffix}"
    assert coterie("show", half, "--picture", picture)[0] == 0
    assert picture.read_bytes().startswith(begin)


@pytest.mark.parametrize("name", ["run.gif", "run"])
def test_other_pictures_are_refused_before_anything_is_shown(coterie, half, name):
    code, text, errors = coterie("show", half, "--picture", half / name)
    assert (code, text) == (2, "") and errors.count("\n") == 1
    assert errors.endswith(f"{name}: a picture must end in .png, .jpg, .jpeg, .svg or .pdf\n")


def test_watch_ends_with_the_run(coterie, whole, half, monkeypatch):
    monkeypatch.setattr(show, "PAUSE", 0.05)

    def finish():
        time.sleep(0.3)
        shutil.copy(whole / "events.jsonl", half)
        shutil.copytree(whole / "final", half / "final")

    thread = threading.Thread(target=finish)
    thread.start()
    code, text, _ = coterie("show", half, "--watch")
    thread.join()
    assert code == 0 and "16 clients, 8 rounds" in text and "running or stopped" not in text
    code, _, errors = coterie("show", half, "--watch", "--json")
    assert code == 2 and errors == "coterie: show takes --watch or --json, not both: what is watched is redrawn\n"


def test_ctrl_c_ends_watching(coterie, half, monkeypatch):
    def interrupted(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(show.time, "sleep", interrupted)
    code, text, errors = coterie("show", half, "--watch")
    assert code == 130 and "after round 5 of 8" in text and errors == ""


def test_version(coterie):
    assert coterie("--version") == (0, "coterie 0.2.0\n", "")


def test_ctrl_c_while_torch_is_loaded(tmp_path):
    """A module called typer, which the command line imports early, says when the import has begun."""
    (tmp_path / "typer.py").write_text("import sys, time\nprint('loading', flush=True)\ntime.sleep(60)\n")
    path = os.pathsep.join([str(tmp_path), str(Path(ct.__file__).parents[1])])
    command = [sys.executable, "-m", "coterie", "list"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, **streams) as process:
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (130, "")
