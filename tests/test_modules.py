"""Ordinary modules, one by one, on every executor: the table in docs/how-to/training.md."""

import copy
import itertools
import math
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import coterie as ct
from coterie.core.forward import Pass
from coterie.core.key import Key
from coterie.core.task import Data

EXECUTORS = ("sequential", "vmap", "vectorised")
SIZES = (5, 7, 6, 5, 9, 4)


@pytest.fixture(autouse=True)
def drawn_the_same():
    """Modules are drawn from the global generator."""
    torch.manual_seed(0)


def clients(*shape, classes=3, words=None):
    """Six clients of unequal size."""
    g = torch.Generator().manual_seed(0)
    found = []
    for n in SIZES:
        x = torch.randint(words, (n, *shape), generator=g) if words else torch.randn(n, *shape, generator=g)
        found.append((x, torch.randint(classes, (n,), generator=g)))
    return ct.Federation.from_clients(found)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 8), nn.Linear(8, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x).mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind, **settings):
        super().__init__()
        self.inner, self.out = kind(4, 5, 2, batch_first=True, **settings), nn.LazyLinear(3)
        self(torch.zeros(1, 2, 4))

    def forward(self, x):
        return self.out(self.inner(x)[0][:, -1])


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.b(functional.dropout(self.a(x).relu(), 0.5, self.training))


class Attention(nn.Module):
    def __init__(self, dropout=0.0, **settings):
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2, dropout=dropout, batch_first=True)
        self.out, self.settings = nn.Linear(4, 3), settings

    def forward(self, x):
        return self.out(self.inner(x, x, x, **self.settings)[0].mean(1))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True)
        self.inner, self.out = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.inner(x).mean(1))


class Running(nn.Module):
    """Divides by a mean of absolute values that it keeps itself."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(6, 3)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        if self.training:
            self.scale = 0.9 * self.scale + 0.1 * x.abs().mean().detach()
        return self.out(x / self.scale)


def frozen():
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    net[0].requires_grad_(False)
    return net


def dense(*middle):
    return nn.Sequential(nn.Linear(6, 8), *middle, nn.ReLU(), nn.Linear(8, 3))


def convolutional(*middle):
    return nn.Sequential(nn.Conv2d(2, 4, 3), *middle, nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


def parametrised(change):
    return nn.Sequential(change(nn.Linear(6, 6)), nn.ReLU(), nn.Linear(6, 3))


PICTURES, LETTERS = ((3, 8, 8), {}), ((1, 28, 28), {})
ROWS, SERIES, IMAGES, WORDS = ((6,), {}), ((5, 4), {}), ((2, 6, 6), {}), ((5,), {"words": 7, "classes": 7})
MODULES = {
    "LSTM": (lambda: Recurrent(nn.LSTM), SERIES),
    "LSTM(dropout)": (lambda: Recurrent(nn.LSTM, dropout=0.5, bidirectional=True), SERIES),
    "GRU(dropout)": (lambda: Recurrent(nn.GRU, dropout=0.5), SERIES),
    "RNN": (lambda: Recurrent(nn.RNN), SERIES),
    "MultiheadAttention": (lambda: Attention(need_weights=False), SERIES),
    "MultiheadAttention(dropout)": (lambda: Attention(dropout=0.5), SERIES),
    "TransformerEncoder": (Encoder, SERIES),
    "Embedding": (lambda: nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(20, 7)), WORDS),
    "tied weights": (Tied, WORDS),
    "Dropout": (lambda: dense(nn.Dropout(0.5)), ROWS),
    "F.dropout": (Functional, ROWS),
    "AlphaDropout": (lambda: dense(nn.SELU(), nn.AlphaDropout(0.3)), ROWS),
    "Dropout2d": (lambda: convolutional(nn.Dropout2d(0.4)), IMAGES),
    "BatchNorm1d": (lambda: dense(nn.BatchNorm1d(8)), ROWS),
    "BatchNorm2d": (lambda: convolutional(nn.BatchNorm2d(4)), IMAGES),
    "GroupNorm": (lambda: convolutional(nn.GroupNorm(2, 4)), IMAGES),
    "LayerNorm": (lambda: dense(nn.LayerNorm(8)), ROWS),
    "weight_norm": (lambda: parametrised(parametrizations.weight_norm), ROWS),
    "spectral_norm": (lambda: parametrised(parametrizations.spectral_norm), ROWS),
    "orthogonal": (lambda: parametrised(parametrizations.orthogonal), ROWS),
    "frozen parameters": (frozen, ROWS),
    "CifarCNN": (lambda: ct.models.CifarCNN((3, 8, 8), 3, channels=8, hidden=(8, 6)), PICTURES),
    "FemnistCNN": (lambda: ct.models.FemnistCNN(3, hidden=8), LETTERS),
    "ResNet": (lambda: ct.models.ResNet(3, 3, width=8), PICTURES),
}


def trained(module, federation, executor="sequential", **task):
    method = ct.IFCA(k=2, lr=0.05, tau=3, batch=4, init="random")
    return ct.fit(method, ct.Task.classifier(module, **task), federation, rounds=3, executor=executor)


def assert_same_models(a, b, **tolerance):
    for one, other in zip(a.models, b.models, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert (
                torch.allclose(one[name], other[name], **tolerance)
                if tolerance
                else torch.equal(one[name], other[name])
            ), name


@pytest.mark.parametrize("name", MODULES)
def test_a_module_trains_the_same_on_every_executor_and_twice(name):
    make, (shape, more) = MODULES[name]
    module, federation = make(), clients(*shape, **more)
    before = copy.deepcopy(module.state_dict())
    reference = trained(module, federation)
    assert_same_models(reference, trained(module, federation))
    first = reference.evaluate()
    assert (first.loss == reference.evaluate().loss).all()
    for executor in EXECUTORS[1:]:
        run = trained(module, federation, executor)
        assert_same_models(reference, run, atol=2e-5, rtol=1e-5)
        assert run.labels.tolist() == reference.labels.tolist()
    module.load_state_dict(reference.models[0])  # strictly
    moved = [n for n, x in reference.models[0].items() if not torch.equal(x, before[n])]
    assert moved


def test_restarts_of_a_module_that_vmap_refuses_are_done_one_by_one():
    make, (shape, more) = MODULES["LSTM"]
    module, federation = make(), clients(*shape, **more)
    method = ct.IFCA(k=2, restarts=2, tau=2, init="random")
    runs = [ct.fit(method, ct.Task.classifier(module), federation, rounds=2, executor=e) for e in EXECUTORS]
    for run in runs[1:]:
        assert_same_models(runs[0], run, atol=1e-5)


def test_the_documentation_lists_the_same_modules():
    page = Path(__file__).parents[1] / "docs" / "how-to" / "training.md"
    text = page.read_text(encoding="utf-8")
    rows = "".join(line for line in text.splitlines() if line.startswith("|"))
    missing = [name for name in MODULES if name not in rows]
    assert not missing


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", ["BatchNorm1d", "BatchNorm2d"])
def test_local_batch_norm_stays_with_the_clients(name, executor):
    make, (shape, more) = MODULES[name]
    federation, module = clients(*shape, **more), make()
    run = trained(module, federation, executor, batch_norm="local")
    assert_same_models(run, trained(module, federation, batch_norm="local"), atol=2e-5, rtol=1e-5)
    sent = run.algorithm.models(run.state)
    assert not any(n.startswith("1.") for n in sent)  # the normalising layer
    a, b = run.module(client=0), run.module(client=1)
    assert not torch.equal(a[1].running_mean, b[1].running_mean)
    assert not torch.equal(a[1].weight, b[1].weight)
    x, y = federation.train.client(0)
    own = (a(x).argmax(1) == y).float().mean()
    assert float(own) == pytest.approx(float(run.scores.per_client[0]))


def test_batch_norm_is_torchs_on_a_clients_real_rows():
    """One client, all rows: train as torch does, statistics and all."""
    federation, module = clients(6), dense(nn.BatchNorm1d(8))
    task = ct.Task.classifier(module, init="module")
    own = federation.select([4])
    run = ct.fit(ct.FedAvg(lr=0.1, tau=4), task, own, rounds=2)
    x, y = own.train.client(0)
    net = copy.deepcopy(module).train()
    steps = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(8):
        steps.zero_grad()
        functional.cross_entropy(net(x), y).backward()
        steps.step()
    for name, value in net.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            assert torch.allclose(run.models[0][name], value, atol=1e-5), name
    net.eval()
    assert run.predict(x, client=0).tolist() == net(x).argmax(1).tolist()


def test_dropout_is_off_when_scoring_and_other_seeds_draw_other_masks():
    federation, module = clients(6), dense(nn.Dropout(0.5))
    task = ct.Task.classifier(module, init="module")
    runs = [ct.fit(ct.FedAvg(tau=2), task, federation, rounds=2, seed=seed) for seed in (0, 1)]
    assert not torch.equal(runs[0].models[0]["0.weight"], runs[1].models[0]["0.weight"])
    x, _ = federation.train.client(0)
    assert torch.equal(runs[0].module(0)(x), runs[0].module(0)(x))


def test_masks_of_layers_and_of_steps_differ():
    masks = []
    for step in range(3):
        drawn = Pass(torch.ones(4), torch.tensor(step))
        masks += [drawn.keep((4, 50), 0.5, "dropout") for _ in range(3)]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(masks, 2))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_frozen_parameters_stay_and_cost_nothing(executor):
    federation, net = clients(6), frozen()
    run = trained(net, federation, executor)
    assert torch.equal(run.models[0]["0.weight"], net[0].weight) and torch.equal(run.models[1]["0.bias"], net[0].bias)
    free = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    whole = trained(free, federation, executor)
    saved = 4 * len(SIZES) * (6 * 8 + 8)
    assert whole.history[-1]["bytes_up"] - run.history[-1]["bytes_up"] == saved


def test_tied_weights_stay_tied():
    run = trained(Tied(), clients(5, words=7, classes=7))
    for model in run.models:
        assert torch.equal(model["embed.weight"], model["head.weight"])
    assert list(run.algorithm.models(run.state)) == ["embed.weight"]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_buffers_that_move_are_averaged_if_they_are_named(executor):
    federation = clients(6)
    with pytest.raises(ValueError, match=re.escape("changes its buffer 'scale'; carry=('scale',)")):
        ct.fit(ct.FedAvg(), ct.Task.classifier(Running()), federation, rounds=1)
    task = ct.Task.from_module(Running(), nn.CrossEntropyLoss(reduction="none"), carry=("scale",))
    run = ct.fit(ct.FedAvg(tau=1), task, federation, rounds=1, executor=executor)
    means = torch.stack([x.abs().mean() for x, _ in map(federation.train.client, range(len(federation)))])
    assert float(run.models[0]["scale"]) == pytest.approx(0.9 + 0.1 * float(means.mean()))


class Moody(nn.Linear):
    """Behaves otherwise in training, without dropout or BatchNorm."""

    def forward(self, x):
        return super().forward(x) * (2 if self.training else 1)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_training_is_in_training_mode_and_scoring_is_not(executor):
    federation, net = clients(6), Moody(6, 3)
    run = ct.fit(
        ct.FedAvg(tau=1, lr=0.1), ct.Task.classifier(net, init="module"), federation, rounds=1, executor=executor
    )
    means = []
    for x, y in map(federation.train.client, range(len(federation))):
        own = copy.deepcopy(net).train()
        functional.cross_entropy(own(x), y).backward()
        means.append(own.weight.detach() - 0.1 * own.weight.grad)
    assert torch.allclose(run.models[0]["weight"], torch.stack(means).mean(0), atol=1e-6)
    x, y = federation.train.client(0)
    score = functional.cross_entropy(run.module(0)(x), y)
    assert float(run.scores.loss[0]) == pytest.approx(float(score.detach()), abs=1e-5)


class Scaled(nn.Module):
    """A parameter that is a single number."""

    def __init__(self):
        super().__init__()
        self.inner, self.temperature = nn.Linear(6, 3), nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.inner(x) / self.temperature


SHORT = ct.Tournament(steps=5, bouts=1)  # rounding grows with the steps


@pytest.mark.parametrize(
    "method", [ct.FedAvg(), ct.IFCA(k=2, init=SHORT, optimiser="adam", server="yogi"), ct.CFL(), ct.LocalOnly()]
)
def test_a_parameter_may_be_a_single_number(method):
    task = ct.Task.classifier(Scaled(), init="module")
    runs = [ct.fit(method, task, clients(6), rounds=2, executor=executor) for executor in EXECUTORS]
    assert runs[0].models[0]["temperature"].shape == () and float(runs[0].models[0]["temperature"]) != 2.0
    for run in runs[1:]:
        assert_same_models(runs[0], run, atol=1e-5)


class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(x + torch.randn_like(x))


class Sideways(nn.Module):
    """Takes the batch for time."""

    def __init__(self):
        super().__init__()
        self.inner = nn.GRU(6, 3)

    def forward(self, x):
        return self.inner(x[:, None])[0][:, 0]


class Python(nn.Linear):
    def forward(self, x):
        return super().forward(x * random.random())


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Noisy(6, 3), "Noisy draws random numbers by randn_like inside the model"),
        (nn.Sequential(nn.Linear(6, 3), nn.RReLU()), "draws random numbers by rrelu inside"),
        (Python(6, 3), "Python gives another output for the same row"),
        (Sideways(), "Sideways gives a row another output when other rows are beside it"),
        (dense(nn.BatchNorm1d(8, momentum=None)), "layer '1' (BatchNorm1d): momentum=None"),
        (dense(nn.SyncBatchNorm(8)), "layer '1' (SyncBatchNorm)"),
        (convolutional(nn.InstanceNorm2d(4, track_running_stats=True)), "layer '1' (InstanceNorm2d)"),
        (nn.Sequential(nn.LazyLinear(3)), "layer '0' (LazyLinear) does not know its shape yet"),
    ],
)
def test_what_cannot_be_repeated_is_refused_by_name(module, message):
    with pytest.raises(ValueError) as error:
        ct.fit(ct.FedAvg(), ct.Task.classifier(module), clients(6), rounds=1)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("method", [ct.FedAvg(tau=2), ct.CFL(tau=2), ct.IFCA(k=2, tau=2), ct.LocalOnly(tau=2)])
def test_pretrained_weights_are_where_training_begins(method):
    federation, net = clients(6), dense()
    run = ct.fit(method, ct.Task.classifier(net, init="module"), federation, rounds=1)
    still = ct.fit(type(method)(**({"k": 2} if isinstance(method, ct.IFCA) else {}), lr=0.0, tau=1),
                   ct.Task.classifier(net, init="module"), federation, rounds=1)  # fmt: skip
    assert torch.allclose(still.models[0]["0.weight"], net[0].weight, atol=1e-6)
    assert not torch.equal(run.models[0]["0.weight"], net[0].weight)


def test_copies_of_one_module_are_told_apart_by_a_little_noise():
    net = dense()
    run = ct.fit(ct.IFCA(k=3, init="random", lr=0.0), ct.Task.classifier(net, init="module"), clients(6), rounds=1)
    models = [m["0.weight"] for m in run.models]
    assert torch.allclose(models[0], net[0].weight, atol=1e-6) and not torch.equal(models[1], models[2])
    assert torch.allclose(models[1], models[0], atol=0.05)


class Pair(nn.Module):
    """Two inputs by keyword, and logits in an object, as Hugging Face's models have them."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(9, 4), nn.Linear(4, 2)

    def forward(self, input_ids, attention_mask):
        weight = attention_mask[..., None].float()
        mean = (self.embed(input_ids) * weight).sum(1) / weight.sum(1).clamp(min=1)
        return {"logits": self.out(mean)}


def batches():
    g = torch.Generator().manual_seed(0)
    return [
        {
            "input_ids": torch.randint(9, (n, 6), generator=g),
            "attention_mask": torch.ones(n, 6, dtype=torch.long).tril(),
            "labels": torch.randint(2, (n,), generator=g),
        }
        for n in SIZES
    ]


def test_several_inputs_by_keyword_train_the_same_on_every_executor():
    federation = ct.Federation.from_clients(batches())
    reference = trained(Pair(), federation)
    for executor in EXECUTORS[1:]:
        assert_same_models(reference, trained(Pair(), federation, executor), atol=1e-5)
    first = batches()[0]
    x = {n: first[n] for n in ("input_ids", "attention_mask")}
    out = reference.module(client=0)(**x)["logits"]
    assert reference.predict(x, client=0).tolist() == out.argmax(1).tolist()
    assert reference.assign(x, first["labels"]) in (0, 1)
    with pytest.raises(ValueError, match="must be a tuple or a dict of inputs"):
        reference.predict(first["input_ids"], client=0)


def rows(x, y):
    return Data(x, y, torch.ones(len(x)))


@pytest.mark.parametrize("out", [(5,), (5, 1)])
@pytest.mark.parametrize("target", [(5,), (5, 1)])
def test_a_single_output_may_or_may_not_have_an_axis_of_its_own(out, target):
    class One(nn.Linear):
        def forward(self, x):
            return super().forward(x).reshape(-1, *out[1:])

    task = ct.Task.regressor(One(2, 1))
    theta = {"weight": torch.ones(1, 2), "bias": torch.zeros(1)}
    data = rows(torch.arange(10.0).reshape(5, 2), torch.arange(5.0).reshape(target))
    assert task.check(data) is None
    assert task.loss(theta, data).tolist() == [1.0, 16.0, 49.0, 100.0, 169.0]


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (nn.CrossEntropyLoss(), "the loss must give one value per row, got shape () for 2 rows; torch's losses do so"),
        (lambda out, y: out, "the loss must give one value per row, got shape (2, 3)"),
        (nn.CrossEntropyLoss(reduction="sum"), "the loss must give one value per row, got shape ()"),
        (lambda out, y: out @ torch.ones(7), "the loss does not take outputs (3,) of torch.float32 with targets ()"),
    ],
)
def test_a_loss_that_gives_no_value_per_row_is_refused(loss, message):
    with pytest.raises(ValueError) as error:
        ct.fit(ct.FedAvg(), ct.Task.from_module(nn.Linear(6, 3), loss), clients(6), rounds=1)
    assert message in str(error.value)


def test_a_loss_alone_makes_a_task():
    task = ct.Task.from_module(nn.Linear(6, 3), nn.CrossEntropyLoss(reduction="none"))
    run = ct.fit(ct.FedAvg(), task, clients(6), rounds=2)
    assert run.scores.metric == "loss" and run.score == pytest.approx(float(run.scores.loss.mean()))
    like = ct.fit(ct.FedAvg(), ct.Task.classifier(nn.Linear(6, 3)), clients(6), rounds=2)
    assert_same_models(run, like, atol=1e-6)


def test_random_draws_of_parametrised_and_attention_layers_differ():
    for name in ("weight_norm", "orthogonal", "MultiheadAttention", "LSTM"):
        task = ct.Task.classifier(MODULES[name][0]())
        one, other = task.init(Key.of(0)), task.init(Key.of(1))
        drawn = [n for n in one if not torch.equal(one[n], other[n])]
        assert any("original" in n or "weight" in n for n in drawn), name


# --- what only some executors would have noticed --------------------------------------------------------------------


class Cut(nn.Module):
    """Its first layer gets no gradient, or is remembered; or a hook is put on what it gives."""

    def __init__(self, way):
        super().__init__()
        self.a, self.b, self.way = nn.Linear(6, 5), nn.Linear(5, 3), way

    def forward(self, x):
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.way != "no_grad"):
            hidden = self.a(x)
        if self.way == "hook" and hidden.requires_grad:
            hidden.register_hook(lambda slope: slope * 0)
        if self.way == "kept":
            self.hidden = hidden
        return self.b(hidden.relu())


@pytest.mark.parametrize("way", ["no_grad", "kept"])
def test_a_first_layer_with_other_gradients_trains_the_same_everywhere(way):
    federation, module = clients(6), Cut(way)
    task = ct.Task.classifier(module, init="module")
    runs = [ct.fit(ct.FedAvg(tau=3, lr=0.5), task, federation, rounds=2, executor=e) for e in EXECUTORS]
    for run in runs[1:]:
        assert_same_models(runs[0], run, atol=1e-5)
    still = torch.allclose(runs[0].models[0]["a.weight"], module.a.weight, atol=1e-6)
    assert still == (way == "no_grad")


def backward_hooked():
    net = dense()
    net[0].register_full_backward_hook(lambda layer, given, got: None)
    return net


def hooked():
    net = dense()
    net[0].weight.register_hook(lambda slope: slope * 0)
    return net


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 3)
        self.register_buffer("n", torch.tensor(0))

    def forward(self, x):
        self.n += 1
        return self.inner(x) * (1 + self.n)


def all_frozen():
    return dense().requires_grad_(False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (hooked, "Task: parameter '0.weight' has a backward hook"),
        (backward_hooked, "Task: layer '0' has a backward hook"),
        (lambda: Cut("hook"), "Cut puts a hook on a tensor inside the model"),
        (Counting, "changes its buffer 'n', which is no floating-point number"),
        (all_frozen, "Task: Sequential has no parameter that could be trained"),
        (lambda: dense().double(), "Task: layer '0' (Linear) has parameters of float64; give float32"),
        (lambda: dense().half(), "has parameters of float16; give float32"),
        (lambda: dense().to("meta"), "no values: its device is meta"),
        (lambda: torch.jit.trace(dense(), torch.zeros(1, 6)), "was compiled by torch.jit"),
        (lambda: nn.DataParallel(dense()), "give the module in it, its .module"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_what_would_not_be_the_same_is_refused_in_one_line(make, message):
    with pytest.raises(ValueError) as error:
        ct.fit(ct.FedAvg(), ct.Task.classifier(make(), init="module"), clients(6), rounds=1)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            lambda out, y: functional.cross_entropy(out, y).expand(len(y)),
            "the loss of a row must not depend on the other",
        ),
        (lambda out, y: (out * nn.Parameter(torch.ones(3))).sum(1), "the loss has parameters of its own"),
    ],
)
def test_a_loss_that_looks_beyond_its_row_is_refused(loss, message):
    with pytest.raises(ValueError, match=message):
        ct.fit(ct.FedAvg(), ct.Task.from_module(nn.Linear(6, 3), loss), clients(6), rounds=1)


@pytest.mark.parametrize("factor", [-1.0, math.nan, None, "half"])
def test_a_schedule_that_gives_no_factor_is_refused(factor):
    with pytest.raises(ValueError, match="lr_schedule must give a number of at least 0, got"):
        ct.fit(ct.FedAvg(lr_schedule=lambda t: factor), ct.Task.classifier(dense()), clients(6), rounds=1)


def test_numbers_of_numpy_are_numbers(tmp_path):
    method = ct.IFCA(k=np.int64(2), lr=np.float32(0.5), tau=np.int64(3))
    run = ct.fit(method, ct.Task.classifier(dense()), clients(6), rounds=1, out=tmp_path / "run")
    assert ct.load(tmp_path / "run", task=run.task).algorithm == ct.IFCA(k=2, lr=0.5, tau=3)
    with pytest.raises(ValueError, match="tau must be at least 1"):
        ct.fit(ct.FedAvg(tau=np.int64(0)), ct.Task.classifier(dense()), clients(6), rounds=1)


def test_a_model_without_a_gradient_is_refused():
    class Silent(nn.Linear):
        def forward(self, input):
            with torch.no_grad():
                return super().forward(input.flatten(1))

    with pytest.raises(ValueError, match=r"Silent gives an output without a gradient \(is its"):
        ct.fit(ct.FedAvg(), ct.Task.classifier(lambda: Silent(64, 10)), ct.data.digits(4), rounds=1)


@pytest.mark.parametrize(
    ("make", "message"),
    [(lambda: ct.models.MLP(64, -16, 10), "MLP: sizes must be at least 1, got"),
     (lambda: ct.models.Linear(-1, 2), "Linear: inputs and outputs must be at least 1, got -1 and 2"),
     (lambda: ct.models.LSTM(-5), "LSTM: words must be at least 1, got -5")],
)  # fmt: skip
def test_sizes_of_models_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()
