"""Training held against plain PyTorch: torch.optim, torch.nn and a loop over the clients."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import coterie as ct
from coterie.core.hashed import mixed, uniform
from coterie.core.key import Key
from coterie.runs.loop import CLIENTS

ROUNDS, TAU, P = 10, 3, 0.4
EXECUTORS = ("sequential", "vmap", "vectorised")


@pytest.fixture(scope="module")
def clients():
    """Six clients of two kinds, of unequal size."""
    g = torch.Generator().manual_seed(0)
    truth = torch.randn(2, 3, 5, generator=g)
    found = []
    for i, n in enumerate((7, 5, 9, 6, 8, 5)):
        x = torch.randn(n, 5, generator=g)
        found.append((x, (x @ truth[i % 2].T).argmax(1)))
    return found


class Dropout(nn.Module):
    """Dropout with a mask that it is given."""

    def __init__(self):
        super().__init__()
        self.mask = None

    def forward(self, x):
        return x if self.mask is None else x * self.mask / (1 - P)


def network(dropout=None):
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), dropout or nn.Identity(), nn.Linear(8, 3))


def starts(k):
    models = []
    for j in range(k):
        torch.manual_seed(j)
        models.append({n: p.detach().clone() for n, p in network().named_parameters()})
    return models


OPTIMISERS = {
    "plain": ({}, lambda p, lr: torch.optim.SGD(p, lr)),
    "momentum": (
        {"optimiser": ct.SGD(momentum=0.9, weight_decay=0.01)},
        lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9, weight_decay=0.01),
    ),
    "nesterov": (
        {"optimiser": ct.SGD(momentum=0.8, nesterov=True)},
        lambda p, lr: torch.optim.SGD(p, lr, momentum=0.8, nesterov=True),
    ),
    "adam": (
        {"optimiser": ct.Adam(weight_decay=0.02), "lr": 0.01},
        lambda p, lr: torch.optim.Adam(p, lr, weight_decay=0.02),
    ),
    "adamw": ({"optimiser": "adamw", "lr": 0.01}, lambda p, lr: torch.optim.AdamW(p, lr)),
    "decay of some": (
        {"optimiser": ct.SGD(weight_decay=0.1, decay_only=("0.", "3.weight"))},
        lambda p, lr: torch.optim.SGD(last_bias_apart(p), lr, weight_decay=0.1),
    ),
    "adamw, decay of some": (
        {"optimiser": ct.AdamW(weight_decay=0.1, decay_only=("0.", "3.weight")), "lr": 0.01},
        lambda p, lr: torch.optim.AdamW(last_bias_apart(p), lr, weight_decay=0.1),
    ),
}


def last_bias_apart(parameters):
    *most, last = parameters
    return [{"params": most}, {"params": [last], "weight_decay": 0.0}]


def test_weight_decay_of_parameters_that_are_not_there_is_refused():
    federation = ct.Federation.from_clients([(torch.randn(4, 5), torch.zeros(4, dtype=torch.long))])
    method = ct.FedAvg(optimiser=ct.SGD(weight_decay=0.1, decay_only=("0.weight", "head.")))
    with pytest.raises(ValueError, match=r"no parameter begins with 'head\.'; they are: 0\.weight, 0\.bias, 3\.weight"):
        ct.fit(method, ct.Task.classifier(network()), federation, rounds=1)


def reference(clients, models, rate, optimiser, *, server=None, masks=None, clip=None, keep=False):
    """IFCA of whole models, or FedAvg where there is one, in plain PyTorch."""
    net = network(Dropout())
    models = [dict(m) for m in models]
    server = [server(list(m.values())) for m in models] if server else None
    kept: dict[int, tuple[int, dict]] = {}
    for t in range(ROUNDS):
        trained = [[] for _ in models]
        for i, (x, y) in enumerate(clients):
            losses = []
            for m in models:
                net.load_state_dict(m)
                net[2].mask = None
                losses.append(float(cross_entropy(net(x), y).detach()))
            j = losses.index(min(losses))
            own = copy.deepcopy(net)
            own.load_state_dict(models[j])
            steps = optimiser(own.parameters(), rate(t))
            if keep and i in kept and kept[i][0] == j:
                steps.load_state_dict(kept[i][1])
            for q in range(TAU):
                own[2].mask = masks(i, t, q, len(x)) if masks else None
                steps.zero_grad()
                cross_entropy(own(x), y).backward()
                if clip:
                    torch.nn.utils.clip_grad_norm_(own.parameters(), clip)
                steps.step()
            kept[i] = j, copy.deepcopy(steps.state_dict())
            trained[j].append({n: p.detach() for n, p in own.named_parameters()})
        for j, found in enumerate(trained):
            if not found:
                continue
            mean = {n: torch.stack([m[n] for m in found]).mean(0) for n in models[j]}
            if server is None:
                models[j] = mean
            else:
                for n, p in models[j].items():
                    p.grad = p.detach() - mean[n]
                server[j].step()
    return models


def assert_agrees(clients, settings, expected, executor, k, task=None):
    federation = ct.Federation.from_clients(clients)
    method = ct.IFCA(k=k, init=starts(k), tau=TAU, **settings)
    run = ct.fit(method, task or ct.Task.classifier(network()), federation, rounds=ROUNDS, executor=executor)
    for own, wanted in zip(run.models, expected, strict=True):
        for name in wanted:
            assert torch.allclose(own[name], wanted[name], atol=1e-5, rtol=0), name


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("name", OPTIMISERS)
def test_optimisers_are_torchs(clients, name, k, executor):
    settings, optimiser = OPTIMISERS[name]
    lr = settings.get("lr", 0.1)
    expected = reference(clients, starts(k), lambda t: lr, optimiser)
    assert_agrees(clients, {"lr": lr, **settings}, expected, executor, k)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_fedavg_with_momentum_is_the_loop(clients, executor):
    torch.manual_seed(0)
    net = network()
    settings, optimiser = OPTIMISERS["momentum"]
    task = ct.Task.classifier(net, init="module")
    method = ct.FedAvg(tau=TAU, lr=0.1, **settings)
    run = ct.fit(method, task, ct.Federation.from_clients(clients), rounds=ROUNDS, executor=executor)
    begin = {n: p.detach().clone() for n, p in net.named_parameters()}
    [expected] = reference(clients, [begin], lambda t: 0.1, optimiser)
    for name, value in expected.items():
        assert torch.allclose(run.models[0][name], value, atol=1e-5, rtol=0), name


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_cosine_schedule_is_torchs(clients, executor):
    def rate(t):
        return 0.05 + (0.2 - 0.05) * (1 + math.cos(math.pi * t / ROUNDS)) / 2

    steps = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(steps, ROUNDS, eta_min=0.05)
    for t in range(ROUNDS):
        assert schedule.get_last_lr()[0] == pytest.approx(rate(t))
        steps.step()
        schedule.step()
    expected = reference(clients, starts(2), rate, OPTIMISERS["plain"][1])
    settings = {"lr": 0.2, "lr_schedule": ct.Cosine(rounds=ROUNDS, floor=0.25)}
    assert_agrees(clients, settings, expected, executor, 2)
    assert_agrees(clients, {"lr": 0.2, "lr_schedule": lambda t: rate(t) / 0.2}, expected, executor, 2)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    ("server", "make"),
    [
        (ct.Adam(eps=1e-3), lambda p: torch.optim.Adam(p, 0.05, eps=1e-3)),
        (ct.SGD(momentum=0.5), lambda p: torch.optim.SGD(p, 0.05, momentum=0.5)),
    ],
    ids=["FedAdam", "FedAvgM"],
)
def test_a_servers_optimiser_is_torchs_per_cluster(clients, server, make, executor):
    expected = reference(clients, starts(2), lambda t: 0.1, OPTIMISERS["plain"][1], server=make)
    assert_agrees(clients, {"lr": 0.1, "server": server, "server_lr": 0.05}, expected, executor, 2)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_gradients_are_clipped_as_torch_does(clients, executor):
    expected = reference(clients, starts(2), lambda t: 0.3, OPTIMISERS["momentum"][1], clip=0.2)
    assert_agrees(clients, {"lr": 0.3, "clip": 0.2, **OPTIMISERS["momentum"][0]}, expected, executor, 2)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_moments_are_kept_from_round_to_round(clients, executor):
    expected = reference(clients, starts(2), lambda t: 0.01, OPTIMISERS["adam"][1], keep=True)
    settings = {"lr": 0.01, "optimiser": ct.Adam(weight_decay=0.02, keep=True)}
    assert_agrees(clients, settings, expected, executor, 2)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_dropout_is_torchs_with_the_masks_that_follow_from_the_seed(clients, executor):
    def masks(i, t, q, n):
        seed = Key.of(0).fold(CLIENTS).fold(1, i).fold(4, t).seed() % 2**31
        return (uniform(mixed(mixed(torch.tensor(seed + q).to(torch.int32)) + 1), (n, 8)) >= P).float()

    shares = torch.cat([masks(i, t, 0, 9).flatten() for i in range(6) for t in range(ROUNDS)])
    assert abs(float(shares.mean()) - (1 - P)) < 0.02
    expected = reference(clients, starts(2), lambda t: 0.2, OPTIMISERS["plain"][1], masks=masks)
    task = ct.Task.classifier(network(nn.Dropout(P)))
    assert_agrees(clients, {"lr": 0.2}, expected, executor, 2, task)


def yogi(parameter, slopes, lr, beta1=0.9, beta2=0.99, tau=1e-3):
    """Algorithm 2 of Reddi et al., FedYogi, with Δ = -slope."""
    m, v = torch.zeros_like(parameter), torch.full_like(parameter, tau**2)
    for slope in slopes:
        m = beta1 * m - (1 - beta1) * slope
        v = v - (1 - beta2) * slope**2 * torch.sign(v - slope**2)
        parameter = parameter + lr * m / (v.sqrt() + tau)
    return parameter


def test_yogi_is_algorithm_2_of_reddi_et_al():
    g = torch.Generator().manual_seed(0)
    begin, slopes = torch.randn(6, generator=g), torch.randn(12, 6, generator=g)
    optimiser = ct.Yogi()
    theta, moments = {"w": begin}, optimiser.begin({"w": begin})
    for slope in slopes:
        theta, moments = optimiser.step(theta, {"w": slope}, moments, torch.tensor(0.1))
    assert torch.allclose(theta["w"], yogi(begin, slopes, 0.1), atol=1e-5)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_epochs_are_passes_over_each_clients_own_rows(clients, executor):
    """A client with more rows takes more steps; where clients are stacked, the others wait."""
    federation = ct.Federation.from_clients(clients)
    method = ct.FedAvg(epochs=2, batch=4, lr=0.1, optimiser=ct.SGD(momentum=0.9, weight_decay=0.1))
    run = ct.fit(method, ct.Task.classifier(network()), federation, rounds=3, executor=executor)
    alone = ct.fit(method, ct.Task.classifier(network()), federation, rounds=3, executor="sequential")
    for name, value in alone.models[0].items():
        assert torch.allclose(run.models[0][name], value, atol=1e-6)
    assert [method.descend().steps(n) for n in (7, 5, 9, 4)] == [4, 4, 6, 2]


def test_a_server_forgets_what_it_knew_of_a_cluster_that_is_started_again(clients):
    begin = starts(1)[0]
    far = {**begin, "3.bias": torch.tensor([1e3, 0.0, 0.0])}  # nobody is served by it
    federation = ct.Federation.from_clients(clients)
    task = ct.Task.classifier(network())
    for revive, steps in ((None, 0), (2, 0)):
        method = ct.IFCA(k=2, init=[begin, far], revive=revive, server="adam", server_lr=0.01)
        run = ct.fit(method, task, federation, rounds=2)
        assert run.state.moments["steps"].tolist() == [2, steps]
        moved = not torch.equal(run.models[1]["3.bias"], far["3.bias"])
        assert moved == (revive is not None)
    after = ct.fit(method, task, federation, rounds=4)
    assert int(after.state.moments["steps"][1]) <= 2  # it counts from its second life
