"""IFCA against cases worked by hand, and against what the paper says of it."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

import coterie as ct
from coterie.core.key import Key
from coterie.core.local import each_nearest, nearest
from coterie.core.task import Data
from coterie.engines import ENGINES, simulated
from coterie.methods.ifca import State
from coterie.parts.starts import Start
from coterie_lab.reproduce.rounds import last_state, states


@dataclass(frozen=True)
class Bernoulli(Start):
    """Every parameter 0 or 1, as in Section 6.1."""

    def __call__(self, k, lr, task, cohort, key):
        g = key.generator()
        return {n: (torch.rand((k, *x.shape), generator=g) < 0.5).float() for n, x in task.init(key).items()}


LINE = ct.Task.regressor(ct.models.Linear(1, 1, bias=False))


def line(*slopes, rows=1):
    """One client per slope, with rows (1, slope)."""
    return ct.Federation.from_clients([(torch.ones(rows, 1), torch.full((rows,), float(s))) for s in slopes])


def models(*values):
    return [{"weight": torch.tensor([[float(v)]])} for v in values]


def one_round(algorithm, federation, executor="vectorised"):
    cohort = simulated(federation, LINE, Key.of(0), executor=executor)
    state = algorithm.start(LINE, cohort.at(0), Key.of(0))
    after, report = algorithm.round(state, cohort.at(0))
    return after, report, cohort


def weights(state):
    return state.theta["weight"][0, :, 0, 0].tolist()


@pytest.mark.parametrize("executor", list(ENGINES))
def test_option_ii_by_hand(executor):
    # clients at 0, 1, 10; models at 0 and 9. One step of size 1/4 on (w - s)² moves w half of the way to s.
    after, report, _ = one_round(ct.IFCA(2, lr=0.25, tau=1, init=models(0, 9)), line(0, 1, 10), executor)
    assert after.labels.tolist() == [[0, 0, 1]]
    assert weights(after) == pytest.approx([(0 + 0.5) / 2, 9.5])
    assert report.loss.tolist() == pytest.approx([0, 1, 1])


@pytest.mark.parametrize("executor", list(ENGINES))
@pytest.mark.parametrize(("normalise", "first"), [("cluster", 0.25 * 2 / 2), ("all", 0.25 * 2 / 3)])
def test_option_i_by_hand(executor, normalise, first):
    # gradients 2(w - s) at the chosen models: 0 and -2 in cluster 0, -2 in cluster 1
    algorithm = ct.IFCA(2, lr=0.25, average="gradient", normalise=normalise, init=models(0, 9))
    after, _, _ = one_round(algorithm, line(0, 1, 10), executor)
    second = 9 + 0.25 * 2 / (1 if normalise == "cluster" else 3)
    assert weights(after) == pytest.approx([first, second])


def test_size_weights():
    federation = ct.Federation.from_clients([(torch.ones(n, 1), torch.full((n,), s)) for n, s in ((1, 0.0), (3, 4.0))])
    after, _, _ = one_round(ct.IFCA(1, lr=0.5, tau=1, weights="size", init=models(1)), federation)
    assert weights(after) == pytest.approx([(1 * 0 + 3 * 4) / 4])  # a step of 1/2 lands on the client's own slope


def test_an_empty_cluster_keeps_its_model():
    after, _, _ = one_round(ct.IFCA(2, lr=0.25, tau=1, init=models(0, 99)), line(0, 1))
    assert weights(after)[1] == 99 and after.empty.tolist() == [[0, 1]]


def test_revive_seeds_an_empty_cluster_from_the_client_served_worst():
    algorithm = ct.IFCA(2, lr=0.5, tau=1, revive=1, init=models(0, 999))
    after, _, _ = one_round(algorithm, line(0, 1, 8))
    assert weights(after)[1] == pytest.approx(8)  # one step of 1/2 fits the client at 8 exactly
    assert after.empty.tolist() == [[0, 0]]


def test_step_size_decay():
    algorithm = ct.IFCA(1, lr=0.25, decay=0.5, tau=1, init=models(0))
    found = [weights(s)[0] for s in states(algorithm, LINE, line(1), 2, 0, "cpu")]
    assert found == pytest.approx([0, 0.5, 0.5 + 2 * 0.125 * 0.5])


def test_shared_parameters_are_averaged_over_everybody_and_sent_once():
    task = ct.Task.regressor(ct.models.Linear(1, 1))
    start = [{"weight": torch.tensor([[w]]), "bias": torch.zeros(1)} for w in (0.0, 9.0)]
    federation = line(0, 1, 10)
    runs = {}
    for shared in ((), ("bias",)):
        cohort = simulated(federation, task, Key.of(0), executor="vectorised")
        algorithm = ct.IFCA(2, lr=0.1, tau=1, shared=shared, init=start)
        state, _ = algorithm.round(algorithm.start(task, cohort.at(0), Key.of(0)), cohort.at(0))
        runs[shared] = state.theta, cohort.ledger.bytes_down
    plain, down = runs[()]
    tied, less = runs[("bias",)]
    moves = [0.0, 0.2, 0.2]  # each client's step on b: 0.1 · 2(s - w)
    assert tied["bias"][0, :, 0].tolist() == pytest.approx([np.mean(moves)] * 2)
    assert torch.equal(tied["weight"], plain["weight"])
    assert down - less == 3 * 4  # one float less to each of three clients


def test_stable_identities_save_bytes_and_change_nothing():
    federation, task = ct.data.rotated_digits(16, seed=0), ct.Task.classifier(ct.models.MLP(64, 16, 10))
    plain = ct.fit(ct.IFCA(4), task, federation, rounds=24)
    patient = ct.fit(ct.IFCA(4, patience=4, recheck=5), task, federation, rounds=24)
    assert np.array_equal(plain.labels, patient.labels)
    assert plain.accuracy == pytest.approx(patient.accuracy, abs=1e-6)
    down = [row["bytes_down"] for row in patient.history]
    full, one = plain.history[-1]["bytes_down"], min(down)
    assert 3.5 < full / one <= 4.0
    settled = down.index(one)
    assert down[settled : settled + 5] == [one] * 4 + [full]  # all k models again at the re-check


def test_resampling_uses_disjoint_fresh_rows():
    step = ct.IFCA(2, resample=3).step(LINE)
    seen = []
    for t in range(3):
        rows = step.draw(12, Key.of(0), (t,))
        assert len(rows["choose"]) == len(rows["train"]) == 2
        seen += rows["choose"].tolist() + rows["train"].tolist()
    assert sorted(seen) == list(range(12))


def test_held_out_rows_are_never_trained_on():
    step = ct.IFCA(2, restarts=3, holdout=0.25, batch=2).step(LINE)
    for t in range(4):
        rows = step.draw(12, Key.of(0), (t,))
        assert len(rows["held"]) == 3
        assert not set(rows["held"].tolist()) & set(rows["batches"].flatten().tolist())


def test_restarts_side_by_side_equal_restarts_one_by_one():
    federation = ct.data.linear_mixture(12, 10, 5, seed=1)
    task = ct.Task.regressor(ct.models.Linear(5, 1, bias=False))
    both = last_state(ct.IFCA(2, restarts=3, holdout=0.0, init=Bernoulli()), task, federation, 5, 0, "cpu")

    class Alone(Bernoulli):
        def __call__(self, k, lr, task, cohort, key):
            return super().__call__(k, lr, task, cohort, Key.of(0).fold(0, r))

    for r in range(3):
        one = last_state(ct.IFCA(2, init=Alone()), task, federation, 5, 0, "cpu")
        assert torch.allclose(one.theta["weight"][0], both.theta["weight"][r], atol=1e-5)
        assert torch.equal(one.labels[0], both.labels[r])


def test_the_best_restart_is_kept_and_a_diverged_one_is_passed_over():
    algorithm = ct.IFCA(1, restarts=3, init="random")
    theta = {"weight": torch.tensor([1.0, 2.0, 3.0]).reshape(3, 1, 1, 1)}
    quality = torch.tensor([torch.inf, 0.5, 0.7])
    state = State(theta, torch.zeros(3, 1, dtype=torch.long), torch.ones(3, 1), quality, torch.zeros(3, 1), 0, 1)
    assert algorithm.models(state)["weight"].flatten().tolist() == [2.0]


def test_a_restart_that_diverges_leaves_the_others_alone():
    federation = ct.data.linear_mixture(8, 20, 4)
    task = ct.Task.regressor(ct.models.Linear(4, 1))

    class OneHuge(Bernoulli):
        def __call__(self, k, lr, task, cohort, key):
            theta = super().__call__(k, lr, task, cohort, key)
            return {n: x * (1e30 if key.path[-1] == 0 else 1.0) for n, x in theta.items()}

    for executor in ENGINES:
        run = ct.fit(
            ct.IFCA(2, lr=0.05, restarts=3, holdout=0.0, init=OneHuge()), task, federation, rounds=6, executor=executor
        )
        assert torch.isfinite(run.state.quality).tolist() == [False, True, True] and run.score < 10


def test_two_empty_clusters_are_revived_from_two_clients():
    algorithm = ct.IFCA(3, lr=0.5, tau=1, revive=1, init=models(0, 999, -999))
    after, _, _ = one_round(algorithm, line(0, 1, 8, 4))
    assert sorted(weights(after)[1:]) == pytest.approx([4, 8]) and after.still == 0


def test_resampling_ends_when_every_row_has_been_used():
    run = ct.fit(ct.IFCA(1, lr=0.1, resample=3), LINE, line(1, 2, rows=6), rounds=7)
    assert len(run.history) == 3


def test_farthest_first_takes_one_client_of_each_group():
    federation = line(0, 0, 0, 0, 0, 0, 5, 9)
    after, _, _ = one_round(ct.IFCA(3, lr=0.25, tau=1, init=ct.FarthestFirst(steps=30)), federation)
    assert sorted(weights(after)) == pytest.approx([0, 5, 9], abs=1e-3)


def test_farthest_first_does_not_take_models_of_a_handful_of_rows():
    slopes = (0.0, 0.0, 0.0, 5.0, 5.0, 5.0, 40.0)
    clients = [(torch.ones(n, 1), torch.full((n,), s)) for n, s in zip((9, 9, 9, 9, 9, 9, 1), slopes, strict=True)]
    algorithm = ct.IFCA(2, lr=0.25, tau=1, init=ct.FarthestFirst(steps=30))
    cohort = simulated(ct.Federation.from_clients(clients), LINE, Key.of(0), executor="vectorised")
    assert sorted(weights(algorithm.start(LINE, cohort.at(0), Key.of(0)))) == pytest.approx([0, 5], abs=1e-3)


def test_balanced_start_is_bounded_and_better_than_the_worst():
    federation = line(0, 0, 1, 1)
    after, _, _ = one_round(ct.IFCA(2, lr=0.01, tau=1, init=ct.Balanced(share=1.0, tries=30)), federation)
    assert torch.bincount(after.labels[0], minlength=2).tolist() == [2, 2]


def test_printed_normaliser_lets_models_die_and_cluster_size_does_not():
    """FACTS of the authors' setting at d = 100: divided by m the larger cluster wins everybody."""
    federation = ct.data.linear_mixture(80, 25, 100, 2, 0.25, 0.1, seed=0)
    task = ct.Task.regressor(ct.models.Linear(100, 1, bias=False))
    empties = {}
    for normalise, lr in (("all", 0.5), ("cluster", 0.25)):
        algorithm = ct.IFCA(
            2, average="gradient", normalise=normalise, lr=lr, restarts=6, holdout=0.0, init=Bernoulli()
        )
        state = last_state(algorithm, task, federation, 100, 0, "cpu")
        empties[normalise] = int((state.empty > 0).any(1).sum())
    assert empties["all"] > empties["cluster"] == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k": 0}, "IFCA: k must be at least 1, got 0"),
        ({"k": 4}, "IFCA: k must be at most the number of clients, 3, got 4"),
        ({"k": 2.5}, "IFCA: k must be a whole number, got 2.5"),
        ({"k": 2, "lr": float("nan")}, "IFCA: lr must be finite, got nan"),
        ({"k": 2, "average": "median"}, "IFCA: average must be 'model' or 'gradient', got 'median'"),
        ({"k": 2, "shared": ("head",)}, "IFCA: shared names 'head', but the model's parameters are weight"),
        ({"k": 2, "resample": 5}, "resample=5 needs at least 10 rows on every client, but client 0 has 1"),
        (
            {"k": 2, "resample": 1, "restarts": 2, "holdout": 0.5},
            "needs at least 2 rows on every client, but client 0 has 1",
        ),
        ({"k": 2, "init": "farthest"}, "got 'farthest'; did you mean 'farthest_first'?"),
        ({"k": 2, "init": models(1)}, "init: 2 models are wanted, one per cluster, got 1"),
        ({"k": 1, "init": [{"w": torch.zeros(1)}]}, "init: model 0 has parameters"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError) as error:
        ct.fit(ct.IFCA(**settings), LINE, line(0, 1, 10), rounds=1)
    assert message in str(error.value)


@pytest.mark.parametrize(("shared", "start"), [((), "Tournament"), (("weight",), "FarthestFirst")])
def test_the_default_start_is_a_tournament_unless_parameters_are_shared(shared, start):
    with pytest.raises(ValueError, match=f"secure sum: {start}.train"):
        ct.fit(ct.IFCA(2, shared=shared), LINE, line(0, 0, 5, 5, rows=5), rounds=1, secure=ct.SecureSum())


@pytest.mark.parametrize("executor", ["sequential", "vmap", "vectorised"])
@pytest.mark.parametrize("lost", [0, 1])
def test_nobody_chooses_a_model_whose_loss_is_nan(executor, lost):
    """For torch, NaN is less than any number."""
    task = ct.Task.classifier(ct.models.MLP(64, 16, 10))
    federation = ct.data.rotated_digits(8, seed=0)
    run = ct.fit(ct.IFCA(2, restarts=1), task, federation, rounds=1, executor=executor, device="cpu")
    spoilt = {n: x.clone().index_fill_(1, torch.tensor([lost]), torch.nan) for n, x in run.state.theta.items()}
    state = run.state._replace(theta=spoilt)
    x, y = federation.train.client(0)
    theta, rows = {n: x[0] for n, x in spoilt.items()}, Data(x, y, torch.ones(len(y)))
    label, loss = nearest(task, theta, rows)
    assert int(label) == run.algorithm.assign(state, task, rows) == 1 - lost and bool(torch.isfinite(loss))
    assert each_nearest(task, theta, rows).unique().tolist() == [1 - lost]
    assert set(run.algorithm.place(state, run._cohort.at(0)).tolist()) == {1 - lost}
    after, _ = run.algorithm.round(state, run._cohort.at(1))  # the choice that is fused with training
    assert set(after.labels[0].tolist()) == {1 - lost}
