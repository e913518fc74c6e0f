import pytest
import torch
from torch import nn

import coterie as ct
from coterie.key import Key
from coterie.task import Data


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


def test_losses_by_hand():
    data = rows(torch.tensor([[1.0, 2.0]]), torch.tensor([3.0]))
    task = ct.Task.regressor(ct.models.Linear(2, 1))
    theta = {"weight": torch.tensor([[1.0, 1.0]]), "bias": torch.tensor([2.0])}
    assert task.loss(theta, data).tolist() == [4.0]  # (1 + 2 + 2 - 3)²
    classifier = ct.Task.classifier(ct.models.Linear(2, 2))
    zero = {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}
    labelled = rows(torch.tensor([[1.0, 2.0]]), torch.tensor([1]))
    assert classifier.loss(zero, labelled).tolist() == pytest.approx([0.6931472])


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), "layer '1' (BatchNorm1d) keeps buffers"),
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False)), "layer '1' (BatchNorm1d)"),
        (nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), "layer '1' (Dropout) draws random numbers"),
    ],
)
def test_modules_with_hidden_state_are_refused_by_name(module, message):
    with pytest.raises(ValueError, match="Task") as error:
        ct.Task.classifier(module)
    assert message in str(error.value)


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
