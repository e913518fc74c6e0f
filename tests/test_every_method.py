"""The conformance suite on every method of the package, found by its registration, with many settings."""

import dataclasses
import json

import pytest
import torch

import coterie as ct
from coterie.core import Key, Method, Models, Needs, Report, registry, setting, stack, take
from coterie.core.registry import known
from coterie.core.settings import validate
from coterie.core.step import client_steps
from coterie.engines import chunks, simulated
from coterie.engines.chunks import Chunks
from coterie.runs.config import build_algorithm, describe
from coterie.runs.evaluate import evaluate
from coterie.testing import Skip, assert_same, check_method, checks, problem_for, run_rounds, small

METHODS = {name: cls for name, cls in known("method").items() if cls.__module__.startswith("coterie.")}

VARIANTS = {
    "plain": {},
    "minibatch": {"batch": 4, "tau": 5},
    "half": {"fraction": 0.5},
    "sized": {"weights": "size", "decay": 0.9},
    "prox": {"prox": 0.1},
    "gradient": {"average": "gradient", "lr": 0.05},
    "gradient_all": {"average": "gradient", "normalise": "all", "batch": 4},
    "restarts": {"restarts": 2, "init": "random"},
    "restarts_minibatch": {"restarts": 2, "init": "random", "batch": 4},
    "shared": {"shared": ("layers.0.weight", "layers.0.bias")},
    "patient": {"patience": 1, "recheck": 2},
    "resampled": {"resample": 2},
    "balanced": {"init": "balanced"},
    "random_groups": {"init": ct.RandomGroups(rounds=2)},
    "revived": {"revive": 1, "init": "random", "k": 8},  # more clusters than groups, so that some are empty
    "split": {"schedule": (1, 3), "patience": 1},
    "split_half": {"schedule": (1, 3), "patience": 1, "fraction": 0.5, "max_age": 1, "holdout": 0.0},
    "permuted": {"schedule": (1, 3), "patience": 1, "privacy": "permutation", "secret": 5},
    "rotated": {"schedule": (1, 3), "patience": 1, "privacy": "rotation", "secret": 7, "batch": 4},
    "sketched": {"schedule": (1, 3), "patience": 1, "sketch": 200, "weights": "size"},
    "prox_exact": {"refine": "fedprox"},
    "soft": {"soft": True},
    "soft_prox": {"soft": True, "refine": "fedprox", "temperature": 0.5},
    "soft_steps": {"soft": True, "refine": "fedavg"},
    "conjugate": {"refine": "conjugate"},
    "as_printed": {"refine": "fedavg", "normalise": "all", "fraction": 0.5},
    "given_number": {"local": 2, "weighted": True},
    "by_steps": {"closed": False, "tau": 2, "steps": 3, "lr": 1e-3},
    "renewed": {"closed": False, "tau": 2, "steps": 3, "lr": 1e-3, "batch": 4, "renew": True},
    "from_random": {"init": "random", "shrink": False, "restarts": 2},
    "from_kfed": {"init": "kfed", "shrink": True, "restarts": 1},
    "disturbed": {"init": ct.Disturbed(0.5), "shrink": True, "restarts": 2},
    "pulled": {
        "closed": False, "tau": 2, "steps": 3, "lr": 1e-3, "batch": 4, "init": ct.Disturbed(0.05), "shrink": True,
    },
    "by_adam": {"closed": False, "tau": 2, "steps": 3, "lr": 1e-3, "decay": 0.5, "optimiser": "adam", "restarts": 1},
    "by_sgd": {"optimiser": "sgd", "lr": 0.01},
    "tested": {"thresholds": "tested", "patience": 1},
    "tested_rotated": {"thresholds": "tested", "patience": 1, "privacy": "rotation", "secret": 7, "fraction": 0.7},
    "gradients": {"schedule": (1, 3), "patience": 1, "compare": "gradient", "linkage": "complete"},
    "kept_adam": {"optimiser": ct.Adam(keep=True), "lr": 0.01, "fraction": 0.5},
    "server_yogi": {"server": ct.Yogi(), "server_lr": 0.1},
    "on_ifca": {"method": ct.IFCA(3, tau=3, init=ct.FarthestFirst(steps=4)), "strengths": (0.0, 1.0), "steps": (2,)},
    "on_cfl": {"method": ct.CFL(tau=3, schedule=(1, 3), patience=1), "steps": (2,), "lr": 0.05},
    "by_bic": {"k": "auto", "at_most": 3},
    "solved": {"refine": "least_squares", "batch": None},
    "narrow": {"covariance": "diagonal"},
    "untied": {"tied": False},
    "by_linkage": {"by": "hierarchical", "k": None, "steps": 10},
    "by_angles": {"by": "angles", "fraction": 0.5},
}  # fmt: skip

# What differs in what is sent, besides the methods as they are; every case would take minutes.
FLOWN = (
    "shared", "patient", "revived", "split_half", "tested_rotated", "soft", "conjugate", "renewed", "disturbed",
    "kept_adam", "server_yogi", "by_bic", "narrow", "on_ifca", "by_angles",
)  # fmt: skip
# Checks that say more where clients are sampled and train on minibatches.
SAMPLED = {"stop_and_resume", "renumbering_clients_renumbers_labels"}


def cases(names=VARIANTS):
    for name, cls in METHODS.items():
        fields = {f.name for f in dataclasses.fields(cls)}
        for variant in names:
            if VARIANTS[variant].keys() <= fields and allowed(method := small(cls, **VARIANTS[variant])):
                yield pytest.param(method, id=f"{name}-{variant}")


def allowed(method):
    try:
        validate(method)
    except ValueError:  # a start of another method's
        return False
    return getattr(method, "refine", "") != "conjugate" or method.needs.linear


def run_check(method, name):
    try:
        next(check for check in checks(method) if check.name == name).run()
    except Skip as why:
        pytest.skip(str(why))


CHECKS = [check.name for check in checks(ct.FedAvg())]
others = [v for v in VARIANTS if v != "plain"]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", METHODS)
def test_every_check_of_every_method(name, check):
    sampled = {"batch": 4, "fraction": 0.5} if check in SAMPLED else {}
    run_check(small(METHODS[name], **sampled), check)


@pytest.mark.parametrize("method", list(cases(others)))
@pytest.mark.parametrize("check", ["engines_agree", "same_key_same_result"])
def test_variants_agree_on_every_engine(method, check):
    run_check(method, check)


@pytest.mark.parametrize("method", list(cases(others)))
def test_settings_survive_json(method):
    assert build_algorithm(json.loads(json.dumps(describe(method)))) == method


@pytest.mark.parametrize("method", list(cases(FLOWN)))
def test_variants_agree_on_a_real_federation(method):
    run_check(method, "real_federation")


@pytest.mark.parametrize("name", METHODS)
def test_one_cluster_is_fedavg(name):
    fields = {f.name for f in dataclasses.fields(METHODS[name])}
    if "k" not in fields or METHODS[name].needs.points:
        pytest.skip("it has no number of clusters of clients")
    if "tau" not in fields:
        pytest.skip("its clients take no steps")
    single = small(METHODS[name], k=1, init="random", refine="fedavg")
    task, federation = problem_for(single)
    cohort = simulated(federation, task, Key.of(0).fold(1), executor="sequential")
    one = run_rounds(single, cohort)[0]
    first = single.start(task, cohort.at(0), Key.of(0))
    lr, weights = getattr(first, "lr", single.lr), getattr(single, "weights", "size")
    fedavg = small(METHODS["fedavg"], weights=weights, lr=lr)
    two = fedavg.start(task, cohort.at(0), Key.of(0))._replace(theta=single.models(first))
    for t in range(3):
        two, _ = fedavg.round(two, cohort.at(t))
    assert_same(single.models(one), fedavg.models(two), 1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_every_step_is_run_under_vmap_by_some_variant(name, monkeypatch):
    """Over all variants vmap has run every step that the method defines: none is done client by client."""
    cls = METHODS[name]
    steps, ran = set(client_steps(cls)), set()
    heirs = {heir.__name__ for heir in METHODS.values() if issubclass(heir, cls)}

    def together(chunks, exchange, sizes, bucket, ways):
        for name in ways.name.split(" (")[0].split(" after "):
            owner, _, step = name.partition(".")
            if owner in heirs:
                ran.add(step)
        return len(bucket)

    monkeypatch.setattr(chunks, "SMALL", 0)
    monkeypatch.setattr(Chunks, "_size", together)
    for case in cases():
        method = case.values[0]
        if isinstance(method, cls) and not steps <= ran:
            task, federation = problem_for(method)
            cohort = simulated(federation, task, Key.of(0).fold(1), executor="vmap")
            state, _ = run_rounds(method, cohort, 4)
            method.place(state, cohort)
            method.place(state, cohort.on("test"))  # where the server knows who is where, clients choose there alone
            evaluate(method, state, cohort)
            list(method.doubts(state, cohort))
            if "commonest" in ran:  # it runs the points' own step
                ran.add("points")
    assert steps and steps <= ran, steps - ran


class Plain(ct.FedAvg):
    """A method that is right, to be broken."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forgetful(Plain):
    """Writes to the state that it is given, which no method may do."""

    def round(self, state, cohort):
        after, report = super().round(state, cohort)
        for x in state.theta.values():
            x += 1.0
        return after, report


@dataclasses.dataclass(frozen=True)
class Curious(Method):
    """Looks at single clients' replies, and does not declare it."""

    lr: float = setting(0.1, low=0)

    def start(self, task, cohort, key):
        return ct.FedAvg().start(task, cohort, key)

    def round(self, state, cohort):
        models = ct.LocalOnly(lr=self.lr, tau=1)
        sent = models.start(cohort.task, cohort, Key.of(0)).theta
        reply = cohort.gather(models.step, Models(take(sent, 0), torch.tensor(self.lr)))
        theta = stack([{n: x.mean(0) for n, x in reply.update.items()}])
        return state._replace(theta=theta, round=state.round + 1), Report(cohort.clients, reply.note["loss"])

    def models(self, state):
        return state.theta

    def labels(self, state):
        return torch.zeros(state.clients, dtype=torch.long)

    def place(self, state, cohort):
        return torch.zeros(len(cohort), dtype=torch.long)

    def assign(self, state, task, data):
        return 0


@pytest.fixture
def registered(monkeypatch):
    """Methods that are registered for one test: other tests try all that are."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    registry.register("forgetful")(Forgetful)
    registry.register("curious")(Curious)


def test_a_method_that_changes_its_input_is_found(registered):
    with pytest.raises(AssertionError, match="a round has changed the state that it was given"):
        check_method(Forgetful(tau=1))


def test_a_method_that_hides_what_its_server_sees_is_found(registered):
    with pytest.raises(AssertionError, match=r"declare needs = Needs\(gather=True\)"):
        check_method(Curious())
    assert Needs().gather is False
