"""A grid of mixtures in one batch is IFCA itself, run by run."""

import pytest
import torch

import coterie as ct
from coterie.core.engine import sampled
from coterie.core.key import Key
from coterie.data.synthetic import linear_draws, linear_mixture, linear_truth
from coterie.engines import simulated
from coterie.engines.products import Factor
from coterie.models import Linear
from coterie.parts.starts import FarthestFirst
from coterie_lab.reproduce.mixtures import Mixtures, Runs, farthest_first, ifca
from coterie_lab.reproduce.rounds import last_state

SETTINGS = [(0.5, 0.1), (1.0, 0.3)]  # scale and noise
LR = [0.4, 0.1]


def batch(seeds, clients, rows, features, groups):
    x, noise = (
        torch.stack([linear_draws(clients * rows, features, s)[i] for s in seeds]).unflatten(1, (clients, rows))
        for i in (0, 1)
    )
    truth = torch.stack([torch.stack([linear_truth(features, groups, r, s) for r, _ in SETTINGS]) for s in seeds])
    return Mixtures.of(x, noise, truth, torch.tensor([sigma for _, sigma in SETTINGS]))


@pytest.mark.parametrize(("normalise", "rounds"), [("all", 8), ("cluster", 8), ("all", 80)])
def test_every_run_of_the_grid_is_a_run_of_ifca(normalise, rounds):
    seeds, size = (3, 4), dict(clients=6, rows=5, features=7, groups=2)
    data = batch(seeds, **size)
    theta = torch.rand(2, 2, 3, 2, 7, generator=torch.Generator().manual_seed(0)).round()
    models, labels = ifca(data, Runs.every(theta, torch.tensor(LR)), rounds, normalise=normalise)
    models, labels = (v.unflatten(1, (2, 2, 3)) for v in (models, labels))
    task = ct.Task.regressor(Linear(7, 1, bias=False))
    for t, s, rate, r in torch.cartesian_prod(*(torch.arange(n) for n in (2, 2, 2, 3))).tolist():
        federation = linear_mixture(**size, scale=SETTINGS[s][0], sigma=SETTINGS[s][1], seed=seeds[t])
        start = [{"weight": w[None]} for w in theta[t, s, r]]
        algorithm = ct.IFCA(2, average="gradient", normalise=normalise, lr=LR[rate], init=start)
        state = last_state(algorithm, task, federation, rounds, 0, "cpu")
        assert torch.allclose(state.theta["weight"][0, :, 0], models[t, s, rate, r], atol=2e-5)
        assert torch.equal(state.labels[0], labels[t, s, rate, r])


def test_farthest_first_takes_the_same_clients():
    seeds, size = (0, 1), dict(clients=40, rows=3, features=6, groups=2)
    data, start = batch(seeds, **size), FarthestFirst(clients=15, steps=10, lr=0.05)
    task = ct.Task.regressor(Linear(6, 1, bias=False))
    keys = [Key.of(s) for s in seeds]
    some = torch.stack([sampled(key, (0,), torch.arange(40), 15 / 40) for key in keys])
    begin = torch.stack([task.init(key.fold(0))["weight"][0] for key in keys])
    found = farthest_first(data.only(some), begin, 0.05, 10, 2)
    for t, key in enumerate(keys):
        for s, (scale, sigma) in enumerate(SETTINGS):
            federation = linear_mixture(**size, scale=scale, sigma=sigma, seed=seeds[t])
            cohort = simulated(federation, task, key, executor="sequential")
            models = start(2, 0.1, task, cohort.at(0), key)["weight"][:, 0]
            assert torch.allclose(models, found[t, s, 0], atol=1e-5)


def test_three_short_products_are_one_long_one():
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(3, 40, 30, generator=g), torch.randn(3, 30, 20, generator=g)
    exact, split = x.double() @ w.double(), Factor.of(x, split=True)
    assert torch.equal(split.high + split.low, x) and bool((split.high.view(torch.int32) % 2**13 == 0).all())
    assert float((split.times(w) - exact).abs().max()) < 1e-5
    assert float((Factor.of(w, split=True).after(x) - exact).abs().max()) < 1e-5
    assert torch.equal(Factor.of(x[0], split=True).times(w[0]), split.times(w)[0])
    rows = w.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(split.times(rows), split.times(w))
