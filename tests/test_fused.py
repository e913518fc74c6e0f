"""The fused executor: exact wherever it is taken, and taken only where it is exact."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_unflatten

import coterie as ct
from coterie.core.first_layer import FirstLinear, Head
from coterie.core.key import Key
from coterie.core.module_task import ModuleFunctions
from coterie.core.pytree import flat, leaves, tree_map
from coterie.core.train import Descend, Models, Train
from coterie.engines import simulated
from coterie.engines.descent import Work, descend
from coterie.engines.fused import batches_pay
from coterie.engines.graphs import Recording, Replayed
from coterie.engines.kernels import descend_on_chip, fits


def deep(d, classes):
    return nn.Sequential(
        nn.Flatten(), nn.Linear(d, 24), nn.Tanh(), nn.Linear(24, 16), nn.GELU(), nn.Linear(16, classes)
    )


class Skip(nn.Module):
    """Uses its input twice, so the first layer's output is not all there is to it."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x):
        return self.b(self.a(x.flatten(1)) + x.flatten(1))


class Tied(nn.Module):
    """Uses its first weights twice."""

    def __init__(self):
        super().__init__()
        self.a, self.head = nn.Linear(64, 64), nn.Linear(64, 10)
        self.again = self.a

    def forward(self, x):
        return self.head(self.again(self.a(x.flatten(1)).relu()))


SHORT = ct.Tournament(steps=20, bouts=2)


def after(executor, algorithm, task, federation, rounds):
    cohort = simulated(federation, task, Key.of(0), executor=executor)
    state = algorithm.start(task, cohort.at(0), Key.of(0))
    for t in range(rounds):
        state, report = algorithm.round(state, cohort.at(t))
    return algorithm.models(state), algorithm.labels(state), report.loss, cohort.ledger


def check_against_the_reference(algorithm, module, federation, rounds):
    task = ct.Task.classifier(module)
    models, labels, loss, ledger = after("vectorised", algorithm, task, federation, rounds)
    reference, truth, slow, other = after("sequential", algorithm, task, federation, rounds)
    assert any(name.startswith(f"fused {type(algorithm).__name__}.step") for name in ledger.chunks)
    assert float((flat(models) - flat(reference)).abs().max() / flat(reference).abs().max()) < 1e-4
    assert torch.equal(labels, truth) and torch.allclose(loss, slow, atol=1e-5)
    assert (ledger.bytes_down, ledger.bytes_up) == (other.bytes_down, other.bytes_up)


@pytest.mark.parametrize(
    "algorithm",
    [ct.IFCA(3, init=SHORT), ct.IFCA(3, init=SHORT, patience=2), ct.IFCA(2, restarts=3, holdout=0.0, init="random"),
     ct.FedAvg(prox=0.5), ct.LocalOnly(), ct.IFCA(2, average="gradient", init=SHORT, weights="size")],
    ids=["ifca", "patient", "restarts", "fedprox", "local", "gradient"],
)  # fmt: skip
@pytest.mark.parametrize(
    "module", [deep(64, 10), ct.models.MLP(64, 32, 10), ct.models.Linear(64, 10)], ids=["traced", "by-hand", "logits"]
)
def test_ten_rounds_on_ragged_clients_equal_the_reference(algorithm, module, ragged):
    check_against_the_reference(algorithm, module, ragged, 10)


@pytest.mark.parametrize(("rows", "features"), [(8, 20), (20, 20), (40, 5)], ids=["dual", "square", "primal"])
@pytest.mark.parametrize("bias", [True, False])
def test_squared_loss(rows, features, bias):
    federation = ct.data.linear_mixture(12, rows, features, 2)
    task = ct.Task.regressor(ct.models.Linear(features, 1, bias=bias))
    fast, slow = (after(e, ct.IFCA(2, lr=0.02), task, federation, 10) for e in ("vectorised", "sequential"))
    assert torch.allclose(flat(fast[0]), flat(slow[0]), atol=1e-5) and torch.equal(fast[1], slow[1])


@pytest.mark.parametrize("module", [ct.models.MLP(64, 16, 10), ct.models.Linear(64, 10), deep(64, 10)])
def test_models_with_a_linear_first_layer_are_recognised(module):
    x = torch.randn(2, 1, 8, 8)
    split = ct.Task.classifier(module).first_layer(x)
    layer = module.get_submodule(split.weight.rpartition(".")[0])
    rest = {n: p for n, p in module.named_parameters() if n not in (split.weight, split.bias)}
    y = torch.tensor([3, 4])
    expected = nn.functional.cross_entropy(module(x), y, reduction="none")
    z = nn.functional.linear(x.flatten(1), layer.weight, layer.bias)
    assert torch.allclose(split.loss(rest, z, y), expected, atol=1e-6)


def test_what_was_found_of_a_first_layer_is_of_these_rows(monkeypatch):
    """Also where rows are a view in which the numbers of one row lie apart."""
    tried, own = [], ModuleFunctions._first_layer
    monkeypatch.setattr(ModuleFunctions, "_first_layer", lambda self, x: (tried.append(x), own(self, x))[1])
    task, x = ct.Task.regressor(ct.models.Linear(1, 1)), torch.randn(1, 40).T
    assert x.stride() == (1, 40)
    assert task.first_layer(x[:2]) is task.first_layer(x[:2].clone()) and len(tried) == 1
    task.first_layer(x[1:3])
    assert len(tried) == 2


class Tokens(nn.Module):
    """Applies its first layer to each line of the image."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 4), nn.Linear(32, 10)

    def forward(self, x):
        return self.b(self.a(x[:, 0]).flatten(1))


class Absolute(nn.Linear):
    def forward(self, input):
        return nn.functional.linear(input, self.weight.abs(), self.bias)


ODD = nn.Sequential(nn.Flatten(), Absolute(64, 10))


@pytest.mark.parametrize("module", [Skip(), Tied(), Tokens(), ODD, ct.models.CNN((1, 8, 8), 10, (2, 2), 3, 4)])
def test_other_models_are_left_to_vmap_and_the_log_says_so(module):
    task = ct.Task.classifier(module)
    assert task.first_layer(torch.randn(2, 1, 8, 8)) is None
    *_, ledger = after("vectorised", ct.FedAvg(tau=1), task, ct.data.digits(2), 1)
    assert any("not fused: the model's first layer is not a linear map" in m for m in ledger.messages)


class Pretend(Replayed):
    """Replays on a CPU, into the same memory each time, as a CUDA graph does."""

    waits = True  # whether the device is said to wait for Python

    seconds = 0.1  # that a replay is said to take; a plain call takes one

    def _timed(self, *args):
        return self.function(*args), 1.0, self.waits

    def _replayed_in(self, recording):
        return self.seconds

    def record(self, flat, spec):
        own = [x.clone() if isinstance(x, torch.Tensor) else x for x in flat]
        made = self.function(*tree_unflatten(own, spec))
        outputs = tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, made)  # vmap may expand some

        def replay():
            for old, new in zip(leaves(outputs), leaves(self.function(*tree_unflatten(own, spec))), strict=True):
                old.copy_(new)

        return Recording(replay, [x for x in own if isinstance(x, torch.Tensor)], outputs)


def test_what_is_replayed_is_never_overwritten():
    double = Pretend(lambda tree, factor: {"out": tree["x"] * factor})
    results = [double({"x": torch.full((3,), float(i))}, 2)["out"] for i in range(6)]
    assert [r.tolist() for r in results] == [[2.0 * i] * 3 for i in range(6)]
    assert double({"x": torch.ones(3)}, 5)["out"].tolist() == [5.0] * 3  # another constant is another recording


def test_what_keeps_the_device_busy_is_not_recorded():
    calls = []
    double = Pretend(lambda x: calls.append(None) or 2 * x)
    double.waits = False
    assert [double(torch.tensor(float(i))).item() for i in range(5)] == [0, 2, 4, 6, 8]
    assert len(calls) == 5  # a recording would have made one more


def test_a_recording_that_is_no_faster_is_not_used():
    calls = []
    double = Pretend(lambda x: calls.append(None) or 2 * x)
    double.seconds = 1.0
    assert [double(torch.tensor(float(i))).item() for i in range(5)] == [0, 2, 4, 6, 8]
    assert len(calls) == 6  # one of them to make the recording


@pytest.mark.parametrize("algorithm", [ct.IFCA(3, init=SHORT), ct.LocalOnly()], ids=["ifca", "local"])
def test_replayed_rounds_in_several_chunks_equal_plain_ones(algorithm, ragged, monkeypatch):
    monkeypatch.setattr("coterie.engines.fused.CACHED", 1)  # one client a chunk
    task = ct.Task.classifier(deep(64, 10))
    plain = after("vectorised", algorithm, task, ragged, 6)
    monkeypatch.setattr("coterie.engines.fused.descend", Pretend(descend))
    replayed = after("vectorised", algorithm, task, ragged, 6)
    assert torch.equal(flat(plain[0]), flat(replayed[0])) and torch.equal(plain[2], replayed[2])


@pytest.mark.parametrize("clients", [1, 2])
def test_recorded_steps_equal_plain_ones(monkeypatch, clients):
    federation = ct.data.gaussian_clusters(k=2, p=0.0, seed=0, clients=clients, points=40, d=3)
    algorithm = ct.UIFCA(k=2, init="random", restarts=1, closed=False, tau=6, steps=2, batch=8)
    ends = []
    for devices in ((), ("cpu",)):
        monkeypatch.setattr("coterie.engines.vmap.RECORDING", devices)
        monkeypatch.setattr("coterie.engines.vmap.Replayed", Pretend)
        ends.append(flat(ct.fit(algorithm, ct.Task.density(ct.models.AffineFlow(3)), federation, rounds=2).state.theta))
    assert torch.equal(*ends)


@pytest.fixture
def short(ragged):
    """Nine clients of 5 to 61 rows, so of fewer rows than features, in three groups."""
    return ragged.select(range(9))


def test_fresh_rows_gradients_of_minibatches_and_few_steps_are_described_but_not_fused(short):
    task = ct.Task.classifier(ct.models.MLP(64, 16, 10))
    left = (
        ct.IFCA(2, resample=2),
        ct.IFCA(2, average="gradient", batch=4),
        ct.FedAvg(tau=1, batch=3),
        ct.FedAvg(batch=4, optimiser=ct.Adam()),
    )
    for algorithm in (ct.IFCA(2), ct.IFCA(2, restarts=2), ct.FedAvg(tau=20, batch=4), *left):
        assert isinstance(algorithm.step(task), Train)
        ledger = after("vectorised", algorithm, task, short, 1)[3]
        ran = [name for name in ledger.chunks if f"{type(algorithm).__name__}.step" in name]
        assert ran and all(name.startswith("fused") == (algorithm not in left) for name in ran)


MANY = {"tau": 30, "batch": 4}  # steps enough for minibatches to be fused


@pytest.mark.parametrize(
    "algorithm",
    [ct.IFCA(3, init=SHORT, **MANY), ct.IFCA(3, init=SHORT, epochs=2, batch=3, fraction=0.6, weights="size"),
     ct.IFCA(2, restarts=3, init="random", epochs=3, batch=4), ct.FedAvg(prox=0.5, epochs=4, batch=5),
     ct.FedAvg(**MANY), ct.LocalOnly(**MANY)],
    ids=["ifca", "sampled", "restarts", "fedprox", "fedavg", "local"],
)  # fmt: skip
@pytest.mark.parametrize(
    "module", [deep(64, 10), ct.models.MLP(64, 32, 10), ct.models.Linear(64, 10)], ids=["traced", "by-hand", "logits"]
)
def test_minibatches_on_ragged_clients_equal_the_reference(algorithm, module, short):
    """Shorter last batches, clients with fewer batches than others, rows held out."""
    check_against_the_reference(algorithm, module, short, 5)


@pytest.mark.parametrize(("send", "bound"), [("model", None), ("change", None), ("change", 0.1)])
@pytest.mark.parametrize("full_loss", [True, False])
def test_what_a_step_says_of_its_reply_holds_for_minibatches(send, full_loss, bound, short):
    task = ct.Task.classifier(ct.models.MLP(64, 16, 10))
    step = Train(Descend(20, batch=4), send=send, full_loss=full_loss, bound=bound)
    message = Models(task.init(Key.of(0)), torch.tensor(0.1))
    replies = []
    for executor in ("vectorised", "sequential"):
        cohort = simulated(short, task, Key.of(0), executor=executor).at(0)
        replies.append(cohort.gather(lambda task: step, message))
        assert executor == "sequential" or any(name.startswith("fused") for name in cohort.ledger.chunks)
    for fast, slow in zip(leaves(replies[0]), leaves(replies[1]), strict=True):
        assert torch.allclose(fast, slow, atol=1e-5)


def test_a_bound_is_of_a_change():
    task = ct.Task.classifier(ct.models.MLP(64, 16, 10))
    with pytest.raises(ValueError, match="bound is the length of a change: send='change'"):
        Train(Descend(2), bound=0.1).derive(task)


def test_squared_loss_on_minibatches_without_a_bias():
    federation, task = ct.data.linear_mixture(12, 8, 20, 2), ct.Task.regressor(ct.models.Linear(20, 1, bias=False))
    fast, slow = (
        after(e, ct.FedAvg(lr=0.02, tau=9, batch=3), task, federation, 6) for e in ("vectorised", "sequential")
    )
    assert any(name.startswith("fused") for name in fast[3].chunks)
    assert torch.allclose(flat(fast[0]), flat(slow[0]), atol=1e-5)


@pytest.mark.parametrize(
    ("by", "rows", "pays"),
    [(Descend(10, batch=10), 50, True), (Descend(10, batch=10), 784, False), (Descend(5, batch=10), 300, False),
     (Descend(1, batch=10, epochs=1), 300, True), (Descend(1, batch=50, epochs=1), 300, False)],
    ids=["few-rows", "as-many-as-features", "few-steps", "epoch", "large-batches"],
)  # fmt: skip
def test_minibatches_are_fused_where_that_is_less_work(by, rows, pays):
    assert batches_pay(by, rows, 784, 200) is pays


@pytest.mark.parametrize("shared", ["first", "last"])
def test_minibatches_with_shared_layers(shared, short):
    names = {"first": ("layers.0.weight", "layers.0.bias"), "last": ("layers.1.weight", "layers.1.bias")}[shared]
    task, algorithm = ct.Task.classifier(ct.models.MLP(64, 16, 10)), ct.IFCA(2, shared=names, init="random", **MANY)
    fast, slow = (after(e, algorithm, task, short, 3) for e in ("vectorised", "sequential"))
    assert any(name.startswith("fused IFCA.step") for name in fast[3].chunks)
    assert torch.allclose(flat(fast[0]), flat(slow[0]), atol=1e-5) and torch.equal(fast[1], slow[1])


def test_each_exchange_is_asked_whether_its_minibatches_pay(ragged):
    """Methods whose steps have one name, on one engine, with clients of more rows than features."""
    task, cohort = ct.Task.classifier(ct.models.MLP(64, 16, 10)), None
    cohort = simulated(ragged, task, Key.of(0))
    for algorithm in (ct.FedAvg(tau=3), ct.FedAvg(tau=3, batch=8), ct.FedAvg(tau=3)):
        algorithm.round(algorithm.start(task, cohort.at(0), Key.of(0)), cohort.at(0))
    said = [m for m in cohort.ledger.messages if "FedAvg.step: " in m and "fused" in m]
    assert ["not fused" in m for m in said] == [False, True]


class Summed(nn.Module):
    """Its gradient at z is one number, expanded."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(20, 6)

    def forward(self, x):
        return self.a(x.flatten(1)).sum(1)


class Scaled(nn.Module):
    """A linear layer and a scale and shift that begin as nothing."""

    def __init__(self):
        super().__init__()
        self.a, self.scale, self.shift = nn.Linear(20, 1), nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))

    def reset_parameters(self):
        nn.init.ones_(self.scale)
        nn.init.zeros_(self.shift)

    def forward(self, x):
        return self.a(x) * self.scale + self.shift


@pytest.mark.parametrize("batch", [None, 3])
@pytest.mark.parametrize("module", [Summed(), Scaled()], ids=["summed", "scaled"])
def test_what_little_comes_after_the_first_layer_is_not_forgotten(module, batch):
    federation, task = ct.data.linear_mixture(12, 8, 20, 2), ct.Task.regressor(module)
    algorithm = ct.FedAvg(lr=0.001, tau=30, batch=batch)
    fast, slow = (after(e, algorithm, task, federation, 2) for e in ("vectorised", "sequential"))
    assert any(name.startswith("fused") for name in fast[3].chunks)
    assert torch.allclose(flat(fast[0]), flat(slow[0]), atol=1e-5)


def test_a_step_without_rows_is_none_even_where_the_gradient_would_be_infinite():
    def loss(out, y):
        return out.flatten().exp() - y * out.flatten()

    task = ct.Task.from_module(ct.models.Linear(20, 1), loss=loss, score=loss, metric="loss")
    g = torch.Generator().manual_seed(1)
    odd = (5 * torch.ones(1, 20), torch.tensor([1000.0]))  # after one step it overflows, and has no other
    others = [(0.1 * torch.randn(n, 20, generator=g), torch.ones(n)) for n in (6, 7, 8, 9)]
    federation = ct.Federation.from_clients([odd, *others])
    algorithm = ct.FedAvg(lr=0.01, epochs=1, batch=2)
    fast, slow = (after(e, algorithm, task, federation, 1) for e in ("vectorised", "sequential"))
    assert any(name.startswith("fused") for name in fast[3].chunks)
    assert torch.allclose(flat(fast[0]), flat(slow[0]), rtol=1e-5) and torch.isfinite(flat(slow[0])).all()


def test_what_does_not_fit_is_made_anew_and_the_log_says_so(monkeypatch):
    task, algorithm = ct.Task.regressor(ct.models.Linear(20, 1)), ct.FedAvg(lr=0.02)
    federation = ct.data.linear_mixture(12, 8, 20, 2)
    plain = after("vectorised", algorithm, task, federation, 3)
    monkeypatch.setattr("coterie.engines.store.free_memory", lambda device: 16)
    tight = after("vectorised", algorithm, task, federation, 3)
    assert torch.allclose(flat(plain[0]), flat(tight[0]), atol=1e-6)
    assert sum("no more Gram matrices are kept" in m for m in tight[3].messages) == 1


@pytest.mark.parametrize(("rows", "features"), [(8, 20), (40, 5)], ids=["dual", "primal"])
@pytest.mark.parametrize("algorithm", [ct.FedAvg(lr=0.02, tau=13, prox=0.3), ct.IFCA(2, lr=0.02, tau=1)])
def test_all_steps_at_once_are_the_steps_one_by_one(rows, features, algorithm):
    """From the second round on with the same step size, the closed form is taken; with another each time, never."""
    federation = ct.data.linear_mixture(12, rows, features, 2)
    task = ct.Task.regressor(ct.models.Linear(features, 1))
    closed, open_ = (
        after("vectorised", dataclasses.replace(algorithm, decay=decay), task, federation, 6)
        for decay in (1.0, 1 - 1e-9)
    )
    slow = after("sequential", algorithm, task, federation, 6)
    assert torch.allclose(flat(closed[0]), flat(slow[0]), atol=1e-5) and torch.equal(closed[1], slow[1])
    assert torch.allclose(flat(open_[0]), flat(slow[0]), atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("rows", "prox"), [(20, 0.0), (50, 0.2), (100, 0.0)])
def test_the_kernel_does_what_descend_does(rows, prox):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(6, rows, 300, generator=g)
    rest = {"w": torch.randn(6, 2, 7, 90, generator=g), "b": torch.randn(6, 2, 7, generator=g)}
    y, shares = torch.randint(7, (6, rows), generator=g), torch.full((6, rows), 1 / rows)
    work = Work(x, y, shares, torch.randn(6, 2, rows, 90, generator=g), x @ x.mT / 30, rest, torch.tensor(0.1))
    work, head, by = tree_map(lambda v: v.cuda(), work), Head("w", "b"), Descend(5, prox=prox)
    assert fits(head, work)
    fast = descend_on_chip(head, by, work)
    slow = descend(FirstLinear("W", "b0", lambda *a: a[1], head, squared=False, logits=False), by, work)
    for a, b in zip(leaves(fast), leaves(slow), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


class Clamped(nn.Module):
    """Changes rows before its first layer sees them, but not all of them."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(64, 10)

    def forward(self, x):
        return self.a(x.flatten(1).clamp(0, 100))


class Encoder(nn.Module):
    """Uses the weights of its first layer again, by name."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(64, 10)

    def forward(self, x):
        return (self.a(x.flatten(1)).tanh() @ self.a.weight)[:, :10]


class Spare(nn.Module):
    """Has a layer that it never uses."""

    def __init__(self):
        super().__init__()
        self.a, self.spare, self.b = nn.Linear(64, 8), nn.Linear(3, 3), nn.Linear(8, 10)

    def forward(self, x):
        return self.b(self.a(x.flatten(1)).tanh())


class Strict(nn.Linear):
    """Takes only rows between 0 and 1, and says so in its own way."""

    def forward(self, input):
        assert bool(((input >= 0) & (input <= 1)).all()), "not a picture"
        return super().forward(input.flatten(1))


def test_a_model_that_does_not_bear_being_tried_out_is_left_to_vmap():
    task, federation = ct.Task.classifier(Strict(64, 10)), ct.data.digits(3)
    fast, slow = (after(e, ct.FedAvg(tau=2), task, federation, 2) for e in ("vectorised", "sequential"))
    assert torch.allclose(flat(fast[0]), flat(slow[0]), atol=1e-5)
    assert any("not fused" in m for m in fast[3].messages)


@pytest.mark.parametrize("module", [Clamped(), Encoder(), Spare()])
def test_odd_models_give_what_the_reference_gives(module):
    task, federation = ct.Task.classifier(module), ct.data.digits(3)
    assert (task.first_layer(torch.rand(2, 1, 8, 8)) is None) == (not isinstance(module, Spare))
    fast, slow = (after(e, ct.FedAvg(tau=3), task, federation, 2) for e in ("vectorised", "sequential"))
    assert torch.allclose(flat(fast[0]), flat(slow[0]), atol=1e-5)


def test_one_clients_values_do_not_reach_another_through_padding():
    clients = [(torch.ones(n, 3) * (1e20 if n == 8 else 1.0), torch.ones(n)) for n in (7, 7, 8)]
    task = ct.Task.regressor(ct.models.Linear(3, 1))
    for executor in ("vmap", "vectorised"):
        loss = after(executor, ct.FedAvg(lr=1e-30, tau=1), task, ct.Federation.from_clients(clients), 1)[2]
        assert torch.isfinite(loss[:2]).all()


def test_a_stopped_linear_regression_resumes_to_the_same_bits(tmp_path):
    task, federation = ct.Task.regressor(ct.models.Linear(5, 1)), ct.data.linear_mixture(12, 8, 5, 2)
    algorithm = ct.FedAvg(lr=0.03, tau=7)
    whole = ct.fit(algorithm, task, federation, rounds=8)
    ct.fit(algorithm, task, federation, rounds=4, out=tmp_path / "run")
    parts = ct.fit(algorithm, task, federation, rounds=8, out=tmp_path / "run", resume=True)
    assert all(torch.equal(a, b) for a, b in zip(leaves(whole.models), leaves(parts.models), strict=True))


class Asks(nn.Module):
    """Asks for the value of what comes after its first layer, which vmap forbids."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x):
        out = self.layer(x)
        return out if float(out.detach().abs().max()) < 1e9 else -out


def test_what_vmap_refuses_after_the_first_layer_is_not_fused(ragged):
    task = ct.Task.classifier(Asks())
    fast, slow = (after(e, ct.IFCA(2, init="random"), task, ragged, 2) for e in ("vectorised", "sequential"))
    assert torch.allclose(flat(fast[0]), flat(slow[0]), atol=1e-5) and torch.equal(fast[1], slow[1])
    assert any("not fused: vmap cannot batch what comes after the first layer" in m for m in fast[3].messages)
