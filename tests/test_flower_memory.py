"""What counts of what nodes keep: not a try that came to nothing, not a straggler's, not another run's."""

import json
import os
import shutil
import time

import pytest
import torch

import coterie as ct
from coterie.core.key import Key
from coterie.engines import simulated
from coterie.flower.local import LocalGrid
from coterie.flower.memory import FORGOTTEN, Memory, Moment
from coterie.flower.node import Node
from coterie.flower.secure_engine import SecureFlower
from coterie.flower.server_app import Settings, serve
from coterie.runs.fit import fit_on

FLOW = ct.models.AffineFlow(6)
# Without the closed form clients learn from the clusters that they remember of their points.
ALGORITHM = ct.UIFCA(k=3, restarts=2, init="random", shrink=False, closed=False, tau=2, steps=3, lr=3e-3)
ROUNDS = 5


def left_out(points, task, away):
    """The simulator's models of a run in which some clients miss some rounds."""
    key = Key.of(0)
    cohort = simulated(points, task, key.fold(1), executor="vmap")
    state = ALGORITHM.start(task, cohort.at(0), key.fold(0))
    for t in range(ROUNDS):
        state, _ = ALGORITHM.round(state, cohort.without(torch.tensor(away.get(t, ()))).at(t))
    return ALGORITHM.models(state)


class Spoilt:
    """Has one answer of a node, after it computed, not arrive; or be nonsense."""

    def __init__(self, node, number, how):
        self.node, self.number, self.how, self.count = node, number, how, 0

    def __call__(self, node, answer):
        if node != self.node or "answer" not in answer.content:
            return answer
        self.count += 1
        if self.count != self.number:
            return answer
        if self.how == "late":
            return None
        answer.content["answer.tree"]["tree"] = "{"
        return answer


@pytest.mark.parametrize("how", ["late", "nonsense"])
@pytest.mark.parametrize("stop", [None, 2, 3])
def test_a_round_that_happened_without_a_site_leaves_its_clients_as_they_were(how, stop, points, on_flower, tmp_path):
    """Round 1 is done without site-1, whose node has kept what it did; the server may be started anew after it."""
    task = ct.Task.density(FLOW)
    spoil = Spoilt(8, 7, how)  # one answer in the start and three in each round, of which the last has clients keep

    def go(rounds, resume):
        return fit_on(
            lambda key: on_flower(points, task, key, spoil=spoil, min_replies=1, deadline=0.1),
            ALGORITHM,
            rounds=rounds,
            out=tmp_path / "run",
            resume=resume,
            evaluations=1,
        )

    if stop is not None:
        go(stop, resume=False)
    run = go(ROUNDS, resume=stop is not None)
    assert [row["participants"] for row in run.history] == [8, 6, 8, 8, 8]
    for n, x in left_out(points, task, {1: [2, 3]}).items():
        assert torch.allclose(x, torch.stack([theta[n] for theta in run.models]), rtol=1e-5, atol=1e-5)


def kept(memory, moment):
    return {name: int(x) for name, x in memory.load(moment, {}).items()}


def test_only_the_try_that_counted_is_remembered(tmp_path):
    memory = Memory(tmp_path, "a")
    memory.save(Moment("run", 0, "aa"), {"x": torch.tensor(0)})
    memory.save(Moment("run", 1, "b1", after=(0, "aa")), {"x": torch.tensor(1)})
    assert kept(memory, Moment("run", 2, "cc", after=(0, "aa"))) == {"x": 0}
    assert kept(memory, Moment("run", 2, "cc", after=(1, "b1"))) == {"x": 0}  # what is void does not come back


def test_a_site_that_has_never_counted_remembers_nothing(tmp_path):
    memory = Memory(tmp_path, "a")
    memory.save(Moment("run", 0, "aa"), {"x": torch.tensor(0)})
    assert kept(memory, Moment("run", 1, "bb")) == {}


@pytest.mark.parametrize("late", [(1, "bb"), (2, "bb")], ids=["an earlier round", "another try"])
def test_a_straggler_leaves_newer_memory_alone(late, tmp_path):
    memory = Memory(tmp_path, "a")
    newest = Moment("run", 2, "cc", after=(0, "aa"))
    memory.save(Moment("run", 0, "aa"), {"x": torch.tensor(0)})
    memory.save(newest, {"x": torch.tensor(2)})
    with pytest.raises(ValueError, match="a later message has overtaken this one"):
        memory.save(Moment("run", *late, after=(0, "aa")), {"x": torch.tensor(1)})
    assert kept(memory, newest) == {"x": 2}
    assert kept(memory, Moment("run", 3, "dd", after=(2, "cc"))) == {"x": 2}
    assert kept(memory, Moment("run", 2, "dd", after=(0, "aa"))) == {"x": 0}


def test_a_run_in_the_place_of_another_does_not_share_its_memory(points, tmp_path):
    sites = {1: points.select(range(4)), 2: points.select(range(4, 8))}
    grid = LocalGrid({i: Node(f"site-{i}", share, tmp_path / "nodes") for i, share in sites.items()})
    out = tmp_path / "run"

    def go(rounds, resume=False):
        algorithm = {"name": "uifca", "k": 3, "restarts": 2, "init": "random"}
        task = {"kind": "density", "model": {"name": "affine_flow", "inputs": 6}}
        settings = Settings(out=str(out), resume=resume, nodes=2, deadline=1.0)
        serve(grid, settings, {"algorithm": algorithm, "task": task, "run": {"rounds": rounds}})
        return json.loads((out / "roster.json").read_text())["run"]

    first = go(1)
    assert go(2, resume=True) == first
    shutil.rmtree(out)
    assert go(1) != first
    assert len(list((tmp_path / "nodes").glob("*/*"))) == 2 * len(sites)
    kept = json.loads((out / "roster.json").read_text())
    del kept["run"]
    (out / "roster.json").write_text(json.dumps(kept))
    with pytest.raises(ValueError, match="damaged: it does not name the run"):
        go(2, resume=True)


def test_a_run_with_which_nobody_goes_on_is_forgotten(tmp_path):
    memory = Memory(tmp_path, "a")
    for run in ("old", "new"):
        memory.save(Moment(run, 0, "aa"), {"x": torch.tensor(0)})
    for unit in (1, 2):  # found so twice, each time as long after
        for path in tmp_path.glob("*/*"):
            os.utime(path, (0, path.stat().st_mtime - FORGOTTEN - 60))
        memory.save(Moment("new", unit, "bb", after=(0, "aa")), {"x": torch.tensor(unit)})
    assert kept(memory, Moment("new", 2, "cc", after=(1, "bb"))) == {"x": 1}
    assert kept(memory, Moment("old", 1, "bb", after=(0, "aa"))) == {}
    assert len(list(tmp_path.glob("*/*"))) == 1


def test_a_clock_that_jumps_makes_nobody_forget(tmp_path, monkeypatch):
    """Two runs go on side by side, and so does one that was stopped for a while, before and after the jump and back."""
    memory, now = Memory(tmp_path, "a"), time.time()
    for run in ("one", "two", "stopped"):
        memory.save(Moment(run, 0, "aa"), {"x": torch.tensor(0)})
    for unit, jump in enumerate((90 * 86400 + 60, 95 * 86400, 0, 91 * 86400), 1):
        monkeypatch.setattr(time, "time", lambda at=now + jump: at)
        for run in ("one", "two"):
            memory.save(Moment(run, unit, "aa", after=(unit - 1, "aa")), {"x": torch.tensor(unit)})
    assert kept(memory, Moment("one", 5, "bb", after=(4, "aa"))) == {"x": 4}
    assert kept(memory, Moment("two", 5, "bb", after=(4, "aa"))) == {"x": 4}
    assert kept(memory, Moment("stopped", 1, "bb", after=(0, "aa"))) == {"x": 0}


def test_of_a_secure_sum_those_count_whose_sheets_arrived(points, on_flower):
    task = ct.Task.density(FLOW)
    plain = on_flower(points, task, spoil=lambda node, answer: None if lost(node, answer) else answer, deadline=0.1)
    secure = plain.wrapped(lambda engine: SecureFlower(engine, ct.SecureSum(min_members=2, threshold=0.6)))
    secure.perform(lambda cohort: ALGORITHM.start(task, cohort.at(0), Key.of(0)), unit=0)
    counted = secure.everyone.ledger.memory
    assert sorted(counted) == [0, 2] and {unit for unit, _ in counted.values()} == {0}


def lost(node, answer):
    """Whether this is the sheet of site-1."""
    return node == 8 and "form" in answer.content
