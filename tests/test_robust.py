import tomllib

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

import coterie as ct
from coterie.core.cohort import Cohort
from coterie.core.engine import Engine
from coterie.core.key import Key
from coterie.core.pytree import flat
from coterie.core.sums import slot_mean, slot_sum
from coterie.core.train import Models
from coterie.core.uplink import Uplink
from coterie.engines import find_engine
from coterie.robust.engine import Robust, models_sent, robust_engine
from coterie.robust.rules import find_aggregate
from coterie_lab.bench.hostile import ATTACKS, Hostile

RULES = ["clipped", "median", "trimmed", "geometric_median", "krum", "buckets"]


@pytest.fixture(scope="module")
def federation():
    return ct.data.rotated_digits(clients=16, seed=0)


@pytest.fixture(scope="module")
def task():
    return ct.Task.classifier(ct.models.MLP(64, 8, 10))


# --- the rules against references written another way --------------------------------------------------------------


def changes(n, d=7):
    g = torch.Generator().manual_seed(n)
    return torch.randn(n, d, generator=g) * torch.linspace(0.5, 5, n)[:, None]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 9, 20])
def test_coordinate_rules_agree_with_numpy(n):
    x = changes(n)
    np.testing.assert_allclose(ct.Median()(x), np.median(x.numpy(), 0), rtol=1e-6)
    for share in (0.0, 0.1, 0.25, 0.49):
        drop = min(int(np.ceil(share * n)), (n - 1) // 2)
        expected = [np.mean(sorted(column)[drop : n - drop]) for column in x.T.tolist()]
        np.testing.assert_allclose(ct.Trimmed(share)(x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n", [3, 4, 9, 20])
def test_geometric_median_has_the_least_sum_of_distances(n):
    x = changes(n).double()

    def price(z):
        return np.linalg.norm(x.numpy() - z, axis=1).sum()

    found = ct.GeometricMedian()(x).numpy()
    best = minimize(price, np.median(x.numpy(), 0), method="BFGS").fun
    assert price(found) <= best * (1 + 1e-6)


def multi_krum(x, f):
    """As in the paper, one pair after the other."""
    n = len(x)
    apart = [[sum((a - b) ** 2 for a, b in zip(p, q, strict=True)) for q in x] for p in x]
    price = [sum(sorted(row)[: n - f]) for row in apart]
    kept = sorted(range(n), key=lambda i: price[i])[: n - f]
    return np.mean([x[i] for i in kept], axis=0)


@pytest.mark.parametrize(("n", "share", "f"), [(4, 0.25, 1), (9, 0.2, 2), (20, 0.3, 6), (20, 0.0, 0)])
def test_krum_keeps_those_with_the_nearest_neighbours(n, share, f):
    x = changes(n)
    np.testing.assert_allclose(ct.Krum(share)(x), multi_krum(x.tolist(), f), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["median", "trimmed", "geometric_median", "krum"])
def test_a_minority_cannot_move_a_rule_far(name):
    x = torch.randn(20, 50, generator=torch.Generator().manual_seed(0))
    honest = x[:14].mean(0)
    for far in (10.0, 1e3, 1e6):
        x[14:] = far
        assert float((find_aggregate(name)(x) - honest).abs().max()) < 2.5


# --- the engine ----------------------------------------------------------------------------------------------------


class Lying(Engine):
    """Some clients do something else to their replies."""

    def __init__(self, inner, lie, who=(0, 5, 10)):
        super().__init__(inner.federation, inner.task, inner.key, inner.device)
        self.name, self.inner, self.lie, self.who = inner.name, inner, lie, torch.tensor(who)

    def gather(self, exchange):
        reply = self.inner.gather(exchange)
        at = torch.isin(exchange.clients, self.who)
        return self.lie(reply, at)

    def combine(self, exchange):
        return slot_sum(self.gather(exchange), exchange.slots)


def simulator(federation, task):
    return find_engine("vectorised")(federation, task, Key.of(0), torch.device("cpu"), Uplink())


def state_of(method, engine):
    return method.start(engine.task, Cohort(engine).at(0), Key.of(1))


@pytest.mark.parametrize("restarts", [1, 2])
@pytest.mark.parametrize("shared", [(), ("layers.0.weight",)])
@pytest.mark.parametrize("average", ["model", "gradient"])
def test_without_attack_the_clipped_mean_is_the_mean(federation, task, restarts, shared, average, monkeypatch):
    monkeypatch.setattr("coterie.robust.engine.LONG", 1e6)
    monkeypatch.setattr("coterie.robust.engine.FAR", 1e6)
    names = list(task.init(Key.of(0)))
    method = ct.IFCA(4, init="random", restarts=restarts, shared=tuple(names[:1] if shared else ()), average=average)
    engine = simulator(federation, task)
    state = state_of(method, engine)
    plain, _ = method.round(state, Cohort(engine).at(0))
    robust, _ = method.round(state, Cohort(Robust(engine, ct.Clipped())).at(0))
    torch.testing.assert_close(robust.quality, plain.quality, rtol=0.01, atol=0)  # most clients hold out as many rows
    torch.testing.assert_close(robust._replace(quality=plain.quality), plain, rtol=1e-4, atol=1e-5)


def test_rounds_that_send_each_client_its_own_model_are_robust_too(federation, task, monkeypatch):
    monkeypatch.setattr("coterie.robust.engine.LONG", 1e6)
    method = ct.IFCA(4, init="random", patience=1, restarts=2)
    engine = simulator(federation, task)
    state, _ = method.round(state_of(method, engine), Cohort(engine).at(0))
    state = state._replace(still=1)
    plain, _ = method.round(state, Cohort(engine).at(1))
    robust, _ = method.round(state, Cohort(Robust(engine, ct.Clipped())).at(1))
    torch.testing.assert_close(robust.theta, plain.theta, rtol=1e-4, atol=1e-5)


def test_a_client_that_was_sent_one_model_cannot_name_another_slot(federation, task):
    method, engine = ct.IFCA(4, init="random", patience=1), simulator(federation, task)
    state, _ = method.round(state_of(method, engine), Cohort(engine).at(0))
    state = state._replace(still=1)

    def lie(reply, at):
        return reply._replace(slot=torch.where(at[:, None], (reply.slot + 1) % 4, reply.slot))

    honest, _ = method.round(state, Cohort(Robust(engine, ct.Median())).at(1))
    lied, _ = method.round(state, Cohort(Robust(Lying(engine, lie), ct.Median())).at(1))
    torch.testing.assert_close(lied.theta, honest.theta)


def test_the_median_of_a_slot_is_that_of_its_clients_models(federation, task):
    method, engine = ct.FedAvg(), simulator(federation, task)
    sent = Models(task.init(Key.of(3)), torch.tensor(0.1))
    replies = Cohort(engine).gather(method.step, sent)
    sums = Cohort(Robust(engine, ct.Median())).combine(method.step, sent)
    found = slot_mean(sums, otherwise={n: x[None] for n, x in sent.theta.items()})
    expected = np.median(flat(replies.update).numpy(), 0)  # no change is long here
    np.testing.assert_allclose(flat(found)[0], expected, rtol=1e-4, atol=1e-6)
    assert float(sums.weight) == 16


def test_a_long_change_is_shortened_and_no_number_is_none(federation, task):
    method, engine = ct.FedAvg(), simulator(federation, task)
    sent = Models(task.init(Key.of(3)), torch.tensor(0.1))
    begin = flat({n: x[None] for n, x in sent.theta.items()})

    def lie(reply, at):
        update = {n: x.clone() for n, x in reply.update.items()}
        update["layers.1.bias"][0], update["layers.1.bias"][5] = 1e9, torch.nan
        return reply._replace(update=update)

    robust = Robust(Lying(engine, lie), ct.Median())
    length = (flat(Cohort(robust).gather(method.step, sent).update) - begin).norm(dim=1)
    honest = (flat(Cohort(engine).gather(method.step, sent).update) - begin).norm(dim=1)
    assert float(length[0]) == pytest.approx(2 * float(honest.median()), rel=0.05)
    assert float(length[5]) == 0
    torch.testing.assert_close(length[11:], honest[11:])


def test_a_claimed_weight_counts_for_nothing(federation, task):
    method, engine = ct.FedAvg(weights="size"), simulator(federation, task)
    sent = Models(task.init(Key.of(3)), torch.tensor(0.1))

    def lie(reply, at):
        return reply._replace(weight=torch.where(at, 1e9, reply.weight))

    plain = Cohort(Robust(engine, ct.Median())).combine(method.step, sent)
    lied = Cohort(Robust(Lying(engine, lie), ct.Median())).combine(method.step, sent)
    torch.testing.assert_close(lied.update, plain.update)
    torch.testing.assert_close(lied.weight, plain.weight)


def test_restarts_are_judged_by_what_most_clients_note(federation, task):
    method, engine = ct.IFCA(4, init="random", restarts=3), simulator(federation, task)
    state = state_of(method, engine)

    def lie(reply, at):
        held = reply.note["held"].clone()
        held[at, 0], held[at, 1] = 1e9, torch.nan
        return reply._replace(note={**reply.note, "held": held})

    honest, _ = method.round(state, Cohort(engine).at(0))
    mean, _ = method.round(state, Cohort(Lying(engine, lie)).at(0))
    robust, _ = method.round(state, Cohort(Robust(Lying(engine, lie), ct.Median())).at(0))
    assert float(mean.quality[0]) > 1e6 and not bool(mean.quality[1].isfinite())
    torch.testing.assert_close(robust.quality, honest.quality, rtol=0.3, atol=0)


def test_where_all_diverge_the_run_says_so(federation, task):
    with pytest.raises(ct.Diverged):
        ct.fit(ct.FedAvg(lr=1e30), task, federation, rounds=3, aggregate="median")


# --- fit, configurations, the secure sum ---------------------------------------------------------------------------


METHODS = [ct.IFCA(2, init="random"), ct.FedAvg(), ct.FedX(2, refine="fedavg", lr=0.1, init="random")]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_every_rule_trains(federation, task, method):
    mean = ct.fit(method, task, federation, rounds=3, evaluations=1)
    for name in RULES:
        run = ct.fit(method, task, federation, rounds=3, aggregate=name, evaluations=1)
        assert abs(run.score - mean.score) < 0.1


def test_it_is_in_the_run_folder_and_a_run_goes_on_with_it(federation, task, tmp_path):
    rule, method = ct.Trimmed(share=0.2), ct.IFCA(4, init="random")
    whole = ct.fit(method, task, federation, rounds=4, aggregate=rule)
    ct.fit(method, task, federation, rounds=2, aggregate=rule, out=tmp_path / "run")
    config = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert config["run"]["aggregate"] == {"name": "trimmed", "share": 0.2}
    with pytest.raises(ValueError, match="aggregate"):
        ct.fit(method, task, federation, rounds=4, out=tmp_path / "run", resume=True)
    again = ct.fit(method, task, federation, rounds=4, aggregate=rule, out=tmp_path / "run", resume=True)
    torch.testing.assert_close(again.state, whole.state, rtol=0, atol=0, equal_nan=True)
    with pytest.raises(ValueError, match="the run had a robust mean"):
        ct.load(tmp_path / "run").update(federation)
    with pytest.raises(ValueError, match="the run had a robust mean"):
        again.update(federation)


def test_configurations_name_it():
    from coterie.runs.config import build_aggregate

    assert build_aggregate("median") == ct.Median()
    assert build_aggregate({"name": "buckets", "count": 7}) == ct.Buckets(7)
    for bad, said in (
        ("meridian", "'meridian' is not known; did you mean 'median'"),
        ({"name": "krum", "shares": 1}, "no key 'shares'"),
        ({"name": "krum", "share": 0.7}, "share must be at most"),
        (3, "must be a table with a name"),
    ):
        with pytest.raises(ValueError, match=said):
            build_aggregate(bad)


@pytest.mark.parametrize(
    ("method", "options", "said"),
    [
        (ct.FedAvg(), {"aggregate": "mean"}, "aggregate 'mean' is not known"),
        (ct.FedAvg(), {"aggregate": ct.Median}, "aggregate must be one of"),
        (ct.FedAvg(), {"aggregate": ct.Trimmed(0.8)}, "share must be at most 0.49"),
        (ct.FedAvg(), {"aggregate": "median", "secure": ct.SecureSum()}, "give aggregate=Buckets"),
        (ct.CFL(), {"aggregate": "median"}, "which CFL does not"),
        (ct.FedEM(2), {"aggregate": "median"}, "which FedEM does not"),
        (ct.LocalOnly(), {"aggregate": "buckets"}, "which LocalOnly does not"),
    ],
)
def test_what_makes_no_sense_is_refused(federation, task, method, options, said):
    with pytest.raises(ValueError, match=said):
        ct.fit(method, task, federation, rounds=1, **options)


def test_sums_that_are_no_models_are_refused():
    federation = ct.data.varying_regression(clients=8, rows=20, features=3, seed=0)
    task = ct.Task.regressor(ct.models.Linear(federation.train.x.shape[1], 1))
    for method in (ct.MixedEffects(), ct.FedX(2, init="random")):
        said = rf"aggregate: {type(method).__name__}\.\w+ has clients send parts of a sum"
        with pytest.raises(ValueError, match=said):
            ct.fit(method, task, federation, rounds=1, aggregate="median")


def test_buckets_are_random_and_under_a_secure_sum_the_same(federation, task):
    method, rule = ct.FedAvg(), ct.Buckets(4)
    open_, masked = (
        ct.fit(method, task, federation, rounds=2, aggregate=rule, secure=secure, evaluations=1)
        for secure in (None, ct.SecureSum(min_members=2))
    )
    torch.testing.assert_close(masked.models, open_.models, rtol=1e-4, atol=1e-5)
    engine = robust_engine(simulator(federation, task), rule)
    first, second = (engine._buckets(Cohort(engine).at(t)._exchange(method.step, (), 1, None)) for t in (0, 1))
    assert [len(at) for at in first] == [4] * 4 and sorted(torch.cat(first).tolist()) == list(range(16))
    assert [at.tolist() for at in first] != [at.tolist() for at in second]


def test_a_sum_of_few_is_not_opened_in_any_bucket(federation, task):
    run = ct.fit(ct.IFCA(4, init="random"), task, federation, rounds=1, aggregate=ct.Buckets(4), secure=ct.SecureSum())
    assert int(run.algorithm.members(run.state).sum()) == 16  # of counts the server knows all
    assert bool((run.algorithm.labels(run.state) == -1).all())


def test_the_median_of_buckets_outlives_what_the_mean_does_not(federation, task):
    def lie(reply, at):
        return reply._replace(
            update={n: torch.where(at.reshape(-1, *[1] * (x.dim() - 1)), -50.0 * x, x) for n, x in reply.update.items()}
        )

    method, engine = ct.FedAvg(), simulator(federation, task)
    sent = Models(task.init(Key.of(3)), torch.tensor(0.1))
    honest = flat(Cohort(engine).combine(method.step, sent).update) / 16
    lying = Lying(engine, lie, who=(0,))
    plain = flat(Cohort(lying).combine(method.step, sent).update) / 16
    sums = Cohort(robust_engine(lying, ct.Buckets(4))).combine(method.step, sent)
    robust = flat(sums.update) / sums.weight
    assert float((robust - honest).norm()) < 0.02 * float((plain - honest).norm())


def test_models_sent_is_what_a_reply_counts_from(federation, task):
    method, engine = ct.IFCA(4, init="random", restarts=2), simulator(federation, task)
    state = state_of(method, engine)
    exchange = Cohort(engine).at(0)._exchange(method.step, method._broadcast(state), 8, None)
    reply = engine.gather(exchange)
    sent = models_sent(exchange, method.step(task), reply)
    for i, r in ((3, 0), (7, 1)):
        j = int(reply.slot[i, r]) - 4 * r
        assert all(torch.equal(sent[n][i, r], x[r, j]) for n, x in state.theta.items())


# --- starts --------------------------------------------------------------------------------------------------------


def taken_by(start, engine, k):
    """How many groups the k models of a start serve best, judged by honest clients that are to choose."""
    cohort = Cohort(engine).at(0)
    theta = start(k, 0.1, engine.task, cohort, Key.of(1))
    honest = Cohort(engine.in_the_open()).at(0)
    slot = honest.gather(ct.Balanced().choose, theta, slots=k).slot
    return len({(int(g), int(j)) for g, j in zip(engine.federation.groups, slot, strict=True)}), len(slot.unique())


@pytest.fixture(scope="module")
def attacked(task):
    """Two groups of twelve clients, of which four are hostile while a start asks."""
    federation = ct.data.rotated_digits(clients=24, groups=2, seed=0)
    hostile = torch.zeros(24, dtype=torch.bool)
    hostile[[0, 7, 13, 20]] = True
    return Hostile(simulator(federation, task), hostile, ATTACKS["hostile start"])


def test_the_tournament_withstands_outliers_that_praise_the_worst(attacked):
    start = ct.Tournament(steps=60)
    assert taken_by(start, attacked.in_the_open(), 2) == (2, 2)
    assert taken_by(start, attacked, 2) != (2, 2)
    assert taken_by(start, Robust(attacked, ct.Median()), 2) == (2, 2)


def test_farthest_first_passes_over_models_that_serve_nobody_else(attacked):
    begin = attacked.task.init(Key.of(1).fold(0))
    for support, hostile in ((0, True), (2, False)):
        theta = ct.FarthestFirst(steps=60, support=support)(2, 0.1, attacked.task, Cohort(attacked).at(0), Key.of(1))
        longest = float((flat(theta) - flat({n: x[None] for n, x in begin.items()})).norm(dim=1).max())
        assert (longest > 10) == hostile  # nobody else's change is as long
    assert taken_by(ct.FarthestFirst(steps=60), Robust(attacked, ct.Median()), 2) == (2, 2)


def test_where_no_model_has_support_farthest_first_takes_what_there_is(attacked):
    cohort = Cohort(attacked.in_the_open()).at(0)
    first = ct.FarthestFirst(support=25)(2, 0.1, attacked.task, cohort, Key.of(1))
    assert flat(first).shape[0] == 2


# --- a Flower federation -------------------------------------------------------------------------------------------


TABLES = {
    "algorithm": {"name": "fedavg", "tau": 2},
    "task": {"kind": "classifier", "model": {"name": "mlp", "sizes": [64, 16, 10]}},
}


def nodes_of(federation, folder):
    from coterie.flower.node import Node

    return {i: Node(f"site-{i}", federation.select(range(2 * i, 2 * i + 2)), folder) for i in range(6)}


def test_on_flower_nodes_send_every_clients_model(ragged, tmp_path):
    from coterie.flower.local import LocalGrid
    from coterie.flower.server_app import Settings, serve
    from coterie.runs.config import build_task

    tables = {**TABLES, "run": {"rounds": 2, "aggregate": "geometric_median"}}
    here = ct.fit(ct.FedAvg(tau=2), build_task(tables["task"]), ragged, rounds=2, aggregate="geometric_median")
    grid = LocalGrid(nodes_of(ragged, tmp_path / "nodes"))
    there = serve(grid, Settings(nodes=6, out=str(tmp_path / "run")), tables)
    torch.testing.assert_close(there.models, here.models, rtol=1e-4, atol=1e-5)
    config = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert config["run"]["aggregate"] == {"name": "geometric_median"}


def test_on_flower_buckets_are_of_nodes_and_work_under_the_secure_sum(ragged, tmp_path):
    from coterie.flower.local import LocalGrid
    from coterie.flower.server_app import Settings, serve

    runs = {}
    for name, more in (("open", {}), ("secure", {"secure": {"min_members": 2}})):
        grid = LocalGrid(nodes_of(ragged, tmp_path / name))
        tables = {**TABLES, "run": {"rounds": 2, "aggregate": {"name": "buckets", "count": 3}, **more}}
        runs[name] = serve(grid, Settings(nodes=6), tables)
    torch.testing.assert_close(runs["secure"].models, runs["open"].models, rtol=1e-4, atol=1e-5)
    engine = runs["secure"]._cohort.engine
    exchange = Cohort(engine).at(0)._exchange(ct.FedAvg().step, (), 1, None)
    buckets = engine._buckets(exchange)
    assert [len(at) for at in buckets] == [4, 4, 4]
    sites = [set((at // 2).tolist()) for at in buckets]
    assert sum(map(len, sites)) == 6  # no node is in two
