"""The conformance suite: every algorithm of the package, found by walking it, on every executor."""

import dataclasses
import json

import numpy as np
import pytest
import torch

import coterie as ct
from coterie.core.cohort import Cohort
from coterie.core.key import Key
from coterie.core.membership import Membership
from coterie.core.method import PointMethod
from coterie.core.pytree import flat, leaves, tree_map
from coterie.core.registry import known
from coterie.core.settings import validate
from coterie.core.step import client_steps
from coterie.core.task import Data
from coterie.engines import ENGINES, simulated
from coterie.engines.chunks import Chunks
from coterie.runs.config import build_algorithm, describe

METHODS = known("method")
SETTINGS = {"k": 3, "tau": 3, "lr": 0.1}  # a k where one is needed, and little to do
SHORT = ct.FarthestFirst(steps=4)
OWN = {
    "ifca": {"init": SHORT},
    "fedx": {"init": SHORT, "lr": 0.05},
    "uifca": {"restarts": 2},
    "clustergan": {"lr": 1e-3, "steps": 1, "critic": 2, "batch": 8},
    "mixed_regression": {"init": ct.MomentDescent(clients=12, ell=4, rounds=2, reuse=True), "lr": None},
}

VARIANTS = {
    "plain": {},
    "minibatch": {"batch": 4, "tau": 5},
    "half": {"fraction": 0.5},
    "sized": {"weights": "size", "decay": 0.9},
    "prox": {"prox": 0.1},
    "gradient": {"average": "gradient", "lr": 0.05},
    "gradient_all": {"average": "gradient", "normalise": "all", "batch": 4},
    "restarts": {"restarts": 2, "init": "random"},
    "shared": {"shared": ("layers.0.weight", "layers.0.bias")},
    "patient": {"patience": 1, "recheck": 2},
    "resampled": {"resample": 2},
    "balanced": {"init": "balanced"},
    "random_groups": {"init": ct.RandomGroups(rounds=2)},
    "revived": {"revive": 1, "init": "random", "k": 8},  # more than there are groups
    "split": {"schedule": (1, 3), "patience": 1},
    "split_half": {"schedule": (1, 3), "patience": 1, "fraction": 0.5, "max_age": 1, "holdout": 0.0},
    "permuted": {"schedule": (1, 3), "patience": 1, "privacy": "permutation", "secret": 5},
    "rotated": {"schedule": (1, 3), "patience": 1, "privacy": "rotation", "batch": 4},
    "sketched": {"schedule": (1, 3), "patience": 1, "sketch": 200, "weights": "size"},
    "prox_exact": {"refine": "fedprox"},
    "soft": {"soft": True},
    "soft_prox": {"soft": True, "refine": "fedprox", "temperature": 0.5},
    "as_printed": {"refine": "fedavg", "normalise": "all", "fraction": 0.5},
    "given_number": {"local": 2, "weighted": True},
    "by_steps": {"closed": False, "tau": 2, "steps": 3, "lr": 1e-3},
    "renewed": {"closed": False, "tau": 2, "steps": 3, "lr": 1e-3, "batch": 4, "renew": True},
    "from_random": {"init": "random", "shrink": False, "restarts": 2},
    "from_kfed": {"init": "kfed", "shrink": True, "restarts": 1},
    "disturbed": {"init": ct.Disturbed(0.5), "shrink": True, "restarts": 2},
    "pulled": {
        "closed": False,
        "tau": 2,
        "steps": 3,
        "lr": 1e-3,
        "batch": 4,
        "init": ct.Disturbed(0.05),
        "shrink": True,
    },
    "by_adam": {"closed": False, "tau": 2, "steps": 3, "lr": 1e-3, "decay": 0.5, "optimiser": "adam", "restarts": 1},
    "by_sgd": {"optimiser": "sgd", "lr": 0.01},
    "gradients": {"schedule": (1, 3), "patience": 1, "compare": "gradient", "linkage": "complete"},
}


# What differs in what is sent, besides the methods as they are; every case would take minutes.
FLOWN = ("plain", "shared", "patient", "revived", "split_half", "rotated", "soft", "renewed", "disturbed")


def make(name, **settings):
    fields = {f.name for f in dataclasses.fields(METHODS[name])}
    return METHODS[name](**{n: v for n, v in {**SETTINGS, **OWN.get(name, {}), **settings}.items() if n in fields})


@pytest.fixture
def problems(task, ragged, regression, points):
    """A task and a federation that suit each algorithm."""
    own = {
        ct.MixedRegression: regression,
        ct.KFED: (ct.Task.distance(), points),
        ct.UIFCA: (ct.Task.density(ct.models.AffineFlow(6)), points),
        ct.ClusterGAN: (ct.Task.adversarial(ct.models.GAN((6,), k=3, dz=2, hidden=(8,))), points),
    }
    return {cls: own.get(cls, (task, ragged)) for cls in METHODS.values()}


@pytest.fixture
def problem(request, problems):
    """Those that suit the algorithm of the test."""
    given = request.node.callspec.params
    return problems[METHODS[given["name"]] if "name" in given else type(given["algorithm"])]


def cases():
    for name, cls in METHODS.items():
        fields = {f.name for f in dataclasses.fields(cls)}
        for variant, settings in VARIANTS.items():
            if settings.keys() <= fields and allowed(algorithm := make(name, **settings)):
                yield pytest.param(algorithm, id=f"{name}-{variant}")


def allowed(algorithm):
    try:
        validate(algorithm)
    except ValueError:  # a start of another algorithm's
        return False
    return True


every_case = pytest.mark.parametrize("algorithm", list(cases()))
every_algorithm = pytest.mark.parametrize("name", list(METHODS))
every_executor = pytest.mark.parametrize("executor", list(ENGINES))


def cohort_of(federation, task, executor="sequential", seed=0):
    return simulated(federation, task, Key.of(seed).fold(1), executor=executor)


def rounds_of(algorithm, who, rounds, seed=0):
    """The last state and report; `who` is a cohort, or a membership, whose sites keep count of the rounds."""
    members = Membership(who) if isinstance(who, Cohort) else who
    state, report = members.perform(lambda cohort: algorithm.start(cohort.task, cohort.at(0), Key.of(seed)), 0), None
    for t in range(rounds):
        if not algorithm.done(state):
            state, report = members.perform(lambda cohort: algorithm.round(state, cohort.at(t)), t + 1)  # noqa: B023
    return state, report


def assert_same(a, b, tolerance=0.0):
    for x, y in zip(leaves(a), leaves(b), strict=True):
        assert x.shape == y.shape
        if x.is_floating_point():
            assert torch.allclose(x, y, rtol=tolerance, atol=tolerance), (x - y).abs().max()
        else:
            assert torch.equal(x, y)


@every_case
def test_executors_agree(algorithm, problem):
    task, federation = problem
    states = [rounds_of(algorithm, cohort_of(federation, task, name), 3)[0] for name in ENGINES]
    for other in states[1:]:
        assert_same(states[0], other, 1e-5)


@pytest.mark.parametrize("algorithm", [case for case in cases() if case.id.partition("-")[2] in FLOWN])
def test_a_real_federation_agrees(algorithm, problem, on_flower):
    """Three nodes with several clients each, over Flower's messages, against the simulator."""
    task, federation = problem
    here, there = cohort_of(federation, task, "vectorised"), on_flower(federation, task)
    (one, _), (two, _) = rounds_of(algorithm, here, 3), rounds_of(algorithm, there, 3)
    assert torch.equal(algorithm.labels(one), algorithm.labels(two))
    assert_same(one, two, 1e-5)
    assert torch.equal(algorithm.place(one, here), algorithm.place(two, there.everyone))
    assert not there.nodes.faults


@every_case
def test_same_key_same_result_and_a_round_leaves_its_input_alone(algorithm, problem):
    task, federation = problem
    one, _ = rounds_of(algorithm, cohort_of(federation, task, "vectorised"), 2)
    again = cohort_of(federation, task, "vectorised")
    state, _ = rounds_of(algorithm, again, 1)
    copy = tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, state)
    two = state if algorithm.done(state) else algorithm.round(state, again.at(1))[0]
    assert_same(one, two)
    assert_same(state, copy)


@every_case
def test_hyperparameters_survive_json(algorithm):
    assert build_algorithm(json.loads(json.dumps(describe(algorithm)))) == algorithm


@every_algorithm
@every_executor
def test_stop_and_resume(name, executor, tmp_path, problem):
    task, federation = problem
    algorithm = make(name, batch=4, fraction=0.5)
    whole = ct.fit(algorithm, task, federation, rounds=6, seed=3, executor=executor, out=tmp_path / "whole")
    ct.fit(algorithm, task, federation, rounds=3, seed=3, executor=executor, out=tmp_path / "parts")
    parts = ct.fit(
        algorithm, task, federation, rounds=6, seed=3, executor=executor, out=tmp_path / "parts", resume=True
    )
    assert_same(whole.state, parts.state)
    assert [r["loss"] for r in whole.history] == [r["loss"] for r in parts.history]


@every_algorithm
def test_renumbering_clients_renumbers_labels(name, problem):
    task, federation = problem
    federation = dataclasses.replace(federation, ids=tuple(f"site-{i}" for i in range(len(federation))))
    order = torch.randperm(len(federation), generator=torch.Generator().manual_seed(5))
    algorithm = make(name, batch=4, fraction=0.5)
    plain = ct.fit(algorithm, task, federation, rounds=4)
    moved = ct.fit(algorithm, task, federation.select(order), rounds=4)
    a, b = plain.labels[order.numpy()], moved.labels
    assert len(set(zip(a.tolist(), b.tolist(), strict=True))) == len(set(a)) == len(set(b))
    assert np.allclose(plain.scores.per_client[order.numpy()], moved.scores.per_client)


@every_algorithm
def test_one_cluster_is_fedavg(name, problem):
    task, federation = problem
    fields = {f.name for f in dataclasses.fields(METHODS[name])}
    if "k" not in fields or issubclass(METHODS[name], PointMethod):
        return
    single = make(name, k=1, init="random")
    one = rounds_of(single, cohort_of(federation, task), 3)[0]
    weights = getattr(single, "weights", "size")
    cohort = cohort_of(federation, task)
    first = single.start(task, cohort.at(0), Key.of(0))
    begin, lr = single.models(first), getattr(first, "lr", single.lr)
    fedavg = make("fedavg", weights=weights, lr=lr)
    two = fedavg.start(task, cohort.at(0), Key.of(0))._replace(theta=begin)
    for t in range(3):
        two, _ = fedavg.round(two, cohort.at(t))
    assert_same(single.models(one), fedavg.models(two), 1e-6)


@every_algorithm
def test_an_empty_cluster_keeps_its_model(name, problem):
    """A federation of two clients cannot fill three clusters, so a model must come through untouched."""
    task, federation = problem
    algorithm = make(name, k=3, fraction=0.2)
    if isinstance(algorithm, PointMethod):  # all clients take part in every cluster
        return
    cohort = cohort_of(federation, task, "vectorised")
    state = algorithm.start(task, cohort.at(0), Key.of(0))
    after, report = algorithm.round(state, cohort.at(0))
    chosen = set(algorithm.labels(after)[report.clients].tolist())
    before, now = algorithm.models(state), algorithm.models(after)
    for j in range(len(flat(before))):
        if j not in chosen:
            assert torch.equal(flat(before)[j], flat(now)[j])


@every_algorithm
def test_assign_of_a_training_client_is_its_label(name, problem):
    task, federation = problem
    run = ct.fit(make(name), task, federation, rounds=8)
    for i in range(len(federation)):
        x, y = federation.train.client(i)
        assigned, label = run.assign(x, y), run.labels[i]
        if isinstance(run.algorithm, PointMethod):
            assigned = np.bincount(assigned).argmax()  # labels are the clients' commonest clusters
        if len(run.models) == len(federation):  # no groups: a neighbour's model may serve a client better than its own
            loss = [float(task.loss(run.models[j], Data(x, y, torch.ones(len(x)))).mean()) for j in (assigned, label)]
            assert loss[0] <= loss[1] + 1e-6
        else:
            assert assigned == label


@every_algorithm
def test_every_step_traces_under_vmap(name, problems, monkeypatch):
    """Over all variants, vmap has run every step that the algorithm defines: none is done one by one."""
    cls = METHODS[name]
    steps, ran = set(client_steps(cls)), set()
    heirs = {heir.__name__ for heir in METHODS.values() if issubclass(heir, cls)}

    def together(chunks, exchange, sizes, bucket, ways):
        owner, _, step = ways.name.split(" (")[0].partition(".")
        if owner in heirs:
            ran.add(step)
        return len(bucket)

    monkeypatch.setattr(Chunks, "_size", together)
    for case in cases():
        algorithm = case.values[0]
        if isinstance(algorithm, cls) and not steps <= ran:
            task, federation = problems[type(algorithm)]
            cohort = cohort_of(federation, task, "vmap")
            state, _ = rounds_of(algorithm, cohort, 4)
            algorithm.place(state, cohort)
            if "commonest" in ran:  # it runs the points' own step
                ran.add("points")
    assert steps and steps <= ran
