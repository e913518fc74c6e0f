"""The start that finds groups: outliers, small groups, light clients; and what speaks against a clustering."""

import pytest
import torch

import coterie as ct
from coterie.core.key import Key
from coterie.engines import ENGINES, simulated
from coterie.parts.doubts import few_rows, superfluous
from coterie.parts.tournament import averages, best_served, branches
from coterie.runs.folder import read_result

LINE = ct.Task.regressor(ct.models.Linear(1, 1, bias=False))


def line(*clients, noise=0.1):
    """One client per (slope, rows), with rows (1, slope + noise), some of them for testing."""
    g = torch.Generator().manual_seed(0)

    def drawn(slope, rows):
        return torch.ones(rows, 1), slope + noise * torch.randn(rows, generator=g)

    train = [drawn(s, n) for s, n in clients]
    return ct.Federation.from_clients(train, test=[drawn(s, 10) for s, _ in clients])


def slopes(federation, k, executor="vectorised", **settings):
    start = ct.Tournament(**{"steps": 20, **settings})
    cohort = simulated(federation, LINE, Key.of(0), executor=executor)
    found = start(k, 0.1, LINE, cohort.at(0), Key.of(0))
    return sorted(found["weight"].flatten().tolist()), cohort.ledger


@pytest.mark.parametrize("executor", list(ENGINES))
def test_a_small_group_is_kept_beside_a_large_one(executor):
    federation = line(*[(0, 10)] * 20, *[(3, 10)] * 2, *[(6, 10)] * 2)
    assert slopes(federation, 3, executor)[0] == pytest.approx([0, 3, 6], abs=0.2)


def random_labels(m, odd):
    """Clients of two groups, sign(x) and -sign(x), and some whose labels are random."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(m, 40, 1, generator=g)
    y = ((x[..., 0] > 0) ^ (torch.arange(m) % 2 > 0)[:, None]).long()
    y[:odd] = torch.randint(2, (odd, 40), generator=g)
    return ct.Federation.from_clients(list(zip(x, y, strict=True)))


def test_clients_that_are_like_no_other_are_nobodys_centre():
    federation, task = random_labels(16, odd=4), ct.Task.classifier(ct.models.Linear(1, 2))
    cohort = simulated(federation, task, Key.of(0), executor="vectorised")
    found = ct.Tournament()(2, 0.5, task, cohort.at(0), Key.of(0))["weight"]
    slope = (found[:, 1] - found[:, 0]).flatten().sort().values
    assert slope[0] < -1 and slope[1] > 1  # a model of random labels has none


def test_models_of_few_rows_make_no_group():
    federation = line(*[(0, 20)] * 6, *[(5, 20)] * 6, (40, 1), (-40, 1))
    assert slopes(federation, 2)[0] == pytest.approx([0, 5], abs=0.2)


def test_bouts_end_when_losses_have_halved_and_not_before():
    federation = line(*[(5, 10)] * 4)
    fast, slow = slopes(federation, 1, steps=50)[1], slopes(federation, 1, steps=1, bouts=6, lr=1e-4)[1]
    models = lambda ledger: round(ledger.bytes_up / (4 * 4))  # noqa: E731 - sent by each client, with a few notes
    assert models(fast) < models(slow)
    assert slow.bytes_down > fast.bytes_down


def test_clients_without_rows_to_hold_out_are_judged_by_those_they_have():
    assert slopes(line(*[(0, 2)] * 4, *[(5, 2)] * 4), 2)[0] == pytest.approx([0, 5], abs=0.3)


def test_as_many_models_as_clients_and_one_for_all():
    federation = line((0, 10), (5, 10))
    assert slopes(federation, 2)[0] == pytest.approx([0, 5], abs=0.2)
    assert len(slopes(federation, 1)[0]) == 1


def test_training_that_diverges_is_said():
    with pytest.raises(ValueError, match="start of cluster 0, 1 is not finite"):
        ct.fit(ct.IFCA(2, init=ct.Tournament(lr=1e6)), LINE, line(*[(0, 10)] * 4), rounds=1)


def test_ward_joins_by_weight():
    x = torch.tensor([0.0, 1.0, 3.0, 20.0])
    light = branches((x - x[:, None]).square(), torch.tensor([10.0, 10.0, 10.0, 0.01]), 3)
    assert light[:3].long().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 1]]
    assert light[-1].all() and len(light) == 5


def test_averages_are_weighted():
    models, members = {"w": torch.tensor([[0.0], [3.0], [9.0]])}, torch.tensor([[True, True, False], [True] * 3])
    assert averages(models, torch.tensor([2.0, 1.0, 0.0]), members)["w"].tolist() == [[1.0], [1.0]]


def test_the_best_k_are_those_of_all_subsets():
    from itertools import combinations

    for seed in range(20):
        loss = torch.rand(12, 6, generator=torch.Generator().manual_seed(seed))
        price = {s: float(loss[:, s].amin(1).sum()) for s in combinations(range(6), 3)}
        kept = tuple(sorted(best_served(loss, loss, 3).tolist()))
        assert price[kept] <= sorted(price.values())[1] + 1e-6  # a local search: the best, or the next


def test_the_search_ends_where_choices_tie():
    for seed in range(50):
        g = torch.Generator().manual_seed(seed)
        choose, judge = torch.randint(0, 3, (12, 7), generator=g).float(), torch.rand(12, 7, generator=g)
        assert len(set(best_served(choose, judge, 3).tolist())) == 3


def test_more_models_that_are_better_by_chance_only_are_not_preferred():
    # Models 0 and 1 serve the same clients; whom they serve better differs from row to row. Model 2 serves two clients.
    choose, judge = torch.zeros(10, 3), torch.zeros(10, 3)
    choose[:8, :2] = torch.tensor([[0.4, 0.6], [0.6, 0.4]]).repeat(4, 1)
    judge[:8, :2] = 0.5
    choose[8:], judge[8:] = torch.tensor([3.0, 3.0, 0.1]), torch.tensor([3.0, 3.0, 0.1])
    choose[:8, 2], judge[:8, 2] = 9.0, 9.0
    assert 2 in best_served(choose, judge, 2).tolist()


def test_fewer_rows_than_a_tenth_of_the_share_are_few():
    labels, sizes = torch.tensor([0] * 10 + [1]), torch.tensor([10] * 11)
    assert list(few_rows(labels, sizes, 2)) == []
    assert len(list(few_rows(labels, sizes.index_fill(0, torch.tensor([10]), 2), 2))) == 1
    assert "cluster 2 has no clients" in " ".join(few_rows(labels, sizes, 3))


def test_near_copies_are_named_and_groups_are_not():
    labels = torch.arange(3).repeat_interleave(6)
    losses = torch.full((18, 4), 2.0)
    losses[torch.arange(18), labels] = torch.linspace(0.1, 0.3, 18)
    assert list(superfluous(losses, labels)) == []
    losses[labels < 2, :2] = 0.2
    assert [w.split(":")[0] for w in superfluous(losses, labels)] == ["clusters 0 and 1 are near-copies"]


@pytest.fixture(scope="module")
def needless(tmp_path_factory):
    """A run with three models for one group."""
    out = tmp_path_factory.mktemp("runs") / "needless"
    return ct.fit(ct.IFCA(3), LINE, line(*[(1, 10)] * 9, noise=1.0), rounds=3, out=out)


def test_more_models_than_groups_are_warned_of(needless):
    wanted = "3 models serve clients no better on test rows than one does: try FedAvg, or a smaller k"
    assert wanted in needless.warnings


def test_warnings_are_in_the_folder_and_shown(needless, coterie):
    assert read_result(needless.path)["warnings"] == needless.warnings
    assert "warning: 3 models serve clients no better" in coterie("show", needless.path)[1].replace("\n", " ")
    loaded = ct.load(needless.path)
    assert loaded.warnings == needless.warnings
    assert "no better" in repr(loaded) and "no better" in loaded._repr_html_()


def test_groups_are_not_warned_of():
    run = ct.fit(ct.IFCA(2), LINE, line(*[(0, 10)] * 5, *[(5, 10)] * 5), rounds=3)
    assert run.warnings == []


def test_a_secure_sum_asks_nothing_more():
    run = ct.fit(ct.IFCA(2, init="random"), LINE, line(*[(0, 10)] * 6), rounds=2, secure=ct.SecureSum())
    assert not any("no better" in warning or "rows" in warning for warning in run.warnings)
