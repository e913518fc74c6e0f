"""Personal models on any method: the method's own rounds, and a model for each client that rows left out speak for."""

import itertools
import tomllib
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import coterie as ct
from coterie import testing
from coterie.core import registry
from coterie.core.key import Key
from coterie.core.local import mean_loss
from coterie.core.step import ClientStep, Local, Reply, client_step
from coterie.core.task import SHARE, Data
from coterie.core.train import Models
from coterie.engines import ENGINES, simulated
from coterie.methods.ifca import IFCA
from coterie.runs.config import build_algorithm, build_settings, describe
from coterie.runs.evaluate import evaluate

LINE = ct.Task.regressor(ct.models.Linear(3, 1))


def varying(spread=1.0, m=12, rows=(4, 30), seed=0, groups=2, noise=0.3):
    """Groups of regressions, about which clients vary."""
    g = torch.Generator().manual_seed(seed)
    centres, clients, tests = 2 * torch.randn(groups, 4, generator=g), [], []
    for i in range(m):
        theta = centres[i % groups] + spread * torch.randn(4, generator=g)
        for part, n in ((clients, rows[0] + (rows[1] - rows[0]) * i // m), (tests, 40)):
            x = torch.randn(n, 3, generator=g)
            part.append((x, x @ theta[1:] + theta[0] + noise * torch.randn(n, generator=g)))
    return ct.Federation.from_clients(clients, tests, groups=[i % groups for i in range(m)])


def rows_of(federation, i):
    x, y = federation.train.client(i)
    return Data(x, y, torch.ones(len(x)))


def own_model(method, task, sent, data):
    """What one client makes of what it is sent."""
    return method.personalise(task).run(sent, Local(data, (), ())).update


# --- the method's own rounds ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [ct.FedAvg(tau=2, fraction=0.5), ct.IFCA(2, tau=2, init="random"), ct.CFL(tau=2)])
def test_rounds_states_and_bytes_are_those_of_the_method(method):
    plain, own = (ct.fit(m, LINE, varying(), rounds=4, seed=1, evaluations=1) for m in (method, ct.Personal(method)))
    testing.assert_same(plain.state, own.state)
    assert type(plain.state) is type(own.state)
    assert [(r["bytes_down"], r["bytes_up"]) for r in plain.history] == [
        (r["bytes_down"], r["bytes_up"]) for r in own.history
    ]
    assert plain.labels.tolist() == own.labels.tolist() and own.score < plain.score


# --- the closed form --------------------------------------------------------------------------------------------------


def reference(models, own, x, y, strengths):
    """The same by fitting anew without each row in turn, and by the density of all rows, in numpy."""
    phi, n = np.c_[x, np.ones(len(x))], len(x)  # in the order of the parameters: weight, bias
    scale = np.maximum(np.sqrt((phi**2).mean(0)), 1)
    pairs = [(a, b) for a, b in itertools.product(strengths, (*strengths, np.inf)) if b >= a]
    fitted, left_out, score = [], [], []
    for theta, (level, other) in itertools.product(models, [(np.inf, np.inf), *pairs]):
        variance = 1 / (np.array([other, other, other, level]) * scale**2)
        free, errors = variance > 0, y - phi @ theta

        def fit(at, theta=theta, free=free, errors=errors, variance=variance):
            z, change = phi[at][:, free], np.zeros(4)
            change[free] = np.linalg.solve(z.T @ z + np.diag(1 / variance[free]), z.T @ errors[at])
            return theta + change

        fitted.append(fit(np.arange(n) >= 0))
        left_out.append(np.array([y[i] - phi[i] @ fit(np.arange(n) != i) for i in range(n)]))
        covariance = np.eye(n) + phi @ np.diag(variance) @ phi.T
        density = np.linalg.det(covariance) ** -0.5 * (errors @ np.linalg.solve(covariance, errors)) ** (-n / 2)
        prior = 0.5 if np.isinf(level) else 0.5 / len(pairs)
        score.append(prior * np.sqrt(density * (left_out[-1] @ left_out[-1]) ** (-n / 2)))
    share = np.array(score) / sum(score)
    averaged = share @ np.array(left_out)
    helps = n > 1 and averaged @ averaged < ((y - phi @ models[own]) ** 2).sum()
    return share @ np.array(fitted) if helps else models[own], helps


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 12])
@pytest.mark.parametrize("k", [1, 3])
def test_the_closed_form_is_that_of_fits_without_each_row(n, k):
    g, helped = torch.Generator().manual_seed(n), set()
    method = ct.Personal(ct.IFCA(k), strengths=(0.1, 1.0, 10.0))
    for spread in (0.0, 0.3, 2.0):
        for _ in range(4):
            models = torch.randn(k, 4, generator=g)
            x = torch.randn(n, 3, generator=g) * torch.tensor([0.3, 1.0, 9.0])  # the last is counted in its own unit
            theta = models[0] + spread * torch.randn(4, generator=g)
            y = x @ theta[:3] + theta[3] + 0.5 * torch.randn(n, generator=g)
            sent = Models({"weight": models[:, None, :3], "bias": models[:, 3:]}, label=torch.arange(k))
            padded = Data(torch.cat([x, torch.ones(2, 3)]), torch.cat([y, torch.ones(2)]), torch.ones(n + 2))
            padded.mask[n:] = 0
            found = own_model(method, LINE, sent, padded)
            known = (models.double().numpy(), int(found.label), x.double().numpy(), y.double().numpy())
            expected, helps = reference(*known, (0.1, 1.0, 10.0))
            ours = torch.cat([found.theta["weight"][0], found.theta["bias"]]).numpy()
            assert ours == pytest.approx(expected, abs=2e-4)
            helped.add(bool(helps))
    assert (True in helped) == (n > 1) and (False in helped or n > 4)


def test_columns_of_any_unit_are_solved():
    federation, unit = varying(rows=(12, 12)), torch.tensor([1e4, 1.0, 1.0])
    wild = ct.Federation.from_clients(
        *(
            [(part.client(i)[0] * unit, part.client(i)[1]) for i in range(12)]
            for part in (federation.train, federation.test)
        )
    )
    plain, own = (ct.fit(m, LINE, wild, rounds=3, evaluations=1) for m in (ct.FedX(2), ct.Personal(ct.FedX(2))))
    assert own.score < 0.5 * plain.score


# --- gradient steps ---------------------------------------------------------------------------------------------------


def by_hand(task, theta, data, steps, strengths, lr):
    """Fine-tuning with folds left out in turn, one step and one model after the other."""
    n = len(data.x)
    turn = torch.arange(n) % 5

    def path(keep):
        rows, found = Data(data.x[keep], data.y[keep], data.mask[keep]), [theta]
        for s in strengths:
            now = {name: p.clone().requires_grad_() for name, p in theta.items()}
            for q in range(max(steps)):
                if len(rows.x):
                    slope = torch.autograd.grad(task.loss(now, rows).mean(), list(now.values()))
                    a = 2 * s * lr / len(rows.x)
                    now = {
                        name: ((p - lr * d + a * theta[name]) / (1 + a)).detach().requires_grad_()
                        for (name, p), d in zip(now.items(), slope, strict=True)
                    }
                if q + 1 in steps:
                    found.append({name: p.detach() for name, p in now.items()})
        return found

    folds, whole = [path(turn != f) for f in range(5)], path(turn < 5)
    mixed = lambda models, share: {m: sum(w * t[m] for w, t in zip(share, models, strict=True)) for m in theta}  # noqa: E731
    at = lambda model, i: task.loss(model, Data(data.x[i : i + 1], data.y[i : i + 1], data.mask[:1]))[0]  # noqa: E731
    losses = torch.stack([torch.stack([at(model, i) for model in folds[i % 5]]) for i in range(n)]).mean(0)
    c = len(losses) - 1
    share = (torch.tensor([0.5] + [0.5 / c] * c).log() - n * losses).softmax(0)
    after = sum(at(mixed(folds[i % 5], share), i) for i in range(n)) / n
    return mixed(whole, share) if n > 1 and after < losses[0] else theta


@pytest.mark.parametrize("n", [1, 3, 7, 20])
def test_steps_are_those_made_by_hand(n):
    task, g, changed = ct.Task.classifier(ct.models.MLP(4, 5, 3)), torch.Generator().manual_seed(n), 0
    method = ct.Personal(ct.FedAvg(lr=0.5), strengths=(0.0, 2.0), steps=(2, 6))
    for seed in range(4):
        theta = task.init(Key.of(seed))
        y = torch.randint(3, (n,), generator=g)
        x = torch.randn(n, 4, generator=g) + 2 * torch.nn.functional.one_hot(y, 4) * (seed % 2)
        data = Data(x, y, torch.ones(n))
        found = own_model(method, task, Models(theta, label=torch.tensor(0)), data).theta
        testing.assert_same(found, by_hand(task, theta, data, (2, 6), (0.0, 2.0), 0.5), 1e-5)
        changed += not torch.equal(found["layers.0.weight"], theta["layers.0.weight"])
    assert (changed > 0) == (n > 1)


def test_steps_that_diverge_are_not_taken():
    task, data = ct.Task.regressor(ct.models.MLP(3, 4, 1)), rows_of(varying(), 11)
    theta = task.init(Key.of(0))
    sent = Models(theta, label=torch.tensor(0))
    found = own_model(ct.Personal(ct.FedAvg(), steps=(1, 200), lr=50.0), task, sent, data).theta
    assert all(p.isfinite().all() for p in found.values())
    assert mean_loss(task, found, data) <= mean_loss(task, theta, data)


def test_the_step_size_and_the_optimiser_are_the_methods():
    adam = ct.FedAvg(lr=0.02, optimiser="adam", clip=1.0)
    found = ct.Personal(adam)._descent()
    assert (found.lr, found.optimiser, found.clip) == (0.02, ct.Adam(), 1.0)
    assert ct.Personal(adam, lr=0.5)._descent().lr == 0.5


# --- whom it serves ---------------------------------------------------------------------------------------------------


def test_it_helps_where_clients_vary_and_leaves_them_alone_where_they_do_not():
    for spread, low, high in ((1.0, 0.0, 0.5), (0.0, 0.9, 1.1)):
        federation = varying(spread, m=40, rows=(6, 12))
        plain, own = (
            ct.fit(m, LINE, federation, rounds=40, evaluations=1) for m in (ct.IFCA(2), ct.Personal(ct.IFCA(2)))
        )
        assert low <= own.score / plain.score <= high
        worse = own.scores.per_client > 1.1 * plain.scores.per_client
        assert worse.mean() < 0.1
    assert (own.scores.per_client == plain.scores.per_client).mean() > 0.3


@pytest.mark.parametrize("model", [ct.models.Linear(3, 1), ct.models.MLP(3, 4, 1)])
def test_caution_moves_fewer_clients_and_hurts_fewer(model):
    federation, base = varying(0.7, m=80, rows=(4, 12), groups=1, noise=1.0), ct.FedAvg(lr=0.05)
    task = ct.Task.regressor(model)
    plain, bold, careful = (
        ct.fit(m, task, federation, rounds=20, evaluations=1)
        for m in (base, ct.Personal(base), ct.Personal(base, caution=2.0))
    )
    hurt = [(own.scores.per_client > plain.scores.per_client).mean() for own in (bold, careful)]
    kept = [(own.scores.per_client != plain.scores.per_client).mean() for own in (bold, careful)]
    assert hurt[1] < hurt[0] and 0 < kept[1] < kept[0]


def swapped(m=6, n=30):
    """Two kinds of rows, which every second client names the other way round."""
    g, parts = torch.Generator().manual_seed(0), ([], [])
    for i, part in itertools.product(range(m), parts):
        kind = torch.randint(2, (n,), generator=g)
        part.append((torch.randn(n, 4, generator=g) + 3 * kind[:, None], (kind + i) % 2))
    return ct.Federation.from_clients(*parts)


def test_a_classifier_is_tuned_to_clients_who_name_things_otherwise():
    task, base = ct.Task.classifier(ct.models.MLP(4, 5, 2)), ct.FedAvg(lr=0.3, tau=3)
    methods = base, ct.Personal(base), ct.Ditto(base, steps=(20,))
    plain, own, ditto = (ct.fit(m, task, swapped(), rounds=3, evaluations=1) for m in methods)
    assert own.score > plain.score + 0.2 and ditto.score > plain.score + 0.2


@pytest.mark.parametrize("method", [ct.IFCA(2, lr=0.05, init="random"), ct.FedAvg(lr=0.05)])
@pytest.mark.parametrize("model", [ct.models.Linear(3, 1), ct.models.MLP(3, 4, 1)])
def test_clients_of_one_row_are_served_as_the_method_does(method, model):
    federation = varying(rows=(1, 4))
    plain, own = (
        ct.fit(m, ct.Task.regressor(model), federation, rounds=5, evaluations=1) for m in (method, ct.Personal(method))
    )
    one = federation.train.sizes.numpy() == 1
    assert 0 < one.sum() < 12 and np.isfinite(own.scores.per_client).all()
    assert own.scores.per_client[one] == pytest.approx(plain.scores.per_client[one], rel=1e-5)
    assert own.scores.per_client != pytest.approx(plain.scores.per_client, rel=1e-5)


@pytest.mark.parametrize("task", [LINE, ct.Task.regressor(ct.models.MLP(3, 4, 1))])
def test_without_rows_there_is_no_other_model(task):
    theta, empty = task.init(Key.of(0)), Data(torch.ones(2, 3), torch.ones(2), torch.zeros(2))
    found = own_model(ct.Personal(ct.FedAvg()), task, Models(theta, label=torch.tensor(0)), empty)
    testing.assert_same(found.theta, theta)


# --- wherever clients are ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", [ct.Personal(ct.IFCA(2, tau=2, init="random")), ct.Personal(ct.FedX(2, lr=0.05, init="random"))]
)
@pytest.mark.parametrize("check", ["scores_agree", "secure_sum", "stop_and_resume", "settings"])
def test_closed_forms_are_the_same_wherever_clients_are(method, check):
    problem = testing.Problem(LINE, varying())
    next(c for c in testing.checks(method, problem) if c.name == check).run()


@pytest.mark.parametrize("executor", sorted(ENGINES))
@pytest.mark.parametrize(
    "method", [ct.Personal(ct.IFCA(2, init="random")), ct.Personal(ct.CFL(), strengths=(1.0,), steps=(3,))]
)
def test_engines_agree_on_own_models(executor, method):
    task = LINE if isinstance(method.method, ct.IFCA) else ct.Task.regressor(ct.models.MLP(3, 4, 1))
    state, _ = testing.run_rounds(method, simulated(varying(), task, Key.of(0), executor="sequential"))
    wanted, found = (
        evaluate(method, state, simulated(varying(), task, Key.of(0), executor=e)) for e in ("sequential", executor)
    )
    assert found.per_client == pytest.approx(wanted.per_client, rel=1e-4) and found.metric == "mse"


def test_a_run_is_loaded_and_serves_clients_whose_rows_are_given(tmp_path):
    federation = varying()
    run = ct.fit(
        ct.Personal(ct.IFCA(2, init="random")), LINE, federation, rounds=5, evaluations=1, out=tmp_path / "run"
    )
    again, (x, _) = ct.load(tmp_path / "run"), federation.test.client(3)
    assert again.algorithm == run.algorithm
    rows = federation.train.client(3)
    assert again.predict(x, client=rows) == pytest.approx(run.predict(x, client=3), rel=1e-4)


TOML = """
[algorithm]
name = "personal"
steps = [2, 4]
method = { name = "ifca", k = 2, tau = 3, init = { name = "farthest_first", steps = 2 } }
[task]
kind = "regressor"
model = { name = "linear", inputs = 3, outputs = 1 }
[data]
name = "mixed_regression"
[run]
rounds = 2
"""


def test_configurations_hold_the_method():
    method = ct.Personal(ct.IFCA(2, tau=3, init=ct.FarthestFirst(steps=2)), steps=(2, 4))
    assert build_settings(tomllib.loads(TOML))[0] == method
    assert build_algorithm(describe(method)) == method
    assert build_algorithm({"name": "ditto"}) == ct.Ditto()
    given = ct.Personal(ct.IFCA(1, init=[LINE.init(Key.of(0))], lr_schedule=lambda t: 1.0))
    assert describe(given)["method"]["init"] == "given"
    for table, message in (
        ({}, r"\[algorithm\] needs method"),
        ({"method": {"name": "ifka"}}, r"\[algorithm.method\] 'ifka' is not known; did you mean 'ifca'"),
        ({"method": {"name": "ifca"}}, r"\[algorithm.method\] needs k"),
        ({"method": "ifca"}, "Personal: method must be Method, got 'ifca'"),
    ):
        with pytest.raises(ValueError, match=message):
            build_algorithm({"name": "personal", **table})


# --- on methods whose clients have models of their own already --------------------------------------------------------


@dataclass(frozen=True)
class Halved(IFCA):
    """Each client mixes its cluster's model with one that is all zero."""

    def own_model(self):
        return self.halve

    @client_step
    def halve(self, task):
        def run(sent, local):
            both = {name: torch.stack([p, torch.zeros_like(p)]) for name, p in sent.theta.items()}
            return Reply(Models({**both, SHARE: torch.tensor([0.5, 0.5])}, label=sent.label))

        return ClientStep(run)


def test_soft_groups_are_gone_on_from():
    base = ct.FedEM(k=2, lr=0.05, init="random")
    plain, own = (ct.fit(m, LINE, varying(rows=(12, 12)), rounds=5, evaluations=1) for m in (base, ct.Personal(base)))
    assert own.score < 0.9 * plain.score


def test_a_mixture_is_gone_on_from(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {**registry._registered, ("method", "halved"): Halved})
    federation = varying(0.0, rows=(20, 30))
    plain, own = (
        ct.fit(m, LINE, federation, rounds=20, evaluations=1) for m in (Halved(2), ct.Personal(Halved(2), lr=0.2))
    )
    assert own.score < 0.5 * plain.score and own.labels.tolist() == plain.labels.tolist()


# --- what it does not take --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (ct.Personal(ct.KFED(2)), "Personal: method must train models for clients; KFED groups points"),
        (ct.Personal(ct.LocalOnly()), "models that clients share; those of LocalOnly are their own already"),
        (ct.Personal(ct.Personal(ct.FedAvg())), "models that clients share; those of Personal are their own already"),
        (ct.Personal(ct.FedAvg(), strengths=()), r"Personal: strengths must be numbers of at least 0, got \[\]"),
        (ct.Personal(ct.FedAvg(), strengths=(-1.0,)), r"Personal: strengths must be numbers of at least 0, got \[-1"),
        (ct.Personal(ct.FedAvg(), steps=(0, 3)), r"Personal: steps must be numbers of at least 1, got \[0, 3\]"),
        (ct.Personal(ct.FedAvg(), steps=(1.5,)), "Personal: steps must be a list, each entry a whole number"),
        (ct.Personal(ct.FedAvg(lr=-1)), "FedAvg: lr must be at least 0"),
        (ct.Ditto(lr=-1.0), "Ditto: lr must be at least 0"),
        (ct.Personal(ct.IFCA), "Personal: method must be Method"),
        (ct.Personal("ifca"), "Personal: method must be Method, got 'ifca'"),
    ],
)
def test_bad_settings_are_told(method, message):
    with pytest.raises(ValueError, match=message):
        ct.fit(method, LINE, varying(), rounds=1)


@pytest.mark.parametrize(
    ("method", "task"), [(ct.FedX(2), ct.Task.regressor(ct.models.MLP(3, 4, 1))), (ct.MixedEffects(), LINE)]
)
def test_a_step_size_is_asked_for_where_there_is_none(method, task):
    named = type(method).__name__
    with pytest.raises(
        ValueError, match=rf"Personal: lr is needed: there is no closed form for this task on {named}, wh"
    ):
        ct.Personal(method).start(task, simulated(varying(), task, Key.of(0)), Key.of(0))
