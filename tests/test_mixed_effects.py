"""MixedEffects against references that share nothing with it, at its limits, on every engine, and on bad data."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.stats import multivariate_normal

import coterie as ct
from coterie.core import Key
from coterie.core.pytree import formed
from coterie.engines import simulated
from coterie.parts import laplace as la
from coterie.parts import random_effects as re
from coterie.parts.effects import Effects
from coterie.parts.families import CLASSES, COUNTS
from coterie.testing import nodes, run_rounds

QUIET = {"evaluations": 1}


def regressions(k=1, m=30, n=8, d=3, spread=0.3, noise=0.5, seed=0, test=8):
    """Clients whose θ are drawn around k centres, two apart; and the θ."""
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(k, d, generator=g)
    if k > 1:
        centres = 2 * centres / torch.pdist(centres).min()
    theta = centres[torch.arange(m) % k] + spread * torch.randn(m, d, generator=g)
    x = torch.randn(m, n + test, d, generator=g)
    y = (x @ theta[..., None])[..., 0] + noise * torch.randn(m, n + test, generator=g)
    train, held = ([(x[i, s], y[i, s]) for i in range(m)] for s in (slice(n), slice(n, None)))
    return ct.Federation.from_clients(train, held, groups=[i % k for i in range(m)]), theta


def linear(d=3, **options):
    return ct.Task.regressor(ct.models.Linear(d, 1, **options))


def mixture(d, k=1, seed=0, own=False):
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    share = draw(1, k).softmax(1)
    return re.Mixture(share, draw(1, k, d), 0.5 * draw(1, k if own else 1, d, d), torch.tensor([0.7]).double())


def rows(n, d, seed=1):
    g = torch.Generator().manual_seed(seed)
    phi, y = (torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((n, d), (n,)))
    return re.Rows(phi[None, None], y[None, None], torch.tensor(float(n)).double())


def dense(given, client):
    """Log π_j p(y | j) of every component by the n x n covariance of y, and E θ by conditioning the joint normal."""
    phi, y, found, means = client.phi[0, 0].numpy(), client.y[0, 0].numpy(), [], []
    spread = given.covariance[0].numpy()
    for j, (share, mean) in enumerate(zip(given.share[0].tolist(), given.mean[0].numpy(), strict=True)):
        own = spread[min(j, len(spread) - 1)]
        whole = phi @ own @ phi.T + float(given.noise) * np.eye(len(y))
        found.append(math.log(share) + multivariate_normal(phi @ mean, whole).logpdf(y))
        means.append(mean + own @ phi.T @ np.linalg.solve(whole, y - phi @ mean))
    return np.array(found), np.array(means)


# --- the numerical core ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3, 4, 9])
@pytest.mark.parametrize("own", [False, True])
def test_the_e_step_is_that_of_the_full_normal(n, own):
    given, client = mixture(4, k=3, own=own), rows(n, 4)
    found = re.posterior(given, client)
    evidence, means = dense(given, client)
    assert np.allclose(found.evidence[0], evidence)
    assert np.allclose(given.moved(found.u)[0], means)


@pytest.mark.parametrize("n", [2, 9])
def test_what_is_not_known_of_predictions_is_that_of_the_full_normal(n):
    given, client = mixture(4, k=2), rows(n, 4)
    phi, spread = client.phi[0, 0].numpy(), given.covariance[0, 0].numpy()
    whole = phi @ spread @ phi.T + float(given.noise) * np.eye(n)
    left = spread - spread @ phi.T @ np.linalg.solve(whole, phi @ spread)
    evidence, means = dense(given, client)
    w, new = np.exp(evidence - np.logaddexp.reduce(evidence)), rows(5, 4, seed=3).phi[0, 0]
    each = new.numpy() @ means.T  # (5, k)
    between = (w * (each - (each @ w)[:, None]) ** 2).sum(1)
    wanted = np.sqrt(float(given.noise) + np.einsum("nd,de,ne->n", new.numpy(), left, new.numpy()) + between)
    assert np.allclose(re.posterior(given, client).deviations(given, new)[0], wanted)


def em(given, clients, rounds):
    likely = []
    for t in range(rounds):
        given = re.turned(given, t)
        each = [(c, re.posterior(given, c)) for c in clients]
        parts = [formed(re.contribution(given, c, found)) for c, found in each]
        sums = {name: sum(p[name] for p in parts) for name in parts[0]}
        likely.append(float(sums["loglik"]))
        given = re.maximised(given, sums)
    return given, likely


def drawn(m=25, n=5, d=2, seed=0, **options):
    federation, _ = regressions(m=m, n=n, d=d, seed=seed, **options)
    pairs = (federation.train.client(i) for i in range(m))
    return [re.Rows(x[None, None].double(), y[None, None].double(), torch.tensor(float(n)).double()) for x, y in pairs]


def test_em_ends_at_the_maximum_of_the_likelihood():
    clients = drawn(n=6, spread=0.6)
    given, likely = em(re.first_mixture(torch.zeros(2).double(), diagonal=False), clients, 80)

    def minus(free):
        low = torch.tensor([[free[2], 0], [free[3], free[4]]])
        noise = torch.tensor([math.exp(free[5])], dtype=torch.float64)
        shape = re.Mixture(torch.ones(1, 1), torch.tensor(free[None, None, :2]), low[None, None], noise)
        return -sum(float(np.logaddexp.reduce(dense(shape, c)[0])) for c in clients)

    best = minimize(minus, np.array([1.0, 0, 0.6, 0, 0.6, -1.4]), method="BFGS", options={"gtol": 1e-6})
    assert likely[-1] == pytest.approx(-best.fun, abs=1e-6)
    low = np.array([[best.x[2], 0], [best.x[3], best.x[4]]])
    assert np.allclose(given.mean[0, 0], best.x[:2], atol=1e-4)
    assert np.allclose(given.covariance[0, 0], low @ low.T, atol=1e-4)
    assert float(given.noise) == pytest.approx(math.exp(best.x[5]), abs=1e-4)


@pytest.mark.parametrize(
    ("k", "own", "diagonal"), [(1, False, False), (3, False, False), (3, True, False), (2, False, True)]
)
def test_the_likelihood_never_falls(k, own, diagonal):
    given = mixture(2, k=k, own=own)
    if diagonal:
        given = given._replace(factor=given.factor.diagonal(dim1=-2, dim2=-1).abs())
    _, likely = em(given, drawn(seed=4), 30)
    assert all(b >= a - 1e-9 for a, b in pairwise(likely))


def test_one_iteration_is_an_m_step_of_the_expanded_model():
    """In a balanced design the mean is right at once, however poor Σ and σ² are: it needs the expansion."""
    clients = [rows(4, 2, seed=i)._replace(phi=rows(4, 2, seed=0).phi) for i in range(20)]
    after, _ = em(mixture(2, seed=5), clients, 1)
    phi, y = clients[0].phi[0, 0], torch.stack([c.y[0, 0] for c in clients]).mean(0)
    assert torch.allclose(after.mean[0, 0], torch.linalg.lstsq(phi, y[:, None]).solution[:, 0])


# --- the limits --------------------------------------------------------------------------------------------------


def test_without_spread_it_is_least_squares():
    clients = drawn()
    flat = mixture(2)._replace(factor=torch.zeros(1, 1, 2, 2).double())
    found, _ = em(flat, clients, 2)
    phi, y = torch.cat([c.phi[0, 0] for c in clients]), torch.cat([c.y[0, 0] for c in clients])
    pooled = torch.linalg.lstsq(phi, y[:, None]).solution[:, 0]
    assert torch.allclose(found.mean[0, 0], pooled)
    assert float(found.noise) == pytest.approx(float((y - phi @ pooled).square().mean()))
    assert not found.factor.any()


def test_an_axis_that_shrinks_may_still_turn():
    """Whatever the axes of the features, the likelihood ends at the same place, although Σ is nearly singular there."""
    ends = []
    for seed in range(3):
        g = torch.Generator().manual_seed(seed)
        q = torch.linalg.qr(torch.randn(3, 3, generator=g, dtype=torch.float64))[0]
        wide = [c._replace(phi=torch.cat([c.phi, torch.ones_like(c.phi[..., :1])], -1) @ q) for c in drawn(20, 6)]
        ends.append(em(re.first_mixture(torch.zeros(3).double(), diagonal=False), wide, 60)[1][-1])
    assert max(ends) - min(ends) < 0.05


def test_without_spread_several_components_are_clusters():
    federation, _ = regressions(k=3, m=30, n=12, spread=0.0, noise=0.2, seed=1)
    run = ct.fit(ct.MixedEffects(k=3), linear(bias=False), federation, rounds=40, **QUIET)
    assert run.ari == 1.0
    for j in range(3):
        own = np.flatnonzero(run.labels == j)
        x, y = (torch.cat([federation.train.client(i)[part] for i in own]) for part in (0, 1))
        alone = torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
        assert torch.allclose(run.models[j]["weight"][0], alone, atol=0.02)


def test_a_wide_spread_and_many_rows_are_one_model_each():
    federation, theta = regressions(m=20, n=60, spread=3.0, noise=0.1)
    run = ct.fit(ct.MixedEffects(), linear(bias=False), federation, rounds=40, **QUIET)
    own = np.stack([run.module(client=i).weight.detach().numpy()[0] for i in range(20)])
    assert np.allclose(own, theta, atol=0.1)


# --- a run -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2, 3])
def test_k_is_found(k):
    federation, _ = regressions(k=k, m=45, n=12, spread=0.2, seed=10 + k)
    run = ct.fit(ct.MixedEffects(k="auto", at_most=4, restarts=8), linear(), federation, rounds=60, **QUIET)
    assert len(run.models) == k
    assert run.ari == 1.0


def test_clients_that_merely_vary_are_one_group():
    federation, _ = regressions(m=45, n=12, spread=2.0, seed=5)
    run = ct.fit(ct.MixedEffects(k="auto", at_most=3, restarts=4), linear(), federation, rounds=60, **QUIET)
    assert len(run.models) == 1


def test_the_log_says_how_k_was_chosen(caplog):
    federation, _ = regressions(k=2, m=20, n=12, spread=0.1)
    with caplog.at_level("INFO", "coterie"):
        ct.fit(ct.MixedEffects(k="auto", at_most=2, restarts=2), linear(), federation, rounds=80, **QUIET)
    assert "k=2 has the lowest BIC" in caplog.text and "(on the way: 1: " in caplog.text


def test_engines_agree_to_a_millionth():
    federation, _ = regressions(k=2, m=12, n=6)
    method = ct.MixedEffects(k=2, restarts=2)
    models = {}
    for name in ("sequential", "vmap", "vectorised", "sharded"):
        cohort = simulated(federation, linear(), Key.of(0).fold(1), executor=name)
        state, _ = run_rounds(method, cohort, 6)
        models[name] = method.models(state)
    with nodes((linear(), federation)) as there:
        models["flower"] = method.models(run_rounds(method, there, 6)[0])
    for name, found in models.items():
        for p, wanted in models["sequential"].items():
            assert torch.allclose(found[p], wanted, rtol=1e-6, atol=1e-6), name


def test_a_secure_sum_changes_nothing():
    federation, _ = regressions(k=2, m=12, n=6)
    method = ct.MixedEffects(k=2, restarts=2)
    plain, secure = (ct.fit(method, linear(), federation, rounds=5, secure=s, **QUIET) for s in (None, ct.SecureSum()))
    for one, two in zip(plain.models, secure.models, strict=True):
        assert all(torch.allclose(one[p], two[p], rtol=1e-6, atol=1e-6) for p in one)
    assert secure.algorithm.labels(secure.state).unique().tolist() == [-1]
    assert int(secure.algorithm.members(secure.state).sum()) == 12
    assert plain.score == pytest.approx(secure.score, abs=1e-6)


def test_own_models_are_better_than_one_and_than_each_alone():
    federation, _ = regressions(m=40, n=6, d=4, spread=0.5, noise=0.8, seed=2)
    one = ct.fit(ct.MixedEffects(), linear(4), federation, rounds=30, **QUIET)
    x, y = federation.train.x, federation.train.y
    pooled = torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
    pairs = [(federation.train.client(i), federation.test.client(i)) for i in range(40)]
    alone = [torch.linalg.lstsq(a, b[:, None]).solution[:, 0] for (a, b), _ in pairs]
    for other in ([pooled] * 40, alone):
        mse = np.mean([float((v - u @ theta).square().mean()) for (_, (u, v)), theta in zip(pairs, other, strict=True)])
        assert one.score < mse


def test_new_clients_are_placed_and_predicted_by_their_rows():
    federation, _ = regressions(k=2, m=40, n=10, spread=0.1)
    some, rest = federation.select(range(30)), federation.select(range(30, 40))
    run = ct.fit(ct.MixedEffects(k=2), linear(), some, rounds=30, **QUIET)
    labels = [run.assign(*rest.train.client(i)) for i in range(10)]
    assert all(labels[i] == run.labels[i] for i in range(10))  # groups alternate
    x, y = rest.test.client(0)
    known = run.predict(x, client=rest.train.client(0))[:, 0]
    assert np.mean((known - y.numpy()) ** 2) < 0.5
    share = run.algorithm.fitted(run.state).share[0].float().numpy()
    mean = sum(s * run.predict(x, client=None)[:, 0] for s in share)
    assert np.allclose(run.predict(x)[:, 0], mean, atol=1e-4)
    scores = run.evaluate(federation=rest)
    assert scores.clustering["ari"] == 1.0


def test_deviations_cover_what_is_predicted():
    federation, _ = regressions(k=2, m=60, n=5, d=3, spread=0.4, noise=0.7, seed=6, test=20)
    run = ct.fit(ct.MixedEffects(k=2), linear(), federation, rounds=40, **QUIET)
    inside = []
    for i in range(60):
        x, y = federation.test.client(i)
        mean, deviation = run.predict(x, client=i, deviations=True)
        inside.append((np.abs(y.numpy() - mean[:, 0]) < 2 * deviation).mean())
    assert 0.92 < np.mean(inside) < 0.98
    x, y = federation.test.x, federation.test.y
    _, unknown = run.predict(x, deviations=True)
    assert (unknown > run.predict(x, client=0, deviations=True)[1] - 1e-9).all()


def test_the_report_has_errors_and_shares_of_variation():
    federation, _ = regressions(k=2, m=60, n=10, spread=0.3, noise=0.5)
    run = ct.fit(ct.MixedEffects(k=2), linear(), federation, rounds=60, **QUIET)
    effects = run.algorithm.effects(run.state)
    assert isinstance(effects, Effects) and effects.mean.shape == (2, 4)
    assert effects.between + effects.within + effects.rest == pytest.approx(1)
    assert effects.between > effects.within
    assert effects.noise == pytest.approx(0.25, rel=0.2)
    assert np.sqrt(np.diag(effects.covariance)[:3]).mean() == pytest.approx(0.3, rel=0.3)
    text = run.algorithm.report(run.state)
    assert "weight[0, 0]" in text and "variation: between components" in text


def test_standard_errors_are_those_of_generalised_least_squares():
    federation, _ = regressions(m=30, n=6)
    run = ct.fit(ct.MixedEffects(tol=1e-10), linear(bias=False), federation, rounds=200, **QUIET)
    effects = run.algorithm.effects(run.state)
    known = np.zeros((3, 3))
    for i in range(30):
        x = federation.train.client(i)[0].double().numpy()
        known += x.T @ np.linalg.solve(x @ effects.covariance @ x.T + effects.noise * np.eye(6), x)
    assert np.allclose(effects.error[0], np.sqrt(np.diag(np.linalg.inv(known))), rtol=1e-4)


# --- classes -----------------------------------------------------------------------------------------------------


def classes(m=30, n=20, d=2, c=2, spread=0.7, seed=0):
    g = torch.Generator().manual_seed(seed)
    centre = torch.randn(d + 1, c, generator=g)
    parts = [], []
    for _ in range(m):
        theta = centre + spread * torch.randn(d + 1, c, generator=g)
        for part in parts:
            x = torch.randn(n, d, generator=g)
            p = (torch.cat([x, torch.ones(n, 1)], 1) @ theta).softmax(-1)
            part.append((x, torch.multinomial(p, 1, generator=g)[:, 0]))
    return ct.Federation.from_clients(*parts)


def test_laplace_finds_the_mode_and_its_curvature():
    given = mixture(3, k=2)._replace(noise=torch.ones(1).double())
    g = torch.Generator().manual_seed(2)
    phi, y = torch.randn(10, 3, 3, generator=g, dtype=torch.float64), torch.randint(3, (10,), generator=g)
    _, found = la.laplace(CLASSES, given, phi, ct.core.task.Data(torch.zeros(10), y, torch.ones(10)))
    for j in range(2):

        def minus(u, j=j):
            theta = given.mean[0, j] + given.factor[0, 0] @ torch.as_tensor(u)
            out = (phi @ theta).log_softmax(-1)
            return float(-out[torch.arange(10), y].sum() + 0.5 * (torch.as_tensor(u) ** 2).sum())

        best = minimize(minus, np.zeros(3), method="BFGS", options={"gtol": 1e-8})
        assert np.allclose(found.u[0, j], best.x, atol=1e-5)
        hessian = torch.autograd.functional.hessian(
            lambda u, j=j: (
                0.5 * (u @ u)
                - (phi @ (given.mean[0, j] + given.factor[0, 0] @ u)).log_softmax(-1)[torch.arange(10), y].sum()
            ),
            found.u[0, j],
        )
        wanted = -best.fun - 0.5 * float(torch.logdet(hessian)) + math.log(float(given.share[0, j]))
        assert float(found.evidence[0, j]) == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("c", [2, 3])
def test_classes_are_learnt_better_than_by_one_model(c):
    federation = classes(c=c)
    task = ct.Task.classifier(ct.models.Linear(2, c))
    run = ct.fit(ct.MixedEffects(), task, federation, rounds=15, **QUIET)
    one = ct.fit(ct.FedAvg(lr=0.5, tau=10), task, federation, rounds=15, **QUIET)
    assert run.scores.loss.mean() < one.scores.loss.mean()
    assert run.algorithm.effects(run.state).noise is None
    with pytest.raises(ValueError, match="only predictions of a regression have standard deviations"):
        run.predict(federation.train.x, deviations=True)


def test_separable_classes_are_no_trouble():
    federation = classes()
    rows = [(x, (x[:, 0] > 0).long()) for x, _ in map(federation.train.client, range(30))]
    run = ct.fit(
        ct.MixedEffects(),
        ct.Task.classifier(ct.models.Linear(2, 2)),
        ct.Federation.from_clients(rows),
        rounds=30,
        **QUIET,
    )
    assert run.accuracy == 1.0


# --- counts ------------------------------------------------------------------------------------------------------


class Level(torch.nn.Module):
    """One number, the log of the rate of all rows."""

    def __init__(self):
        super().__init__()
        self.level = torch.nn.Parameter(torch.zeros(1))

    def reset_parameters(self):
        torch.nn.init.normal_(self.level)

    def forward(self, x):
        return self.level * x


def poisson(d=2, module=None):
    return ct.Task.counts(module or ct.models.Linear(d, 1))


def counted(m=20, n=8, spread=0.5, seed=0, **options):
    return ct.data.varying_counts(m, n, 2, spread=spread, distance=1.0, test_rows=8, seed=seed, **options)


def levels(m, n, level, spread, seed):
    """Counts whose log rate is a number of each client's own (m, n)."""
    g = np.random.default_rng(seed)
    return g.poisson(np.exp(level + spread * g.standard_normal((m, 1))), (m, n))


def integrated(y, start):
    """The likeliest level and spread by adaptive Gauss-Hermite quadrature."""
    (m, n), total, (t, w) = y.shape, y.sum(1), np.polynomial.hermite.hermgauss(40)

    def minus(free):
        level, spread, u = free[0], math.exp(free[1]), np.zeros(m)
        for _ in range(50):
            rate = n * np.exp(level + spread * u)
            u += np.clip((spread * (total - rate) - u) / (1 + spread**2 * rate), -1, 1)
        width = np.sqrt(2 / (1 + spread**2 * n * np.exp(level + spread * u)))
        at = u[:, None] + width[:, None] * t
        out = level + spread * at
        height = total[:, None] * out - n * np.exp(out) - at**2 / 2 + t**2 + np.log(w)
        return -(np.logaddexp.reduce(height, axis=1) + np.log(width)).sum()

    return minimize(minus, start, method="Nelder-Mead", options={"xatol": 1e-5}).x


@pytest.mark.parametrize(("n", "level", "spread"), [(4, -0.5, 1.0), (8, 3.0, 1.0)])
def test_counts_end_near_the_likeliest_level_and_spread(n, level, spread):
    y = levels(80, n, level, spread, seed=1)
    wanted = integrated(y, [level, math.log(spread)])
    clients = ct.Federation.from_clients([(np.ones((n, 1), np.float32), own) for own in y])
    run = ct.fit(ct.MixedEffects(tol=1e-4), poisson(module=Level()), clients, rounds=25, **QUIET)
    effects = run.algorithm.effects(run.state)
    assert effects.noise is None
    assert effects.mean[0, 0] == pytest.approx(wanted[0], abs=0.2 * effects.error[0, 0])  # the mode would be 1 away
    assert math.sqrt(effects.covariance[0, 0]) == pytest.approx(math.exp(wanted[1]), rel=0.03)


@pytest.mark.parametrize("targets", ["drawn", "zero", "huge"])
@pytest.mark.parametrize("level", [-5.0, 0.0, 8.0])
def test_laplace_finds_the_mode_of_counts(targets, level):
    g = torch.Generator().manual_seed(3)
    phi = torch.cat([torch.ones(12, 1), 2 * torch.randn(12, 2, generator=g)], 1).double()
    given = mixture(3)._replace(mean=torch.tensor([[[level, 0.0, 0.0]]]).double(), noise=torch.tensor([0.1]).double())
    drawn = torch.poisson((phi @ given.moved(torch.ones(1, 1, 3).double())[0, 0]).exp(), generator=g)
    y = {"drawn": drawn, "zero": torch.zeros(12), "huge": torch.full((12,), 1e9)}[targets].double()
    data = ct.core.task.Data(torch.zeros(12), y, torch.ones(12))
    _, found = la.laplace(COUNTS._replace(skew=None), given, phi[:, None], data)
    rate = (phi @ given.moved(found.u)[0, 0]).exp()
    curve = given.factor[0, 0].T @ phi.T
    slope = curve @ (y - rate) - found.u[0, 0]
    hessian = torch.eye(3) + (curve * rate) @ curve.T
    assert torch.linalg.solve(hessian, slope).abs().max() < 1e-6  # another step of Newton would go nowhere
    wanted = float(
        torch.distributions.Poisson(rate).log_prob(y).sum() - found.u.square().sum() / 2 - torch.logdet(hessian) / 2
    )
    assert float(found.evidence) == pytest.approx(wanted, rel=1e-9)


def test_the_mean_of_counts_is_that_of_the_posterior():
    given = re.Mixture(*(torch.tensor(v).double() for v in ([[1.0]], [[[0.0]]], [[[[1.0]]]], [0.5])))
    data = ct.core.task.Data(torch.zeros(1), torch.tensor([0.0]), torch.ones(1))
    _, found = la.laplace(COUNTS, given, torch.ones(1, 1, 1).double(), data)
    u = np.linspace(-8, 8, 4001)
    weight = np.exp(-np.exp(u) - u**2 / 2)
    assert float(found.u) == pytest.approx((u * weight).sum() / weight.sum(), abs=0.02)


def test_own_models_of_counts_are_better_than_one_and_find_groups():
    federation = counted(m=24, n=20, groups=2, spread=0.2, rate=6.0)
    run = ct.fit(ct.MixedEffects(k=2, restarts=2), poisson(), federation, rounds=10, **QUIET)
    one = ct.fit(ct.MixedEffects(covariance="diagonal"), poisson(), federation, rounds=10, **QUIET)
    pooled = ct.fit(ct.FedAvg(lr=0.01, tau=10), poisson(), federation, rounds=20, **QUIET)
    assert run.scores.metric == "deviance" and run.score < pooled.score and run.ari > 0.8
    assert run.score < 1.05 * one.score < pooled.score
    x = federation.test.client(0)[0]
    assert np.allclose(run.predict(x, client=0), run.module(client=0)(x).exp().detach().numpy())
    with pytest.raises(ValueError, match="standard deviations, not those of classes or counts"):
        run.predict(x, client=0, deviations=True)


def test_new_clients_with_counts_are_known_by_their_rows():
    federation = counted(m=36, n=20, spread=0.8, rate=4.0)
    run = ct.fit(ct.MixedEffects(), poisson(), federation.select(range(30)), rounds=12, **QUIET)

    def deviance(rows):
        found = []
        for i in range(30, 36):
            (x, y), (new, wanted) = federation.train.client(i), federation.test.client(i)
            expected = torch.from_numpy(run.predict(new, client=(x[:rows], y[:rows]) if rows else None)[:, 0])
            found.append(2 * (torch.xlogy(wanted, wanted / expected) - wanted + expected).mean())
        return float(torch.stack(found).mean())

    assert deviance(20) < deviance(3) < deviance(0)
    x = federation.test.client(35)[0]
    assert np.allclose(run.predict(x), run.module(0)(x).exp().detach().numpy())


def test_engines_agree_on_counts_to_a_millionth():
    federation, method = counted(m=8, n=5, groups=2), ct.MixedEffects(k=2, restarts=2)
    models = {}
    for name in ("sequential", "vmap", "vectorised", "sharded"):
        cohort = simulated(federation, poisson(), Key.of(0).fold(1), executor=name)
        models[name] = method.models(run_rounds(method, cohort, 3)[0])
    with nodes((poisson(), federation)) as there:
        models["flower"] = method.models(run_rounds(method, there, 3)[0])
    for name, found in models.items():
        for p, wanted in models["sequential"].items():
            assert torch.allclose(found[p], wanted, rtol=1e-6, atol=1e-6), name


def test_a_secure_sum_changes_nothing_for_large_counts():
    federation = counted(m=8, n=5, rate=1e5)
    plain, secure = (
        ct.fit(ct.MixedEffects(), poisson(), federation, rounds=4, secure=s, **QUIET) for s in (None, ct.SecureSum())
    )
    for p, wanted in plain.models[0].items():
        assert torch.allclose(secure.models[0][p], wanted, rtol=1e-6, atol=1e-6)


def test_scales_make_no_difference_to_counts():
    federation, by = counted(m=15), torch.tensor([1e-6, 1e6])
    pairs = [federation.train.client(i) for i in range(15)]
    far = ct.Federation.from_clients([(torch.cat([x * by, 3 * torch.ones(len(x), 1)], 1), y.long()) for x, y in pairs])
    plain, scaled = (
        ct.fit(ct.MixedEffects(tol=1e-5), task, given, rounds=25, **QUIET)
        for task, given in ((poisson(), federation), (poisson(3), far))
    )
    x = pairs[0][0]
    there = torch.cat([x * by, 3 * torch.ones(len(x), 1)], 1)
    assert np.allclose(plain.predict(x, client=0), scaled.predict(there, client=0), rtol=0.02)


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_clients_without_any_count_and_with_huge_ones(covariance):
    federation = counted(m=12, n=6)
    pairs = [federation.train.client(i) for i in range(12)]
    rows = [(x, 0 * y if i < 4 else 1e8 * y if i < 8 else y) for i, (x, y) in enumerate(pairs)]
    far = ct.Federation.from_clients([(x + 30 * (i == 11), y) for i, (x, y) in enumerate(rows)])
    run = ct.fit(ct.MixedEffects(covariance=covariance), poisson(), far, rounds=15, **QUIET)
    assert all(torch.isfinite(p).all() for p in run.models[0].values()) and math.isfinite(run.score)
    assert run.predict(rows[0][0], client=0).max() < 0.5
    assert run.predict(rows[5][0], client=5).mean() == pytest.approx(float(rows[5][1].mean()), rel=0.05)


@pytest.mark.parametrize(("y", "given"), [([1.0, 2.5], "2.5"), ([0.0, -1.0], "-1"), ([3, -2], "-2")])
def test_targets_that_are_no_counts_are_refused(y, given):
    clients = ct.Federation.from_clients(
        [(torch.ones(2, 2), torch.tensor([1, 0]).to(torch.tensor(y))), (torch.ones(2, 2), torch.tensor(y))]
    )
    with pytest.raises(ValueError, match=f"client 1: counts must be whole numbers of at least 0, got {given}$"):
        ct.fit(ct.MixedEffects(), poisson(), clients, rounds=1)


def test_counts_need_one_output_and_a_linear_model():
    federation = counted(m=4)
    with pytest.raises(ValueError, match=r"must give one output for one target per row, got outputs of shape \(2,\)"):
        ct.fit(ct.FedAvg(), ct.Task.counts(ct.models.Linear(2, 2)), federation, rounds=1)
    with pytest.raises(ValueError, match="linear in its parameters"):
        ct.fit(ct.MixedEffects(), ct.Task.counts(ct.models.MLP(2, 4, 1)), federation, rounds=1)


# --- bad data ----------------------------------------------------------------------------------------------------


def test_scales_make_no_difference():
    federation, _ = regressions(m=20, n=6)
    by = torch.tensor([1e-6, 1.0, 1e6])
    pairs = [federation.train.client(i) for i in range(20)]
    far = ct.Federation.from_clients([(x * by, 1e4 * y) for x, y in pairs])
    plain, scaled = (ct.fit(ct.MixedEffects(), linear(), f, rounds=20, **QUIET) for f in (federation, far))
    x = pairs[0][0]
    assert np.allclose(plain.predict(x, client=0), scaled.predict(x * by, client=0) / 1e4, atol=1e-4)
    secure = ct.fit(ct.MixedEffects(), linear(), far, rounds=20, secure=ct.SecureSum(), **QUIET)
    for p, wanted in scaled.models[0].items():
        assert torch.allclose(secure.models[0][p], wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize("change", ["constant", "zero", "copied"])
@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_columns_that_say_nothing_are_no_trouble(change, covariance):
    federation, _ = regressions(m=20, n=6, d=2)
    more = {"constant": torch.ones_like, "zero": torch.zeros_like, "copied": lambda x: x}[change]
    pairs = [federation.train.client(i) for i in range(20)]
    wide = ct.Federation.from_clients([(torch.cat([x, more(x[:, :1])], 1), y) for x, y in pairs])
    method = ct.MixedEffects(covariance=covariance, tol=1e-6)
    plain = ct.fit(method, linear(2), federation, rounds=100, **QUIET)
    run = ct.fit(method, linear(3), wide, rounds=100, **QUIET)
    assert all(torch.isfinite(p).all() for p in run.models[0].values())
    if covariance == "full":
        x = wide.train.client(0)[0]
        assert np.allclose(run.predict(x, client=0), plain.predict(x[:, :2], client=0), atol=0.01)


@pytest.mark.parametrize("k", [1, 2])
def test_one_row_per_client(k):
    federation, _ = regressions(k=2, m=60, n=1, d=2)
    run = ct.fit(ct.MixedEffects(k=k), linear(2), federation, rounds=30, **QUIET)
    assert math.isfinite(run.score)


def test_targets_without_noise():
    federation, _ = regressions(m=20, n=6, noise=0.0)
    run = ct.fit(ct.MixedEffects(), linear(), federation, rounds=60, **QUIET)
    assert run.score < 1e-6


def test_a_model_that_is_not_linear_is_refused():
    federation, _ = regressions(m=4)
    with pytest.raises(ValueError, match=r"linear in its parameters.*use Personal\(FedAvg\(\)\) or FedEM"):
        ct.fit(ct.MixedEffects(), ct.Task.regressor(ct.models.MLP(3, 4, 1)), federation, rounds=1)


def test_fewer_clients_than_components_are_refused():
    federation, _ = regressions(m=2)
    with pytest.raises(ValueError, match="k must be at most the number of clients, 2, got 3"):
        ct.fit(ct.MixedEffects(k=3), linear(), federation, rounds=1)


def test_many_parameters_have_a_diagonal_covariance(caplog):
    federation, _ = regressions(m=10, n=5, d=60)
    with caplog.at_level("INFO", "coterie"):
        run = ct.fit(ct.MixedEffects(), linear(60), federation, rounds=3, **QUIET)
    assert "covariance=diagonal: a full one of 61 parameters has 1,891 numbers" in caplog.text
    assert run.state.mixture.diagonal


def test_few_odd_clients_are_no_group_unless_asked_for():
    """BIC prefers a component of their own, which has less than 5 % of the clients."""
    g = torch.Generator().manual_seed(1)
    theta = torch.randn(80, 2, generator=g)
    theta[:3] += 12
    x = torch.randn(80, 6, 2, generator=g)
    y = (x @ theta[..., None])[..., 0] + 0.5 * torch.randn(80, 6, generator=g)
    federation = ct.Federation.from_clients([(x[i], y[i]) for i in range(80)])
    runs = [ct.fit(ct.MixedEffects(k=k, restarts=4), linear(2), federation, rounds=40, **QUIET) for k in (1, 2, "auto")]
    one, two, found = (run.algorithm.criterion(run.state).item() for run in runs)
    assert two < one - 10 and runs[1].algorithm.members(runs[1].state).min() == 3
    assert len(runs[2].models) == 1 and found == pytest.approx(one, abs=1)
