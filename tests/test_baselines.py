import pytest
import torch

import coterie as ct
from coterie_lab.reproduce.rounds import last_state

LINE = ct.Task.regressor(ct.models.Linear(1, 1, bias=False))


def federation():
    return ct.Federation.from_clients([(torch.ones(1, 1), torch.tensor([s])) for s in (0.0, 4.0)])


def test_fedavg_meets_in_the_middle():
    state = last_state(ct.FedAvg(lr=0.25, tau=1), LINE, federation(), 60, 0, "cpu")
    assert float(state.theta["weight"]) == pytest.approx(2.0, abs=1e-5)


def test_the_proximal_term_by_hand():
    # from w = 0 towards 4: first step 2, then gradient 2(2 - 4) + μ(2 - 0) = -4 + 2μ
    one = ct.Federation.from_clients([(torch.ones(1, 1), torch.tensor([4.0]))])
    begin = last_state(ct.FedAvg(), LINE, one, 0, 0, "cpu")._replace(theta={"weight": torch.zeros(1, 1, 1)})
    from coterie.core.key import Key
    from coterie.engines import simulated

    cohort = simulated(one, LINE, Key.of(0), executor="sequential")
    after, _ = ct.FedAvg(lr=0.25, tau=2, prox=1.0).round(begin, cohort.at(0))
    assert float(after.theta["weight"]) == pytest.approx(2 + 0.25 * (4 - 2))


def test_local_models_fit_their_own_client_and_cost_nothing():
    run = ct.fit(ct.LocalOnly(lr=0.25), LINE, federation(), rounds=5)
    assert [float(m["weight"]) for m in run.models] == pytest.approx([0, 4], abs=1e-3)
    assert run.history[0]["bytes_up"] == run.history[0]["bytes_down"] == 0


def test_local_models_wait_for_their_turn():
    run = ct.fit(ct.LocalOnly(lr=0.25, fraction=0.5), LINE, federation(), rounds=1)
    start = last_state(ct.LocalOnly(), LINE, federation(), 0, 0, "cpu").theta["weight"].flatten()
    moved = [float(m["weight"]) != float(s) for m, s in zip(run.models, start, strict=True)]
    assert sorted(moved) == [False, True]


def test_local_models_may_be_solved_for():
    generator = torch.Generator().manual_seed(0)
    clients = []
    for n in (2, 9):  # fewer rows than parameters, and more
        x = torch.randn(n, 3, generator=generator) * torch.tensor([1.0, 1e3, 1e-2])
        clients.append((x, x @ torch.tensor([1.0, 1e-3, 1e2]) + torch.randn(n, generator=generator)))
    task = ct.Task.regressor(ct.models.Linear(3, 1))
    run = ct.fit(ct.LocalOnly(refine="least_squares"), task, ct.Federation.from_clients(clients), rounds=5)
    assert len(run.history) == 1 and run.scores.per_client[0] < 1e-6
    x, y = clients[1]
    best = torch.linalg.lstsq(torch.cat([x, torch.ones(9, 1)], 1).double(), y[:, None].double()).solution[:, 0]
    found = torch.cat([run.models[1]["weight"].flatten(), run.models[1]["bias"]])
    assert found.tolist() == pytest.approx(best.tolist(), rel=1e-3)
    with pytest.raises(ValueError, match="LocalOnly: refine='least_squares'"):
        net = ct.Task.regressor(ct.models.MLP(3, 2, 1))
        ct.fit(ct.LocalOnly(refine="least_squares"), net, ct.Federation.from_clients(clients), rounds=1)
