import json
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

import coterie as ct
from coterie.core.federation import Federation, Packed
from coterie.engines import store
from coterie.storage.packed import PIECE
from coterie.storage.pages import Pages


def client(n=3, d=2, value=0.0):
    return np.full((n, d), value), np.zeros(n)


def test_clients_are_read_back_as_they_were_given():
    fed = Federation.from_clients([client(3, value=1), client(5, value=2)], groups=[0, 1], ids=["a", "b"])
    assert len(fed) == 2 and fed.train.sizes.tolist() == [3, 5]
    assert torch.equal(fed.train.client(1)[0], torch.full((5, 2), 2.0))
    assert fed.part("test") is fed.train  # tested on its training rows where there are no others


def test_renumbering_clients_without_names_keeps_their_numbers():
    fed = Federation.from_clients([client() for _ in range(4)])
    assert fed.select([3, 1]).numbers.tolist() == [3, 1] == fed.numbers[[3, 1]].tolist()


def test_select_keeps_names_and_with_them_the_random_numbers():
    fed = Federation.from_clients([client() for _ in range(4)])
    back = fed.select([3, 1])
    assert back.ids == ("3", "1") and len(back) == 2
    named = Federation.from_clients([client(), client()], ids=["x", "y"])
    assert torch.equal(named.numbers.flip(0), named.select([1, 0]).numbers)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train": []}, "at least one client, got 0"),
        ({"train": [client(), client(0)]}, "client 1: has no train rows"),
        ({"train": [client(), client(d=3)]}, "client 1: its rows have shape (3,), the rows of client 0 (2,)"),
        ({"train": [client(), (np.zeros((3, 2)), np.zeros(2))]}, "client 1: has 3 rows of x but 2 of y"),
        (
            {"train": [client(), client(4, value=np.nan)]},
            "client 1: 4 of its 4 train rows have a value of x that is NaN",
        ),
        ({"train": [client(), client(value=np.inf)], "ids": ["a", "b"]}, "client 'b': 3 of its 3 train rows"),
        ({"train": [client()], "test": [client(value=np.nan)]}, "client 0: 3 of its 3 test rows"),
        (
            {"train": [client()], "test": [client(d=3)]},
            "client 0: its test rows have shape (3,), the rows of client 0 (2,)",
        ),
        ({"train": [(np.zeros((2, 1)), ["a", "b"])]}, "client 0: its rows cannot be read as an array of numbers"),
        (
            {"train": [client(), (np.zeros((3, 2)), np.zeros((3, 2)))]},
            "client 1: its targets are torch.float32 of shape (2,)",
        ),
        ({"train": [(3.0, np.zeros(1))]}, "client 0: its rows must be an array with one entry per row"),
        (
            {"train": [client(), (np.zeros((3, 2), dtype=int), np.zeros(3))]},
            "client 1: its rows are torch.int64, the rows of client 0 torch.float32",
        ),
        ({"train": [client()], "groups": [0, 1]}, "groups is given for 2 clients, but there are 1"),
        ({"train": [client(), client()], "ids": ["a", "a"]}, "two clients are called 'a'"),
    ],
)
def test_bad_input_names_the_client(arguments, message, tmp_path):
    with pytest.raises(ValueError) as error:
        Federation.from_clients(**arguments)
    assert message in str(error.value)
    if not arguments["train"]:
        message = "train must have at least one client, got 0"
    with pytest.raises(ValueError) as error:
        Federation.create(tmp_path / "mapped", **arguments)
    assert message in str(error.value)
    assert not list(tmp_path.iterdir())  # a write that fails leaves nothing


# --- federations that are mapped from files ------------------------------------------------------------------------


def equal(a, b):
    return (
        torch.equal(a.x, b.x) and torch.equal(a.y, b.y) and torch.equal(a.offsets, b.offsets) and a.x.dtype == b.x.dtype
    )


def write(path, fed):
    """A federation of the memory written to a folder, one client at a time."""
    one_by_one = (fed.train.client(i) for i in range(len(fed)))
    tests = None if fed.test is None else (fed.test.client(i) for i in range(len(fed)))
    return Federation.create(path, one_by_one, tests, fed.groups, fed.ids)


def test_what_is_written_is_read_back(ragged, tmp_path):
    named = Federation(ragged.train, ragged.test, ragged.groups, tuple(f"name\n{i}" for i in range(len(ragged))))
    fed = write(tmp_path / "deep" / "fed", named)
    assert equal(fed.train, named.train) and equal(fed.test, named.test)
    assert torch.equal(fed.groups, named.groups) and fed.ids == named.ids and len(fed) == len(named)
    again = Federation.create(tmp_path / "pieces", [named.train], [named.test], named.groups.tolist(), named.ids)
    assert equal(again.train, fed.train) and equal(again.test, fed.test)
    assert fed.source == {"name": "mapped", "path": str(tmp_path / "deep" / "fed")}
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["fed"]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.bfloat16, torch.int64])
def test_rows_of_any_type_are_read_back(dtype, tmp_path):
    x = torch.arange(24).reshape(6, 2, 2).to(dtype)
    fed = Federation.create(tmp_path / "fed", [(x[:4], torch.arange(4)), (x[4:], torch.arange(2))])
    assert torch.equal(fed.train.x, x) and fed.train.x.dtype == dtype and fed.train.y.tolist() == [0, 1, 2, 3, 0, 1]


def test_clients_may_have_no_test_rows(tmp_path):
    fed = Federation.create(tmp_path / "fed", [client(), client(4)], [client(0), client(0)])
    assert fed.test.sizes.tolist() == [0, 0] and fed.part("test") is fed.train


def test_names_and_groups_may_be_known_as_late_as_their_clients(tmp_path):
    names, groups = [], []

    def clients():
        x = np.zeros((3, 2))  # filled anew for every client
        for i in range(3):
            names.append(f"late {i}")
            groups.append(i % 2)
            x[:] = i
            yield x, x[:, 0]

    fed = Federation.create(tmp_path / "fed", clients(), groups=groups, ids=names)
    assert fed.ids == ("late 0", "late 1", "late 2") and fed.groups.tolist() == [0, 1, 0]
    assert fed.train.y.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_a_bad_row_far_down_the_stream_is_found_and_named(tmp_path):
    rows = PIECE // 32
    x = torch.zeros(3 * rows, 8)
    x[2 * rows + 5, 3] = torch.nan
    pieces = [Packed(part, part[:, 0], torch.tensor([0, 4, rows])) for part in x.split(rows)]
    with pytest.raises(ValueError, match=r"client 'e2': 1 of its .* train rows .* \(the first is row 1\)"):
        Federation.create(tmp_path / "fed", pieces, ids=(f"{w}{i}" for i in range(3) for w in "se"))
    crooked = Packed(torch.zeros(3, 2), torch.zeros(3), torch.tensor([0, 4]))
    with pytest.raises(
        ValueError, match="client 2: the offsets of the piece that begins with it must rise from 0 to 3"
    ):
        Federation.create(tmp_path / "fed", [client(), client(), crooked])


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_a_write_that_breaks_off_leaves_nothing(error, tmp_path):
    def clients():
        yield client()
        raise error

    with pytest.raises(error):
        Federation.create(tmp_path / "fed", clients())
    assert not list(tmp_path.iterdir())


def test_a_killed_write_is_no_federation_and_in_nobodys_way(tmp_path):
    (tmp_path / ".fed.part").mkdir()
    (tmp_path / ".fed.part" / "train.x").write_bytes(b"half")
    with pytest.raises(ValueError, match=r"fed holds no federation .* federation.json is missing"):
        Federation.open(tmp_path / "fed")
    assert len(Federation.create(tmp_path / "fed", [client()])) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["fed"]


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "mine").mkdir()
    with pytest.raises(ValueError, match="mine exists already"):
        Federation.create(tmp_path / "mine", [client()])


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("train.x", lambda b: b[:50], "train.x is cut short: it has 50 of 88 bytes and ends in client 'b'"),
        ("train.y", lambda b: b[:41], "train.y is cut short: it has 41 of 44 bytes and ends in client 'c'"),
        ("train.offsets", lambda b: b[:20], "train.offsets is cut short: it has 20 of 32 bytes and ends in client 'b'"),
        ("groups", lambda b: b[:8], "groups is cut short: it has 8 of 24 bytes and ends in client 'b'"),
        ("train.x", lambda b: b + b"0", "train.x has 89 bytes, but 11 rows of 8 bytes are 88"),
        ("train.offsets", lambda b: b[:-1] + b"1", "train.offsets runs from 0 to"),
        ("train.y", None, "train.y is missing"),
        ("ids.json", None, "ids.json is missing"),
        ("ids.json", lambda b: b[:-4], "ids.json is damaged"),
        ("federation.json", None, "federation.json is missing"),
        ("federation.json", lambda b: b[:-4], "federation.json is damaged"),
        ("federation.json", lambda b: b"[]", "version None of the format, but only version 1 is known"),
        ("federation.json", lambda b: b.replace(b'"version": 1', b'"version": 7'), "version 7 of the format"),
        ("federation.json", lambda b: b.replace(b"little", b"big"), "written big-endian"),
        ("federation.json", lambda b: b.replace(b"float32", b"float7"), "does not describe a federation"),
        ("federation.json", lambda b: b.replace(b'"rows"', b'"cows"'), "does not describe a federation (KeyError"),
    ],
)
def test_a_damaged_folder_is_refused_and_says_where(file, change, message, tmp_path):
    folder = tmp_path / "fed"
    Federation.create(folder, [client(3), client(5), client(3)], groups=[0, 1, 0], ids="abc")
    content = (folder / file).read_bytes()
    (folder / file).unlink()
    if change is not None:
        (folder / file).write_bytes(change(content))
    with pytest.raises(ValueError) as error:
        Federation.open(folder)
    assert message in str(error.value) and str(folder) in str(error.value)


@pytest.mark.parametrize("executor", ["vectorised", "vmap", "sequential"])
def test_training_on_mapped_rows_is_the_same_to_the_last_bit(executor, ragged, task, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "STREAMED", 10_000)  # so that there are many chunks
    monkeypatch.setattr(store, "FEW", 2)
    even = Federation(Packed(ragged.train.x[:160], ragged.train.y[:160], torch.arange(17) * 10))
    for name, fed, fraction in (("ragged", ragged, 1.0), ("even", even, 1.0), ("some", even, 0.6)):
        mapped = write(tmp_path / name, fed)
        algorithm = ct.IFCA(2, tau=2, init="random", fraction=fraction)
        runs = [ct.fit(algorithm, task, f, rounds=2, executor=executor) for f in (fed, mapped)]
        assert all(torch.equal(a[n], b[n]) for a, b in zip(*(r.models for r in runs), strict=True) for n in a)
        assert (runs[0].labels == runs[1].labels).all()
        assert (runs[0].scores.per_client == runs[1].scores.per_client).all()


def test_the_task_is_checked_piece_by_piece_and_names_the_client(tmp_path, task, monkeypatch):
    monkeypatch.setattr("coterie.core.federation.CHECKED", 3000)
    clients = [(np.zeros((4, 64)), np.full(4, i == 17)) for i in range(20)]
    fed = Federation.create(tmp_path / "fed", ((x, y * 12) for x, y in clients))
    with pytest.raises(ValueError, match="client 17: labels run from 12 to 12, but the model has classes 0 to 9"):
        fed.check(task)


def test_rows_are_moved_to_a_device_a_piece_at_a_time(ragged, tmp_path):
    mapped = write(tmp_path / "fed", ragged).train
    moved = store.move(mapped, torch.device("cpu"))
    assert equal(moved, ragged.train) and moved.pages is None


def test_memory_follows_the_chunk_and_not_the_federation(tmp_path):
    """In a process of its own, training on 256 MiB takes far less memory beyond what 128 clients take."""
    script = textwrap.dedent("""
        import sys, torch, coterie as ct
        from coterie_lab.bench.speed import peak_mib
        from coterie.core.federation import Packed

        x = torch.randn(128 * 16, 1023)
        piece = Packed(x, x.sum(1), torch.arange(129) * 16)

        def peak(pieces):
            fed = ct.Federation.create(f"{sys.argv[1]}/{pieces}", [piece] * pieces)
            ct.fit(ct.FedAvg(lr=1e-4), ct.Task.regressor(ct.models.Linear(1023, 1)), fed, rounds=2)
            return peak_mib(torch.device("cpu"))

        print(peak(1), peak(32))
    """)
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, capture_output=True, text=True)
    few, many = (float(v) for v in done.stdout.replace("None", "nan").split())
    assert (tmp_path / "32" / "train.x").stat().st_size > 255 * 2**20
    assert not many - few > 128, f"{few} MiB with 128 clients, {many} MiB with 4096"


def test_a_file_larger_than_memory_can_be_mapped(tmp_path):
    size = 2 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with (tmp_path / "hole").open("wb") as f:
        f.truncate(size)  # takes no room on the disk
    values = Pages(tmp_path / "hole").tensor(torch.float32, (1024,))
    assert len(values) == size // 4096 and not bool(values[-1].any())


def test_a_configuration_may_name_a_folder(tmp_path, ragged):
    from coterie.runs.config import build_federation

    folder = str(tmp_path / "fed")
    write(folder, ragged)
    fed = build_federation({"name": "mapped", "path": folder})
    assert equal(fed.train, ragged.train) and fed.source == {"name": "mapped", "path": folder}
    assert json.loads((tmp_path / "fed" / "federation.json").read_text())["train"]["clients"] == 12


@pytest.mark.parametrize(
    ("clients", "got"),
    [([9], "9"), ([-1], "-1"), ([1.5], "1.5"), (torch.tensor([True, False]), "True"), (["0"], "'0'"), ([], r"\[\]")],
)
def test_select_says_which_clients_there_are(clients, got):
    federation = ct.Federation.from_clients([(torch.zeros(3, 2), torch.zeros(3))] * 4)
    with pytest.raises(ValueError, match=f"clients must be whole numbers from 0 to 3, at least one, got {got}"):
        federation.select(clients)


def test_map_names_the_client_whose_rows_it_cannot_use():
    federation = ct.Federation.from_clients([(torch.zeros(3, 2), torch.zeros(3))] * 2)
    with pytest.raises(ValueError, match=r"client 0: change must return a pair \(x, y\), got NoneType"):
        federation.map(lambda i, x, y: None)
    with pytest.raises(ValueError, match=r"client 1 has rows and targets of shapes \(\(1,\), \(\)\), but client 0"):
        federation.map(lambda i, x, y: (x[:, i:], y))


def test_clients_without_labels_are_named():
    rows = torch.zeros(3, 2), torch.zeros(3, dtype=torch.long)
    federation = ct.Federation.from_clients([rows, (rows[0], None)])
    with pytest.raises(ValueError, match=r"client 1: has no labels \(y is None, or -1 throughout\)"):
        ct.fit(ct.FedAvg(), ct.Task.classifier(ct.models.Linear(2, 2)), federation, rounds=1)
