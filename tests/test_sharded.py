"""The sharded executor: real processes on this machine, started as torchrun starts them, against a single one.

The file is also the program that those processes run: `torchrun tests/test_sharded.py JOB FOLDER`.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import coterie as ct
from coterie import record
from coterie.client import ClientStep, Reply
from coterie.executors import EXECUTORS, ranks
from coterie.executors.sharded import deal
from coterie.key import Key
from coterie.tree import flat

TASK = ct.Task.classifier(ct.models.MLP(6, 5, 3))
CASES = {
    "plain": ct.IFCA(2),
    "minibatch": ct.IFCA(2, batch=4, tau=3),
    "half": ct.IFCA(2, fraction=0.5, patience=1),
    "restarts": ct.IFCA(2, restarts=2, init="random", tau=3),
    "alone": ct.LocalOnly(fraction=0.5),
    "one_client": ct.FedAvg(fraction=0.0, weights="size"),  # fewer clients than processes
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


def federation():
    """Ten clients of three sizes in two well separated groups."""
    g = torch.Generator().manual_seed(0)
    centres = 3 * torch.randn(2, 3, 6, generator=g)
    labels = [torch.randint(3, (n,), generator=g) for n in (4, 30, 4, 4, 12, 30, 4, 12, 4, 4)]
    clients = [(centres[i % 2][y] + torch.randn(len(y), 6, generator=g), y) for i, y in enumerate(labels)]
    return ct.Federation.from_clients(clients, groups=[i % 2 for i in range(10)])


def fitted(algorithm, executor, **options):
    run = ct.fit(algorithm, TASK, federation(), rounds=4, executor=executor, device="cpu", **options)
    found = {f"model.{n}": torch.stack([m[n] for m in run.models]) for n in run.models[0]}
    history = torch.tensor([[r["bytes_down"], r["bytes_up"], r["participants"]] for r in run.history])
    scores = torch.from_numpy(run.scores.per_client)
    return {**found, "labels": torch.from_numpy(run.labels), "history": history, "scores": scores}


def counted(executor):
    cohort = EXECUTORS[executor](federation(), TASK, Key.of(0), torch.device("cpu"))
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


def every_case(executor, folder):
    """What every case gives, in one flat dict of tensors; `folder` holds a run of two rounds to go on with."""
    found = {"memory": counted(executor)} | {name: fitted(a, executor) for name, a in CASES.items()}
    found["resumed"] = fitted(CASES["minibatch"], executor, out=folder / "begun", resume=True)
    return {f"{case}.{name}": x.contiguous() for case, parts in found.items() for name, x in parts.items()}


def begin(folder):
    ct.fit(CASES["minibatch"], TASK, federation(), rounds=2, device="cpu", out=folder / "begun")


def start(count, *words, **options):
    """Start processes by torchrun, and return what they printed once they have ended."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    return subprocess.run([*command, *map(str, words)], capture_output=True, text=True, timeout=120, **options)


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    folder = tmp_path_factory.mktemp("single")
    begin(folder)
    return every_case("vectorised", folder)


@pytest.mark.parametrize("count", [2, 3])
def test_any_number_of_processes_gives_what_one_gives(single, tmp_path, count):
    begin(tmp_path)
    done = start(count, __file__, "cases", tmp_path)
    assert done.returncode == 0, done.stderr
    first, *others = (load_file(tmp_path / f"rank-{r}.safetensors") for r in range(count))
    for name, expected in single.items():
        assert all(torch.equal(first[name], other[name]) for other in others), name  # bit for bit
        exact = not expected.is_floating_point()
        assert torch.allclose(first[name], expected, rtol=0, atol=0 if exact else 1e-6), name
    assert len(record.read_history(tmp_path / "begun")) == 4


def test_the_command_line_divides_the_work_by_itself(tmp_path):
    (tmp_path / "job.toml").write_text(CONFIG)
    run = ("-m", "coterie", "run", tmp_path / "job.toml", "--json")
    done = start(2, *run, "--out", tmp_path / "shared")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rounds"] == 4  # said once
    plain = subprocess.run([sys.executable, *run, "--out", tmp_path / "plain"], capture_output=True, timeout=120)
    assert plain.returncode == 0
    names = [sorted(str(p.relative_to(f)) for p in f.rglob("*")) for f in (tmp_path / "shared", tmp_path / "plain")]
    assert names[0] == names[1]
    shared, alone = (load_file(tmp_path / f / "final" / "models.safetensors") for f in ("shared", "plain"))
    assert torch.allclose(flat(shared), flat(alone), rtol=0, atol=1e-6)
    results = [record.read_result(tmp_path / f) for f in ("shared", "plain")]
    assert all(results[0][name] == results[1][name] for name in ("labels", "bytes_down", "bytes_up", "per_client"))
    told = [e["message"] for e in record.read_events(tmp_path / "shared") if e["event"] == "log"]
    assert told[0] == "sharded: 2 processes; what follows is the first one's share"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--set", "algorithm.k=11"), "IFCA: k must be at most the number of clients, 10, got 11"),
        (("--executor", "vmap"), "torchrun started 2 processes, which would all do the same work with executor 'vmap'"),
    ],
)
def test_bad_input_is_said_once(tmp_path, words, message):
    (tmp_path / "job.toml").write_text(CONFIG)
    done = start(2, "-m", "coterie", "run", "job.toml", *words, cwd=tmp_path)
    assert done.returncode != 0 and done.stdout == ""
    said = [line for line in done.stderr.splitlines() if line.startswith("coterie: ")]
    assert len(said) == 1 and message in said[0], done.stderr
    assert not (tmp_path / "runs").exists()


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
    with pytest.raises(ValueError, match=r"sharded: 4 processes were started on a machine with 1 GPU; start one per GPU"):
        ranks.join(torch.device("cuda"))
    with pytest.raises(ValueError, match=r"say device 'cuda', not 'cuda:0'"):
        ranks.join(torch.device("cuda:0"))


def main(job, folder):
    if job == "cases":
        save_file(every_case("sharded", folder), folder / f"rank-{ranks.rank()}.safetensors")
    else:
        ct.fit(ct.FedAvg(), TASK, federation(), rounds=10**6, executor="sharded", device="cpu", out=folder / "run")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
