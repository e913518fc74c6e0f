"""A diagnosis against the truth that the data were made from."""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import coterie as ct
from coterie.cli.main import app
from coterie.data.regression import regression_truth
from coterie.engines import ENGINES
from coterie.runs import diagnosis
from coterie.runs.held_out_support import Gain, HeldOut
from coterie.runs.metrics import matched_accuracy
from coterie.runs.support import Judged, Support, support
from coterie.runs.verdict import judged_by_losses
from coterie_lab.reproduce import experiments
from coterie_lab.reproduce.diagnoses import cell, simulated

SIGMAS = (0.1, 0.5, 1.0, 2.0)


def mixture(k=2, d=5, sigma=0.5, seed=1, **more):
    settings = {"pairs": 300, "rest": 300, "anchors": 20, "anchor_rows": 60} | more
    return ct.data.mixed_regression(k=k, d=d, sigma=sigma, seed=seed, **settings)


def linear(d, **more):
    return ct.Task.regressor(ct.models.Linear(d, 1, **more))


def fitted(federation, k=2, d=5, **more):
    return ct.fit(ct.FedX(k=k, **more), linear(d), federation, rounds=30, evaluations=1)


def figures(federation, run):
    """A diagnosis whose search for groups asks a few clients only: for tests of the paper's figures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            diagnosis, "support", lambda cohort, theta, share, further: support(cohort.only(range(30)), theta, share)
        )
        return ct.diagnose(federation, run)


@pytest.fixture(scope="module", params=SIGMAS)
def case(request):
    federation = mixture(sigma=request.param)
    run = fitted(federation)
    return request.param, federation, run, figures(federation, run)


def test_figures_against_the_truth(case):
    sigma, federation, _, found = case
    groups, sizes = federation.groups.numpy(), federation.train.sizes.double()
    assert found["σ"] == pytest.approx(sigma, rel=0.03)
    assert found["Δ"] == pytest.approx(float(torch.pdist(regression_truth(2, 5, seed=1))), rel=0.05)
    assert found["Δ/σ"] == pytest.approx(found["Δ"] / found["σ"])
    assert found["p_min"] == pytest.approx(np.bincount(groups).min() / len(groups), abs=0.03)
    assert found["ρ"] == pytest.approx(np.bincount(groups, sizes).min() / float(sizes.sum()), abs=0.03)


def test_as_many_are_mislabelled_as_predicted(case):
    _, federation, run, found = case
    wrong = 1 - matched_accuracy(run.labels, federation.groups.numpy())
    assert found["mislabelled clients"] == pytest.approx(wrong, abs=0.02)
    assert found["mislabelled rows"] < found["mislabelled clients"]
    shares = list(found.by_rows.values())
    assert list(found.by_rows) == [(2, 2), (5, 5), (20, 20), (60, 60)] and shares == sorted(shares, reverse=True)


@pytest.mark.parametrize(("sigma", "within"), [(0.1, 0.02), (1.0, 0.03), (2.0, 0.06)])
def test_three_models_are_predicted_nearly_as_well(sigma, within):
    federation = mixture(k=3, d=8, sigma=sigma, pairs=600)
    run = fitted(federation, 3, 8)
    wrong = 1 - matched_accuracy(run.labels, federation.groups.numpy())
    assert figures(federation, run)["mislabelled clients"] == pytest.approx(wrong, abs=within)


def test_a_hard_choice_does_not_flatter_the_figures():
    # the run's own models lie half as far apart again as the true ones
    federation = mixture(sigma=2.0, pairs=600, rest=0, anchors=0)
    run = ct.fit(ct.FedX(k=2), linear(5, bias=False), federation, rounds=30, evaluations=1)
    own = torch.stack([m["weight"].flatten() for m in run.models])
    truth = float(torch.pdist(regression_truth(2, 5, seed=1)))
    assert float(torch.pdist(own)) > 1.4 * truth
    found = figures(federation, run)
    assert found["Δ"] == pytest.approx(truth, rel=0.1) and found["σ"] == pytest.approx(2.0, rel=0.05)


def test_the_verdict_on_good_and_on_hopeless_data():
    sizes = {"pairs": 60, "rest": 60, "anchors": 5}
    good = ct.diagnose(federation := mixture(sigma=0.1, **sizes), fitted(federation))
    assert good.supported and good.groups == 2 and good.verdict.endswith("The data support 2 groups.")
    assert "2 groups against one that varies: Δ BIC = " in good.verdict
    hopeless = ct.diagnose(federation := mixture(sigma=3.0, **sizes | {"rest": 0}), fitted(federation))
    assert not hopeless.supported and hopeless.groups == 1
    assert "over 20% of the clients would be mislabelled, and models 0 and 1 are the closest" in hopeless.verdict
    assert "The bound ν exceeds 1 with its constants set to 1, and says nothing." in hopeless.verdict


@pytest.mark.parametrize(("clients", "rows", "d"), [(60, 2, 10), (100, 20, 5)])
def test_two_groups_are_not_found_in_one(clients, rows, d):
    federation = mixture(k=1, d=d, sigma=0.3, pairs=0, anchors=0, rest=clients, rest_rows=(rows,))
    found = ct.diagnose(federation, fitted(federation, d=d))
    assert found["evidence"] < 0 and not found.supported and found.groups == 1
    assert "fewer groups, in which clients vary, explain them as well" in found.verdict
    assert found.verdict.endswith("They support 1 group, in which all clients may have the same model.")


# --- groups, or clients that vary ------------------------------------------------------------------------------------

USUAL = experiments()["diagnose"]["usual"] | {"clients": [40, 40], "d": [3, 3], "rows": [15, 20]}


@pytest.mark.parametrize(
    ("kind", "k"),
    [
        ({"groups": 3}, 2),
        ({"groups": 3, "within": 0.1}, 3),
        ({"groups": 3}, 4),
        ({"groups": 2, "outliers": 1}, 3),
        ({"groups": 2, "differ": "intercept", "modes": 2.0}, 2),
        ({"groups": 2, "differ": "one coefficient", "correlation": 0.8, "noises": [1.0, 3.0]}, 2),
        ({"intercept": 0.5}, 2),
        ({"within": 2.0}, 2),
        ({"line": 1.0}, 2),
        ({"skew": 0.5}, 2),
        ({"two_piece": 0.5}, 2),
        ({"disc": 2.0}, 2),
        ({"within": 1.0, "tails": 3.0}, 2),
        ({"noise_by_client": 1.0}, 2),
        ({"dof": 3.0}, 2),
        ({"outliers": 1}, 2),
    ],
    ids=str,
)
def test_groups_are_told_from_clients_that_vary(kind, k):
    found = cell(USUAL | {"name": "test"} | kind, k, 0)
    assert found["right"] and found["groups"] == kind.get("groups", 1)


@pytest.mark.parametrize(
    ("kind", "ending"),
    [
        ({}, "The data support 1 group, in which all clients may have the same model."),
        ({"within": 2.0}, "The data support 1 group, in which clients merely vary."),
        ({"groups": 2}, "The data support 1 group, and more: they support 2."),
    ],
    ids=str,
)
def test_one_group(kind, ending):
    federation = simulated(USUAL | {"name": "test"} | kind, 0)
    found = ct.diagnose(federation, fitted(federation, 1, 3))
    assert found.supported and found.verdict.endswith(ending)
    with pytest.raises(KeyError, match="no figure 'evidence'"):
        found["evidence"]


NO, OPEN, YES = False, None, True


@pytest.mark.parametrize(
    ("ahead", "valley", "members", "expected"),
    [
        (5.1, 4.1, (20, 20, 2), YES),
        (5.1, 3.9, (20, 20, 2), OPEN),
        (4.9, 4.1, (20, 20, 2), OPEN),
        (4.9, 3.9, (20, 20, 2), OPEN),
        (50.0, 0.9, (20, 20, 2), NO),
        (-0.1, 50.0, (20, 20, 2), NO),
        (50.0, 2.0, (20, 21, 1), NO),
    ],
)
def test_no_verdict_between_the_bounds(ahead, valley, members, expected):
    groups = Judged(None, ahead, torch.tensor(members), valley)
    found = Support({}, {3: groups}, 0.0)
    assert found.supports(3) is expected
    assert found.supports(1) is True and found.supports(4) is False
    assert found.groups == (None if groups.supported is OPEN else 3 if expected else 1)


CONFLICT = "BIC prefers 3 groups (Δ BIC = 18), but between two of them the valley is only 2.1 nats."


@pytest.mark.parametrize(
    ("k", "supported", "words"),
    [
        (2, True, f"The data support 2 groups. Whether they support 3 groups is open: {CONFLICT}"),
        (3, None, f"No verdict on 3 groups: {CONFLICT} They support 2 groups."),
        (4, False, f"They support 2 groups. Whether they support 3 groups is open: {CONFLICT}"),
    ],
)
def test_the_verdict_says_which_figures_leave_it_open(k, supported, words):
    kind = {"name": "3 groups, spread .3, 40", "groups": 3, "within": 0.3, "clients": [40, 40]}
    federation = simulated(experiments()["diagnose"]["usual"] | kind, 1)
    found = ct.diagnose(federation, fitted(federation, k, federation.train.x.shape[1]))
    assert found.supported is supported and found.groups is None
    assert found.verdict.replace("Δ BIC = 17)", "Δ BIC = 18)").endswith(words)  # starts differ a little
    assert (found["groups"], found["groups, perhaps"]) == (2, 3)


def test_features_of_any_scale_and_dependent_ones():
    federation = simulated(USUAL | {"name": "test", "groups": 2}, 0)

    def changed(i, x, y):
        return torch.cat([x * torch.tensor([1e-3, 1.0, 1e3]), x[:, :1]], 1), y

    found = ct.diagnose(clients := federation.map(changed), fitted(clients, 2, 4))
    assert found.supported and found.groups == 2


def classified(k, **kind):
    federation = simulated(USUAL | {"name": "test", "classes": 3} | kind, 0)
    task = ct.Task.classifier(ct.models.Linear(3, 3))
    return federation, ct.fit(ct.IFCA(k=k, lr=0.5), task, federation, rounds=15, evaluations=1)


@pytest.mark.parametrize(("groups", "k"), [(1, 2), (2, 2), (2, 3)])
@pytest.mark.filterwarnings("ignore")
def test_classifiers_are_judged_by_held_out_rows(groups, k):
    federation, run = classified(k, groups=groups, noise=0.2)
    found = ct.diagnose(federation, run)
    assert found.supported == (k <= groups) and found.groups is None and not found.by_rows
    assert (found["against a merge"] > 3 * found["± merge"]) == found.supported
    if found.supported:
        assert found.verdict.endswith(f"The data support {k} groups.")
    else:
        assert "serves their clients as well" in found.verdict


@pytest.mark.parametrize(
    ("merge", "one", "supported", "end"),
    [
        (0.04, 0.04, YES, "The data support 3 groups."),
        (0.02, 0.04, OPEN, "one model for clusters 0 and 2 serves clients worse by 2.0 standard errors only."),
        (
            0.04,
            0.02,
            OPEN,
            "No verdict on 3 groups: one model for all serves clients worse by 2.0 standard errors only.",
        ),
        (0.005, 0.02, NO, "one model for clusters 0 and 2 serves their clients as well."),
    ],
)
def test_no_verdict_where_chance_may_be_the_reason(merge, one, supported, end):
    found = HeldOut(0.5, torch.tensor([20, 10, 10]), 40, (0, 2), Gain(merge, 0.01), Gain(one, 0.01))
    assert found.supported is supported and judged_by_losses(found).endswith(end)


def test_one_classifier_and_classifiers_without_test_rows():
    federation, run = classified(1)
    found = ct.diagnose(federation, run)
    assert found.supported and [f.name for f in found.figures] == ["loss", "p_min"]
    points = ct.Federation(federation.train, federation.test)
    with pytest.raises(ValueError, match="KFED groups points, not clients"):
        ct.diagnose(points, ct.fit(ct.KFED(2), None, points, rounds=1))
    bare = ct.Federation(federation.train)
    with pytest.raises(ValueError, match="judged by test rows, which the federation does not have"):
        ct.diagnose(bare, run)


# --- the paper's figures ---------------------------------------------------------------------------------------------


def by_hand(*sizes):
    """Two models, y = 2x and y = -2x, and clients of these sizes with x = 1 and noise of 1 or -1 by turns."""
    noise = [torch.tensor([1.0, -1.0] * n)[:n] for n in sizes]
    rows = [(torch.ones(n, 1), (2.0 if i % 2 else -2.0) + e) for i, (n, e) in enumerate(zip(sizes, noise, strict=True))]
    models = [{"weight": torch.tensor([[v]])} for v in (-2.0, 2.0)]
    federation = ct.Federation.from_clients(rows)
    return federation, lambda algorithm: ct.fit(algorithm(models), linear(1, bias=False), federation, rounds=1)


def test_figures_by_hand():
    federation, fit = by_hand(4, 4, 4, 20)
    found = ct.diagnose(federation, fit(lambda models: ct.FedX(2, lr=0.25, tau=3, refine="fedavg", init=models)))
    assert found["χ²(n)"] == pytest.approx(4 * (3 * 4**2 + 20**2) / 32**2 - 1)
    assert (found["p_min"], found["ρ"]) == (0.5, 8 / 32)
    assert found["Δ"] == pytest.approx(4, rel=1e-3)
    assert found["σ"] == pytest.approx((32 / 30) ** 0.5, rel=1e-3)
    # Φ(-√n Δ / 2σ): a client of 4 rows is 4/σ away from the other side
    normal = torch.distributions.Normal(0.0, 1.0)
    four, twenty = (float(normal.cdf(torch.tensor(-(n**0.5) * found["Δ"] / 2 / found["σ"]))) for n in (4, 20))
    assert found["mislabelled clients"] == pytest.approx((3 * four + twenty) / 4, rel=1e-2)
    assert found["mislabelled rows"] == pytest.approx((12 * four + 20 * twenty) / 32, rel=1e-2)
    assert found.by_rows == {
        (4, 4): pytest.approx(four, rel=1e-2),
        (20, 20): pytest.approx(0, abs=1e-9),
    }
    assert found["Σ n p_e / N"] == pytest.approx(8 * (12 * np.exp(-4) + 20 * np.exp(-20)) / 32)
    assert found["deviation"] == pytest.approx((2 * np.log(2) / 4 * (found["χ²(n)"] + 1)) ** 0.5)
    assert found["ν"] == pytest.approx(found["Σ n p_e / N"] + found["deviation"])
    assert found["ν log(e/ν)"] == pytest.approx(found["ν"] * np.log(np.e / found["ν"]))
    assert found["γ"] == pytest.approx(2 * 0.25 * 1)  # ‖φ‖²/n = 1
    assert found["κ"] == pytest.approx(3 * 0.5 / (1 - 0.5**3))
    assert found["ρ/κ"] == pytest.approx(found["ρ"] / found["κ"])


def test_kappa_of_fedprox_and_of_others():
    federation, fit = by_hand(4, 4, 4, 20)
    prox = ct.diagnose(federation, fit(lambda models: ct.FedX(2, lr=0.25, refine="fedprox", init=models)))
    assert prox["κ"] == pytest.approx(1.5)
    ifca = ct.diagnose(federation, fit(lambda models: ct.IFCA(2, lr=0.1, init=models)))
    assert ifca["Δ"] == pytest.approx(prox["Δ"], rel=1e-3)
    with pytest.raises(KeyError, match="no figure 'κ'; there are Δ, σ"):
        ifca["κ"]


@pytest.fixture(scope="module")
def small():
    federation = mixture(d=2, pairs=0, rest=8, rest_rows=(6, 8), anchors=3, anchor_rows=10, sigma=0.2)
    run = ct.fit(ct.FedX(k=2), linear(2), federation, rounds=3, executor="sequential")
    return federation, ct.diagnose(federation, run)


@pytest.mark.parametrize("executor", [name for name in ENGINES if name != "sequential"])
def test_executors_agree_and_nothing_is_charged(executor, small):
    federation, reference = small
    run = ct.fit(ct.FedX(k=2), linear(2), federation, rounds=3, executor=executor)
    spent = run._cohort.ledger.bytes_up
    found = ct.diagnose(federation, run)
    assert run._cohort.ledger.bytes_up == spent
    assert [f.value for f in found.figures] == pytest.approx([f.value for f in reference.figures], rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("algorithm", [ct.IFCA(k=2), ct.MixedRegression(k=2, init="random"), ct.CFL(max_age=3)])
def test_other_methods_and_other_clients_of_the_same_kind(algorithm):
    federation, others = (mixture(pairs=0, rest=m, rest_rows=(20,), anchors=0, sigma=0.3) for m in (40, 60))
    run = ct.fit(algorithm, linear(5), federation, rounds=30, evaluations=1)
    assert len(run.models) == 2
    for clients in (federation, others):
        found = ct.diagnose(clients, run)
        assert found.supported and found["σ"] == pytest.approx(0.3, rel=0.1)


def test_a_cluster_that_nobody_chooses():
    federation = mixture(pairs=60, rest=60, anchors=4)
    start = [{"weight": torch.full((1, 5), v), "bias": torch.zeros(1)} for v in (0.1, -0.1, 1000.0)]
    found = ct.diagnose(federation, fitted(federation, 3, init=start))
    assert not found.supported and "no client chooses model 2" in found.verdict
    assert found["p_min"] == 0 and found["ρ"] == 0 and found["Δ"] < 10
    alone = [start[0], start[2]]
    assert "no client chooses model 1" in ct.diagnose(federation, fitted(federation, 2, init=alone)).verdict


def test_a_cluster_with_too_few_rows():
    rest = mixture(k=1, d=5, sigma=0.1, pairs=100, rest=0, anchors=0)
    rows = [rest.train.client(i) for i in range(100)]
    rows.append((rows[0][0], rows[0][1] + 50))
    federation = ct.Federation.from_clients(rows)
    weight = regression_truth(1, 5, seed=1)
    start = [{"weight": weight, "bias": torch.tensor([b])} for b in (0.0, 50.0)]
    found = ct.diagnose(federation, fitted(federation, init=start))
    assert "cluster 1 has fewer rows than a model has parameters, 6" in found.verdict


def test_rows_without_noise():
    federation = mixture(sigma=0.0, pairs=60, rest=60, anchors=4)
    found = ct.diagnose(federation, fitted(federation))
    assert found.supported and found["σ"] < 1e-3 and found["mislabelled clients"] < 1e-3


def test_it_says_what_it_cannot_diagnose():
    federation = mixture(pairs=20, rest=10, anchors=2)
    run = fitted(federation)
    with pytest.raises(ValueError, match="does not take rows of shape"):
        ct.diagnose(mixture(d=4), run)
    with pytest.raises(ValueError, match="there are 12 rows, too few for 2 models with 12 parameters together"):
        ct.diagnose(federation.select(range(26, 32)), run)
    curved = ct.Task.regressor(ct.models.MLP(5, 3, 1))
    with pytest.raises(ValueError, match="the model is no linear regression, so it is judged by test rows"):
        ct.diagnose(federation, ct.fit(ct.IFCA(k=2), curved, federation, rounds=1))


def test_it_prints_a_table_and_the_verdict():
    federation = mixture(pairs=30, rest=30, anchors=4)
    found = ct.diagnose(federation, fitted(federation))
    lines = str(found).splitlines()
    assert lines[0].split()[0] == "Δ" and lines[0].endswith("Section 3, after (1)")
    starts = {line.index(f.formula) for line, f in zip(lines, found.figures, strict=False) if f.formula}
    assert len(starts) == 1
    assert " ".join(lines[len(found.figures) + 1 :]) == found.verdict


def test_the_command_line(tmp_path):
    federation = mixture(pairs=10, rest=20, anchors=3)
    run = ct.fit(ct.FedX(k=2), linear(5), federation, rounds=5, out=tmp_path / "run")
    found = ct.diagnose(federation, run)
    told = json.loads(CliRunner().invoke(app, ["diagnose", str(tmp_path / "run"), "--json"]).stdout)
    assert (told["supported"], told["groups"]) == (found.supported, found.groups)
    assert {f["name"]: f["value"] for f in told["figures"]} == pytest.approx(
        {f.name: f.value for f in found.figures}, rel=1e-4
    )
    assert "mislabelled clients" in CliRunner().invoke(app, ["diagnose", str(tmp_path / "run")]).stdout
    ct.fit(ct.FedX(k=2), linear(5), federation.select(range(20)), rounds=5, out=tmp_path / "own")
    result = CliRunner().invoke(app, ["diagnose", str(tmp_path / "own")])
    assert "on data of its own" in str(result.exception)
