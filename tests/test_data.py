import gzip
import hashlib

import numpy as np
import pytest
import torch

import coterie as ct
from coterie.config import build_federation
from coterie.data.mnist import _idx
from coterie.data.source import fetch, folder
from coterie.data.synthetic import linear_truth

needs_mnist = pytest.mark.skipif(
    not (folder() / "mnist" / "train-images-idx3-ubyte.gz").exists(), reason="MNIST is not in the data folder"
)


def same(a, b):
    return torch.equal(a.train.x, b.train.x) and torch.equal(a.train.y, b.train.y)


def test_rotated_digits_are_turned_by_group():
    federation = ct.data.rotated_digits(8, seed=0)
    plain = ct.data.digits(8, 0, copies=4)
    for i in (0, 2, 4, 6):
        x, y = plain.train.client(i)
        assert torch.equal(federation.train.client(i)[0], torch.rot90(x, i // 2, (-2, -1)))
        assert torch.equal(federation.train.client(i)[1], y)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_source_builds_the_same_federation_again(seed):
    federation = ct.data.mixture(ct.data.dirichlet(ct.data.rotated_digits(8, seed=seed), alpha=0.3), p=0.5)
    assert [c["name"] for c in federation.source["change"]] == ["dirichlet", "mixture"]
    assert same(build_federation(federation.source), federation)


def test_permuted_and_swapped_labels():
    plain = ct.data.digits(8)
    permuted, swapped = ct.data.permute_labels(plain, 4, seed=1), ct.data.swap_labels(plain, 4, seed=1)
    tables = set()
    for i in range(8):
        y, p, s = (f.train.client(i)[1] for f in (plain, permuted, swapped))
        assert len(set(zip(y.tolist(), p.tolist(), strict=True))) == len(y.unique())  # one to one
        assert 0 < len(y[y != s].unique()) <= 2
        tables.add(tuple(sorted(y[y != s].unique().tolist())))
    assert len(tables) == 4 and permuted.groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_groups_multiply_where_changes_compose():
    both = ct.data.permute_labels(ct.data.rotate(ct.data.digits(12), 2), 3)
    assert both.groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


@pytest.mark.parametrize("alpha", [1e-4, 0.1, 100.0])
@pytest.mark.parametrize("change", [ct.data.dirichlet, ct.data.quantity_skew])
def test_dealing_anew_ends_loses_nothing_and_leaves_nobody_empty(change, alpha):
    plain = ct.data.rotated_digits(40, seed=0)
    dealt = change(plain, alpha=alpha, seed=3)
    assert int(dealt.train.sizes.min()) >= 1
    assert torch.equal(dealt.groups, plain.groups)
    for part in ("train", "test"):
        before, after = plain.split(part), dealt.split(part)
        assert torch.equal(before.y.bincount(), after.y.bincount())
        assert before.x.sum() == pytest.approx(float(after.x.sum()), rel=1e-5)
    if alpha == 100.0:
        assert int(dealt.train.sizes.max()) < 2 * int(dealt.train.sizes.min())


def test_mixture_keeps_a_share():
    plain = ct.data.rotated_digits(8, seed=0)
    for p in (0.0, 0.5, 1.0):
        mixed = ct.data.mixture(plain, p=p, seed=1)
        assert torch.equal(mixed.train.offsets, plain.train.offsets)
        kept = (mixed.train.x == plain.train.x).flatten(1).all(1).float().mean()
        assert float(kept) == pytest.approx(p, abs=0.05)


def test_linear_mixture_is_what_it_says():
    federation = ct.data.linear_mixture(4, 50, 20, 2, 0.5, 0.0, seed=2)
    truth = linear_truth(20, 2, 0.5, 2)
    for i in range(4):
        x, y = federation.train.client(i)
        assert torch.allclose(x @ truth[i // 2], y, atol=1e-4)
    assert set(truth.unique().tolist()) == {0.0, 0.5}
    assert linear_truth(20, 2, 0.5, 2, "text").norm(dim=1).tolist() == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ct.data.rotated_digits(10), "clients must be a positive multiple of 4, got 10"),
        (lambda: ct.data.digits(5000), "1437 rows cannot be dealt to 5000 clients"),
        (lambda: ct.data.rotate(ct.data.digits(4), 5), "groups must be 1 to 4"),
        (lambda: ct.data.rotate(ct.data.linear_mixture(2, 3, 4)), "rows must be images, got rows of shape (4,)"),
        (lambda: ct.data.permute_labels(ct.data.digits(2), 4), "2 clients cannot form 4 groups"),
        (lambda: ct.data.permute_labels(ct.data.linear_mixture(2, 3, 4)), "labels must be whole numbers"),
        (lambda: ct.data.linear_mixture(4, 3, 2, groups=0), "groups must be at least 1, got 0"),
        (lambda: ct.data.rotated_digits(4, groups=0), "groups must be 1 to 4"),
        (lambda: ct.data.dirichlet(ct.data.digits(2), alpha=0), "alpha must be above 0, got 0"),
        (lambda: ct.data.mixture(ct.data.digits(2), p=2), "p must be between 0 and 1, got 2"),
    ],
)
def test_bad_requests(make, message):
    with pytest.raises(ValueError) as error:
        make()
    assert message in str(error.value)


@needs_mnist
def test_rotated_mnist_is_the_papers():
    federation = ct.data.rotated_mnist(1200, 200, seed=0)
    assert federation.train.x.shape == (240_000, 1, 28, 28) and len(federation) == 1200
    assert federation.groups.bincount().tolist() == [300] * 4
    turned = federation.train.client(300)[0][0]
    assert float(turned.max()) <= 1.0
    tests = federation.test.x.reshape(4, 6, 10_000, 784)  # every test image occurs six times in every rotation
    assert torch.equal(tests[0, 0], tests[0, 5])


def test_a_damaged_data_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "train-images-idx3-ubyte.gz").write_bytes(b"not it")
    with pytest.raises(ValueError, match="is not the file it should be"):
        ct.data.mnist(4)


def test_a_file_that_is_nowhere_says_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    with pytest.raises(ValueError) as error:
        fetch("set/file", (tmp_path / "no-such-file").as_uri(), "0")
    assert "set COTERIE_DATA" in str(error.value) and not list(tmp_path.rglob("*.part"))


def test_a_download_is_verified_and_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path / "data"))
    home = tmp_path / "home"
    home.write_bytes(b"content")
    path = fetch("set/file", home.as_uri(), hashlib.sha256(b"content").hexdigest())
    assert path.read_bytes() == b"content"


def test_idx_files(tmp_path):
    values = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    raw = bytes([0, 0, 8, 3]) + b"".join(n.to_bytes(4, "big") for n in values.shape) + values.tobytes()
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(raw))
    assert np.array_equal(_idx(path), values)
