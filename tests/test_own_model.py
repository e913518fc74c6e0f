"""A client's own model: made of what the server sends, on its training rows, and sent to nobody."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

import coterie as ct
from coterie import testing
from coterie.core import registry
from coterie.core.engine import First
from coterie.core.key import Key
from coterie.core.method import Served
from coterie.core.step import ClientStep, Reply, client_step
from coterie.core.task import SHARE
from coterie.core.train import Models
from coterie.engines import ENGINES, simulated
from coterie.methods.ifca import IFCA
from coterie.runs.evaluate import Scorer, evaluate


@dataclass(frozen=True)
class Shifted(IFCA):
    """Each client adds the mean residual of its training rows to the bias of its cluster's model."""

    def own_model(self):
        return self.shift

    @client_step
    def shift(self, task):
        def run(sent, local):
            x, y, mask = local.data
            off = (y - (x @ sent.theta["weight"].T + sent.theta["bias"])[:, 0]) * mask
            theta = {**sent.theta, "bias": sent.theta["bias"] + off.sum() / mask.sum().clamp(min=1)}
            return Reply(Models(theta, label=sent.label))

        return ClientStep(run)


@dataclass(frozen=True)
class Blend(IFCA):
    """Each client mixes all models, in shares that its training rows find likely."""

    def served(self, state):
        return Served(Models(self.models(state)), whole=True)

    def own_model(self):
        return self.blend

    @client_step
    def blend(self, task):
        def run(sent, local):
            losses = torch.stack(
                [
                    (task.loss({n: p[j] for n, p in sent.theta.items()}, local.data) * local.data.mask).sum()
                    for j in range(self.k)
                ]
            )
            share = (-losses / local.data.mask.sum().clamp(min=1)).softmax(0)
            return Reply(Models({**sent.theta, SHARE: share}, label=share.argmax()))

        return ClientStep(run)


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    registry.known("method")  # all others first
    named = {("method", "shifted"): Shifted, ("method", "blend"): Blend}
    monkeypatch.setattr(registry, "_registered", {**registry._registered, **named})


def federation(seed=0, m=12):
    """Two groups of slopes, and an offset for each client."""
    g = torch.Generator().manual_seed(seed)
    slopes, clients, tests = torch.randn(2, 3, generator=g) * 3, [], []
    for i in range(m):
        offset = 2 * torch.randn((), generator=g)
        for rows, n in ((clients, 4 + 3 * i), (tests, 6)):
            x = torch.randn(n, 3, generator=g)
            rows.append((x, x @ slopes[i % 2] + offset + 0.1 * torch.randn(n, generator=g)))
    return ct.Federation.from_clients(clients, tests, groups=[i % 2 for i in range(m)])


def error(run, i):
    """How far predictions for a client's test rows are off."""
    x, y = federation().test.client(i)
    return np.mean((run.predict(x, client=i)[:, 0] - y.numpy()) ** 2)


def task():
    return ct.Task.regressor(ct.models.Linear(3, 1))


def test_scores_are_those_of_the_own_models():
    run = ct.fit(Shifted(k=2, lr=0.1), task(), federation(), rounds=20)
    plain = ct.fit(IFCA(k=2, lr=0.1), task(), federation(), rounds=20)
    models, expected = plain.models, []
    for i in range(12):
        theta, (x, y), (tx, ty) = models[run.labels[i]], federation().train.client(i), federation().test.client(i)
        out = lambda rows, theta=theta: (rows @ theta["weight"].T + theta["bias"])[:, 0]  # noqa: E731
        expected.append(float((ty - out(tx) - (y - out(x)).mean()).square().mean()))
    assert run.scores.per_client == pytest.approx(expected, rel=1e-4)
    assert run.score < 0.6 * plain.score


@pytest.mark.parametrize("method", [Shifted(k=2, lr=0.1), Blend(k=2, lr=0.1)], ids=["shifted", "blend"])
def test_own_models_are_the_same_wherever_clients_are(method):
    outcome = testing.check_method(method, testing.Problem(task(), federation()))
    assert "scores_agree" in outcome.passed and "real_federation" in outcome.passed


def test_predict_uses_the_own_model_of_old_and_new_clients():
    clients, others = federation(), federation(seed=0, m=14)
    run = ct.fit(Shifted(k=2, lr=0.1), task(), clients, rounds=20)
    x, _ = clients.test.client(3)
    assert error(run, 3) == pytest.approx(run.scores.per_client[3], rel=1e-4)
    assert run.predict(x, client=clients.train.client(3)) == pytest.approx(run.predict(x, client=3), rel=1e-4)
    assert run.module(client=3)(x).detach().numpy() == pytest.approx(run.predict(x, client=3), rel=1e-4)
    strangers = run.evaluate(federation=others)
    assert strangers.per_client[:12] == pytest.approx(run.scores.per_client, rel=1e-3) and len(strangers.labels) == 14


def test_a_mixture_predicts_by_its_shares():
    run = ct.fit(Blend(k=2, lr=0.1), task(), federation(), rounds=5)
    assert error(run, 2) == pytest.approx(run.scores.per_client[2], rel=1e-4)
    with pytest.raises(ValueError, match=r"mixture of the clusters' models; use run\.predict"):
        run.module(client=2)


def test_own_models_under_the_secure_sum_score_as_in_the_open():
    open_, secret = (
        ct.fit(Shifted(k=2, lr=0.1, init="random"), task(), federation(), rounds=3, secure=s)
        for s in (None, ct.SecureSum())
    )
    assert secret.score == pytest.approx(open_.score, rel=1e-3)


def test_own_models_cost_no_bytes(tmp_path):
    plain, own = (ct.fit(m(k=2, lr=0.1), task(), federation(), rounds=3) for m in (IFCA, Shifted))
    assert [row["bytes_up"] for row in plain.history] == [row["bytes_up"] for row in own.history]


def test_a_loaded_run_makes_models_for_rows_that_are_given(tmp_path):
    run = ct.fit(Shifted(k=2, lr=0.1), task(), federation(), rounds=10, out=tmp_path / "run")
    again, (x, _) = ct.load(tmp_path / "run"), federation().test.client(5)
    assert again.predict(x, client=federation().train.client(5)) == pytest.approx(run.predict(x, client=5), rel=1e-4)
    with pytest.raises(ValueError, match=r"client 5 has a model of its own, where its rows are; give these as a pair"):
        again.predict(x, client=5)


def test_methods_without_deviations_say_so():
    run = ct.fit(Shifted(k=2, lr=0.1), task(), federation(), rounds=1)
    with pytest.raises(ValueError, match="Shifted knows no standard deviations of predictions; MixedEffects does"):
        run.predict(federation().test.client(0)[0], client=0, deviations=True)


@pytest.mark.parametrize("executor", sorted(ENGINES))
def test_what_is_done_first_stays_with_the_client(executor):
    """A client without training rows takes the model as it is; no reply holds the model that was made."""
    cohort = simulated(federation(), task(), Key.of(0), executor=executor)
    models = Models({"weight": torch.ones(2, 1, 3), "bias": torch.zeros(2, 1)}, label=torch.arange(2))
    rows = torch.arange(12) % 2
    reply = cohort.on("test").gather(
        Scorer().score, models, slots=2, rows=rows, first=First(Shifted(k=2).shift, "train")
    )
    assert reply.update == () and set(reply.note) == {"score", "loss"} and torch.equal(reply.slot, rows)


def test_evaluation_of_own_models_never_trains_on_test_rows():
    run = ct.fit(Shifted(k=2, lr=0.1), task(), federation(), rounds=10)
    on_test = evaluate(run.algorithm, run.state, run._cohort, "test")
    same = on_test.labels == run.labels
    assert same.any() and on_test.per_client[same] == pytest.approx(run.scores.per_client[same], rel=1e-5)
