"""Small things that once went wrong: arguments of the wrong kind, full disks, permissions, warnings."""

import errno
import os
import re
import resource
import stat
import warnings
from contextlib import contextmanager

import numpy as np
import pandas
import pytest
import torch
from torch import nn

import coterie as ct
from coterie.runs.sanity import rising
from coterie.storage import snapshot

TASK = ct.Task.classifier(ct.models.MLP(4, 3, 2))


def clients(m=4, rows=6, features=4):
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(rows, features, generator=g), torch.arange(rows) % 2) for _ in range(m)]


@pytest.fixture
def federation():
    return ct.Federation.from_clients(clients())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"algorithm": ct.IFCA}, r"fit: algorithm must be .*: IFCA\(k=…\), got the class IFCA"),
        ({"algorithm": "ifca"}, r"fit: algorithm must be .*: IFCA\(k=…\), got 'ifca'"),
        ({"algorithm": ct.LocalOnly}, r"LocalOnly\(\), got the class LocalOnly"),
        ({"algorithm": TASK}, r"fit: algorithm must be .*: IFCA\(k=4\), got a Task"),
        ({"task": nn.Linear(2, 2)}, r"Task\.classifier\(module\) or Task\.regressor\(module\), got a Linear"),
        ({"task": "classifier"}, "fit: task must be a Task, .* got 'classifier'"),
        ({"federation": clients()}, r"fit: federation must be .*Federation\.from_clients.* got a list"),
        ({"federation": TASK}, "fit: federation must be a Federation, .* got a Task"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_named(federation, changed, message):
    given = {"algorithm": ct.IFCA(k=2), "task": TASK, "federation": federation, **changed}
    with pytest.raises(ValueError, match=message) as refused:
        ct.fit(**given, rounds=1)
    assert "\n" not in str(refused.value)


@contextmanager
def files_of_at_most(size):
    """Writes beyond this many bytes of a file fail, as they do on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(("file", "width", "room"), [("checkpoint", 500, -100), ("events", 3, 160)])
def test_a_full_disk_costs_no_more_than_the_rounds_since_a_checkpoint(tmp_path, federation, file, width, room):
    """The largest file of the folder is the one that there is no room for, but for a line that tells of a start."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    task = ct.Task.classifier(ct.models.MLP(4, width, 2))
    ct.fit(ct.IFCA(k=2), task, federation, rounds=6, out=whole)
    ct.fit(ct.IFCA(k=2), task, federation, rounds=3, out=cut)
    size = max(path.stat().st_size for path in cut.rglob("*") if path.is_file()) + room
    stopped = f"{file}.* cannot be written: .*; the run stopped after round [34] of 6"
    with files_of_at_most(size), pytest.raises(OSError, match=stopped) as full:
        ct.fit(ct.IFCA(k=2), task, federation, rounds=6, out=cut, resume=True)
    assert "\n" not in str(full.value) and str(cut) in str(full.value) and "resume=True" in str(full.value)
    assert not [path.name for path in cut.rglob("*") if path.name.startswith(".")]  # no temporary file
    ct.fit(ct.IFCA(k=2), task, federation, rounds=6, out=cut, resume=True)
    models = [folder / "final" / "cluster-1.safetensors" for folder in (whole, cut)]
    assert models[0].read_bytes() == models[1].read_bytes()


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "text"
    snapshot.write_text(path, "old")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=f"^{path} cannot be written: No space left on device$"):
        snapshot.write_text(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


@contextmanager
def umask(mask):
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def permissions(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_the_files_of_a_run_have_the_permissions_of_any_new_file(tmp_path, federation, mask, mode):
    with umask(mask):
        ct.fit(ct.IFCA(k=2), TASK, federation, rounds=2, out=tmp_path / "run")
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".toml", ".jsonl", ".safetensors", ".json"}
    assert {permissions(path) for path in files} == {mode}


def test_secrets_are_for_their_owner_alone(tmp_path):
    with umask(0o022):
        snapshot.write_private(tmp_path / "key", "secret")
        snapshot.save(tmp_path / "memory", {"x": torch.zeros(2)}, private=True)
        (tmp_path / ".key2.0a1b.part").touch()  # of a process that was killed
        snapshot.write_private(tmp_path / "key2", "secret")
    assert {path.name: permissions(path) for path in tmp_path.iterdir()} == dict.fromkeys(
        ("key", "key2", "memory"), 0o600
    )


def test_what_clients_remember_on_a_node_is_for_its_owner_alone(tmp_path):
    from coterie.flower.memory import Memory, Moment

    with umask(0o022):
        memory = Memory(tmp_path, "site")
        memory.save(Moment("run", 0, "ab"), {"anna": torch.zeros(3)})
        memory.save_session("run", {"secret": 1})
    assert {permissions(path) for path in tmp_path.rglob("*") if path.is_file()} == {0o600}


def test_the_names_of_the_package_are_those_that_users_need():
    names = {}
    exec("from coterie import *", names)
    assert set(names) - {"__builtins__"} == set(dir(ct)) >= {"fit", "IFCA", "Federation", "Task", "data", "models"}
    assert not set(dir(ct)) & {"annotations", "importlib", "moved", "Any", "TYPE_CHECKING", "core", "storage"}


class Renormed(nn.Module):
    """An operation for which vmap has no rule of its own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return torch.renorm(self.layer(x), 2, 0, 1.0)


@pytest.mark.parametrize("executor", ["vmap", "vectorised"])
def test_an_operation_that_vmap_does_not_know_is_not_the_users_matter(federation, executor, recwarn):
    warnings.simplefilter("always")
    ct.fit(ct.FedAvg(), ct.Task.classifier(Renormed()), federation, rounds=1, executor=executor)
    assert not [str(told.message) for told in recwarn]
    torch.func.vmap(lambda x: torch.renorm(x, 2, 0, 1.0))(torch.ones(2, 3, 3))
    assert "performance drop" in str(recwarn.pop().message)  # the user's own vmap says what it always said


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.int64])
@pytest.mark.parametrize(
    ("method", "task"),
    [(ct.FedAvg(), TASK), (ct.KFED(k=2), None), (ct.UIFCA(k=2), ct.Task.density(ct.models.AffineFlow(4)))],
    ids=["fedavg", "kfed", "uifca"],
)
def test_rows_of_another_type_than_the_models_are_refused(kind, method, task):
    with pytest.raises(ValueError, match=f"{kind}.*; give float32"):
        ct.fit(method, task, ct.Federation.from_clients([(x.to(kind), y) for x, y in clients()]), rounds=1)


def test_words_that_a_model_does_not_know_are_not_asked_for_as_float32():
    words = torch.full((3, 5), 70)
    task = ct.Task.language_model(ct.models.LSTM(9, 4, 8))
    with pytest.raises(ValueError, match=r"does not take rows of shape \(5,\) and type torch.int64$"):
        ct.fit(ct.FedAvg(), task, ct.Federation.from_clients([(words, words)]), rounds=1)


def test_arrays_of_numpy_are_dealt_as_tensors_are():
    x, y = torch.randn(20, 3), torch.arange(20) % 2
    arrays = x.double().numpy(), y.int().numpy()
    dealt = [ct.data.deal(*rows, *rows, clients=4, seed=0) for rows in ((x, y), arrays)]
    for ours, theirs in zip(*(f.train[:3] + f.test[:3] for f in dealt), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(ValueError, match="client 'deal': has 20 rows of x but 19 of y"):
        ct.data.deal(x, y[1:], x, y, clients=4, seed=0)


@pytest.mark.parametrize(
    ("groups", "numbers"),
    [
        (["north", "south", "north", "east"], [0, 1, 0, 2]),
        (np.array(["b", "a", "a", "b"]), [0, 1, 1, 0]),
        ([3, 1, 1, 3], [3, 1, 1, 3]),
        (torch.tensor([1, 0, 0, 1]), [1, 0, 0, 1]),
        (np.array([1.0, 0.0, 2.0, 1.0]), [1, 0, 2, 1]),
    ],
)
def test_groups_are_numbers_or_names(groups, numbers):
    assert ct.Federation.from_clients(clients(), groups=groups).groups.tolist() == numbers


@pytest.mark.parametrize("groups", [["north", 1, 2, 3], [0.5, 1, 2, 3], [None, 1, 2, 3]])
def test_other_groups_are_refused(groups):
    with pytest.raises(ValueError, match="groups must be whole numbers, or all of them names, got"):
        ct.Federation.from_clients(clients(), groups=groups)


def test_little_work_is_not_cut_into_a_chunk_for_every_size_of_client():
    """A chunk costs a millisecond a step whatever is in it."""
    g = torch.Generator().manual_seed(0)
    unequal = [(torch.randn(n, 8, generator=g), torch.randn(n, generator=g)) for n in range(5, 400, 10)]
    federation = ct.Federation.from_clients(unequal)
    run = ct.fit(ct.FedAvg(), ct.Task.regressor(ct.models.MLP(8, 16, 1)), federation, rounds=1)
    assert len([label for label in run._cohort.ledger.chunks if label.startswith("fused")]) <= 2


def warned(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "coterie"]


@pytest.mark.parametrize("method", [ct.IFCA(k=4, lr=100.0), ct.FedAvg(lr=100.0), ct.LocalOnly(lr=100.0)])
def test_steps_that_are_far_too_long_are_told_of(caplog, method):
    ct.fit(method, ct.Task.classifier(ct.models.MLP(64, 16, 10)), ct.data.rotated_digits(12, seed=0), rounds=6)
    assert any("the loss went up" in told or "the commonest label" in told for told in warned(caplog))


def test_a_softmax_regression_whose_loss_explodes_and_falls_a_bit_is_told_of(caplog):
    federation = ct.data.rotated_digits(12, seed=0)
    run = ct.fit(ct.FedAvg(lr=100.0), ct.Task.classifier(ct.models.Linear(64, 10)), federation, rounds=6)
    losses = [row["loss"] for row in run.history]
    assert losses[-1] < max(losses) and [told for told in warned(caplog) if "the loss went up, from 2." in told]


@pytest.mark.parametrize("method", [ct.IFCA(k=4), ct.FedAvg(batch=10, fraction=0.3), ct.LocalOnly(batch=5), ct.CFL()])
@pytest.mark.parametrize("seed", [0, 1])
def test_sound_runs_are_not_doubted(caplog, method, seed):
    task = ct.Task.classifier(ct.models.MLP(64, 16, 10))
    ct.fit(method, task, ct.data.rotated_digits(12, seed=seed), rounds=12, seed=seed)
    assert not warned(caplog)


@pytest.mark.parametrize(
    ("losses", "told"),
    [
        ([], None),
        ([2.0], None),
        ([2.0, 0.1, 0.05, 0.06, 0.05, 0.06], None),
        ([2.3, 2.29, 2.30, 2.29, 2.30], None),  # as good as nothing happened
        ([1.0, 0.8, 0.95, 0.85, 0.97, 0.82, 0.94], None),  # other clients in each round
        ([2.0, 9.0, 0.5, 0.4, 0.3], None),  # it is well in the end
        ([2.0, 9.0, 5.0, 4.0], "from 2 to 4"),
        ([2.0, 1.0, 0.5, 0.4, 0.9, 1.4, 1.9], "again, from 0.4 in round 4 to 1.9"),
        ([0.0, 0.0], None),
    ],
)
def test_when_a_loss_has_gone_up(losses, told):
    found = rising(losses)
    assert found is None if told is None else found.endswith(told)


def regressions(scale):
    """Two columns, of which the second is `scale` times as large as the first."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(6, 20, 2, generator=g)
    y = x.sum(2) + 3.0
    return ct.Federation.from_clients([(own * torch.tensor([1.0, scale]), t) for own, t in zip(x, y, strict=True)])


def test_columns_of_unlike_scale_are_named_where_the_result_is_worse_than_a_constant(caplog):
    task = ct.Task.regressor(ct.models.Linear(2, 1))
    ct.fit(ct.FedAvg(lr=1e-9), task, regressions(1e4), rounds=2)
    (told,) = warned(caplog)
    assert re.search(r"worse than the mean of y \(MSE .*, variance .*\); columns of x differ in scale by 1e4: st", told)
    caplog.clear()
    ct.fit(ct.FedAvg(lr=1e-9), task, regressions(1.0), rounds=2)
    (told,) = warned(caplog)
    assert "worse than the mean of y" in told and "scale" not in told
    caplog.clear()
    ct.fit(ct.FedAvg(lr=0.1), task, regressions(1.0), rounds=20)
    assert not warned(caplog)


def test_a_run_that_diverges_names_unlike_scales():
    task = ct.Task.regressor(ct.models.Linear(2, 1))
    for scale, named in ((1e4, True), (1.0, False)):
        with pytest.raises(ct.Diverged, match="a smaller lr usually helps") as found:
            ct.fit(ct.FedAvg(lr=1e3), task, regressions(scale), rounds=20)
        assert ("helps; columns of x differ in scale by 1e4: standardise them. The" in str(found.value)) == named


def test_a_share_of_many_rows_is_looked_at():
    from coterie.runs import sanity

    whole = ct.Federation.from_clients([(torch.zeros(70_000, 1), torch.zeros(70_000)) for _ in range(3)]).train
    some = sanity._some(whole, 1000)
    assert len(some) == 1000 and some[0] == 0 and some[-1] == 209_999
    assert sanity._mean_over_clients((some >= 140_000).double(), some, whole) == pytest.approx(1 / 3)


def table(names, rows, shift=0.0):
    g = torch.Generator().manual_seed(0)
    return pandas.DataFrame({n: torch.randn(rows, generator=g) + shift for n in names})


def test_tables_keep_the_names_of_their_columns():
    first, second = table("ab", 5), table("ab", 6)[["b", "a"]]
    y = [pandas.Series([0.5] * 5, index=range(7, 12)), pandas.Series([0.5] * 6)]
    federation = ct.Federation.from_clients([(first, y[0]), (second, y[1])], test=[(second, y[1]), (first, y[0])])
    assert federation.columns == ("a", "b") and federation.select([1]).columns == ("a", "b")
    for part in (federation.train, federation.test):
        assert torch.equal(part.x[:5, 0], torch.tensor(first["a"].to_numpy())[:5])
    turned = ct.Federation.from_clients([(first, y[0])], columns=["b", "a"])
    assert torch.equal(turned.train.x, federation.train.client(0)[0].flip(1))
    assert federation.map(lambda i, x, y: (x[:, :1], y)).columns is None


@pytest.mark.parametrize(
    ("x", "columns", "message"),
    [
        (lambda: table("ac", 5), None, "client 1: its columns must be 'a', 'b'; it lacks 'b' and has also 'c'"),
        (lambda: table("abc", 5), None, "client 1: its columns must be 'a', 'b'; it has also 'c'"),
        (lambda: table("ab", 5).assign(a="many"), None, "client 1: its columns must hold numbers"),
        (lambda: table("ab", 5), ["a"], "client 0: its columns must be 'a'; it has also 'b'"),
        (lambda: table("ab", 5).set_axis(["a", "a"], axis=1), None, "client 1: two columns are called 'a'"),
    ],
)
def test_tables_with_other_columns_are_refused(x, columns, message):
    with pytest.raises(ValueError, match=message):
        ct.Federation.from_clients([(table("ab", 5), [0.5] * 5), (x(), [0.5] * 5)], columns=columns)


def test_names_of_columns_must_be_as_many_as_there_are():
    with pytest.raises(ValueError, match=r"2 columns are named, but rows of x have shape \(4,\)"):
        ct.Federation.from_clients(clients(), columns=["a", "b"])


def test_a_new_client_is_assigned_by_the_names_of_its_columns():
    x = table("ab", 8, shift=2.0)
    slopes = [x["a"] * 3, x["a"] * 3, -x["b"], -x["b"]]
    federation = ct.Federation.from_clients([(x, y) for y in slopes])
    run = ct.fit(ct.IFCA(k=2, lr=0.02), ct.Task.regressor(ct.models.Linear(2, 1)), federation, rounds=20)
    assert run.labels[0] == run.labels[1] != run.labels[2]
    assert [run.assign(x[["b", "a"]], y) for y in slopes] == run.labels.tolist()
