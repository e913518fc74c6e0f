"""The sharded executor: real processes on this machine, started as torchrun starts them, against a single one.

The file is also the program that those processes run: `torchrun tests/test_sharded.py JOB FOLDER [CASE…]`.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import coterie as ct
from coterie.core.key import Key
from coterie.core.pytree import flat, stack
from coterie.core.step import ClientStep, Reply
from coterie.engines import ranks, simulated
from coterie.engines.sharded import deal
from coterie.runs import folder as record
from coterie.runs.config import build

TASK = ct.Task.classifier(ct.models.MLP(6, 5, 3))


class Doubtful(ct.IFCA):
    """Asks its clients at the end of a run: all processes have to, or they are out of step."""

    def doubts(self, state, cohort):
        yield f"clients chose {self.place(state, cohort).tolist()}"


CASES = {
    "plain": ct.IFCA(2, tau=3),
    "minibatch": ct.IFCA(2, tau=3, batch=4),
    "half": ct.IFCA(2, tau=3, fraction=0.5, patience=1),
    "restarts": ct.IFCA(2, tau=3, restarts=2, init="random"),
    "soft": ct.FedEM(2, tau=3, batch=4, fraction=0.5),
    "alone": ct.LocalOnly(fraction=0.5),
    "one_client": ct.FedAvg(fraction=0.0, weights="size"),  # fewer clients than processes
    "doubtful": Doubtful(2, tau=3),
}
CONFIG = """
[algorithm]
name = "ifca"
k = 2
lr = 0.05

[task]
kind = "regressor"
model = { name = "linear", inputs = 6, outputs = 1 }

[data]
name = "linear_mixture"
clients = 10
rows = 8
features = 6

[run]
rounds = 4
device = "cpu"
"""


@dataclass(frozen=True)
class Counting:
    """Clients that remember how often they were asked, and a vector that follows from their rows."""

    def step(self, task):
        def run(shared, local):
            asked, seen = local.memory or (torch.zeros((), dtype=torch.long), torch.zeros(6))
            seen = seen + (local.data.x * local.data.mask[:, None]).sum(0) / 100
            note = {"asked": asked, "odd": asked % 2 == 1}
            return Reply({"seen": seen}, torch.ones(()), asked % 2, note, memory=(asked + 1, seen))

        return ClientStep(run)


@dataclass(frozen=True)
class Failing:
    """Fails in one process only, as a process does that has less memory than the others."""

    def step(self, task):
        if ranks.rank() == 1:
            raise ValueError("one client is too large")
        return Counting().step(task)


def complaints(cohort):
    """What every process says if only one has failed, and if each is in another round."""
    for now, step in ((cohort.at(0), Failing().step), (cohort.at(ranks.rank()), Counting().step)):
        with pytest.raises(ValueError) as error:
            now.gather(step, torch.zeros(1))
        yield str(error.value)


def federation():
    """Ten clients of three sizes of two well separated kinds, which are not told: scoring that loads scikit-learn."""
    g = torch.Generator().manual_seed(0)
    centres = torch.randn(2, 3, 6, generator=g)
    labels = [torch.randint(3, (n,), generator=g) for n in (4, 30, 4, 4, 12, 30, 4, 12, 4, 4)]
    clients = [(centres[i % 2][y] + 0.3 * torch.randn(len(y), 6, generator=g), y) for i, y in enumerate(labels)]
    return ct.Federation.from_clients(clients)


def fitted(algorithm, executor, **options):
    run = ct.fit(algorithm, TASK, federation(), rounds=3, executor=executor, device="cpu", **options)
    found = {f"model.{n}": torch.stack([m[n] for m in run.models]) for n in run.models[0]}
    history = torch.tensor([[r["bytes_down"], r["bytes_up"], r["participants"]] for r in run.history])
    scores = torch.from_numpy(run.scores.per_client)
    return {**found, "labels": torch.from_numpy(run.labels), "history": history, "scores": scores}


def cohort_of(executor):
    return simulated(federation(), TASK, Key.of(0), executor=executor)


def counted(cohort):
    asked = [cohort.at(t).sample(0.4).combine(Counting().step, torch.zeros(1), slots=2) for t in range(5)]
    reply = cohort.at(5).gather(Counting().step, torch.zeros(1))
    memory = cohort.ledger.memory
    return {
        "update": torch.stack([sums.update["seen"] for sums in asked]),
        "note": torch.cat([sums.note["odd"] for sums in asked]),
        "reply": reply.update["seen"],
        "asked": torch.stack([memory[i][0] for i in range(10)]),
        "seen": torch.stack([memory[i][1] for i in range(10)]),
        "bytes": torch.tensor([cohort.ledger.bytes_down, cohort.ledger.bytes_up]),
    }


def results(executor, folder, cases):
    """What the cases give, in one flat dict of tensors; `folder` holds a run of one round to go on with."""
    found = {"memory": counted(cohort_of(executor))} | {name: fitted(CASES[name], executor) for name in cases}
    found["resumed"] = fitted(CASES["minibatch"], executor, out=folder / "begun", resume=True)
    return {f"{case}.{name}": x.contiguous() for case, parts in found.items() for name, x in parts.items()}


def begin(folder):
    ct.fit(CASES["minibatch"], TASK, federation(), rounds=1, device="cpu", out=folder / "begun")


def start(count, *words, **options):
    """Start processes by torchrun, and return what they printed once they have ended."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    return subprocess.run([*command, *map(str, words)], capture_output=True, text=True, timeout=120, **options)


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    folder = tmp_path_factory.mktemp("single")
    begin(folder)
    return results("vectorised", folder, CASES)


def test_several_processes_give_what_one_gives(single, tmp_path):
    """Three: more than a sampled round may have clients. The command line is tried with two."""
    count = 3
    begin(tmp_path)
    done = start(count, __file__, "fit", tmp_path, *CASES)
    assert done.returncode == 0, done.stderr
    first, *others = (load_file(tmp_path / f"rank-{r}.safetensors") for r in range(count))
    assert {name.split(".")[0] for name in first} == {"memory", "resumed", *CASES}
    for name, x in first.items():
        assert all(torch.equal(x, other[name]) for other in others), name  # bit for bit
        assert torch.allclose(x, single[name], rtol=0, atol=1e-6 if x.is_floating_point() else 0), name
    assert len(record.read_history(tmp_path / "begun")) == 3
    assert [(tmp_path / f"rank-{r}.txt").read_text() for r in range(count)] == [
        "one client is too large; sharded: the processes are out of step; all of them must be given the same "
        "configuration, data and run folder"
    ] * count


def test_the_command_line_divides_the_work_by_itself(tmp_path):
    (tmp_path / "job.toml").write_text(CONFIG)
    shared, plain = tmp_path / "shared", tmp_path / "plain"
    done = start(2, "-m", "coterie", "run", tmp_path / "job.toml", "--json", "--out", shared)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rounds"] == 4  # said once
    config = build(tomllib.loads(CONFIG))
    ct.fit(config.algorithm, config.task, config.federation, out=plain, **config.run)
    names = [{p.relative_to(f) for p in f.rglob("*") if p.parent.name != "checkpoints"} for f in (shared, plain)]
    assert names[0] == names[1]
    models = [flat(stack(record.read_models(f))) for f in (shared, plain)]
    assert torch.allclose(*models, rtol=0, atol=1e-6)
    found = [record.read_result(f) for f in (shared, plain)]
    assert all(found[0][name] == found[1][name] for name in ("labels", "bytes_down", "bytes_up"))
    told = [e["message"] for e in record.read_events(shared) if e["event"] == "log"]
    assert told[0] == "sharded: 2 processes; what follows is the first one's share"


def test_bad_input_is_said_once(tmp_path):
    (tmp_path / "job.toml").write_text(CONFIG)
    done = start(2, "-m", "coterie", "run", "job.toml", "--set", "algorithm.k=11", cwd=tmp_path)
    assert done.returncode != 0 and done.stdout == ""
    said = [line for line in done.stderr.splitlines() if line.startswith("coterie: ")]
    assert said == ["coterie: IFCA: k must be at most the number of clients, 10, got 11"], done.stderr
    assert not (tmp_path / "runs").exists()


def test_several_processes_that_would_do_the_same_work(tmp_path, monkeypatch, capsys):
    from coterie.cli.main import main as command_line  # not above: every process that is started would load it

    (tmp_path / "job.toml").write_text(CONFIG)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["coterie", "run", str(tmp_path / "job.toml"), "--executor", "vmap"])
    with pytest.raises(SystemExit, match="2"):
        command_line()
    said = capsys.readouterr()[1]
    assert "torchrun started 2 processes, which would all do the same work with executor 'vmap'" in said


@pytest.mark.parametrize(("first", "second"), [(signal.SIGINT, signal.SIGINT), (None, signal.SIGKILL)])
def test_stopped_or_bereft_the_first_process_saves(tmp_path, first, second):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "WORLD_SIZE": "2"}
    pair = [
        subprocess.Popen(
            [sys.executable, __file__, "endless", str(tmp_path)],
            env={**os.environ, **place, "RANK": f"{r}"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(2)
    ]
    try:
        wait_for(lambda: list(tmp_path.glob("run/checkpoints/round-*")), pair)
        for process, number in zip(pair, (first, second), strict=True):
            if number is not None:
                process.send_signal(number)
        said = [process.communicate(timeout=60)[1] for process in pair]
    finally:
        for process in pair:
            process.kill()
    assert all(process.returncode != 0 for process in pair)
    assert "go on with --resume" in said[0] and "go on with --resume" not in said[1]
    assert ("ConnectionError: sharded: rank 0 of 2 lost touch with another" in said[0]) == (first is None)
    done = int(said[0].split("interrupted after round ")[1].split()[0])
    assert (tmp_path / "run" / "checkpoints" / f"round-{done:06d}.safetensors").exists()


def wait_for(condition, processes, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end and all(p.poll() is None for p in processes)
        time.sleep(0.05)


def test_shares_have_about_equal_rows():
    sizes = torch.tensor([5, 50, 5, 5, 5, 30, 10, 10, 40, 40])
    shares = deal(sizes, 3)
    assert torch.cat(shares).tolist() == list(range(10))
    assert [int(sizes[s].sum()) for s in shares] == [65, 55, 80]
    assert [len(s) for s in deal(torch.tensor([7]), 3)] == [0, 1, 0]


def test_more_processes_than_gpus(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="4 processes were started on a machine with 1 GPU; start at most one per GPU"):
        ranks.join(torch.device("cuda"))
    with pytest.raises(ValueError, match=r"say device 'cuda', not 'cuda:0'"):
        ranks.join(torch.device("cuda:0"))


def main(job, folder, *cases):
    if job == "fit":
        save_file(results("sharded", folder, cases), folder / f"rank-{ranks.rank()}.safetensors")
        (folder / f"rank-{ranks.rank()}.txt").write_text("; ".join(complaints(cohort_of("sharded"))))
    else:
        ct.fit(ct.FedAvg(), TASK, federation(), rounds=10**6, executor="sharded", device="cpu", out=folder / "run")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has what it starts in the background ignore it
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
