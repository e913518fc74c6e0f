"""Estimators: scikit-learn's own checks, and what they do with the clients of a table."""

import copy
import pickle
from itertools import product

import numpy as np
import pandas as pd
import pytest
import sklearn
from sklearn.linear_model import LinearRegression
from sklearn.metrics import adjusted_rand_score
from sklearn.model_selection import GridSearchCV, GroupKFold, KFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures
from sklearn.utils.estimator_checks import parametrize_with_checks

import coterie as ct
from coterie.estimators import choice
from coterie.runs.sampling import sampled
from coterie.storage.scales import Moments, Scale

SLOPES = np.array([[2.0, -1.0, 0.5], [-2.0, 1.0, 1.5], [0.0, 3.0, -2.0]])


class Table:
    """Rows of clients in three groups, each with slopes of its own, in units that are far from standard."""

    def __init__(self, clients=12, rows=20, noise=0.1):
        rng = np.random.default_rng(0)
        z = rng.normal(size=(clients * rows, 3))
        self.who = np.repeat(np.arange(clients), rows)
        self.group = self.who % 3
        self.X = z * [0.01, 1.0, 100.0] + [5.0, 0.0, 2000.0]
        self.y = 1000 + 50 * ((z * SLOPES[self.group]).sum(1) + noise * rng.normal(size=len(z)))
        self.name = np.array([f"shop {i:02}" for i in self.who])
        self.grade = np.array(["low", "middle", "high"])[np.digitize(self.y, [970, 1030])]
        self.held = np.arange(len(z)) % 4 == 0


@pytest.fixture(scope="module")
def table():
    return Table()


@pytest.fixture(scope="module")
def model(table):
    return ct.ClusteredRegressor(method="fedx", k=3, random_state=0).fit(table.X, table.y, groups=table.name)


@parametrize_with_checks([ct.ClusteredRegressor(rounds=5), ct.ClusteredClassifier(rounds=5)])
def test_scikit_learns_checks(estimator, check):
    check(estimator)


# --- what is learnt -----------------------------------------------------------------------------------------------


@pytest.fixture
def two_splits(monkeypatch):
    """Comparisons with two splits: all that tests need, and quick."""
    monkeypatch.setattr(choice, "SPLITS", 2)


@pytest.mark.usefixtures("two_splits")
def test_auto_beats_one_model_for_all_on_rows_that_are_held_out(table):
    def score(**settings):
        estimator = ct.ClusteredRegressor(rounds=4, random_state=0, **settings)
        estimator.fit(table.X[~table.held], table.y[~table.held], groups=table.who[~table.held])
        return estimator, estimator.score(table.X[table.held], table.y[table.held], groups=table.who[table.held])

    (chosen, auto), (_, one) = score(), score(method="fedx", k=1)
    assert auto > 0.98 and one < 0.5
    assert chosen.method_ is chosen.comparison_.method
    assert adjusted_rand_score(chosen.labels_, np.arange(12) % 3) == 1


def test_one_client_is_a_plain_model_and_nothing_is_compared(table):
    own = table.who == 0
    found = ct.ClusteredRegressor(random_state=0).fit(table.X[own], table.y[own])
    plain = LinearRegression().fit(table.X[own], table.y[own])
    assert not hasattr(found, "comparison_") and found.labels_.tolist() == [0] and found.clients_.tolist() == [0]
    assert found.models_[0]["coef"] == pytest.approx(plain.coef_, rel=1e-4)
    assert found.predict(table.X) == pytest.approx(plain.predict(table.X), rel=1e-4)


def test_coefficients_are_in_the_units_of_the_data(table, model):
    assert model.n_clusters_ == 3 and len(model.labels_) == len(model.clients_) == 12
    slopes = np.array([model.models_[j]["coef"] for j in model.labels_[:3]]) * [0.01, 1.0, 100.0] / 50
    assert slopes == pytest.approx(SLOPES, abs=0.05)
    at = table.name == "shop 04"
    own = model.models_[model.labels_[4]]
    assert model.predict(table.X[at], groups=table.name[at]) == pytest.approx(
        table.X[at] @ own["coef"] + own["intercept"]
    )


def test_without_standardising_the_same_line_is_found(table):
    rows = (table.X - [5.0, 0.0, 2000.0]) / [0.01, 1.0, 100.0]
    scaled, plain = (
        ct.ClusteredRegressor(method="fedx", k=3, standardise=s, random_state=0).fit(rows, table.y, table.who)
        for s in (True, False)
    )
    assert plain.predict(rows, table.who) == pytest.approx(scaled.predict(rows, table.who), rel=1e-3)
    assert np.array_equal(plain.x_scale_(rows), rows)


@pytest.mark.usefixtures("two_splits")
def test_k_is_found_where_a_method_is_named(table):
    found = ct.ClusteredRegressor(method="fedx", rounds=5, random_state=0).fit(table.X, table.y, table.who)
    assert found.n_clusters_ == found.method_.k == found.comparison_.k == 3
    again = found.set_params(k=2).fit(table.X, table.y, table.who)
    assert again.n_clusters_ == 2 and not hasattr(again, "comparison_")


def test_auto_with_a_number_of_groups_compares_methods_with_that_number(table, monkeypatch):
    compared = {}

    def compare(ways, task, federation, **options):
        compared.update(ways)
        return ct.compare({"2 groups": ways["2 groups"]}, task, federation, **{**options, "seeds": 1})

    monkeypatch.setattr(choice, "compare", compare)
    found = ct.ClusteredRegressor(k=2, rounds=2).fit(table.X, table.y, table.who)
    names = ["2 groups", "2 groups + personal", "2 soft groups", "2 groups of random effects"]
    assert list(compared) == names and found.n_clusters_ == 2


def test_many_rows_are_compared_on_a_sample_and_trained_on_all(table, monkeypatch):
    seen = []

    def compare(ways, task, federation, **options):
        seen.append((federation, options["seeds"]))
        return ct.compare({"3 groups": ways["3 groups"]}, task, federation, **{**options, "seeds": 1})

    monkeypatch.setattr(choice, "compare", compare)
    monkeypatch.setattr(choice, "ROWS", 120)
    found = ct.ClusteredRegressor(rounds=2, random_state=0).fit(table.X, table.y, table.who)
    ((sample, splits),) = seen
    assert len(sample.train.x) == 120 and splits == choice.FEWER and len(found.run_.labels) == 12
    assert int(found.run_.to_frame()["rows"].sum()) == len(table.X)


# --- whose rows ---------------------------------------------------------------------------------------------------

WAYS = [
    ct.FedEM(k=2, tau=2),
    ct.Personal(ct.IFCA(k=2, tau=2, init="random"), steps=(1, 2)),
    ct.MixedEffects(k=2, restarts=2),
    ct.LocalOnly(tau=2),
]


def named(value):
    return value if isinstance(value, str) else type(value).__name__


@pytest.mark.parametrize(("way", "model"), [*product(WAYS, ["linear"]), (WAYS[0], "mlp"), (WAYS[1], "mlp")], ids=named)
def test_predictions_are_those_of_the_run(table, way, model):
    found = ct.ClusteredRegressor(method=way, model=model, rounds=2, random_state=0)
    found.fit(table.X, table.y, groups=table.name)
    rows, some = found.x_scale_(table.X).astype(np.float32), ["shop 03", "shop 07", "shop 11"]
    predicted = found.predict(table.X, groups=table.name)
    for name in some:
        own = found.run_.predict(rows[table.name == name], client=name).ravel()
        assert predicted[table.name == name] == pytest.approx(found.y_scale_.undo(own), rel=1e-4)
    whole = found.y_scale_.undo(found.run_.predict(rows).ravel())
    assert found.predict(table.X) == pytest.approx(whole, rel=1e-4)


@pytest.mark.parametrize(("way", "model"), [(WAYS[0], "linear"), (WAYS[1], "mlp"), (WAYS[2], "linear")], ids=named)
def test_probabilities_are_those_of_the_run(table, way, model):
    found = ct.ClusteredClassifier(method=way, model=model, rounds=2, random_state=0)
    found.fit(table.X, table.grade, groups=table.who)
    assert found.classes_.tolist() == ["high", "low", "middle"]
    rows, at = found.x_scale_(table.X).astype(np.float32), table.who == 7
    own = found.run_.predict(rows[at], client=7, probabilities=True)
    assert found.predict_proba(table.X, table.who)[at] == pytest.approx(own, abs=1e-4)
    assert found.predict_proba(table.X) == pytest.approx(found.run_.predict(rows, probabilities=True), abs=1e-4)
    likeliest = found.classes_[found.predict_proba(table.X, table.who).argmax(1)]
    assert (found.predict(table.X, table.who) == likeliest).all()
    assert found.score(table.X, table.grade, table.who) == (likeliest == table.grade).mean()


def test_a_client_that_nobody_knows_gets_the_mean_of_all_clusters(table, model):
    strangers = model.predict(table.X, groups=["a new shop"] * len(table.X))
    assert strangers == pytest.approx(model.predict(table.X))
    each = np.stack([table.X @ one["coef"] + one["intercept"] for one in model.models_])
    shares = np.bincount(model.labels_) / 12
    assert strangers == pytest.approx(shares @ each)
    mixed = np.where(table.held, "a new shop", table.name)
    both = np.where(table.held, strangers, model.predict(table.X, groups=table.name))
    assert model.predict(table.X, groups=mixed) == pytest.approx(both)


def test_clients_are_assigned_whether_old_or_new(table, model):
    found = model.assign(table.X, table.y, table.name)
    assert found.index.tolist() == model.clients_.tolist() and found.tolist() == model.labels_.tolist()
    new = model.assign(table.X[table.who == 4], table.y[table.who == 4], ["x"] * 20)
    assert new.to_dict() == {"x": model.labels_[4]}
    assert model.assign(table.X[:20], table.y[:20]).to_dict() == {0: model.labels_[0]}


NAMINGS = {
    "categories": lambda who: pd.Series(who).astype("category"),
    "strings of pandas": lambda who: pd.Series([f"{i}" for i in who], dtype="string", index=who[::-1]),
    "pairs": lambda who: [(int(i), "here") for i in who],
    "of several types": lambda who: [int(i) if i % 2 else str(i) for i in who],
    "without an order": lambda who: [frozenset([i]) for i in who],
}


@pytest.mark.parametrize("naming", NAMINGS)
def test_clients_may_be_anything_that_can_be_hashed(table, naming):
    groups = NAMINGS[naming](table.who)
    found = ct.ClusteredRegressor(method="fedx", k=3, random_state=0).fit(table.X, table.y, groups=groups)
    assert len(found.clients_) == 12
    assert found.score(table.X, table.y, groups=groups) > 0.99 > 0.6 > found.score(table.X, table.y)


def test_the_order_of_rows_does_not_matter(table, model):
    mixed = np.random.default_rng(1).permutation(len(table.X))
    again = sklearn.clone(model).fit(table.X[mixed], table.y[mixed], groups=table.name[mixed])
    assert again.labels_.tolist() == model.labels_.tolist() and (again.clients_ == model.clients_).all()
    expected = model.predict(table.X[mixed], groups=table.name[mixed])
    assert again.predict(table.X[mixed], groups=table.name[mixed]) == pytest.approx(expected, rel=1e-4)


def test_tables_have_names(table):
    frame = pd.DataFrame(table.X, columns=["price", "weight", "height"])
    found = ct.ClusteredRegressor(method="fedavg", rounds=2).fit(
        frame, pd.Series(table.y), groups=pd.Series(table.name)
    )
    assert found.feature_names_in_.tolist() == ["price", "weight", "height"]
    assert found.run_._cohort.federation.columns == ("price", "weight", "height")
    with pytest.raises(ValueError, match="feature names should match"):
        found.predict(frame[["height", "weight", "price"]])


def test_tables_of_polars(table):
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame(table.X, schema=["price", "weight", "height"])
    groups = polars.Series(table.name).cast(polars.Categorical)
    found = ct.ClusteredRegressor(method="fedx", k=3, random_state=0).fit(frame, polars.Series(table.y), groups=groups)
    assert found.feature_names_in_.tolist() == ["price", "weight", "height"]
    assert found.score(frame, polars.Series(table.y), groups=groups) > 0.99


# --- beside other tools of scikit-learn -----------------------------------------------------------------------------


@pytest.fixture
def routing():
    with sklearn.config_context(enable_metadata_routing=True):
        yield


def routed(**settings):
    made = ct.ClusteredRegressor(random_state=0, **settings)
    return made.set_fit_request(groups=True).set_predict_request(groups=True).set_score_request(groups=True)


@pytest.mark.usefixtures("routing")
def test_a_grid_search_finds_k_and_lr(table):
    grid = {"k": np.array([1, 3]), "lr": [1e-4, 0.1]}
    estimator = routed(method=ct.IFCA(k=2, tau=5, init="farthest_first"), rounds=4)
    rows = GridSearchCV(estimator, grid, cv=KFold(2, shuffle=True, random_state=0))
    rows.fit(table.X, table.y, groups=table.who)
    assert rows.best_params_ == {"k": 3, "lr": 0.1} and rows.score(table.X, table.y, groups=table.who) > 0.98
    clients = GridSearchCV(routed(method="fedx"), {"k": [1, 3]}, cv=GroupKFold(2))
    clients.fit(table.X, table.y, groups=table.who)
    assert (clients.cv_results_["mean_test_score"] < 0.6).all()  # nobody knows the clients that are held out


@pytest.mark.usefixtures("routing")
def test_a_pipeline_and_a_cross_validation_pass_groups_on(table):
    pipe = make_pipeline(PolynomialFeatures(1, include_bias=False), routed(method="fedx", k=3))
    pipe.fit(table.X, table.y, groups=table.who)
    assert pipe.score(table.X, table.y, groups=table.who) > 0.99 > 0.6 > pipe.score(table.X, table.y)
    rows = KFold(3, shuffle=True, random_state=0)
    assert cross_val_score(pipe, table.X, table.y, cv=rows, params={"groups": table.who}).min() > 0.98


def test_score_takes_weights(table, model):
    weight = np.where(table.held, 1.0, 0.0)
    weighted = model.score(table.X, table.y, groups=table.name, sample_weight=weight)
    only = model.score(table.X[table.held], table.y[table.held], groups=table.name[table.held])
    assert weighted == pytest.approx(only)


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_copies_predict_and_assign_as_the_original(table, kind):
    made = ct.ClusteredClassifier(method=WAYS[1], model=kind, rounds=2, random_state=0)
    made.fit(table.X, table.grade, groups=table.who)
    for other, has_run in ((copy.deepcopy(made), True), (pickle.loads(pickle.dumps(made)), False)):
        assert hasattr(other, "run_") is has_run
        assert np.array_equal(other.predict_proba(table.X, table.who), made.predict_proba(table.X, table.who))
        assert other.assign(table.X, table.grade, table.who).equals(made.assign(table.X, table.grade, table.who))
        assert len(other.models_) == 2


# --- bad input ------------------------------------------------------------------------------------------------------

REFUSED = [
    ({"method": "ifka"}, "method 'ifka' is not known; did you mean 'ifca'?"),
    ({"method": ct.IFCA}, r"must be a method with its settings: IFCA\(k=…\), got the class IFCA"),
    ({"method": "kfed"}, "KFED groups points"),
    ({"method": "personal"}, "method 'personal' needs method"),
    ({"method": "cfl", "k": 2}, "cfl has no number of groups"),
    ({"method": "mixed_effects", "lr": 0.1}, "mixed_effects takes no steps"),
    ({"method": "ifca", "k": 13}, "k must be at most the number of clients, 12, got 13"),
    ({"k": 7}, "k is 6 at most, got 7"),
    ({"k": 0}, "k must be 'auto' or a whole number of at least 1, got 0"),
    ({"k": 2.5}, "k must be 'auto' or a whole number of at least 1, got 2.5"),
    ({"rounds": 0}, "rounds must be a whole number of at least 1, got 0"),
    ({"method": "ifca", "k": 2, "lr": -1}, "lr must be at least 0"),
    ({"model": "mpl"}, "model 'mpl' is not known; did you mean 'mlp'?"),
    ({"model": ct.models.Linear(3, 4)}, "outputs of shape"),
    ({"device": "gpu"}, "device must be"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_settings_that_make_no_sense_are_refused(table, settings, message):
    with pytest.raises(ValueError, match=message):
        ct.ClusteredRegressor(**settings).fit(table.X, table.y, groups=table.who)


def test_groups_that_do_not_fit_the_rows_are_refused(table, model):
    for groups, message in (
        (table.who[:5], "groups has 5 entries, but there are 240 rows"),
        (np.stack([table.who, table.who], 1), "groups must be a list with one client for each row"),
        ([None, *table.who[1:]], "but row 0 has none"),
    ):
        with pytest.raises(ValueError, match=message):
            sklearn.clone(model).fit(table.X, table.y, groups=groups)
    by_number = sklearn.clone(model).fit(table.X, table.y, groups=table.who)
    with pytest.raises(ValueError, match="groups are of type str, but fit knew client '0' as int64"):
        by_number.predict(table.X, groups=table.who.astype(str))


def test_classes_that_do_not_fit_are_refused(table):
    with pytest.raises(ValueError, match="got one class, 'a'"):
        ct.ClusteredClassifier().fit(table.X, ["a"] * len(table.X), groups=table.who)
    with pytest.raises(ValueError, match="model must give 3 outputs for a row, got 5"):
        ct.ClusteredClassifier(model=ct.models.Linear(3, 5)).fit(table.X, table.grade, groups=table.who)
    made = ct.ClusteredClassifier(method="fedavg", rounds=1).fit(table.X, table.grade, groups=table.who)
    with pytest.raises(ValueError, match="y has the class 'other', which was not there at fit"):
        made.assign(table.X, ["other"] * len(table.X), table.who)


# --- scales and samples ---------------------------------------------------------------------------------------------


def test_scales_are_made_of_sums_of_parts():
    x = np.random.default_rng(0).normal(size=(50, 3)) * [1, 1e-3, 1e5] + [0, 10, 1e7]
    x = np.column_stack([x, np.full(50, 1e8 + 0.1)]).astype(np.float64)
    scale = Scale.of(Moments.of(x[:20]) + Moments.of(x[20:]))
    assert scale.mean == pytest.approx(x.mean(0)) and scale.deviation[:3] == pytest.approx(x[:, :3].std(0), rel=1e-4)
    assert scale.deviation[3] == 0 and scale.unit[3] == 1  # constant, but for rounding
    assert scale.undo(scale(x)) == pytest.approx(x)
    assert scale(x)[:, :3].std(0) == pytest.approx(1, rel=1e-4)


def test_a_sample_follows_from_names_and_seed_and_cuts_large_clients_down():
    sizes = [400, *[10] * 99]
    clients = [(np.full((n, 1), float(i)), np.arange(float(n))) for i, n in enumerate(sizes)]
    names = [f"c{i}" for i in range(100)]
    federation = ct.Federation.from_clients(clients, ids=names)
    some = sampled(federation, 500, seed=0)
    assert len(some.train.x) <= 500 and some.train.sizes.max() == 10 and len(some) == 50
    turned = sampled(ct.Federation.from_clients(clients[::-1], ids=names[::-1]), 500, seed=0)
    assert sorted(turned.ids) == sorted(some.ids) and sampled(federation, 500, seed=1).ids != some.ids
    assert sampled(federation, 5000, seed=0) is federation
    assert len(sampled(federation, 5000, seed=0, products=1)) == 50
    few = sampled(federation.select([0, 1, 2]), 60, seed=0)
    assert few.train.sizes.tolist() == [20, 10, 10]
    assert len(set(few.train.client(0)[1].tolist())) == 20  # different rows


@pytest.mark.parametrize("which", ["X", "y"])
def test_numbers_too_large_to_be_squared_are_refused(which):
    given = {"X": np.arange(20.0)[:, None], "y": np.arange(20.0)}
    given[which] = given[which] * 1e300
    with pytest.raises(ValueError, match=f"^ClusteredRegressor: {which} holds numbers too large to be squared$"):
        ct.ClusteredRegressor(method="fedx", k=2).fit(**given, groups=np.arange(20) % 4)


def test_a_fit_without_groups_says_so(caplog):
    x = np.arange(20.0)[:, None]
    ct.ClusteredRegressor(method="fedx", k=1).fit(x, x[:, 0], groups=np.arange(20) % 4)
    assert "no groups" not in caplog.text
    ct.ClusteredRegressor(method="fedx", k=1).fit(x, x[:, 0])
    assert "no groups were given, so all rows are one client's" in caplog.text
