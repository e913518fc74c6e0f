"""FedEM: shares per client, responsibilities per row, sums per component; held to a reference in plain loops."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import coterie as ct
from coterie.core import Key
from coterie.core.task import Data
from coterie.engines import simulated
from coterie.methods.fedem import mixture

K, D, CLASSES, LR, TAU, ROUNDS, PRIOR = 2, 3, 4, 0.2, 3, 4, 3.0


def federation(kind, sizes=(9, 14, 6), seed=0):
    """Clients whose rows are of two groups, in other shares at each client."""
    g = torch.Generator().manual_seed(seed)
    truth = torch.randn(2, D, CLASSES, generator=g)
    clients = []
    for i, n in enumerate(sizes):
        x = torch.randn(n, D, generator=g)
        group = (torch.rand(n, generator=g) < (i + 1) / 4).long()
        out = torch.einsum("nd,ndc->nc", x, truth[group])
        y = out.argmax(1) if kind == "classifier" else out[:, 0] + 0.1 * torch.randn(n, generator=g)
        clients.append((x, y))
    return ct.Federation.from_clients(clients, clients)


def task_of(kind):
    return ct.Task.classifier(nn.Linear(D, CLASSES)) if kind == "classifier" else ct.Task.regressor(nn.Linear(D, 1))


# --- the reference: nothing of the library's, and no tensor over models or clients ------------------------------------


def reference(kind, clients, models, weights, rounds):
    """FedEM with numpy for the E-step and torch's autograd for the M-step: loops over rounds, clients, components."""
    share, temperature = np.full(K, 1 / K), 1.0 if kind == "classifier" else 0.0
    for _ in range(rounds):
        total, mass, residual = [[0.0, 0.0] for _ in range(K)], np.zeros(K), 0.0
        labels = []
        for x, y in clients:
            loss = np.stack([rows_lost(kind, w, b, x, y).detach().numpy() for w, b in models]).astype(float)
            q, own = e_step(loss, share, temperature)
            labels.append(int(own.argmax()))
            for m, (w, b) in enumerate(models):
                trained = m_step(kind, w, b, x, y, q[m])
                heavy = q[m].sum() if weights == "size" else q[m].mean()
                total[m] = [t + heavy * p for t, p in zip(total[m], trained, strict=True)]
                mass[m] += heavy
                residual += heavy * (q[m] * loss[m]).sum() / q[m].sum()
        models = [[p / mass[m] for p in total[m]] for m in range(K)]
        share = mass / mass.sum()
        if kind == "regressor":
            temperature = 2 * residual / mass.sum()
    return models, share, temperature, labels


def e_step(loss, share, temperature):
    """Responsibilities of k components for n rows, and the client's shares: ten steps of EM for these alone."""
    n, own = loss.shape[1], share
    likely = np.exp(-(loss - loss.min(0)) / temperature) if temperature else (loss == loss.min(0)).astype(float)
    for _ in range(10):
        q = own[:, None] * likely
        own = ((q / q.sum(0)).sum(1) + PRIOR * share) / (n + PRIOR)
    q = own[:, None] * likely
    return q / q.sum(0), own


def m_step(kind, w, b, x, y, q):
    """Gradient steps on the loss of a component's rows; fewer than one row in all make shorter steps."""
    weight = torch.tensor(q, dtype=torch.float32)
    for _ in range(TAU):
        w, b = (p.detach().requires_grad_() for p in (w, b))
        value = (weight * rows_lost(kind, w, b, x, y)).sum() / max(float(weight.sum()), 1.0)
        by_w, by_b = torch.autograd.grad(value, (w, b))
        w, b = w - LR * by_w, b - LR * by_b
    return w.detach(), b.detach()


def rows_lost(kind, w, b, x, y):
    out = x @ w.T + b
    if kind == "classifier":
        return nn.functional.cross_entropy(out, y, reduction="none")
    return (out[:, 0] - y) ** 2


@pytest.mark.parametrize("weights", ["size", "uniform"])
@pytest.mark.parametrize("kind", ["classifier", "regressor"])
def test_it_does_what_the_reference_does(kind, weights):
    clients, task = federation(kind), task_of(kind)
    first = [task.init(Key.of(s)) for s in range(K)]
    method = ct.FedEM(k=K, lr=LR, tau=TAU, weights=weights, init=first)
    run = ct.fit(method, task, clients, rounds=ROUNDS)
    rows = [clients.train.client(i) for i in range(len(clients))]
    models, share, temperature, labels = reference(
        kind, rows, [[p["weight"], p["bias"]] for p in first], weights, ROUNDS
    )
    for ours, (w, b) in zip(run.models, models, strict=True):
        assert torch.allclose(ours["weight"], w, atol=2e-5) and torch.allclose(ours["bias"], b, atol=2e-5)
    assert run.state.share.tolist() == pytest.approx(share.tolist(), abs=1e-5)
    assert run.state.temperature == pytest.approx(temperature, rel=1e-4)
    assert run.state.labels.tolist() == labels


# --- what a client makes of the models --------------------------------------------------------------------------------


def test_a_client_is_served_by_the_mixture_in_its_own_shares():
    clients, task = federation("classifier"), task_of("classifier")
    run = ct.fit(ct.FedEM(k=K, tau=2, init="random"), task, clients, rounds=3)
    x, y = clients.train.client(1)
    models = [(m["weight"], m["bias"]) for m in run.models]
    loss = np.stack([rows_lost("classifier", w, b, x, y).numpy() for w, b in models]).astype(float)
    share = torch.tensor(e_step(loss, run.state.share.numpy(), 1.0)[1], dtype=torch.float32)
    mixed = sum(s * (x @ w.T + b).softmax(1) for s, (w, b) in zip(share, models, strict=True))
    lost = -mixed.gather(1, y[:, None]).log().mean()  # the test rows are the training rows
    assert run.scores.loss[1] == pytest.approx(float(lost), abs=1e-5)
    assert np.array_equal(run.predict(x, client=1), mixed.argmax(1).numpy())
    assert np.array_equal(run.predict(x, client=(x, y)), mixed.argmax(1).numpy())  # a new client, with the same rows
    assert run.assign(x, y) == int(share.argmax()) == run.labels[1]


def test_shares_are_found_where_clients_mix_two_groups():
    """Clients with a quarter to three quarters of their rows from one of two regressions."""
    clients = federation("regressor", sizes=(200, 200, 200), seed=3)
    task = task_of("regressor")
    run = ct.fit(ct.FedEM(k=2, init=ct.Tournament(steps=30, bouts=1)), task, clients, rounds=40)
    own = [shares_of(run, clients.train.client(i)) for i in range(3)]
    order = np.argsort([share[0] for share in own])
    assert order.tolist() in ([0, 1, 2], [2, 1, 0])
    assert sorted(share[0] for share in own) == pytest.approx([0.25, 0.5, 0.75], abs=0.1)
    assert run.state.temperature == pytest.approx(2 * 0.1**2, rel=0.3)  # the noise has a deviation of 0.1


def shares_of(run, rows):
    data = Data(*rows, torch.ones(len(rows[0])))
    return run.algorithm.shares(run.state, run.task, data).tolist()


def test_few_rows_say_little_about_shares():
    losses, everybody = torch.tensor([[0.0], [50.0]]), torch.tensor([0.2, 0.8])

    def share(n, mask=1.0):
        return mixture(losses.repeat(1, n), torch.full((n,), mask), everybody, torch.tensor(1.0)).share

    assert torch.equal(share(1, mask=0.0), everybody)  # no rows at all
    assert everybody[0] < share(1)[0] < share(10)[0] < 1
    assert float(share(1000)[0]) == pytest.approx(1, abs=0.01)


def test_a_temperature_of_nothing_makes_hard_choices():
    losses = torch.tensor([[1.0, 2.0, 1.0], [1.1, 1.0, 3.0]])
    found = mixture(losses, torch.ones(3), torch.tensor([0.5, 0.5]), torch.tensor(0.0))
    assert found.own.tolist() == [[1, 0, 1], [0, 1, 0]]
    assert float(found.loss) == pytest.approx(1.0, abs=1e-6)


# --- components that nobody has, or that are of no use ----------------------------------------------------------------


@pytest.mark.parametrize("spoilt", [1e6, math.nan])
def test_a_component_that_no_row_is_of_keeps_its_model(spoilt):
    clients, task = federation("regressor"), task_of("regressor")
    first = [task.init(Key.of(0)), {n: torch.full_like(x, spoilt) for n, x in task.init(Key.of(0)).items()}]
    method, cohort = ct.FedEM(k=2, init=first, temperature=0.1), simulated(clients, task, Key.of(0))
    state = method.start(task, cohort.at(0), Key.of(0))
    for t in range(3):
        state, report = method.round(state, cohort.at(t))
        assert report.loss.isfinite().all()
    for name, x in state.theta.items():
        assert torch.equal(x[1].nan_to_num(), first[1][name].nan_to_num()) and x[0].isfinite().all()
    assert state.labels.tolist() == [0, 0, 0] and 0 < float(state.share[1]) < 0.01


def test_one_component_reports_the_loss_of_its_model():
    clients, task = federation("classifier"), task_of("classifier")
    first = [task.init(Key.of(0))]
    alone, average = (
        ct.fit(method, task, clients, rounds=1).history[0]["loss"]
        for method in (ct.FedEM(k=1, init=first), ct.IFCA(k=1, init=first))
    )
    assert alone == pytest.approx(average, abs=1e-6)


# --- nobody sees more than sums ---------------------------------------------------------------------------------------


def test_sums_of_a_secure_sum_give_the_same_models():
    clients, task = federation("classifier"), task_of("classifier")
    method = ct.FedEM(k=K, tau=2, weights="size", init="random")
    plain, secret = (ct.fit(method, task, clients, rounds=3, secure=s) for s in (None, ct.SecureSum()))
    for a, b in zip(plain.models, secret.models, strict=True):
        assert all(torch.allclose(a[n], b[n], atol=1e-3) for n in a)
    assert secret.state.labels.tolist() == [-1, -1, -1]  # whose rows are of which component stays with the client
    assert secret.scores.mean == pytest.approx(plain.scores.mean, abs=0.02)


def test_only_the_server_remembers():
    """Shares follow from what is sent: a client that has been away needs no memory."""
    clients, task = federation("classifier"), task_of("classifier")
    cohort = simulated(clients, task, Key.of(0))
    method = ct.FedEM(k=K, tau=2, init="random")
    method.round(method.start(task, cohort.at(0), Key.of(0)), cohort.at(0))
    assert not cohort.ledger.memory


def test_new_clients_are_noted():
    clients, task = federation("classifier", (9, 14, 6, 11)), task_of("classifier")
    method = ct.FedEM(k=K, tau=2, init="random")
    few = simulated(clients.select([0, 1, 2]), task, Key.of(0))
    state, _ = method.round(method.start(task, few.at(0), Key.of(0)), few.at(0))
    everybody = simulated(clients, task, Key.of(0))
    joined = method.join(state, everybody.only([3]))
    assert len(joined.labels) == 4 and int(joined.labels[3]) == int(method.place(state, everybody)[3])
    assert int(joined.members.sum()) == 4


# --- bad input --------------------------------------------------------------------------------------------------------


def test_more_components_than_clients_are_refused():
    with pytest.raises(ValueError, match="FedEM: k must be at most the number of clients, 3, got 4"):
        ct.fit(ct.FedEM(k=4), task_of("classifier"), federation("classifier"), rounds=1)


def test_parameters_that_stay_on_a_client_are_refused():
    net = nn.Sequential(nn.Linear(D, 5), nn.BatchNorm1d(5), nn.Linear(5, CLASSES))
    with pytest.raises(ValueError, match="FedEM: with batch_norm='local' a client keeps one set"):
        ct.fit(ct.FedEM(k=2), ct.Task.classifier(net, batch_norm="local"), federation("classifier"), rounds=1)


@pytest.mark.parametrize("settings", [{"k": 0}, {"k": 2, "temperature": -1.0}, {"k": 2, "init": "nowhere"}])
def test_bad_settings_are_refused(settings):
    with pytest.raises(ValueError, match=next(reversed(settings))):
        ct.fit(ct.FedEM(**settings), task_of("classifier"), federation("classifier"), rounds=1)
