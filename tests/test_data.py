import gzip
import hashlib
import io
import tarfile

import numpy as np
import pytest
import torch

import coterie as ct
from coterie.data import cifar
from coterie.data.mnist import _idx
from coterie.data.source import fetch, folder
from coterie.data.synthetic import linear_truth
from coterie.runs.config import build_federation


def needs(name, file):
    return pytest.mark.skipif(not (folder() / file).exists(), reason=f"{name} is not in the data folder")


needs_mnist = needs("MNIST", "mnist/train-images-idx3-ubyte.gz")
needs_cifar10 = needs("CIFAR-10", "cifar-10-batches-bin/test_batch.bin")
needs_ag_news = needs("AG News", "ag_news_csv/train.csv")
needs_panels = needs("a panel", "tables/orange_juice.csv.xz")
needs_newsgroups = needs("20 Newsgroups", "20news-bydate/20news-bydate-train")


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


def test_keep_labels_shares_the_labels_out_and_leaves_the_groups():
    plain = ct.data.rotated_digits(12, seed=0)
    kept = ct.data.keep_labels(plain, blocks=3)
    assert torch.equal(kept.groups, plain.groups)
    for part in ("train", "test"):
        for i in range(12):
            x, y = plain.part(part).client(i)
            own = torch.isin(y, torch.tensor([[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]][i % 3]))
            assert torch.equal(kept.part(part).client(i)[0], x[own])
            assert torch.equal(kept.part(part).client(i)[1], y[own])
    assert same(build_federation(kept.source), kept)


def test_deal_by_rows():
    x, y = torch.arange(100.0)[:, None], torch.arange(100)
    some = ct.data.deal(x, y, x[:9], y[:9], clients=4, seed=1, copies=2, rows=30)
    assert some.train.sizes.tolist() == [30] * 4 and some.test.sizes.tolist() == [5, 4, 5, 4]
    whole = ct.data.deal(x, y, x[:9], y[:9], clients=4, seed=1, copies=2)
    assert torch.equal(some.test.x, whole.test.x)
    for first in (0, 2):
        assert len(torch.cat([some.train.client(i)[1] for i in (first, first + 1)]).unique()) == 60


@pytest.mark.parametrize("alpha", [1e-4, 0.1, 100.0])
@pytest.mark.parametrize("change", [ct.data.dirichlet, ct.data.quantity_skew])
def test_dealing_anew_ends_loses_nothing_and_leaves_nobody_empty(change, alpha):
    plain = ct.data.rotated_digits(40, seed=0)
    dealt = change(plain, alpha=alpha, seed=3)
    assert int(dealt.train.sizes.min()) >= 1
    assert torch.equal(dealt.groups, plain.groups)
    for part in ("train", "test"):
        before, after = plain.part(part), dealt.part(part)
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


@pytest.mark.parametrize("clients", [8, 11])
def test_mixed_groups_exchange_rows_in_pairs(clients):
    digits = ct.data.digits(clients, seed=0)
    sizes = (4, 4, 3) if clients == 11 else 4
    plain = ct.data.rotate(digits, sizes)
    groups, turned = plain.groups.tolist(), plain.train.x
    for p in (0.0, 0.5, 1.0):
        mixed = ct.data.mixed_groups(plain, p=p, seed=1)
        assert torch.equal(mixed.train.offsets, plain.train.offsets) and mixed.groups.tolist() == groups
        alone = 0
        for i in range(clients):
            own = mixed.train.client(i)[0]
            whose = [int((x == turned).flatten(1).all(1).nonzero()[0]) for x in own]
            owners = [int((plain.train.offsets <= row).sum()) - 1 for row in whose]
            others = {j for j in owners if j != i}
            assert len(others) <= 1 and all(groups[j] != groups[i] for j in others)
            alone += not others
            if others:
                assert owners.count(i) / len(owners) == pytest.approx(p, abs=0.02)
        assert alone == (clients if p == 1 else clients % 2)
    again = ct.data.mixed_groups(plain, p=0.5, seed=2)
    assert not torch.equal(again.train.x, ct.data.mixed_groups(plain, p=0.5, seed=1).train.x)


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
        (lambda: ct.data.keep_labels(ct.data.digits(4), 11), "blocks must be 1 to 10, the classes there are, got 11"),
        (
            lambda: ct.data.keep_labels(ct.Federation.from_clients([(torch.zeros(2, 1), [0, c]) for c in (9, 4)])),
            "client 1 has no train rows with labels [5, 6, 7, 8, 9]",
        ),
        (
            lambda: ct.data.deal(*[torch.zeros(9)] * 4, clients=2, seed=0, rows=5),
            "rows must be 1 to 4, for 9 rows are dealt to 2 clients, got 5",
        ),
        (lambda: ct.data.mixture(ct.data.digits(2), p=2), "p must be between 0 and 1, got 2"),
        (lambda: ct.data.mixed_groups(ct.data.rotated_digits(4), p=-1), "p must be between 0 and 1, got -1"),
        (lambda: ct.data.mixed_groups(ct.data.digits(4)), "no group may have more than half of the 4 clients, but one"),
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


@needs_mnist
def test_mnist_by_rows():
    federation = ct.data.mnist(20, seed=1, rows=100)
    assert federation.train.sizes.tolist() == [100] * 20 and federation.test.sizes.tolist() == [500] * 20
    assert federation.source == {"name": "mnist", "clients": 20, "seed": 1, "rows": 100}
    with pytest.raises(ValueError, match="rows must be 1 to 3000"):
        ct.data.mnist(20, rows=3001)


@needs_cifar10
def test_cifar10_is_standardised():
    federation = ct.data.cifar10(20, rows=500)
    assert federation.train.x.shape == (10_000, 3, 32, 32) and federation.train.x.dtype == torch.float32
    assert federation.test.sizes.tolist() == [500] * 20 and federation.test.y.bincount().tolist() == [1000] * 10
    assert float(federation.train.x.mean((0, 2, 3)).abs().max()) < 0.02
    assert federation.train.x.std((0, 2, 3)).tolist() == pytest.approx([1, 1, 1], abs=0.02)


def records(labels):
    """A file of CIFAR-10: image i is all i."""
    images = np.arange(len(labels), dtype=np.uint8)[:, None].repeat(3072, 1)
    return np.concatenate([np.array(labels, np.uint8)[:, None], images], 1).tobytes()


def archive_of_cifar10(tmp_path, labels):
    with tarfile.open(tmp_path / "home.tar.gz", "w:gz") as archive:
        for name in cifar._FILES:
            entry = tarfile.TarInfo(name)
            entry.size = len(records(labels))
            archive.addfile(entry, io.BytesIO(records(labels)))
    return (tmp_path / "home.tar.gz").as_uri(), hashlib.md5((tmp_path / "home.tar.gz").read_bytes()).hexdigest()


@pytest.fixture
def small_cifar10(tmp_path, monkeypatch):
    """An archive with four images a file at its public home."""
    url, digest = archive_of_cifar10(tmp_path, [9, 1, 2, 3])
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path / "data"))
    for name, value in (("_URL", url), ("_MD5", digest), ("_RECORDS", 4)):
        monkeypatch.setattr(cifar, name, value)
    return tmp_path / "data" / "cifar-10-batches-bin"


def test_cifar10_is_downloaded_and_read_by_record(small_cifar10):
    federation = ct.data.cifar10(2)
    assert sorted(file.name for file in small_cifar10.iterdir()) == sorted(f.split("/")[1] for f in cifar._FILES)
    number = ((federation.train.x * 0.2470 + 0.4914) * 255)[:, 0, 0, 0].round().long()  # which image it is
    assert torch.equal(torch.tensor([9, 1, 2, 3])[number], federation.train.y)
    (small_cifar10 / "test_batch.bin").write_bytes(records([0, 0, 0, 0]))
    assert ct.data.cifar10(2).test.y.tolist() == [0] * 4  # a file that is there is left alone


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"short", "has 5 bytes, but 4 images of 3,073 bytes"),
        (records([0, 1, 2, 10]), "label 10, the last should be 9"),
    ],
)
def test_a_damaged_file_of_cifar10_is_named(small_cifar10, content, message):
    small_cifar10.mkdir(parents=True)
    (small_cifar10 / "data_batch_3.bin").write_bytes(content)
    with pytest.raises(ValueError) as error:
        ct.data.cifar10(2)
    assert "data_batch_3.bin" in str(error.value) and message in str(error.value)


def test_a_wrong_archive_of_cifar10_is_refused(small_cifar10, monkeypatch):
    monkeypatch.setattr(cifar, "_MD5", "0" * 32)
    with pytest.raises(ValueError, match="is not the file it should be: its md5 is"):
        ct.data.cifar10(2)
    assert not small_cifar10.exists()


@needs_ag_news
def test_ag_news_by_topic():
    federation = ct.data.ag_news(8, seed=0, pool=True)
    assert federation.groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert federation.train.x.shape[1:] == federation.train.y.shape[1:] == (20,)
    assert federation.train.x.dtype == torch.int64 and int(federation.train.x.max()) == 4999
    assert torch.equal(federation.train.client(3)[0][5, 1:], federation.train.client(3)[1][5, :-1])
    assert 0.08 < len(federation.test.x) / len(federation.train.x) < 0.14
    assert same(build_federation(federation.source), federation)
    assert not same(ct.data.ag_news(8, seed=1, pool=True), federation)


@needs_newsgroups
def test_newsgroups_by_topic():
    federation = ct.data.newsgroups(4, words=1000, length=10)
    assert federation.groups.tolist() == [0, 1, 2, 3] and federation.train.x.shape[1:] == (10,)
    assert int(federation.train.y.max()) == 999 and int(federation.test.sizes.min()) > 1000


def write_ag_news(folder, rows=2):
    """Every document of class c is "c c.": four words with its end."""
    (folder / "ag_news_csv").mkdir(parents=True)
    for part in ("train", "test"):
        lines = [f'"{c}","{"abcd"[c - 1]}","{"abcd"[c - 1]}."\n' for c in range(1, 5)] * rows
        (folder / "ag_news_csv" / f"{part}.csv").write_text("".join(lines))


def test_windows_of_words_by_hand(tmp_path, monkeypatch):
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    write_ag_news(tmp_path)
    federation = ct.data.ag_news(4, words=6, length=3)
    for i, word in enumerate((3, 4, 5, 0)):  # 1 ends a document, 2 is the full stop; d is not among the six
        x, y = federation.train.client(i)
        assert x.tolist() == [[word, word, 2], [1, word, word]] and y.tolist() == [[word, 2, 1], [word, word, 2]]


def test_pooled_documents_are_tested_on_every_tenth(tmp_path, monkeypatch):
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    write_ag_news(tmp_path, rows=10)
    federation = ct.data.ag_news(4, length=1, pool=True)
    assert federation.train.sizes.tolist() == [18 * 4 - 1] * 4 and federation.test.sizes.tolist() == [2 * 4 - 1] * 4


def test_headers_and_quotations_are_dropped(tmp_path, monkeypatch):
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    for part in ("train", "test"):
        for group in ("comp.graphics", "rec.autos", "sci.med", "alt.atheism", "misc.forsale"):
            home = tmp_path / "20news-bydate" / f"20news-bydate-{part}" / group
            home.mkdir(parents=True)
            (home / "1").write_text(f"From: me\nNewsgroups: {group}\n\n> quoted words\nown, own\n", encoding="latin-1")
    federation = ct.data.newsgroups(4, length=3)
    assert federation.train.sizes.tolist() == [1] * 4
    assert federation.train.x.tolist() == [[2, 3, 2]] * 4 and federation.train.y.tolist() == [[3, 2, 1]] * 4


def test_news_that_is_not_there_says_where_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    with pytest.raises(ValueError, match=r"ag_news_csv/train.csv is not in .* unpack https://"):
        ct.data.ag_news(4)
    with pytest.raises(ValueError, match=r"20news-bydate-train is not in .* unpack http://.*/20news-bydate, or set"):
        ct.data.newsgroups(4)


def test_news_that_cannot_be_used(tmp_path, monkeypatch):
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    write_ag_news(tmp_path)
    with pytest.raises(ValueError, match="clients must be a positive multiple of 4, got 6"):
        ct.data.ag_news(6)
    with pytest.raises(ValueError, match="client 0: has no train rows"):
        ct.data.ag_news(4, length=100)
    with (tmp_path / "ag_news_csv" / "test.csv").open("a") as file:
        file.write('"5","a","b"\n')
    with pytest.raises(ValueError, match=r"test.csv: row 9 is not a class from 1 to 4"):
        ct.data.ag_news(4)


def test_models_vary_about_the_centres_of_their_groups():
    made = {"clients": 300, "rows": 40, "features": 4, "groups": 3, "sigma": 0.0, "distance": 2.0}
    for spread in (0.0, 0.2):
        federation = ct.data.varying_regression(**made, spread=spread)
        own = (federation.train.client(i) for i in range(300))
        theta = torch.stack([torch.linalg.lstsq(x, y[:, None]).solution[:, 0] for x, y in own])
        centres = torch.stack([theta[federation.groups == j].mean(0) for j in range(3)])
        apart = torch.pdist(centres).tolist()
        away = float((theta - centres[federation.groups]).square().sum(1).mean()) ** 0.5
        assert apart == pytest.approx([2.0] * 3, abs=0.1) and away == pytest.approx(2.0 * spread, rel=0.05, abs=1e-4)
    for wrong in ({"groups": 5}, {"clients": 301}, {"rows": 0}, {"spread": -0.1}):
        with pytest.raises(ValueError, match=f"varying_regression: {next(iter(wrong))} must be"):
            ct.data.varying_regression(**{**made, **wrong})


def test_counts_vary_about_the_centres_of_their_groups():
    made = {"clients": 4, "rows": 4000, "features": 2, "groups": 2, "rate": 3.0}
    federation = ct.data.varying_counts(**made)
    _, y = federation.train.client(0)
    assert torch.equal(y, y.round()) and bool((y >= 0).all())
    expected = 3.0 * float((torch.tensor(0.5) / 2).exp())  # λ e^(‖θ‖²/2) over x ~ N(0, I), with ‖θ‖² = Δ²/2
    assert float(y.mean()) == pytest.approx(expected, rel=0.1)
    for wrong in ({"groups": 3}, {"clients": 5}, {"rows": 0}, {"rate": 0.0}):
        with pytest.raises(ValueError, match=f"varying_counts: {next(iter(wrong))} must be"):
            ct.data.varying_counts(**{**made, **wrong})


def write_cheese(folder, columns="row,RETAILER,VOLUME,DISP,PRICE", suffix=".csv", prices=(1.0, 2.0, 4.0)):
    """Shop "b" has nine rows and shop "a" six, in turn at first; volume is price squared."""
    (folder / "tables").mkdir(parents=True, exist_ok=True)
    rows = [(i, "ab"[i % 2 if i < 12 else 1], p**2, i % 5, p) for i, p in zip(range(15), prices * 5, strict=True)]
    text = "\n".join([columns, *(",".join(map(str, row)) for row in rows), "15,c,,0.1,2"])
    path = folder / "tables" / f"cheese{suffix}"
    path.write_bytes(gzip.compress(text.encode()) if suffix.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz"])
def test_a_panel_is_split_by_client_and_standardised_over_training_rows(tmp_path, monkeypatch, suffix):
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    write_cheese(tmp_path, suffix=suffix)
    whole, capped, other = (ct.data.panel("cheese", **given) for given in ({}, {"rows": 3}, {"seed": 1}))
    assert whole.ids == ("a", "b") and whole.columns == ("display", "log price")  # a row of c lacks its volume
    assert whole.train.sizes.tolist() == [3, 4] and whole.test.sizes.tolist() == [3, 5]
    assert capped.train.sizes.tolist() == [3, 3] and capped.test.sizes.tolist() == [3, 5]
    assert (
        not same(whole, other) and same(whole, ct.data.panel("cheese")) and same(whole, build_federation(whole.source))
    )
    for values in (*whole.train.x.T, whole.train.y):
        assert float(values.mean()) == pytest.approx(0, abs=1e-6)
        assert float(values.std(correction=0)) == pytest.approx(1, abs=1e-5)
    for part in (whole.train, whole.test):
        assert torch.allclose(part.y, part.x[:, 1], atol=1e-5)  # log volume is twice log price


def test_a_panel_that_cannot_be_used(tmp_path, monkeypatch):
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    with pytest.raises(ValueError, match=r"no table 'chese'; did you mean 'cheese'"):
        ct.data.panel("chese")
    with pytest.raises(
        ValueError, match=r'tables/cheese.csv .* is not in .* write it in R by data\(cheese, package = "bayesm'
    ):
        ct.data.panel("cheese")
    with pytest.raises(ValueError, match=r"or download https://.*/Ecdat/Males.csv as that file"):
        ct.data.panel("males")
    write_cheese(tmp_path)
    with pytest.raises(ValueError, match="rows must be at least 1, got 0"):
        ct.data.panel("cheese", rows=0)
    for wrong, message in (
        (
            {"columns": "row,RETAILER,VOLUME,DISP,price"},
            r"has no column 'PRICE'; its columns are row, RETAILER, VOLUME",
        ),
        ({"prices": (1.0, 0.0, 2.0)}, r"'log volume' is not finite in all rows"),
        ({"prices": (2.0, 2.0, 2.0)}, r"'log volume' is the same in all training rows"),
    ):
        write_cheese(tmp_path, **wrong)
        with pytest.raises(ValueError, match=message):
            ct.data.panel("cheese")
    path = write_cheese(tmp_path)
    path.write_text(path.read_text().replace("16.0", "many"))
    with pytest.raises(ValueError, match=r"cheese.csv: column 'VOLUME' holds something that is not a number"):
        ct.data.panel("cheese")
    path.rename(path.with_suffix(".csv.xz"))
    with pytest.raises(ValueError, match=r"cheese.csv.xz is not a table of comma-separated values"):
        ct.data.panel("cheese")


@needs_panels
@pytest.mark.parametrize(
    ("table", "clients", "rows", "features"),
    [("cheese", 88, 12, 2), ("cigar", 46, 15, 4), ("males", 545, 4, 5), ("orange_juice", 83, 30, 3),
     ("movielens", 671, 20, 6)],
)  # fmt: skip
def test_panels(table, clients, rows, features):
    federation = ct.data.panel(table)
    assert len(federation) == clients and int(federation.train.sizes.max()) == rows
    assert tuple(federation.train.x.shape[1:]) == (features,) and federation.groups is None


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


@needs_mnist
def test_mnist_as_points():
    digits = ct.data.mnist_digits(p=0.5, seed=0, points=100)
    assert len(digits) == 10 and len(digits.train.x) == 1000
    assert torch.equal(digits.train.y.bincount(), torch.full((10,), 100))
    own = [int((y == i).sum()) for i, (_, y) in enumerate(digits.train.client(i) for i in range(10))]
    assert all(50 <= count <= 70 for count in own)  # half of a digit, and of the others what comes
    turned = ct.data.mnist_rotations(p=1.0, digit=4, points=30)
    groups = [turned.train.client(i) for i in range(4)]
    assert [y.unique().tolist() for _, y in groups] == [[0], [1], [2], [3]]
    upright = {x.numpy().tobytes() for x in groups[0][0]}
    assert {torch.rot90(x, -1, (-2, -1)).numpy().tobytes() for x in groups[1][0]} == upright
    grey = ct.data.random_background(turned)
    dark = turned.train.x < 0.01
    assert torch.equal(grey.train.x[~dark], turned.train.x[~dark])
    assert abs(float(grey.train.x[dark].mean()) - 0.5) < 0.01
    with pytest.raises(ValueError, match="mnist_digits: digits must be different ones of 0 to 9, got 3, 3"):
        ct.data.mnist_digits(digits=(3, 3))
    with pytest.raises(ValueError, match="clients must be at least 10, one for each cluster, unless p is 0, got 2"):
        ct.data.mnist_digits(p=0.5, clients=2, points=5)


@needs_mnist
def test_rotnet_is_trained_once(monkeypatch, tmp_path):
    made = ct.data.mnist_rotations(digit=2, points=10)
    monkeypatch.setattr("coterie.data.representation.folder", lambda: tmp_path)
    one = ct.data.rotnet_features(made, steps=2)
    assert one.train.x.shape == (40, 64) and torch.equal(one.train.y, made.train.y)
    ct.data.representation._trained.cache_clear()
    assert [p.name for p in tmp_path.rglob("*.safetensors")] == ["rotnet-2-0.safetensors"]
    assert torch.equal(ct.data.rotnet_features(made, steps=2).train.x, one.train.x)
    assert one.source["change"] == [{"name": "rotnet_features", "steps": 2, "seed": 0}]
    with pytest.raises(ValueError, match=r"rotnet_features: rows must be images of shape \(1, 28, 28\), got \(64,\)"):
        ct.data.rotnet_features(one, steps=2)
