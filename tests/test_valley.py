"""Two groups against one hump, and where clients lie between groups, against dense algebra."""

import pytest
import torch

from coterie.parts.groupings import Lines, merged, pairs, split
from coterie.parts.random_effects import Mixture, Rows
from coterie.parts.valley import one_hump, two_groups, valley
from coterie.runs.support import _free, _moderation, _trigamma_inverse


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def uniform(m, seed=0):
    return torch.rand(m, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


HUMPS = {
    "normal": lambda: 0.5 + 0.5 * drawn(100),
    "uniform": lambda: uniform(100),
    "exponential": lambda: -0.4 * uniform(100).log(),
    "heavy tails": lambda: 0.5 + 0.3 * drawn(100) / drawn(100, seed=1).abs().clamp(min=0.05),
}


@pytest.mark.parametrize("name", HUMPS)
def test_one_hump_of_any_shape_is_not_two_groups(name):
    at = HUMPS[name]()
    assert valley(at, torch.full_like(at, 0.05)) < 2


@pytest.mark.parametrize("width", [0.02, 0.1])
def test_two_groups_have_a_valley(width):
    at = torch.cat([width * drawn(30), 1 + width * drawn(20, seed=1)])
    assert valley(at, torch.full_like(at, 0.05)) > 5


def test_errors_fill_the_valley():
    at = torch.cat([torch.zeros(30), torch.ones(30)]) + 0.5 * drawn(60)
    assert valley(at, torch.full((60,), 0.5)) < 2
    assert valley(at, torch.full((60,), 1e3)) == 0  # nothing is known


def test_likelihoods_against_their_densities():
    at, error = torch.tensor([0.0, 1.0]).double(), torch.tensor([0.1, 0.1]).double()
    best = 2 * torch.log(torch.tensor(0.5 / 0.1 / (2 * torch.pi) ** 0.5))  # each in a group of its own
    assert two_groups(at, error) == pytest.approx(float(best), abs=0.05)
    alone = torch.distributions.Normal(0.0, 0.1).log_prob(torch.tensor(0.0))
    assert one_hump(at[:1], error[:1]) == pytest.approx(float(alone), abs=0.01)


@pytest.fixture
def mixture():
    share = torch.tensor([[0.5, 0.3, 0.2]]).double()
    return Mixture(share, drawn(1, 3, 4), 0.3 * drawn(1, 1, 4, 4, seed=1), torch.tensor([0.2]).double())


@pytest.mark.parametrize("n", [2, 9])
def test_positions_are_generalised_least_squares(mixture, n):
    phi, y = drawn(n, 4, seed=2), drawn(n, seed=3)
    at, error = Lines.of(mixture).position(Rows(phi[None, None], y[None, None], torch.tensor(float(n))))
    sigma, mean = mixture.covariance[0, 0], mixture.mean[0]
    for i, (a, b) in enumerate(pairs(3).tolist()):
        apart = mean[b] - mean[a]
        beside = sigma - torch.outer(apart, apart) / (apart @ torch.linalg.solve(sigma, apart))
        weight = torch.linalg.inv(phi @ beside @ phi.T + 0.2 * torch.eye(n).double())
        along = phi @ apart
        known = along @ weight @ along
        assert float(error[i]) == pytest.approx(float(known**-0.5), rel=1e-3)
        assert float(at[i]) == pytest.approx(float(along @ weight @ (y - phi @ mean[a]) / known), rel=1e-3, abs=1e-3)


def test_splits_and_merges_keep_what_they_do_not_touch(mixture):
    more, fewer = split(mixture), merged(mixture)
    assert more.mean.shape == (3, 4, 4) and fewer.mean.shape == (3, 2, 4)
    for fits in (more, fewer):
        assert torch.allclose(fits.share.sum(1), torch.ones(3).double())
        centre = (fits.share[..., None] * fits.mean).sum(1)
        assert torch.allclose(centre, (mixture.share[..., None] * mixture.mean).sum(1).expand(3, -1))
    whole = mixture.covariance[0, 0] + torch.cov(mixture.mean[0].T, correction=0, aweights=mixture.share[0])
    between = [torch.cov(fewer.mean[i].T, correction=0, aweights=fewer.share[i]) for i in range(3)]
    assert all(torch.allclose(fewer.covariance[i, 0] + between[i], whole) for i in range(3))


@pytest.mark.parametrize(("n", "free"), [(9, 5), (4, 0), (2, 0)])
def test_degrees_of_freedom_of_a_client(n, free):
    phi, y = drawn(n, 4), drawn(n, seed=1)
    found, squares = _free(Rows(phi[None, None], y[None, None], torch.tensor(n).double()))
    left = y - phi @ torch.linalg.lstsq(phi, y[:, None], driver="gelsd").solution[:, 0]
    assert int(found) == free and float(squares) == pytest.approx(float(left.square().sum()), abs=1e-6)


def test_noise_by_client_is_recovered():
    free, nu = torch.full((4000,), 6.0).double(), 8.0
    gamma = torch.distributions.Gamma
    torch.manual_seed(0)
    own = 2 * nu / 2 / gamma(torch.tensor(nu / 2), torch.tensor(1.0)).sample((4000,))  # s² = 2
    variances = own * gamma(free / 2, torch.tensor(1.0)).sample() / (free / 2)
    half = free / 2
    log = variances.log() - half.digamma() + half.log()
    sums = {"known": torch.tensor(4000.0), "log": log.sum(), "square": log.square().sum()}
    found = _moderation(sums | {"chance": torch.polygamma(1, half).sum()})
    assert 1 / float(found.doubt) == pytest.approx(nu, rel=0.15) and float(found.level) == pytest.approx(2, rel=0.05)
    assert _trigamma_inverse(float(torch.polygamma(1, torch.tensor(3.0).double()))) == pytest.approx(3)
    even = _moderation(sums | {"square": log.sum() ** 2 / 4000 + 3999 * 1e-9, "chance": torch.tensor(0.0)})
    assert float(even.doubt) < 1e-4 and float(even.level) == pytest.approx(float((log.mean()).exp()), rel=1e-3)
