"""fit(): history, run folder, checkpoints, stopping, and what it says about bad input."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import coterie as ct
from coterie.runs import folder as record
from coterie.runs.scores import Scores
from coterie.storage import snapshot
from coterie.storage.reading import read_tensors

TASK = ct.Task.classifier(ct.models.MLP(64, 16, 10))

# Runs one after another, each in a process of its own that prints its number and then its rounds. What takes seconds to
# load is loaded once, before they are forked off.
SLOW_RUNS = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has what it starts in the background ignore it
import sklearn.metrics
import coterie as ct
ct.fit
def pause(row, run):
    print(row["round"], flush=True)
    time.sleep(float(sys.argv[1]))
for folder in sys.argv[2:]:
    if child := os.fork():
        os.waitpid(child, 0)
        continue
    print("process", os.getpid(), flush=True)
    task = ct.Task.classifier(ct.models.MLP(64, 16, 10))
    federation = ct.data.rotated_digits(16, seed=0)
    ct.fit(ct.IFCA(4, patience=2), task, federation, rounds=12, seed=5, out=folder, callbacks=[pause])
    break
"""


# Overwrites copies of a run, each in a process that is killed at a later change of the disk, until one is not.
KILLED_OVERWRITING = """
import itertools, os, pathlib, shutil, signal, sys
import torch
torch.set_num_threads(1)
import coterie as ct
task, digits = ct.Task.classifier(ct.models.MLP(64, 16, 10)), ct.data.rotated_digits(4, seed=0)
ct.fit

def watched(owner, name):
    change = getattr(owner, name)
    def changed(*args, **kwargs):
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        left.pop()
        return change(*args, **kwargs)
    setattr(owner, name, changed)

for step in itertools.count():
    out = pathlib.Path(sys.argv[1]) / str(step) / "run"
    shutil.copytree(out.parent.parent / "old", out)
    if (child := os.fork()) == 0:
        left = list(range(step))
        for owner, name in ((pathlib.Path, "rename"), (pathlib.Path, "replace"), (os, "unlink"), (os, "rmdir"),
                            (os, "open"), (os, "mkdir")):
            watched(owner, name)
        ct.fit(ct.FedAvg(), task, digits, rounds=1, seed=2, out=out, overwrite=True)
        os._exit(0)
    if os.waitpid(child, 0)[1] == 0:
        break
"""


@pytest.fixture(scope="module")
def digits():
    return ct.data.rotated_digits(16, seed=0)


@pytest.fixture(scope="module")
def run(digits):
    return ct.fit(ct.IFCA(4), TASK, digits, rounds=20, seed=0)


def slow(pause, *folders):
    command = [sys.executable, "-c", SLOW_RUNS, str(pause), *map(str, folders)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def next_run_at(lines, done):
    """Wait until the next run has done so many rounds; the number of its process."""
    number = next(int(line.split()[1]) for line in lines if line.startswith("process"))
    next(line for line in lines if int(line) >= done)
    return number


def finish(path, digits, **options):
    """The rest of it, or all, in this process and without pauses."""
    return ct.fit(ct.IFCA(4, patience=2), TASK, digits, rounds=12, seed=5, out=path, **options)


def test_what_a_run_gives(run, digits):
    assert run.ari == 1.0 and run.accuracy > 0.8
    assert run.labels.shape == (16,) and len(run.models) == 4 and run.path is None
    row = run.history[-1]
    assert set(row) == {
        "round",
        "loss",
        "accuracy",
        "loss_per_cluster",
        "per_cluster",
        "changed",
        "moved",
        "groups",
        "members",
        "participants",
        "seconds",
        "bytes_down",
        "bytes_up",
    }
    assert row["round"] == 20 and sum(row["members"]) == 16
    assert run.history[0]["loss"] > row["loss"]
    module = ct.models.MLP(64, 16, 10)
    module.load_state_dict(run.models[0])
    x, y = digits.test.client(0)
    own = ct.models.MLP(64, 16, 10)
    own.load_state_dict(run.models[run.labels[0]])
    accuracy = float((own(x).argmax(1) == y).float().mean())
    assert run.scores.per_client[0] == pytest.approx(accuracy)


def test_a_new_client_is_assigned_to_its_group(run):
    new = ct.data.rotated_digits(8, seed=9)
    found = [run.assign(*new.train.client(i)) for i in range(8)]
    assert found == [int(run.labels[g * 4]) for g in new.groups]
    with pytest.raises(ValueError, match="MLP does not take rows of shape"):
        run.assign(np.zeros((3, 5)), np.zeros(3, dtype=int))


def test_choosing_on_test_rows_is_explicit(run, digits):
    pairs = [[part.client(i) for i in range(16)] for part in (digits.train, digits.part("test"))]
    turned = ct.Federation.from_clients(pairs[0], test=pairs[1][4:] + pairs[1][:4])  # the test rows of the next group
    honest, peeking = (run.evaluate(choose_on=part, federation=turned) for part in ("train", "test"))
    assert honest.labels.tolist() == run.labels.tolist()  # the test rows only score
    assert peeking.labels.tolist() == np.roll(run.labels, -4).tolist()
    assert honest.mean < 0.6 < 0.8 < peeking.mean
    assert (run.scores.chosen_on, honest.chosen_on, peeking.chosen_on) == ("train", "train", "test")
    with pytest.raises(ValueError, match="choose_on must be"):
        run.evaluate(choose_on="both")


def test_scores_by_hand():
    scores = Scores(
        "accuracy", np.array([0.5, np.nan, 1.0]), np.array([0, 0, 1]), np.array([1, 1, 0]), np.zeros(3), "train"
    )
    assert scores.mean == 0.75 and scores.per_cluster == {0: 0.5, 1: 1.0}
    assert scores.clustering == {"ari": 1.0, "nmi": pytest.approx(1), "purity": 1.0, "matched": 1.0}


def test_a_regression_has_no_accuracy():
    task = ct.Task.regressor(ct.models.Linear(4, 1))
    run = ct.fit(ct.IFCA(2, lr=0.05), task, ct.data.linear_mixture(8, 20, 4), rounds=20)
    assert run.score < 0.1 and "mse" in run.history[0]
    with pytest.raises(AttributeError, match="scored by mse"):
        _ = run.accuracy


def test_killed_at_any_moment_a_run_ends_as_if_never_stopped(tmp_path, digits):
    whole, same = tmp_path / "whole", "final/cluster-0.safetensors"
    finish(whole, digits)
    expected = [[r["round"], r["loss"], r["accuracy"]] for r in record.read_history(whole)]
    killed = {tmp_path / f"killed after {delay}": delay for delay in (0.0, 0.04, 0.11)}
    with slow(0.05, *killed) as process:  # so that the kill falls into a round, a write or a pause
        for delay in killed.values():
            number = next_run_at(process.stdout, 4)
            time.sleep(delay)
            os.kill(number, signal.SIGKILL)
    for folder in killed:
        assert not (folder / "final").exists() and list((folder / "checkpoints").iterdir())
        finish(folder, digits, resume=True)
        assert (whole / same).read_bytes() == (folder / same).read_bytes()
        assert [[r["round"], r["loss"], r["accuracy"]] for r in record.read_history(folder)] == expected


def test_ctrl_c_leaves_a_checkpoint_and_says_how_to_go_on(tmp_path):
    with slow(0.5, tmp_path / "run") as process:
        number = next_run_at(process.stdout, 3)
        time.sleep(0.1)
        os.kill(number, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert "interrupted after round 3 of 12; go on with --resume (in Python, resume=True) and the folder" in errors
    assert (tmp_path / "run" / "checkpoints" / "round-000003.safetensors").exists()


def test_a_truncated_checkpoint_falls_back_to_the_one_before(tmp_path, digits, caplog):
    algorithm = ct.IFCA(4, batch=8)
    whole = ct.fit(algorithm, TASK, digits, rounds=6, out=tmp_path / "whole")
    ct.fit(algorithm, TASK, digits, rounds=4, out=tmp_path / "cut")
    files = sorted((tmp_path / "cut" / "checkpoints").iterdir())
    assert len(files) == 2
    files[-1].write_bytes(files[-1].read_bytes()[:-100])
    resumed = ct.fit(algorithm, TASK, digits, rounds=6, out=tmp_path / "cut", resume=True)
    assert "round-000004.safetensors is damaged" in caplog.text and "falling back" in caplog.text
    assert (tmp_path / "cut" / "checkpoints" / "round-000004.damaged").exists()  # nothing is thrown away
    assert all(torch.equal(a[n], b[n]) for a, b in zip(whole.models, resumed.models, strict=True) for n in a)


def test_an_interrupt_anywhere_in_a_round_leaves_a_run_that_resumes_exactly(tmp_path, digits, monkeypatch):
    whole = ct.fit(ct.IFCA(4), TASK, digits, rounds=6, out=tmp_path / "whole")
    places = {"event": 3, "checkpoint": 3}
    for method, at in places.items():
        calls = iter(range(99))
        plain = getattr(record.Record, method)

        def interrupted(self, *args, plain=plain, calls=calls, at=at, **kwargs):
            if next(calls) == at:
                raise KeyboardInterrupt
            return plain(self, *args, **kwargs)

        monkeypatch.setattr(record.Record, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            ct.fit(ct.IFCA(4), TASK, digits, rounds=6, out=tmp_path / method)
        monkeypatch.undo()
        resumed = ct.fit(ct.IFCA(4), TASK, digits, rounds=6, out=tmp_path / method, resume=True)
        assert resumed.state.round == 6 and [r["round"] for r in resumed.history] == [1, 2, 3, 4, 5, 6]
        assert all(torch.equal(a[n], b[n]) for a, b in zip(whole.models, resumed.models, strict=True) for n in a)


def test_bad_settings_leave_no_folder_behind(tmp_path, digits):
    with pytest.raises(ValueError, match="at most the number of clients"):
        ct.fit(ct.IFCA(17), TASK, digits, rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".config.toml.0a1b.part").touch()  # what a kill in the first write leaves
    assert ct.fit(ct.FedAvg(), TASK, digits, rounds=1, out=tmp_path / "run").path == tmp_path / "run"


def test_a_finished_run_goes_on_for_more_rounds_but_not_fewer(tmp_path, digits):
    ct.fit(ct.FedAvg(), TASK, digits, rounds=3, out=tmp_path / "run")
    with pytest.raises(ValueError, match="has 3 rounds already, more than 2"):
        ct.fit(ct.FedAvg(), TASK, digits, rounds=2, out=tmp_path / "run", resume=True)
    more = ct.fit(ct.FedAvg(), TASK, digits, rounds=5, out=tmp_path / "run", resume=True)
    assert len(more.history) == 5 and record.read_config(tmp_path / "run")["run"]["rounds"] == 5


def test_a_stranger_s_run_folder_leads_nowhere_else(tmp_path, digits):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    ct.fit(ct.FedAvg(), TASK, digits, rounds=2, out=tmp_path / "a")
    for name in (".events.jsonl.part", ".config.toml.part", "checkpoints/.round-000003.safetensors.part"):
        (tmp_path / "a" / name).symlink_to(precious)  # as a predictable temporary name would be taken
    assert len(ct.fit(ct.FedAvg(), TASK, digits, rounds=3, out=tmp_path / "a", resume=True).history) == 3
    assert precious.read_text() == "mine"
    (tmp_path / "log").symlink_to(precious)
    with pytest.raises(OSError, match="log cannot be written"):
        snapshot.append_text(tmp_path / "log", "theirs")
    assert precious.read_text() == "mine"


def test_a_checkpoint_that_cannot_be_read_is_no_damaged_one(tmp_path, digits, monkeypatch):
    ct.fit(ct.FedAvg(), TASK, digits, rounds=2, out=tmp_path / "a")

    def refused(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("safetensors.safe_open", refused)
    with pytest.raises(OSError, match=r"round-000002\.safetensors cannot be read: Permission denied"):
        ct.fit(ct.FedAvg(), TASK, digits, rounds=3, out=tmp_path / "a", resume=True)
    assert len(list((tmp_path / "a" / "checkpoints").glob("round-*.safetensors"))) == 2


def test_one_flipped_bit_of_a_checkpoint_is_noticed(tmp_path, digits, caplog):
    algorithm = ct.FedAvg(batch=8)
    whole = ct.fit(algorithm, TASK, digits, rounds=4, out=tmp_path / "whole")
    ct.fit(algorithm, TASK, digits, rounds=3, out=tmp_path / "cut")
    last = tmp_path / "cut" / "checkpoints" / "round-000003.safetensors"
    content = bytearray(last.read_bytes())
    content[-99] ^= 1  # of a weight, the last of the file
    last.write_bytes(content)
    resumed = ct.fit(algorithm, TASK, digits, rounds=4, out=tmp_path / "cut", resume=True)
    assert "round-000003.safetensors is damaged and set aside; falling back" in caplog.text
    assert all(torch.equal(whole.models[0][n], resumed.models[0][n]) for n in whole.models[0])
    with pytest.raises(snapshot.Damaged, match=r"round-000003\.damaged is damaged \(its digest is another\)"):
        snapshot.load(last.with_suffix(".damaged"), snapshot.named_tuples(algorithm))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_checkpoint_whose_models_are_not_finite_is_damaged(tmp_path, digits, caplog, value):
    ct.fit(ct.FedAvg(), TASK, digits, rounds=2, out=tmp_path / "a")
    last = tmp_path / "a" / "checkpoints" / "round-000002.safetensors"
    content = snapshot.load(last, snapshot.named_tuples(ct.FedAvg()))
    next(iter(content["state"].theta.values())).view(-1)[7] = value
    snapshot.save(last, content)
    assert len(ct.fit(ct.FedAvg(), TASK, digits, rounds=3, out=tmp_path / "a", resume=True).history) == 3
    assert "round-000002.safetensors is damaged and set aside" in caplog.text


def test_a_checkpoint_from_before_digests_is_taken_as_it_is(tmp_path, digits, caplog):
    ct.fit(ct.FedAvg(), TASK, digits, rounds=2, out=tmp_path / "a")
    last = tmp_path / "a" / "checkpoints" / "round-000002.safetensors"
    tensors, header = read_tensors(last)
    snapshot.write_tensors(last, tensors, {"tree": header["tree"]})
    ct.fit(ct.FedAvg(), TASK, digits, rounds=3, out=tmp_path / "a", resume=True)
    assert "damaged" not in caplog.text


def test_every_checkpoint_damaged_means_starting_again(tmp_path, digits):
    ct.fit(ct.FedAvg(), TASK, digits, rounds=2, out=tmp_path / "a")
    for file in (tmp_path / "a" / "checkpoints").iterdir():
        file.write_bytes(b"{}")
    again = ct.fit(ct.FedAvg(), TASK, digits, rounds=3, out=tmp_path / "a", resume=True)
    assert [r["round"] for r in again.history] == [1, 2, 3] == [r["round"] for r in record.read_history(tmp_path / "a")]


def test_a_folder_is_never_written_over(tmp_path, digits):
    ct.fit(ct.FedAvg(), TASK, digits, rounds=1, out=tmp_path / "a")
    before = (tmp_path / "a" / "final" / "result.json").read_bytes()
    with pytest.raises(ValueError, match="already holds a run; resume it, overwrite it, or choose another folder"):
        ct.fit(ct.FedAvg(), TASK, digits, rounds=1, out=tmp_path / "a")
    assert (tmp_path / "a" / "final" / "result.json").read_bytes() == before
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="exists and is not a run folder"):
        ct.fit(ct.FedAvg(), TASK, digits, rounds=1, out=tmp_path / "b")
    with pytest.raises(ValueError, match=r"was made with algorithm.lr = 0.1, now it is 0.2"):
        ct.fit(ct.FedAvg(lr=0.2), TASK, digits, rounds=2, out=tmp_path / "a", resume=True)


def test_only_one_run_writes_to_a_folder(tmp_path, digits):
    out = tmp_path / "run"
    with slow(0.5, out) as process:
        number = next_run_at(process.stdout, 2)
        for options in ({}, {"resume": True}, {"overwrite": True}):
            with pytest.raises(ValueError, match=r"run: another run is writing to this folder"):
                finish(out, digits, **options)
        os.kill(number, signal.SIGKILL)  # and the lock with it
    assert len(finish(out, digits, resume=True).history) == 12
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_overwriting_that_is_killed_at_any_step_blocks_nothing(tmp_path):
    digits = ct.data.rotated_digits(4, seed=0)
    ct.fit(ct.FedAvg(), TASK, digits, rounds=1, seed=1, out=tmp_path / "old")
    old = (tmp_path / "old" / "final" / "result.json").read_bytes()
    subprocess.run([sys.executable, "-c", KILLED_OVERWRITING, str(tmp_path)], check=True, timeout=300)
    steps = sorted((p for p in tmp_path.iterdir() if p.name.isdecimal()), key=lambda p: int(p.name))
    assert len(steps) > 10
    for step in steps:
        results = [p for p in (step / "run", step / ".run.old") if (p / "final" / "result.json").is_file()]
        begun = (step / "run" / "config.toml").is_file() and record.read_config(step / "run")["run"]["seed"] == 2
        assert begun or any((p / "final" / "result.json").read_bytes() == old for p in results), step.name
        ct.fit(ct.FedAvg(), TASK, digits, rounds=1, seed=3, out=step / "run", overwrite=True)
        assert record.read_config(step / "run")["run"]["seed"] == 3 and [p.name for p in step.iterdir()] == ["run"]


def test_a_diverged_run_stops_and_keeps_the_last_good_state(tmp_path, digits):
    task = ct.Task.regressor(ct.models.Linear(4, 1))
    federation = ct.data.linear_mixture(8, 20, 4)
    with pytest.raises(ct.Diverged) as error:
        ct.fit(ct.IFCA(2, lr=50.0, init="random"), task, federation, rounds=50, out=tmp_path / "run")
    assert "the loss of cluster" in str(error.value) and "is no longer finite" in str(error.value)
    good = error.value.run
    assert all(torch.isfinite(x).all() for model in good.models for x in model.values())
    done = len(good.history)
    assert str(error.value).startswith(f"round {done + 1}: ")
    assert (tmp_path / "run" / "checkpoints" / f"round-{done:06d}.safetensors").exists()


def test_a_start_that_diverges_says_so():
    task = ct.Task.regressor(ct.models.Linear(4, 1))
    with pytest.raises(ValueError, match="the start of cluster 0, 1 is not finite; a smaller lr usually helps"):
        ct.fit(ct.IFCA(2, lr=50.0), task, ct.data.linear_mixture(8, 20, 4), rounds=5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rounds": True}, "rounds must be a whole number of at least 1, got True"),
        ({"seed": 1.5}, "seed must be a whole number of at least 0, got 1.5"),
        ({"rounds": 0}, "rounds must be a whole number of at least 1, got 0"),
        ({"executor": "ray"}, "executor must be one of sequential, vmap, vectorised, sharded, got 'ray'"),
        ({"device": "tpu"}, "device must be auto, cpu or cuda, got 'tpu'"),
        ({"resume": True}, "resume=True needs out"),
    ],
)
def test_bad_arguments(digits, settings, message):
    with pytest.raises(ValueError) as error:
        ct.fit(ct.FedAvg(), TASK, digits, **{"rounds": 1, **settings})
    assert message in str(error.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(digits):
    with pytest.raises(ValueError, match="torch sees no GPU here"):
        ct.fit(ct.FedAvg(), TASK, digits, rounds=1, device="cuda")


def test_the_log_names_the_chunks(tmp_path, digits):
    ct.fit(ct.IFCA(2), TASK, digits, rounds=1, out=tmp_path / "run")
    told = [e["message"] for e in record.read_events(tmp_path / "run") if e["event"] == "log"]
    expected = "IFCA.step on up to 366 train rows: 16 clients in chunks of"
    assert any(expected in m and "GiB free on cpu" in m for m in told), told


def test_at_most_a_hundred_evaluations():
    federation = ct.data.linear_mixture(2, 2, 2)
    run = ct.fit(ct.FedAvg(lr=0.01, tau=1), ct.Task.regressor(ct.models.Linear(2, 1)), federation, rounds=250)
    scored = [r["round"] for r in run.history if r["mse"] is not None]
    assert len(scored) <= 101 and scored[-1] == 250


class Doubtful(ct.IFCA):
    def doubts(self, state, cohort):
        yield f"{len(self.place(state, cohort))} clients were asked in round {cohort.when[0] + 1}"


def test_a_method_may_ask_all_clients_what_speaks_against_its_result(digits):
    """What that costs is not charged."""
    doubtful, plain = (ct.fit(cls(2, fraction=0.5), TASK, digits, rounds=2) for cls in (Doubtful, ct.IFCA))
    assert "16 clients were asked in round 2" in doubtful.warnings
    for way in ("bytes_down", "bytes_up"):
        assert [row[way] for row in doubtful.history] == [row[way] for row in plain.history]


def test_result_json_is_plain(tmp_path, digits):
    ct.fit(ct.IFCA(2), TASK, digits, rounds=1, out=tmp_path / "run")
    result = json.loads((tmp_path / "run" / "final" / "result.json").read_text())
    assert len(result["labels"]) == len(result["per_client"]) == 16 and result["clusters"] == 2
    assert not list(Path(tmp_path).rglob("*.part"))
    assert list((tmp_path / "run" / "checkpoints").iterdir())
