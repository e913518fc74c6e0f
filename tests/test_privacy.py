"""Differential privacy: what it costs, the noise that is added, how far one client can change anything."""

import math
from dataclasses import dataclass, replace

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from rich.console import Console
from scipy.stats import chisquare, norm

import coterie as ct
from coterie.cli import show
from coterie.core.cohort import Cohort
from coterie.core.key import Key
from coterie.core.pytree import flat, leaves, stack, tree_map
from coterie.core.step import ClientStep, Reply, client_step
from coterie.core.train import Models
from coterie.engines import simulated
from coterie.flower.local import LocalGrid
from coterie.flower.node import Node
from coterie.flower.server_app import Settings, serve
from coterie.flower.steps import describe_step, rebuild_step
from coterie.privacy import engine as engine_module
from coterie.privacy.accounting import INTERVAL, Release, epsilon_of, noise_for
from coterie.privacy.bounded import Bounded, grid
from coterie.privacy.discrete import Source, discrete_gaussian
from coterie.privacy.engine import COUNTS, FEW, Deviations, Private
from coterie.runs.config import build
from coterie.secure.engine import Secure

FEDAVG = ct.FedAvg(lr=0.5, tau=3)
IFCA = ct.IFCA(k=3, init="random", lr=0.5, tau=3)


def private(federation, task, settings=None, executor="vectorised", secure=None):
    """All clients of a federation, in a private run."""
    engine = simulated(federation, task, Key.of(0), executor=executor).engine
    engine = engine if secure is None else Secure(engine, secure)
    settings = settings or ct.Privacy(noise=1.0, epsilon=1e3)
    return Cohort(Private(engine, settings, distributed=secure is not None)).at(0)


@pytest.fixture
def unlimited(monkeypatch):
    """Exchanges that cost nothing, for tests that make many."""
    monkeypatch.setattr(engine_module, "epsilon_of", lambda *args, **kwargs: 0.0)


def still(task, k=1):
    """Models and a step size that changes nothing: every client's update is 0."""
    theta = stack([task.init(Key.of(j)) for j in range(k)])
    return Models(theta if k > 1 else tree_map(lambda x: x[0], theta), torch.tensor(0.0))


# --- what it costs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("releases", [(Release(1.0, 3.0, 30),), (Release(0.2, 1.0, 40), Release(1.0, 4.0, 5))])
def test_epsilon_is_that_of_dp_accounting(releases):
    events = [dp_accounting.GaussianDpEvent(r.noise) for r in releases]
    events = [
        dp_accounting.SelfComposedDpEvent(dp_accounting.PoissonSampledDpEvent(r.rate, e) if r.rate < 1 else e, r.times)
        for r, e in zip(releases, events, strict=True)
    ]
    accountant = PLDAccountant(value_discretization_interval=INTERVAL).compose(dp_accounting.ComposedDpEvent(events))
    assert epsilon_of(releases, 1e-5) == pytest.approx(accountant.get_epsilon(1e-5), abs=1e-6)


def test_epsilon_of_full_rounds_is_that_of_one_gaussian():
    """T releases with noise z are one with z / √T, for which ε has a formula (Balle and Wang 2018)."""
    epsilon, mu = epsilon_of((Release(1.0, 5.0, 60),), 1e-5), math.sqrt(60) / 5.0
    delta = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
    assert delta == pytest.approx(1e-5, rel=0.01)


def test_epsilon_of_clients_noise_is_that_of_concentrated_privacy():
    accountant = RdpAccountant().compose(dp_accounting.ZCDpEvent(0.5 / 9), 30)
    assert epsilon_of((Release(1.0, 3.0, 30),), 1e-5, distributed=True) == pytest.approx(
        accountant.get_epsilon(1e-5), abs=1e-6
    )


@pytest.mark.parametrize("distributed", [False, True])
def test_the_noise_that_is_found_just_suffices(distributed):
    noise = noise_for(8.0, 1e-5, 1.0, 30, distributed=distributed)
    at, below = (epsilon_of((Release(1.0, z, 30),), 1e-5, distributed=distributed) for z in (noise, 0.999 * noise))
    assert at <= 8.0 < below


def test_every_exchange_is_charged_and_told(task, ragged):
    run = ct.fit(IFCA, task, ragged, rounds=4, privacy=ct.Privacy(noise=2.0), evaluations=1)
    expected = [epsilon_of((Release(1.0, 2.0, t),), 1e-5) for t in range(1, 5)]
    assert [row["epsilon"] for row in run.history] == pytest.approx(expected, abs=1e-6)
    grouped = replace(IFCA, init=ct.RandomGroups(rounds=3, steps=1))
    run = ct.fit(grouped, task, ragged, rounds=1, privacy=ct.Privacy(noise=2.0), evaluations=1)
    assert run.history[0]["epsilon"] == pytest.approx(expected[3], abs=1e-6)  # three for the start


def test_a_run_ends_before_its_budget_is_exceeded(task, ragged, caplog):
    caplog.set_level("INFO", logger="coterie")
    settings = ct.Privacy(epsilon=epsilon_of((Release(1.0, 2.0, 3),), 1e-5) + 1e-9, noise=2.0)
    run = ct.fit(IFCA, task, ragged, rounds=10, privacy=settings, evaluations=1)
    assert len(run.history) == 3 and run.history[-1]["epsilon"] <= settings.epsilon
    (said,) = [r.message for r in caplog.records if r.message.startswith("privacy:")]
    assert "would bring epsilon to" in said and "the run ends after round 3 of 10" in said


def test_a_start_may_cost_too_much(task, ragged):
    grouped = replace(IFCA, init=ct.RandomGroups(rounds=9, steps=1))
    with pytest.raises(ValueError, match=r"privacy: the next exchange .* the start alone takes more than the budget"):
        ct.fit(grouped, task, ragged, rounds=1, privacy=ct.Privacy(noise=1.0, epsilon=3.0))


def test_the_noise_is_made_for_the_rounds(task, ragged):
    run = ct.fit(IFCA, task, ragged, rounds=3, privacy=ct.Privacy(epsilon=2.0), evaluations=1)
    assert len(run.history) == 3 and 1.99 < run.history[-1]["epsilon"] <= 2.0


def test_stop_and_resume_keep_the_account(task, ragged, tmp_path):
    how = {"privacy": ct.Privacy(noise=2.0, epsilon=100.0, quantile=0.5), "evaluations": 1}
    whole = ct.fit(IFCA, task, ragged, rounds=4, **how)
    ct.fit(IFCA, task, ragged, rounds=2, out=tmp_path, **how)
    parts = ct.fit(IFCA, task, ragged, rounds=4, out=tmp_path, resume=True, **how)
    assert torch.equal(flat(whole.state.theta, 0), flat(parts.state.theta, 0))
    with pytest.raises(ValueError, match="privacy"):  # without it, or with another budget, it is another run
        ct.fit(IFCA, task, ragged, rounds=5, out=tmp_path, resume=True)
    told = [[(row["epsilon"], row["clip"]) for row in run.history] for run in (whole, parts)]
    assert told[0] == told[1] and len({clip for _, clip in told[0]}) == 4


# --- the noise ----------------------------------------------------------------------------------------------------


def test_noise_has_the_stated_scale(task, ragged, unlimited):
    """Clients that send nothing but 0, many times: what comes back is noise."""
    cohort = private(ragged, task, ct.Privacy(noise=0.1, clip=3.0))
    deviations = Deviations.of(0.1, 3.0, adaptive=False)
    sent, updates, weights = still(task), [], []
    for _ in range(60):
        sums = cohort.combine(FEDAVG.step, sent)
        updates.append(flat(sums.update)[0] - sums.weight * flat(sent.theta, 0))
        weights.append(float(sums.weight) - len(ragged))
    assert deviations.update == pytest.approx(0.1 * 3.0 / math.sqrt(1 - COUNTS))
    assert float(torch.stack(updates).std()) == pytest.approx(deviations.update, rel=0.01)
    assert float(np.std(weights)) == pytest.approx(deviations.weight, rel=0.35)  # of 60 numbers: four sigma
    assert len({float(x[0]) for x in updates}) == 60  # no two exchanges have the same


def test_noise_of_clients_has_the_stated_scale(task, ragged, unlimited):
    """The noise of so many clients as must answer is that of one server; all of them add a little more."""
    secure = ct.SecureSum(threshold=0.6, min_members=3)
    cohort = private(ragged, task, ct.Privacy(noise=0.1, clip=3.0), secure=secure)
    sent = still(task)
    sums = cohort.combine(FEDAVG.step, sent)
    noise = flat(sums.update)[0] - sums.weight * flat(sent.theta, 0)
    least = 8  # of 12: more than 0.6
    expected = Deviations.of(0.1, 3.0, adaptive=False).update * math.sqrt(len(ragged) / least)
    assert float(noise.std()) == pytest.approx(expected, rel=0.06)  # of 1,210 numbers: three sigma
    assert abs(float(noise.mean())) < 3 * expected / math.sqrt(len(noise))


def test_dropped_clients_leave_enough_noise(task, ragged, unlimited):
    secure = ct.SecureSum(threshold=0.6, min_members=3)
    engine = simulated(ragged, task, Key.of(0)).engine
    some = Secure(engine, secure, answering=lambda exchange, asked: asked[:8])
    cohort = Cohort(Private(some, ct.Privacy(noise=0.1, clip=3.0), distributed=True)).at(0)
    sent = still(task)
    sums = cohort.combine(FEDAVG.step, sent)
    noise = flat(sums.update)[0] - sums.weight * flat(sent.theta, 0)
    assert float(noise.std()) == pytest.approx(Deviations.of(0.1, 3.0, adaptive=False).update, rel=0.06)


@pytest.mark.parametrize("noise", [(0.5, 0.5), (0.5, 0.5, 0.5)])
def test_clients_add_noise_everywhere_and_tell_no_more_than_is_charged(task, ragged, noise):
    """Every slot of every client has noise and is counted; without an adaptive bound there is no bit."""
    step, sent = Bounded(ct.FedX(k=3, lr=0.1), "step", 1.0, noise, 3).step, still(task, 3)
    reply = simulated(ragged, task, Key.of(0)).at(0).gather(step, sent, slots=3)
    assert list(reply.update) == ["update", "weight", "within"][: len(noise)]
    assert all(bool((x != 0).reshape(12, 3, -1).any(2).all()) for x in leaves(reply.update))
    assert bool((reply.weight == 1).all()) and reply.slot.tolist() == [[0, 1, 2]] * 12


@pytest.mark.parametrize("sigma", [1, 2, 7])
def test_the_discrete_gaussian_is_one(sigma):
    x = discrete_gaussian(sigma, 50_000, Source.of(Key.of(sigma)))
    at = np.arange(-12 * sigma, 12 * sigma + 1)
    chance = np.exp(-(at**2) / (2 * sigma**2))
    common = chance / chance.sum() * len(x) > 20
    found = np.array([(x == i).sum() for i in at])
    counts = [*found[common], found[~common].sum()]
    expected = [*(chance / chance.sum() * len(x))[common], (chance / chance.sum() * len(x))[~common].sum()]
    assert chisquare(counts, expected).pvalue > 1e-3


def test_real_noise_cannot_be_foreseen():
    a, b = (discrete_gaussian(1000, 50, Source.system()) for _ in range(2))
    assert not np.array_equal(a, b)


@pytest.mark.parametrize("deviation", [1e-4, 0.3, 1.0, 777.0])
def test_the_grid_is_exact(deviation):
    """Units are powers of two, so that noise is a number that every computer adds exactly."""
    unit, steps = grid(deviation)
    assert math.log2(unit) == int(math.log2(unit)) and deviation <= unit * steps <= 1.001 * deviation


# --- how far one client can change anything --------------------------------------------------------------------------


def contributions(method, step, message, federation, task, slots, clip=0.7):
    """Every client's own contribution: the sums of an exchange with it alone, before noise."""
    bounded = Bounded(method, step.__name__, clip).step
    cohort = simulated(federation, task, Key.of(0), executor="sequential").at(0)
    for i in range(len(federation)):
        yield cohort.only([i]).combine(bounded, message, slots=slots)


def length(tree):
    return math.sqrt(sum(float(x.double().square().sum()) for x in leaves(tree)))


@pytest.mark.parametrize("weights", ["uniform", "size"])
@pytest.mark.parametrize("average", ["model", "gradient"])
def test_no_client_of_ifca_contributes_more_than_the_bound(task, ragged, weights, average):
    method = replace(IFCA, weights=weights, average=average)
    sent = Models(tree_map(lambda x: x[None], still(task, 3).theta), torch.tensor(2.0))
    found = list(contributions(method, method.step, sent, ragged, task, 3))
    assert all(length(s.update) <= 0.7 * (1 + 1e-6) and length(s.weight) <= 1 for s in found)
    assert max(length(s.update) for s in found) == pytest.approx(0.7)  # the bound is one
    assert all(int((flat(s.update).abs().sum(1) > 0).sum()) == 1 for s in found)  # in one slot


def test_nor_of_methods_that_add_to_several_sums(task, ragged, regression):
    fedem = ct.FedEM(k=3, init="random", lr=2.0)
    state = fedem.start(task, simulated(ragged, task, Key.of(0)).at(0), Key.of(1))
    line, rows = regression
    fedx = ct.FedX(k=3, lr=0.1, init="random")
    theta = stack([line.init(Key.of(j)) for j in range(3)])
    for method, step, message, federation, what in (
        (fedem, fedem.step, fedem._broadcast(state), ragged, task),
        (fedx, fedx.normal_step, theta, rows, line),
    ):
        for sums in contributions(method, step, message, federation, what, 3):
            assert length(sums.update) <= 0.7 * (1 + 1e-6) and length(sums.weight) <= 1 + 1e-6


@pytest.mark.parametrize("executor", ["vmap", "sequential"])
def test_all_executors_shorten_alike(task, ragged, executor, unlimited):
    how = {"rounds": 2, "privacy": ct.Privacy(noise=0.1, clip=0.3, quantile=0.5), "evaluations": 1}
    fast, slow = (ct.fit(IFCA, task, ragged, executor=e, **how) for e in ("vectorised", executor))
    assert torch.allclose(flat(fast.state.theta, 0), flat(slow.state.theta, 0), atol=1e-5)
    assert fast.history[-1]["clip"] == pytest.approx(slow.history[-1]["clip"], rel=1e-6)


def test_a_bound_that_nobody_reaches_changes_nothing(task, ragged):
    step = Bounded(FEDAVG, "step", 1e6).step
    cohort, sent = simulated(ragged, task, Key.of(0)).at(0), still(task)._replace(lr=torch.tensor(0.5))
    change = flat(cohort.combine(step, sent).update) / len(ragged)
    mean = flat(cohort.combine(FEDAVG.step, sent).update) / len(ragged)
    assert torch.allclose(flat(sent.theta, 0) + change, mean, atol=1e-6)


@ct.register("broken", "service")
@dataclass(frozen=True)
class Broken:
    """A client whose update is not a number."""

    @client_step
    def step(self, task):
        return ClientStep(lambda message, local: Reply({"w": message + torch.nan}))


def test_what_is_not_finite_counts_as_nothing(task, ragged):
    cohort = simulated(ragged, task, Key.of(0)).at(0)
    assert cohort.combine(Bounded(Broken(), "step", 1.0).step, torch.ones(3)).update["w"].abs().sum() == 0
    sent = still(task)._replace(lr=torch.tensor(1e38))
    assert torch.isfinite(flat(cohort.combine(Bounded(FEDAVG, "step", 1.0).step, sent).update)).all()


def test_a_step_that_is_none_is_not_called():
    with pytest.raises(ValueError, match="FedAvg has no client step 'models'"):
        _ = Bounded(FEDAVG, "models", 1.0).inner


def test_the_bound_follows_a_quantile(task, ragged, unlimited):
    """With hardly any noise, the bound comes to where half of the clients are within it."""
    cohort = private(ragged, task, ct.Privacy(noise=0.02, clip=3.0, quantile=0.5))
    sent = still(task)._replace(lr=torch.tensor(0.5))
    for _ in range(60):
        cohort.combine(FEDAVG.step, sent)
    lengths = [length(s.update) for s in contributions(FEDAVG, FEDAVG.step, sent, ragged, task, 1, clip=1e6)]
    low, high = np.quantile(lengths, [0.35, 0.65])
    assert low <= cohort.ledger.account["clip"] <= high


# --- who takes part, and what is told ---------------------------------------------------------------------------------


def test_each_client_is_sampled_by_itself(task, ragged):
    cohort = private(ragged, task)
    draws = torch.stack([torch.isin(cohort.clients, cohort.at(t).sample(0.3).clients) for t in range(2000)]).float()
    assert float(draws.mean()) == pytest.approx(0.3, abs=0.015)
    assert float(draws.sum(1).var()) == pytest.approx(12 * 0.3 * 0.7, rel=0.15)  # a fixed number would have 0
    together = torch.corrcoef(draws.T)[~torch.eye(12, dtype=torch.bool)]
    assert float(together.abs().max()) < 0.1


def test_nobody_may_take_part(task, ragged):
    method = replace(IFCA, fraction=1e-9)
    run = ct.fit(method, task, ragged, rounds=2, privacy=ct.Privacy(noise=1.0), evaluations=1)
    assert [row["participants"] for row in run.history] == [0, 0]
    assert run.history[-1]["bytes_up"] == 0


def test_the_history_tells_no_losses_and_no_labels(task, ragged):
    run = ct.fit(replace(IFCA, fraction=0.5), task, ragged, rounds=2, privacy=ct.Privacy(noise=1.0), evaluations=1)
    assert {row["loss"] for row in run.history} == {None} and {row["participants"] for row in run.history} == {6}
    assert set(run.algorithm.labels(run.state).tolist()) == {-1}
    assert len({row["bytes_up"] for row in run.history}) == 1  # of the expected number, whoever took part


def test_a_slot_of_noise_alone_counts_as_empty(task, ragged):
    cohort, sent = private(ragged, task, ct.Privacy(noise=0.5, epsilon=1e3)), still(task, 3)
    least = FEW * Deviations.of(0.5, 1.0, adaptive=False).weight
    sums = cohort.combine(ct.FedX(k=3, lr=0.1).step, sent, slots=3)
    empty = sums.weight == 0
    assert bool(empty.any()) and bool((sums.weight[~empty] >= least).all())
    assert not flat(sums.update)[empty].any() and not sums.members[empty].any()


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (ct.IFCA(k=3), "Tournament.train needs every client's own reply"),
        (ct.IFCA(k=3, init="farthest_first"), "FarthestFirst.train needs every client's own reply"),
        (ct.CFL(), "CFL.step needs every client's own reply"),
        (ct.CFL(sketch=50), "CFL.step tells the server every client's "),
        (ct.IFCA(k=3, init="random", restarts=2), "IFCA.step compares restarts by losses"),
    ],
)
def test_what_needs_single_replies_is_refused(task, ragged, method, said):
    with pytest.raises(ValueError, match=f"privacy: {said}"):
        ct.fit(method, task, ragged, rounds=1, privacy=ct.Privacy(noise=1.0))


@pytest.mark.parametrize("secure", [None, ct.SecureSum(min_members=2)])
@pytest.mark.parametrize("method", [FEDAVG, IFCA, ct.FedX(k=3, lr=0.1, init="random"), ct.FedEM(k=3, init="random")])
def test_methods_that_only_add_work(task, ragged, method, secure):
    settings = ct.Privacy(noise=1.0, epsilon=1e3, quantile=0.5)
    run = ct.fit(method, task, ragged, rounds=2, privacy=settings, secure=secure, evaluations=1)
    assert len(run.history) == 2 and math.isfinite(run.score)


@pytest.mark.parametrize("method", [ct.FedX(k=1, lr=0.1, init="random"), ct.MixedEffects(k=1)])
def test_statistics_of_many_clients_bear_the_noise(method):
    """Sums of squares and products, which are bounded as models are; two exchanges are those of a start."""
    federation = ct.data.varying_regression(clients=2000, rows=10, features=4)
    task, how = ct.Task.regressor(ct.models.Linear(4, 1)), {"rounds": 4, "evaluations": 1}
    plain = ct.fit(method, task, federation, **how)
    run = ct.fit(method, task, federation, privacy=ct.Privacy(epsilon=8.0, clip=5.0, exchanges=6), **how)
    assert run.history[-1]["epsilon"] <= 8.0 and plain.score < run.score < 1.03 * plain.score


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (8.0, "fit: privacy must be Privacy, got 8.0"),
        (ct.Privacy(epsilon=0), "Privacy: epsilon must be at least"),
        (ct.Privacy(delta=1.0), "Privacy: delta must be at most 0.1"),
        (ct.Privacy(clip=-1.0), "Privacy: clip must be at least"),
        (ct.Privacy(epsilon=0.001, delta=1e-15, exchanges=10**9), "privacy: no noise keeps 1000000000 exchanges"),
    ],
)
def test_bad_settings_are_refused_in_one_line(task, ragged, given, said):
    with pytest.raises(ValueError, match=said) as error:
        ct.fit(FEDAVG, task, ragged, rounds=1, privacy=given)
    assert "\n" not in str(error.value)


def test_noise_finer_than_the_secure_sum_is_refused(task, ragged, unlimited):
    with pytest.raises(ValueError, match="privacy: the secure sum rounds to multiples of"):
        how = {"privacy": ct.Privacy(noise=0.01, clip=1e-6), "secure": ct.SecureSum(clip=2.0**30)}
        ct.fit(FEDAVG, task, ragged, rounds=1, **how)


def test_a_private_run_is_not_updated(task, ragged):
    run = ct.fit(FEDAVG, task, ragged, rounds=1, privacy=ct.Privacy(noise=1.0), evaluations=1)
    with pytest.raises(ValueError, match="update: the run had a privacy budget"):
        run.update(ragged, rounds=1)


def test_a_configuration_may_ask_for_it_and_show_tells(task, tmp_path):
    tables = {
        "algorithm": {"name": "fedavg"},
        "task": {"kind": "classifier", "model": {"name": "mlp", "sizes": [64, 8, 10]}},
        "data": {"name": "rotated_digits", "clients": 8},
        "run": {"rounds": 1, "privacy": {"epsilon": 4.0, "noise": 2.0}},
    }
    config = build(tables)
    assert config.run["privacy"] == ct.Privacy(epsilon=4.0, noise=2.0)
    ct.fit(config.algorithm, config.task, config.federation, **config.run, out=tmp_path / "run")
    console = Console(width=150, record=True)
    console.print(show._page(show.View.of(tmp_path / "run")))
    said = f"epsilon {epsilon_of((Release(1.0, 2.0),), 1e-5):.4g}, delta 1e-05 for every client, noise added by the ser"
    assert said in console.export_text()
    with pytest.raises(ValueError, match=r"\[run\] privacy must be a table"):
        build({**tables, "run": {"rounds": 1, "privacy": 8}})


# --- on Flower --------------------------------------------------------------------------------------------------------

TABLES = {
    "algorithm": {"name": "ifca", "k": 3, "init": "random", "tau": 2},
    "task": {"kind": "classifier", "model": {"name": "mlp", "sizes": [64, 16, 10]}},
}


def nodes(federation, folder):
    return LocalGrid({7 + i: Node(f"site-{i}", federation.select(range(3 * i, 3 * i + 3)), folder) for i in range(4)})


@pytest.mark.parametrize("secure", [{}, {"secure": {"min_members": 2}}])
def test_on_flower_too(ragged, tmp_path, secure):
    run = {"rounds": 2, "evaluations": 1, "privacy": {"noise": 0.2, "epsilon": 1000.0, "quantile": 0.5}, **secure}
    settings = Settings(nodes=4)
    grids = [nodes(ragged, tmp_path / name) for name in ("first", "second")]
    first, second = (serve(grid, settings, {**TABLES, "run": run}) for grid in grids)
    expected = [epsilon_of((Release(1.0, 0.2, t),), 1e-5, distributed=bool(secure)) for t in (1, 2)]
    assert [row["epsilon"] for row in first.history] == pytest.approx(expected, abs=1e-6)
    assert set(first.algorithm.labels(first.state).tolist()) == {-1}
    # The same seed, and other noise: on real nodes nobody can foresee it.
    assert not torch.equal(flat(first.state.theta, 0), flat(second.state.theta, 0))


def test_a_bounded_step_crosses_a_network():
    step = Bounded(IFCA, "step", 0.5, (0.1, 0.2, 0.3), 3, False).step
    again = rebuild_step(describe_step(step))
    assert again.__self__ == step.__self__
