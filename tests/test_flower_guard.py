"""One registered node of three does not take a run over, costs no time by silence, and stops no start."""

import itertools
import logging

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict

import coterie as ct
from coterie.core.federation import Federation
from coterie.core.key import Key
from coterie.core.pytree import tree_map
from coterie.flower import grid as messages
from coterie.flower.backoff import Silent
from coterie.flower.checks import Asked, fault
from coterie.flower.engine import Absent, FlowerEngine
from coterie.flower.enrolment import enrol
from coterie.flower.grid import TooFew, brief
from coterie.flower.local import LocalGrid
from coterie.flower.membership import FlowerMembership
from coterie.flower.node import Node
from coterie.flower.norms import Change, Guard, change
from coterie.flower.records import get_tree, put_tree
from coterie.runs.fit import fit_on
from coterie.runs.folder import read_events

LIAR = 8  # site-1, with clients 3 to 5


def failing(node, answer):
    return Message(Error(2, "no"), reply_to=answer) if node == LIAR else answer


def lying(how):
    """A node that sends something else in place of its sums, or of its clients' replies."""

    def spoil(node, answer):
        if node != LIAR or answer.has_error():
            return answer
        tree, content = get_tree(answer.content, "answer", {}), RecordDict()
        if not tree["update"]:  # a score
            return answer
        put_tree(content, "answer", how(tree))
        return Message(content, reply_to=answer)

    return spoil


# --- one node of three --------------------------------------------------------------------------------------------


def zeros_of_great_weight(tree):
    nothing = tree_map(torch.zeros_like, tree["update"])
    return {**tree, "update": nothing, "weight": torch.full_like(tree["weight"], 1000.0)}


def a_hundredfold(tree):
    return {**tree, "update": tree_map(lambda x: 100 * x, tree["update"])}


def much_without_weight(tree):
    more = tree_map(lambda x: x + 30.0, tree["update"])
    return {**tree, "update": more, "weight": torch.zeros_like(tree["weight"])}


ATTACKS = {
    zeros_of_great_weight: "its weight is 1000, but its clients count for 3 at most",
    a_hundredfold: "times as much as others do (10 times at most)",
    much_without_weight: "it adds to a slot in which it has no weight",
}


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_a_node_that_outweighs_the_others_is_left_out(attack, task, ragged, on_flower, tmp_path):
    """The result is that of the two honest sites."""
    algorithm, out = ct.FedAvg(tau=3), tmp_path / "run"
    run = fit_on(
        lambda key: on_flower(ragged, task, key, spoil=lying(attack)), algorithm, rounds=2, evaluations=1, out=out
    )
    honest = fit_on(lambda key: on_flower(ragged, task, key, spoil=failing), algorithm, rounds=2, evaluations=1)
    assert [row["left_out"] for row in run.history] == [["site-1"]] * 2
    assert all(torch.equal(x, honest.models[0][n]) for n, x in run.models[0].items())
    said = [e["message"] for e in read_events(out) if e["event"] == "log" and "left out" in e["message"]]
    assert len(said) == 2 and all(ATTACKS[attack] in words for words in said)


def test_of_cfl_a_clients_change_out_of_proportion_is_not_believed(task, ragged, on_flower):
    """There every client's change is sent."""
    members = on_flower(ragged, task, spoil=lying(a_hundredfold))
    algorithm = ct.CFL(tau=3)
    state = members.perform(lambda cohort: algorithm.start(task, cohort.at(0), Key.of(0)), unit=0)
    members.perform(lambda cohort: algorithm.round(state, cohort.at(0)), unit=1)
    assert members.nodes.faults == {"site-1": 1}
    assert "times as much as others do" in members.everyone.ledger.messages[-1]


def sums(weight):
    weight = torch.tensor(weight)
    return {"update": {"w": torch.zeros(len(weight), 2)}, "weight": weight, "note": {}}


@pytest.mark.parametrize(
    ("weight", "sums_each", "said"),
    [
        ([3.0, 0.0], 1, ""),
        ([1.5, 1.5], 1, ""),
        ([3.2, 0.0], 1, ""),  # a few more rows than when it enrolled
        ([3.0, 3.0], None, ""),  # soft labels count in every cluster
        ([3.0, 3.0], 1, "its weight is 6, but its clients count for 3 at most"),
        ([4.0, 0.0], 1, "its weight is 4, but its clients count for 3 at most"),
        ([4.0, 0.0], None, "its weight is 4, but its clients count for 3 at most"),
    ],
)
def test_a_site_counts_as_its_clients(weight, sums_each, said):
    asked = Asked("combine", 2, clients=3, part="train", worth=torch.ones(3), sums=sums_each)
    assert fault(sums(weight), asked) == said


def test_in_replies_each_client_counts_as_its_rows():
    asked = Asked("gather", 1, clients=2, part="train", worth=torch.tensor([5, 50]))
    answer = {"update": {"w": torch.zeros(2, 3)}, "note": {}, "slot": torch.zeros(2, dtype=torch.long)}
    assert fault({**answer, "weight": torch.tensor([5.0, 50.0])}, asked) == ""
    assert "its clients count for 5 at most" in fault({**answer, "weight": torch.tensor([50.0, 5.0])}, asked)


def sites(*moved, **more):
    return {s: Change(moved=x, sent=100.0, model=1.0, **more) for s, x in enumerate(moved)}


def test_what_was_usual_before_goes_on_to_be_allowed():
    """Two sites have nothing left to learn, a third has noisy rows: it is as honest as they are."""
    guard = Guard({})
    assert guard.faults(sites(1.0, 1.0, 1.2)) == {}
    assert guard.faults(sites(1e-9, 1e-9, 1.2)) == {}
    assert set(guard.faults(sites(1e-9, 1e-9, 11.0))) == {2}
    assert set(Guard({}).faults(sites(1e-9, 1e-9, 1.2))) == {2}


def test_one_that_lies_among_three_does_not_make_the_others_look_bad():
    assert set(Guard({}).faults(sites(0.5, 0.4, 1e5))) == {2}
    assert set(Guard({}).faults(sites(0.5, 0.4, 0.6, 1e5, 1e5))) == {3, 4}


def test_who_is_alone_is_compared_with_the_past():
    guard = Guard({})
    assert guard.faults(sites(1e5)) == {}
    guard = Guard({"moved": 1.0})
    assert set(guard.faults(sites(11.0))) == {0} and guard.usual == {"moved": 1.0}


def test_who_has_more_rows_may_take_more_steps():
    far, near = Change(5.0, 9.0, 0.0, steps=400), Change(0.1, 9.0, 0.0, steps=10)
    assert Guard({}).faults({0: near, 1: far, 2: near}) == {}
    assert set(Guard({}).faults({0: near, 1: far._replace(steps=10), 2: near})) == {1}


def test_sums_that_are_no_models_have_nothing_to_be_compared_with():
    answer = {"update": {"moments": torch.ones(1, 5, 5)}, "weight": torch.ones(1)}
    assert change(answer, {"size": torch.ones(())}, Asked("combine", 1, clients=1, part="train")) is None


def test_the_guard_goes_on_after_a_resume(task, ragged, on_flower, tmp_path):
    def go(rounds, resume):
        made = []

        def members(key):
            made.append(on_flower(ragged, task, key))
            return made[0]

        fit_on(members, ct.FedAvg(tau=2), rounds=rounds, evaluations=1, out=tmp_path / "run", resume=resume)
        return made[0].everyone.ledger.usual["moved"]

    first = go(1, False)
    assert 0 < first <= go(2, True)


def noisy():
    """Two sites without noise, a third with other coefficients and much noise; sizes from 10 to 400 rows."""
    g = torch.Generator().manual_seed(0)

    def client(i, n):
        x = torch.randn(n, 4, generator=g)
        y = x @ torch.tensor([1.0, 2.0, 3.0, 4.0] if i < 6 else [-4.0, 3.0, -2.0, 1.0])
        return x, (y + 3.0 * (i >= 6) * torch.randn(n, generator=g))[:, None]

    return Federation.from_clients([client(i, n) for i, n in enumerate((10, 20, 400, 10, 10, 10, 50, 60, 70))])


HONEST = {
    "fedavg by epochs": ct.FedAvg(epochs=2, batch=5, lr=0.05),
    "ifca": ct.IFCA(k=2, tau=10, batch=5, lr=0.1),
    "cfl": ct.CFL(tau=10, batch=5, lr=0.1),
    "fedx": ct.FedX(k=2),
    "fedem": ct.FedEM(k=2, tau=10, batch=5, lr=0.1),
    "mixed effects": ct.MixedEffects(k=2),
}


@pytest.mark.parametrize("algorithm", HONEST.values(), ids=HONEST)
def test_honest_sites_that_differ_are_all_believed(algorithm, tmp_path):
    clients, task = noisy(), ct.Task.regressor(ct.models.Linear(4, 1))
    parts = itertools.pairwise((0, 3, 6, 9))
    grid = LocalGrid({i: Node(f"{i}", clients.select(range(a, b)), tmp_path) for i, (a, b) in enumerate(parts)})
    roster = enrol(grid, task, nodes=3, deadline=10)
    members = []

    def make(key):
        members.append(FlowerMembership(FlowerEngine(grid, roster, task, key, run="test", deadline=10)))
        return members[0]

    fit_on(make, algorithm, rounds=6, evaluations=1)
    assert members[0].nodes.faults == {}


# --- silence ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [None, 3])
def test_a_node_that_stays_silent_is_asked_ever_less_often(error, task, ragged, on_flower):
    """Whether Flower says nothing, or that it has waited in vain. It is welcome once it answers."""
    asked, answers = [], []

    def spoil(node, answer):
        if node == LIAR:
            asked.append(members.nodes.backoff.now)
            if not answers:
                return None if error is None else Message(Error(error, "waited"), reply_to=answer)
        return answer

    members = on_flower(ragged, task, deadline=0.01, spoil=spoil)
    models = tree_map(lambda x: x[None], task.init(Key.of(0)))

    def round(unit):
        return members.perform(lambda cohort: cohort.gather(ct.IFCA(k=1).choose, models), unit=unit).slot

    assert [len(round(unit)) for unit in range(1, 9)] == [9] * 8
    assert asked == [1, 2, 4, 8]
    assert "it was silent, and is asked again in round 8" in members.everyone.ledger.messages[-2]
    answers.append("yes")
    assert [len(round(unit)) for unit in range(9, 18)] == [9] * 7 + [12] * 2
    assert asked == [1, 2, 4, 8, 16, 17]


def test_whoever_is_needed_is_asked_all_the_same(task, ragged, on_flower):
    members = on_flower(ragged, task, min_replies=3)
    members.nodes.backoff.silent("site-1")
    members.nodes.backoff.silent("site-1")
    assert members.nodes.away([0, 1, 2]) == {}
    members.nodes.min_replies = 2
    assert list(members.nodes.away([0, 1, 2])) == [1]


def test_a_node_that_has_gone_and_is_back_is_asked_at_once(task, ragged, on_flower):
    members = on_flower(ragged, task)
    members.nodes.backoff.silent("site-1")
    members.nodes.backoff.silent("site-1")
    node = members.nodes.grid.nodes.pop(LIAR)
    assert members.nodes.away([1]) == {1: "its node is not there"}
    members.nodes.grid.nodes[LIAR] = node
    assert members.nodes.away([1]) == {}


# --- size ---------------------------------------------------------------------------------------------------------


def test_an_answer_that_is_too_large_is_not_opened(task, ragged, on_flower):
    """It would be refused when opened, for it says nothing else; but by then it were copied."""
    array = Array("float32", (2**25,), "numpy.ndarray", bytes(2**27))
    content = RecordDict({"answer": ArrayRecord({"[]": array}), "answer.tree": ConfigRecord({"tree": '"tensor"'})})
    members = on_flower(
        ragged, task, spoil=lambda node, answer: Message(content, reply_to=answer) if node == LIAR else answer
    )
    state = ct.FedAvg(tau=1).start(task, members.everyone.at(0), Key.of(0))
    with pytest.raises(Absent):
        ct.FedAvg(tau=1).round(state, members.everyone.at(0))
    assert "its answer of 134 MB is too large: 67 MB at most" in members.everyone.ledger.messages[-1]


def test_a_node_that_says_who_it_is_at_great_length_is_refused(monkeypatch):
    monkeypatch.setattr("coterie.flower.enrolment.LARGEST", 100)
    grid = LocalGrid({1: Node("a", rows(2))})
    with pytest.raises(TooFew, match="it does not say who its clients are in at most 100 letters"):
        enrol(grid, ct.Task.classifier(ct.models.MLP(2, 2, 2)), nodes=1, deadline=1)


# --- enrolment ----------------------------------------------------------------------------------------------------


def rows(width):
    return Federation.from_clients([(torch.zeros(3, width), torch.zeros(3, dtype=torch.long))])


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (
            ct.KFED(k=2).default_task(),
            "rows of site 'b' are float32 (3,) with targets int64 (), one input, those of most",
        ),
        (ct.Task.classifier(ct.models.MLP(2, 2, 2)), "client 'b/0'"),
    ],
    ids=["than others'", "than the model takes"],
)
def test_a_node_with_rows_of_another_kind_stops_no_start(task, said, caplog):
    grid = LocalGrid({5: Node("a", rows(2)), 6: Node("b", rows(3)), 7: Node("c", rows(2))})
    with caplog.at_level(logging.WARNING, "coterie"):
        assert enrol(grid, task, nodes=3, least=1, deadline=1).sites == ("a", "c")
    assert len(caplog.messages) == 1 and said in caplog.messages[0]
    assert caplog.messages[0].startswith("flower: the run starts without node 6: ")
    with pytest.raises(TooFew, match="2 of 3 nodes could enrol"):
        enrol(grid, task, nodes=3, least=3, deadline=1)


def test_a_run_starts_with_more_than_half_of_its_nodes():
    task = ct.Task.classifier(ct.models.MLP(2, 2, 2))
    grid = LocalGrid({5: Node("a", rows(2)), 6: Node("b", rows(3)), 7: Node("c", rows(3))})
    with pytest.raises(TooFew, match="1 of 3 nodes could enrol"):
        enrol(grid, task, nodes=3, least=1, deadline=1)


# --- what nodes say -----------------------------------------------------------------------------------------------

RUDE = "\x1b[2J\x1b]0;owned\x07no\r\n\x9b31m\u202e\u200b\x00" + "x" * 10**5


def test_what_a_node_says_is_repeated_on_one_line_without_escapes():
    assert brief(RUDE).startswith("?[2J?]0;owned?no ?31m???x") and len(brief(RUDE)) <= messages.TOLD
    assert brief("fine: θ ≥ 2") == "fine: θ ≥ 2"


def test_the_log_has_nothing_of_a_node_that_moves_a_cursor(task, ragged, on_flower):
    """As it fails in a round, and as it says who it is."""
    members = on_flower(
        ragged, task, spoil=lambda node, answer: Message(Error(2, RUDE), reply_to=answer) if node == LIAR else answer
    )
    with pytest.raises(Absent):
        ct.FedAvg(tau=1).start(task, members.everyone.at(0), Key.of(0))
        members.everyone.gather(ct.IFCA(k=1).choose, tree_map(lambda x: x[None], task.init(Key.of(0))))
    members.nodes.grid.nodes[3] = Node("late", ragged.select([0]))
    members.nodes.grid.spoil = lambda node, answer: Message(Error(2, RUDE), reply_to=answer)
    members.renew()
    told = members.everyone.ledger.messages
    assert len(told) == 2 and all("owned" in words and words.isprintable() and len(words) < 700 for words in told)
    assert members.nodes.silence(Message(Error(3, RUDE), reply_to=an_answer())).isprintable()


def an_answer():
    message = Message(RecordDict(), dst_node_id=1, message_type="query.step")
    message.metadata.__dict__["_message_id"] = "1"
    return message


@pytest.mark.parametrize("name", ["\x1b[31mred", "two\nlines", "right\u202eleft", ""])
def test_a_name_that_is_not_printable_is_refused(name):
    grid = LocalGrid({1: Node("a", rows(2))})
    grid.nodes[1].site = name
    with pytest.raises(TooFew, match="printable letters") as refused:
        enrol(grid, ct.Task.classifier(ct.models.MLP(2, 2, 2)), nodes=1, deadline=1)
    assert str(refused.value).isprintable()


def test_silence_is_told_from_failure(task, ragged, on_flower):
    engine = on_flower(ragged, task).nodes
    assert isinstance(engine.silence(None), Silent)
    assert not isinstance(engine.silence(Message(Error(2, "ValueError"), reply_to=an_answer())), Silent)
