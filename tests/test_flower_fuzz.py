"""Hostile answers, drawn at random: none stops a run, and none is in its result.

A kind takes a source of random numbers and a node's honest answer, and returns what arrives instead: a message, or None
where nothing does. It may raise, as Flower does where it cannot read the bytes of an answer; `Unfit`, where the answer
has not what it spoils.
"""

import json
import random
import re
import string

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

import coterie as ct
from coterie.core.engine import Ledger
from coterie.core.key import Key
from coterie.core.train import Models
from coterie.flower.compat import get_all_nested_objects, inflate_object_from_contents
from coterie.flower.engine import Absent
from coterie.flower.enrolment import enrol
from coterie.flower.grid import TooFew
from coterie.flower.local import LocalGrid
from coterie.flower.node import Node
from coterie.flower.records import get_tree, put_tree
from coterie.runs.evaluate import Scorer
from coterie.runs.fit import fit_on

SEAT = 8  # the node that lies: site-1, with clients 3 to 5
KINDS = {}


class Unfit(Exception):
    """This answer cannot be spoilt so."""


def kind(function):
    KINDS[function.__name__] = function
    return function


# --- the tree -----------------------------------------------------------------------------------------------------


def of_tree(function):
    """A kind that changes the answer's tree."""

    def spoilt(draw, answer):
        tree, content = get_tree(answer.content, "answer", {}), RecordDict()
        put_tree(content, "answer", function(draw, tree))
        return Message(content, reply_to=answer)

    KINDS[function.__name__] = spoilt
    return function


def of_leaf(function):
    """A kind that changes one tensor of the update."""

    def changed(draw, tree):
        update = tree["update"]
        if not isinstance(update, dict) or not update:
            raise Unfit
        name = draw.choice(sorted(update))
        return {**tree, "update": {**update, name: function(draw, update[name])}}

    changed.__name__ = function.__name__
    return of_tree(changed)


def entry(x, draw, value):
    """The tensor with another value somewhere."""
    x = x.clone()
    x.view(-1)[draw.randrange(x.numel())] = value
    return x


@of_leaf
def an_update_that_is_not_finite(draw, x):
    return entry(x, draw, draw.choice([torch.nan, torch.inf, -torch.inf]))


@of_leaf
def an_absurd_update(draw, x):
    return entry(x, draw, draw.choice([-1, 1]) * 10 ** draw.uniform(12, 38))


@of_leaf
def an_update_of_another_shape(draw, x):
    return draw.choice([x[None], x[..., None], x.flatten(), x[:, :1], torch.cat([x, x]), x[:0], torch.tensor(1.0)])


@of_leaf
def an_oversized_update(draw, x):
    return torch.zeros(*x.shape[:1], draw.randrange(10**5, 10**6))


@of_leaf
def an_update_of_another_type(draw, x):
    return x.to(draw.choice([torch.float64, torch.float16, torch.long, torch.int8, torch.uint8, torch.bool]))


@of_leaf
def an_update_that_is_a_tree(draw, x):
    for _ in range(draw.randrange(1, 12)):
        x = draw.choice([{"x": x}, (x,), (x, x)])
    return x


@of_tree
def an_update_with_other_keys(draw, tree):
    if not isinstance(tree["update"], dict) or not tree["update"]:
        raise Unfit
    names = sorted(tree["update"])
    gone = draw.choice(names)
    some = {n: x for n, x in tree["update"].items() if n != gone}
    renamed = {**some, gone + draw.choice(["'", "\x00", "é", "/.."]): tree["update"][gone]}
    return {**tree, "update": draw.choice([some, renamed, {**tree["update"], "": torch.zeros(3)}])}


@of_tree
def no_update(draw, tree):
    if tree["update"] == ():
        raise Unfit
    return {**tree, "update": draw.choice([(), {}, tree["weight"], ((), {})])}


@of_tree
def a_weight_that_is_none(draw, tree):
    return {**tree, "weight": entry(tree["weight"], draw, draw.choice([torch.nan, torch.inf, -1.0, -1e-30, 1e30]))}


@of_tree
def weights_of_another_kind(draw, tree):
    w = tree["weight"]
    return {**tree, "weight": draw.choice([w[None], w[:0], torch.cat([w, w]), w.double(), w.long(), (w,), {"w": w}])}


@of_tree
def other_parts(draw, tree):
    gone = draw.choice(sorted(tree))
    some = {n: x for n, x in tree.items() if n != gone}
    return draw.choice([some, {**some, gone.upper(): tree[gone]}, {**tree, "memory": torch.zeros(1)}, {}, ()])


@of_tree
def no_dict(draw, tree):
    return draw.choice([tree["weight"], tuple(tree.values()), torch.tensor(draw.random()), ((),) * 9])


@of_tree
def a_loss_that_is_none(draw, tree):
    if "loss" not in tree["note"] or "score" in tree["note"]:  # of a test loss nobody asks that it be finite
        raise Unfit
    value = draw.choice([torch.nan, torch.inf, -torch.inf, 1e31, -3e38])
    return {**tree, "note": {**tree["note"], "loss": entry(tree["note"]["loss"], draw, value)}}


@of_tree
def notes_of_other_clients(draw, tree):
    name = draw.choice(sorted(tree["note"]) or [None])
    if name is None:
        raise Unfit
    x = tree["note"][name]
    return {**tree, "note": {**tree["note"], name: draw.choice([torch.cat([x, x]), x[:-1], x[:0], x.flatten()[0]])}}


@of_tree
def other_notes(draw, tree):
    note = tree["note"]
    name = draw.choice(sorted(note) or [None])
    if name is None:
        raise Unfit
    some = {n: x for n, x in note.items() if n != name}
    odd = "".join(draw.choices(string.printable, k=draw.randrange(1, 2000)))
    other = draw.choice(
        [some, {**some, odd: note[name]}, tuple(note.values()), note[name], {**note, name: (note[name],)}]
    )
    return {**tree, "note": other}


@of_tree
def labels_that_do_not_exist(draw, tree):
    if "label" not in tree["note"]:
        raise Unfit
    x = tree["note"]["label"]
    value = draw.choice([-2, 99, 2**62, -(2**63)])
    other = draw.choice([entry(x, draw, value), x.float(), x.to(torch.uint8), x.to(torch.int32), x[:, None], x.bool()])
    return {**tree, "note": {**tree["note"], "label": other}}


@of_tree
def slots_that_do_not_exist(draw, tree):
    if "slot" not in tree:
        raise Unfit
    x = tree["slot"]
    value = draw.choice([-1, 99, 2**62, -(2**63)])
    return {**tree, "slot": draw.choice([entry(x, draw, value), x.float(), x.int(), x[:, None], x[:0], ()])}


# --- the records --------------------------------------------------------------------------------------------------


def with_records(answer, change):
    content = RecordDict(dict(answer.content))
    content.update(change)
    return Message(content, reply_to=answer)


def with_tree(answer, text):
    return with_records(answer, {"answer.tree": ConfigRecord({"tree": text})})


@kind
def an_error(draw, answer):
    return Message(Error(draw.randrange(9), draw.choice(["", "no", "\n\ud800" * 10**5])), reply_to=answer)


@kind
def silence(draw, answer):
    return None


@kind
def records_that_are_not_there(draw, answer):
    content = RecordDict(dict(answer.content))
    for name in draw.choice([["answer"], ["answer.tree"], ["answer", "answer.tree"]]):
        record = content.pop(name)
        if draw.random() < 0.5:
            content[name.upper()] = record
    return Message(content, reply_to=answer)


@kind
def text_in_place_of_records(draw, answer):
    text, number = ConfigRecord({"tree": "tensor", "answer": "x" * 999}), MetricRecord({"tree": 1, "answer": 2.5})
    tensors = ArrayRecord({"tree": Array(np.zeros(2))})
    name = draw.choice(["answer", "answer.tree"])
    return with_records(answer, {name: draw.choice([number, text if name == "answer" else tensors])})


@kind
def a_tree_of_another_type(draw, answer):
    return with_tree(answer, draw.choice([b"\xff\xfe", 3, 2.5, True, ["tensor"], [1, 2]]))


@kind
def a_tree_that_is_noise(draw, answer):
    return with_tree(answer, "".join(draw.choices('{}[]":,0123eE.-+ntfaN\\u \x00é', k=draw.randrange(0, 300))))


@kind
def a_tree_that_is_cut(draw, answer):
    text = str(answer.content["answer.tree"]["tree"])
    return with_tree(answer, text[: draw.randrange(len(text))])


@kind
def a_deep_tree(draw, answer):
    opened, closed = draw.choice([("[", "]"), ('{"tuple": [', "]}"), ('{"dict": {"a": ', "}}")])
    n = draw.choice([draw.randrange(17, 300), draw.randrange(10**3, 10**5)])
    return with_tree(answer, opened * n + draw.choice(['"tensor"' + closed * n, ""]))


@kind
def huge_numbers(draw, answer):
    number = draw.choice(["9" * draw.randrange(100, 10**5), "-1e999999", "NaN", "-Infinity", "0." + "1" * 10**5])
    return with_tree(answer, draw.choice(["%s", "[%s]", '{"dict": {"a": %s}}', '{"tuple": %s}']) % number)


@kind
def unknown_tuples(draw, answer):
    name = draw.choice(['"Popen"', '"Outer"', '"State"', "[]", "{}", "null", "7"])
    return with_tree(answer, f'{{"tuple": ["tensor", "tensor"], "named": {name}}}')


# --- the arrays ---------------------------------------------------------------------------------------------------


def with_array(draw, answer, change):
    """The answer with one array changed, given as its type, shape and bytes."""
    arrays = dict(answer.content["answer"])
    if not arrays:
        raise Unfit
    key = draw.choice(sorted(arrays))
    old = arrays[key]
    dtype, shape, data = change(old.dtype, tuple(old.shape), old.data)
    arrays[key] = Array(dtype, shape, "numpy.ndarray", data)
    return with_records(answer, {"answer": ArrayRecord(arrays)})


def npy(head, data=bytes(64), version=(1, 0)):
    head = head.encode("latin1")
    size = len(head).to_bytes(2 if version[0] == 1 else 4, "little")
    return b"\x93NUMPY" + bytes(version) + size + head + data


def header(descr, shape, by_columns=False):
    return f"{{'descr': {descr!r}, 'fortran_order': {by_columns}, 'shape': {shape}, }}\n"


@kind
def arrays_elsewhere(draw, answer):
    arrays = dict(answer.content["answer"])
    if not arrays:
        raise Unfit
    key = draw.choice(sorted(arrays))
    array = arrays.pop(key)
    new = draw.choice(["", "[]", key + " ", "[" * 999, "\x00", '["update"]'])
    return with_records(answer, {"answer": ArrayRecord({**arrays, new: array, **draw.choice([{}, {"x": array}])})})


@kind
def bytes_that_are_cut(draw, answer):
    return with_array(draw, answer, lambda t, s, b: (t, s, b[: draw.randrange(len(b))]))


@kind
def bytes_too_many(draw, answer):
    return with_array(draw, answer, lambda t, s, b: (t, s, b + draw.randbytes(draw.randrange(1, 99))))


@kind
def bytes_that_are_noise(draw, answer):
    first = draw.choice([b"", b"\x80\x04", b"PK\x03\x04", b"\x93NUMPY", b"\x93NUMPY\x01\x00"])
    return with_array(draw, answer, lambda t, s, b: (t, s, first + draw.randbytes(draw.randrange(300))))


@kind
def an_array_that_lies(draw, answer):
    shape = tuple(draw.randrange(9) for _ in range(draw.randrange(4)))
    dtype = draw.choice(["float16", "uint64", "int3", "", "complex64", "object", "float32,float32"])
    return with_array(draw, answer, lambda t, s, b: draw.choice([(dtype, s, b), (t, (*s, *shape, 7), b)]))


ODD_TYPES = {
    "object": "|O",
    "[('a', 'O')]": [("a", "|O")],
    "<U9": "<U9",
    "uint64": "<u8",
    "float128": "<f16",
    "complex64": "<c8",
    ">f4": ">f4",
    "datetime64[us]": "<M8[us]",
}


@kind
def an_array_of_objects(draw, answer):
    name, descr = draw.choice(sorted(ODD_TYPES.items()))
    return with_array(draw, answer, lambda t, s, b: (name, s, npy(header(descr, s), bytes(4096))))


@kind
def a_header_that_is_no_header(draw, answer):
    head = draw.choice(["{'descr': '<f4', (", "'''", "\\\n", "(" * 9999, "-" * 9999 + "1", "{[]: 1}", "\x00", "[].x"])
    more = "".join(draw.choices(string.printable, k=draw.randrange(20)))
    return with_array(draw, answer, lambda t, s, b: (t, s, npy(head + more)))


@kind
def an_enormous_array(draw, answer):
    shape = draw.choice([(2**60,), (2**31, 2**31), (10**400,), (2**40, 0), (10**4300,)])
    return with_array(draw, answer, lambda t, s, b: ("float32", shape, npy(header("<f4", shape))))


@kind
def a_shape_of_no_numbers(draw, answer):
    shape = draw.choice([(-1,), (-4, -4), (True,), (2.0,), ("2",), (None,), ((2,),)])
    return with_array(draw, answer, lambda t, s, b: ("float32", shape, npy(header("<f4", shape))))


@kind
def another_format(draw, answer):
    head, version = draw.choice([(True, (1, 0)), (False, (2, 0)), (False, (3, 0)), (False, (9, 9))])
    return with_array(draw, answer, lambda t, s, b: (t, s, npy(header("<f4", s, head), bytes(4096), version)))


# --- what Flower makes of bytes -----------------------------------------------------------------------------------


def of_bytes(function):
    """A kind that changes the objects of which Flower puts a message together."""

    def spoilt(draw, answer):
        objects = {number: part.deflate() for number, part in get_all_nested_objects(answer).items()}
        root = function(draw, answer.object_id, objects)
        arrived = inflate_object_from_contents(root, objects)
        arrived.metadata.__dict__["_message_id"] = root  # as Flower does
        return arrived

    KINDS[function.__name__] = spoilt
    return function


@of_bytes
def an_object_that_is_not_there(draw, root, objects):
    del objects[draw.choice(sorted(objects))]
    return root


@of_bytes
def an_object_that_is_noise(draw, root, objects):
    at = draw.choice(sorted(objects))
    head, _, body = objects[at].partition(b"\x00")
    noise = draw.randbytes(draw.randrange(1, 200))
    objects[at] = draw.choice([head + b"\x00" + noise, noise, head, head + b"\x00" + body[::-1] + noise, b""])
    return root


@of_bytes
def an_object_of_another_class(draw, root, objects):
    at = draw.choice(sorted(objects))
    own, _, rest = objects[at].partition(b" ")
    kinds = [b"Message", b"RecordDict", b"Array", b"ArrayChunk", b"ConfigRecord", b"Popen", b""]
    objects[at] = draw.choice([k for k in kinds if k != own]) + b" " + rest
    return root


@of_bytes
def no_message(draw, root, objects):
    return draw.choice(sorted(objects.keys() - {root}))


@kind
def content_that_is_no_content(draw, answer):
    arrived = Message(RecordDict(), reply_to=answer)
    arrived.__dict__["_content"] = draw.choice([Array(np.zeros(1)), ConfigRecord({"answer": 1}), ArrayRecord({}), None])
    return arrived


@kind
def an_answer_for_another(draw, answer):
    """It says that another node sent it, to another message."""
    tree, content = get_tree(answer.content, "answer", {}), RecordDict()
    put_tree(content, "answer", {**tree, "weight": tree["weight"] * torch.nan})
    arrived = Message(content, reply_to=answer)
    for name, value in (("src_node_id", draw.choice([7, 9])), ("reply_to_message_id", draw.choice(Tampered.numbers))):
        arrived.metadata.__dict__[f"_{name}"] = value
    return arrived


# --- the runs -----------------------------------------------------------------------------------------------------


class Tampered:
    """A grid with one node whose answers are spoilt, each by the next kind of a shuffled deck that fits."""

    numbers = ()  # of the messages that were sent last, to all nodes

    def __init__(self, grid, kinds, seed):
        self.grid, self.kinds, self.draw = grid, kinds, random.Random(seed)
        self.deck, self.used, self.theirs = [], [], set()

    def get_node_ids(self):
        return self.grid.get_node_ids()

    def push_messages(self, messages):
        Tampered.numbers = self.grid.push_messages(messages)
        self.theirs |= {i for i, m in zip(Tampered.numbers, messages, strict=True) if m.metadata.dst_node_id == SEAT}
        return Tampered.numbers

    def pull_messages(self, message_ids):
        assert len(message_ids) == 1
        answers = self.grid.pull_messages(message_ids)
        if answers and message_ids[0] in self.theirs:
            return [arrived] * 2 if (arrived := self.spoilt(answers[0])) else []
        return answers

    def spoilt(self, answer):
        while True:
            self.deck = self.deck or self.draw.sample(sorted(self.kinds), len(self.kinds))
            self.used.append(self.deck.pop())
            try:
                return self.kinds[self.used[-1]](self.draw, answer)
            except Unfit:
                self.used.pop()


ROUNDS = 17


def go(algorithm, task, federation, on_flower, kinds, seed):
    made = []

    def members(key):
        made.append(on_flower(federation, task, key, deadline=0.05))
        made[0].nodes.grid = Tampered(made[0].nodes.grid, kinds, seed)
        return made[0]

    return fit_on(members, algorithm, rounds=ROUNDS, evaluations=ROUNDS), made[0].nodes


def refused(draw, answer):
    return Message(Error(2, "no"), reply_to=answer)


@pytest.mark.parametrize("algorithm", [ct.IFCA(k=3, tau=2), ct.CFL(tau=2, schedule=(4, 9), patience=2)])
def test_no_hostile_answer_stops_a_run_or_is_in_its_result(algorithm, task, ragged, on_flower, monkeypatch):
    monkeypatch.setattr("coterie.flower.grid.POLL", 0.01)
    honest, _ = go(algorithm, task, ragged, on_flower, {"refused": refused}, 0)
    used = []
    for seed in range(2):
        run, engine = go(algorithm, task, ragged, on_flower, KINDS, seed)
        # CFL asks clients that it has not heard yet by themselves: what is in such an answer may not matter.
        assert set(engine.faults) == {"site-1"} and engine.faults.total() >= 0.9 * len(engine.grid.used)
        for mine, theirs in zip(run.models, honest.models, strict=True):
            assert all(torch.equal(mine[n], theirs[n]) for n in theirs)
        assert np.array_equal(run.labels, honest.labels)
        assert np.array_equal(run.scores.per_client, honest.scores.per_client, equal_nan=True)
        assert [row["loss"] for row in run.history] == [row["loss"] for row in honest.history]
        used += engine.grid.used
    assert len(used) >= 60 and len(set(used)) >= 25  # for each algorithm


def one_model(task):
    return Models(task.init(Key.of(0)), label=torch.tensor(0))


def test_a_node_that_is_asked_alone_stops_a_run_only_where_all_are_needed(task, ragged, on_flower):
    for needed, said in ((1, Absent), (2, Absent), (3, TooFew)):
        members = on_flower(ragged, task, min_replies=needed)
        members.nodes.grid = Tampered(members.nodes.grid, {"refused": refused}, 0)
        with pytest.raises(said):
            members.everyone.only([3, 4, 5]).gather(Scorer().score, one_model(task))
    engine = on_flower(ragged, task, min_replies=2).nodes
    engine.present = 2  # of the three sites one has failed before
    with pytest.raises(TooFew, match="1 of 2 nodes have answered, 2 are needed"):
        engine.settle({1: "no"}, torch.arange(3, 6), Ledger())


def test_sites_that_have_failed_in_a_piece_of_work_count_as_absent_until_its_end(task, ragged, on_flower):
    """First one site is away and the work begins again; then another fails, and one of two is too few."""
    members = on_flower(ragged, task, min_replies=2)
    del members.nodes.grid.nodes[9]
    members.nodes.grid = Tampered(members.nodes.grid, {"refused": refused}, 0)
    with pytest.raises(TooFew, match="1 of 2 nodes have answered, 2 are needed"):
        members.perform(lambda some: some.gather(Scorer().score, one_model(task)), unit=1)
    assert members.nodes.faults == {"site-0": 1, "site-1": 1} and members.nodes.present == 3


def test_what_an_algorithm_cannot_use_is_the_fault_of_a_node_that_was_asked_alone(task, ragged, on_flower):
    members, asked = on_flower(ragged, task), []

    def look(some):
        asked.append(some.clients.tolist())
        if len(asked) == 1:
            return some.only([0, 1]).gather(Scorer().score, one_model(task)).note["vector"]
        return None

    members.perform(look)
    assert asked == [list(range(12)), list(range(3, 12))]  # again, without the site that was asked alone
    assert "KeyError: 'vector'" in members.everyone.ledger.messages[-1] and members.nodes.faults == {"site-0": 1}
    with pytest.raises(KeyError):  # all were asked, and agree: it is the algorithm's own fault
        members.perform(lambda everybody: everybody.gather(Scorer().score, one_model(task)).note["vector"])
    assert members.nodes.faults == {"site-0": 1}


# --- enrolment ----------------------------------------------------------------------------------------------------

NASTY = [None, True, -1, 0, 2**31, 2**40, 2**70, 1e400, -2.5, "", "\ud800", "x"]
NASTY += [[], [[]], {}, [2**70], [1e400], ["\ud800"]]


def lied(draw, site):
    """What a node tells when it enrols, with something in it replaced."""
    table = site
    while True:
        key = draw.choice(sorted(table) if isinstance(table, dict) else range(len(table)))
        if not isinstance(table[key], dict | list) or not table[key] or draw.random() < 0.3:
            break
        table = table[key]
    table[key] = draw.choice(NASTY)
    return site


@pytest.mark.parametrize("seed", range(3))
def test_a_lie_at_enrolment_stops_nobody_else(seed, task, ragged):
    """A lie that looks right may pass; that two nodes do not fit together is said in words."""
    draw = random.Random(seed)
    nodes = {i: Node(f"site-{i}", ragged.select(range(4 * i, 4 * i + 4))) for i in range(3)}

    def spoil(node, answer):
        if node != 0:  # the first in the order of names
            return answer
        site = lied(draw, json.loads(answer.content["site"]["site"]))
        return Message(RecordDict({"site": ConfigRecord({"site": json.dumps(site)})}), reply_to=answer)

    left_out = 0
    for _ in range(50):
        try:
            roster = enrol(LocalGrid(nodes, spoil), task, nodes=2, deadline=1)
        except ValueError as error:
            assert re.search("are called|rows of site", str(error))
        else:
            assert set(roster.nodes) >= {1, 2}
            left_out += 0 not in roster.nodes
    assert left_out >= 25
