"""Large linear layers by factors: exact wherever it is done, and done only where it is exact."""

import dataclasses

import pytest
import torch
from torch import nn

import coterie as ct
from coterie.core.key import Key
from coterie.core.pytree import Outer, flat
from coterie.core.sums import weighted_sums
from coterie.engines import low_rank, simulated

SHORT = ct.Tournament(steps=5, bouts=2)


@pytest.fixture(autouse=True)
def _every_matrix_is_large(monkeypatch):
    monkeypatch.setattr(low_rank, "PAYS", 0)


def layers(*more):
    """A network whose first layer is a convolution."""
    first = (nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten())
    return nn.Sequential(*first, nn.Linear(144, 24), nn.Tanh(), *more)


def after(executor, algorithm, task, federation, rounds=3):
    cohort = simulated(federation, task, Key.of(0), executor=executor)
    state = algorithm.start(task, cohort.at(0), Key.of(0))
    for t in range(rounds):
        state, report = algorithm.round(state, cohort.at(t))
    return algorithm.models(state), algorithm.labels(state), report.loss, cohort.ledger


def by_factors(ledger):
    return [m for m in ledger.messages if m.endswith("by factors")]


def check_against_the_reference(algorithm, module, federation, done=True, rounds=3):
    task = ct.Task.classifier(module)
    models, labels, loss, ledger = after("vectorised", algorithm, task, federation, rounds)
    reference, truth, slow, other = after("sequential", algorithm, task, federation, rounds)
    assert bool(by_factors(ledger)) == done
    assert float((flat(models) - flat(reference)).abs().max() / flat(reference).abs().max()) < 1e-4
    assert torch.equal(labels, truth) and torch.allclose(loss, slow, atol=1e-5)
    assert (ledger.bytes_down, ledger.bytes_up) == (other.bytes_down, other.bytes_up)
    return ledger


@pytest.mark.parametrize(
    "algorithm",
    [ct.FedAvg(tau=3), ct.FedAvg(tau=3, batch=5, weights="size"), ct.FedAvg(epochs=2, batch=4),
     ct.FedAvg(tau=2, batch=5, fraction=0.5), ct.IFCA(3, tau=3, batch=5, init=SHORT),
     ct.IFCA(3, tau=3, init=SHORT, patience=2), ct.IFCA(2, tau=2, batch=5, restarts=3, holdout=0.2, init="random"),
     ct.IFCA(2, tau=2, batch=5, init="random", shared=("1.weight", "4.weight"))],
    ids=["all-rows", "batches", "epochs", "sampled", "ifca", "patient", "restarts", "shared"],
)  # fmt: skip
def test_rounds_equal_the_reference(algorithm, ragged):
    check_against_the_reference(algorithm, layers(nn.Linear(24, 10)), ragged)


class Twice(nn.Module):
    """Uses its weights twice."""

    def __init__(self):
        super().__init__()
        self.first, self.layer, self.head = nn.Conv1d(1, 1, 3, padding=1), nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x):
        x = self.first(x[:, None])[:, 0]
        return self.head(self.layer(self.layer(x).relu()))


class Lines(nn.Module):
    """Has its layer see every line of an image."""

    def __init__(self):
        super().__init__()
        self.first, self.layer, self.head = nn.Conv1d(1, 1, 3, padding=1), nn.Linear(8, 4), nn.Conv1d(32, 10, 1)

    def forward(self, x):
        lines = self.first(x[:, None])[:, 0].unflatten(1, (8, 8))
        return self.head(self.layer(lines).flatten(1)[..., None])[..., 0]


class Penalised(Twice):
    """Looks at its weights themselves, too."""

    def forward(self, x):
        x = self.first(x[:, None])[:, 0]
        return self.head(self.layer(x)) / (1 + self.head.weight.square().sum() + self.layer.weight.square().sum())


@pytest.mark.parametrize(
    "module",
    [layers(nn.Dropout(0.4), nn.Linear(24, 10)), layers(nn.BatchNorm1d(24), nn.Linear(24, 10)),
     layers(nn.Linear(24, 10, bias=False)), layers(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 10))],
    ids=["dropout", "batch-norm", "no-bias", "three"],
)  # fmt: skip
@pytest.mark.parametrize("algorithm", [ct.FedAvg(epochs=1, batch=5), ct.IFCA(2, tau=3, batch=5, init="random")])
def test_modules_equal_the_reference(algorithm, module, ragged):
    check_against_the_reference(algorithm, module, ragged, rounds=1)  # BatchNorm over few rows makes rounding grow


@pytest.mark.parametrize("module", [Lines(), Penalised()], ids=["lines", "penalised"])
def test_layers_that_are_used_otherwise_are_left_to_vmap(module, ragged):
    check_against_the_reference(ct.FedAvg(tau=2, batch=5), module, ragged, done=False)


def test_of_several_layers_those_that_can_be(ragged):
    ledger = check_against_the_reference(ct.FedAvg(tau=2, batch=5), Twice(), ragged)
    assert by_factors(ledger) == ["vectorised: FedAvg.step: head.weight by factors"]


@pytest.mark.parametrize(
    "algorithm",
    [ct.FedAvg(tau=2, batch=5, optimiser="adam"), ct.FedAvg(tau=2, batch=5, clip=1.0), ct.FedAvg(prox=0.5, batch=5),
     ct.LocalOnly(tau=2, batch=5)],
    ids=["adam", "clip", "prox", "local"],
)  # fmt: skip
def test_other_steps_are_left_to_vmap(algorithm, ragged):
    check_against_the_reference(algorithm, layers(nn.Linear(24, 10)), ragged, done=False)


class Branching(nn.Module):
    """Asks for the value of what it computes, which vmap forbids."""

    def __init__(self):
        super().__init__()
        self.inner = layers(nn.Linear(24, 10))

    def forward(self, x):
        out = self.inner(x)
        return out if float(out.detach().sum()) < 1e9 else -out


def test_a_model_that_vmap_refuses_is_done_one_by_one(ragged):
    ledger = check_against_the_reference(ct.IFCA(2, tau=2, batch=5, init="random"), Branching(), ragged)
    assert any("by factors" in m and "one by one (vmap cannot batch" in m for m in ledger.messages)


def test_only_where_the_factors_are_much_smaller(ragged, monkeypatch):
    monkeypatch.setattr(low_rank, "PAYS", 3)
    check_against_the_reference(ct.FedAvg(tau=2, batch=5), layers(nn.Linear(24, 10)), ragged, done=False)
    large = nn.Sequential(*list(layers())[:4], nn.Linear(144, 512), nn.ReLU(), nn.Linear(512, 10))
    ledger = check_against_the_reference(ct.FedAvg(tau=2, batch=5), large, ragged)
    assert by_factors(ledger) == ["vectorised: FedAvg.step: 4.weight by factors"]


def test_a_step_that_fails_names_the_client(ragged):
    class Fails(Branching):
        def forward(self, x):
            if len(x) == 5 and bool((x == 7).all(1).any()):
                raise ValueError("seven")
            return self.inner(x)

    clients = [ragged.train.client(i) for i in range(12)]
    clients[4] = torch.full_like(clients[4][0], 7), clients[4][1]
    with pytest.raises(ValueError, match=r"FedAvg.step failed in round 1 at client 4: seven"):
        after("vectorised", ct.FedAvg(tau=2, batch=5), ct.Task.classifier(Fails()), ct.Federation.from_clients(clients))


def test_a_diverged_cluster_spoils_no_other(ragged):
    task = ct.Task.classifier(layers(nn.Linear(24, 10)))
    method = ct.IFCA(2, tau=2, batch=5, init="random")
    models = {}
    for executor in ("vectorised", "sequential"):
        cohort = simulated(ragged, task, Key.of(0), executor=executor)
        state = method.start(task, cohort.at(0), Key.of(0))
        theta = {n: x.clone() for n, x in state.theta.items()}
        theta["4.weight"][0, 1] = torch.nan
        models[executor] = method.models(method.round(state._replace(theta=theta), cohort.at(0))[0])
    assert torch.allclose(flat({n: x[:1] for n, x in models["vectorised"].items()}),
                          flat({n: x[:1] for n, x in models["sequential"].items()}), atol=1e-5)  # fmt: skip
    assert models["vectorised"]["4.weight"][1].isnan().all()


def test_a_run_that_is_resumed_ends_with_the_same_bits(ragged, tmp_path):
    task, how = ct.Task.classifier(layers(nn.Linear(24, 10))), {"seed": 0, "evaluations": 1}
    method = ct.IFCA(2, tau=2, batch=5, init="random")
    whole = ct.fit(method, task, ragged, rounds=4, **how)
    ct.fit(method, task, ragged, rounds=2, out=tmp_path / "run", **how)
    again = ct.fit(method, task, ragged, rounds=4, out=tmp_path / "run", resume=True, **how)
    assert all(torch.equal(x, again.state.theta[n]) for n, x in whole.state.theta.items())


class Prototypes(nn.Module):
    """Has a layer see the same two rows whatever it is given."""

    def __init__(self):
        super().__init__()
        self.first, self.layer = nn.Conv1d(1, 1, 3, padding=1), nn.Linear(32, 64)
        self.prototypes = nn.Embedding(10, 32)

    def forward(self, x):
        return self.first(x[:, None])[:, 0] @ self.layer(self.prototypes.weight).T / 64


class Pieces(Twice):
    """Passes large batches in pieces."""

    def forward(self, x):
        return torch.cat([self.head(self.layer(self.first(piece[:, None])[:, 0])) for piece in x.split(4)])


class Early(Twice):
    """Leaves a layer out for some batches."""

    def forward(self, x):
        x = self.first(x[:, None])[:, 0]
        return self.head(self.layer(x).relu() if float(x[0, 0].detach()) > 0 else x)


class Words(nn.Module):
    """Has a matrix that is no layer's weight, and is asked for no more than its kind and shape in the layer's stead."""

    def __init__(self):
        super().__init__()
        self.embedding, self.layer, self.head = nn.Embedding(4, 8), nn.Linear(512, 16), nn.Linear(16, 10)

    def forward(self, x):
        words = self.embedding((x > 0).long() + 2 * (x > 1).long()).flatten(1)
        return self.head(self.layer(words.to(self.layer.weight.dtype))[:, : self.head.weight.shape[1]].relu())


@pytest.mark.parametrize(
    ("module", "done"),
    [(Prototypes(), []), (Pieces(), []), (Early(), ["head.weight"]), (Words(), ["layer.weight", "head.weight"])],
    ids=["prototypes", "pieces", "early", "words"],
)
def test_it_is_found_out_on_the_way_what_is_no_layer(module, done, ragged):
    ledger = check_against_the_reference(ct.FedAvg(tau=3, batch=7), module, ragged, done=bool(done))
    assert by_factors(ledger) == [f"vectorised: FedAvg.step: {', '.join(done)} by factors" for _ in done[:1]]
    assert any("not by factors: it is not the weight of one layer" in m for m in ledger.messages)


@pytest.mark.parametrize("algorithm", [ct.FedAvg(tau=2, batch=9), ct.FedAvg(epochs=1, batch=9), ct.FedAvg(tau=1)])
def test_clients_with_fewer_rows_than_a_batch(algorithm):
    """Their factors are shorter than others'."""
    g = torch.Generator().manual_seed(0)
    sizes = (1, 2, 3, 5, 9, 17, 30)
    rows = [(torch.randn(n, 64, generator=g), torch.randint(10, (n,), generator=g)) for n in sizes]
    large = nn.Sequential(*list(layers())[:4], nn.Linear(144, 512), nn.ReLU(), nn.Linear(512, 10))
    check_against_the_reference(algorithm, large, ct.Federation.from_clients(rows))


def test_steps_without_rows_change_nothing():
    """Where clients are stacked the shorter one has a step of padding, whose rows may be worth an infinite loss."""
    g = torch.Generator().manual_seed(0)
    clients = [(torch.rand(10, 64, generator=g), torch.ones(10, 1)) for _ in range(8)]
    clients[0] = clients[0][0][:5], torch.full((5, 1), 3000.0)  # after one step its losses overflow
    task = ct.Task.from_module(layers(nn.Linear(24, 1)), lambda out, y: (out.exp() - y * out).sum(1))
    algorithm, federation = ct.FedAvg(epochs=1, batch=5, lr=0.05), ct.Federation.from_clients(clients)
    fast, slow = (after(e, algorithm, task, federation, 1) for e in ("vectorised", "sequential"))
    assert by_factors(fast[3]) and bool(flat(slow[0]).isfinite().all())
    assert torch.allclose(flat(fast[0]), flat(slow[0]), rtol=1e-4, atol=1e-3)


def test_a_buffer_that_is_carried_is_no_weight(ragged):
    class Running(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = layers(nn.Linear(24, 10))
            self.register_buffer("running", torch.zeros(64, 64))

        def forward(self, x):
            if self.training:
                with torch.no_grad():
                    self.running += 0.1 * (x.T @ x / len(x) - self.running)
            return self.inner(x) + self.running.mean()

    loss = nn.CrossEntropyLoss(reduction="none")
    task = ct.Task.from_module(Running(), loss=loss, carry=("running",))
    fast, slow = (after(e, ct.FedAvg(tau=2, batch=5), task, ragged, 2) for e in ("vectorised", "sequential"))
    assert by_factors(fast[3]) == ["vectorised: FedAvg.step: inner.4.weight, inner.6.weight by factors"]
    assert torch.allclose(flat(fast[0]), flat(slow[0]), atol=1e-5)


def test_a_penalty_on_a_weight_is_not_lost(ragged):
    """A task may look at parameters besides calling the module."""
    plain = ct.Task.classifier(layers(nn.Linear(24, 10)))
    task = dataclasses.replace(
        plain, loss=lambda theta, data: plain.loss(theta, data) + 1e-5 * theta["4.weight"].square().sum()
    )
    fast, slow = (after(e, ct.FedAvg(tau=2, batch=5), task, ragged) for e in ("vectorised", "sequential"))
    assert by_factors(fast[3]) == ["vectorised: FedAvg.step: 6.weight by factors"]
    assert torch.allclose(flat(fast[0]), flat(slow[0]), atol=1e-6)


def test_what_was_no_layer_is_not_tried_again_when_a_run_is_resumed(ragged, tmp_path, caplog):
    task, how = ct.Task.classifier(Early()), {"seed": 0, "out": tmp_path / "run"}
    ct.fit(ct.FedAvg(tau=2, batch=5), task, ragged, rounds=1, **how)
    with caplog.at_level("INFO", logger="coterie"):
        ct.fit(ct.FedAvg(tau=2, batch=5), task, ragged, rounds=2, resume=True, **how)
    assert "head.weight by factors" in caplog.text and "not by factors" not in caplog.text


def test_products_are_added_up_in_their_own_slots_alone():
    g = torch.Generator().manual_seed(0)
    outer = Outer(torch.randn(5, 2, 3, generator=g), torch.randn(5, 2, 4, generator=g))
    slot, weight = torch.tensor([0, 2, 0, 2, 2]), torch.tensor([1.0, 2.0, 0.5, 0.0, 1.0])
    broken = Outer(outer.left.clone(), outer.right)
    broken.left[3] = torch.inf  # it counts for nothing
    for factors in (outer, broken):
        sums, counts = weighted_sums(slot, weight, 3, {"w": factors})
        each = outer.product() * weight[:, None, None]
        wanted = torch.stack([each[slot == s].sum(0) for s in range(3)])
        assert torch.allclose(sums["w"], wanted, atol=1e-6) and counts.tolist() == [1.5, 0.0, 3.0]
