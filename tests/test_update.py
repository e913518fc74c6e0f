"""Populations that change: `Run.update` goes on with clients as they are now."""

import json

import pytest
import torch
from torch import nn

import coterie as ct
from coterie.core.method import Groups
from coterie.core.pytree import flat
from coterie.runs.new_group import Judged, is_clear

TASK = ct.Task.regressor(ct.models.Linear(5, 1))
CENTRES = 2**0.5 * torch.linalg.qr(torch.randn(5, 5, generator=torch.Generator().manual_seed(7))).Q
GROUPS = {f"c{i}": i % 3 for i in range(18)}  # who is in which group at first


def batch(groups, seed, rows=16):
    """Fresh rows of clients, given the group of each by its name."""
    g = torch.Generator().manual_seed(seed)

    def client(j):
        x = torch.randn(rows, 5, generator=g)
        return x, x @ CENTRES[j] + 0.5 * torch.randn(rows, generator=g)

    clients = [client(j) for j in groups.values()]
    return ct.Federation.from_clients(clients, groups=list(groups.values()), ids=list(groups))


@pytest.fixture(scope="module")
def run():
    return ct.fit(ct.FedX(k=3), TASK, batch(GROUPS, 0), rounds=30, evaluations=1)


def by_name(run):
    return dict(zip(run._cohort.federation.ids, run.labels.tolist(), strict=True))


def test_newcomers_are_placed_who_left_is_dropped_and_names_decide(run):
    before = by_name(run)
    groups = {"new": 1, **dict(reversed(GROUPS.items()))}
    del groups["c4"], groups["c5"]
    after = run.update(batch(groups, 1), rounds=2)
    found = after.updates[-1]
    assert (found["joined"], found["left"], found["moved"], found["clients"]) == (1, 2, 0, 17)
    now = by_name(after)
    assert now.pop("new") == before["c1"] and now == {name: before[name] for name in now}
    assert len(after.history) == len(run.history) + 2 and len(run.updates) == 0
    assert after.algorithm.labels(after.state).tolist() == after.labels.tolist()


@pytest.mark.parametrize(
    "method", [ct.FedX(k=3), ct.IFCA(k=3, lr=0.05), ct.MixedEffects(k=3, restarts=2), ct.Personal(ct.FedX(k=3))]
)
def test_a_client_is_moved_once_its_rows_have_said_so_often_enough(method):
    done = ct.fit(method, TASK, batch(GROUPS, 0), rounds=30, evaluations=1)
    assert done.ari == 1.0
    first, turned = by_name(done), {**GROUPS, "c0": 1}
    done = done.update(batch(turned, 1), rounds=2, patience=2)
    assert by_name(done) == first and done.moved == []  # it keeps its group, and is scored with that
    assert done.updates[-1]["waiting"] == {"c0": [first["c1"], 1]} and done.updates[-1]["pending"] == 1
    done = done.update(batch(turned, 2), rounds=2, patience=2)
    assert done.moved == [("c0", first["c0"], first["c1"], 1)]
    assert by_name(done) == {**first, "c0": first["c1"]} and done.ari == 1.0
    assert done.updates[-1]["new_groups"] == 0 and done.updates[-1]["after"] < 0.5


def test_rows_that_speak_for_another_group_only_once_move_nobody(run):
    turned = {**GROUPS, "c0": 1}
    for seed, groups in enumerate((turned, GROUPS, turned, GROUPS), 1):
        run = run.update(batch(groups, seed), rounds=1, patience=2)
        assert run.updates[-1]["moved"] == 0
    assert run.updates[-1]["pending"] == 0


def test_who_waits_trains_no_model(run):
    turned = {**GROUPS, "c0": 1}
    waits = run.update(batch(turned, 1), rounds=1)
    without = run.update(batch(turned, 1).select(range(1, 18)), rounds=1)
    assert waits.history[-1]["participants"] == without.history[-1]["participants"] == 17
    for a, b in zip(waits.models, without.models, strict=True):
        assert all(torch.allclose(a[name], b[name]) for name in a)


@pytest.mark.parametrize("method", [ct.FedX(k=3), ct.IFCA(k=3, lr=0.05), ct.MixedEffects(k=3, restarts=2)])
def test_clients_that_no_model_serves_get_their_own(method):
    done = ct.fit(method, TASK, batch(GROUPS, 0), rounds=30, evaluations=1)
    appeared = {**GROUPS, "c0": 3, "c1": 3, "new1": 3, "new2": 3, "new3": 3}
    done = done.update(batch(appeared, 1, rows=24), rounds=10)
    assert done.updates[-1]["new_groups"] == 1 and len(done.models) == 4 and done.algorithm.k == 4
    assert {move.client for move in done.moved} == {"c0", "c1"} and done.ari == 1.0
    again = done.update(batch(appeared, 2, rows=24), rounds=10)
    assert again.updates[-1]["new_groups"] == 0 and again.ari == 1.0


def test_clients_with_noisy_rows_are_no_group(run):
    noisy = batch(GROUPS, 1)
    g = torch.Generator().manual_seed(3)
    loud = noisy.map(lambda i, x, y: (x, y + 3 * torch.randn(len(y), generator=g)) if i < 4 else (x, y))
    found = run.update(loud, rounds=5)
    assert found.updates[-1]["new_groups"] == 0 and len(found.models) == 3


def test_a_new_model_must_close_most_of_the_gap_and_help_all_clients_together():
    def judged(after, gain, members=2):
        member = torch.arange(8) < members
        rows, before = torch.full((8,), 10.0), torch.where(member, 12.5, 2.5)
        own = torch.where(member, gain, 0.0) * rows
        return Judged(member, ~member, rows, before, torch.where(member, after * rows, before), own, own**2 / rows)

    assert is_clear(judged(after=0.3, gain=1.0))
    assert not is_clear(judged(after=0.3, gain=1.0, members=1))  # one client is no group
    assert not is_clear(judged(after=0.9, gain=1.0))  # better, and yet far from how others are served
    assert not is_clear(judged(after=0.3, gain=0.0))  # other models would have done as well


def test_a_group_without_clients_is_kept_and_reported(run):
    left = {name: j for name, j in GROUPS.items() if j != 2}
    after = run.update(batch(left, 1), rounds=1)
    gone = by_name(run)["c2"]
    assert after.updates[-1]["empty"] == [gone] and len(after.models) == 3
    back = after.update(batch(GROUPS, 2), rounds=1)
    assert back.updates[-1]["empty"] == [] and by_name(back)["c2"] == gone


def test_with_one_model_nobody_moves():
    done = ct.fit(ct.FedAvg(lr=0.05), TASK, batch(GROUPS, 0), rounds=3, evaluations=1)
    done = done.update(batch({**GROUPS, "new": 0}, 1), rounds=2)
    assert done.updates[-1]["moved"] == done.updates[-1]["pending"] == 0 and len(done.labels) == 19


def test_cfl_moves_clients_between_its_leaves():
    groups = {f"c{i}": i % 2 for i in range(12)}
    done = ct.fit(ct.CFL(lr=0.05, schedule=(12,), holdout=0), TASK, batch(groups, 0), rounds=16, evaluations=1)
    assert done.ari == 1.0 and len(done.models) == 2
    done = done.update(batch({**groups, "c0": 1}, 1), rounds=1, patience=1)
    assert [move.client for move in done.moved] == ["c0"] and done.ari == 1.0


def test_memory_follows_names():
    federation = ct.data.rotated_digits(clients=4, seed=0, groups=2).select(range(4))
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))
    task = ct.Task.classifier(net, batch_norm="local")
    done = ct.fit(ct.FedAvg(tau=2), task, federation, rounds=2)
    after = done.update(federation.select([3, 1]), rounds=1)
    own, before = (flat(each._cohort.ledger.memory[at], 0) for each, at in ((after, 0), (done, 3)))
    others = flat(done._cohort.ledger.memory[0], 0)
    assert set(after._cohort.ledger.memory) == {0, 1}
    assert (own - before).norm() < (own - others).norm()  # one round away from what it was


def test_a_loaded_run_goes_on_as_the_run_itself(run, tmp_path):
    turned = {**GROUPS, "c0": 1}
    written = ct.fit(ct.FedX(k=3), TASK, batch(GROUPS, 0), rounds=30, evaluations=1, out=tmp_path / "first")
    once = written.update(batch(turned, 1), rounds=2, patience=2, out=tmp_path / "second")
    loaded = ct.load(tmp_path / "second")
    assert loaded.updates == once.updates and loaded.labels.tolist() == once.labels.tolist()
    twice, again = (each.update(batch(turned, 2), rounds=2, patience=2) for each in (once, loaded))
    assert twice.moved == again.moved and [move.client for move in again.moved] == ["c0"]
    assert all(torch.equal(a[n], b[n]) for a, b in zip(twice.models, again.models, strict=True) for n in a)
    assert json.loads((tmp_path / "second/final/result.json").read_text())["labels"] == once.labels.tolist()
    with pytest.raises(ValueError, match="already holds a run"):
        once.update(batch(turned, 2), rounds=1, out=tmp_path / "second")
    with pytest.raises(ValueError, match=r"run.updates = 1, now it is None; a run can only be resumed"):
        ct.fit(ct.FedX(k=3), TASK, batch(turned, 1), rounds=40, out=tmp_path / "second", resume=True)


def test_without_names_the_number_of_clients_must_be_the_same(run):
    plain = [ct.Federation.from_clients(_clients(seed)) for seed in (0, 1)]
    done = ct.fit(ct.FedX(k=3), TASK, plain[0], rounds=20, evaluations=1).update(plain[1], rounds=1)
    assert done.updates[-1]["joined"] == 0
    fewer = ct.Federation.from_clients(_clients(1)[:-1])
    with pytest.raises(ValueError, match="matched by their names, which the run's and those of now do not have"):
        done.update(fewer)
    with pytest.raises(ValueError, match="which those of now do not have"):
        run.update(fewer)
    with pytest.raises(ValueError, match="no client of now took part"):
        run.update(batch({"x": 0, "y": 1}, 1))


def _clients(seed):
    federation = batch(GROUPS, seed)
    return [federation.train.client(i) for i in range(len(federation))]


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (ct.LocalOnly(lr=0.05), {}, "update: LocalOnly cannot go on with other clients than it began with"),
        (ct.FedEM(k=2), {}, "update: FedEM cannot go on"),
        (ct.FedAvg(lr=0.05), {"uplink": [ct.Quantise(bits=8)]}, "the run had an uplink"),
        (ct.FedAvg(lr=0.05), {"secure": ct.SecureSum()}, "the run had a secure sum"),
        (ct.IFCA(k=3, lr=0.05, resample=4), {}, "IFCA with resample uses every row once"),
    ],
)
def test_what_cannot_be_updated_is_refused(method, options, message):
    done = ct.fit(method, TASK, batch(GROUPS, 0), rounds=1, evaluations=1, **options)
    with pytest.raises(ValueError, match=message):
        done.update(batch(GROUPS, 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": 0}, "update: rounds must be a whole number of at least 1, got 0"),
        ({"patience": 1.5}, "update: patience must be a whole number of at least 1, got 1.5"),
    ],
)
def test_bad_numbers_are_refused(run, options, message):
    with pytest.raises(ValueError, match=message):
        run.update(batch(GROUPS, 1), **options)


def test_what_a_folder_does_not_keep_is_refused(tmp_path):
    method = ct.FedAvg(lr=0.05, lr_schedule=lambda t: 1.0)
    ct.fit(method, TASK, batch(GROUPS, 0), rounds=1, out=tmp_path / "run")
    with pytest.raises(ValueError, match="lr_schedule is a function, which its folder does not keep"):
        ct.load(tmp_path / "run").update(batch(GROUPS, 1))


def test_restarts_become_one_and_other_models_can_be_adopted():
    done = ct.fit(ct.IFCA(k=3, lr=0.05, restarts=2), TASK, batch(GROUPS, 0), rounds=3, evaluations=1)
    models = done.algorithm.models(done.state)
    one = {name: x[:1] for name, x in models.items()}
    method, state = done.algorithm.adopt(done.state, Groups(one, torch.arange(2), torch.zeros(2).long()), TASK)
    assert (method.k, method.restarts) == (1, 1)
    assert method.labels(state).tolist() == [0, 0] and method.members(state).tolist() == [2]
