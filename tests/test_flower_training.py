"""How clients and the server train is the same on Flower as in a simulation: a grid in this process against `fit`."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import nn

import coterie as ct
from coterie.core.federation import Federation
from coterie.flower.enrolment import enrol, plain_task
from coterie.flower.local import LocalGrid
from coterie.flower.node import Node
from coterie.flower.roster import Roster, Site
from coterie.flower.secure_engine import SecureFlower
from coterie.models import MODELS
from coterie.runs.config import build_task
from coterie.runs.fit import fit_on

CLOSE = 1e-6


class Noisy(nn.Sequential):
    """A network with dropout."""

    def __init__(self, hidden: int):
        super().__init__(nn.Linear(4, hidden), nn.ReLU(), nn.Dropout(0.4), nn.Linear(hidden, 2))
        self.spec = {"name": "noisy", "hidden": hidden}


class Normed(nn.Sequential):
    """A network with BatchNorm."""

    def __init__(self, hidden: int):
        super().__init__(nn.Linear(4, hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, 2))
        self.spec = {"name": "normed", "hidden": hidden}


class Two(nn.Module):
    """A network of two inputs by keyword, one of them words."""

    def __init__(self, words: int):
        super().__init__()
        self.words, self.out = nn.Embedding(words, 3), nn.Linear(5, 2)
        self.spec = {"name": "two", "words": words}

    def forward(self, ids, age):
        return self.out(torch.cat([self.words(ids).mean(1), age], 1))


@pytest.fixture(autouse=True)
def _known(monkeypatch):
    """Nodes know the models of this file."""
    for name, model in (("noisy", Noisy), ("normed", Normed), ("two", Two)):
        monkeypatch.setitem(MODELS, name, model)


@pytest.fixture
def clients():
    """Eight clients of unequal size in two groups, which label the same rows the other way round."""
    g = torch.Generator().manual_seed(0)
    made = []
    for i in range(8):
        x = torch.randn(6 + 3 * i, 4, generator=g)
        made.append((x, ((x.sum(1) > 0) ^ bool(i % 2)).long()))
    return Federation.from_clients(made, made, groups=[i % 2 for i in range(8)])


def assert_same_run(one, two):
    assert np.array_equal(one.labels, two.labels)
    for a, b in zip(one.models, two.models, strict=True):
        assert a.keys() == b.keys()
        for n in a:
            assert torch.allclose(a[n], b[n], rtol=CLOSE, atol=CLOSE), n
    assert np.allclose(one.scores.per_client, two.scores.per_client, atol=CLOSE)


@pytest.fixture
def same(on_flower):
    """Does a run on Flower, which must be the simulator's, and returns both."""

    def run(algorithm, task, federation, rounds=3, **options):
        here = ct.fit(algorithm, task, federation, rounds=rounds, seed=2, evaluations=1, executor="sequential")
        there = fit_on(
            lambda key: on_flower(federation, task, key, **options), algorithm, rounds=rounds, seed=2, evaluations=1
        )
        assert_same_run(here, there)
        return here, there

    return run


def differs(one, two):
    pairs = zip(one.models, two.models, strict=True)
    return any(not torch.allclose(a[n], b[n], atol=1e-4) for a, b in pairs for n in a)


def ifca(**settings):
    return ct.IFCA(k=2, tau=3, init=ct.FarthestFirst(steps=3), **settings)


CFL = ct.CFL(tau=3, schedule=(1, 3), patience=1)


# --- models ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [ct.FedAvg(tau=3), ifca(batch=4, fraction=0.5)])
def test_dropout(algorithm, clients, same):
    here, _ = same(algorithm, ct.Task.classifier(Noisy(5)), clients)
    still = Noisy(5)
    still[2].p = 0.0
    calm = ct.fit(algorithm, ct.Task.classifier(still), clients, rounds=3, seed=2, evaluations=1)
    assert differs(here, calm)


@pytest.mark.parametrize("algorithm", [ct.FedAvg(tau=3), ifca(fraction=0.5), CFL])
@pytest.mark.parametrize("batch_norm", ["average", "local"])
def test_batch_norm(batch_norm, algorithm, clients, same):
    task = ct.Task.classifier(Normed(5), batch_norm=batch_norm)
    _, there = same(algorithm, task, clients)
    sent = any("1.running_mean" in name for name in there.algorithm.models(there.state))
    assert sent == (batch_norm == "average")


def test_local_parameters_are_in_no_message(clients, same):
    """Of all that nodes answer, nothing has the name, or holds the bytes, of what clients keep."""
    answers, kept = [], []

    def listen(node, answer):
        answers.append(answer.content)
        return answer

    task = ct.Task.classifier(Normed(5), batch_norm="local")
    here, _ = same(ct.FedAvg(tau=3), task, clients, spoil=listen)
    for memory in here._cohort.ledger.memory.values():
        kept += [x.numpy().tobytes() for x in memory["personal"].values()]
    arrays = [(name, a.data) for c in answers for r in c.array_records.values() for name, a in r.items()]
    assert len(kept) == 8 * 4 and len(set(kept)) == len(kept)
    assert any('"0.weight"' in name for name, _ in arrays)
    assert not any('"1.' in name for name, _ in arrays)
    assert not any(own in data for own in kept for _, data in arrays)


def test_a_client_s_own_model_is_on_its_node(clients, same):
    x, _ = clients.train.client(0)
    here, there = same(ct.FedAvg(tau=2), ct.Task.classifier(Normed(5), batch_norm="local"), clients)
    assert here.predict(x, client=0).shape == (len(x),)
    with pytest.raises(ValueError, match=r"client '0' keeps a part of its model to itself, on its node"):
        there.predict(x, client=0)


def test_a_description_says_how_batch_norm_is_done():
    task = ct.Task.classifier(Normed(5), batch_norm="local")
    assert build_task(task.spec).personal.keys() == task.personal.keys() != set()
    assert "batch_norm" not in ct.Task.classifier(Normed(5)).spec
    with pytest.raises(ValueError, match=r"\[task\] batch_norm goes with classifier, regressor, .*, not with density"):
        build_task({"kind": "density", "model": {"name": "affine_flow", "inputs": 2}, "batch_norm": "local"})


def test_what_nodes_could_not_build_is_refused(clients, same):
    """A pretrained model is sent, but nobody sends what is frozen."""
    pretrained = Noisy(5)
    same(ct.FedAvg(tau=2), ct.Task.classifier(pretrained, init="module"), clients, rounds=2)
    pretrained[0].weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"flower: nodes build the model anew .* so '0.weight' would be another one"):
        plain_task(ct.Task.classifier(pretrained))
    normed = Normed(5)
    nn.init.ones_(normed[1].bias)
    with pytest.raises(ValueError, match=r"so '1.bias' would be another one"):
        plain_task(ct.Task.classifier(normed, init="module", batch_norm="local"))


# --- optimisers, schedules, epochs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "algorithm",
    [
        ct.FedAvg(tau=3, lr=0.05, optimiser=ct.Adam(keep=True)),
        ifca(lr=0.05, optimiser=ct.Adam(keep=True), fraction=0.5),
        ifca(lr=0.05, optimiser=ct.SGD(momentum=0.9, keep=True), restarts=2),
    ],
)
def test_an_optimiser_that_is_kept(algorithm, clients, same):
    task = ct.Task.classifier(ct.models.MLP(4, 5, 2))
    here, _ = same(algorithm, task, clients)
    forgetful = dataclasses.replace(algorithm, optimiser=dataclasses.replace(algorithm.optimiser, keep=False))
    assert differs(here, ct.fit(forgetful, task, clients, rounds=3, seed=2, evaluations=1))


def test_local_parameters_and_an_optimiser_that_is_kept(clients, same):
    """Some clients remember parameters of the start only, others also moments."""
    task = ct.Task.classifier(Normed(5), batch_norm="local")
    algorithm = ifca(lr=0.05, optimiser=ct.Adam(keep=True), fraction=0.5)
    here, _ = same(algorithm, task, clients)
    assert_same_run(here, ct.fit(algorithm, task, clients, rounds=3, seed=2, evaluations=1))
    assert {tuple(kept) for kept in here._cohort.ledger.memory.values()} == {("personal",), ("personal", "moments")}


def test_what_clients_keep_survives_a_server_that_is_stopped(clients, on_flower, tmp_path):
    task = ct.Task.classifier(Normed(5), batch_norm="local")
    algorithm = ct.FedAvg(tau=2, lr=0.05, optimiser=ct.Adam(keep=True))

    def go(rounds, resume):
        def members(key):
            return on_flower(clients, task, key)

        return fit_on(members, algorithm, rounds=rounds, evaluations=1, out=tmp_path / "run", resume=resume)

    go(2, False)
    assert_same_run(ct.fit(algorithm, task, clients, rounds=4, evaluations=1, executor="sequential"), go(4, True))


def halved_at_last(t):
    return 1.0 if t < 2 else 0.5


@pytest.mark.parametrize("schedule", [ct.Cosine(rounds=3), lambda t: (1 + math.cos(t)) / 2, halved_at_last])
def test_a_schedule(schedule, clients, same):
    task = ct.Task.classifier(ct.models.MLP(4, 5, 2))
    here, _ = same(ifca(lr_schedule=schedule), task, clients)
    assert differs(here, ct.fit(ifca(), task, clients, rounds=3, seed=2, evaluations=1))


@pytest.mark.parametrize("algorithm", [ct.FedAvg(tau=3), CFL, ifca()])
def test_a_server_s_optimiser(algorithm, clients, same):
    task = ct.Task.classifier(ct.models.MLP(4, 5, 2))
    here, _ = same(dataclasses.replace(algorithm, server=ct.Adam(), server_lr=0.05), task, clients)
    assert differs(here, ct.fit(algorithm, task, clients, rounds=3, seed=2, evaluations=1))


def test_epochs(clients, same):
    """Clients take from 2 to 7 steps."""
    task = ct.Task.classifier(Noisy(5))
    same(ct.FedAvg(epochs=1, batch=4, weights="size"), task, clients)
    same(ct.IFCA(k=2, epochs=1, batch=4, optimiser=ct.Adam(), lr=0.02, init="random"), task, clients)


def test_a_secure_sum_of_batch_norm(clients):
    """Statistics are added up in whole numbers, so they are close but not the same."""
    task = ct.Task.classifier(Normed(5))
    plain, secret = (
        ct.fit(ct.FedAvg(tau=3), task, clients, rounds=3, evaluations=1, secure=secure)
        for secure in (None, ct.SecureSum(min_members=2))
    )
    for n, x in plain.models[0].items():
        assert torch.allclose(x, secret.models[0][n], atol=1e-3), n


@pytest.mark.parametrize("batch_norm", ["average", "local"])
def test_a_secure_sum_over_nodes(batch_norm, clients, on_flower):
    """What clients keep, they keep there too."""
    task = ct.Task.classifier(Normed(5), batch_norm=batch_norm)
    algorithm = ct.FedAvg(tau=2, lr=0.05, optimiser=ct.Adam(keep=True))
    options = {"secure": ct.SecureSum(min_members=2), "secured": SecureFlower, "rounds": 2, "evaluations": 1}
    there = fit_on(lambda key: on_flower(clients, task, key), algorithm, **options)
    here = ct.fit(algorithm, task, clients, rounds=2, evaluations=1)
    for n, x in here.models[0].items():
        assert torch.allclose(x, there.models[0][n], atol=1e-3), n


# --- several inputs ---------------------------------------------------------------------------------------------------


def with_inputs(federation, words=6):
    def row(x, y):
        return {"ids": (3 * x[:, :3].abs()).long().clamp(max=words - 1), "age": x[:, 2:]}, y

    rows = [row(*federation.train.client(i)) for i in range(len(federation))]
    return Federation.from_clients(rows, rows)


def test_rows_of_several_inputs(clients, same):
    federation = with_inputs(clients)
    task = ct.Task.classifier(Two(6))
    _, there = same(ifca(), task, federation)
    assert there._cohort.federation.inputs == federation.inputs
    assert there.predict({"ids": np.zeros((1, 3), int), "age": np.zeros((1, 2))}, client=0).shape == (1,)


def test_a_node_that_has_inputs_the_model_does_not_take_says_so(clients, tmp_path):
    grid = LocalGrid({1: Node("a", with_inputs(clients))})
    with pytest.raises(ConnectionError, match=r"MLP does not take inputs ids \(3,\) int64, age \(2,\) float32"):
        enrol(grid, ct.Task.classifier(ct.models.MLP(5, 2)), nodes=1, deadline=1)


def test_sites_with_other_inputs_are_refused_by_name(clients):
    """Rows of the same width, of other parts."""
    one = Site.of("a", with_inputs(clients))
    y = torch.zeros(2).long()
    rows = {"age": torch.zeros(2, 2), "ids": torch.zeros(2, 3).long()}, torch.zeros(2, 5)
    two, plain = (Site.of(name, Federation.from_clients([(x, y)])) for name, x in zip("bc", rows, strict=True))
    said = r"rows of site 'b' are inputs age .*, those of site 'a' inputs ids \(3,\) int64, age \(2,\) float32"
    with pytest.raises(ValueError, match=said):
        Roster.of([(1, one), (2, two)])
    with pytest.raises(ValueError, match=r"rows of site 'c' are one input, those of site 'a' inputs ids"):
        Roster.of([(1, one)]).joined(3, plain)
    again = Site("a", one.clients, one.train, one.test, one.groups)
    with pytest.raises(ValueError, match=r"its rows are one input, and were inputs ids .* when it enrolled first"):
        Roster.of([(1, one)]).returned(2, again)


def test_a_roster_keeps_inputs(clients):
    site = Site.of("a", with_inputs(clients))
    assert Site.from_plain(site.to_plain()) == site
    older = {n: v for n, v in Site.of("a", clients).to_plain().items() if n != "inputs"}
    assert Site.from_plain(older).inputs is None


@pytest.mark.parametrize(
    "told",
    [
        5,
        [],
        [{}],
        ["ids"],
        [{"name": "ids", "shape": [5], "dtype": "os"}],
        [{"name": 3, "shape": [5], "dtype": "int64"}],
        [{"name": "ids", "shape": ["5"], "dtype": "int64"}],
        [{"name": "ids", "shape": [-1], "dtype": "int64"}, {"name": "age", "shape": [6], "dtype": "int64"}],
        [{"name": "ids", "shape": [4], "dtype": "int64"}],
    ],
)
def test_a_layout_that_is_none_is_refused(told, clients):
    with pytest.raises(ValueError, match=r"its inputs|its rows are|does not say who its clients are"):
        Site.from_plain({**Site.of("a", with_inputs(clients)).to_plain(), "inputs": told})
