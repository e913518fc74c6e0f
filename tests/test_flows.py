"""Flows, deep ones above all, and UIFCA with them."""

import pytest
import torch
import zuko
from torch import nn

import coterie as ct
from coterie.core.federation import Federation
from coterie.core.key import Key
from coterie.core.pytree import flat, stack, take
from coterie.core.task import Data
from coterie.engines import simulated
from coterie.flower.roster import Roster, Site
from coterie.models.flow import dequantised
from coterie.parts.candidates import PULLS


def images(n, seed=0, side=8):
    """Images of 8-bit pixels."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(256, (n, 1, side, side), generator=g) / 255


def stirred(flow):
    """A flow that is no longer the identity."""
    with torch.no_grad():
        for p in flow.parameters():
            p.normal_(0, 0.2)
    return flow


@pytest.mark.parametrize("mask", ["cyclic", "checkerboard"])
def test_the_volume_is_that_of_the_jacobian(mask):
    flow = stirred(ct.models.RealNVP((1, 4, 4), mask, couplings=8, channels=4, blocks=1)).double()
    move = flow._around if mask == "cyclic" else flow._across
    x = torch.randn(1, 1, 4, 4, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda x: move(x)[0].flatten(), x).reshape(16, 16)
    assert torch.allclose(torch.linalg.slogdet(jacobian)[1], move(x)[1][0])


def test_a_quarter_is_told_by_the_one_before_it():
    flow = stirred(ct.models.RealNVP((1, 4, 4), couplings=1, channels=4, blocks=1))
    x = torch.randn(1, 1, 4, 4)
    jacobian = torch.autograd.functional.jacobian(lambda x: flow._around(x)[0], x)[0, 0, :, :, 0, 0]
    told = jacobian[:2, 2:]  # top right
    assert told[..., :2, :2].abs().max() > 0  # by top left
    assert told[..., 2:, :].abs().max() == 0  # and by nothing below
    assert torch.equal(jacobian[2:, :].sum((0, 1))[:2], torch.zeros(2, 4))  # nothing below is told yet


def test_an_untrained_flow_is_the_normal_distribution_of_logits():
    x = images(3)
    flow = ct.models.RealNVP((1, 8, 8), couplings=4, channels=4)
    inside = 0.05 + 0.9 * dequantised(x).double()
    slope = (torch.tensor(0.9, dtype=torch.float64) / inside / (1 - inside)).log()
    expected = (torch.distributions.Normal(0.0, 1.0).log_prob(inside.logit()) + slope).flatten(1).sum(1)
    assert torch.allclose(flow(x).double(), expected, rtol=1e-5)


def test_noise_is_uniform_and_follows_from_the_image_alone():
    x = torch.zeros(300, 1, 28, 28)
    x[:, 0, 0, :9] = (torch.arange(300)[:, None] >> torch.arange(9) & 1).float() / 255  # all differ, in one level
    noise = (dequantised(x) * 256) % 1
    assert abs(float(noise.mean()) - 0.5) < 0.003 and abs(float(noise.var()) - 1 / 12) < 0.001
    alike = torch.corrcoef(noise.flatten(1)) - torch.eye(300)
    assert float(alike.abs().max()) < 0.25  # of 784 independent numbers each
    assert torch.equal(dequantised(x)[7:9], dequantised(x[7:9]))


def test_models_side_by_side_see_the_same_image():
    task = ct.Task.density(ct.models.RealNVP((1, 8, 8), couplings=4, channels=4, blocks=1))
    theta = stack([task.init(Key.of(i)) for i in range(3)])
    rows = Data(images(5), torch.zeros(5), torch.ones(5))
    together = torch.func.vmap(lambda t: task.loss(t, rows))(theta)
    alone = torch.stack([task.loss(take(theta, j), rows) for j in range(3)])
    assert torch.allclose(together, alone, rtol=1e-5)


def test_a_deep_flow_tells_images_apart():
    """Bright left halves and bright upper halves, from an assignment in which one in five is wrong."""
    g = torch.Generator().manual_seed(0)
    z = torch.randint(2, (160,), generator=g)
    x = torch.randint(100, (160, 1, 8, 8), generator=g)
    x[z == 0, :, :, :4] += 120
    x[z == 1, :, :4] += 120
    federation = Federation.from_clients([(x[:80] / 255, z[:80]), (x[80:] / 255, z[80:])])
    task = ct.Task.density(ct.models.RealNVP((1, 8, 8), couplings=4, channels=8, blocks=1))
    algorithm = ct.UIFCA(
        k=2, init=ct.Disturbed(0.4), restarts=1, tau=6, steps=5, batch=32, lr=0.01, optimiser="adam"
    )  # fmt: skip
    assert ct.fit(algorithm, task, federation, rounds=2, evaluations=1).purity > 0.95


@pytest.mark.parametrize("make", [zuko.flows.NSF, zuko.flows.MAF])
def test_flows_of_zuko_serve_as_models(make):
    federation = ct.data.gaussian_clusters(k=2, p=0.5, seed=0, points=100, d=3, separation=2.0, sigma=0.3)
    task = ct.Task.density(ct.models.Zuko(make(3, transforms=1, hidden_features=(8,))))
    algorithm = ct.UIFCA(k=2, init="kfed", restarts=1, tau=3, steps=8, lr=0.03, optimiser="adam", shrink=False)
    ends = [
        ct.fit(algorithm, task, federation, rounds=1, executor=name, evaluations=1)
        for name in ("sequential", "vectorised")
    ]
    assert torch.allclose(*(flat(algorithm.models(run.state)) for run in ends), atol=1e-4)
    assert ends[0].purity > 0.9


class Counting(nn.Module):
    """Has a buffer that changes."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return -self.inner(x).square().sum(1)


def test_buffers_may_not_change():
    federation = ct.data.gaussian_clusters(k=2, points=20, d=2)
    with pytest.raises(ValueError, match="Counting changes its buffer 'calls'"):
        ct.fit(ct.UIFCA(k=2), ct.Task.density(Counting()), federation, rounds=1)


def test_images_of_the_wrong_shape_are_refused():
    federation = Federation.from_clients([(images(4, side=6), torch.zeros(4, dtype=torch.long))])
    with pytest.raises(ValueError, match=r"client 0: RealNVP does not take rows of shape \(1, 6, 6\)"):
        ct.fit(ct.UIFCA(k=2), ct.Task.density(ct.models.RealNVP((1, 8, 8))), federation, rounds=1)
    with pytest.raises(ValueError, match=r"RealNVP: shape must be \(channels, even height, even width\), got"):
        ct.models.RealNVP((1, 7, 8))
    with pytest.raises(ValueError, match="RealNVP: mask must be one of cyclic, checkerboard, got 'stripes'"):
        ct.models.RealNVP((1, 8, 8), mask="stripes")


@pytest.mark.parametrize(
    "task",
    [ct.Task.density(ct.models.RealNVP((1, 8, 8))), ct.Task.adversarial(ct.models.GAN((1, 8, 8), k=2, channels=(4,)))],
)
def test_pixels_out_of_range_are_refused(task):
    algorithm = ct.UIFCA(k=2) if task.networks is None else ct.ClusterGAN(k=2)
    y = torch.zeros(4, dtype=torch.long)
    federation = Federation.from_clients([(images(4), y), (255 * images(4), y)])
    sane = federation.select([0])
    Roster.of([(1, Site.of("a", sane))]).federation.check(task)  # a server, who sees shapes only, refuses nothing
    told = r"client 1: (RealNVP|GAN) takes values from 0 to 1, but these go from 0 to 254"
    with pytest.raises(ValueError, match=told):
        ct.fit(algorithm, task, federation, rounds=1)


# --- shrinking without a closed form -----------------------------------------------------------------------------


def started(federation, algorithm, d):
    cohort = simulated(federation, ct.Task.density(ct.models.AffineFlow(d)), Key.of(0), executor="vectorised")
    return algorithm.start(cohort.task, cohort.at(0), Key.of(0)), cohort.at(0)


def test_pulling_spares_locations():
    algorithm = ct.UIFCA(k=3, restarts=1, closed=False, tau=1, steps=2)
    federation = ct.data.gaussian_clusters(k=3, points=50, d=4)
    state, cohort = started(federation, algorithm, 4)
    whole = algorithm.averaged(state.theta, torch.ones(1), state.sizes, cohort)
    assert torch.allclose(whole["weight"][0, 0], whole["weight"][0, 2]) and not torch.allclose(*whole["bias"][0, :2])
    none = algorithm.averaged(state.theta, torch.zeros(1), state.sizes, cohort)
    share = state.sizes / state.sizes.sum()
    assert torch.allclose(torch.einsum("rk,rkij->rij", share, none["weight"]), whole["weight"][:, 0], atol=1e-6)


@pytest.mark.parametrize(("make", "strong"), [(ct.data.gaussian_clusters, True), (ct.data.subspace_clusters, False)])
def test_held_out_points_choose_how_strongly(make, strong):
    """Clusters that differ in their centres alone share their spread; those that differ in their spread do not."""
    algorithm = ct.UIFCA(k=2, init=ct.Disturbed(0.1), restarts=1, closed=False, tau=30, steps=10, lr=0.02)
    size = {"separation": 1.0} if strong else {"subspace": 8}
    state, cohort = started(make(k=2, points=200, d=16, **size), algorithm, 16)
    assert (float(algorithm.chosen(state._replace(shrinks=torch.tensor([True])), cohort)[1]) == max(PULLS)) is strong
