"""ClusterGAN: its losses against plain autograd, and whether it finds clusters."""

from functools import partial

import numpy as np
import pytest
import torch

import coterie as ct
from coterie.core.federation import Federation
from coterie.core.key import Key
from coterie.engines import simulated
from coterie.methods.clustergan import ClusterGAN, steepness
from coterie.runs.config import build_task


def images(rows=24, clients=2):
    g = torch.Generator().manual_seed(0)
    return Federation.from_clients(
        [(torch.rand(rows, 1, 8, 8, generator=g), torch.arange(rows) % 2) for _ in range(clients)]
    )


def small_gan(**settings):
    return ct.models.GAN((1, 8, 8), k=2, dz=3, **{"channels": (2, 4), "hidden": (8,), **settings})


def test_separated_clusters_are_found():
    federation = ct.data.gaussian_clusters(k=3, p=0.0, seed=0, clients=2, points=200, d=8, separation=2.0, sigma=0.2)
    make = partial(ct.models.GAN, (8,), k=3, dz=2, hidden=(64,))
    algorithm = ct.ClusterGAN(k=3, critic=3)
    run = ct.fit(algorithm, ct.Task.adversarial(make()), federation, rounds=10, evaluations=1)
    assert run.purity > 0.95
    found = run.assign(federation.train.x)
    assert np.bincount(found).tolist() == run.scores.table.sum(1).tolist()
    assert sum(run.history[-1]["members"]) == 400 and len(run.models) == 1
    assert run.history[1]["changed"] > 0 == run.history[-1]["changed"]
    module = make()
    module.load_state_dict(run.models[0])
    assert np.array_equal(module(federation.train.x).argmax(1).numpy(), found)


def test_the_penalty_is_that_of_plain_autograd():
    gan = small_gan()
    task = ct.Task.adversarial(gan)
    theta = {n: p.detach() for n, p in gan.named_parameters()}
    x = torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
    slope = torch.autograd.grad(gan.critic(x).sum(), x, create_graph=True)[0]
    expected = (slope.flatten(1).norm(dim=1) - 1).square().mean()
    assert torch.allclose(steepness(task.networks, theta, x.detach()), expected)
    by_hand = torch.autograd.grad(expected, gan.critic[0].weight)[0]

    def penalty(weight):
        return steepness(task.networks, {**theta, "critic.0.weight": weight}, x.detach())

    assert torch.allclose(torch.func.grad(penalty)(theta["critic.0.weight"]), by_hand, atol=1e-7)


@pytest.mark.parametrize("channels", [(2, 4), ()])
def test_images_on_both_executors(channels):
    federation, gan = images(), small_gan(channels=channels)
    task = ct.Task.adversarial(gan)
    # Adam divides slopes by their own size, so that one which is all rounding error still moves a parameter.
    algorithm = ClusterGAN(k=2, steps=2, critic=2, batch=4, optimiser="sgd", lr=0.01)
    states = []
    for name in ("sequential", "vmap"):
        cohort = simulated(federation, task, Key.of(0), executor=name)
        states.append(algorithm.round(algorithm.start(task, cohort.at(0), Key.of(0)), cohort.at(0))[0])
    for name, one in states[0].theta.items():
        assert torch.allclose(one, states[1].theta[name], atol=1e-6), name
    made = gan.generator(torch.zeros(1, 5))
    assert made.shape == (1, 1, 8, 8) and made.min() >= 0 and made.max() <= 1
    assert build_task(task.spec).spec == task.spec


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"multiples of 4, got shape \(1, 10, 10\)"):
        ct.models.GAN((1, 10, 10), k=2)
    with pytest.raises(ValueError, match=r"rows must be images .* got shape \(6,\)"):
        ct.models.GAN((6,), k=2, channels=(4,))
    with pytest.raises(ValueError, match=r"GAN: shape must be \(channels, height, width\) or \(d,\), got \(8, 8\)"):
        ct.models.GAN((8, 8), k=2)
    with pytest.raises(ValueError, match=r"Linear has no generator, critic, encoder, dz, k; models\.GAN has all"):
        ct.Task.adversarial(torch.nn.Linear(2, 2))
    with pytest.raises(
        ValueError, match=r"ClusterGAN: the task must be a Task\.adversarial, got a task of kind 'density'"
    ):
        ct.fit(ct.ClusterGAN(k=2), ct.Task.density(ct.models.AffineFlow(64)), images(), rounds=1)
    task = ct.Task.adversarial(small_gan())
    with pytest.raises(ValueError, match="ClusterGAN: k must be that of the task's networks, 2, got 3"):
        ct.fit(ct.ClusterGAN(k=3), task, images(), rounds=1)
    with pytest.raises(ValueError, match="GAN does not take rows of shape"):
        ct.fit(ct.ClusterGAN(k=2), task, ct.data.gaussian_clusters(k=2, d=6, points=10), rounds=1)
