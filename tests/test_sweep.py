"""Sweeps over settings and seeds, and the comparison of their runs, as a user types them."""

import json
import multiprocessing
import os
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

import coterie as ct
from coterie.runs.compare import find_runs, group_runs
from coterie.runs.folder import read_config

CONFIG = """
[algorithm]
name = "ifca"
k = 2
tau = 1
init = "random"

[task]
kind = "regressor"
model = { name = "linear", inputs = 3, outputs = 1 }

[data]
name = "linear_mixture"
clients = 4
rows = 8
features = 3

[run]
rounds = 3
seed = 5
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "mix.toml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def swept(coterie, config, tmp_path):
    """Runs a sweep of that configuration in one folder, which it returns with what was printed."""

    def call(*words):
        return tmp_path / "sweep", *coterie("sweep", config, "--out", tmp_path / "sweep", "--jobs", 2, *words)

    return call


def written(folder):
    """When each run was finished."""
    return {file.parts[-3]: file.stat().st_mtime_ns for file in folder.glob("*/final/result.json")}


def test_a_sweep_runs_every_point_and_goes_on_with_what_is_left(swept, config):
    grid = ("--grid", "algorithm.k=1,2", "--seeds", 2, "--json")
    folder, code, text, _ = swept(*grid)
    names = [f"algorithm.k={k},seed={seed}" for k in (1, 2) for seed in (5, 6)]
    first = written(folder)
    assert code == 0 and sorted(first) == names and not list(folder.glob("*.log"))
    assert [read_config(folder / n)["run"]["seed"] for n in names] == [5, 6, 5, 6]
    groups = json.loads(text)
    assert [(g["settings"], g["seeds"]) for g in groups] == [({"algorithm.k": k}, [5, 6]) for k in (1, 2)]
    # One run is gone and one lacks its result; only these are done again, with the same result.
    before = json.loads((folder / names[3] / "final" / "result.json").read_text())["score"]
    shutil.rmtree(folder / names[0])
    shutil.rmtree(folder / names[3] / "final")
    folder, code, text, _ = swept(*grid)
    assert code == 0 and {n for n, t in written(folder).items() if t != first[n]} == {names[0], names[3]}
    assert json.loads((folder / names[3] / "final" / "result.json").read_text())["score"] == before
    assert [g["score"] for g in json.loads(text)] == [g["score"] for g in groups]
    # More seeds are added; another file is refused.
    second = written(folder)
    folder, code, _, errors = swept(*grid[:2], "--seeds", 3)
    assert code == 0 and len(written(folder)) == 6 and second.items() <= written(folder).items(), errors
    assert "6/6 runs" in errors and "failed" not in errors
    config.write_text(CONFIG.replace("tau = 1", "tau = 2"))
    folder, code, _, errors = swept(*grid)
    assert code == 2 and errors.count("\n") == 1 and "algorithm.tau = 1, now it is 2" in errors, errors
    assert swept(*grid, "--overwrite")[1] == 0 and len(written(folder)) == 4
    assert read_config(folder / names[0])["algorithm"]["tau"] == 2


def test_a_run_that_fails_does_not_stop_the_others(swept):
    folder, code, text, errors = swept("--grid", "algorithm.k=5,2", "--seeds", 1)
    assert code == 1 and list(written(folder)) == ["algorithm.k=2,seed=5"] and "ifca" in text
    assert "2/2 runs, 1 failed" in errors and "1 of 2 runs failed:\n" in errors
    assert "  algorithm.k=5,seed=5: IFCA: k must be at most the number of clients, 4, got 5\n" in errors
    assert "k must be at most" in (folder / "algorithm.k=5,seed=5.log").read_text()


@pytest.fixture
def once_begun(config, tmp_path):
    """Makes the runs so long that none ends before another begins, and calls a function once two have a checkpoint."""
    config.write_text(CONFIG.replace("rounds = 3", "rounds = 100_000"))
    over = threading.Event()

    def watch(act):
        while not over.wait(0.02):
            if len({file.parts[-3] for file in (tmp_path / "sweep").glob("*/checkpoints/round*")}) == 2:
                return act()

    with ThreadPoolExecutor(1) as pool:
        yield lambda act: pool.submit(watch, act)
        over.set()


def test_ctrl_c_stops_every_run_and_says_how_to_go_on(swept, once_begun):
    once_begun(lambda: os.kill(os.getpid(), signal.SIGINT))
    folder, code, _, errors = swept("--seeds", 2)
    assert code == 130 and "interrupted after 0 of 2 runs; to go on, run the same command again" in errors
    assert not multiprocessing.active_children()
    assert all("interrupted after round" in (folder / f"seed={seed}.log").read_text() for seed in (5, 6))


def test_a_run_whose_process_is_killed_has_failed(swept, once_begun):
    once_begun(lambda: [child.kill() for child in multiprocessing.active_children()])
    _, code, text, errors = swept("--seeds", 2)
    assert code == 1 and not text and errors.count("its process was killed by signal 9") == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--grid", "algorithm.kk=2"], "[algorithm] has no key 'kk'; did you mean 'k'?"),
        (["--grid", "algo.k=2"], "the configuration has no key 'algo'; did you mean 'algorithm'?"),
        (["--grid", "k=2,3"], "--grid takes table.key=value, such as algorithm.k=2,3,4, got 'k=2,3'"),
        (["--grid", "algorithm.k="], "--grid algorithm.k=: a value is missing"),
        (["--grid", "algorithm.init=random,,balanced"], "a value is missing"),
        (["--grid", "algorithm.k=2,0"], "IFCA: k must be at least 1, got 0"),
        (["--grid", "algorithm.k=2,2"], "a value stands twice in the grid"),
        (["--grid", "algorithm.k=2", "--grid", "algorithm.k=3"], "--grid algorithm.k is given twice"),
        (["--grid", "algorithm.k.deep=2"], "algorithm.k.deep cannot be set: algorithm.k is 2, not a table"),
        (["--grid", "run.seed=1,2"], "say how many with --seeds"),
        (["--grid", "run.device=tpu"], "device must be auto, cpu or cuda, got 'tpu'"),
        (["--grid", "data.features=3,4"], "client 0: Linear does not take rows of shape (4,)"),
        (["--grid", "task.model.inputs=3,4"], "client 0: Linear does not take rows of shape (3,)"),
    ],
)
def test_a_bad_grid_is_refused_before_anything_is_run(swept, words, message):
    folder, code, _, errors = swept(*words)
    assert code == 2 and message in errors and errors.count("\n") == 1, errors
    assert not folder.exists()


def test_a_folder_of_something_else_is_refused(swept, tmp_path):
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "thesis.tex").touch()
    for words in ([], ["--overwrite"]):
        folder, code, _, errors = swept(*words)
        assert code == 2 and "is not the folder of a sweep" in errors and (folder / "thesis.tex").exists()


RANDOM = ct.IFCA(k=2, tau=1, init="random")


def make(folder, *, method=RANDOM, seeds=(0, 1), rounds=3, **options):
    """Runs from Python, one per seed, in folders of their own."""
    data = ct.data.linear_mixture(4, 8, 3)
    task = ct.Task.regressor(ct.models.Linear(3, 1))
    for seed in seeds:
        ct.fit(method, task, data, rounds=rounds, seed=seed, out=folder / f"seed={seed}", **options)


def test_runs_that_differ_only_in_their_seed_are_one_group(coterie, tmp_path):
    make(tmp_path / "k2")
    make(tmp_path / "k1", method=replace(RANDOM, k=1, lr=0.05))
    make(tmp_path / "one", method=ct.FedAvg(tau=1), seeds=[0])
    code, text, errors = coterie("compare", tmp_path, tmp_path / "k2", "--json")
    groups = json.loads(text)
    assert code == 0 and not errors and [len(g["runs"]) for g in groups] == [2, 2, 1]
    assert [g["method"] for g in groups] == ["ifca", "ifca", "fedavg"]
    assert groups[0]["settings"] == {"algorithm.lr": 0.05, "algorithm.k": 1}
    assert groups[2]["settings"] == {"algorithm.lr": 0.1}  # it has no k, and its other settings cannot be compared
    scores = [json.loads((tmp_path / "k2" / f"seed={s}/final/result.json").read_text())["score"] for s in (0, 1)]
    mean, half = sum(scores) / 2, abs(scores[0] - scores[1]) / 2
    assert half > 1e-3  # else a wrong deviation would not show
    assert groups[1]["score"] == pytest.approx({"mean": mean, "sd": half * 2**0.5}) and groups[1]["metric"] == "mse"
    assert groups[2]["score"]["sd"] is None and groups[2]["ari"]["mean"] == 0 and groups[2]["clusters"]["mean"] == 1
    code, text, _ = coterie("compare", tmp_path)
    assert code == 0 and f"{mean:.4f} ± {half * 2**0.5:.4f}" in text
    assert "lr=0.05 k=1 " in text and "fedavg  lr=0.1 " in text


def test_the_same_run_twice_is_not_averaged(tmp_path):
    make(tmp_path / "new")
    make(tmp_path / "old")
    groups = group_runs(find_runs([tmp_path]))
    assert [g.differing for g in groups] == [{"folder": str(tmp_path / name)} for name in ("new", "old")]
    make(tmp_path / "slow", executor="sequential")
    assert group_runs(find_runs([tmp_path / "new", tmp_path / "slow"]))[1].differing == {"run.executor": "sequential"}


def test_unfinished_runs_are_left_out_and_metrics_are_kept_apart(coterie, tmp_path):
    make(tmp_path / "half", seeds=[0])
    (tmp_path / "half" / "seed=0" / "final" / "result.json").unlink()
    code, _, errors = coterie("compare", tmp_path)
    assert code == 2 and "seed=0 is not finished and is left out" in errors and "there is no finished run" in errors
    make(tmp_path / "mse")
    data = ct.data.rotated_digits(4)
    ct.fit(ct.IFCA(k=2), ct.Task.classifier(ct.models.MLP(64, 10)), data, rounds=2, out=tmp_path / "digits")
    code, text, errors = coterie("compare", tmp_path, "--picture", tmp_path / "both.png")
    headers = [line for line in text.splitlines() if line.startswith("method")]
    assert code == 0 and len(headers) == 2 and "accuracy" in headers[0] and "mse" in headers[1]
    assert errors.count("left out") == 1 and (tmp_path / "both.png").stat().st_size > 10_000
    (tmp_path / "empty").mkdir()
    assert "contains no run folder" in coterie("compare", tmp_path / "empty")[2]


def test_a_run_that_stopped_early_keeps_its_score(tmp_path):
    make(tmp_path, seeds=[0], rounds=2)
    make(tmp_path, seeds=[1], rounds=4)
    group = group_runs(find_runs([tmp_path]))[0]
    group.runs.append(group_runs([tmp_path / "seed=1"])[0].runs[0])
    rounds, mean, sd = group.curve()
    short, long = (run.curve[:, 1] for run in group.runs)
    assert rounds.tolist() == [1, 2, 3, 4] and sd is not None
    assert mean == pytest.approx([(short[0] + long[0]) / 2, *(short[1] + long[1:]) / 2])
