"""The search for one component: its slope, that it ends where EM ends, in fewer rounds, and never falls."""

from itertools import pairwise

import pytest
import torch
from torch.func import vmap

import coterie as ct
from coterie.core.pytree import formed
from coterie.parts import random_effects as re
from coterie.parts.quasi_newton import Search, _slope


def clients(m=40, n=6, d=3, spread=0.5, noise=0.5, seed=0):
    """Rows of all clients (m, 1, 1, n, d), the first feature a constant."""
    g = torch.Generator().manual_seed(seed)
    theta = 1 + spread * torch.randn(m, d, generator=g, dtype=torch.float64)
    phi = torch.randn(m, n, d, generator=g, dtype=torch.float64)
    phi[..., 0] = 1
    y = (phi @ theta[..., None])[..., 0] + noise * torch.randn(m, n, generator=g, dtype=torch.float64)
    return re.Rows(phi[:, None, None], y[:, None, None], torch.full((m,), float(n), dtype=torch.float64))


def sums(given, rows):
    each = vmap(lambda own: formed(re.contribution(given, own, re.posterior(given, own))))(rows)
    return {name: x.sum(0) for name, x in each.items()}


def first(d=3):
    return re.first_mixture(torch.zeros(d, dtype=torch.float64), diagonal=False)


def em(rows, rounds):
    given, likely = first(rows.phi.shape[-1]), []
    for t in range(rounds):
        given = re.turned(given, t)
        total = sums(given, rows)
        likely.append(float(total["loglik"]))
        given = re.maximised(given, total)
    return likely


def searched(rows, tol=1e-4, rounds=60):
    search, best = Search.start(first(rows.phi.shape[-1])), []
    for t in range(rounds):
        sent = re.turned(search.trial, t)
        search = search.after(sent, sums(sent, rows))
        best.append(float(search.loglik))
        if float(search.promise) <= tol:
            break
    return search, best


def test_the_slope_is_the_derivative_of_the_log_likelihood():
    rows = clients()
    given = re.turned(first()._replace(mean=torch.ones(1, 1, 3, dtype=torch.float64)), 4)

    def loglik(spread, noise):
        own = given._replace(factor=torch.linalg.cholesky((spread + spread.mT) / 2)[None, None], noise=noise[None])
        return vmap(lambda r: re.posterior(own, r).loglik)(rows).sum()

    spread, noise = given.covariance[0, 0].requires_grad_(), given.noise[0].requires_grad_()
    wanted = torch.autograd.grad(loglik(spread, noise), (spread, noise))
    found = _slope(given, sums(given, rows))
    assert torch.allclose(found[:-1].reshape(3, 3), wanted[0])
    assert torch.allclose(found[-1], wanted[1])


@pytest.mark.parametrize("options", [{}, {"spread": 0.0}, {"n": 2}, {"spread": 5.0, "m": 100}, {"noise": 0.01}])
def test_it_ends_where_a_long_em_ends_and_never_falls(options):
    rows = clients(**options)
    search, best = searched(rows)
    assert float(sums(search.found, rows)["loglik"]) >= em(rows, 250)[-1] - 1e-3
    assert all(b >= a - 1e-8 * abs(a) for a, b in pairwise(best))


def test_it_takes_a_third_of_the_rounds_of_em():
    rows = clients(spread=0.05)  # some of Σ is at the boundary
    _, best = searched(rows)
    assert len(best) <= 12
    assert em(rows, 36)[-1] < best[-1] - 1e-3


def test_what_turns_out_less_likely_is_given_up_for_an_iteration_of_em():
    rows = clients()
    search = Search.start(first())
    for t in range(2):
        sent = re.turned(search.trial, t)
        search = search.after(sent, sums(sent, rows))
    bad = search.trial._replace(mean=search.trial.mean + 9)
    after = search.after(bad, sums(bad, rows))
    assert after.loglik == search.loglik and after.caution > search.caution
    assert torch.allclose(after.trial.covariance, search.found.covariance, atol=1e-6)
    assert float(sums(after.trial, rows)["loglik"]) > float(search.loglik)


def test_sums_over_other_clients_are_not_compared():
    rows, search = clients(), Search.start(first())
    for t in range(3):
        sent = re.turned(search.trial, t)
        search = search.after(sent, sums(sent, rows))
    fewer = re.Rows(rows.phi[:30], rows.y[:30], rows.number[:30])
    after = search.after(search.trial, sums(search.trial, fewer))
    assert after.loglik != search.loglik and len(after.steps) == 0 and after.caution == 1


def test_a_run_ends_early_and_its_result_is_never_that_of_a_failed_step():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(40, 6, 3, generator=g)
    y = (x @ (1 + 0.5 * torch.randn(40, 3, 1, generator=g)))[..., 0] + 0.5 * torch.randn(40, 6, generator=g)
    federation = ct.Federation.from_clients([(x[i], y[i]) for i in range(40)])
    task = ct.Task.regressor(ct.models.Linear(3, 1))
    runs = [ct.fit(ct.MixedEffects(), task, federation, rounds=t, evaluations=1) for t in range(1, 12)]
    assert len(runs[-1].history) < 11 and runs[-1].state.done
    assert all(b.state.loglik[0] >= a.state.loglik[0] for a, b in pairwise(runs))
    assert not runs[-1].warnings


def test_too_few_clients_are_left_to_em():
    g = torch.Generator().manual_seed(0)
    rows = [(torch.randn(6, 3, generator=g), torch.randn(6, generator=g)) for _ in range(7)]
    task = ct.Task.regressor(ct.models.Linear(3, 1))
    run = ct.fit(ct.MixedEffects(), task, ct.Federation.from_clients(rows), rounds=2, evaluations=1)
    assert run.state.search is None  # four parameters, with the bias
