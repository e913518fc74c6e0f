"""Federated moment descent and FedX: against numpy, against Lemma 1, and end to end."""

import itertools

import numpy as np
import pytest
import torch

import coterie as ct
from coterie.core.federation import Federation, Packed
from coterie.core.key import Key
from coterie.core.pytree import flat, stack
from coterie.core.step import Local
from coterie.core.task import Data
from coterie.engines import ENGINES, simulated
from coterie.methods.fedx import proximal
from coterie.methods.moment_descent import Anchors
from coterie.parts.kmeans import kmeans

every_executor = pytest.mark.parametrize("executor", list(ENGINES))


def cohort_of(federation, task, executor="vectorised", seed=0):
    return simulated(federation, task, Key.of(seed).fold(1), executor=executor)


def distance(models, truth):
    """Equation (6), for models that may have a bias."""
    found = flat(stack(models)) if isinstance(models, list) else flat(models)
    truth = torch.nn.functional.pad(truth, (0, found.shape[1] - truth.shape[1]))
    apart, k = torch.cdist(truth, found), len(truth)
    return min(max(float(apart[j, p[j]]) for j in range(k)) for p in itertools.permutations(range(k)))


def separation(truth):
    return float(torch.pdist(truth).min())


def linear(d, bias=False):
    return ct.Task.regressor(ct.models.Linear(d, 1, bias=bias))


@pytest.fixture(scope="module")
def doubles():
    """Sixty clients of two rows and three anchors, in double precision; the third singular value is well below."""
    settings = {"k": 2, "d": 4, "sigma": 0.01, "anchors": 3, "anchor_rows": 12, "pairs": 60, "rest": 0}
    made = ct.data.mixed_regression(seed=20, **settings).train
    return Federation(Packed(made.x.double(), made.y.double(), made.offsets))


def moment(federation, anchors, printed):
    """Y of Phase 1 at θ = 0, after whitening, by a loop."""
    others = [i for i in range(len(federation)) if i not in set(anchors)]
    clients = [[v.numpy() for v in federation.train.client(i)] for i in others]
    rows = np.concatenate([federation.train.client(i)[0].numpy() for i in range(len(federation))])
    second = rows.T @ rows / len(rows)
    scale = np.sqrt(np.diag(second))
    values, vectors = np.linalg.eigh(second / np.outer(scale, scale))
    white = vectors / np.sqrt(values) @ vectors.T / scale
    total = sum(np.outer(y[0] * x[0], y[1] * x[1]) for x, y in clients) / len(clients)
    return white @ (total if printed else (total + total.T) / 2) @ white.T


@every_executor
@pytest.mark.parametrize("subspace", ["printed", "symmetric", "pooled"])
def test_orthogonal_iteration_finds_the_singular_vectors(executor, subspace, doubles, monkeypatch):
    phase1 = ct.MomentDescent(anchors=3, ell=4, rounds=1, reuse=True, subspace=subspace, orthogonal=20)
    cohort = cohort_of(doubles, linear(4), executor).at(0)
    asked = []
    monkeypatch.setattr(type(cohort), "gather", _noting(type(cohort).gather, asked))
    found = next(iter(phase1.descent(2, cohort.task, cohort, Key.of(0))))
    assert asked == ["MomentDescent.descend"]  # only anchors answer for themselves; of the others, sums
    left = np.linalg.svd(moment(doubles, found.at.tolist(), subspace == "printed"))[0][:, :2]
    for own in found.subspace.numpy():
        missed = left - own @ (own.T @ left)
        assert np.linalg.norm(missed, 2) < 1e-10


def _noting(gather, names):
    def noted(self, step, shared, **more):
        names.append(step.__qualname__)
        return gather(self, step, shared, **more)

    return noted


@pytest.mark.parametrize("applied", [False, True])
def test_all_pairs_of_rows_are_used(applied):
    federation = ct.data.mixed_regression(k=2, d=3, seed=0, anchors=0, pairs=0, rest=3, rest_rows=(4,))
    task, theta = linear(3), torch.tensor([[0.5, -1.0, 0.2], [0.0, 0.3, 0.0]])
    q, step = torch.randn(2, 3, 2, generator=torch.Generator().manual_seed(0)), ct.MomentDescent()
    sums = cohort_of(federation, task).combine(step.apply if applied else step.pool, {"theta": theta, "Q": q})
    expected, weight = torch.zeros(2, 3, 3), 0
    for i in range(3):
        x, y = federation.train.client(i)
        for h, (r, s) in itertools.product(range(2), itertools.permutations(range(4), 2)):
            e = [(y[j] - x[j] @ theta[h]) * x[j] for j in (r, s)]
            expected[h] += 3 * torch.outer(*e) / 12  # a client of four rows counts three times a client of two
        weight += 3
    assert float(sums.weight[0]) == weight
    if applied:
        assert torch.allclose(sums.update[0].reshape(3, 2, 2).movedim(1, 0), expected @ q, atol=1e-4)
    else:
        assert torch.allclose(sums.update[0].reshape(2, 3, 3), expected, atol=1e-4)


@pytest.mark.parametrize("bias", [False, True])
def test_both_phases_come_close_to_least_squares(bias):
    federation = ct.data.mixed_regression(k=3, d=10, seed=0)
    truth = ct.data.regression_truth(3, 10)
    run = ct.fit(ct.MixedRegression(k=3), linear(10, bias), federation, rounds=50, evaluations=1)
    of = federation.groups.repeat_interleave(federation.train.sizes)
    oracle = [torch.linalg.lstsq(federation.train.x[of == j], federation.train.y[of == j]).solution for j in range(3)]
    assert distance(run.models, truth) < 0.02 * separation(truth)
    assert distance(run.models, truth) < 1.5 * max(float((o - t).norm()) for o, t in zip(oracle, truth, strict=True))


@pytest.mark.parametrize(
    "settings",
    [
        {"subspace": "printed"},
        {"subspace": "symmetric"},
        {"radius": 5.0, "rounds": 8, "ell": 15},
        {"noise": 0.2},
        {"noise": 0.2, "subspace": "symmetric"},
        {"noise": 0.2, "subspace": "printed"},
        {"reuse": True, "ell": 12},
        {"merge": "distance", "delta": 1.0, "ell": 19, "rounds": 6},
        {"power": 1},
    ],
    ids=str,
)
def test_phase_1_comes_within_half_the_separation(settings):
    federation = ct.data.mixed_regression(k=2, d=8, seed=2, rest=0, anchor_rows=240)
    truth = ct.data.regression_truth(2, 8, seed=2)
    cohort = cohort_of(federation, linear(8)).at(0)
    models = ct.MomentDescent(**settings)(2, 0.1, cohort.task, cohort, Key.of(4))
    assert distance(models, truth) < 0.5 * separation(truth)


def test_noise_hides_the_anchors_models(monkeypatch):
    federation = ct.data.mixed_regression(k=2, d=4, seed=0, anchors=5, anchor_rows=60, pairs=60, rest=0)
    cohort, sent = cohort_of(federation, linear(4)).at(0), []
    combine = type(cohort).combine

    def noted(self, step, shared, **more):
        sent.append(shared)
        return combine(self, step, shared, **more)

    monkeypatch.setattr(type(cohort), "combine", noted)
    list(ct.MomentDescent(noise=0.5, reuse=True, rounds=1, ell=8).descent(2, cohort.task, cohort, Key.of(0)))
    copies = sent[-1]
    assert copies["theta"].shape[0] == len(federation) - 5  # each client is sent its own
    both = torch.cat([copies["theta"], copies["theta~"]])  # around θ_0 = 0
    assert both.flatten(1).unique(dim=0).shape[0] == len(both)
    assert abs(float(both.std()) - 0.5) < 0.05


def test_features_of_any_scale_and_any_map():
    made = ct.data.mixed_regression(k=2, d=5, seed=1)
    scaled = made.map(lambda i, x, y: (x * torch.tensor([100.0, 0.01, 1.0, 3.0, 10.0]), y))
    tasks = {
        "identity": (linear(5), made),
        "scaled": (linear(5), scaled),
        "function": (ct.Task.regressor(ct.models.Linear(5, 1, phi=lambda x: x.flip(1))), made),
        "polynomial": (ct.Task.regressor(ct.models.Polynomial(5, degree=1)), made),
    }
    for name, (task, federation) in tasks.items():
        start = ct.MomentDescent(rounds=4)
        run = ct.fit(ct.IFCA(k=2, init=start, lr=1e-9, tau=1), task, federation, rounds=1, evaluations=1)
        assert run.ari > 0.5, name


def test_a_polynomial_is_learnt():
    g = torch.Generator().manual_seed(0)
    truth = torch.tensor([[1.0, -1.0, 0.0, 2.0, 0.0, 0.5], [-1.0, 1.0, 1.0, 0.0, 0.0, -0.5]])
    clients = []
    for i in range(3000):
        x = torch.randn(200 if i < 20 else 2, 2, generator=g)
        a, b = x.T
        phi = torch.stack([a, b, a * a, a * b, b * b, torch.ones(len(x))], 1)
        clients.append((x, phi @ truth[i % 2] + 0.1 * torch.randn(len(x), generator=g)))
    federation = Federation.from_clients(clients, groups=[i % 2 for i in range(3000)])
    task = ct.Task.regressor(ct.models.Polynomial(2, degree=2))
    run = ct.fit(
        ct.MixedRegression(k=2, init=ct.MomentDescent(reuse=True)), task, federation, rounds=150, evaluations=1
    )
    assert run.ari > 0.8
    assert distance(run.models, truth) < 0.3


def test_fedprox_solves_its_local_problem():
    g = torch.Generator().manual_seed(0)
    for n in (3, 9):
        phi, y, theta = torch.randn(n, 5, generator=g), torch.randn(n, generator=g), torch.randn(5, generator=g)
        end = (theta - proximal(phi, phi @ theta - y, torch.tensor(0.7 / n))).requires_grad_()
        local = (y - phi @ end).square().sum() / (2 * n) + (end - theta).square().sum() / (2 * 0.7)
        assert torch.autograd.grad(local, end)[0].abs().max() < 1e-5


@pytest.mark.parametrize("refine", ["fedavg", "fedprox"])
def test_a_round_is_that_of_lemma_1(refine, regression):
    _, federation = regression
    task, theta = (
        linear(4),
        [{"weight": t[None]} for t in torch.randn(3, 4, generator=torch.Generator().manual_seed(1))],
    )
    eta, s, n_all = 0.02, 4, len(federation.train.x)
    algorithm = ct.FedX(k=3, lr=eta / 2, tau=s, refine=refine, normalise="all", init=theta)
    cohort = cohort_of(federation, task)
    state = algorithm.start(task, cohort.at(0), Key.of(0))
    after, _ = algorithm.round(state, cohort.at(0))
    for j in range(3):
        expected = theta[j]["weight"][0].clone()
        for i in (after.labels == j).nonzero().flatten().tolist():
            x, y = federation.train.client(i)
            gram = x @ x.T / len(x)
            if refine == "fedavg":
                p = sum(torch.linalg.matrix_power(torch.eye(len(x)) - eta * gram, q) for q in range(s))
            else:
                p = torch.linalg.inv(torch.eye(len(x)) + eta * gram)
            expected -= eta * x.T @ p @ (x @ theta[j]["weight"][0] - y) / n_all  # eq. (11)
        assert torch.allclose(after.theta["weight"][j, 0], expected, atol=1e-5)


def test_soft_labels_that_are_sure_are_hard_ones(regression):
    task, federation = regression
    cohort = cohort_of(federation, task)
    runs = []
    for settings in ({}, {"soft": True, "temperature": 1e-9}):
        algorithm = ct.FedX(k=3, init="random", **settings)
        state = algorithm.start(task, cohort.at(0), Key.of(0))
        for t in range(3):
            state, _ = algorithm.round(state, cohort.at(t))
        runs.append(state)
    assert torch.equal(runs[0].labels, runs[1].labels)
    assert torch.allclose(flat(runs[0].theta), flat(runs[1].theta), atol=1e-5)


def test_soft_labels_estimate_the_noise():
    federation = ct.data.mixed_regression(k=2, d=5, sigma=0.3, seed=0)
    run = ct.fit(ct.MixedRegression(k=2, soft=True), linear(5), federation, rounds=40, evaluations=1)
    assert abs((run.state.temperature / 2) ** 0.5 - 0.3) < 0.02
    assert distance(run.models, ct.data.regression_truth(2, 5)) < 0.05


def few_regressions(**settings):
    """Clients of five to forty rows in three regressions of eight features."""
    return ct.data.mixed_regression(3, 8, pairs=0, anchors=0, rest=60, rest_rows=(5, 20, 40), seed=1, **settings)


def after_a_round(algorithm, federation, executor="vectorised", bias=True):
    cohort = cohort_of(federation, linear(federation.train.x.shape[1], bias), executor)
    state = algorithm.start(cohort.task, cohort.at(0), Key.of(0))
    return algorithm.round(state, cohort.at(0))[0]


def fitted(federation, labels, j):
    """Least squares on the rows of the clients with one label, in double precision."""
    train = federation.train
    own = (labels == j).repeat_interleave(train.sizes)
    return torch.linalg.lstsq(train.x[own].double(), train.y[own].double()).solution


@every_executor
@pytest.mark.parametrize("refine", ["least_squares", "conjugate"])
def test_a_round_is_least_squares_in_every_cluster(executor, refine):
    """Whatever the features' scales; conjugate gradients need as many steps as there are parameters."""
    scales = torch.tensor([100.0, 0.01, 1.0, 3.0, 10.0, 1.0, 1.0, 0.1])
    federation = few_regressions(toeplitz=0.8).map(lambda i, x, y: (x * scales, y))
    near = (ct.data.regression_truth(3, 8, seed=1) + 0.1) / scales
    algorithm = ct.FedX(3, refine=refine, tau=9, init=[{"weight": t[None]} for t in near])
    after = after_a_round(algorithm, federation, executor, bias=False)
    for j in range(3):
        expected = fitted(federation, after.labels, j)
        assert torch.allclose(flat(after.theta)[j].double() * scales, expected * scales, rtol=1e-3, atol=1e-4)


def test_soft_labels_weigh_rows_in_least_squares():
    federation = few_regressions()
    start = [{"weight": t[None]} for t in torch.randn(3, 8, generator=torch.Generator().manual_seed(0))]
    after = after_a_round(ct.FedX(3, soft=True, temperature=5.0, init=start), federation, bias=False)
    total, pull = torch.zeros(3, 8, 8).double(), torch.zeros(3, 8).double()
    for i in range(len(federation)):
        x, y = (v.double() for v in federation.train.client(i))
        losses = torch.stack([(y - x @ t["weight"][0].double()).square().sum() for t in start])
        for j, share in enumerate((-losses / 5.0).softmax(0)):
            total[j] += share * x.T @ x
            pull[j] += share * x.T @ y
    assert torch.allclose(flat(after.theta).double(), torch.linalg.solve(total, pull), atol=1e-4)


def test_a_cluster_with_few_rows_changes_only_where_it_has_rows():
    federation = Federation.from_clients([(torch.eye(3)[:2], torch.tensor([5.0, 6.0]))] * 2)
    after = after_a_round(ct.FedX(1, init=[{"weight": torch.tensor([[1.0, 2.0, 3.0]])}]), federation, bias=False)
    assert after.theta["weight"].flatten().tolist() == pytest.approx([5.0, 6.0, 3.0])


def test_a_run_ends_when_least_squares_no_longer_move_models():
    run = ct.fit(ct.FedX(3), linear(8), few_regressions(toeplitz=0.8, dof=5.0), rounds=50, evaluations=1)
    assert 1 < len(run.history) < 20 and run.history[-1]["changed"] == 0 and not run.warnings


def test_samples_of_the_clients_add_up():
    """Each round has a fifth of the clients, but the models are about as good as with all of them."""
    federation, truth = few_regressions(), ct.data.regression_truth(3, 8, seed=1)
    run = ct.fit(ct.FedX(3, fraction=0.2), linear(8, bias=False), federation, rounds=40, evaluations=1)
    oracle = max(float((fitted(federation, federation.groups, j) - truth[j]).norm()) for j in range(3))
    assert len(run.history) == 40 and distance(run.models, truth) < 1.5 * oracle


def test_how_models_are_refined_is_settled_and_said(regression, task, ragged, caplog, monkeypatch):
    caplog.set_level("INFO", logger="coterie")
    refined = {}
    for name, own, federation in (("linear", *regression), ("other", task, ragged)):
        refined[name] = ct.fit(ct.FedX(3, lr=0.05, init="random"), own, federation, rounds=1).state.refine
    monkeypatch.setattr("coterie.methods.fedx.LARGEST", 4)
    refined["large"] = ct.fit(ct.FedX(3, init="random"), *regression, rounds=1).state.refine
    refined["soft"] = ct.fit(ct.FedX(3, init="random", soft=True), *regression, rounds=1).state.refine
    assert refined == {"linear": "least_squares", "other": "fedavg", "large": "conjugate", "soft": "fedavg"}
    assert "refine=least_squares: 30 numbers up per client and round" in caplog.text
    assert "refine=conjugate: 60 numbers up per client and round, in 11 exchanges" in caplog.text


def test_least_squares_are_refused_where_there_are_none(regression, task, ragged):
    with pytest.raises(ValueError, match="FedX: refine='least_squares': the task must be a regression"):
        ct.fit(ct.FedX(3, refine="least_squares", lr=0.1), task, ragged, rounds=1)
    with pytest.raises(ValueError, match="refine='conjugate' takes hard labels only, got soft=True"):
        ct.fit(ct.FedX(3, refine="conjugate", soft=True), *regression, rounds=1)


def test_a_run_says_that_models_still_move():
    federation = few_regressions(toeplitz=0.9, dof=5.0)
    run = ct.fit(ct.FedX(3, refine="fedavg"), linear(8), federation, rounds=5, evaluations=1)
    assert any("models still moved by" in warning for warning in run.warnings)


@pytest.mark.parametrize("more", [{"toeplitz": 0.8}, {"dof": 5.0}, {"toeplitz": 0.8, "dof": 5.0, "p": (0.6, 0.3, 0.1)}])
def test_features_that_are_correlated_or_heavy_tailed(more):
    """Gradient steps end twenty times further from the truth than the oracle."""
    federation, truth = ct.data.mixed_regression(3, 10, seed=0, **more), ct.data.regression_truth(3, 10)
    run = ct.fit(ct.MixedRegression(k=3), linear(10, bias=False), federation, rounds=30, evaluations=1)
    oracle = max(float((fitted(federation, federation.groups, j) - truth[j]).norm()) for j in range(3))
    assert distance(run.models, truth) < 1.5 * oracle


def test_step_size_is_below_the_limit(regression):
    task, federation = regression
    algorithm = ct.FedX(k=3, init="random")
    lr = algorithm.start(task, cohort_of(federation, task).at(0), Key.of(0)).lr
    rows = [torch.nn.functional.pad(federation.train.client(i)[0], (0, 1), value=1) for i in range(len(federation))]
    worst = max(float(torch.linalg.matrix_norm(x, 2)) ** 2 / len(x) for x in rows)
    assert lr == pytest.approx(0.9 / worst / 2, rel=1e-4)


def test_kmeans_finds_well_separated_centres():
    g = torch.Generator().manual_seed(0)
    centres = 10 * torch.randn(4, 3, generator=g)
    points = (centres.repeat(5, 1) + 0.1 * torch.randn(20, 3, generator=g)).double()
    apart = torch.cdist(kmeans(points, 4), centres.double())
    assert apart.amin(0).max() < 0.3 and sorted(apart.argmin(1).tolist()) == [0, 1, 2, 3]


def fails(federation, message, task=None, **settings):
    task = task or linear(4)
    cohort = cohort_of(federation, task).at(0)
    with pytest.raises(ValueError, match=message):
        list(ct.MomentDescent(**settings).descent(2, task, cohort, Key.of(0)))


def test_bad_input_is_named():
    few = ct.data.mixed_regression(k=2, d=4, seed=0, anchors=3, anchor_rows=30, pairs=50, rest=0)
    fails(
        few,
        r"needs 144 rows .* but 0 of 53 clients have so many \(the largest has 30\); with reuse=True it needs 24",
        reuse=False,
        ell=12,
    )
    fails(few, "an anchor client needs 40 rows .* ell=15 would do", ell=20)
    fails(few.select(range(3, 53)), "needs 12 rows .*; IFCA with restarts needs no anchors")
    fresh = {"ell": 2, "reuse": False}
    fails(few, r"6 iterations need about 1728 clients .* 288 each, but there are 50; reuse=True", **fresh)
    fails(few, "6 iterations need about 60 clients .* 10 each, but there are 50", clients=10, **fresh)
    fails(few, "merge='distance' needs delta", merge="distance")
    single = ct.data.mixed_regression(k=2, d=4, seed=0, anchors=3, anchor_rows=30, pairs=0, rest=5, rest_rows=(1,))
    fails(single, "no client besides the 3 anchors has two rows", ell=2, reuse=True)
    fails(few, "anchors must be at least k = 2, got 1", anchors=1)


@pytest.mark.parametrize(
    "settings, sizes, expected",
    [
        ({}, {"anchors": 20, "anchor_rows": 144}, (12, False)),  # enough for six iterations
        ({}, {"anchors": 20, "anchor_rows": 100}, (12, True)),
        ({}, {"anchors": 20, "anchor_rows": 16}, (8, True)),
        ({}, {"anchors": 20, "anchor_rows": 144, "pairs": 50}, (12, True)),  # too few other clients
        ({"reuse": False}, {"anchors": 20, "anchor_rows": 100}, (8, False)),
        ({"ell": 5}, {"anchors": 20, "anchor_rows": 100}, (5, False)),
        ({"reuse": True}, {"anchors": 20, "anchor_rows": 144}, (12, True)),
    ],
)
def test_what_clients_have_settles_ell_and_reuse(settings, sizes, expected):
    federation = ct.data.mixed_regression(k=2, d=4, seed=0, rest=0, **sizes)
    cohort = cohort_of(federation, linear(4)).at(0)
    list(ct.MomentDescent(**settings).descent(2, cohort.task, cohort, Key.of(0)))
    assert f"moment descent (ell={expected[0]}, reuse={expected[1]}): 11 anchors" in cohort.ledger.messages[0]


def anchors_at(theta, white=None):
    theta = torch.tensor(theta)
    d = theta.shape[1]
    nothing = torch.zeros(len(theta))
    return Anchors(theta, nothing, nothing, nothing, torch.eye(d).double() if white is None else white)


def test_merging_sees_models_as_the_features_do():
    """A feature of scale 0.01 hardly matters, though the models' errors are largest in it."""
    models = anchors_at(
        [[1.0, 30.0], [1.1, -30.0], [-1.0, 29.0], [-1.1, -28.0]], torch.diag(torch.tensor([1.0, 100.0])).double()
    )
    assert sorted(ct.MomentDescent().centres(models, 2)[:, 0].tolist()) == pytest.approx([-1.05, 1.05])


def test_printed_merging_says_how_many_groups_it_found():
    with pytest.raises(ValueError, match="form 3 groups, but k is 2; merge='lloyd' needs no delta"):
        ct.MomentDescent(merge="distance", delta=1.0).centres(anchors_at([[0.0], [0.1], [5.0], [9.0]]), 2)


def test_degenerate_features_are_named():
    made = ct.data.mixed_regression(k=2, d=4, seed=0, anchors=3, anchor_rows=30, pairs=50, rest=0)
    short = {"ell": 2, "reuse": True}
    constant = made.map(lambda i, x, y: (torch.cat([x[:, :3], torch.ones(len(x), 1)], 1), y))
    fails(constant, "features 3, 4 are collinear over 190 rows of 53 clients", linear(4, bias=True), **short)
    copied = made.map(lambda i, x, y: (torch.cat([x[:, :3], 2 * x[:, :1]], 1), y))
    fails(copied, "features 0, 3 are collinear", **short)
    nothing = made.map(lambda i, x, y: (x * torch.tensor([1.0, 0.0, 1.0, 1.0]), y))
    fails(nothing, "feature 1 is zero", **short)


def test_only_regressions_that_are_linear_in_their_parameters(task, ragged):
    fails(ragged, "must be a regression with one output", task)
    made = ct.data.mixed_regression(k=2, d=4, seed=0, anchors=3, anchor_rows=30, pairs=50, rest=0)
    fails(made, "whose model is linear in its parameters", ct.Task.regressor(ct.models.MLP(4, 3, 1)))
    with pytest.raises(ValueError, match="FedX: where no lr is given: the task must be"):
        ct.fit(ct.FedX(k=2), task, ragged, rounds=1)
    with pytest.raises(ValueError, match="MixedRegression: k must be at most the number of clients, 53, got 60"):
        ct.fit(ct.MixedRegression(k=60), linear(4), made, rounds=1)


def test_a_target_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="client 1: 1 of its 2 train rows have a value of y that is NaN"):
        Federation.from_clients([(torch.ones(2, 3), torch.ones(2)), (torch.ones(2, 3), torch.tensor([1.0, torch.nan]))])


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"k": 0}, "k must be at least 1, got 0"),
        ({"sigma": -1.0}, "sigma must be at least 0"),
        ({"p": (0.5,)}, "p must be 3 numbers above 0"),
        ({"spread": (2.0, 1.0)}, "spread must be"),
        ({"tail": 0.0}, "tail must be above 0"),
        ({"rest_rows": (0,)}, "rest_rows must be"),
        ({"toeplitz": 1.0}, "toeplitz must be between -1 and 1, got 1.0"),
        ({"toeplitz": 0.5, "spread": (0.5, 1.0)}, "spread or toeplitz, not both"),
        ({"dof": 2.0}, "dof must be above 2, got 2.0"),
        ({"pairs": -5}, "there cannot be -5 clients of 2 rows each"),
        ({"anchors": 0, "pairs": 0, "rest": 0}, "at least one client"),
    ],
)
def test_bad_data_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        ct.data.mixed_regression(**settings)


def test_the_data_are_what_they_say():
    settings = {"k": 2, "d": 6, "seed": 5, "sigma": 0.5, "anchors": 30, "anchor_rows": 240, "pairs": 4000, "rest": 500}
    made = ct.data.mixed_regression(**settings, p=(0.8, 0.2), spread=(0.5, 3.0), tail=1.0)
    assert abs(float((made.groups == 0).float().mean()) - 0.8) < 0.03
    sizes = made.train.sizes
    assert int(sizes.min()) == 1 and int(sizes.max()) == 240 and bool((sizes.diff() <= 0).all())
    of, truth = made.groups.repeat_interleave(sizes), ct.data.regression_truth(2, 6, seed=5)
    off = made.train.y - (made.train.x * truth[of]).sum(1)
    assert abs(float(off.std()) - 0.5) < 0.02
    for j in range(2):
        values = torch.linalg.eigvalsh(torch.cov(made.train.x[of == j].T))
        assert float(values[0]) > 0.4 and float(values[-1]) < 3.4 and float(values[-1] - values[0]) > 0.5


def test_features_are_correlated_and_heavy_tailed_as_they_say():
    made = ct.data.mixed_regression(2, 4, seed=5, pairs=20000, rest=0, toeplitz=0.8, dof=5.0).train.x
    normal = ct.data.mixed_regression(2, 4, seed=5, pairs=20000, rest=0, toeplitz=0.8).train.x
    at = torch.arange(4.0)
    expected = 0.8 ** (at[:, None] - at).abs()
    assert torch.allclose(torch.cov(normal.T), expected, atol=0.03)
    assert torch.allclose(torch.cov(made.T), expected, atol=0.06)
    stretch = made / normal
    assert torch.allclose(stretch, stretch[:, :1].expand_as(stretch), rtol=1e-3)  # one factor for each row
    # The fourth moment of t with 5 degrees of freedom is barely finite; quantiles are not at its mercy.
    far = float((made[:, 0].abs() > 3).float().mean())
    assert 0.010 < far < 0.014  # P(|t| > 3·√(5/3)) = 0.0117; of a normal one 0.0027


def test_large_clients_may_fill_an_iteration_alone():
    federation = ct.data.mixed_regression(k=2, d=4, seed=0, anchors=60, anchor_rows=1500, pairs=50, rest=0)
    run = ct.fit(ct.MixedRegression(k=2), linear(4), federation, rounds=30, evaluations=1)
    assert run.ari > 0.9


def test_targets_of_any_scale():
    made = ct.data.mixed_regression(k=2, d=5, seed=1)
    for scale in (1e-8, 1e9):
        scaled = made.map(lambda i, x, y, scale=scale: (x, y * scale))
        cohort = cohort_of(scaled, linear(5)).at(0)
        models = ct.MomentDescent(rounds=5)(2, 0.1, cohort.task, cohort, Key.of(0))
        truth = scale * ct.data.regression_truth(2, 5, seed=1)
        assert distance(models, truth) < 0.5 * separation(truth)


def test_fedprox_takes_models_that_are_not_linear(regression):
    _, federation = regression
    task = ct.Task.regressor(ct.models.MLP(4, 8, 1))
    algorithm = ct.FedX(k=1, refine="fedprox", lr=0.05, tau=20, init="random")
    run = ct.fit(algorithm, task, federation, rounds=20, evaluations=1)
    assert run.history[-1]["loss"] < 0.7 * run.history[0]["loss"]


def test_soft_labels_do_not_overshoot():
    federation = ct.data.mixed_regression(k=8, d=3, sigma=4.0, seed=0, anchors=0, pairs=0, rest=400, rest_rows=(12,))
    run = ct.fit(ct.FedX(k=8, soft=True, init="random"), linear(3), federation, rounds=40, evaluations=1)
    loss = [row["loss"] for row in run.history]
    assert loss[-1] < 16 and max(loss[5:]) < 1.05 * loss[5]


def test_ifca_may_start_from_moment_descent():
    federation = ct.data.mixed_regression(k=2, d=5, seed=0)
    run = ct.fit(ct.IFCA(k=2, init="moment_descent", lr=0.02), linear(5), federation, rounds=5, evaluations=1)
    assert run.ari > 0.8


def test_rows_of_padding_change_nothing():
    """A step sees the same with padding as without."""
    x, y = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([1.0, -1.0, 2.0])
    padded = Data(torch.cat([x, x[-1:]]), torch.cat([y, y[-1:]]), torch.tensor([1.0, 1.0, 1.0, 0.0]))
    plain, theta = Data(x, y, torch.ones(3)), torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
    step = ct.MomentDescent().pool(linear(4)).run
    one, two = (step({"theta": theta}, Local(d, (), ())) for d in (plain, padded))
    assert torch.allclose(one.update.product(), two.update.product(), atol=1e-5) and one.weight == two.weight
