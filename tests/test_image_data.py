"""Image data sets by writer and by rotation, LEAF's folders, and Flower's partitions."""

import gzip
import hashlib
import importlib
import json
import struct
import tomllib

import numpy as np
import pytest
import torch

import coterie as ct
from coterie.data import cifar
from coterie.data.rotated import rotated_by_group
from coterie.data.source import folder
from coterie.runs.config import build_federation

mnist = importlib.import_module("coterie.data.mnist")  # in whose place the package has the function


def needs(name, file):
    return pytest.mark.skipif(not (folder() / file).exists(), reason=f"{name} is not in the data folder")


needs_mnist = needs("MNIST", "mnist/train-images-idx3-ubyte.gz")
needs_writers = needs("QMNIST", "mnist/qmnist-test-labels-idx2-int.gz")
needs_cifar10 = needs("CIFAR-10", "cifar-10-batches-bin/test_batch.bin")
needs_femnist = needs("FEMNIST", "femnist/test/all_data.json")


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    return tmp_path


# --- LEAF ---------------------------------------------------------------------------------------------------------


def write_leaf(folder, users, part="train", file="all_data.json"):
    """A shard: users by name, each with its rows and labels."""
    (folder / part).mkdir(parents=True, exist_ok=True)
    content = {
        "users": list(users),
        "num_samples": [len(y) for _, y in users.values()],
        "user_data": {name: {"x": x, "y": y} for name, (x, y) in users.items()},
    }
    path = folder / part / file
    path.write_text(json.dumps(content))
    return path


UNUSABLE = "has rows that cannot be used"
ANNA, BEN = ([[0, 0.5], [1, 0]], [0, 2]), ([[0.25, 1]], [1])


def two_users(folder):
    write_leaf(folder, {"ben": BEN}, file="data_1.json")
    write_leaf(folder, {"anna": ANNA}, file="data_0.json")
    write_leaf(folder, {"ben": BEN, "anna": ([], [])}, "test")
    return folder


def test_a_folder_of_leaf_is_read_from_all_its_files(tmp_path):
    federation = ct.data.leaf(str(two_users(tmp_path)))
    assert federation.ids == ("anna", "ben") and federation.groups is None
    assert federation.train.x.tolist() == [[0, 0.5], [1, 0], [0.25, 1]] and federation.train.x.dtype == torch.float32
    assert federation.train.y.tolist() == [0, 2, 1] and federation.train.y.dtype == torch.int64
    assert federation.test.sizes.tolist() == [0, 1] and federation.test.x.tolist() == [[0.25, 1]]
    again = build_federation(federation.source)
    assert torch.equal(again.train.x, federation.train.x) and again.ids == federation.ids


@pytest.mark.parametrize("whole", ["train", "test", None])
def test_labels_of_leaf_may_be_numbers_with_a_fraction(tmp_path, whole):
    """In one of the parts, too."""
    for part in ("train", "test"):
        write_leaf(tmp_path, {"anna": ([[1.0]], [1]), "x": ([[2]], [1 if part == whole else 0.5])}, part)
    federation = ct.data.leaf(tmp_path)
    assert federation.train.y.tolist() == [1.0, 1 if whole == "train" else 0.5]
    assert federation.train.y.is_floating_point() and federation.test.y.is_floating_point()


def test_a_run_on_a_folder_that_is_a_path_is_repeated_by_its_configuration(tmp_path):
    federation = ct.data.leaf(two_users(tmp_path / "leaf"))
    ct.fit(ct.FedAvg(), ct.Task.classifier(ct.models.Linear(2, 3)), federation, rounds=1, out=tmp_path / "run")
    table = tomllib.loads((tmp_path / "run" / "config.toml").read_text())["data"]
    assert table == {"name": "leaf", "folder": str(tmp_path / "leaf")} and build_federation(table).ids == (
        "anna",
        "ben",
    )


@pytest.mark.parametrize(
    ("user", "part", "message"),
    [
        (([], []), "train", "user 'cleo' has no rows, needs at least 1"),
        (([[1, 2], [1, 2, 3]], [0, 0]), "train", "user 'cleo' has rows of 2 and of 3 numbers"),
        (([[1, 2, 3]], [0]), "train", "rows of user 'cleo' have 3 numbers, those of user 'anna' 2"),
        (([[1, 2, 3]], [0]), "test", "rows of user 'cleo' have 3 numbers, those of user 'anna' 2"),
        (([[1, 2]], [0, 1]), "train", "user 'cleo' has 1 rows of x but 2 of y"),
        (
            (["to be", "or not"], [0, 1]),
            "train",
            f"user 'cleo' {UNUSABLE}: x must be lists of numbers, got 'to be'",
        ),
        (([1, 2], [0, 1]), "train", "user 'cleo' has rows that cannot be used: x must be lists of numbers, got 1"),
        (([["1", "2"]], [0]), "train", f"user 'cleo' {UNUSABLE}: x must be lists of numbers, got ['1', '2']"),
        (([[10**400, 2]], [0]), "train", f"user 'cleo' {UNUSABLE}: x must be lists of numbers, got [{'10000'}"),
        (([[1, 2]], ["a"]), "train", f"user 'cleo' {UNUSABLE}: y must be one number for each row, got 'a'"),
        (([[1, 2]], [[0]]), "train", f"user 'cleo' {UNUSABLE}: y must be one number for each row, got [0]"),
        (([[1, 2]] * 2, [[0], [0, 1]]), "train", f"user 'cleo' {UNUSABLE}: y must be one number for each row, got [0]"),
        ((None, [1]), "train", "user 'cleo' has no table of 'x' and 'y' in 'user_data'"),
    ],
)
def test_rows_of_leaf_that_cannot_be_used_are_named_with_user_and_file(tmp_path, user, part, message):
    two_users(tmp_path)
    other = {"train": "test", "test": "train"}[part]
    write_leaf(tmp_path, {"cleo": ([[1, 2]], [0])}, other, "z.json")
    path = write_leaf(tmp_path, {"cleo": user}, part, "z.json")
    with pytest.raises(ValueError) as error:
        ct.data.leaf(str(tmp_path))
    assert str(error.value).startswith(f"{path}: {message}") and len(str(error.value)) < 250


def test_users_must_be_the_same_and_in_one_file(tmp_path):
    two_users(tmp_path)
    path = write_leaf(tmp_path, {"dan": BEN}, "test", "z.json")
    with pytest.raises(ValueError, match=f"^{path}: user 'dan' is not in {tmp_path / 'train'}; both must have the sam"):
        ct.data.leaf(str(tmp_path))
    write_leaf(tmp_path, {"dan": BEN, "anna": ANNA}, "train", "z.json")
    with pytest.raises(ValueError, match=r"train/z.json: user 'anna' is in data_0.json too"):
        ct.data.leaf(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"users": ["anna"], "user_', "is not a file of JSON (Unterminated string"),
        (b"\xff\xfe\x00", "is not a file of JSON ("),
        (b"[1, 2]", "is not a file of LEAF: it must have a list 'users' and a table 'user_data'"),
        (b"[" * 100_000, "is not a file of JSON ("),
        (b'{"users": []}', "is not a file of LEAF: it must have a list 'users' and a table 'user_data'"),
    ],
)
def test_a_corrupt_file_of_leaf_is_named(tmp_path, content, message):
    path = two_users(tmp_path) / "test" / "all_data.json"
    path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        ct.data.leaf(str(tmp_path))
    assert str(error.value).startswith(f"{path} {message}") and "\n" not in str(error.value)
    path.unlink()
    with pytest.raises(ValueError, match=f"^{path.parent} has no file"):
        ct.data.leaf(str(tmp_path))
    path.parent.rmdir()
    with pytest.raises(ValueError, match=f"^{path.parent} is not a folder"):
        ct.data.leaf(str(tmp_path))


# --- FEMNIST ------------------------------------------------------------------------------------------------------


def compact_femnist(folder, **change):
    """Two writers, image i all of grey i; the last image is a second copy of the first."""
    (folder / "femnist").mkdir(exist_ok=True)
    arrays = {
        "images": np.array([0, 1, 2, 3, 255, 0], np.uint8)[:, None, None].repeat(28, 1).repeat(28, 2),
        "labels": np.array([0, 10, 61, 3, 4, 0], np.uint8),
        "writer": np.array([1, 0, 1, 0, 1, 1], np.int32),
        "split": np.array([0, 0, 0, 1, 1, 1], np.uint8),
        "dup": np.array([0, 0, 0, 0, 0, 1], np.uint8),
        "writer_names": np.array(["f1", "f2"]),
    }
    path = folder / "femnist" / "femnist_2writers.npz"
    np.savez(path, **{**arrays, **change})
    return path


def test_compact_femnist_by_writer_without_second_copies(home):
    compact_femnist(home)
    federation = ct.data.femnist()
    assert federation.ids == ("f1", "f2") and federation.train.x.shape == (3, 1, 28, 28)
    assert (federation.train.x[:, 0, 3, 5] * 255).tolist() == [1, 0, 2] and federation.train.y.tolist() == [10, 0, 61]
    assert federation.train.sizes.tolist() == [1, 2] and federation.test.y.tolist() == [3, 4]
    assert float(federation.test.x[1].max()) == 1.0
    assert ct.data.femnist(min_rows=3).ids == ("f2",)
    assert build_federation(ct.data.femnist(min_rows=3).source).ids == ("f2",)
    with pytest.raises(ValueError, match="femnist: no writer has 4 images, the most is 3"):
        ct.data.femnist(min_rows=4)
    with pytest.raises(ValueError, match="femnist: min_rows must be at least 1, got 0"):
        ct.data.femnist(min_rows=0)


def test_femnist_of_leaf_is_the_same_in_both_forms(home):
    compact_femnist(home)
    compact = ct.data.femnist()
    for part in ("train", "test"):
        rows = {name: compact.part(part).client(i) for i, name in enumerate(compact.ids)}
        users = {name: (x.flatten(1).tolist(), y.tolist()) for name, (x, y) in rows.items()}
        write_leaf(home / "femnist", users, part)
    (home / "femnist" / "femnist_2writers.npz").write_bytes(b"")  # the folder comes first
    federation = ct.data.femnist()
    assert torch.equal(federation.train.x, compact.train.x) and torch.equal(federation.test.y, compact.test.y)


def test_femnist_that_cannot_be_used(home):
    with pytest.raises(ValueError) as error:
        ct.data.femnist()
    for said in (f"FEMNIST is not in {home / 'femnist'}", "https://github.com/TalwalkarLab/leaf", "COTERIE_DATA",
                 "coterie demo needs no data set"):  # fmt: skip
        assert said in str(error.value)
    path = compact_femnist(home, labels=np.full(6, 62, np.uint8))
    with pytest.raises(ValueError, match=f"{path} is not FEMNIST: labels run from 62 to 62, expected 0 to 61"):
        ct.data.femnist()
    compact_femnist(home, images=np.zeros((6, 8, 8), np.uint8))
    with pytest.raises(ValueError, match=r"rows have shape \(64,\), expected \(784,\)"):
        ct.data.femnist()
    compact_femnist(home, writer=np.array([0, 1, 2, 0, 0, 0]))
    with pytest.raises(ValueError, match=f"{path} is damaged"):
        ct.data.femnist()
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=f"{path} cannot be read as .npz") as error:
        ct.data.femnist()
    assert "\n" not in str(error.value)
    compact_femnist(home).rename(home / "femnist" / "again.npz")
    compact_femnist(home)
    with pytest.raises(ValueError, match=r"has 2 files \*.npz, but one is expected: leave one of them there"):
        ct.data.femnist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": np.zeros(())}, r": images must be bytes \(n, 28, 28\), got float64 of shape \(\)"),
        ({"writer": np.zeros(6)}, r": writer must be one whole number for each of the 6 images, got float64 of shape"),
        ({"writer": np.full(6, "a")}, r": writer must be one whole number for each of the 6 images, got <U1 of shape"),
        ({"labels": np.full(6, 3.5)}, r": labels must be one whole number for each of the 6 images, got float64"),
        (
            {"dup": np.zeros((6, 1), int)},
            r": dup must be one whole number for each of the 6 images, got int64 of sh",
        ),
        ({"split": np.zeros(5, int)}, r": split must be one whole number for each of the 6 images, got int64 of"),
        ({"writer_names": np.array("a")}, r": writer_names must be a list of words, got <U1 of shape \(\)"),
        ({"writer_names": np.array([b"a", b"b"])}, r": writer_names must be a list of words, got \|S1 of shape"),
        ({"writer_names": np.array(["a", "b", "c"])}, r": writer 'c' has no training rows \(split 0, dup 0\)"),
        ({"split": np.ones(6, int)}, r": writer 'f1' has no training rows"),
        ({"writer_names": np.array(["a"])}, r" is damaged: writers run from 0 to 1, but writer_names has 1"),
    ],
)
def test_compact_femnist_whose_arrays_have_other_forms(home, change, message):
    path = compact_femnist(home, **change)
    with pytest.raises(ValueError, match=f"^{path}{message}"):
        ct.data.femnist()


def test_compact_femnist_may_have_no_test_rows(home):
    compact_femnist(home, split=np.zeros(6, int))
    assert ct.data.femnist().test.sizes.tolist() == [0, 0]


def test_pixels_of_femnist_are_no_bytes_in_leafs_files(home):
    for part in ("train", "test"):
        write_leaf(home / "femnist", {"f1": ([[255.0] * 784], [3])}, part)
    with pytest.raises(ValueError, match=r"is not FEMNIST: pixels run from 255 to 255, expected 0 to 1"):
        ct.data.femnist()


@needs_femnist
def test_femnist_has_writers_with_training_and_test_rows():
    federation = ct.data.femnist(min_rows=100)
    sizes = federation.train.sizes + federation.test.sizes
    assert 100 < len(federation) <= 287 and int(sizes.min()) >= 100 and int(federation.test.sizes.min()) > 5
    assert federation.train.x.shape[1:] == (1, 28, 28) and len(federation.train.y.unique()) == 62
    assert 0.7 < float(federation.train.x.mean()) <= 1 and float(federation.train.x.max()) == 1  # white paper


# --- MNIST by writer ----------------------------------------------------------------------------------------------


def idx(kind, values):
    values = np.asarray(values)
    head = struct.pack(f">BBBB{values.ndim}I", 0, 0, {">u1": 8, ">i4": 12}[kind], values.ndim, *values.shape)
    return gzip.compress(head + values.astype(kind).tobytes())


@pytest.fixture
def small_mnist(home, monkeypatch):
    """Twelve images, image i all of grey i and of writer 7 or 3 in turn; writer 3 is a student."""
    grey = np.arange(12)[:, None, None].repeat(28, 1).repeat(28, 2)
    written = np.zeros((12, 8), int)
    written[:, 0], written[:, 1], written[:, 2] = np.arange(12) % 10, [0, 4] * 6, [7, 3] * 6
    files = dict(zip(mnist._FILES, [idx(">u1", v) for v in (grey, np.arange(12) % 10, grey[:1], [0])], strict=True))
    (home / "mnist").mkdir()
    monkeypatch.setattr(mnist, "_FILES", {n: hashlib.sha256(c).hexdigest() for n, c in files.items()})
    files["qmnist-train-labels-idx2-int.gz"] = idx(">i4", written)
    monkeypatch.setattr(mnist, "_QMNIST_SHA256", hashlib.sha256([*files.values()][-1]).hexdigest())
    for name, content in files.items():
        (home / "mnist" / name).write_bytes(content)
    return home / "mnist"


def test_mnist_by_writer_holds_out_rows_of_every_writer(small_mnist):
    federation = ct.data.mnist_by_writer(test=1 / 3, seed=1)
    assert federation.ids == ("3", "7") and federation.groups.tolist() == [1, 0]
    assert federation.train.sizes.tolist() == [4, 4] and federation.test.sizes.tolist() == [2, 2]
    for i, rest in enumerate((1, 0)):
        x, y = (torch.cat(both) for both in zip(federation.train.client(i), federation.test.client(i), strict=True))
        grey = (x[:, 0, 0, 0] * 255).round().long()
        assert sorted(grey.tolist()) == list(range(rest, 12, 2)) and torch.equal(grey % 10, y)
    again, other = ct.data.mnist_by_writer(test=1 / 3, seed=1), ct.data.mnist_by_writer(test=1 / 3, seed=2)
    assert torch.equal(again.test.x, federation.test.x) and not torch.equal(other.test.x, federation.test.x)
    with pytest.raises(ValueError, match="mnist_by_writer: test must be above 0 and below 1, got 0"):
        ct.data.mnist_by_writer(test=0)


def test_writers_of_mnist_that_are_not_there_or_damaged(small_mnist, monkeypatch):
    path = small_mnist / "qmnist-train-labels-idx2-int.gz"
    path.write_bytes(b"damaged")
    with pytest.raises(ValueError, match=f"{path} is not the file it should be"):
        ct.data.mnist_by_writer()
    path.unlink()
    monkeypatch.setattr(mnist, "_QMNIST", (small_mnist / "nowhere" / path.name).as_uri())
    with pytest.raises(ValueError, match=r"could not be downloaded from file://.* coterie demo needs no data set"):
        ct.data.mnist_by_writer()


@needs_mnist
@needs_writers
def test_writers_of_mnist_are_none_of_the_official_test_set():
    federation = ct.data.mnist_by_writer()
    assert len(federation) == 539 and federation.groups.bincount().tolist() == [289, 250]
    sizes = federation.train.sizes + federation.test.sizes
    assert int(sizes.sum()) == 60_000 and (int(sizes.min()), int(sizes.max())) == (19, 131)
    tested = mnist._idx(folder() / "mnist" / "qmnist-test-labels-idx2-int.gz")[:10_000, 2]
    assert len(np.unique(tested)) == 297 and not {str(w) for w in tested} & set(federation.ids)


# --- CIFAR-10 by rotation -----------------------------------------------------------------------------------------


def test_groups_see_all_images_each_rotated_by_its_own_angle():
    x, y = torch.arange(12.0 * 4).reshape(12, 1, 2, 2), torch.arange(12)
    given = (x, y, x[:4] + 100, y[:4])
    federation = rotated_by_group(given, "images", clients=8, rows=2, seed=3, turns=(0, 2))
    assert federation.groups.tolist() == [0] * 4 + [1] * 4 and federation.train.sizes.tolist() == [2] * 8
    for group, turn in enumerate((0, 2)):
        own = federation.select(range(4 * group, 4 * group + 4))
        assert len(own.train.y.unique()) == 8  # no image twice
        assert torch.equal(own.train.x, torch.rot90(x[own.train.y], turn, (-2, -1)))
        assert own.test.y.tolist() == [0, 1, 2, 3] * 2  # two machines, each for two clients
        assert torch.equal(own.test.x, torch.rot90(x[own.test.y] + 100, turn, (-2, -1)))
    assert not torch.equal(federation.train.y[:8], federation.train.y[8:])  # each group has an order of its own


@needs_cifar10
def test_rotated_cifar10_is_the_papers():
    federation, upright = ct.data.rotated_cifar10(8, 2500), ct.data.rotated_cifar10(4, 2500, turns=(0,))
    assert federation.groups.tolist() == [0] * 4 + [1] * 4 and federation.train.sizes.tolist() == [2500] * 8
    assert torch.equal(federation.train.client(0)[0], upright.train.client(0)[0])
    assert federation.test.x.shape == (20_000, 3, 32, 32)  # in each group every test image once
    assert torch.equal(federation.test.client(5)[0], torch.rot90(federation.test.client(1)[0], 2, (-2, -1)))
    assert torch.equal(federation.test.client(5)[1], federation.test.client(1)[1])
    assert not torch.equal(federation.train.client(4)[1], federation.train.client(0)[1])
    assert federation.train.x.std((0, 2, 3)).tolist() == pytest.approx([1, 1, 1], abs=0.02)


@needs_cifar10
def test_the_authors_standardise_every_image_by_itself():
    federation = ct.data.rotated_cifar10(4, 10, by_image=True)
    x, theirs = federation.train.x, ct.data.rotated_cifar10(4, 10).train.x
    assert x.mean((1, 2, 3)).abs().max() < 1e-5 and torch.allclose(x.std((1, 2, 3), correction=0), torch.ones(40))
    bright, colour = theirs[7][:, 0, 0].sub(theirs[7][:, 5, 5]), x[7][:, 0, 0].sub(x[7][:, 5, 5])
    ratio = bright * torch.tensor([0.2470, 0.2435, 0.2616]) / colour  # all of an image is scaled alike
    assert torch.allclose(ratio, ratio[:1].expand(3), rtol=1e-3)


def test_an_image_of_one_colour_is_all_zeros():
    assert not cifar._each_standardised(torch.full((2, 3, 4, 4), 7, dtype=torch.uint8)).any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ct.data.rotated_cifar10(turns=2), "rotated_cifar10: turns must be a list, each entry a whole number"),
        (lambda: ct.data.cifar10("4"), "cifar10: clients must be a whole number, got '4'"),
        (lambda: ct.data.mnist_by_writer(test=None), "mnist_by_writer: test must be a number, got None"),
    ],
)
def test_arguments_of_data_sets_have_types(make, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        make()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"turns": (0, 4)}, "turns must be different ones of 0 to 3, quarter turns, got 0, 4"),
        ({"turns": ()}, "turns must be different ones of 0 to 3"),
    ],
)
def test_turns_that_are_none(given, message):
    with pytest.raises(ValueError, match=message):
        ct.data.rotated_cifar10(**given)


@needs_cifar10
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"clients": 201}, "clients must be a positive multiple of 2, got 201"),
        ({"clients": 202}, "101 clients a group with 500 rows each want more than 50000 images"),
        ({"rows": 0}, "rows must be 1 to 10,000, the test images there are, got 0"),
    ],
)
def test_rotated_cifar10_that_cannot_be(given, message):
    with pytest.raises(ValueError, match=f"rotated_cifar10: {message}"):
        ct.data.rotated_cifar10(**given)


# --- partitions of Flower Datasets --------------------------------------------------------------------------------


def pictures(mode="L", n=12):
    """Picture i is 4 high, 5 wide, all of grey i."""
    from PIL import Image

    shape = (n, 4, 5) if mode == "L" else (n, 4, 5, 3)
    return [
        Image.fromarray(p)
        for p in np.arange(n, dtype=np.uint8).reshape(-1, *[1] * (len(shape) - 1)) + np.zeros(shape, np.uint8)
    ]


def partitioned(columns, by=None, features=None, parts=3):
    datasets = pytest.importorskip("datasets")
    partitioners = pytest.importorskip("flwr_datasets.partitioner")
    own = partitioners.NaturalIdPartitioner(by) if by else partitioners.IidPartitioner(parts)
    own.dataset = datasets.Dataset.from_dict(columns, features=features)
    return own


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_pictures_of_a_partitioner_are_floats_with_channels_first(mode):
    own = partitioned({"image": pictures(mode), "label": [i % 3 for i in range(12)]})
    federation = ct.Federation.from_partitioner(own, test=0.25, seed=0)
    depth = {"L": 1, "RGB": 3}[mode]
    assert federation.train.x.shape == (9, depth, 4, 5) and federation.train.x.dtype == torch.float32
    assert federation.train.sizes.tolist() == [3] * 3 and federation.test.sizes.tolist() == [1] * 3
    for part in (federation.train, federation.test):
        assert torch.equal((part.x[:, -1, 3, 4] * 255).round().long() % 3, part.y)
    whole = ct.Federation.from_partitioner(own, test=0)
    assert whole.test is None and sorted((whole.train.x[:, 0, 0, 0] * 255).round().tolist()) == list(range(12))
    assert not torch.equal(ct.Federation.from_partitioner(own, seed=1).test.x, federation.test.x)
    run = ct.fit(ct.FedAvg(), ct.Task.classifier(ct.models.MLP(20 * depth, 3)), federation, rounds=1)
    assert len(run.models) == 1


def test_clients_of_a_partitioner_by_natural_ids_have_their_names():
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({
        "pixels": datasets.Array2D((2, 2), "uint8"), "kind": datasets.ClassLabel(names=["a", "b"]),
        "writer": datasets.Value("string"),
    })  # fmt: skip
    columns = {"pixels": [[[0, 51], [102, 255]]] * 6, "kind": ["a", "b"] * 3, "writer": ["u", "v", "v", "u", "v", "v"]}
    federation = ct.Federation.from_partitioner(partitioned(columns, "writer", features), "pixels", "kind", test=0)
    assert federation.ids == ("u", "v") and federation.train.sizes.tolist() == [2, 4]
    assert torch.allclose(federation.train.x[0], torch.tensor([[0, 0.2], [0.4, 1]])) and federation.train.y.max() == 1


def test_bytes_in_lists_and_pixels_of_any_kind_run_from_0_to_1():
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"x": datasets.Sequence(datasets.Value("uint8")), "y": datasets.Value("int64")})
    own = partitioned({"x": [[0, 255]] * 6, "y": [0] * 6}, features=features)
    federation = ct.Federation.from_partitioner(own, "x", "y", test=0)
    assert federation.train.x.tolist() == [[0.0, 1.0]] * 6
    from PIL import Image

    for dtype, most in ((np.uint16, 65535), (bool, True)):
        image = Image.fromarray(np.full((2, 2), most, dtype))
        own = partitioned({"image": [image] * 6, "label": [0] * 6})
        x = ct.Federation.from_partitioner(own, test=0).train.x
        assert x.dtype == torch.float32 and x.shape == (6, 1, 2, 2) and bool((x == 1).all()), dtype


def test_an_empty_partition_is_named():
    partitioners = pytest.importorskip("flwr_datasets.partitioner")
    some = partitioners.DirichletPartitioner(12, "y", alpha=0.02, min_partition_size=0, self_balancing=False)
    some.dataset = partitioned({"x": [[0.5]] * 40, "y": [0, 1] * 20}).dataset
    none = next(i for i in range(12) if not len(some.load_partition(i)))
    with pytest.raises(ValueError, match=f"client {none}: has no train rows, needs at least 1; some partitioners have"):
        ct.Federation.from_partitioner(some, "x", "y")


def test_numbers_of_a_partitioner_stay_as_they_are():
    own = partitioned({"x": [[0.5, i] for i in range(6)], "y": [i / 2 for i in range(6)]})
    federation = ct.Federation.from_partitioner(own, "x", "y", test=0)
    assert federation.train.x.shape == (6, 2) and federation.train.x.dtype == federation.train.y.dtype == torch.float32


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"img": [1.0, 2.0, 3.0], "label": [0, 1, 2]},
            "client 0: its partition has no column 'image'; its columns are",
        ),
        ({"image": [[1.0]] * 3, "label": ["a", "b", "c"]}, "client 0: column 'label' must hold numbers, got"),
        (
            {"image": [[1.0], [1.0], [1.0], [1.0, 2.0]] * 3, "label": [0] * 12},
            "column 'image' has values of shape (1,)",
        ),
    ],
)
def test_partitions_that_cannot_be_used(columns, message):
    with pytest.raises(ValueError) as error:
        ct.Federation.from_partitioner(partitioned(columns), test=0)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_what_is_no_partitioner_is_refused():
    partitioners = pytest.importorskip("flwr_datasets.partitioner")
    with pytest.raises(ValueError, match="from_partitioner: the partitioner has no dataset yet; set its dataset"):
        ct.Federation.from_partitioner(partitioners.IidPartitioner(3))
    with pytest.raises(ValueError, match=r"takes a Partitioner of flwr_datasets, .* got a list"):
        ct.Federation.from_partitioner([1, 2])
    with pytest.raises(ValueError, match="test must be a share from 0 to below 1, got 1"):
        ct.Federation.from_partitioner(object(), test=1)
