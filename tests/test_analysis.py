"""One table, analysed: groups, ways to share, what differs, and what `coterie fit` leaves behind."""

import json

import numpy as np
import pandas as pd
import pytest

import coterie as ct
from coterie.analysis.attributes import associations, attributes_of
from coterie.analysis.folder import assign_table, predict_table, write_folder
from coterie.runs.metrics import ari


@pytest.fixture(scope="module")
def table():
    """Thirty stores of three kinds, and the truth."""
    return ct.data.stores(stores=30, groups=3, rows=(40, 60), seed=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fit") / "stores"


@pytest.fixture(scope="module")
def found(table, folder):
    result = ct.fit_table(table.rows, "store", "sales", about=table.about, jobs=1, out=folder)
    write_folder(result, folder)
    return result


# --- what is found ----------------------------------------------------------------------------------------------------


def test_groups_are_counted_and_found(found, table):
    assert found.groups.count == 3 and found.groups.sure
    assert ari(found.labels, table.kind) == 1.0 and found.unsure.mean() < 0.1
    assert "3, of 10, 10, 10 clients, all clearly" in str(found)


def test_the_recommended_way_is_the_best_on_rows_and_clients_that_trained_nothing(found):
    score = {way.name: way.score.mean for way in found.ways}
    assert "3 groups" in found.recommended
    assert score[found.recommended] < 0.8 * min(score["one for all"], score["one each"])
    one, own = found.way("one for all"), found.way(found.recommended)
    assert own.new_score.mean < one.new_score.mean and len(own.new.per_client) == 3
    assert len(own.run._cohort.federation) == 27


def test_what_differs_is_told_in_the_units_of_the_table(found, table):
    different = found.differences
    order = [int(pd.Series(found.labels[table.kind == j]).mode()[0]) for j in range(3)]
    for name, cause in (("price", "price"), ("promotion=yes", "promotion"), ("display=yes", "display")):
        at = different.names.index(name)
        truth = table.response[cause].to_numpy()
        assert np.abs(different.value[order, at] - truth).max() < 5 * different.error[:, at].max()
    assert different.clear[different.order[0]]


def test_attributes_that_go_with_groups_are_told_from_others(found):
    p = {each.name: each.p for each in found.associations}
    assert p["size"] < 0.01 < p["region"]


def test_clients_that_merely_vary_are_one_group():
    table = ct.data.stores(stores=30, groups=1, rows=(40, 60), seed=2)
    one = ct.fit_table(table.rows, "store", "sales", jobs=1)
    assert one.groups.count == 1 and one.differences is None and (one.labels == 0).all()
    assert "do not fall into groups" in str(one)


def test_classes_are_analysed_too():
    table = ct.data.stores(stores=12, groups=2, rows=(40, 50), seed=3)
    rows = table.rows.assign(sold=np.where(table.rows["sales"] > 20, "much", "little")).drop(columns="sales")
    few = rows[["store", "price", "promotion", "display", "sold"]]
    found = ct.fit_table(few, "store", "sold", method="ifca", k=2, rounds=5)
    assert found.ways[0].known.metric == "accuracy" and found.differences.error is None
    assert found.differences.dependences[0].value.shape[0] == 2 and "accuracy" in str(found)


def test_a_method_may_be_given(table):
    given = ct.fit_table(table.rows, "store", "sales", method="fedx", k=2)
    assert given.comparison is None and len(np.unique(given.labels)) == 2
    with pytest.raises(ValueError, match="fedx"):
        ct.fit_table(table.rows, "store", "sales", method="fedxx")
    with pytest.raises(ValueError, match="model must be 'linear', 'mlp' or a module"):
        ct.fit_table(table.rows, "store", "sales", model="tree")


def test_what_is_left_out_is_told_once(table):
    rows = table.rows[["store", "price", "sales"]].head(300)
    rows.loc[5:7, "sales"] = np.nan
    rows.loc[9, "store"] = None
    rows.loc[300] = ["lonely", 1.0, 2.0]
    found = ct.fit_table(rows, "store", "sales", method="fedx", k=2)
    notes = found.preparation.notes
    for said in ("1 row without a client left out", "3 rows without a target left out", "1 client has one row only"):
        assert sum(said in note for note in notes) == 1, notes


# --- the folder -------------------------------------------------------------------------------------------------------


def test_the_folder_has_everything(found, folder):
    names = {path.name for path in folder.iterdir()}
    assert {"report.md", "scores.png", "groups.png", "labels.csv", "summary.json", "preparation.json", "model"} <= names
    labels = pd.read_csv(folder / "labels.csv")
    assert labels["group"].tolist() == found.labels.tolist() and labels["client"][0] == "store 000"
    told = json.loads((folder / "summary.json").read_text())
    assert told["groups"] == 3 and told["recommended"] == found.recommended
    report = (folder / "report.md").read_text()
    assert "## What differs" in report and "store 000" in report and "| price |" in report


def test_rows_are_predicted_as_by_the_run(found, folder, table):
    some = table.rows.head(20)
    predicted = predict_table(folder, some.drop(columns="sales"))
    own = found.preparation
    for i in range(0, 20, 7):
        x = own.features(some.iloc[[i]])
        expected = own.target.decode(found.run.predict(x, client=some["store"].iloc[i]).ravel())
        assert predicted["sales"][i] == pytest.approx(expected[0], rel=1e-4)
    assert predicted["known"].all() and np.corrcoef(predicted["sales"], some["sales"])[0, 1] > 0.8


def test_new_clients_are_placed_by_the_rows_that_have_a_target(folder, table):
    own = table.rows[table.rows["store"] == "store 001"].assign(store="new").reset_index(drop=True)
    blind = predict_table(folder, own.drop(columns="sales"))
    assert not blind["known"].any()
    half = own.copy()
    half.loc[15:, "sales"] = np.nan
    placed = predict_table(folder, half)
    error = [np.square(each["sales"][15:] - own["sales"][15:]).mean() for each in (blind, placed)]
    assert error[1] < 0.7 * error[0]
    (line,) = assign_table(folder, own)
    assert line["group"] == found_label(folder, "store 001")
    with pytest.raises(ValueError, match="no client has a row with a value of 'sales'"):
        assign_table(folder, own.assign(sales=np.nan))


def found_label(folder, client):
    labels = pd.read_csv(folder / "labels.csv").set_index("client")
    return int(labels.loc[client, "group"])


def test_bad_folders(folder, tmp_path, table):
    with pytest.raises(ValueError, match=r"is no folder that `coterie fit` has written"):
        predict_table(tmp_path, table.rows)
    for name in ("preparation.json", "serving.safetensors"):
        copy = tmp_path / name.split(".")[0]
        copy.mkdir()
        for file in folder.iterdir():
            if file.is_file():
                (copy / file.name).write_bytes(file.read_bytes() if file.name != name else b"{}")
        (copy / "model").symlink_to(folder / "model")
        with pytest.raises(ValueError, match=name):
            predict_table(copy, table.rows)


def test_names_neither_steer_the_terminal_nor_are_formulas(coterie, table, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = table.rows[["store", "price", "display", "sales"]].head(500)
    rows = rows.rename(columns={"price": "US$ \x1b[2J^ of A$", "sales": "$_^$"})
    rows["store"] = "[/b]\x1b[31m" + rows["store"]
    rows.to_csv("evil.csv", index=False)
    code, out, err = coterie("fit", "evil.csv", "--client", "store", "--target", "$_^$", "--method", "fedx", "--k", "2")
    assert code == 0 and not err and r"US$ \x1b[2J^ of A$" in out, err
    out += coterie("assign", "runs/evil", "evil.csv")[1] + coterie("predict", "runs/evil", "evil.csv")[1]
    out += coterie("fit", "evil.csv", "--client", "\x1b[2J", "--target", "$_^$")[2]
    assert "\x1b" not in out + (tmp_path / "runs/evil/report.md").read_text() and r"[/b]\x1b[31mstore 000" in out


def test_what_predictions_fill_in_is_told(found, table):
    rows = table.rows.head(10).astype({"price": object})
    rows.loc[0, "price"], rows.loc[1, "price"] = "cheap", None
    rows.loc[2:4, "weather"] = "hail"
    told = found.preparation.filled_in(rows)
    assert [note.split(" values")[0] for note in told] == ["column 'price': 2 of 10", "column 'weather': 3 of 10"]
    assert found.preparation.filled_in(table.rows) == ()


def test_a_table_with_other_columns_is_refused(folder, table):
    with pytest.raises(ValueError, match="there is no column 'price'"):
        predict_table(folder, table.rows.drop(columns="price"))


# --- attributes -------------------------------------------------------------------------------------------------------


def test_holms_correction_and_bad_attributes():
    rng = np.random.default_rng(0)
    labels = np.arange(40) % 2
    ids = [f"c{i}" for i in range(40)]
    about = pd.DataFrame({"who": ids, "tied": labels + 0.1 * rng.normal(size=40), "noise": rng.normal(size=40)})
    first, second = associations(attributes_of(about, "client", ids), labels)
    assert first.name == "tied" and first.p < 1e-5 and first.strength > 0.7
    assert second.p >= 0.05 and second.p >= first.p
    with pytest.raises(ValueError, match="client 'c1' has several rows"):
        attributes_of(pd.concat([about, about.iloc[[1]]]), "client", ids)
    with pytest.raises(ValueError, match="names none of the clients, such as 'c0'"):
        attributes_of(about.assign(who=range(40)), "client", ids)


# --- the command line -------------------------------------------------------------------------------------------------


def test_fit_predict_and_assign_on_the_command_line(coterie, table, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    few = table.rows[table.rows["store"] < "store 012"][["store", "price", "promotion", "display", "sales"]]
    few.to_csv("shops.csv.gz", index=False)
    asked = "fit", "shops.csv.gz", "--client", "store", "--target", "sales"
    code, out, err = coterie(*asked, "--method", "mixed_effects")
    assert code == 0 and "12 clients" in out and "report: runs/shops/report.md" in out, err
    code, _, err = coterie(*asked)
    assert code == 2 and "runs/shops is not empty" in err
    _, out, _ = coterie("predict", "runs/shops", "shops.csv.gz", "--out", "predicted.csv")
    assert f"{len(few):,} rows predicted" in out and "note" not in out and len(pd.read_csv("predicted.csv")) == len(few)
    assert json.loads(coterie("assign", "runs/shops", "shops.csv.gz", "--json")[1])[0]["client"] == "store 000"
    few.head(3).assign(promotion="maybe").to_csv("next.csv", index=False)
    assert coterie("predict", "runs/shops", "next.csv")[1].startswith("note: column 'promotion': 3 of 3 values are")
    code, _, err = coterie("fit", "shops.csv.gz", "--client", "shop", "--target", "sales", "--out", "other")
    assert code == 2 and err == "coterie: there is no column 'shop'; did you mean 'store'?\n"
