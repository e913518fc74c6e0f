"""A federation on a Grid in this process: faults, memories, hostile answers, whole runs."""

import fcntl
import json
import math
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict

import coterie as ct
from coterie.core.engine import Exchange, Ledger
from coterie.core.federation import Federation
from coterie.core.key import Key
from coterie.core.pytree import leaves, tree_map
from coterie.core.train import Models
from coterie.core.uplink import Uplink
from coterie.flower.client_app import respond
from coterie.flower.engine import Absent
from coterie.flower.enrolment import enrol, plain_task
from coterie.flower.grid import TooFew
from coterie.flower.local import LocalGrid
from coterie.flower.memory import Memory, Moment
from coterie.flower.node import Node, node_of
from coterie.flower.records import get_tree, put_tree
from coterie.flower.server_app import Settings, read_tables, serve
from coterie.runs.config import build_algorithm, build_task
from coterie.runs.evaluate import Scorer
from coterie.runs.fit import fit_on


def assert_same_run(one, two):
    assert np.array_equal(one.labels, two.labels)
    for a, b in zip(one.models, two.models, strict=True):
        for n in a:
            assert torch.allclose(a[n], b[n], rtol=1e-5, atol=1e-5)
    assert np.allclose(one.scores.per_client, two.scores.per_client, atol=1e-5)


# --- whole runs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [ct.IFCA(k=3, tau=2, batch=4, fraction=0.5), ct.CFL(schedule=(1, 3), patience=1)])
def test_a_run_is_the_simulators(algorithm, task, ragged, on_flower):
    here = ct.fit(algorithm, task, ragged, rounds=3, seed=2, evaluations=1)
    there = fit_on(lambda key: on_flower(ragged, task, key), algorithm, rounds=3, seed=2, evaluations=1)
    assert_same_run(here, there)
    assert there.ari == here.ari
    assert [row["participants"] for row in there.history] == [row["participants"] for row in here.history]


def test_points_are_scored_without_the_rows_at_the_server(points, on_flower):
    task = ct.Task.density(ct.models.AffineFlow(6))
    here = ct.fit(ct.UIFCA(k=3, restarts=2), task, points, rounds=3)
    there = fit_on(lambda key: on_flower(points, task, key), ct.UIFCA(k=3, restarts=2), rounds=3)
    assert_same_run(here, there)
    assert here.scores.table.tolist() == there.scores.table.tolist()


def test_the_server_has_nobodys_rows(task, ragged, on_flower):
    federation = on_flower(ragged, task).everyone.federation
    assert federation.train.sizes.tolist() == ragged.train.sizes.tolist()
    assert federation.train.x.unique(dim=0).shape[0] == 1 and federation.train.x.stride(0) == 0
    assert federation.train.y.unique().tolist() == [9]


def test_messages_carry_only_the_models_that_are_needed(task, ragged, on_flower):
    cohort = on_flower(ragged, task).everyone
    theta = tree_map(lambda x: x.expand(12, *x.shape), task.init(Key.of(0)))
    one = sum(x.numel() * 4 for x in task.init(Key.of(0)).values())
    models = Models(theta, label=torch.arange(12))
    cohort.only([0, 1, 7]).gather(Scorer().score, models, slots=12, rows=torch.tensor([3, 3, 5]))
    assert cohort.ledger.bytes_down == 2 * (one + 8)  # 8: the label


@pytest.mark.parametrize("restarts", [1, 2])
def test_a_node_that_is_sent_some_of_the_models_adds_up_by_their_clusters(restarts, task, ragged, on_flower):
    """Nodes of three clients each, which are in two of four groups or in three: what they are sent is their own."""
    algorithm = ct.IFCA(k=4, tau=2, restarts=restarts, patience=1, recheck=9, init=ct.RandomGroups(rounds=2, steps=2))
    here = ct.fit(algorithm, task, ragged, rounds=5, evaluations=1)
    there = fit_on(lambda key: on_flower(ragged, task, key), algorithm, rounds=5, evaluations=1)
    assert_same_run(here, there)
    assert [row["members"] for row in there.history] == [row["members"] for row in here.history]
    assert there.history[-1]["bytes_down"] < there.history[0]["bytes_down"]  # at the end, one model for each client


def test_nodes_change_replies_as_the_uplink_says(task, ragged, on_flower):
    """The result is the simulator's, and another one than without."""
    algorithm, uplink = ct.IFCA(k=3, tau=2), [ct.Quantise(bits=3)]
    plain, here = (ct.fit(algorithm, task, ragged, rounds=2, evaluations=1, uplink=u) for u in ((), uplink))
    there = fit_on(
        lambda key: on_flower(ragged, task, key, uplink=Uplink(tuple(uplink))), algorithm, rounds=2, evaluations=1
    )
    assert_same_run(here, there)
    assert any(not torch.allclose(plain.models[0][n], x, atol=1e-4) for n, x in there.models[0].items())


def test_a_configuration_may_ask_for_an_uplink(ragged, tmp_path):
    nodes = {i: Node(f"site-{i}", ragged.select(range(6 * i, 6 * i + 6)), tmp_path / "nodes") for i in range(2)}
    tables = {
        "algorithm": {"name": "fedavg", "tau": 2},
        "task": {"kind": "classifier", "model": {"name": "mlp", "sizes": [64, 16, 10]}},
        "run": {"rounds": 2, "uplink": [{"name": "quantise", "bits": 3}]},
    }
    here = ct.fit(ct.FedAvg(tau=2), build_task(tables["task"]), ragged, rounds=2, uplink=[ct.Quantise(bits=3)])
    there = serve(LocalGrid(nodes), Settings(nodes=2, out=str(tmp_path / "run")), tables)
    assert_same_run(here, there)
    assert tomllib.loads((tmp_path / "run" / "config.toml").read_text())["run"]["uplink"] == tables["run"]["uplink"]
    for uplink, said in (
        ([{"name": "quantize"}], "did you mean 'quantise'"),
        ([{"name": "quantise", "bits": 0}], "bits"),
    ):
        with pytest.raises(ValueError, match=said):
            serve(LocalGrid(nodes), Settings(nodes=2), {**tables, "run": {"rounds": 2, "uplink": uplink}})


def test_a_function_as_an_uplink_is_refused(task, ragged, on_flower):
    def clipped(reply):
        return reply

    said = r"uplink: 'clipped' cannot be sent to clients; on Flower a transform must be a dataclass that is registered"
    with pytest.raises(ValueError, match=said):
        on_flower(ragged, task, uplink=Uplink((ct.Quantise(), clipped)))


# --- faults -------------------------------------------------------------------------------------------------------


class Failing:
    """A node that does something else in some exchanges with steps; answers are counted per node."""

    def __init__(self, node, when, what):
        self.node, self.when, self.what, self.count = node, when, what, 0

    def __call__(self, node, answer):
        if node != self.node:
            return answer
        self.count += 1
        return self.what(answer) if self.count in self.when else answer


def failed(answer):
    return Message(Error(2, "ValueError: no"), reply_to=answer)


def silent(answer):
    return None


@pytest.mark.parametrize("what", [failed, silent])
def test_a_round_is_done_without_a_node_that_fails(what, task, ragged, on_flower):
    algorithm = ct.FedAvg(tau=2)
    made = []

    def members(key):
        made.append(on_flower(ragged, task, key, spoil=Failing(8, [2], what), deadline=0.1))
        return made[0]

    run = fit_on(members, algorithm, rounds=3, evaluations=1)
    assert [row["participants"] for row in run.history] == [12, 9, 12]
    assert made[0].nodes.faults == {"site-1": 1}
    key = Key.of(0)
    cohort = on_flower(ragged, task, key.fold(1)).everyone
    state = algorithm.start(task, cohort.at(0), key.fold(0))
    for t in range(3):
        some = cohort.without(torch.tensor([3, 4, 5])) if t == 1 else cohort
        state, _ = algorithm.round(state, some.at(t))
    for n, x in algorithm.models(state).items():
        assert torch.equal(x[0], run.models[0][n])


def test_a_node_that_is_away_is_not_waited_for(task, ragged, on_flower):
    members = on_flower(ragged, task, deadline=1000)
    del members.nodes.grid.nodes[9]
    cohort = members.everyone
    with pytest.raises(Absent) as gone:
        cohort.gather(ct.IFCA(k=1).choose, tree_map(lambda x: x[None], task.init(Key.of(0))))
    assert gone.value.clients.tolist() == [0, 1, 2]
    assert cohort.ledger.bytes_down == 0
    assert cohort.ledger.messages == ["flower: site 'site-0' is left out, for the 1. time: its node is not there"]


def test_scores_of_clients_that_are_away_are_missing(task, ragged, on_flower):
    spoil = Failing(9, range(3, 99), failed)
    run = fit_on(lambda key: on_flower(ragged, task, key, spoil=spoil), ct.FedAvg(tau=2), rounds=2, evaluations=1)
    assert np.isnan(run.scores.per_client).tolist() == [True] * 3 + [False] * 9
    assert not math.isnan(run.score) and run.ari is not None


def test_with_too_few_the_run_stops_and_can_go_on(task, ragged, on_flower, tmp_path):
    def go(spoil, rounds, resume):
        return fit_on(
            lambda key: on_flower(ragged, task, key, spoil=spoil, min_replies=3),
            ct.FedAvg(tau=2),
            rounds=rounds,
            out=tmp_path / "run",
            resume=resume,
            evaluations=1,
        )

    with pytest.raises(TooFew, match="2 of 3 nodes have answered, 3 are needed"):
        go(Failing(8, [3], failed), 4, False)
    again = go(None, 4, True)
    assert_same_run(ct.fit(ct.FedAvg(tau=2), task, ragged, rounds=4), again)


# --- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [[6], [7], [8]])
def test_clients_forget_what_they_kept_in_a_try_that_failed(fails, points, on_flower, tmp_path):
    """The server is stopped in the middle of a round, when some nodes have already moved on, and started again."""
    task, algorithm = ct.Task.density(ct.models.AffineFlow(6)), ct.UIFCA(k=3, restarts=2, init="random")

    def go(spoil, resume):
        return fit_on(
            lambda key: on_flower(points, task, key, spoil=spoil, min_replies=3),
            algorithm,
            rounds=5,
            out=tmp_path / "run",
            resume=resume,
            evaluations=1,
        )

    with pytest.raises(TooFew):
        go(Failing(7, fails, failed), False)
    assert_same_run(ct.fit(algorithm, task, points, rounds=5), go(None, True))


def test_memory_goes_back_no_further_than_the_round_before(tmp_path):
    memory = Memory(tmp_path, "a")
    for unit in range(4):
        memory.save(Moment("run", unit, "ab"), {"x": torch.tensor(unit)})
    assert memory.load(Moment("other", 4, "cd"), {}) == {}
    assert int(memory.load(Moment("run", 3, "ab", after=(2, "ab")), {})["x"]) == 3
    assert int(memory.load(Moment("run", 3, "cd", after=(2, "ab")), {})["x"]) == 2
    with pytest.raises(ValueError, match="no longer has"):
        memory.load(Moment("run", 2, "cd", after=(1, "ab")), {})
    assert memory.load(Moment("run", 0, "cd"), {}) == {}


def test_memory_stays_in_its_folder(tmp_path):
    Memory(tmp_path / "here", "../a").save(Moment("../../b", 0, "ab"), {"../x": torch.zeros(1)})
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
    with pytest.raises(ValueError, match="hexadecimal"):
        Memory(tmp_path, "a").save(Moment("b", 0, "../c"), {})


def test_a_node_without_a_folder_says_that_it_needs_one(points, on_flower):
    task = ct.Task.density(ct.models.AffineFlow(6))
    members = on_flower(points, task)
    for node in members.nodes.grid.nodes.values():
        node.memory = Memory(None, node.site)
    with pytest.raises(TooFew):
        members.perform(lambda cohort: ct.UIFCA(k=2, init="random").start(task, cohort.at(0), Key.of(0)), unit=0)
    assert "give the node a 'memory' folder" in members.everyone.ledger.messages[-1]


# --- hostile answers ----------------------------------------------------------------------------------------------


def rewritten(change):
    """An answer whose tree has been changed."""

    def what(answer):
        tree = change(get_tree(answer.content, "answer", {}))
        content = RecordDict()
        put_tree(content, "answer", tree)
        return Message(content, reply_to=answer)

    return what


def update(function):
    return rewritten(lambda tree: {**tree, "update": tree_map(function, tree["update"])})


def part(name, function):
    return rewritten(lambda tree: {**tree, name: function(tree[name])})


def note(name, function):
    return part("note", lambda notes: {**notes, name: function(notes[name])})


def records(change):
    def what(answer):
        content = RecordDict(dict(answer.content))
        change(content)
        return Message(content, reply_to=answer)

    return what


def garbage(content):
    key = next(iter(content["answer"]))
    content["answer"] = ArrayRecord({**content["answer"], key: Array("float32", (2,), "numpy.ndarray", b"\x80\x04.")})


HOSTILE = {
    "an error": failed,
    "nothing": silent,
    "an empty message": lambda answer: Message(RecordDict(), reply_to=answer),
    "no tree": records(lambda c: c.pop("answer.tree")),
    "a tree that is no JSON": records(lambda c: c.update({"answer.tree": ConfigRecord({"tree": "{" * 9})})),
    "a bottomless tree": records(lambda c: c.update({"answer.tree": ConfigRecord({"tree": "[" * 10**5})})),
    "bytes that are no array": records(garbage),
    "an array too many": records(lambda c: c["answer"].update({"x": Array(np.zeros(1))})),
    "a tensor alone": rewritten(lambda tree: tree["weight"]),
    "a part too few": rewritten(lambda tree: {n: x for n, x in tree.items() if n != "note"}),
    "a part too many": rewritten(lambda tree: {**tree, "memory": torch.zeros(1)}),
    "NaN": update(lambda x: x * torch.nan),
    "infinity": update(lambda x: x + torch.inf),
    "an absurd norm": update(lambda x: x + 1e15),
    "another shape": update(lambda x: x[..., None]),
    "a cut axis": update(lambda x: x[:1]),
    "another type": update(lambda x: x.double()),
    "integers": update(lambda x: x.long()),
    "other keys": part("update", lambda theta: {f"{n}'": x for n, x in theta.items()}),
    "no update": part("update", lambda theta: ()),
    "a negative weight": part("weight", lambda w: w - 100),
    "a NaN for a weight": part("weight", lambda w: w * torch.nan),
    "an absurd weight": part("weight", lambda w: w + 1e20),
    "weights of another shape": part("weight", lambda w: w[None]),
    "a loss that is not finite": note("loss", lambda x: x * torch.nan),
    "notes of too many clients": note("loss", lambda x: torch.cat([x, x])),
    "notes that are no dict": part("note", lambda notes: tuple(notes.values())),
}
OF_LABELS = {
    "a label too high": note("label", lambda x: x + 3),
    "a label too low": note("label", lambda x: x - 9),
    "labels that are no integers": note("label", lambda x: x.float()),
}
OF_SLOTS = {
    "a slot too high": part("slot", lambda x: x + 1),
    "a slot too low": part("slot", lambda x: x - 1),
    "an enormous slot": part("slot", lambda x: x + 2**60),
    "slots of another shape": part("slot", lambda x: x[:, None]),
    "slots that are no integers": part("slot", lambda x: x.float()),
}


def sums_of(cohort, task):
    theta = tree_map(lambda x: torch.stack([x, x + 0.1, x - 0.1])[None], task.init(Key.of(0)))
    return cohort.combine(ct.IFCA(k=3, tau=2).step, Models(theta, torch.tensor(0.1)), slots=3)


def replies_of(cohort, task):
    return cohort.gather(ct.FedAvg(tau=2).step, Models(task.init(Key.of(0)), torch.tensor(0.1)))


@pytest.mark.parametrize("seat", [7, 9])
@pytest.mark.parametrize(
    ("ask", "what"),
    [pytest.param(sums_of, w, id=f"combine-{n}") for n, w in {**HOSTILE, **OF_LABELS}.items()]
    + [pytest.param(replies_of, w, id=f"gather-{n}") for n, w in {**HOSTILE, **OF_SLOTS}.items()],
)
def test_a_hostile_answer_enters_no_sum(ask, what, seat, task, ragged, on_flower):
    members = on_flower(ragged, task, spoil=Failing(seat, [1], what), deadline=0.1)
    cohort = members.everyone
    own = torch.arange(6, 12) if seat == 7 else torch.arange(3)
    with pytest.raises(Absent) as gone:
        ask(cohort, task)
    assert torch.equal(gone.value.clients, own)
    assert members.nodes.faults == {"site-2" if seat == 7 else "site-0": 1} and len(cohort.ledger.messages) == 1
    honest = on_flower(ragged, task).everyone.without(own)
    for a, b in zip(leaves(ask(cohort.without(own), task)), leaves(ask(honest, task)), strict=True):
        assert torch.equal(a, b)


# --- enrolment ----------------------------------------------------------------------------------------------------


def two(x=(3, 2), **more):
    return Federation.from_clients([(torch.zeros(x), torch.zeros(x[0], dtype=torch.long))], **more)


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ({1: Node("a", two()), 2: Node("a", two())}, "two sites are called 'a'"),
        ({1: Node("a", two(ids=["x"])), 2: Node("b", two(ids=["x"]))}, "two clients are called 'x'"),
        (
            {1: Node("a", two()), 2: Node("b", two((3, 4)))},
            "1 of 2 nodes could enrol. node 2: ValueError: client 'b/0'",
        ),
    ],
)
def test_nodes_that_do_not_fit_together_are_refused(nodes, said):
    task = ct.Task.classifier(ct.models.MLP(2, 2, 2))
    with pytest.raises((ValueError, TooFew), match=said):
        enrol(LocalGrid(nodes), task, nodes=2, deadline=1)


@pytest.mark.parametrize("site", ["", "{}", "[" * 10**5, '{"name": 1}', json.dumps({"name": "a", "clients": 3})])
def test_a_node_that_does_not_say_who_it_is_is_refused(site):
    content = RecordDict({"site": ConfigRecord({"site": site})})
    grid = LocalGrid({1: Node("a", two())}, spoil=lambda _, answer: Message(content, reply_to=answer))
    with pytest.raises(TooFew, match="0 of 1 nodes could enrol"):
        enrol(grid, ct.Task.classifier(ct.models.MLP(2, 2, 2)), nodes=1, deadline=1)


def test_a_module_of_ones_own_is_refused():
    with pytest.raises(ValueError, match="a module of your own"):
        plain_task(ct.Task.classifier(torch.nn.Linear(2, 2)))


def test_a_node_does_only_what_it_knows(task, ragged, on_flower):
    engine = on_flower(ragged, task).nodes
    node, message = engine.grid.nodes[9], Models(task.init(Key.of(0)), torch.tensor(0.1))
    clients = torch.arange(3)
    asking = Exchange(ct.FedAvg().step, message, 1, None, clients, "train", (0,), False, Ledger())
    content = engine.request(asking, clients)
    for change, said in (
        ({"owner": "os"}, "not known here"),
        ({"step": "round"}, "no client step"),
        ({"clients": [7]}, "others were asked for"),
        ({"clients": [-1]}, "others were asked for"),
        ({"task": '{"kind": "os"}'}, "kind must be"),
        ({"attempt": "/etc"}, "hexadecimal"),
        ({"uplink": '[{"name": "os"}]'}, "not known here"),
        ({"uplink": '[{"name": "method.fedavg"}]'}, "made of transforms"),
        ({"uplink": '[{"name": "uplink.quantise", "bits": 99}]'}, "bits must be"),
    ):
        bad = RecordDict(dict(content))
        bad["step"] = ConfigRecord({**content["step"], **change})
        with pytest.raises(ValueError, match=said):
            node.answer("train", bad)


# --- the apps -----------------------------------------------------------------------------------------------------

EXAMPLE = Path(__file__).parents[1] / "examples" / "flower"


@pytest.fixture
def example(monkeypatch):
    """The example's folder where Flower puts it: first on the path."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.delitem(sys.modules, "data", raising=False)
    yield
    sys.modules.pop("data", None)


def test_the_example_does_what_the_simulator_does(example, tmp_path):
    config = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    settings = Settings.of({**config["config"], "out": str(tmp_path / "run")})
    contexts = {
        7 * i: Context(1, 7 * i, {"partition-id": 2 - i, "memory": str(tmp_path)}, RecordDict(), {}) for i in range(3)
    }
    grid = LocalGrid({i: node_of(context, EXAMPLE / "data.py") for i, context in contexts.items()})
    there = serve(grid, settings, read_tables(settings.config))
    tables = read_tables("ifca.toml")
    here = ct.fit(
        build_algorithm(tables["algorithm"]),
        build_task(tables["task"]),
        ct.data.rotated_digits(clients=12, seed=0),
        rounds=tables["run"]["rounds"],
    )
    assert_same_run(here, there)
    assert there.path == tmp_path / "run" and (there.path / "final").is_dir()


def test_the_app_says_what_it_misses():
    context = Context(1, 1, {}, RecordDict(), {})
    with pytest.raises(ValueError, match=r"needs a data\.py"):
        respond("query.enrol", RecordDict(), context)
    with pytest.raises(ValueError, match=r"needs a data\.py"):
        read_tables("config.toml")
    with pytest.raises(ValueError, match="no key 'node'; did you mean 'nodes'"):
        Settings.of({"node": 3})
    with pytest.raises(ValueError, match="nodes must be at least 1"):
        Settings.of({"nodes": 0})
    with pytest.raises(ValueError, match="min-replies is 4, more than the 3 nodes"):
        Settings.of({"nodes": 3, "min-replies": 4})
    with pytest.raises(ValueError, match=r"no table \[data\]"):
        serve(LocalGrid({}), Settings(), {"data": {}})
    with pytest.raises(ValueError, match="no key 'executor' on Flower"):
        serve(LocalGrid({}), Settings(), {"run": {"executor": "vmap"}})


def test_a_run_folder_has_one_server_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("coterie.flower.server_app.PATIENCE", 0.0)
    tables = {"algorithm": {"name": "kfed", "k": 2}, "run": {"rounds": 1}}
    with (tmp_path / ".run.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another server is at work on this run"):
            serve(LocalGrid({}), Settings(out=str(tmp_path / "run")), tables)
