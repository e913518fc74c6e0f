"""CFL: that it splits where it should, only there, and rightly."""

import itertools
import logging

import numpy as np
import pytest
import torch
from scipy.spatial.distance import squareform

import coterie as ct
from coterie.core.federation import Federation
from coterie.core.key import Key
from coterie.core.local import mean_gradient
from coterie.core.pytree import flat
from coterie.core.task import Data
from coterie.core.train import Models
from coterie.data.source import folder
from coterie.engines import simulated
from coterie.parts import disguise
from coterie.parts.bipartition import bipartition, contrast, cosines, separation_gap
from coterie.parts.disagreement import Gradients, cleft
from coterie.parts.disguise import Disguise, Sketch, shapes_of
from coterie.runs.metrics import ari

needs_mnist = pytest.mark.skipif(
    not (folder() / "mnist" / "train-images-idx3-ubyte.gz").exists(), reason="MNIST is not in the data folder"
)
digits_task = ct.Task.classifier(ct.models.MLP(64, 32, 10))


def permuted(seed=0, groups=2):
    return ct.data.permuted_digits(clients=20, groups=groups, seed=seed)


def cohort_of(federation, task=digits_task, seed=0):
    return simulated(federation, task, Key.of(seed).fold(1), executor="vectorised")


def messages(caplog):
    return [r.getMessage() for r in caplog.records if r.getMessage().startswith("CFL")]


# --- Algorithm 1 ------------------------------------------------------------------------------------------------------


def test_the_bipartition_is_optimal():
    rng = np.random.default_rng(0)
    for _ in range(1000):
        m = int(rng.integers(2, 11))
        alpha = np.triu(rng.uniform(-1, 1, (m, m)), 1)
        alpha = alpha + alpha.T
        halves = bipartition(squareform(alpha, checks=False))
        cuts = [np.array([False, *bits]) for bits in itertools.product([False, True], repeat=m - 1) if any(bits)]
        best = min(alpha[~cut][:, cut].max() for cut in cuts)
        assert halves.cross == alpha[~halves.second][:, halves.second].max() == best


def test_similarities_in_blocks_are_those_of_numpy(monkeypatch):
    monkeypatch.setattr("coterie.parts.bipartition.ROWS", 3)
    vectors = torch.randn(11, 40, generator=torch.Generator().manual_seed(0))
    unit = vectors / vectors.norm(dim=1, keepdim=True)
    wanted = (unit @ unit.T).numpy()
    assert np.allclose(squareform(cosines(vectors)), wanted - np.diag(np.diag(wanted)), atol=1e-6)


def test_complete_linkage_is_another_cut():
    chain = np.array([[1.0, 0.9, 0.5, 0.1], [0.9, 1.0, 0.8, 0.2], [0.5, 0.8, 1.0, 0.7], [0.1, 0.2, 0.7, 1.0]])
    alpha = squareform(chain, checks=False)
    single, complete = bipartition(alpha), bipartition(alpha, "complete")
    assert single.second.tolist() == [False, False, False, True] and single.cross == 0.7
    assert complete.second.tolist() == [False, False, True, True] and complete.cross == 0.8


def test_the_gap_is_positive_for_groups_that_oppose_each_other():
    g = torch.Generator().manual_seed(0)
    groups = np.arange(12) % 3
    means = torch.randn(3, 100, generator=g)
    vectors = (means - means.mean(0))[groups] + 0.3 * torch.randn(12, 100, generator=g)
    assert separation_gap(cosines(vectors), groups) > 0
    assert separation_gap(cosines(torch.randn(12, 100, generator=g)), groups) < 0


# --- the whole algorithm ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_four_groups_are_found_with_the_defaults(seed):
    run = ct.fit(ct.CFL(), digits_task, permuted(seed, groups=4), rounds=60, seed=seed, evaluations=1)
    assert run.ari == 1.0 and len(run.models) == 4 and run.accuracy > 0.9


def test_one_group_is_not_split():
    run = ct.fit(ct.CFL(), digits_task, ct.data.digits(20), rounds=120, evaluations=1)
    assert len(run.models) == 1


@needs_mnist
def test_label_swaps_are_split_and_congruent_clients_are_not():
    task = ct.Task.classifier(ct.models.MLP(784, 50, 10))
    swapped = ct.data.swap_labels(ct.data.mnist(20, rows=60), groups=4)
    run = ct.fit(ct.CFL(), task, swapped, rounds=50, evaluations=1)
    assert run.ari == 1.0 and len(run.models) == 4
    halves = ct.data.keep_labels(ct.data.mnist(20, rows=120), blocks=2)
    assert len(ct.fit(ct.CFL(), task, halves, rounds=60, evaluations=1).models) == 1


def test_sketches_gradients_and_complete_linkage_find_the_groups_too():
    for settings in ({"sketch": 500}, {"compare": "gradient"}, {"linkage": "complete"}, {"weights": "size"}):
        run = ct.fit(ct.CFL(**settings), digits_task, permuted(), rounds=30, evaluations=1)
        assert run.ari == 1.0, settings


def test_absolute_thresholds_are_those_of_the_paper():
    federation = permuted()
    never = ct.fit(ct.CFL(thresholds="absolute", eps1=1e-6, eps2=1.6), digits_task, federation, rounds=60)
    assert len(never.models) == 1
    split = ct.fit(ct.CFL(thresholds="absolute", eps1=0.2, eps2=0.4), digits_task, federation, rounds=60)
    assert split.ari == 1.0


def test_until_it_splits_it_is_fedavg():
    settings = {"batch": 16, "tau": 5, "weights": "size"}
    runs = [
        ct.fit(algorithm, digits_task, permuted(), rounds=5)
        for algorithm in (ct.CFL(holdout=0.0, schedule=(99,), **settings), ct.FedAvg(**settings))
    ]
    for name, x in runs[0].models[0].items():
        assert torch.allclose(x, runs[1].models[0][name], atol=1e-6)


def test_a_schedule_says_when_and_a_second_split_moves_the_right_clients():
    """The authors' code takes positions within a cluster for clients: right for the first split only."""
    run = ct.fit(ct.CFL(schedule=(15, 30, 45)), digits_task, permuted(groups=4), rounds=60)
    assert [len(row["members"]) for row in run.history[13:60:15]] == [1, 2, 3, 4] and run.ari == 1.0
    assert [node.since + 1 for node in run.state.tree.values()] == [0, 15, 15, 30, 30, 45, 45]
    for node in run.state.tree.values():
        if node.children:
            own = [set(run.state.tree[child].clients.tolist()) for child in node.children]
            assert own[0] | own[1] == set(node.clients.tolist()) and not own[0] & own[1]


# --- never worse, never by chance -------------------------------------------------------------------------------------


def test_a_split_that_hurts_is_undone_and_not_made_again(caplog):
    caplog.set_level(logging.INFO, "coterie")
    algorithm = ct.CFL(schedule=(80, 100), holdout=0.3)
    run = ct.fit(algorithm, digits_task, ct.data.digits(20), rounds=110, evaluations=1)
    assert len(run.models) == 1 and run.state.tree[0].whole == 1
    assert ["split into" in m for m in messages(caplog)] == [True, False] and "undone" in messages(caplog)[1]
    plain = ct.fit(ct.CFL(schedule=(999,), holdout=0.3), digits_task, ct.data.digits(20), rounds=110, evaluations=1)
    for name, x in plain.models[0].items():  # it was trained on meanwhile, so nothing is lost
        assert torch.allclose(run.models[0][name], x, atol=1e-5)


def test_contrast_tells_noise_from_groups():
    g = torch.Generator().manual_seed(0)
    noise = torch.randn(12, 500, generator=g)
    groups = torch.arange(12) % 2 == 1
    halves = torch.from_numpy(bipartition(cosines(noise)).second)
    assert contrast(noise, halves) < 1.7 < 3 < contrast(noise + 2.0 * groups[:, None], groups)
    loud = torch.cat([2 * noise[:1], noise[1:]])  # a client with few rows is noisier, and no group of its own
    assert contrast(loud, torch.arange(12) == 0) < 1.5
    assert contrast(noise[:2], torch.tensor([False, True])) == torch.inf


def test_identical_clients_are_not_split_and_it_is_said(caplog):
    caplog.set_level(logging.INFO, "coterie")
    x, y = ct.data.digits(20).train.client(0)
    twins = Federation.from_clients([(x, y)] * 6)
    run = ct.fit(ct.CFL(schedule=(3, 4), holdout=0.0), digits_task, twins, rounds=5)
    assert len(run.models) == 1
    assert messages(caplog) == ["CFL: round 3: cluster 0 is not split: all updates point the same way"]


def test_gamma_max_rejects_what_may_be_noise(caplog):
    caplog.set_level(logging.INFO, "coterie")
    run = ct.fit(ct.CFL(schedule=(20,), gamma_max=0.99), digits_task, permuted(), rounds=25)
    assert len(run.models) == 1 and "not above gamma_max = 0.99" in messages(caplog)[0]


# --- who is there -----------------------------------------------------------------------------------------------------


def test_new_clients_are_placed_in_their_group():
    federation = ct.data.permuted_digits(clients=80, groups=4, seed=0)
    old, new = torch.arange(0, 80, 2), torch.arange(1, 80, 2)
    run = ct.fit(ct.CFL(), digits_task, federation.select(old), rounds=200, evaluations=1)
    assert run.ari == 1.0
    placed = np.array([run.assign(*federation.train.client(i)) for i in new.tolist()])
    assert ari(placed, federation.groups[new].numpy()) == 1.0


def test_half_of_the_clients_a_round_is_enough():
    run = ct.fit(ct.CFL(fraction=0.5), digits_task, permuted(), rounds=80, evaluations=1)
    assert run.ari == 1.0


def test_clients_that_were_away_wait_at_the_parent_and_are_placed_when_heard():
    federation, algorithm = permuted(), ct.CFL(schedule=(20,), holdout=0.0, max_age=3)
    cohort = cohort_of(federation)
    state = algorithm.start(digits_task, cohort.at(0), Key.of(0))
    here = [i for i in range(20) if i not in (3, 14)]
    for t in range(22):
        state, _ = algorithm.round(state, cohort.only(here if t > 4 else list(range(20))).at(t))
    assert len(state.leaves) == 2
    assert algorithm.labels(state)[[3, 14]].tolist() == [-1, -1] and state.tree[int(state.node[3])].children
    assert not any(len(node.updates) and (node.updates == 0).all(1).any() for node in state.tree.values())
    state, _ = algorithm.round(state, cohort.at(22))
    assert ari(algorithm.labels(state).numpy(), federation.groups.numpy()) == 1.0


def test_a_cluster_whose_clients_are_away_is_not_tested():
    algorithm, cohort = ct.CFL(patience=3, holdout=0.0), cohort_of(permuted())
    state = algorithm.start(digits_task, cohort.at(0), Key.of(0))
    for t in range(9):  # when the next test is due, only clients of the first half are there
        here = (algorithm.labels(state) == 0).nonzero().flatten() if t > 3 else torch.arange(20)
        state, _ = algorithm.round(state, cohort.only(here).at(t))
    assert len(state.leaves) == 2


def test_zero_and_diverging_clients_are_kept_out_and_named(caplog):
    caplog.set_level(logging.INFO, "coterie")
    g = torch.Generator().manual_seed(0)
    clients = []
    for i in range(8):
        x = torch.randn(20, 5, generator=g) * {0: 0.0, 1: 1e25}.get(i, 1.0)
        clients.append((x, x.sum(1) * (1 if i % 2 else -1)))
    module = torch.nn.Linear(5, 1, bias=False)
    run = ct.fit(ct.CFL(schedule=(8,), lr=0.05), ct.Task.regressor(module), Federation.from_clients(clients), rounds=9)
    assert messages(caplog)[:2] == [
        "CFL: round 1: client 0 is kept out of splits: its update is all zero",
        "CFL: round 1: client 1 is kept out of splits: its update is not finite",
    ]
    assert len(run.models) == 2 and run.state.node[[0, 1]].tolist() == [0, 0]
    assert len(set(run.labels[2::2])) == len(set(run.labels[3::2])) == 1 and run.labels[2] != run.labels[3]


def test_mute_clients_are_named_once_also_if_they_are_seldom_drawn(caplog):
    caplog.set_level(logging.INFO, "coterie")
    g = torch.Generator().manual_seed(0)
    rows = [(torch.randn(10, 5, generator=g), torch.randn(10, generator=g)) for _ in range(8)]
    rows[0] = torch.zeros(10, 5), rows[0][1]
    task = ct.Task.regressor(torch.nn.Linear(5, 1, bias=False))
    ct.fit(ct.CFL(fraction=0.4, lr=0.01, schedule=(99,)), task, Federation.from_clients(rows), rounds=20)
    assert len(told := messages(caplog)) == 1 and "client 0 is kept out of splits: its update is all zero" in told[0]


def test_clients_with_too_few_rows_to_hold_any_out_are_split_too():
    few = permuted().map(lambda i, x, y: (x[:9], y[:9]))
    assert len(ct.fit(ct.CFL(), digits_task, few, rounds=100, evaluations=1).models) > 1


def test_steps_that_shrink_do_not_keep_groups_together():
    assert ct.fit(ct.CFL(decay=0.97), digits_task, permuted(), rounds=60, evaluations=1).ari == 1.0


def test_if_all_diverge_it_is_an_error():
    with pytest.raises(ct.Diverged, match="no longer finite"):
        ct.fit(ct.CFL(lr=1e30), digits_task, permuted(), rounds=3)


# --- whether clients disagree -----------------------------------------------------------------------------------------


def wanted(federation, task=digits_task, rounds=10, **settings):
    """What `cleft` finds once one model was trained for some rounds."""
    one = ct.fit(ct.FedAvg(), task, federation, rounds=rounds, evaluations=1)
    note = cohort_of(federation, task).at(rounds).gather(ct.CFL(**settings).wishes, one.models[0]).note
    return cleft(Gradients(**note), torch.ones(len(federation)), "single")


def test_what_rows_want_is_the_gradient():
    federation = permuted()
    note = cohort_of(federation).at(0).gather(ct.CFL(holdout=0.0).wishes, theta := digits_task.init(Key.of(0))).note
    one = Sketch(flat(theta, axes=0).numel(), 256)
    for i in (0, 7):
        rows = Data(*(x for x in federation.train.client(i)), torch.ones(int(federation.train.sizes[i])))
        whole = one(flat(mean_gradient(digits_task, theta, rows), axes=0)) * len(rows.x)
        assert torch.allclose(note["sums"][i].sum((0, 1)), whole, atol=1e-3)
        assert note["rows"][i].sum(0).tolist() == torch.bincount(rows.y, minlength=10).tolist()
        assert (note["rows"][i][0] - note["rows"][i][1]).abs().max() <= 1


@pytest.mark.parametrize("blocks", [2, 5])
def test_other_classes_are_no_disagreement(blocks):
    apart = wanted(ct.data.keep_labels(ct.data.digits(20, copies=2), blocks=blocks))
    assert apart.signal < 4
    assert wanted(ct.data.swap_labels(ct.data.digits(20, copies=4), 4)).signal > 50


def test_a_constant_feature_has_no_dimensions_to_be_far_apart_in():
    g = torch.Generator().manual_seed(0)
    rows = [(torch.ones(30, 4), torch.randn(30, generator=g)) for _ in range(30)]
    task = ct.Task.regressor(ct.models.Linear(4, 1))
    noise = wanted(Federation.from_clients(rows), task)
    assert noise.contrast < 1
    run = ct.fit(ct.CFL(), task, Federation.from_clients(rows), rounds=60, evaluations=1)
    assert len(run.models) == 1


def test_few_rows_do_not_decide_and_wait_to_be_placed(caplog):
    caplog.set_level(logging.INFO, "coterie")
    few = permuted().map(lambda i, x, y: (x[: 3 if i in (4, 15) else len(x)], y[: 3 if i in (4, 15) else len(y)]))
    run = ct.fit(ct.CFL(), digits_task, few, rounds=40, evaluations=1)
    assert "split into 9 and 9 clients" in messages(caplog)[0] and run.ari == 1.0


@pytest.mark.parametrize("offset", [0.0, 20.0])
def test_an_offset_of_the_target_does_not_matter(offset):
    federation = ct.data.offset_targets(ct.data.linear_mixture(30, 40, 10, groups=3, sigma=0.5, seed=0), by=offset)
    run = ct.fit(ct.CFL(), ct.Task.regressor(ct.models.Linear(10, 1)), federation, rounds=60, evaluations=1)
    assert run.ari == 1.0 and run.score < 0.3


def test_a_single_odd_client_is_a_cluster():
    federation = ct.data.permute_labels(ct.data.digits(20), groups=(10, 9, 1))
    assert ct.fit(ct.CFL(), digits_task, federation, rounds=60, evaluations=1).ari == 1.0


# --- privacy ----------------------------------------------------------------------------------------------------------


def test_a_disguise_changes_nothing_but_what_the_server_sees():
    federation = permuted()
    plain = ct.fit(ct.CFL(), digits_task, federation, rounds=40, evaluations=1)
    clear = [*plain.state.reports.updates, *flat(plain.algorithm.models(plain.state))]
    for privacy in ("permutation", "rotation"):
        hidden = ct.fit(ct.CFL(privacy=privacy, secret=11), digits_task, federation, rounds=40, evaluations=1)
        assert (plain.labels == hidden.labels).all() and len(plain.models) == 2
        for a, b in zip(plain.models, hidden.models, strict=True):
            assert all(torch.allclose(a[n], b[n], atol=1e-3) for n in a)
        state = hidden.state
        seen = [state.reports.updates, flat(state.theta), *(n.updates for n in state.tree.values())]
        for row in itertools.chain(*seen):
            assert not any(torch.allclose(row[: len(c)], c, atol=1e-4) for c in clear)
        assert set(state.theta) == {"disguised"}


def test_a_disguise_needs_a_secret_and_none_is_public():
    with pytest.raises(ValueError, match=r"CFL: privacy = 'rotation' needs a secret that only clients know") as error:
        ct.fit(ct.CFL(privacy="rotation"), digits_task, permuted(), rounds=1)
    with pytest.raises(ValueError) as other:
        ct.fit(ct.CFL(privacy="rotation"), digits_task, permuted(), rounds=1)
    drawn = [int(str(e.value).rpartition(" ")[2]) for e in (error, other)]
    assert drawn[0] != drawn[1] and max(drawn) > 2**40  # drawn anew, and not to be guessed


@pytest.mark.parametrize(
    "settings", [{"privacy": "permutation", "secret": 5}, {"privacy": "rotation", "secret": 5}, {"sketch": 100}]
)
def test_nothing_is_drawn_inside_vmap(settings, tmp_path, caplog):
    """As in a new process that goes on with a run, where no map has been made yet."""
    caplog.set_level(logging.INFO, "coterie")
    for rounds in (2, 4):
        for cached in (disguise._order, disguise._signs, disguise._rotation):
            cached.cache_clear()
        run = ct.fit(
            ct.CFL(**settings), digits_task, permuted(), rounds=rounds, out=tmp_path / "run", resume=rounds > 2
        )
    for cached in (disguise._order, disguise._signs, disguise._rotation):
        cached.cache_clear()
    assert run.assign(*permuted().train.client(0)) == 0
    assert not any("one by one" in r.getMessage() for r in caplog.records)


def test_for_a_place_in_the_tree_a_client_sends_only_what_is_compared():
    algorithm, cohort = ct.CFL(sketch=50), cohort_of(permuted())
    state = algorithm.start(digits_task, cohort.at(0), Key.of(0))
    sent = Models(state.theta, torch.tensor(0.1), label=torch.zeros(1, dtype=torch.long))
    reply = cohort.gather(algorithm.probe, sent, rows=torch.zeros(20, dtype=torch.long))
    assert reply.update == () and reply.note["vector"].shape == (20, 50)


def test_a_disguise_keeps_lengths_and_angles():
    like = {"w": torch.randn(7, 9), "b": torch.randn(7)}
    hide = Disguise("rotation", 3, shapes_of(like))
    one, two = (hide.put_on({n: torch.randn_like(x) for n, x in like.items()})["disguised"] for _ in range(2))
    back = [flat(hide.take_off({"disguised": v}), axes=0) for v in (one, two)]
    assert torch.allclose(one @ two, back[0] @ back[1], atol=1e-4) and torch.allclose(one.norm(), back[0].norm())


def test_sketches_keep_cosines_on_average():
    g = torch.Generator().manual_seed(0)
    a = torch.randn(20_000, generator=g)
    b = a + torch.randn(20_000, generator=g)
    short = [Sketch(20_000, 2000)(v) for v in (a, b)]
    wanted, got = (torch.nn.functional.cosine_similarity(u, v, dim=0) for u, v in ((a, b), short))
    assert got == pytest.approx(float(wanted), abs=0.05)


# --- the tree ---------------------------------------------------------------------------------------------------------


def test_the_tree_holds_every_model_on_the_way(tmp_path):
    run = ct.fit(ct.CFL(), digits_task, permuted(groups=4), rounds=60, out=tmp_path / "run")
    tree = run.tree
    assert len(run.models) == 4
    for cluster in range(len(run.models)):
        path = tree.path(cluster)
        assert path[0].parent is None and path[-1].cluster == cluster
        assert all(set(b.clients) <= set(a.clients) for a, b in itertools.pairwise(path))
        assert all(torch.equal(path[-1].model[n], x) for n, x in run.models[cluster].items())
    assert str(tree).count("cluster") == len(run.models)
    run.draw_tree(tmp_path / "tree.png")
    assert (tmp_path / "tree.png").stat().st_size > 5_000
    leaf, root, path = (run.evaluate(along=along).mean for along in ("leaf", "root", "path"))
    assert leaf == run.accuracy >= path > root
    with pytest.raises(ValueError, match="there is no cluster 9"):
        tree.path(9)


def test_only_algorithms_that_split_have_a_tree():
    run = ct.fit(ct.FedAvg(), digits_task, permuted(), rounds=2)
    with pytest.raises(AttributeError, match="FedAvg makes no tree of models"):
        _ = run.tree
    with pytest.raises(ValueError, match="along='root' needs a tree of models"):
        run.evaluate(along="root")


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gamma_max": 1.0}, "CFL: gamma_max must be at least 0 and below 1, got 1"),
        ({"gamma_max": -0.1}, "CFL: gamma_max must be at least 0, got -0.1"),
        ({"schedule": (0, 5)}, "CFL: schedule holds round 0, but the first round is 1"),
        ({"schedule": (20, 30)}, "CFL: schedule has rounds 20 and 30, but a split is judged for patience = 10 rounds"),
        ({"privacy": "rot13"}, "CFL: privacy must be 'none' or 'permutation' or 'rotation', got 'rot13'"),
        ({"sketch": 1}, "CFL: sketch must be at least 2, got 1"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ct.fit(ct.CFL(**settings), digits_task, permuted(), rounds=1)


def test_a_single_client_cannot_be_compared():
    with pytest.raises(ValueError, match="CFL: at least 2 clients are needed to compare, got 1"):
        ct.fit(ct.CFL(), digits_task, permuted().select([0]), rounds=1)
