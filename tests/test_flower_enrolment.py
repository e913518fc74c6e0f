"""Sites that come, go, and come back while a run goes on, on a Grid in this process."""

import json

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict

import coterie as ct
from coterie.core.cohort import Cohort
from coterie.core.federation import Federation
from coterie.core.key import Key
from coterie.core.pytree import leaves
from coterie.core.registry import known
from coterie.engines import simulated as simulate
from coterie.flower.desk import AGAIN
from coterie.flower.engine import FlowerEngine
from coterie.flower.enrolment import enrol
from coterie.flower.grid import TooFew
from coterie.flower.local import LocalGrid
from coterie.flower.membership import FlowerMembership
from coterie.flower.node import Node
from coterie.flower.roster import Roster, Site
from coterie.flower.secure_engine import SecureFlower
from coterie.flower.server_app import Settings, serve
from coterie.runs.fit import fit_on
from coterie.runs.folder import read_events
from coterie.secure.engine import Secure

TASK = {"kind": "classifier", "model": {"name": "mlp", "sizes": [64, 16, 10]}}


class Sites:
    """A federation's clients at sites that can be started and stopped."""

    def __init__(self, federation, folder, cuts, spoil=None):
        self.federation, self.folder, self.cuts = federation, folder, cuts
        self.grid = LocalGrid({}, spoil)

    def share(self, i):
        return self.federation.select(range(self.cuts[i], self.cuts[i + 1]))

    def start(self, i, node, share=None, name=None):
        """Start a node for site i, as a new process would be."""
        self.grid.nodes[node] = Node(name or f"site-{i}", share or self.share(i), self.folder / "nodes")

    def stop(self, node):
        del self.grid.nodes[node]

    def fit(self, algorithm, task, rounds, at=None, *, sites=2, out=None, **options):
        """A run; `at` has what happens after some rounds, by their number."""

        def members(key):
            roster = enrol(self.grid, task, nodes=sites, deadline=1)
            return FlowerMembership(FlowerEngine(self.grid, roster, task, key, run="a", deadline=0.1))

        def happens(row, run):
            for action in (at or {}).get(row["round"], ()):
                action()

        options = {"secured": SecureFlower, "callbacks": [happens], **options}
        run = fit_on(members, algorithm, rounds=rounds, evaluations=1, out=out, **options)
        self.log = [e["message"] for e in read_events(out) if e["event"] == "log"] if out else []
        return run


@pytest.fixture
def sites(ragged, tmp_path):
    """Twelve clients at three sites, of which the first two are there."""
    sites = Sites(ragged, tmp_path, [0, 3, 6, 12])
    sites.start(0, 9)
    sites.start(1, 8)
    return sites


@pytest.fixture
def of_points(points, tmp_path):
    """Eight clients with points at three sites, of which the first two are there."""
    sites = Sites(points, tmp_path, [0, 2, 4, 8])
    sites.start(0, 9)
    sites.start(1, 8)
    return sites


METHODS = known("method")


def cohort_of(federation, task):
    return simulate(federation, task, Key.of(0).fold(1))


def simulated(algorithm, task, federation, parts, joins=None):
    """The state after rounds with these clients each; from round `joins` on there are the others, too."""
    everybody = cohort_of(federation, task)
    m = 0 if joins is None else len(parts[0])
    cohort = cohort_of(federation.select(range(m)), task) if m else everybody
    state = algorithm.start(task, cohort.at(0), Key.of(0).fold(0))
    for t, clients in enumerate(parts):
        if t == joins:
            everybody.ledger = cohort.ledger
            cohort = everybody
            state = algorithm.join(state, cohort.only(range(m, len(cohort))).at(t))
        state, _ = algorithm.round(state, cohort.only(clients).at(t))
    return state


def assert_models(run, algorithm, state):
    for n, x in algorithm.models(state).items():
        for j, model in enumerate(run.models):
            assert torch.allclose(model[n], x[j], rtol=1e-5, atol=1e-5), n


FLOW = ct.models.AffineFlow(6)


# --- coming back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("closed", [True, False])
def test_a_site_is_back_under_another_number_and_remembers(closed, points, of_points, tmp_path):
    algorithm = ct.UIFCA(k=3, restarts=2, init="mixed", mixture=False, closed=closed, tau=2, steps=3, lr=1e-3)
    task = ct.Task.density(FLOW)
    of_points.start(2, 7)
    swap = {2: [lambda: of_points.stop(7), lambda: of_points.start(2, 77)]}
    run = of_points.fit(algorithm, task, 4, swap, sites=3, out=tmp_path / "run")
    here = ct.fit(algorithm, task, points, rounds=4, evaluations=1)
    assert np.array_equal(run.labels, here.labels)
    assert np.allclose(run.scores.per_client, here.scores.per_client, atol=1e-4)
    assert [row["participants"] for row in run.history] == [8] * len(run.history)
    assert [row["changed"] for row in run.history] == [row["changed"] for row in here.history]  # by what they remember
    assert of_points.log == ["flower: site 'site-2' is back, as node 77"]


def test_a_site_that_missed_rounds_goes_on_with_what_it_remembers(points, of_points, tmp_path):
    algorithm, task = ct.UIFCA(k=3, restarts=2, init="random", shrink=False), ct.Task.density(FLOW)
    of_points.start(2, 7)
    gone = {1: [lambda: of_points.stop(7)], 2: [lambda: of_points.start(2, 77)]}
    run = of_points.fit(algorithm, task, 4, gone, sites=3, out=tmp_path / "run")
    parts = [range(8), range(4), range(8), range(8)][: len(run.history)]
    state = simulated(algorithm, task, points, parts)
    assert_models(run, algorithm, state)
    assert [row["participants"] for row in run.history] == [len(part) for part in parts]
    assert run.history[-1]["changed"] == algorithm.changed(state, state)
    assert of_points.log[0] == "flower: site 'site-2' is left out, for the 1. time: its node is not there"


def test_a_site_that_has_lost_its_memory_says_so(of_points, tmp_path):
    of_points.start(2, 7)

    def lose():
        of_points.stop(7)
        of_points.folder = tmp_path / "empty"
        of_points.start(2, 77)

    algorithm = ct.UIFCA(k=3, restarts=2, init="random")
    run = of_points.fit(algorithm, ct.Task.density(FLOW), 3, {1: [lose]}, sites=3, out=tmp_path / "run")
    assert [row["participants"] for row in run.history] == [8, 4, 4]
    assert "clients remember nothing of this run: they missed its start, or their memory was lost" in of_points.log[1]


def test_a_site_is_back_in_a_secure_sum_and_another_joins(task, sites, tmp_path):
    swap = [lambda: sites.stop(9), lambda: sites.start(0, 99)]
    at = {1: swap, 2: [lambda: sites.start(2, 7)]}
    run = sites.fit(ct.FedAvg(tau=1), task, 3, at, out=tmp_path / "run", secure=ct.SecureSum(clip=2.0**10))
    assert [row["participants"] for row in run.history] == [6, 6, 12]
    assert [message for message in sites.log if message.startswith("flower")] == [
        "flower: site 'site-0' is back, as node 99",
        "flower: site 'site-2' joined with 6 clients: 6 in cluster 0",
    ]


def test_nobody_takes_the_place_of_a_site_that_is_there(task, sites, tmp_path):
    at = {
        1: [lambda: sites.start(0, 66)],
        3: [lambda: sites.stop(9)],  # only now is it taken to be the site
    }
    run = sites.fit(ct.FedAvg(tau=1), task, 5, at, out=tmp_path / "run")
    assert [row["participants"] for row in run.history] == [6] * 5
    assert sites.log == [
        "flower: node 66 has to wait: it says that it is site 'site-0', whose node 9 is there",
        "flower: site 'site-0' is back, as node 66",
    ]


@pytest.mark.parametrize(
    ("clients", "said"),
    [
        ([0, 1], "it has 2 clients, and had 3 when it enrolled first"),
        ([0, 2, 1], "its client 1 is called '2', and was '1' when it enrolled first"),
        ([0, 1, 7], "its client 2 is called '7', and was '2' when it enrolled first"),
    ],
)
def test_a_site_that_is_back_with_other_clients_is_refused(clients, said, task, ragged, sites, tmp_path):
    swap = {1: [lambda: sites.stop(9), lambda: sites.start(0, 99, ragged.select(clients))]}
    run = sites.fit(ct.FedAvg(tau=1), task, 4, swap, out=tmp_path / "run")
    assert [row["participants"] for row in run.history] == [6, 3, 3, 3]
    assert sites.log[0] == f"flower: site 'site-0' is back, but cannot take part: {said}"
    assert sum("cannot take part" in message for message in sites.log) == 1


def test_other_clients_under_the_old_number_are_refused(task, ragged, sites, tmp_path):
    swap = {1: [lambda: sites.start(0, 9, ragged.select([0, 2, 1]))], 2: [lambda: sites.start(0, 9)]}
    run = sites.fit(ct.FedAvg(tau=1), task, 3, swap, out=tmp_path / "run")
    assert [row["participants"] for row in run.history] == [6, 3, 6]
    assert "site 'site-0' has other clients now than when it enrolled" in sites.log[0]


# --- joining ------------------------------------------------------------------------------------------------------


def test_clients_that_join_ifca_choose_their_model(task, ragged, sites, tmp_path):
    algorithm = ct.IFCA(k=3, tau=2)
    run = sites.fit(algorithm, task, 5, {2: [lambda: sites.start(2, 7)]}, out=tmp_path / "run")
    parts = [range(6)] * 2 + [range(12)] * 3
    assert [row["participants"] for row in run.history] == [len(part) for part in parts]
    assert run.ari == 1.0 and len(run.labels) == 12
    assert_models(run, algorithm, simulated(algorithm, task, ragged, parts, joins=2))
    counts = ", ".join(f"2 in cluster {j}" for j in range(3))
    assert sites.log == [f"flower: site 'site-2' joined with 6 clients: {counts}"]


def test_clients_that_join_a_settled_ifca_are_sent_their_own_model(task, sites):
    algorithm = ct.IFCA(k=3, tau=2, patience=1, recheck=5)
    run = sites.fit(algorithm, task, 6, {4: [lambda: sites.start(2, 7)]})
    down = [row["bytes_down"] for row in run.history]
    assert down[5] < 2 * down[3] < down[0]  # of three models, those that a node's clients need; now for twice as many
    assert run.ari == 1.0


@pytest.mark.parametrize("privacy", ["none", "rotation"])
def test_clients_that_join_cfl_walk_down_the_tree(privacy, task, ragged, sites, tmp_path):
    algorithm = ct.CFL(schedule=(2, 5), patience=1, holdout=0.0, privacy=privacy, secret=7)
    run = sites.fit(algorithm, task, 8, {6: [lambda: sites.start(2, 7)]}, out=tmp_path / "run")
    parts = [range(6)] * 6 + [range(12)] * 2
    assert [row["participants"] for row in run.history] == [len(part) for part in parts]
    assert len(run.models) == 3 and run.ari == 1.0
    assert sorted(i for leaf in (run.tree.path(c)[-1] for c in range(3)) for i in leaf.clients) == list(range(12))
    assert_models(run, algorithm, simulated(algorithm, task, ragged, parts, joins=6))
    assert sites.log[-1].startswith("flower: site 'site-2' joined with 6 clients: 2 in cluster 0, 2 in")


def test_clients_join_cfl_before_it_has_split(task, sites, tmp_path):
    algorithm = ct.CFL(schedule=(3, 6), patience=1, holdout=0.0)
    run = sites.fit(algorithm, task, 8, {1: [lambda: sites.start(2, 7)]}, out=tmp_path / "run")
    assert sites.log[0] == "flower: site 'site-2' joined with 6 clients: 6 in cluster 0"
    assert run.ari == 1.0


@pytest.mark.parametrize("closed", [True, False])
def test_clients_that_join_uifca_remember_from_then_on(closed, points, of_points, tmp_path):
    algorithm = ct.UIFCA(k=3, restarts=2, init="random", closed=closed, tau=2, steps=3, lr=1e-3)
    task = ct.Task.density(FLOW)
    run = of_points.fit(algorithm, task, 5, {2: [lambda: of_points.start(2, 7)]}, out=tmp_path / "run")
    parts = [range(4)] * 2 + [range(8)] * 3
    assert [row["participants"] for row in run.history] == [len(part) for part in parts]
    state = simulated(algorithm, task, points, parts, joins=2)
    assert_models(run, algorithm, state)
    assert torch.equal(state.sizes, run.state.sizes) and int(state.sizes.sum()) == 2 * len(points.train.x)
    assert of_points.log[0] == "flower: site 'site-2' joined with 4 clients"


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_algorithm_lets_clients_join_or_says_that_it_does_not(name, task, ragged, regression, points):
    own = {
        "mixed_regression": (
            ct.MixedRegression(k=3, init=ct.MomentDescent(clients=12, ell=4, rounds=2, reuse=True)),
            *regression,
        ),
        "kfed": (ct.KFED(k=3), ct.Task.distance(), points),
        "uifca": (ct.UIFCA(k=3, restarts=2), ct.Task.density(FLOW), points),
        "clustergan": (
            ct.ClusterGAN(k=3, steps=1, critic=1, batch=4),
            ct.Task.adversarial(ct.models.GAN((6,), k=3, dz=2, hidden=(8,))),
            points,
        ),
        "ifca": (ct.IFCA(k=3, tau=1, restarts=2), task, ragged),
        "fedx": (ct.FedX(k=3, tau=1, lr=0.05), task, ragged),
        "personal": (ct.Personal(ct.IFCA(k=3, tau=1)), task, ragged),
        "ditto": (ct.Ditto(ct.FedAvg(tau=1)), task, ragged),
        "fedem": (ct.FedEM(k=3, tau=1), task, ragged),
        "one_shot": (ct.OneShot(k=3, tau=1), task, ragged),
        "mixed_effects": (ct.MixedEffects(k=2, restarts=2), *regression),
    }
    algorithm, task, federation = own[name] if name in own else (METHODS[name](tau=1), task, ragged)
    m, few = len(federation), len(federation) - 3
    if name == "local_only":
        with pytest.raises(ValueError, match="LocalOnly takes no clients once it has begun"):
            simulated(algorithm, task, federation, [range(few), range(m)], joins=1)
        return
    joins = 0 if name == "kfed" else 1  # there is one exchange only
    before = simulated(algorithm, task, federation.select(range(few)), [range(few)] * joins)
    state = algorithm.join(before, cohort_of(federation, task).only(range(few, m)).at(joins))
    assert len(algorithm.labels(before)) == few and len(algorithm.labels(state)) == m
    assert torch.equal(algorithm.labels(state)[:few], algorithm.labels(before))
    assert [x.shape for x in leaves(algorithm.models(state))] == [x.shape for x in leaves(algorithm.models(before))]
    after = simulated(algorithm, task, federation, [range(few)] * joins + [range(m)], joins=joins) if joins else state
    assert len(algorithm.labels(after)) == m


@pytest.mark.parametrize("algorithm", [ct.IFCA(k=2, tau=1, init="random"), ct.FedX(k=2, tau=1, lr=0.1, init="random")])
def test_clients_that_join_a_secure_sum_do_not_tell_their_cluster(algorithm, task, ragged):
    settings = ct.SecureSum(clip=2.0**10)
    few, all_ = (Cohort(Secure(cohort_of(f, task).engine, settings)) for f in (ragged.select(range(9)), ragged))
    state, _ = algorithm.round(algorithm.start(task, few.at(0), Key.of(0)), few.at(0))
    state = algorithm.join(state, all_.only(range(9, 12)).at(1))
    state, report = algorithm.round(state, all_.at(1))
    assert algorithm.labels(state).tolist() == [-1] * 12 and len(report.clients) == 12


def test_clients_wait_where_the_algorithm_takes_none(task, sites, tmp_path):
    run = sites.fit(ct.LocalOnly(tau=1), task, 4, {1: [lambda: sites.start(2, 7)]}, out=tmp_path / "run")
    assert len(run.labels) == 6 and [row["participants"] for row in run.history] == [6] * 4
    assert sites.log == ["flower: site 'site-2' cannot join: LocalOnly takes no clients once it has begun"]


def test_clients_with_too_few_rows_cannot_join(task, ragged, sites, tmp_path):
    few = Federation.from_clients([(x[:4], y[:4]) for x, y in [ragged.train.client(9)]], ids=["9"])
    sites.cuts = [3, 6, 9, 12]  # with enough rows each
    sites.start(0, 9)
    sites.start(1, 8)
    join = {1: [lambda: sites.start(2, 7, few)]}
    run = sites.fit(ct.IFCA(k=2, tau=1, resample=5), task, 3, join, out=tmp_path / "run")
    assert len(run.labels) == 6
    assert "cannot join: IFCA: resample=5 needs at least 10 rows on every client, but client '9' has 4" in sites.log[0]


# --- strangers ----------------------------------------------------------------------------------------------------


def client(*shape, ids=("new",)):
    return Federation.from_clients([(torch.zeros(3, *shape), torch.zeros(3, dtype=torch.long)) for _ in ids], ids=ids)


def told(**changes):
    """What a node tells when it enrols, with some of it changed."""
    site = {**Site.of("stranger", client(64)).to_plain(), **changes}
    return json.dumps(site)


def says(words, node=66):
    def spoil(sender, answer):
        if sender != node or answer.has_error() or "site" not in answer.content:
            return answer
        return Message(RecordDict({"site": ConfigRecord({"site": words})}), reply_to=answer)

    return spoil


ROWS = Site.of("stranger", client(64)).to_plain()["train"]


@pytest.mark.parametrize(
    ("share", "words", "said"),
    [
        (client(64, ids=["4"]), None, "site 'stranger' cannot join: two clients are called '4'"),
        (client(64, ids=["x", "y"]), told(clients=["x", "x"], train={**ROWS, "sizes": [1, 1]}), "called 'x'"),
        (client(65), None, "node 66 cannot take part: ValueError: client 'new'"),
        (client(64), told(train={**ROWS, "x": [65]}), "node 66 cannot take part: client 'new': MLP does not take rows"),
        (client(64), told(train={**ROWS, "x_type": "float64"}), "client 'new': MLP does not take rows of shape (64,)"),
        (client(64), told(train={**ROWS, "label": 10}), "cannot take part: client 'new': labels run from 10"),
        (client(64), told(train={**ROWS, "x": [2**39]}), "cannot"),
        (client(64), told(train={**ROWS, "y": [2**39]}), "cannot"),
        (client(64), told(train={**ROWS, "sizes": [2**40]}), "node 66 cannot take part: 'sizes'"),
        (client(64), told(train={**ROWS, "sizes": [2**30]}), None),
        (client(64), told(test={**ROWS, "x": [65]}), "node 66 cannot take part: its test rows are ((65,)"),
        (client(64), told(clients=[]), "node 66 cannot take part: it tells about 0 clients"),
        (client(64), "[" * 10**5, "node 66 cannot take part: it says who its clients are in too many brackets"),
        (client(64), "nonsense", "node 66 cannot take part: "),
        (client(64), told(name="site-1"), "node 66 has to wait: it says that it is site 'site-1', whose node 8"),
    ],
)
def test_a_hostile_stranger_does_no_harm(share, words, said, task, sites, tmp_path):
    undisturbed = sites.fit(ct.FedAvg(tau=1), task, 4)
    sites.grid.spoil = says(words) if words else None
    come = {1: [lambda: sites.start(9, 66, share, "stranger")]}
    run = sites.fit(ct.FedAvg(tau=1), task, 4, come, out=tmp_path / "run")
    if said is None:  # it may boast of its rows; that costs nothing
        assert [row["participants"] for row in run.history] == [6, 7, 7, 7]
        return
    assert len(sites.log) == 1 and said in sites.log[0]
    assert [row["participants"] for row in run.history] == [6] * 4
    for n, x in undisturbed.models[0].items():
        assert torch.equal(x, run.models[0][n])


def no_vector(tree):
    return {**tree, "note": {}}


def short_vector(tree):
    return {**tree, "note": {"vector": tree["note"]["vector"][:, :5]}}


@pytest.mark.parametrize("change", [no_vector, short_vector, None])
def test_a_stranger_that_cannot_be_placed_does_no_harm(change, task, sites, tmp_path):
    from coterie.flower.records import get_tree, put_tree

    def spoil(node, answer):
        if node != 7 or "answer" not in answer.content:
            return answer
        if change is None:
            return None
        content = RecordDict()
        put_tree(content, "answer", change(get_tree(answer.content, "answer", {})))
        return Message(content, reply_to=answer)

    algorithm = ct.CFL(schedule=(2, 5), patience=1, holdout=0.0)
    undisturbed = sites.fit(algorithm, task, 8)
    sites.grid.spoil = spoil
    run = sites.fit(algorithm, task, 8, {6: [lambda: sites.start(2, 7)]}, out=tmp_path / "run")
    assert len(run.labels) == 6 and np.array_equal(run.labels, undisturbed.labels)
    assert sum("site 'site-2' cannot join" in message for message in sites.log) == 1


def test_a_node_that_cannot_enrol_is_asked_again_after_a_while_or_once_it_is_back(task, sites, tmp_path):
    asked = []

    def spoil(node, answer):
        if node == 7 and not answer.has_error() and "site" in answer.content:
            asked.append(len(asked))
            return None if len(asked) < 4 else answer
        return answer

    sites.grid.spoil = spoil
    at = {
        1: [lambda: sites.start(2, 7)],
        3 + AGAIN: [lambda: sites.stop(7)],
        4 + AGAIN: [lambda: sites.start(2, 7)],
    }
    run = sites.fit(ct.FedAvg(tau=1), task, 6 + 2 * AGAIN, at, out=tmp_path / "run")
    assert asked == [0, 1, 2, 3]
    fault = "flower: node 7 cannot take part: no answer"
    assert sites.log == [fault, fault, "flower: site 'site-2' joined with 6 clients: 6 in cluster 0"]
    assert run.history[-1]["participants"] == 12


# --- going on -----------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """As if the server's process were gone: nothing is tidied up."""


def tables(algorithm, rounds):
    return {"algorithm": algorithm, "task": TASK, "run": {"rounds": rounds, "evaluations": 1}}


def server(sites, out, algorithm, rounds, at=None, *, resume=False, kill=None, **settings):
    """A run of the server app; `at` has what happens before some rounds' exchanges, and in one it may be killed."""
    answered = {"train": 0, "query": 0}

    def spoil(node, answer):
        if node == 9 and "answer" in answer.content:
            answered["train"] += 1
            for action in (at or {}).get(answered["train"], ()):
                action()
            if answered["train"] == kill:
                raise Killed
        return answer

    sites.grid.spoil = spoil
    config = {"out": str(out), "resume": resume, "nodes": 2, "deadline": 1.0, **settings}
    return serve(sites.grid, Settings(**config), tables(algorithm, rounds))


IFCA = {"name": "ifca", "k": 3, "tau": 2, "fraction": 0.7, "init": "random"}
CFL = {"name": "cfl", "schedule": [2, 5], "patience": 1, "holdout": 0.0}


@pytest.mark.parametrize("algorithm", [IFCA, CFL], ids=["ifca", "cfl"])
@pytest.mark.parametrize("kill", [4, 5, 6])
def test_a_run_that_is_killed_goes_on_with_those_who_joined(algorithm, kill, sites, tmp_path):
    """A site joins before the fourth round; the server is killed in it, or later."""
    rounds, come = 8, {3: [lambda: sites.start(2, 7, name="a-first-name")]}
    whole = server(sites, tmp_path / "whole", algorithm, rounds, come)
    sites.stop(7)
    with pytest.raises(Killed):
        server(sites, tmp_path / "run", algorithm, rounds, come, kill=kill)
    kept = json.loads((tmp_path / "run" / "roster.json").read_text())
    assert [site["name"] for site in kept["sites"]] == ["site-0", "site-1", "a-first-name"]  # it stays last
    again = server(sites, tmp_path / "run", algorithm, rounds, resume=True)
    assert np.array_equal(whole.labels, again.labels) and len(again.labels) == 12
    for a, b in zip(whole.models, again.models, strict=True):
        assert all(torch.equal(a[n], b[n]) for n in a)
    told = [[row[n] for n in ("loss", "changed", "participants", "members")] for row in whole.history]
    assert [[row[n] for n in ("loss", "changed", "participants", "members")] for row in again.history] == told


def test_a_run_goes_on_under_other_numbers_and_without_a_site_that_is_missing(sites, tmp_path):
    sites.start(2, 7)
    with pytest.raises(Killed):
        server(sites, tmp_path / "run", CFL, 6, kill=4, nodes=3)
    sites.grid.nodes.clear()
    sites.start(0, 9)
    sites.start(2, 70)
    back = {2: [lambda: sites.start(1, 80)]}
    run = server(sites, tmp_path / "run", CFL, 6, back, resume=True, nodes=3, min_replies=2)
    assert [row["participants"] for row in run.history] == [12, 12, 12, 9, 9, 12]
    assert len(run.labels) == 12 and run.ari == 1.0
    log = [e["message"] for e in read_events(tmp_path / "run") if e["event"] == "log"]
    assert "flower: site 'site-1' is left out, for the 1. time: its node is not there" in log
    assert "flower: site 'site-1' is back, as node 80" in log


def test_too_few_are_there_to_go_on(sites, tmp_path):
    with pytest.raises(Killed):
        server(sites, tmp_path / "run", CFL, 6, kill=3)
    sites.stop(8)
    with pytest.raises(TooFew, match="1 of 2 nodes came within 1 s"):
        server(sites, tmp_path / "run", CFL, 6, resume=True, min_replies=2)


def test_a_run_that_cannot_go_on_says_why(ragged, sites, tmp_path):
    with pytest.raises(Killed):
        server(sites, tmp_path / "run", CFL, 6, kill=3)
    sites.start(1, 80, ragged.select([3, 4]))
    sites.stop(8)
    with pytest.raises(TooFew, match="1 of 2 nodes have answered, 2 are needed"):
        server(sites, tmp_path / "run", CFL, 6, resume=True, min_replies=2)
    log = [e["message"] for e in read_events(tmp_path / "run") if e["event"] == "log"]
    assert "site 'site-1' is back, but cannot take part: it has 2 clients, and had 3 when it enrolled first" in log[-2]


def test_a_finished_run_that_is_resumed_lets_nobody_in(sites, tmp_path):
    one = server(sites, tmp_path / "run", CFL, 3)
    sites.start(2, 7)
    two = server(sites, tmp_path / "run", CFL, 3, resume=True)
    assert np.array_equal(one.labels, two.labels) and len(two.labels) == 6
    assert len(server(sites, tmp_path / "run", CFL, 4, resume=True).labels) == 12


@pytest.mark.parametrize("text", ["{", "[]", '{"sites": [3]}', '{"sites": []}'])
def test_a_damaged_roster_is_named(text, sites, tmp_path):
    server(sites, tmp_path / "run", CFL, 1)
    (tmp_path / "run" / "roster.json").write_text(text)
    with pytest.raises(ValueError, match="damaged"):
        server(sites, tmp_path / "run", CFL, 2, resume=True)


def test_a_roster_is_the_first_of_a_longer_one(ragged):
    two = [(i, Site.of(f"s{i}", ragged.select(range(4 * i, 4 * i + 4)))) for i in range(2)]
    roster = Roster.of(two)
    longer = roster.joined(5, Site.of("a", ragged.select([9])))
    assert longer.sites == ("s0", "s1", "a") and longer.federation.ids[-1] == "9"
    assert longer.first(8).sites == roster.sites and longer.first(9).nodes == (0, 1, 5)
    with pytest.raises(ValueError, match="made with 6 clients, which are not the first of these 9"):
        longer.first(6)
