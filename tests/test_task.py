import math

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

import coterie as ct
from coterie.core.key import Key
from coterie.core.pytree import stack, take
from coterie.core.task import Data
from coterie.runs.config import build_task


def rows(x, y):
    return Data(x, y, torch.ones(len(x)))


def test_a_key_draws_the_same_model_and_leaves_the_global_generator_alone():
    task = ct.Task.classifier(ct.models.MLP(4, 3, 2))
    module = ct.models.MLP(4, 3, 2)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    one = task.init(Key.of(1))
    ct.Task.classifier(module).check(rows(torch.zeros(2, 4), torch.zeros(2, dtype=torch.long)))
    assert torch.equal(torch.rand(3), expected)
    again, other = task.init(Key.of(1)), task.init(Key.of(2))
    assert all(torch.equal(one[n], again[n]) for n in one)
    assert not torch.equal(one["layers.0.weight"], other["layers.0.weight"])


def test_counts_by_hand():
    task = ct.Task.counts(ct.models.Linear(1, 1))
    theta = {"weight": torch.tensor([[1.0]]), "bias": torch.tensor([0.5])}
    x, y = torch.tensor([[0.0], [1.0], [-2.0]]), torch.tensor([2, 0, 5])
    rate = (x[:, 0] + 0.5).exp()
    wanted = -torch.distributions.Poisson(rate).log_prob(y)
    for target in (y, y.float(), y[:, None]):
        assert torch.allclose(task.loss(theta, rows(x, target)), wanted)
    deviance = 2 * (torch.xlogy(y, y / rate) - y + rate)
    assert torch.allclose(task.score(theta, rows(x, y)), deviance, atol=1e-6)
    assert torch.allclose(task.predict(task.functions.output(theta, x, torch.ones(3)))[:, 0], rate)
    slope = grad(lambda p: task.loss(p, rows(x, y)).sum())(theta)["bias"]
    assert torch.allclose(slope, (rate - y).sum())


def test_losses_of_counts_keep_their_digits_and_never_overflow():
    task = ct.Task.counts(ct.models.Linear(1, 1))
    y = torch.tensor([1e6, 1e9])
    near = {"weight": torch.zeros(1, 1), "bias": torch.tensor([math.log(1e6)])}
    assert task.score(near, rows(torch.zeros(2, 1), y))[0] < 0.1
    assert task.loss(near, rows(torch.zeros(2, 1), y))[0] == pytest.approx(0.5 * math.log(2 * math.pi * 1e6), abs=0.05)
    far = {"weight": torch.tensor([[1.0]]), "bias": torch.zeros(1)}
    data = rows(torch.tensor([[-1e6], [-100.0], [100.0], [1e6]]), torch.tensor([0.0, 3.0, 3.0, 1e9]))
    slope = vmap(grad(lambda p, x, y: task.loss(p, Data(x[None], y[None], torch.ones(1))).sum()), (None, 0, 0))
    assert task.loss(far, data).isfinite().all() and task.score(far, data).isfinite().all()
    found = slope(far, data.x, data.y)["bias"]
    assert found.isfinite().all() and (found[2:] > 0).all()  # it always points back


METHODS = [
    ct.FedAvg(lr=0.02),
    ct.IFCA(2, lr=0.02, init=ct.Tournament(steps=4, bouts=1)),
    ct.CFL(lr=0.02, patience=2),
    ct.FedEM(2, lr=0.02, init=ct.Tournament(steps=4, bouts=1)),
    ct.Personal(ct.FedAvg(lr=0.02)),
    ct.LocalOnly(lr=0.02),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_every_way_of_sharing_takes_counts(method):
    federation = ct.data.varying_counts(8, 20, 2, groups=2, distance=0.7, test_rows=20)
    task = build_task({"kind": "counts", "model": {"name": "linear", "inputs": 2, "outputs": 1}})
    run = ct.fit(method, task, federation, rounds=12, evaluations=1)
    y = federation.test.y.reshape(8, 20)
    constant = 2 * (torch.xlogy(y, y / y.mean()) - y + y.mean()).mean()
    assert run.score < constant and not any("worse than" in w for w in run.warnings)
    assert run.scores.error.tolist() == run.scores.per_client.tolist()
    assert (run.predict(federation.test.x, client=0) > 0).all()


def test_the_usual_candidates_for_counts_bear_their_steps():
    federation = ct.data.varying_counts(6, 20, 2, distance=0.7, rate=300.0, test_rows=20)
    task = ct.Task.counts(ct.models.Linear(2, 1))
    found = ct.candidates(task, federation, k=2)
    assert isinstance(found["random effects"], ct.MixedEffects) and isinstance(found["2 groups"], ct.IFCA)
    run = ct.fit(found["one for all"], task, federation, rounds=30, evaluations=1)
    assert run.score < 5
    found = ct.diagnose(federation, ct.fit(ct.MixedEffects(), task, federation, rounds=5, evaluations=1))
    assert found.supported and found.figures[0].value < 5  # it trains on, with steps that the counts bear


def test_losses_by_hand():
    data = rows(torch.tensor([[1.0, 2.0]]), torch.tensor([3.0]))
    task = ct.Task.regressor(ct.models.Linear(2, 1))
    theta = {"weight": torch.tensor([[1.0, 1.0]]), "bias": torch.tensor([2.0])}
    assert task.loss(theta, data).tolist() == [4.0]  # (1 + 2 + 2 - 3)²
    classifier = ct.Task.classifier(ct.models.Linear(2, 2))
    zero = {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}
    labelled = rows(torch.tensor([[1.0, 2.0]]), torch.tensor([1]))
    assert classifier.loss(zero, labelled).tolist() == pytest.approx([0.6931472])


def test_a_layer_that_cannot_be_drawn_anew_is_refused_but_a_builder_works():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, 2))

        def forward(self, x):
            return x @ self.w

    with pytest.raises(ValueError, match="no reset_parameters"):
        ct.Task.classifier(Odd())

    def loss(out, y):
        return (out[:, 0] - y).square()

    task = ct.Task.from_module(Odd, loss, loss, "mse")
    assert not torch.equal(task.init(Key.of(0))["w"], task.init(Key.of(1))["w"])


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (torch.zeros(2, 5), torch.tensor([0, 1]), "client 0: MLP does not take rows of shape (5,)"),
        (torch.zeros(2, 4).long(), torch.tensor([0, 1]), "MLP does not take rows of shape (4,) and type torch.int64"),
        (torch.zeros(2, 4), torch.tensor([0, 9]), "client 0: labels run from 0 to 9, but the model has classes 0 to 1"),
        (torch.zeros(2, 4), torch.tensor([0.0, 1.0]), "client 0: labels must be whole numbers"),
    ],
)
def test_data_that_the_model_cannot_take(x, y, message):
    task = ct.Task.classifier(ct.models.MLP(4, 3, 2))
    with pytest.raises(ValueError) as error:
        ct.fit(ct.FedAvg(), task, ct.Federation.from_clients([(x, y)]), rounds=1)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "model", [ct.models.CNN((1, 8, 8), 10, channels=(4, 4), kernel=3, hidden=8), ct.models.Linear(64, 10)]
)
def test_every_model_trains(model):
    federation = ct.data.digits(4)
    run = ct.fit(ct.FedAvg(tau=2), ct.Task.classifier(model), federation, rounds=2)
    assert run.history[1]["loss"] < run.history[0]["loss"]
    model.load_state_dict(run.models[0])


def sentences(clients=3, rows=6):
    """Clients that count upwards from anywhere, modulo 7."""
    g = torch.Generator().manual_seed(0)
    start = torch.randint(7, (clients, rows, 1), generator=g)
    words = (start + torch.arange(6)) % 7
    return ct.Federation.from_clients([(own[:, :-1], own[:, 1:]) for own in words])


def small_lstm():
    return ct.models.LSTM(7, embedding=4, hidden=5, layers=2)


def test_lstm_is_torchs():
    ours, theirs = small_lstm(), nn.LSTM(4, 5, 2, batch_first=True)
    with torch.no_grad():
        for i in range(2):
            getattr(theirs, f"weight_ih_l{i}").copy_(ours.inputs[i].weight)
            getattr(theirs, f"bias_ih_l{i}").copy_(ours.inputs[i].bias)
            getattr(theirs, f"weight_hh_l{i}").copy_(ours.recurrences[i].weight)
            getattr(theirs, f"bias_hh_l{i}").zero_()
        x = torch.randint(7, (3, 11))
        expected = ours.head(theirs(ours.embedding(x))[0])
        assert torch.allclose(ours(x), expected, atol=1e-6, rtol=0)


def test_lstm_is_batched_over_clients():
    task, data = ct.Task.language_model(small_lstm()), sentences().train
    models = stack([task.init(Key.of(i)) for i in range(3)])
    x, y = data.x.unflatten(0, (3, 6)), data.y.unflatten(0, (3, 6))

    def slope(params, x, y):
        return grad(lambda params: task.loss(params, rows(x, y)).mean())(params)

    together = vmap(slope)(models, x, y)
    for i in range(3):
        alone = slope(take(models, i), x[i], y[i])
        assert all(torch.allclose(together[n][i], alone[n], atol=1e-6) for n in alone)


@pytest.mark.parametrize("executor", ["sequential", "vectorised"])
def test_a_language_model_trains(executor):
    task = ct.Task.language_model(small_lstm())
    run = ct.fit(ct.FedAvg(tau=5, lr=1.0), task, sentences(), rounds=10, executor=executor)
    assert run.scores.metric == "nats" and run.score < run.history[0]["nats"] < 2.2
    data = sentences().train
    loss = task.loss(run.models[0], rows(data.x, data.y))
    out = functional_call(small_lstm(), run.models[0], (data.x,)).transpose(1, 2)
    assert torch.allclose(loss, nn.functional.cross_entropy(out, data.y, reduction="none").mean(1), atol=1e-6)
    again = build_task(task.spec)
    assert torch.equal(again.loss(run.models[0], rows(data.x, data.y)), loss)


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (torch.zeros(2, 5), "the next words must be whole numbers"),
        (torch.zeros(2, dtype=torch.long), "the next words must be whole numbers, some per row"),
        (torch.zeros(2, 4, dtype=torch.long), "logits of shape (5, 7), the next words have (4,)"),
        (torch.full((2, 5), 7), "the next words run from 7 to 7, but the model has words 0 to 6"),
    ],
)
def test_words_that_the_model_cannot_take(y, message):
    task = ct.Task.language_model(small_lstm())
    assert message in task.check(rows(torch.zeros(2, 5, dtype=torch.long), y))


def kinds():
    x, g = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.Generator().manual_seed(1)
    words = torch.randint(7, (6, 6), generator=g)
    return {
        "classifier": (ct.Task.classifier(ct.models.MLP(4, 3, 2)), rows(x, torch.arange(6) % 2)),
        "regressor": (ct.Task.regressor(ct.models.Linear(4, 1)), rows(x, torch.arange(6.0))),
        "counts": (ct.Task.counts(ct.models.Linear(4, 1)), rows(x, torch.arange(6))),
        "language_model": (ct.Task.language_model(small_lstm()), rows(words[:, :-1], words[:, 1:])),
    }


@pytest.mark.parametrize("kind", kinds())
def test_an_ensemble_of_one_is_the_model(kind):
    task, data = kinds()[kind]
    ensemble, theta = task.ensemble(), task.init(Key.of(3))
    alone = ensemble.init(Key.of(3))
    assert all(torch.equal(alone[n], stack([theta])[n]) for n in theta)
    assert torch.allclose(ensemble.loss(alone, data), task.loss(theta, data), atol=1e-6)
    assert torch.allclose(ensemble.score(alone, data), task.score(theta, data), atol=1e-6)
    assert ensemble.metric == task.metric and ensemble.check(data) is None


@pytest.mark.parametrize("kind", kinds())
def test_an_ensemble_of_two_by_hand(kind):
    task, data = kinds()[kind]
    models = [task.init(Key.of(i)) for i in range(2)]
    loss = task.ensemble().loss(stack(models), data)
    if kind == "classifier":  # the mean of the probabilities of the label
        expected = -torch.stack([(-task.loss(theta, data)).exp() for theta in models]).mean(0).log()
    elif kind == "regressor":
        outs = [functional_call(ct.models.Linear(4, 1), theta, (data.x,))[:, 0] for theta in models]
        expected = (sum(outs) / 2 - data.y).square()
    elif kind == "counts":
        outs = [functional_call(ct.models.Linear(4, 1), theta, (data.x,))[:, 0].exp() for theta in models]
        expected = -torch.distributions.Poisson(sum(outs) / 2).log_prob(data.y)
    else:
        outs = [functional_call(small_lstm(), theta, (data.x,)).softmax(-1) for theta in models]
        expected = -(sum(outs) / 2).gather(-1, data.y[..., None])[..., 0].log().mean(1)
    assert torch.allclose(loss, expected, atol=1e-6)


@pytest.mark.parametrize("kind", kinds())
def test_an_ensemble_is_batched_over_clients(kind):
    task, data = kinds()[kind]
    ensemble = task.ensemble()
    pairs = stack([stack([task.init(Key.of(2 * i + j)) for j in range(2)]) for i in range(3)])

    def slope(params):
        return grad(lambda params: ensemble.loss(params, data).mean())(params)

    together = vmap(slope)(pairs)
    for i in range(3):
        alone = slope(take(pairs, i))
        assert all(torch.allclose(together[n][i], alone[n], atol=1e-6) for n in alone)


def test_an_ensemble_has_no_ensemble():
    task = ct.Task.classifier(ct.models.Linear(4, 2)).ensemble()
    with pytest.raises(ValueError, match="only a task made from a module"):
        task.ensemble()


@pytest.mark.parametrize("bias", [True, False])
def test_features_of_a_linear_layer_are_the_gradients_that_another_form_of_it_has(bias):
    """A layer and nothing else is recognised; as a formula it is not, and is differentiated."""

    class Formula(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(6, 1, bias=bias)

        def forward(self, x):
            out = (x.flatten(1) * self.inner.weight).sum(1, keepdim=True)
            return out + self.inner.bias if bias else out

    x = torch.randn(7, 2, 3)
    layer = ct.Task.regressor(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(6, 1, bias=bias)))
    formula = ct.Task.regressor(Formula())
    assert torch.allclose(layer.features(x), formula.features(x)) and layer.features(x).shape == (7, 6 + bias)
    many = torch.randn(4, 7, 2, 3)
    assert torch.equal(torch.func.vmap(layer.features)(many)[2], layer.features(many[2]))


def test_features_of_two_layers_are_not_those_of_the_first():
    task = ct.Task.regressor(torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Linear(1, 1)))
    assert task.features(torch.randn(5, 3)).shape == (5, 6)
