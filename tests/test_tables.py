"""Tables as federations: what columns are, that sums are enough, and what is said of bad files."""

import gzip
import json
import lzma

import numpy as np
import pandas as pd
import pytest

import coterie as ct
from coterie.storage.scales import Moments, Scale
from coterie.tables.column_sums import ColumnSums
from coterie.tables.columns import Category, Date, Log, Number, Tags, recognise
from coterie.tables.preparation import Layout, Preparation, TableSums
from coterie.tables.reading import read_table


def shops(n=400, seed=0):
    """Rows of every kind of column, of 20 shops."""
    rng = np.random.default_rng(seed)
    brand = rng.integers(1, 6, n)
    frame = pd.DataFrame(
        {
            "shop": rng.integers(0, 20, n),
            "price": rng.normal(2, 0.5, n),
            "brand": brand,
            "promotion": rng.choice(["yes", "no"], n),
            "weather": rng.choice(["sun", "rain", "snow"], n, p=[0.6, 0.3, 0.1]),
            "day": pd.date_range("2024-01-01", periods=n).strftime("%Y-%m-%d"),
            "tags": rng.choice(["new", "new|bio", "bio|sale", "sale|new", "bio"], n),
            "same": 1.0,
        }
    )
    effect = np.array([0, 3, -1, 2, -3, 1])[brand]
    return frame.assign(sales=100 + effect - 5 * frame["price"] + rng.normal(size=n))


# --- columns ----------------------------------------------------------------------------------------------------------


def kinds(frame, target="sales"):
    layout = Layout.of(TableSums.of(frame, "shop", target), "shop", target)
    return {column.name: column for column in layout.columns}, layout.notes


def test_columns_are_recognised():
    found, notes = kinds(shops())
    assert isinstance(found["price"], Number) and isinstance(found["day"], Date)
    assert isinstance(found["brand"], Category) and len(found["brand"].levels) == 4  # codes: a line would be no good
    assert found["promotion"] == Category("promotion", "no", ("yes",))
    assert found["weather"] == Category("weather", "sun", ("rain", "snow"))
    assert found["tags"] == Tags("tags", "|", ("bio", "new", "sale"))
    assert "same" not in found and any("'same' is the same in all rows" in note for note in notes)


def test_whole_numbers_stay_numbers_where_a_line_is_good():
    frame = shops().assign(age=np.arange(400) % 20)
    frame["sales"] += 2 * frame["age"]
    assert isinstance(kinds(frame)[0]["age"], Number)


def test_skewed_columns_above_0_are_logarithms():
    rng = np.random.default_rng(0)
    frame = shops().assign(income=np.exp(rng.normal(10, 1, 400)), height=rng.normal(170, 30, 400))
    found, notes = kinds(frame)
    assert found["income"] == Log("income") and isinstance(found["height"], Number)
    assert any("'income' is above 0, and skewed: its logarithm is used" in note for note in notes)
    prepared = Preparation.of_table(frame, "shop", "sales")
    assert "log income" in prepared.names
    at = prepared.names.index("log income")
    x = prepared.features(frame)[:, at]
    assert np.corrcoef(x, np.log(frame["income"]))[0, 1] == pytest.approx(1)
    assert prepared.features(frame.head(1).assign(income=-1.0))[0, at] == 0  # as a missing value
    restored = Preparation.from_plain(json.loads(json.dumps(prepared.plain())))
    assert (restored.features(frame) == prepared.features(frame)).all() and restored.notes == prepared.notes


def test_where_effects_multiply_numbers_above_0_are_logarithms():
    rng = np.random.default_rng(0)
    size, year = rng.uniform(1, 9, 400), rng.integers(1900, 2000, 400)
    frame = shops().assign(
        size=size, year=year, age=np.arange(400) % 20 + 1, sales=size**2 * np.exp(rng.normal(size=400))
    )
    found, _ = kinds(frame)
    assert found["size"] == Log("size")
    assert isinstance(found["year"], Number)  # deviates by 2 % of its mean: nothing would change
    assert not isinstance(found["age"], Log)  # few whole numbers
    assert isinstance(kinds(frame.assign(sales=np.log(frame["sales"])))[0]["size"], Number)


def test_numbers_are_read_among_a_few_words():
    values = pd.Series(["1.5", "2.5", "n/a!"] * 1 + ["3.0"] * 97)
    found = recognise("x", ColumnSums.of(values, np.zeros(100)))
    assert isinstance(found.column, Number) and "'n/a!'" in found.notes[-1]
    assert np.isnan(found.column.encode(values)[2, 0]) and found.column.encode(values)[1, 0] == 2.5


def test_many_levels_share_a_column_and_names_are_left_out():
    rng = np.random.default_rng(0)
    street = pd.Series(rng.choice([f"street {i}" for i in range(60)], 2000))
    found = recognise("street", ColumnSums.of(street, np.zeros(2000)))
    assert isinstance(found.column, Category) and found.column.others and len(found.column.levels) == 30
    coded = found.column.encode(street)
    assert coded.shape == (2000, 31) and (coded.sum(1) <= 1).all() and coded[:, -1].sum() > 0
    names = pd.Series([f"person {i}" for i in range(2000)])
    left = recognise("name", ColumnSums.of(names, np.zeros(2000)))
    assert left.column is None and "2,000 different words in 2,000 rows" in left.notes[0]


@pytest.mark.parametrize(("value", "hint"), [("31/12/2024", "write 2024-12-31"), ("2,50", "write a point")])
def test_what_could_be_misread_is_left_out_with_a_hint(value, hint):
    found = recognise("x", ColumnSums.of(pd.Series([value, "01/02/2024", "1,25"] * 20), np.zeros(60)))
    assert found.column is None and value in found.notes[0] and hint in found.notes[0]


def test_levels_that_were_never_seen_are_as_the_commonest():
    prepared = Preparation.of_table(shops(), "shop", "sales")
    other = shops(10).assign(weather="hail")
    common = shops(10).assign(weather="sun")
    assert (prepared.features(other) == prepared.features(common)).all()


def test_missing_values_are_the_mean_and_are_told():
    frame = shops()
    frame.loc[::4, "price"] = np.nan
    frame.loc[1, "price"] = np.inf
    federation = ct.Federation.from_table(frame, "shop", "sales", test=0)
    price = federation.train.x[:, federation.columns.index("price")]
    assert int((price == 0).sum()) == 101
    assert "column 'price': 101 of 400 values are missing, and filled in" in federation.preparation.notes


# --- sums -------------------------------------------------------------------------------------------------------------


def test_sums_of_parts_give_the_preparation_of_the_whole():
    frame = shops()
    parts = [part for _, part in frame.groupby("shop")]
    sums = TableSums.of(parts[0], "shop", "sales")
    for part in parts[1:]:
        sums = sums + TableSums.of(part, "shop", "sales")
    layout = Layout.of(sums, "shop", "sales")
    moments = layout.moments(parts[0])
    for part in parts[1:]:
        moments = moments + layout.moments(part)
    whole, federated = Preparation.of_table(frame, "shop", "sales"), Preparation.of(layout, moments)
    assert federated.layout.columns == whole.layout.columns and federated.names == whole.names
    np.testing.assert_allclose(federated.features(frame), whole.features(frame), atol=1e-6)
    assert federated.target.mean == pytest.approx(whole.target.mean)


def test_features_have_mean_0_and_deviation_1_and_survive_json():
    frame = shops()
    own = Preparation.of_table(frame, "shop", "sales")
    x = own.features(frame)
    np.testing.assert_allclose(x.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(x.std(0), 1, atol=1e-4)
    again = Preparation.from_plain(json.loads(json.dumps(own.plain())))
    assert (again.features(frame) == x).all() and again.target == own.target and again.names == own.names


def test_a_linear_model_is_told_in_the_units_of_the_table():
    frame = shops()[["shop", "price", "brand"]].astype({"brand": float})
    frame["sales"] = 7 + 3 * frame["price"] - 0.5 * frame["brand"]
    own = Preparation.of_table(frame, "shop", "sales")
    x, (y, _) = own.features(frame).astype(float), own.targets(frame)
    slope, *_ = np.linalg.lstsq(np.column_stack([x, np.ones(len(x))]), y, rcond=None)
    coefficients, intercept = own.effects(slope[:-1], slope[-1])
    assert coefficients == pytest.approx([3, -0.5], abs=1e-3) and intercept == pytest.approx(7, abs=1e-2)


def test_moments_add_up_without_what_is_missing():
    rng = np.random.default_rng(0)
    x = rng.normal(3, 2, (50, 3))
    x[:, 2] = 5.0
    x[7, 0] = np.nan
    scale = Scale.of(Moments.of(x[:20]) + Moments.of(x[20:]))
    assert scale.mean == pytest.approx(np.nanmean(x, 0)) and scale.deviation[:2] == pytest.approx(np.nanstd(x, 0)[:2])
    assert scale.deviation[2] == 0.0
    np.testing.assert_allclose(scale.undo(scale(x)), x)


# --- federations ------------------------------------------------------------------------------------------------------


def test_rows_are_split_within_clients():
    frame = shops()
    federation = ct.Federation.from_table(frame, client="shop", target="sales", test=0.25)
    assert federation.ids == tuple(str(i) for i in range(20))
    count = frame.groupby("shop").size().to_numpy()
    assert federation.test is not None
    assert federation.test.sizes.tolist() == [round(0.25 * n) for n in count]
    assert (federation.train.sizes + federation.test.sizes).tolist() == count.tolist()
    again = ct.Federation.from_table(frame, client="shop", target="sales", test=0.25)
    assert (again.train.x == federation.train.x).all()
    assert not (ct.Federation.from_table(frame, "shop", "sales", seed=1).train.x == federation.train.x).all()


def test_time_orders_the_split():
    frame = shops().sample(frac=1, random_state=0)
    federation = ct.Federation.from_table(frame, "shop", "sales", time="day")
    days = federation.columns.index("day: days")
    assert federation.test is not None
    for i in range(len(federation)):
        assert federation.train.client(i)[0][:, days].max() < federation.test.client(i)[0][:, days].min()


def test_words_and_two_values_are_classes_and_skewed_numbers_are_logarithms():
    frame = shops()
    assert Preparation.of_table(frame, "shop", "weather").target.classes == ("rain", "snow", "sun")
    assert Preparation.of_table(frame.assign(bought=frame["brand"] > 2), "shop", "bought").target.classes
    volume = frame.assign(volume=np.exp(frame["sales"] / 3 - 30))
    found = Preparation.of_table(volume, "shop", "volume").target
    assert found.log and found.decode(found.encode(volume["volume"])[0]) == pytest.approx(volume["volume"], rel=1e-3)
    assert not Preparation.of_table(volume, "shop", "volume", kind="number").target.log
    federation = ct.Federation.from_table(frame, "shop", "weather")
    task = ct.Task.classifier(ct.models.Linear(len(federation.columns), 3))
    assert ct.fit(ct.FedAvg(), task, federation, rounds=2).accuracy > 0


def test_a_class_that_only_test_rows_have():
    frame = shops().assign(kind="common")
    frame.loc[399, "kind"], frame.loc[::2, "kind"] = "rare", "other"
    federation = ct.Federation.from_table(frame, "shop", "kind", time="day")
    assert federation.preparation.target.classes == ("common", "other", "rare")
    assert 2 not in federation.train.y.tolist() and 2 in federation.test.y.tolist()


def test_tables_of_polars():
    polars = pytest.importorskip("polars")
    frame = shops()
    ours = ct.Federation.from_table(polars.from_pandas(frame), "shop", "sales")
    assert (ours.train.x == ct.Federation.from_table(frame, "shop", "sales").train.x).all()


def test_a_client_with_one_row_and_rows_without_client_or_target_are_told():
    frame = shops()
    frame["shop"] = frame["shop"].astype(object)
    frame.loc[0, "shop"] = "kiosk"
    frame.loc[1, "shop"] = None
    frame.loc[2, "sales"] = np.nan
    federation = ct.Federation.from_table(frame, "shop", "sales")
    notes = federation.preparation.notes
    assert len(federation) == 21 and federation.ids[-1] == "kiosk"
    assert "1 row without a client left out" in notes and "1 row without a target left out" in notes
    assert any("1 client has one row only" in note for note in notes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f, "shops", "sales"), "there is no column 'shops'; did you mean 'shop'?"),
        (lambda f: (f, "shop", "sale"), "there is no column 'sale'; did you mean 'sales'?"),
        (lambda f: (f.assign(shop=1), "shop", "sales"), "client 'shop' has one value only, '1'"),
        (lambda f: (f.assign(shop=range(400)), "shop", "sales"), "has 400 different values in 400 rows"),
        (lambda f: (f.assign(sales=3.0), "shop", "sales"), "target 'sales' has one value only"),
        (lambda f: (f.assign(sales="a"), "shop", "sales"), "target 'sales' has one value only, 'a'"),
        (lambda f: (f.assign(sales=np.nan), "shop", "sales"), "target 'sales' has no values"),
        (lambda f: (f.assign(sales=[f"x{i}" for i in range(400)]), "shop", "sales"), "300 different values"),
        (lambda f: (f[["shop", "sales", "same"]], "shop", "sales"), "there is no column to predict 'sales' from"),
        (lambda f: (f, "sales", "sales"), "client and target are both 'sales'"),
        (lambda f: (f.to_numpy(), "shop", "sales"), "must be a DataFrame of pandas or polars, got ndarray"),
    ],
)  # fmt: skip
def test_bad_tables(change, message):
    with pytest.raises(ValueError, match=r"^.+$") as error:
        ct.Federation.from_table(*change(shops()))
    assert message in str(error.value) and "\n" not in str(error.value)


# --- files ------------------------------------------------------------------------------------------------------------


def write(tmp_path, text, name="t.csv"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
@pytest.mark.parametrize("pack", [None, gzip, lzma])
def test_csv_files(tmp_path, separator, pack):
    text = shops(30).to_csv(index=False, sep=separator).encode()
    if separator == "|":
        text = shops(30).drop(columns="tags").to_csv(index=False, sep=separator).encode()
    name = {None: "t.csv", gzip: "t.csv.gz", lzma: "t.csv.xz"}[pack]
    frame = read_table(write(tmp_path, pack.compress(text) if pack else text, name))
    assert len(frame) == 30 and frame["price"].to_numpy() == pytest.approx(shops(30)["price"].to_numpy())


def test_parquet_files(tmp_path):
    pytest.importorskip("pyarrow")
    shops(30).to_parquet(tmp_path / "t.parquet")
    assert len(read_table(tmp_path / "t.parquet")) == 30
    with pytest.raises(ValueError, match="cannot be read as Parquet"):
        read_table(write(tmp_path, b"PAR1 no", "bad.parquet"))


GZIP, XZ = (pack(b"a,b,c\n" + b"1,2,3\n" * 5000)[:-20] for pack in (gzip.compress, lzma.compress))  # cut off


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("a,b,c\n1,2,3\n4,5\n", "t.csv", "line 3 has 2 values, the header 3"),
        ("a,b,c\n1,2,3\n4,5,6,7\n", "t.csv", "line 3 has 4 values, the header 3"),
        ('a,b,c\n1,"2\n3",3\n4,5', "t.csv", "line 4 has 2 values, the header 3"),
        ("a,b,a\n1,2,3\n", "t.csv", "two columns are called 'a'"),
        ("a,b,c\n", "t.csv", "has a header and no rows"),
        ("", "t.csv", "has no header"),
        ("a:b:c\n1:2:3\n", "t.csv", "one column only, 'a:b:c': columns must be separated by commas"),
        ("a,b,c\n1,2,ü\n".encode("latin-1"), "t.csv", "is not UTF-8"),
        (GZIP, "t.csv.gz", "damaged or cut off"),
        (XZ, "t.csv.xz", "damaged or cut off"),
        ("a,b,c\n1,2,3\n", "t.xlsx", "a table must be .csv"),
    ],
    ids=range(11),  # what is packed has the time in it
)
def test_bad_files(tmp_path, text, name, message):
    with pytest.raises(ValueError, match=r"^.+$") as error:
        read_table(write(tmp_path, text, name))
    assert message in str(error.value) and name in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="there is no such file"):
        read_table(tmp_path / "none.csv")
    with pytest.raises(ValueError, match="is a folder, not a table"):
        read_table(tmp_path)


def test_a_header_may_have_quoted_separators_and_line_ends(tmp_path):
    frame = read_table(write(tmp_path, '"price, net, EUR";"two\nlines"\n1;2\n', "t.csv"))
    assert list(frame.columns) == ["price, net, EUR", "two\nlines"] and len(frame) == 1


@pytest.mark.parametrize("value", ["1,234.50", "$7.25", "12 %", "1.234.567,8"])
def test_numbers_that_are_not_plain_are_no_free_text(value):
    words = pd.Series([value] + [f"word {i}" for i in range(99)])
    found = recognise("x", ColumnSums.of(words, np.zeros(100)))
    assert found.column is None and f"if '{value}' is a number, write digits" in found.notes[0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([f"{i},5" for i in range(8)], "holds '0,5': if it is a number, write digits and a decimal point only"),
        (["?", *range(150)], "holds numbers, but for 2 values such as '?'"),
        ([1e300, 1.0, 2.0], "holds numbers too large to be squared"),
        ([1e12, 1e12 + 0.25, 1e12 - 0.25], "varies by less than a millionth of its size"),
        ([1.0, np.inf, 2.5, 3.0], "is infinite or no number in 1 row"),
    ],
)
def test_bad_targets(values, message):
    rows = pd.DataFrame({"shop": ["a", "b"] * 150, "price": np.arange(300), "sales": (values * 300)[:300]})
    with pytest.raises(ValueError, match=r"^target 'sales'") as error:
        ct.Federation.from_table(rows if "infinite" not in message else rows.iloc[:4], "shop", "sales", test=0)
    assert message in str(error.value)


def test_classes_may_look_like_numbers_if_that_is_said():
    rows = pd.DataFrame({"shop": ["a", "b"] * 30, "price": np.arange(60), "grade": ["1,3", "1,7", "2,0"] * 20})
    assert ct.Federation.from_table(rows, "shop", "grade", kind="classes").preparation.target.classes[0] == "1,3"


def test_columns_too_large_or_too_flat_are_left_out_with_a_note():
    frame = shops().assign(big=1e300, flat=1e12)
    frame.loc[::2, "big"] = -1e300
    frame.loc[::2, "flat"] += 0.25
    federation = ct.Federation.from_table(frame, "shop", "sales")
    assert {"big", "flat"}.isdisjoint(federation.columns)
    said = " ".join(federation.preparation.notes)
    assert "'big' holds numbers too large to be squared" in said and "'flat' varies by less than a millionth" in said
    far = federation.preparation.features(shops(5).assign(big=0, flat=0, price=1e300))
    assert np.isfinite(far).all()
