"""Comparing candidates: splits, figures, the recommendation, resuming, and who is hurt."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

import coterie as ct
from coterie.runs import choosing, side_by_side
from coterie.runs.candidates import Simplicity
from coterie.runs.comparison import Cell, ChosenK, Comparison, Figure
from coterie.runs.hurt import Hurt
from coterie.runs.scores import Scores
from coterie.runs.splitting import split
from coterie.storage.packed import Packed

D = 3
TASK = ct.Task.regressor(ct.models.Linear(D, 1))
WAYS = {"one for all": ct.FedX(k=1), "2 groups": ct.FedX(k=2), "3 groups": ct.FedX(k=3), "4 groups": ct.FedX(k=4)}


def regressions(weights, rows=12, noise=0.3, seed=0, **more):
    """A client for each row of weights: y = ⟨x, w⟩ + noise."""
    generator = torch.Generator().manual_seed(seed)
    clients = []
    for w in torch.as_tensor(weights, dtype=torch.float32):
        x = torch.randn(rows, D, generator=generator)
        clients.append((x, x @ w + noise * torch.randn(rows, generator=generator)))
    return ct.Federation.from_clients(clients, **more)


def grouped(m=24, seed=0, **more):
    """Three sharp groups."""
    centres = torch.tensor([[2.0, 0, 0], [0, 2, 0], [0, 0, 2]])
    return regressions(centres[torch.arange(m) % 3], seed=seed, **more)


def scores(values, metric="mse", loss=None):
    values = np.array(values, dtype=float)
    nobody = np.zeros(len(values), dtype=int)
    return Scores(metric, values, nobody, None, values if loss is None else np.array(loss, dtype=float), "train")


# --- who is hurt ----------------------------------------------------------------------------------------------------


def test_the_hurt_are_counted_by_what_is_better():
    mine, than = [1.0, 2.0, 5.0, 1.0, np.nan], [1.0, 3.0, 1.0, 0.5, 0.0]
    assert scores(mine).hurt(scores(than)) == Hurt(share=0.5, mean=2.25, worst=4.0)
    better = scores([0.9, 0.5], "accuracy").hurt(scores([0.8, 0.75], "accuracy"))
    assert better == Hurt(share=0.5, mean=0.25, worst=0.25)
    assert scores(than).hurt(scores(than)) == Hurt(0.0, 0.0, 0.0)


def test_a_score_of_the_users_own_is_judged_by_the_loss():
    mine, than = scores([9.0, 9.0], "profit", loss=[1, 2]), scores([1.0, 1.0], "profit", loss=[2, 1])
    assert mine.hurt(than) == Hurt(0.5, 1.0, 1.0)
    assert scores([3.0, 1.0], "profit", loss=[0, 1]).worst_decile == 1.0


def test_the_worst_decile_is_of_those_served_worst():
    assert scores(range(20)).worst_decile == 18.5
    assert scores([k / 20 for k in range(20)], "accuracy").worst_decile == pytest.approx(0.025)
    assert np.isnan(scores([np.nan, np.nan]).worst_decile)


def test_hurt_refuses_scores_of_other_clients():
    with pytest.raises(ValueError, match="same clients, got mse of 2 clients and mse of 1 clients"):
        scores([1.0, 2.0]).hurt(scores([1.0]))


def test_a_runs_folder_tells_the_worst_decile(tmp_path, capsys):
    from coterie.cli import show

    run = ct.fit(ct.FedX(k=2), TASK, grouped(6), rounds=2, out=tmp_path / "run")
    result = json.loads((tmp_path / "run" / "final" / "result.json").read_text())
    assert result["worst_decile"] == pytest.approx(run.scores.worst_decile) == pytest.approx(run.scores.error.max())
    show.show(tmp_path / "run")
    assert "worst tenth of the clients" in capsys.readouterr().out


# --- splits ---------------------------------------------------------------------------------------------------------


def rows_of(part):
    return {tuple(row) for row in part.x.tolist()}


def test_a_split_divides_rows_and_clients():
    federation = grouped(10)
    parts = split(federation, 0, holdout=0.25, new=0.2, few=5)
    assert sorted([*parts.at.tolist(), *parts.new_at.tolist()]) == list(range(10)) and len(parts.new_at) == 2
    assert parts.known.train.sizes.tolist() == [9] * 8 and parts.known.test.sizes.tolist() == [3] * 8
    assert parts.new.train.sizes.tolist() == [5] * 2 and parts.new.test.sizes.tolist() == [7] * 2
    pieces = [rows_of(p) for f in (parts.known, parts.new) for p in (f.train, f.test)]
    assert sum(map(len, pieces)) == len(set().union(*pieces)) == 120
    assert set().union(*pieces) == rows_of(federation.train)


def test_a_split_keeps_test_rows_and_follows_names():
    federation = grouped(10, ids=[f"shop {i}" for i in range(10)])
    own = replace(federation, test=Packed.of([(x[:2] + 9, y[:2]) for x, y in map(federation.train.client, range(10))]))
    parts = split(own, 3, holdout=0.25, new=0.2, few=5)
    assert parts.known.train.sizes.tolist() == [12] * 8 and parts.known.test.sizes.tolist() == [2] * 8
    assert parts.new.train.sizes.tolist() == [5] * 2 and parts.new.test.sizes.tolist() == [9] * 2
    turned = split(own.select(range(9, -1, -1)), 3, holdout=0.25, new=0.2, few=5)
    assert set(turned.new.ids) == set(parts.new.ids) and rows_of(turned.new.train) == rows_of(parts.new.train)
    assert set(split(own, 4, 0.25, 0.2, 5).new.ids) != set(parts.new.ids)


def test_consecutive_splits_take_turns():
    federation = grouped(10)
    parts = [split(federation, seed, holdout=0.25, new=0.2, few=5) for seed in range(5)]
    assert sorted(i for part in parts for i in part.new_at.tolist()) == list(range(10))
    apart = [split(federation, seed, holdout=0.25, new=0.0, few=5) for seed in range(5)]
    tested = [rows_of(part.known.test) for part in apart]
    assert sum(map(len, tested[:4])) == len(set().union(*tested[:4])) == 120
    assert tested[4] != tested[0]  # drawn anew


def test_a_client_with_one_row_is_trained_on_and_not_scored():
    x = torch.randn(1, D)
    federation = ct.Federation.from_clients([(x, x[:, 0])] * 3 + [(torch.randn(4, D), torch.randn(4))] * 3)
    parts = split(federation, 0, 0.25, 0.9, 5)
    assert set(range(3)) <= set(parts.at.tolist())
    assert [len(parts.known.test.client(i)[0]) for i in range(3)] == [0, 0, 0]


# --- figures and the recommendation ---------------------------------------------------------------------------------


def made(errors, methods):
    """A comparison of which the errors (splits, m) are given."""
    nobody = np.zeros(len(errors[0][0]), dtype=bool)
    cells = {
        name: [Cell(np.array(e, float), np.array(e, float), nobody, groups=Simplicity.of(method).k) for e in own]
        for (name, method), own in zip(methods.items(), errors, strict=True)
    }
    return Comparison(methods, "mse", cells)


def test_the_standard_error_is_over_clients_and_splits():
    values = np.array([[1.0, 2.0, 3.0, 6.0]])
    assert Figure.of(values) == pytest.approx((3.0, values.std(ddof=1) / 2))
    assert Figure.of(np.repeat(values, 2, 0)) == pytest.approx((3.0, values.std(ddof=1) / 2))
    apart = np.array([[0.0] * 50, [1.0] * 50])  # all clients alike, but splits differ: clients say nothing of chance
    assert Figure.of(apart).se > 0.4


def test_the_simplest_that_is_as_good_is_recommended():
    noise = np.random.default_rng(0).normal(size=(3, 40)) * 0.01
    noise -= noise.mean()
    ways = {"one": ct.FedAvg(), "two": ct.IFCA(k=2), "three": ct.IFCA(k=3)}
    found = made([1.5 + noise, 1.002 + 5 * noise, 1 + noise], ways)
    assert (found.best, found.recommended) == ("three", "two")
    assert found.reason.startswith("Cluster: two is the simplest candidate as good as the best, three (0.2 ±")
    assert "of those that are simpler the best is one, with 50." in found.reason
    found = made([1.0 + noise, 1.1 + noise, 1.2 + noise], ways)
    assert found.recommended == found.best == "one" and found.reason.startswith("Do not cluster: one has the least")


def test_a_single_client_may_be_held_out_as_a_whole():
    found = ct.compare({"one for all": ct.FedX(k=1)}, TASK, grouped(6), rounds=2, seeds=1, new=0.17, jobs=1)
    assert np.isfinite(found.rows[0].new.mean)


def test_what_makes_no_difference_is_not_held_against_the_simpler():
    errors = np.ones((2, 10))
    found = made([errors * 1.0001, errors], {"one": ct.FedAvg(), "two": ct.IFCA(k=2)})
    assert (found.best, found.recommended) == ("two", "one")


def test_accuracy_is_compared_in_points():
    rng = np.random.default_rng(0)
    wrong, noise = rng.random((2, 50)) * 0.02, 0.04 * rng.normal(size=(2, 50))
    found = made([wrong + 0.002 + noise - noise.mean(), wrong], {"one": ct.FedAvg(), "two": ct.IFCA(k=2)})
    assert found.recommended == "two"  # a fifth more error
    assert replace(found, metric="accuracy").recommended == "one"  # a fifth of a point, less than its standard error


def test_a_wide_standard_error_excuses_little():
    rng = np.random.default_rng(0)
    errors = 1 + rng.normal(size=(3, 10)) ** 2
    simple = errors + 2 * rng.normal(size=(3, 10))  # 8 % more, and a standard error that is wider than that
    found = made([simple - simple.mean() + 1.08 * errors.mean(), errors], {"one": ct.FedAvg(), "two": ct.IFCA(k=2)})
    gap = found.rows[0].more
    assert gap.mean < gap.se and found.recommended == "two"


def test_simplicity_is_in_the_order_that_is_documented():
    order = [
        ct.FedAvg(), ct.Personal(ct.FedAvg()), ct.MixedEffects(), ct.IFCA(k=2), ct.FedX(k=3), ct.CFL(),
        ct.Personal(ct.IFCA(k=2)), ct.FedEM(k=2), ct.FedX(k=3, soft=True), ct.MixedEffects(k=2),
        ct.MixedEffects(k="auto"), ct.LocalOnly(),
    ]  # fmt: skip
    assert all(Simplicity.of(a) < Simplicity.of(b) for a, b in pairwise(order))
    assert Simplicity.of(ct.IFCA(k=1)) == Simplicity.of(ct.FedAvg())


def test_a_candidate_that_fails_is_listed_and_not_recommended():
    found = ct.compare({**WAYS, "diverges": ct.FedAvg(lr=1e6)}, TASK, grouped(12), rounds=8, seeds=1)
    row = next(row for row in found.rows if row.name == "diverges")
    assert "no longer finite" in row.failed and "diverges failed: " in str(found) and found.recommended == "3 groups"
    with pytest.raises(ValueError, match="compare: all candidates failed: diverges failed: "):
        ct.compare({"diverges": ct.FedAvg(lr=1e6)}, TASK, grouped(6), rounds=8, seeds=1)


# --- compare --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compared():
    return ct.compare({**WAYS, "one each": ct.LocalOnly(lr=0.1)}, TASK, grouped(), rounds=15, seeds=2)


def test_three_sharp_groups_are_found(compared):
    assert compared.recommended == "3 groups" and compared.method == ct.FedX(k=3)
    assert compared.reason.startswith("Cluster: ")
    rows = {row.name: row for row in compared.rows}
    assert rows["one for all"].hurt is None and rows["3 groups"].hurt.share == 0
    assert rows["3 groups"].groups == 3 and rows["one each"].new.mean > 2 * rows["3 groups"].new.mean


def test_one_group_is_not_clustered():
    found = ct.compare(WAYS, TASK, regressions(torch.ones(24, D)), rounds=15, seeds=2)
    assert found.recommended == "one for all" and found.reason.startswith("Do not cluster: ")


def test_personal_levels_are_not_clustered():
    """Every client has a level of its own, so that groups and one model for all are off, and one each has few rows."""
    generator = torch.Generator().manual_seed(0)
    clients = []
    for level in 2 * torch.randn(24, generator=generator):
        x = torch.randn(6, D, generator=generator)
        clients.append((x, x.sum(1) + level + 0.5 * torch.randn(6, generator=generator)))
    one = ct.FedX(k=1)
    ways = {"one": one, "personal": ct.Personal(one), "effects": ct.MixedEffects(), "3 groups": ct.FedX(k=3)}
    alone = {"alone": ct.LocalOnly(refine="least_squares")}
    found = ct.compare({**ways, **alone}, TASK, ct.Federation.from_clients(clients), rounds=30, seeds=2)
    assert found.recommended in ("personal", "effects") and found.reason.startswith("Do not cluster: ")
    rows = {row.name: row for row in found.rows}
    assert rows["effects"].hurt_alone.share < 0.5 < rows["one"].hurt_alone.share


def test_new_clients_of_cfl_are_placed_by_their_own_rows():
    """Their positions are those of other clients, where CFL knows everybody's cluster."""
    found = ct.compare({"CFL": ct.CFL(lr=0.2)}, TASK, grouped(rows=30), rounds=25, seeds=1)
    (row,) = found.rows
    assert row.groups == 3 and row.new.mean < 2 * row.known.mean


def test_a_comparison_is_shown(compared, tmp_path):
    text = str(compared)
    assert text.splitlines()[0].split()[:4] == ["candidate", "mse", "new", "clients"] and "3 groups *" in text
    assert text.endswith(compared.reason)
    assert "<th>3 groups *</th>" in compared._repr_html_() and "<td>one each</td>" in compared._repr_html_()
    frame = compared.to_frame()
    assert list(frame["name"]) == [*WAYS, "one each"] and frame["recommended"].tolist() == [
        False,
        False,
        True,
        False,
        False,
    ]
    content = json.loads(json.dumps(compared.as_dict(), allow_nan=False))
    assert content["recommended"] == "3 groups" and content["candidates"][2]["method"] == "FedX(k=3)"
    compared.plot(tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_choose_k_finds_the_number_of_groups(tmp_path):
    found = ct.choose_k(ct.Personal(ct.FedX(k=1)), TASK, grouped(), ks=(1, 3, 4), rounds=15, seeds=2)
    assert found.method == ct.Personal(ct.FedX(k=3))
    assert isinstance(found, ChosenK) and found.k == 3 and found.recommended == "k = 3"
    found.plot(tmp_path / "k.svg")
    assert (tmp_path / "k.svg").is_file()


def test_copies_of_the_process_find_the_same():
    options = {"rounds": 5, "seeds": 2}
    ways = {name: WAYS[name] for name in ("one for all", "2 groups")}
    # A module with a function of the user's, which no process could be sent.
    task = ct.Task.regressor(ct.models.Linear(D, 1, phi=lambda x: 2 * x))
    alone, beside = (ct.compare(ways, task, grouped(9), jobs=jobs, **options) for jobs in (1, 2))
    for name in ways:
        for a, b in zip(alone.cells[name], beside.cells[name], strict=True):
            assert a.error == pytest.approx(b.error, rel=1e-4, nan_ok=True) and a.sent == b.sent


def test_errors_of_copies_arrive():
    def work(item):
        raise RuntimeError(f"item {item}")

    with pytest.raises(RuntimeError, match="item"):
        list(side_by_side.side_by_side(work, [1, 2, 3], jobs=2))


def test_a_copy_that_is_killed_is_reported():
    import os
    import signal

    with pytest.raises(ChildProcessError, match="was killed before its work was done"):
        list(side_by_side.side_by_side(lambda item: os.kill(os.getpid(), signal.SIGKILL), [1, 2], jobs=2))


def test_what_is_done_is_not_done_again(tmp_path, monkeypatch):
    ways = {name: WAYS[name] for name in ("one for all", "2 groups")}
    options = {"rounds": 3, "seeds": 1, "out": tmp_path, "jobs": 1}
    first = ct.compare(ways, TASK, grouped(9), **options)
    asked = []
    original = choosing._cell
    monkeypatch.setattr(choosing, "_cell", lambda method, *rest: asked.append(method) or original(method, *rest))
    again = ct.compare(ways, TASK, grouped(9), **options)
    assert asked == [] and str(again) == str(first)
    ct.compare({**ways, "2 groups": ct.FedX(k=2, soft=True)}, TASK, grouped(9), **options)  # another method, one name
    assert asked == [ct.FedX(k=2, soft=True)]
    ct.compare({"one for all": ct.FedX(k=1)}, TASK, grouped(9, seed=1), **options)  # other rows
    ct.compare({"one for all": ct.FedX(k=1)}, TASK, grouped(9), **{**options, "seeds": 2})
    assert len(asked) == 3
    for file in (tmp_path / "cells").glob("one-for-all*"):
        file.write_text("{")
    with pytest.raises(ValueError, match=r"one-for-all,seed=\d,.*\.json is damaged"):
        ct.compare(ways, TASK, grouped(9), **{**options, "seeds": 2})


def test_the_usual_candidates_reach_from_one_for_all_to_one_each():
    usual = ct.candidates(TASK, grouped(12), k=3)
    assert next(iter(usual)) == "one for all" and list(usual)[-1] == "one each"
    assert usual["3 groups"] == ct.FedX(k=3)  # solved for, where that can be
    digits = ct.data.rotated_digits(clients=4, seed=0)
    net = ct.candidates(ct.Task.classifier(ct.models.MLP(64, 4, 10)), digits, lr=0.05)
    assert net["one for all"] == ct.FedAvg(lr=0.05) and net["2 groups"] == ct.IFCA(k=2, lr=0.05)
    assert "3 groups" not in net  # of two clients each, at least


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"candidates": {}}, "compare: candidates must be a dict of methods by name, or None"),
        ({"candidates": [ct.FedAvg()]}, "compare: candidates must be a dict"),
        ({"candidates": {"a": ct.FedAvg}}, "compare: candidate 'a' must be a method with its settings: FedAvg"),
        ({"candidates": {1: ct.FedAvg()}}, "compare: a candidate's name must be a string, got 1"),
        ({"candidates": {"a": ct.IFCA(k=0)}}, "IFCA: k must be at least 1"),
        ({"candidates": {"a": ct.KFED(k=2)}}, "compare: candidate 'a' groups points"),
        ({"task": torch.nn.Linear(3, 1)}, "compare: task must be a Task"),
        ({"federation": []}, "compare: federation must be a Federation"),
        ({"rounds": 0}, "compare: rounds must be a whole number of at least 1, got 0"),
        ({"seeds": 1.5}, "compare: seeds must be a whole number"),
        ({"few": 0}, "compare: few must be a whole number of at least 1"),
        ({"holdout": 1.0}, "compare: holdout must be a share between 0 and 1, got 1.0"),
        ({"new": -0.1}, "compare: new must be a share"),
        ({"jobs": 0}, "compare: jobs must be a whole number of at least 1"),
        ({"device": "tpu"}, "device"),
        ({"federation": regressions(torch.ones(4, D), rows=1)}, "compare: no client has two rows or test rows"),
    ],
)
def test_bad_input_is_refused(given, message):
    arguments = {"candidates": WAYS, "task": TASK, "federation": grouped(6), "rounds": 2, **given}
    with pytest.raises(ValueError, match=message):
        ct.compare(**arguments)


def test_choose_k_refuses_a_method_without_k():
    with pytest.raises(ValueError, match="choose_k: FedAvg has no number of groups k"):
        ct.choose_k(ct.FedAvg(), TASK, grouped(6))


# --- the command line -----------------------------------------------------------------------------------------------

FILE = """
[data]
name = "linear_mixture"
clients = 18
rows = 12
features = 6
groups = 3

[task]
kind = "regressor"
model = { name = "linear", inputs = 6, outputs = 1 }

[run]
rounds = 15
"""
CANDIDATES = """
[compare]
seeds = 1

[compare.candidates]
"one for all" = { name = "fedx", k = 1 }
"three groups" = { name = "fedx", k = 3 }
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text):
        (tmp_path / "a.toml").write_text(text)
        return "a.toml"

    return write


def test_a_file_is_compared(config, coterie, tmp_path):
    code, out, _ = coterie("compare", config(FILE + CANDIDATES), "--json")
    content = json.loads(out)
    assert code == 0 and content["recommended"] == "three groups"
    assert content["clients"] == 18 and content["splits"] == 1
    where = tmp_path / "runs" / "a-compare"
    assert json.loads((where / "comparison.json").read_text()) == content
    assert (where / "comparison.png").is_file() and len(list((where / "cells").iterdir())) == 2
    assert "Cluster: three groups has the least error" in coterie("compare", "a.toml")[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (FILE + "[compare]\nseed = 3", "[compare] has no key 'seed'; did you mean 'seeds'?"),
        (FILE + "[compare]\ncandidates = 3", "[compare.candidates] must be tables by name"),
        (FILE + CANDIDATES + "x = { k = 3 }", "[compare.candidates.x] needs a name"),
        (
            FILE + CANDIDATES + "x = { name = 'ifka' }",
            "[compare.candidates.x] 'ifka' is not known; did you mean 'ifca'?",
        ),
        (FILE + CANDIDATES.replace("seeds", "k"), "[compare] k is for the usual candidates"),
        (FILE + "secure = { min_members = 3 }", "[run] secure has no meaning in a comparison"),
        (FILE + "[compare]\nholdout = 2", "compare: holdout must be a share between 0 and 1, got 2"),
        (FILE.replace("[task]", "[tusk]"), "the configuration has no key 'tusk'; did you mean 'task'?"),
        ("compare = 1\n" + FILE, "[compare] must be a table, got 1"),
        ("[data]\nname = 'digits'", "the configuration has no [task] table"),
    ],
)
def test_a_bad_file_is_refused(config, coterie, text, message):
    code, _, err = coterie("compare", config(text))
    assert code == 2 and message in err and err.count("\n") == 1


def test_folders_and_files_do_not_mix(config, coterie, tmp_path):
    file = config(FILE)
    assert "give run folders or one TOML file, got a.toml, runs" in coterie("compare", file, "runs")[2]
    assert "--picture goes with run folders" in coterie("compare", file, "--picture", "a.png")[2]
    assert "--out and --jobs go with a TOML file" in coterie("compare", "runs", "--jobs", "2")[2]
    assert "there is no such file" in coterie("compare", "b.toml")[2]


def test_an_interrupted_comparison_says_how_to_go_on(config, coterie, monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(choosing, "compare", interrupted)
    code, _, err = coterie("compare", config(FILE))
    assert code == 130 and "what is done is in runs/a-compare: to go on, run the same command again" in err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "start it without torchrun" in coterie("compare", "a.toml")[2]
