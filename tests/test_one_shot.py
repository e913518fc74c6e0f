"""OneShot beside solutions worked by hand, scikit-learn's k-means, scipy's linkages and principal angles."""

import dataclasses
import logging

import numpy as np
import pytest
import torch
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.linalg import subspace_angles
from scipy.spatial.distance import pdist, squareform
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score, silhouette_score

import coterie as ct
from coterie.core import Key, Models
from coterie.core.pytree import flat, tree_map
from coterie.engines import simulated
from coterie.methods.one_shot import angle_sums, k_means
from coterie.parts.hierarchy import cut, cut_by_silhouette, embedded, merges, silhouette
from coterie.secure import SecureSum

LINE = ct.Task.regressor(ct.models.Linear(2, 1))


def lines(*slopes, rows=8, seed=0, ids=None):
    """Clients with rows y = ⟨slope, x⟩, without noise."""
    g = torch.Generator().manual_seed(seed)
    clients = []
    for slope in slopes:
        x = torch.randn(rows, 2, generator=g)
        clients.append((x, x @ torch.tensor(slope)))
    return ct.Federation.from_clients(clients, ids=ids)


FOUR = lines((3.0, 0.0), (0.0, 3.0), (3.0, 0.1), (0.1, 3.0))


def cohort_of(federation, task=LINE, **options):
    return simulated(federation, task, Key.of(0).fold(1), **options)


def solved_by_hand(federation, theta, steps, lr):
    """Plain gradient descent on the mean squared error of every client, in NumPy."""
    found = []
    for i in range(len(federation)):
        x, y = (part.numpy().astype(float) for part in federation.train.client(i))
        x, w = np.c_[x, np.ones(len(x))], flat(theta, 0).numpy().astype(float).copy()
        for _ in range(steps):
            w -= lr * 2 * x.T @ (x @ w - y.reshape(-1)) / len(x)
        found.append(w)
    return np.array(found)


@pytest.mark.parametrize("by", ["kmeans", "hierarchical"])
def test_the_start_is_the_mean_of_each_groups_own_solutions(by):
    method = ct.OneShot(2, by, steps=40, lr=0.05)
    state = method.start(LINE, cohort_of(FOUR).at(0), Key.of(3))
    own = solved_by_hand(FOUR, LINE.init(Key.of(3).fold(0)), 40, 0.05)
    assert method.labels(state).tolist() == [0, 1, 0, 1]  # the first client's cluster is 0
    wanted = [own[[0, 2]].mean(0), own[[1, 3]].mean(0)]
    assert flat(method.models(state)).numpy() == pytest.approx(np.array(wanted), abs=1e-5)


def test_solutions_count_by_rows_if_clients_do():
    x = torch.eye(2)
    federation = ct.Federation.from_clients([(x, torch.ones(2)), (x.repeat(3, 1), 2 * torch.ones(6))])
    method = ct.OneShot(1, steps=20, weights="size")
    state = method.start(LINE, cohort_of(federation).at(0), Key.of(0))
    one, other = solved_by_hand(federation, LINE.init(Key.of(0).fold(0)), 20, 0.1)
    assert flat(method.models(state))[0].numpy() == pytest.approx((2 * one + 6 * other) / 8, abs=1e-5)


def test_a_round_is_fedavg_in_every_group():
    method, cohort = ct.OneShot(2, tau=5, steps=10), cohort_of(FOUR)
    state = method.start(LINE, cohort.at(0), Key.of(0))
    after, report = method.round(state, cohort.at(0))
    for j, members in enumerate(([0, 2], [1, 3])):
        theta = tree_map(lambda x, j=j: x[j], state.theta)
        own = solved_by_hand(FOUR.select(members), theta, 5, 0.1)
        assert flat(after.theta)[j].numpy() == pytest.approx(own.mean(0), abs=1e-5)
    assert report.clients.tolist() == [0, 1, 2, 3] and torch.equal(after.labels, state.labels)


def test_what_is_sent():
    """One model of 3 numbers down and up to compare; then the model of its own cluster alone, whatever k is."""
    run = ct.fit(ct.OneShot(2), LINE, FOUR, rounds=2, evaluations=1)
    fedavg = ct.fit(ct.FedAvg(), LINE, FOUR, rounds=2, evaluations=1)
    down = [[row["bytes_down"] for row in each.history] for each in (run, fedavg)]
    assert down[1] == [4 * 16, 4 * 16]  # 3 parameters and the step size
    assert down[0] == [4 * 16 + 4 * 24, 4 * 24]  # the label beside, 8 bytes
    angles = ct.fit(ct.OneShot(2, "angles", directions=1), LINE, FOUR, rounds=1, evaluations=1).history[0]
    assert angles["bytes_down"] == 4 * 24


# --- beside other libraries -------------------------------------------------------------------------------------------


def blobs(seed, k=4, m=40, d=12, apart=6.0):
    g = np.random.default_rng(seed)
    group = np.arange(m) % k
    return apart * g.standard_normal((k, d))[group] + g.standard_normal((m, d)), group


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("apart", [0.3, 6.0])
def test_k_means_is_as_good_as_scikit_learns(seed, apart):
    x, _ = blobs(seed, apart=apart)
    points = torch.from_numpy(embedded(squareform(pdist(x))))
    ours, theirs = k_means(points, 4, Key.of(seed)).numpy(), KMeans(4, n_init=20, random_state=seed).fit(x)

    def within(label):
        return sum(((x[label == j] - x[label == j].mean(0)) ** 2).sum() for j in np.unique(label))

    assert within(ours) <= theirs.inertia_ * (1.03 if apart < 1 else 1 + 1e-9)
    assert apart < 1 or adjusted_rand_score(ours, theirs.labels_) == 1


@pytest.mark.parametrize("method", ["ward", "average", "complete", "single"])
def test_cuts_are_those_of_scipy(method):
    x, _ = blobs(0, apart=1.0)
    tree = merges(squareform(pdist(x)), method)
    for k in (2, 5, 9):
        assert adjusted_rand_score(cut(tree, k), fcluster(linkage(x, method), k, "maxclust")) == 1


def test_a_cut_has_as_many_groups_as_are_asked_for_although_merges_tie():
    apart = 1 - np.eye(5)  # everybody is as far from everybody
    assert [len(set(cut(merges(apart, "average"), k))) for k in range(1, 6)] == [1, 2, 3, 4, 5]


def test_the_silhouette_is_scikit_learns():
    x, group = blobs(1, apart=1.0)
    label = np.where(np.arange(len(x)) == 0, 4, group)  # one is alone
    apart = squareform(pdist(x))
    assert silhouette(apart, label) == pytest.approx(silhouette_score(apart, label, metric="precomputed"), abs=1e-12)


def test_angles_are_scipys():
    g = torch.Generator().manual_seed(0)
    bases = [torch.linalg.qr(torch.randn(9, 3, generator=g, dtype=torch.float64)).Q for _ in range(4)]
    found = angle_sums(torch.stack([b.T for b in bases])).numpy()
    wanted = [[np.rad2deg(subspace_angles(a.numpy(), b.numpy()).sum()) for b in bases] for a in bases]
    assert found == pytest.approx(np.array(wanted), abs=1e-5)


def test_what_a_client_sends_for_angles_spans_its_leading_directions():
    federation = ct.data.digits(6, seed=0)
    method = ct.OneShot(2, "angles")
    task = ct.Task.classifier(ct.models.MLP(64, 4, 10))
    for executor in ("sequential", "vectorised"):
        reply = cohort_of(federation, task, executor=executor).gather(method.subspace, ())
        for i in range(6):
            x = federation.train.client(i)[0].flatten(1).numpy().astype(float)
            wanted = np.linalg.svd(x.T, full_matrices=False)[0][:, :3]
            sent = reply.update["vectors"][i].numpy().astype(float)
            assert np.abs(sent @ sent.T - np.eye(3)).max() < 1e-5
            assert np.rad2deg(subspace_angles(wanted, sent.T)).max() < 0.05


def test_groups_by_angles_are_those_of_subspaces():
    """Rows in one of two planes of five dimensions, which share a line."""
    g, e = torch.Generator().manual_seed(0), torch.eye(5)
    planes = [e[[0, 1]], e[[0, 2]]]
    clients = [(torch.randn(9, 2, generator=g) @ planes[i % 2], torch.zeros(9)) for i in range(6)]
    federation = ct.Federation.from_clients(clients)
    task = ct.Task.regressor(ct.models.Linear(5, 1))
    for settings in ({"k": 2}, {"threshold": 45.0}):
        method = ct.OneShot(by="angles", directions=2, **settings)
        assert method.start(task, cohort_of(federation, task).at(0), Key.of(0)).labels.tolist() == [0, 1] * 3


# --- how many groups --------------------------------------------------------------------------------------------------


def test_points_without_groups_are_one_group_and_those_with_groups_are_found():
    def number(x, seed):
        return cut_by_silhouette(squareform(pdist(x)), "ward", torch.Generator().manual_seed(seed)).max() + 1

    grouped = [number(blobs(s)[0], s) for s in range(3)]
    plain = [number(np.random.default_rng(s).standard_normal((40, 5)) * [9, 3, 1, 1, 1], s) for s in range(10)]
    assert grouped == [4, 4, 4] and plain.count(1) >= 9


@pytest.mark.parametrize("m", [1, 2, 3])
def test_few_clients_are_one_group(m):
    federation = lines(*[(3.0, float(i)) for i in range(m)])
    run = ct.fit(ct.OneShot(by="hierarchical", steps=5), LINE, federation, rounds=1)
    assert run.labels.tolist() == [0] * m


def test_clients_that_are_all_the_same_are_one_group(caplog):
    x, y = lines((1.0, 2.0)).train.client(0)
    federation = ct.Federation.from_clients([(x, y)] * 6)
    assert set(ct.fit(ct.OneShot(by="hierarchical", steps=5), LINE, federation, rounds=1).labels) == {0}
    with caplog.at_level(logging.INFO, "coterie"):
        assert len(ct.fit(ct.OneShot(3, steps=5), LINE, federation, rounds=1).models) == 1
    assert "OneShot: 1 clusters in place of k=3: too few clients differ from each other" in caplog.text


def test_a_threshold_below_all_distances_makes_one_group_each():
    assert ct.fit(ct.OneShot(by="hierarchical", threshold=0.0), LINE, FOUR, rounds=1).labels.tolist() == [0, 1, 2, 3]
    assert set(ct.fit(ct.OneShot(by="hierarchical", threshold=1e9), LINE, FOUR, rounds=1).labels) == {0}


# --- clients that come later ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["kmeans", "angles"])
def test_a_client_that_was_away_is_placed_by_its_loss_after_the_first_round(by):
    g = torch.Generator().manual_seed(0)
    clients = []
    for i in range(6):  # groups differ in their slopes, and in the plane that their rows are in
        x = torch.randn(20, 2, generator=g) * torch.tensor([[3.0, 0.3], [0.3, 3.0]])[i % 2]
        clients.append((x, x @ torch.tensor([[2.0, 0.0], [0.0, -2.0]])[i % 2]))
    federation = ct.Federation.from_clients(clients)
    method = ct.OneShot(2, by, directions=1, lr=0.02)
    cohort = cohort_of(federation)
    state = method.start(LINE, cohort.at(0).only(range(4)), Key.of(0))
    assert state.labels.tolist() == [0, 1, 0, 1, -1, -1]
    state, report = method.round(state, cohort.at(0))
    assert state.labels.tolist() == [0, 1, 0, 1, -1, -1] and report.clients.tolist() == [0, 1, 2, 3]
    state, report = method.round(state, cohort.at(1))
    assert state.labels.tolist() == [0, 1] * 3 and len(report.clients) == 6
    assert method.members(state).tolist() == [3, 3]


def test_newcomers_join_where_the_loss_is_lowest_and_wait_before_the_first_round():
    method, cohort = ct.OneShot(2), cohort_of(FOUR.select([0, 1, 2, 3]))
    start = method.start(LINE, cohort.only([0, 1]).at(0), Key.of(0))._replace(labels=torch.tensor([0, 1]))
    assert method.join(start, cohort.only([2, 3])).labels.tolist() == [0, 1, -1, -1]
    after, _ = method.round(start, cohort.only([0, 1]).at(0))
    assert method.join(after, cohort.only([2, 3])).labels.tolist() == [0, 1, 0, 1]


def test_a_client_whose_solution_diverges_is_named_and_placed_later():
    x, y = FOUR.train.client(0)
    federation = ct.Federation.from_clients([*[FOUR.train.client(i) for i in range(4)], (1e3 * x, 1e3 * y)])
    method, cohort = ct.OneShot(2, steps=60), cohort_of(federation)
    state = method.start(LINE, cohort.at(0), Key.of(0))
    assert state.labels.tolist() == [0, 1, 0, 1, -1]
    assert any("client 4 is not compared" in message for message in cohort.ledger.messages)
    assert method.place(state, cohort).tolist() == [0, 1, 0, 1, 0]
    with pytest.raises(ValueError, match="diverge: 0 of 5 clients find one, 2 must; lr=9 is too large"):
        ct.fit(ct.OneShot(2, lr=9.0, steps=300), LINE, federation, rounds=1)


def test_the_assignment_is_fixed_where_clients_are_scored():
    """A client keeps the group it was compared into, even if another group's model serves it better."""
    run = ct.fit(ct.OneShot(2), LINE, FOUR, rounds=3)
    wrong = run.state._replace(labels=torch.tensor([1, 1, 0, 1]))
    cohort = cohort_of(FOUR)
    assert run.algorithm.place(wrong, cohort).tolist() == [1, 1, 0, 1]
    assert run.algorithm.own_choice() is None
    assert run.assign(*FOUR.train.client(0)) == 0


def test_runs_are_updated_and_personalised():
    names = [f"site-{i}" for i in range(4)]
    before = lines((3.0, 0.0), (0.0, 3.0), (3.0, 0.1), (0.1, 3.0), ids=names)
    run = ct.fit(ct.OneShot(2), LINE, before, rounds=3)
    now = lines((0.0, 3.0), (3.0, 0.0), (3.0, 0.1), (3.0, 0.0), seed=1, ids=["site-1", "site-0", "site-2", "new"])
    after = run.update(now, rounds=2)
    assert after.labels.tolist() == [1, 0, 0, 0]
    personal = ct.fit(ct.Personal(ct.OneShot(2)), LINE, FOUR, rounds=3)
    assert personal.labels.tolist() == [0, 1, 0, 1]


def test_statistics_of_batch_norm_are_not_compared():
    federation = ct.data.rotated_digits(clients=8, seed=0)
    layers = torch.nn.Linear(64, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 10)
    task = ct.Task.classifier(torch.nn.Sequential(torch.nn.Flatten(), *layers))
    run = ct.fit(ct.OneShot(4, steps=30), task, federation, rounds=2)
    assert run.ari == 1


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k": 0}, "OneShot: k must be at least 1, got 0"),
        ({"k": 5}, "OneShot: k must be at most the number of clients, 4, got 5"),
        ({}, "OneShot: by='kmeans' needs k, got None"),
        ({"k": 2, "by": "cosines"}, "OneShot: by must be 'kmeans' or 'hierarchical' or 'angles', got 'cosines'"),
        ({"k": 2, "threshold": 1.0}, "threshold is for by='hierarchical' or 'angles' without k, got by='kmeans'"),
        ({"k": 2, "by": "angles", "threshold": 1.0}, "without k, got k=2"),
        ({"by": "hierarchical", "threshold": -1.0}, "OneShot: threshold must be at least 0, got -1"),
        ({"by": "hierarchical", "linkage": "median"}, "OneShot: linkage must be 'ward' or "),
        ({"by": "angles", "directions": 1}, "OneShot: by='angles' needs k or a threshold in degrees, got neither"),
        ({"k": 2, "by": "angles", "linkage": "ward", "directions": 1}, "linkage='ward' is for Euclidean distances"),
        ({"k": 2, "by": "angles"}, "rows of at least 3 real numbers, got torch.float32 of shape (2,)"),
        ({"k": 2, "steps": 0}, "OneShot: steps must be at least 1, got 0"),
    ],
)  # fmt: skip
def test_bad_settings_are_refused_in_one_line(settings, message):
    with pytest.raises(ValueError) as error:
        ct.fit(ct.OneShot(**settings), LINE, FOUR, rounds=1)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_angles_refuse_too_few_rows_and_rows_of_too_little_rank():
    x = torch.tensor([[1.0, 2.0], [2.0, 4.0], [3.0, 6.0]])
    one, flat_rows = (torch.ones(1, 2), torch.ones(1)), (x, torch.ones(3))
    for clients, message in (
        ([one, one], "directions=1 needs more rows than that on every client, .* but client 0 has 1"),
        ([flat_rows, (torch.randn(3, 2), torch.ones(3))], "directions is 2, but the rows of client 0 have rank 1"),
    ):
        method = ct.OneShot(2, "angles", directions=1 if clients[0] is one else 2)
        with pytest.raises(ValueError, match=message):
            ct.fit(method, LINE, ct.Federation.from_clients(clients), rounds=1)


def test_a_secure_sum_is_refused_by_name():
    with pytest.raises(ValueError, match=r"secure sum: OneShot\.solve needs every client's own reply"):
        ct.fit(ct.OneShot(2), LINE, FOUR, rounds=1, secure=SecureSum())


def test_the_clients_keep_no_moments_of_what_they_did_alone():
    method = ct.OneShot(2, optimiser=ct.Adam(keep=True), lr=0.05, steps=20)
    cohort = cohort_of(FOUR)
    method.start(LINE, cohort.at(0), Key.of(0))
    assert not cohort.ledger.memory
    reply = cohort.gather(dataclasses.replace(method, steps=1).solve, Models(LINE.init(Key.of(0)), torch.tensor(0.05)))
    assert torch.isfinite(flat(reply.update)).all()
