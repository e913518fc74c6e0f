"""Quick versions of the experiments: that they run, and that they show what the full ones show."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

import coterie as ct
from coterie.data.source import folder
from coterie_lab.reproduce import diagnoses, drift, experiments, reproduce, robustness, sharing, stores, workers
from coterie_lab.reproduce.mixed_lm import mixed_lm
from coterie_lab.reproduce.table import HONEST


def needs(file, name):
    return pytest.mark.skipif(not (folder() / file).exists(), reason=f"{name} is not in the data folder")


needs_mnist = needs("mnist/train-images-idx3-ubyte.gz", "MNIST")
needs_cifar = needs("cifar-10-batches-bin/test_batch.bin", "CIFAR-10")
needs_cheese = needs("tables/cheese.csv.xz", "the table of cheese")
needs_femnist = needs("femnist", "FEMNIST")
needs_ag_news = needs("ag_news_csv/train.csv", "AG News")


def quick(name, tmp_path):
    result = reproduce(name, quick=True, out=tmp_path, device="cpu")
    written = json.loads((tmp_path / f"{name}.json").read_text())
    assert {"commit", "device", "seconds", "seeds", "rows", "title"} <= written.keys()
    assert (tmp_path / f"{name}.png").stat().st_size > 5_000
    return result


@pytest.fixture(autouse=True)
def tables_in_one_process(monkeypatch):
    """Other processes take seconds to begin."""
    monkeypatch.setattr(workers, "pool", lambda: ThreadPoolExecutor(1))


@pytest.fixture
def one_process(monkeypatch):
    """Other processes take seconds to begin."""
    for module in (diagnoses, drift, sharing, stores):
        monkeypatch.setattr(module, "pool", lambda: ThreadPoolExecutor(1))


def test_every_experiment_has_a_quick_version():
    assert experiments() and all("quick" in e and "title" in e for e in experiments().values())


def test_success_rises_with_separation_and_farthest_first_is_no_worse(tmp_path):
    rows = quick("ifca-fig2", tmp_path)["rows"]
    success = [r["success"] for r in rows]
    assert success == sorted(success) and success[-1] == 1.0
    assert all(r["success, farthest-first"] >= r["success"] for r in rows)


def test_the_error_halves_down_to_a_floor(tmp_path):
    result = quick("ifca-theorem1", tmp_path)
    assert result["slope"] == pytest.approx(-0.5, abs=0.15)
    assert result["rows"][-1]["factor a round"] == pytest.approx(0.5, abs=0.1)


def test_both_phases_find_the_models_and_end_near_the_oracle(tmp_path):
    rows = quick("fedx-settings", tmp_path)["rows"]
    assert all(r["found"] == r["at most 1.5 oracle"] == r["runs"] for r in rows)
    assert rows[0]["at most 0.01"] == rows[0]["runs"]


def test_both_phases_find_the_models_from_any_start(tmp_path):
    rows = quick("fedx-global-convergence", tmp_path)["rows"]
    assert rows[0]["found"] == rows[0]["runs"] == 3 and rows[0]["phase 1, worst"] < 0.5 < rows[1]["phase 1"]


def test_clients_of_one_row_do_no_harm(tmp_path):
    row = quick("fedx-unbalanced", tmp_path)["rows"][0]
    assert row["found"] == row["at most 1.5 oracle"] == 1


def test_both_phases_bear_other_covariances_and_a_small_cluster(tmp_path):
    row = quick("fedx-covariances", tmp_path)["rows"][0]
    assert row["found"] == row["at most 1.5 oracle"] == 1


@pytest.mark.usefixtures("one_process")
def test_diagnoses_are_right(tmp_path):
    rows = quick("diagnose", tmp_path)["rows"]
    assert [r["k"] for r in rows] == [2, 3, 4, 2] and all(r["right"] == r["seeds"] for r in rows)


def test_models_of_a_mixed_regression_are_held_to_the_oracle():
    problem = {"data": {"name": "mixed_regression", "k": 2, "d": 5, "sigma": 0.1, "toeplitz": 0.8}}
    cells = {}
    for refine in ("auto", "fedavg"):
        method = {"rounds": 10, "algorithm": {"name": "mixed_regression", "k": 2, "refine": refine}}
        cells[refine] = robustness.SCORES["models"](problem, method, 0)
    assert cells["auto"]["right"] and cells["auto"]["score"] < 1.5 and cells["auto"]["labels"] > 0.95
    assert not cells["fedavg"]["right"] and cells["fedavg"]["score"] > 1.5 and cells["fedavg"]["warned"]


def test_fedx_contracts_as_lemma_1_says(tmp_path):
    result = quick("fedx-theorem2", tmp_path)
    for row in result["rows"]:
        assert row["measured"] == pytest.approx(row["Lemma 1, mean"], abs=0.004)
        assert row["measured"] < row["theorem"] + 0.001
    few, many = result["floors"]
    assert many["error"] < 0.8 * few["error"] and many["error"] < 1.3 * many["oracle"]


def test_subspaces_and_anchors_get_better_with_clients_and_iterations_and_worse_with_noise(tmp_path):
    rows = quick("fedmd-subspace", tmp_path)["rows"]
    few, many = (r["sine"] for r in rows if r["subspace"] == "symmetric")
    anchors = [r["anchor"] for r in rows if r["part"] == "descent"]
    clear, noisy = (r["sine"] for r in rows if r["part"] == "noise")
    assert many < 0.7 * few and anchors[-1] < 0.7 * anchors[0] and clear < noisy


@needs_mnist
def test_ifca_beats_global_and_local_on_rotated_mnist(tmp_path):
    score = {r["method"]: r["ours"] for r in quick("ifca-table1-mnist", tmp_path)["rows"]}
    assert score["IFCA, farthest-first"] > score["global"] and score["IFCA, farthest-first"] > score["local, 100 steps"]


@needs_cifar
def test_rotated_cifar_is_scored_as_the_authors_did_and_as_users_are_served(tmp_path):
    ifca, one = quick("ifca-table1-cifar", tmp_path)["rows"]
    assert ifca["clusters"] == 2 and one["clusters"] is None
    assert all(r[HONEST] > 14 and r["ours"] > 14 for r in (ifca, one))  # of ten classes


@needs_femnist
def test_heads_of_frozen_layers_are_trained_by_every_method(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the frozen layers are below the current folder
    rows = quick("ifca-table2-femnist", tmp_path)["rows"]
    assert [r["method"] for r in rows] == ["IFCA, k=2", "global", "local"]
    assert all(r["ours"] > r[HONEST] - 1e-3 for r in rows)  # of all rounds the best, and the last
    result = quick("ifca-femnist-k", tmp_path)  # on the same frozen layers
    assert [r["k"] for r in result["rows"]] == [1, 2] and result["chosen"] in (1, 2)
    assert all(1 <= r["clusters alive"] <= r["k"] for r in result["rows"])


@needs_mnist
def test_writers_are_grouped_and_their_series_is_not_told(tmp_path):
    rows = {r["method"]: r for r in quick("mnist-writers", tmp_path)["rows"]}
    assert rows["IFCA, k=2"]["ours"] > 75 and rows["IFCA, k=2"]["all groups"] == "0 of 1"


@needs_cifar
def test_accuracy_rises_once_permuted_labels_are_split(tmp_path):
    last = quick("cfl-fig8", tmp_path)["rows"][-1]
    assert last["found"] == "2 of 2" and last["ratio"] > 1.2


@needs_ag_news
def test_cfl_finds_the_topics_of_the_news(tmp_path):
    result = quick("cfl-fig9", tmp_path)
    last, runs = result["rows"][-1], result["runs"]
    assert last["found"] == "4 of 4" and last["ratio"] < 0.95
    assert runs["CFL"]["scores"][0] == pytest.approx(runs["FedAvg"]["scores"][0], rel=0.05)  # no split yet


def test_splits_bear_more_noise_than_the_theorem_allows_for(tmp_path):
    rows = quick("cfl-fig3", tmp_path)["rows"]
    assert all(r["theorem's γ"] < 1 and r["P(g(α) > 0) at γ = 1"] == 1 for r in rows)


@needs_mnist
def test_the_separation_gap_grows_with_rows_per_client(tmp_path):
    few, many = quick("cfl-fig5", tmp_path)["rows"]
    assert few["gap, update"] < many["gap, update"] > 0


@needs_mnist
def test_the_separation_gap_grows_with_rounds(tmp_path):
    early, late = quick("cfl-fig6", tmp_path)["rows"]
    assert early["gap, update"] < 0 < late["gap, update"] and early["gap, gradient"] < 0 < late["gap, gradient"]


@needs_mnist
def test_updates_stay_long_only_where_clients_are_incongruent(tmp_path):
    unlike, _, alike = (r["end / most"] for r in quick("cfl-fig7", tmp_path)["rows"][1:])
    assert unlike > 2 * alike


@needs_mnist
def test_new_clients_find_their_group(tmp_path):
    last = quick("cfl-new-clients", tmp_path)["rows"][-1]
    assert last["old clients, purity"] == last["rightly placed"] == 1


@needs_mnist
def test_cfl_splits_swapped_labels(tmp_path):
    cfl, alone = quick("cfl-mnist", tmp_path)["rows"]
    assert cfl["all groups"] == "1 of 1" and cfl["ours"] > alone["ours"] + 5


def test_uifca_groups_points_that_kfed_cannot(tmp_path):
    found = {(r["data"], r["method"]): r["purity"] for r in quick("uifca-table41", tmp_path)["rows"]}
    assert found["Gaussian, K = 3", "UIFCA"] == found["Gaussian, K = 3", "k-FED"] == 100
    assert found["subspaces, K = 3", "UIFCA"] == 100 and found["subspaces, K = 3", "k-FED"] < 60


def test_points_are_scored_beside_a_mixture_of_all_of_them():
    data = {"name": "gaussian_clusters", "k": 2, "d": 2, "points": 60, "separation": 3.0, "weights": [0.8, 0.2]}
    cell = robustness.SCORES["points"]({"data": data}, {"algorithm": {"name": "uifca"}, "rounds": 9}, 0)
    assert cell["right"] and cell["score"] >= cell["beside"]["mixture"] - 0.02 and cell["bytes"] > 0
    assert 0.8 <= cell["beside"]["k-FED"] <= 1.0
    poor = robustness.SCORES["points"](
        {"data": data}, {"algorithm": {"name": "uifca", "init": "random"}, "rounds": 1}, 0
    )
    assert not poor["right"] and poor["score"] < poor["beside"]["mixture"] - 0.02


def test_points_find_their_cluster_from_a_random_assignment_the_sooner_the_more_clients_differ(tmp_path):
    rows = quick("uifca-fig43", tmp_path)["rows"]
    assert all(r["last"] == 100 for r in rows)
    alike, unlike = (r for r in rows if r["case"] == "50 gradient steps, one random start")
    assert alike["first"] < unlike["first"] and alike["in round"] > unlike["in round"]


def test_wrongly_assigned_points_are_trapped_if_they_are_few_and_shrinking_frees_them(tmp_path):
    result = quick("uifca-fig46", tmp_path)
    few, few_shrunk, many, many_shrunk = result["rows"]
    assert few["trapped from"] and few["leave, last"] < few["leave, best"] - 20
    assert not any(r["trapped from"] for r in (few_shrunk, many, many_shrunk))
    assert few_shrunk["leave, last"] > few["leave, last"] + 40
    plain, shrunk = result["whole"]
    assert shrunk["purity"] > shrunk["Bayes"] - 2 > plain["purity"] + 10  # of one seed: the full one has five


def test_training_longer_undoes_what_a_cluster_iteration_gained_unless_models_are_shrunk(tmp_path):
    few, few_shrunk, _, many_shrunk = quick("uifca-fig44", tmp_path)["rows"]
    assert few["given"] < few["purity, last"] + 2 < few["purity, best"] - 5
    assert all(r["purity, last"] > r["purity, best"] - 4 > r["given"] for r in (few_shrunk, many_shrunk))


@needs_mnist
def test_flows_are_asked_which_digit_an_image_shows(tmp_path):
    result = quick("uifca-table42", tmp_path)
    rows, curves = result["rows"], result["curves"]
    assert len(curves.pop("checkerboard")) == 3 and not curves
    assert rows[0]["median"] > 0 and rows[1]["median"] is None
    assert [r["case"] for r in rows] == ["checkerboard", "cyclic, random background"]
    assert all(50 <= r["accuracy"] <= 100 and 0 <= r["on new images"] <= 100 for r in rows)  # hardly trained


@needs_mnist
def test_images_and_their_representations_are_grouped(tmp_path, monkeypatch):
    monkeypatch.setattr("coterie.data.representation.keep", lambda path, content: None)
    rows = {(r["data"], r["method"]): r for r in quick("uifca-table43", tmp_path)["rows"]}
    assert len(rows) == 4 and all(25 <= r["purity"] <= 100 for r in rows.values())
    assert rows["rotations", "k-FED + UIFCA, affine, shrunk"]["purity"] > 50


def test_clients_that_mix_two_groups_are_served_by_mixtures(tmp_path):
    rows = quick("fedem-mixed", tmp_path)["rows"]
    assert [r["method"] for r in rows] == ["IFCA, k = 2", "FedEM, k = 2"]
    assert all(r["ours"] > 50 for r in rows)


def test_the_grid_of_problems_runs_in_several_processes(tmp_path):
    rows = quick("robustness", tmp_path)["rows"]
    assert [(r["method"], r["right"]) for r in rows] == [("IFCA", "1 of 1"), ("CFL", "1 of 1")]


@needs_cheese
def test_random_effects_serve_a_table_as_mixed_lm_does_and_better_than_groups(tmp_path):
    result = quick("tables", tmp_path)
    error, (table,) = {row["way"]: row["MSE"] for row in result["rows"]}, result["tables"]
    assert error["random effects"] < error["one for all + personal"] < error["one each"] < error["2 groups"]
    assert table["MixedLM"]["converged"] == 1 and abs(table["MixedLM"]["ours above (%)"][0]) < 1
    assert table["above best (%)"] < 3


def test_a_mixed_model_that_takes_too_long_is_given_up():
    federation = ct.data.varying_regression(clients=5, rows=4, features=2)
    assert mixed_lm(federation, limit=0.01) == {"failed": "not done after 0 s"}


@pytest.mark.usefixtures("one_process")
def test_groups_win_where_they_are_sharp_random_effects_where_clients_vary_and_the_mixture_in_both(tmp_path):
    result = quick("sharing", tmp_path)
    one, vary, sharp, lost = result["rows"]
    assert sharp["hard groups"] < sharp["random effects"] and vary["random effects"] < vary["one for all"]
    assert lost["random effects"] < lost["hard groups"]
    for row in (sharp, lost):
        assert row["groups of random effects"] < 2 * min(row["hard groups"], row["random effects"])
    assert [row["k found"] for row in (one, vary, sharp)] == [[1], [1], [2]]
    assert result["k right"] == result["k asked"] == 3


@pytest.mark.usefixtures("one_process")
def test_updates_find_who_changed_and_a_group_that_appears(tmp_path):
    result = quick("drift", tmp_path)
    steady, change, appear = result["rows"]
    assert change["all found"] == appear["all found"] == appear["one new group"] == 1
    assert all(row["others moved (%)"] == row["false groups (% of updates)"] == 0 for row in result["rows"])
    assert result["curves"][1]["right"][1] == pytest.approx(2 / 3)  # they wait at first
    assert steady["began right"] == 1


@needs_cheese
def test_what_is_recommended_for_a_raw_table_is_near_the_best(tmp_path):
    (row,) = quick("raw-tables", tmp_path)["rows"]
    assert row["groups"] == [1] and row["MSE"] < 1.05 * row["its MSE"] < 0.2 * row["one for all"]


@pytest.mark.usefixtures("one_process")
def test_the_groups_of_stores_are_found(tmp_path):
    result = quick("stores", tmp_path)
    one, three = result["rows"]
    assert one["found"] == [1] and three["found"] == [3] and three["least ARI"] > 0.95
    assert three["of the informed (%)"] < 105 and three["below one for all (%)"] > 20


def test_counts_tell_clusters_unless_clients_decide_in_secret_who_takes_part(tmp_path):
    result = quick("secure-counts", tmp_path)
    known, secret = (row["clusters found"] for row in result["rows"])
    assert known == 1 and secret < 1 and len(result["costs"]) == 2


def test_privacy_costs_accuracy_and_stays_within_its_budget(tmp_path):
    plain, private = quick("ifca-privacy", tmp_path)["rows"]
    assert plain["epsilon"] == "none" and plain["spent"] is None and plain["groups found"] == 1
    assert private["spent"] <= 50 and private["lost"] > 0 and private["accuracy"] > 30
