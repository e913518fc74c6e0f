"""The secure sum on a Flower federation: what it opens, who may fail, and all that the server gets to see."""

import dataclasses
import itertools
import math
import os
import re
import stat
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import Array, ConfigRecord, Error, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from rich.console import Console

import coterie as ct
from coterie.cli import show
from coterie.core.cohort import Cohort
from coterie.core.engine import OwnChoice
from coterie.core.federation import Federation
from coterie.core.key import Key
from coterie.core.pytree import flat, take, tree_map
from coterie.core.train import Models
from coterie.flower.engine import FlowerEngine
from coterie.flower.enrolment import enrol, plain_task
from coterie.flower.local import LocalGrid
from coterie.flower.membership import FlowerMembership
from coterie.flower.memory import Memory
from coterie.flower.node import Node
from coterie.flower.policy import Policy, identity_of
from coterie.flower.records import put_tree
from coterie.flower.secure import get_payload, put_payload
from coterie.flower.secure_engine import SecureFlower
from coterie.flower.server_app import Settings, serve
from coterie.privacy.bounded import Bounded
from coterie.runs.evaluate import Scorer, evaluate
from coterie.runs.fit import fit_on
from coterie.runs.scores import SummedScores
from coterie.secure.client import Client
from coterie.secure.engine import Code
from coterie.secure.messages import EXCHANGES, Count, Terms, TooFewLeft

K = 3
SECURE = {"min_members": 2, "threshold": 0.6}
STRICT = ct.SecureSum(min_members=2)
STEP = ct.IFCA(k=K, tau=2).step


class Recording(LocalGrid):
    """Keeps everything that the server sends and gets."""

    def __init__(self, nodes, spoil=None):
        super().__init__(nodes, spoil)
        self.down, self.up = [], []

    def push_messages(self, messages):
        messages = list(messages)
        self.down += messages
        return super().push_messages(messages)

    def pull_messages(self, message_ids):
        found = super().pull_messages(message_ids)
        self.up += found
        return found

    def everything(self):
        """All bytes, both ways, as Flower writes them."""
        parts = [part for m in [*self.down, *self.up] for part in get_all_nested_objects(m).values()]
        return b"".join(part.deflate() for part in parts)


def nodes_of(federation, folder, nodes=6):
    cuts = [i * len(federation) // nodes for i in range(nodes + 1)]
    shares = [federation.select(range(a, b)) for a, b in itertools.pairwise(cuts)]
    return {70 - i: Node(f"site-{i}", share, folder) for i, share in enumerate(shares)}


@pytest.fixture
def grid(ragged, tmp_path):
    """Twelve clients on six nodes; clients i, i + 3, … are in one group."""
    return Recording(nodes_of(ragged, tmp_path / "nodes"))


def members_on(grid, task, key=None, **options):
    spoil, grid.spoil = grid.spoil, None
    roster = enrol(grid, task, nodes=len(grid.nodes), deadline=10, groups=False)
    grid.spoil = spoil
    key = key or Key.of(0).fold(1)
    return FlowerMembership(FlowerEngine(grid, roster, task, key, **{"run": "test", "deadline": 10, **options}))


def cohort_on(grid, task, key=None, **options):
    return members_on(grid, task, key, **options).everyone


def secure_on(grid, task, settings=None, **options):
    settings = settings or ct.SecureSum(min_members=2, threshold=0.6)  # so that a third may be gone
    return members_on(grid, task, **options).wrapped(lambda engine: SecureFlower(engine, settings)).everyone.at(0)


def in_the_open(cohort):
    """The same clients without the secure sum, and with a ledger of their own."""
    return Cohort(cohort.engine.inner)


@pytest.fixture(scope="module")
def starts(task, ragged):
    """Models from which the three groups are found."""
    return ct.fit(ct.IFCA(k=K, tau=5), task, ragged, rounds=1).models


@pytest.fixture(scope="module")
def shared(starts):
    theta = {n: torch.stack([model[n] for model in starts])[None] for n in starts[0]}
    return Models(theta, torch.tensor(0.1))


class Gone:
    """Some nodes fail from an exchange on, in the first session."""

    def __init__(self, exchange, nodes, what=lambda answer: Message(Error(2, "no"), reply_to=answer)):
        self.first, self.nodes, self.what = EXCHANGES.index(exchange), nodes, what
        self.count = dict.fromkeys(nodes, 0)

    def __call__(self, node, answer):
        if node not in self.nodes:
            return answer
        self.count[node] += 1
        return self.what(answer) if self.count[node] > self.first else answer


def assert_close(a, b):
    assert (flat(a, 0) - flat(b, 0)).abs().max() <= 1e-5


# --- what is opened -----------------------------------------------------------------------------------------------


def test_sums_and_counts_are_those_in_the_open(grid, task, shared):
    plain = cohort_on(grid, task).at(0).combine(STEP, shared, slots=K)
    cohort = secure_on(grid, task)
    sums = cohort.combine(STEP, shared, slots=K)
    assert_close(plain.update, sums.update)
    assert torch.equal(plain.weight, sums.weight) and sums.members.tolist() == [4, 4, 4]
    assert set(sums.note["label"].flatten().tolist()) == {-1} and len(sums.note["label"]) == 12
    assert torch.allclose(sums.note["loss"], plain.note["loss"].mean(0).expand(12, 1), atol=1e-6)
    assert cohort.ledger.messages == [] and cohort.engine.name == "flower"


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_third_of_the_nodes_may_be_gone(exchange, grid, task, shared):
    """Nothing is done again; whose sheets have arrived is in the sums."""
    gone = {70 - 1, 70 - 4}
    late = exchange in ("lists", "counts", "sums")
    there = [i for i in range(12) if late or 70 - i // 2 not in gone]
    plain = cohort_on(grid, task).only(there).at(0).combine(STEP, shared, slots=K)
    count = torch.bincount(plain.note["label"].flatten(), minlength=K)
    grid.spoil = Gone(exchange, gone)
    cohort = secure_on(grid, task)
    grid.down.clear()
    sums = cohort.combine(STEP, shared, slots=K)
    assert_close(plain.update, sums.update)
    assert torch.equal(plain.weight, sums.weight) and torch.equal(count, sums.members)
    assert torch.allclose(sums.note["loss"], plain.note["loss"].mean(0).expand(12, 1), atol=1e-6)
    assert len(grid.down) == 6 * 6 - 2 * (5 - EXCHANGES.index(exchange))  # who has failed is not asked again
    assert cohort.engine.inner.faults == {"site-1": 1, "site-4": 1}
    assert late or "4 of 12 clients were gone" in cohort.ledger.messages[-1]


def test_nodes_that_are_away_or_silent_are_gone_too(grid, task, shared):
    grid.spoil = Gone("sheets", {68}, lambda answer: None)
    cohort = secure_on(grid, task, deadline=0.1)
    del grid.nodes[70]
    sums = cohort.combine(STEP, shared, slots=K)
    assert int(sums.members.sum()) == 8
    assert [m.split(" is left out")[0] for m in cohort.ledger.messages[:2]] == [
        "flower: site 'site-0'",
        "flower: site 'site-2'",
    ]


def test_with_too_few_left_no_sum_is_opened(grid, task, shared):
    grid.spoil = Gone("sheets", {70, 69, 68})
    said = r"3 of 6 nodes answered exchange 2 \(sheets\), but 4 are needed; nothing was opened; site 'site-0': it fai"
    with pytest.raises(TooFewLeft, match=said):
        secure_on(grid, task).combine(STEP, shared, slots=K)
    grid.spoil = Gone("sheets", {70})
    with pytest.raises(TooFewLeft, match=r"5 of 6 nodes .* but 6 are needed"):
        secure_on(grid, task, min_replies=6).combine(STEP, shared, slots=K)


def test_the_slot_of_a_small_cluster_is_not_opened(grid, task, shared):
    cohort = secure_on(grid, task, ct.SecureSum(min_members=4)).only([0, 1, 2, 3, 4, 5, 6, 7, 9])
    sums = cohort.combine(STEP, shared, slots=K)
    assert sorted(sums.members.tolist()) == [2, 3, 4]
    assert sorted(sums.weight.tolist()) == [0, 0, 4] and "not opened" in cohort.ledger.messages[-1]


def test_too_few_nodes_or_clients_are_refused(grid, task, shared):
    with pytest.raises(ValueError, match="at least 2 nodes and 2 clients must take part, got 1 and 2"):
        secure_on(grid, task).only([0, 1]).combine(STEP, shared, slots=K)
    with pytest.raises(ValueError, match="at least 2 nodes and 3 clients must take part, got 2 and 2"):
        secure_on(grid, task, ct.SecureSum()).only([0, 2]).combine(STEP, shared, slots=K)


# --- what the server sees -----------------------------------------------------------------------------------------


def words_of(message):
    return {f"{name}.{n}": x for name, record in message.content.config_records.items() for n, x in record.items()}


def form_of(message):
    """The names and shapes of everything in a message."""
    arrays = {f"{n}.{p}": (a.dtype, a.shape) for n, r in message.content.array_records.items() for p, a in r.items()}
    return arrays, sorted(words_of(message))


def secrets_of(grid, cohort, shared):
    """What no message may hold: every client's update, and the sum of each node's, however they may be written."""
    out = set()
    inner = cohort.engine.inner
    asking = cohort._exchange(STEP, shared, K, None)
    for s, at in inner.by_site(cohort.clients).items():
        node = grid.nodes[inner.roster.nodes[s]]
        seat = SimpleNamespace(slots=K, clients=12, share=1.0)
        reply, secrecy = node._secret_step(inner.request(asking, at), seat)
        assert secrecy["loss"] == "mean" and secrecy["label"] == "hidden"
        code = Code.of(2.0**20, 12, reply, K, "step", secrecy)
        sheets = [code.sheet(take(reply, i), "") for i in range(2)]
        numbers = flat(reply.update, 2)[:, 0]
        for x in [*numbers, numbers.sum(0)]:
            for kind in (np.float32, np.float64):
                raw = x.numpy().astype(kind).tobytes()
                out |= {raw[at : at + 8] for at in range(0, len(raw), 8)}
        for body in [sheets[0].body, sheets[1].body, sheets[0].body + sheets[1].body]:
            out |= {int(n).to_bytes(8, order) for n in body.ravel() if n for order in ("little", "big")}
    sent = b"".join(x.numpy().tobytes() for x in shared.theta.values())  # training may leave a number as it was
    return {s for s in out if len(set(s)) > 4} - {sent[at : at + 8] for at in range(0, len(sent), 4)}


def holds_any(seen, wanted):
    return any(seen[at : at + 8] in wanted for at in range(len(seen) - 7))


def test_no_message_holds_an_update_or_a_cluster(grid, task, shared):
    cohort = secure_on(grid, task)
    wanted = secrets_of(grid, cohort, shared)
    cohort.combine(STEP, shared, slots=K)
    assert len(wanted) > 10_000 and not holds_any(grid.everything(), wanted)
    answers = grid.up[6:]  # after enrolment
    assert {name for m in answers for name in m.content} == {"payload", "payload.tree", "form", "form.tree"}
    forms = [a for m in answers if "form" in m.content for a in m.content["form"].values()]
    assert forms and all(0 in a.shape for a in forms)  # they have a shape, and no number
    kinds = {m.metadata.message_type for m in grid.down}
    assert kinds == {"query.enrol", "train.step"}
    assert '"groups": null' in words_of(grid.up[0])["site.site"]
    # The search finds what it looks for where it is.
    grid.down.clear()
    grid.up.clear()
    in_the_open(cohort).at(0).combine(STEP, shared, slots=K)
    assert holds_any(grid.everything(), wanted)


def test_messages_do_not_depend_on_who_is_in_which_cluster(ragged, task, shared, tmp_path):
    """Two assignments with the same counts: the same messages, but for what is masked; and that looks random."""
    order = [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]  # now whole nodes are in one cluster
    forms = []
    for name, federation in (("one", ragged), ("two", ragged.select(order))):
        grid = Recording(nodes_of(federation, tmp_path / name))
        sums = secure_on(grid, task).combine(STEP, shared, slots=K)
        assert sums.members.tolist() == [4, 4, 4]
        forms.append([form_of(m) for m in grid.down[6:] + grid.up[6:]])
        sheets = [get_payload(m.content) for m in grid.up if "form" in m.content]
        for (sheet,) in (payload.values() for payload in sheets):
            numbers = np.frombuffer(sheet, np.uint64)
            assert not set(numbers[: 2 * K + 2].tolist()) & {0, 1, 2}  # counts, who takes part, the loss, tags
            for row in numbers[2 * K + 2 :].reshape(K, -1):
                bits = np.unpackbits(row.view(np.uint8)).mean()
                assert abs(bits - 0.5) < 5 * 0.5 / math.sqrt(row.nbytes * 8)
    assert forms[0] == forms[1]


def test_scoring_tells_no_cluster(grid, task, shared, starts):
    algorithm = ct.IFCA(k=K, init=starts)
    cohort = secure_on(grid, task)
    state = algorithm.start(task, cohort, Key.of(0))
    grid.up.clear()
    scores = evaluate(algorithm, state, cohort)
    plain = evaluate(algorithm, state, in_the_open(cohort))
    assert isinstance(scores, SummedScores) and scores.per_cluster == pytest.approx(plain.per_cluster, abs=1e-6)
    assert scores.mean == pytest.approx(plain.mean) and set(scores.labels) == {-1}
    assert np.isnan(scores.per_client).all() and scores.clustering == {} and scores.count.tolist() == [4, 4, 4]
    answers = grid.up[: 6 * 6]
    assert {name for m in answers for name in m.content} == {"payload", "payload.tree", "form", "form.tree"}
    assert cohort.ledger.bytes_up == 0


def test_clients_without_test_rows_have_no_score(task, ragged, tmp_path):
    rows = [ragged.train.client(i) for i in range(12)]
    tests = [(x[:n], y[:n]) for i, (x, y) in enumerate(rows) for n in [4 * (i not in (1, 2, 5))]]
    grid = LocalGrid(nodes_of(Federation.from_clients(rows, tests), tmp_path))
    algorithm = ct.FedAvg()
    cohort = secure_on(grid, task)
    scores = evaluate(algorithm, algorithm.start(task, cohort, Key.of(0)), cohort)
    assert isinstance(scores, SummedScores) and scores.count.tolist() == [9]


# --- nodes --------------------------------------------------------------------------------------------------------


def invitation(**changes):
    terms = {"invited": 3, "needed": 2, "min_members": 2, "slots": K, "clip": 2.0**20, "clients": 6, "me": 0}
    terms |= {"deadline": 10.0, "share": 1.0}
    words = {**terms, "run": "test", "session": "ab", "exchange": "keys", "step": "IFCA.step", **changes}
    return RecordDict({"secure": ConfigRecord(words)})


def other_key():
    """The public keys of party 1 of the session that `invitation` invites to."""
    about = '{"step": "IFCA.step", "clip": 1048576.0, "clients": 6.0, "share": 1.0}'
    return Client(1, Terms(invited=3, needed=2, min_members=2, slots=K, who="nodes", about=about)).keys()


def following(exchange, session="ab"):
    return RecordDict({"secure": ConfigRecord({"run": "test", "session": session, "exchange": exchange})})


def test_a_node_answers_every_exchange_once_and_in_turn(ragged, tmp_path):
    node = Node("a", ragged, tmp_path)
    key = get_payload(node.answer("train", invitation()))
    (file,) = tmp_path.rglob("session.json")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with pytest.raises(ValueError, match="the next exchange is 'shares', not 'sheets'"):
        node.answer("train", following("sheets"))
    with pytest.raises(ValueError, match="does not take part in this secure sum, or no longer"):
        node.answer("train", following("shares", "cd"))
    content = following("shares")
    put_payload(content, {**key, **other_key()})
    node.answer("train", content)
    with pytest.raises(ValueError, match="the next exchange is 'sheets', not 'shares'"):
        node.answer("train", content)
    with pytest.raises(ValueError, match="'payload' cannot be read"):
        node.answer("train", following("sheets"))
    assert not file.exists()  # what has failed is not tried again: the masks may have been seen
    with pytest.raises(ValueError, match="or no longer"):
        node.answer("train", following("sheets"))


def test_a_node_keeps_nothing_of_a_session_that_is_over(grid, task, shared, tmp_path):
    secure_on(grid, task).combine(STEP, shared, slots=K)
    assert not list(tmp_path.rglob("session.json"))


def test_a_session_that_broke_off_is_forgotten_at_the_next_message_of_any_other(ragged, tmp_path, monkeypatch):
    """A session that goes on is not, however late its messages are."""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    node, other = Node("a", ragged, tmp_path), Node("b", ragged, tmp_path)
    key = get_payload(node.answer("train", invitation()))
    other.answer("train", invitation(run="of another node"))
    now += 6 * 10 - 1
    node.answer("train", invitation(run="second", session="cd"))
    assert len(list(tmp_path.rglob("session.json"))) == 3
    now += 2
    put_payload(content := following("shares"), {**key, **other_key()})
    node.answer("train", content)
    assert len(list(tmp_path.rglob("session.json"))) == 3
    node.answer("train", invitation(run="third", session="ef"))
    assert node.memory.load_session("test") is None and node.memory.load_session("second") is not None
    assert other.memory.load_session("of another node") is not None


def test_keys_are_new_in_every_session(grid, task, shared):
    cohort = secure_on(grid, task)
    for _ in range(2):
        cohort.combine(STEP, shared, slots=K)
    public = [get_payload(m.content) for m in grid.up[6:12] + grid.up[42:48]]
    assert len({part for payload in public for part in payload.values()}) == 12


@pytest.mark.parametrize("terms", [{"needed": 1}, {"needed": 4}, {"min_members": 1}, {"slots": 0}])
def test_a_node_refuses_terms_that_protect_nobody(terms, ragged, tmp_path):
    with pytest.raises(ValueError, match="more than half of the nodes must be needed"):
        Node("a", ragged, tmp_path).answer("train", invitation(**terms))


def test_a_node_without_a_folder_says_that_it_needs_one(grid, task, shared):
    for node in grid.nodes.values():
        node.memory = Memory(None, node.site)
    with pytest.raises(TooFewLeft, match=r"0 of 6 nodes .* has secrets to keep; give the node a 'memory' folder"):
        secure_on(grid, task).combine(STEP, shared, slots=K)


def test_what_does_not_fit_is_told_without_its_size(grid, task, shared, caplog):
    large = shared._replace(theta=tree_map(lambda x: 1e4 * x, shared.theta))
    with pytest.raises(TooFewLeft) as error:
        secure_on(grid, task, ct.SecureSum(clip=2.0**10)).combine(STEP, large, slots=K)
    assert "is not finite or above clip = 1024" in str(error.value) and "reaches" not in str(error.value)
    assert "would send reaches" in caplog.text  # on the node


def test_notes_of_clients_are_not_told(grid):
    with pytest.raises(TooFewLeft, match=r"CFL.step tells the server every client's "):
        serve(grid, Settings(nodes=6), {**TABLES, "algorithm": {"name": "cfl", "sketch": 50}})


# --- a server that lies, and what nodes ask of a run ---------------------------------------------------------------


class Lying(LocalGrid):
    """A server that changes what it says in an exchange, node by node."""

    def __init__(self, nodes, exchange, lie):
        super().__init__(nodes)
        self.exchange, self.lie = exchange, lie

    def push_messages(self, messages):
        messages = list(messages)
        for message in messages:
            if message.content.get("secure", {}).get("exchange") == self.exchange:
                self.lie(message.metadata.dst_node_id, message.content)
        return super().push_messages(messages)


def say(content, numbers):
    put_tree(content, "numbers", torch.tensor(numbers))


def one_for_all(keys, me):
    return {i: key if i == me else keys[5] for i, key in keys.items()}


def miscount(content):
    counts = {j: Count.from_bytes(part) for j, part in get_payload(content).items()}
    put_payload(content, {j: Count(count.members + 1, count.tag).to_bytes() for j, count in counts.items()})


@pytest.mark.parametrize(
    ("exchange", "lie", "said"),
    [
        ("lists", lambda node, c: say(c, [0] * 6), "it was told that one sheet has arrived twice"),
        ("lists", lambda node, c: say(c, list(range(node % 2, 6))), "others were told of another one|has not arrived"),
        ("sums", lambda node, c: miscount(c), "it was told of a count that is not the true one"),
        (
            "shares",
            lambda node, c: put_payload(c, {**get_payload(c), 6: get_payload(c)[5]}),
            "it was given keys of 7 nodes, 6 are invited",
        ),
        (
            "shares",
            lambda node, c: put_payload(
                c, {i: k if 70 - i == node else get_payload(c)[5] for i, k in get_payload(c).items()}
            ),
            "it was given a key of node .* twice|it was given keys that node .* has not signed",
        ),
    ],
    ids=["duplicates", "two views", "counts", "more than invited", "one key for all"],
)
def test_nodes_refuse_a_server_that_lies(exchange, lie, said, ragged, task, shared, tmp_path, caplog):
    cohort = secure_on(Lying(nodes_of(ragged, tmp_path), exchange, lie), task)
    with pytest.raises(TooFewLeft, match=said):
        cohort.combine(STEP, shared, slots=K)
    assert re.search(rf"secure sum: node \d refuses: .*({said})", caplog.text)


def scale_apart(node, content):
    """One node is told of a scale at which its numbers would be the upper bits of every sum."""
    if node == 70:
        content["secure"] = ConfigRecord({**content["secure"], "clip": 2.0**10})


def dead_models(node, content):
    """All nodes but one are sent models that train to nothing."""
    if node != 70:
        arrays = content["message"]
        for name in list(arrays):
            arrays[name] = Array(np.zeros_like(arrays[name].numpy()))


@pytest.mark.parametrize(
    ("exchange", "lie", "said"),
    [
        ("keys", scale_apart, "it was given keys that node . has not signed"),
        ("sheets", dead_models, "the counts make no sense"),
    ],
)
def test_no_node_can_be_made_to_stand_out_of_a_sum(exchange, lie, said, ragged, task, shared, tmp_path):
    cohort = secure_on(Lying(nodes_of(ragged, tmp_path), exchange, lie), task)
    with pytest.raises(TooFewLeft, match=said):
        cohort.combine(STEP, shared, slots=K)


def test_a_node_takes_part_on_its_own_conditions(ragged, task, shared, tmp_path):
    grid = LocalGrid(nodes_of(ragged, tmp_path))
    for node in grid.nodes.values():
        node.policy = Policy.of({"secure-only": True, "min-members": 4, "min-nodes": 3})
    with pytest.raises(TooFewLeft, match=r"asks for clusters of at least 4 members .* got 2 and 4"):
        secure_on(grid, task).combine(STEP, shared, slots=K)
    assert secure_on(grid, task, ct.SecureSum(min_members=4)).combine(STEP, shared, slots=K).members.sum() == 12
    cohort = cohort_on(grid, task).at(0)
    with pytest.raises(ConnectionError):
        cohort.combine(STEP, shared, slots=K)
    assert "takes part in secure sums alone (secure-only), and this run has none" in cohort.ledger.messages[0]


def test_nodes_that_know_each_other_refuse_strangers(ragged, task, shared, tmp_path):
    """A server that takes part itself, under a name that nobody knows."""
    grid = LocalGrid(nodes_of(ragged, tmp_path))
    identities = [identity_of(node.memory).public.hex() for node in grid.nodes.values()]
    (peers := tmp_path / "peers").write_text("# all nodes\n" + "\n".join(f"{key}  # a node" for key in identities))
    for node in grid.nodes.values():
        node.policy = Policy.of({"peers": str(peers)})
    assert secure_on(grid, task, STRICT).combine(STEP, shared, slots=K).members.tolist() == [4, 4, 4]
    grid.nodes[70].memory.identity_file().unlink()  # another one is made
    with pytest.raises(TooFewLeft, match=r"it was given keys of node 0, whose identity [0-9a-f]{64} it does not know"):
        secure_on(grid, task, STRICT).combine(STEP, shared, slots=K)


@pytest.fixture
def wary(ragged, tmp_path):
    """Nodes that know each other and trust their server in nothing; and the identities' file."""
    grid = LocalGrid(nodes_of(ragged, tmp_path))
    (peers := tmp_path / "peers").write_text("\n".join(identity_of(n.memory).public.hex() for n in grid.nodes.values()))
    for node in grid.nodes.values():
        node.policy = Policy.of({"peers": str(peers), "secure-only": True})
    return grid


def test_wary_nodes_take_part_in_what_is_honest(wary, task, shared):
    assert secure_on(wary, task, STRICT).combine(STEP, shared, slots=K).members.tolist() == [4, 4, 4]
    assert secure_on(wary, task, STRICT).sample(0.7).combine(STEP, shared, slots=K).members.sum() <= 12


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda c: c.only(range(0, 12, 2)), "has all of its 2 clients asked or none, got 1"),
        (lambda c: c.sample(0.3), "at least 4 times min_members clients are to be expected, got 3.6"),
    ],
)
def test_wary_nodes_refuse_sums_of_some(ask, said, wary, task, shared):
    with pytest.raises(TooFewLeft, match=said):
        ask(secure_on(wary, task, STRICT)).combine(STEP, shared, slots=K)


def test_wary_nodes_refuse_low_thresholds_and_models_for_single_clients(wary, task, shared, starts):
    with pytest.raises(TooFewLeft, match="asks for more than two thirds of the nodes, got 4 of 6"):
        secure_on(wary, task, ct.SecureSum(min_members=2, threshold=0.6)).combine(STEP, shared, slots=K)
    one_each = Models(tree_map(lambda x: x[0], shared.theta), shared.lr)
    step = ct.RandomGroups().train
    with pytest.raises(TooFewLeft, match="lets no server say which client is sent which model"):
        secure_on(wary, task, STRICT).combine(step, one_each, slots=K, rows=torch.arange(12) % K)
    for node in wary.nodes.values():
        node.policy = dataclasses.replace(node.policy, server_picks=True)
    assert secure_on(wary, task, STRICT).combine(step, one_each, slots=K, rows=torch.arange(12) % K).members.sum() == 12


def ask_twice(node, content):
    """Clients are asked for three times: each would be a cluster of its own, and large enough."""
    content["step"] = ConfigRecord({**content["step"], "clients": [0, 0, 0]})


def other_slots(node, content):
    """An error that names a slot would name the cluster of a client."""
    content["step"] = ConfigRecord({**content["step"], "slots": 1})


@pytest.mark.parametrize(
    ("lie", "said"),
    [(ask_twice, "a client was asked for twice"), (other_slots, "a step with 1 sums, in a session of 3")],
)
def test_nodes_refuse_steps_that_single_clients_out(lie, said, ragged, task, shared, tmp_path):
    cohort = secure_on(Lying(nodes_of(ragged, tmp_path), "sheets", lie), task)
    with pytest.raises(TooFewLeft, match=said):
        cohort.combine(STEP, shared, slots=K)


def test_a_private_step_without_noise_opens_no_small_cluster(grid, task, shared):
    """It puts every client into every cluster, so that all are large enough."""
    step = Bounded(ct.IFCA(k=K, tau=2), "step", 1e4, (1e-4, 1e-4), K, seeded=False).step
    with pytest.raises(TooFewLeft, match=r"the noise of a private step is 3.5e-08, 0.1 at least"):
        secure_on(grid, task).combine(step, shared, slots=K)


def test_of_two_processes_one_has_the_session(ragged, tmp_path):
    node = Node("a", ragged, tmp_path)
    node.answer("train", invitation())
    assert node.memory.take_session("test") is not None and node.memory.take_session("test") is None


def test_a_node_that_takes_part_in_secure_sums_alone_tells_no_true_groups(task, ragged):
    node = Node("a", ragged, policy=Policy(secure_only=True))
    asked = RecordDict({"task": ConfigRecord({"task": plain_task(task), "groups": True})})
    assert '"groups": null' in node.enrol(asked)["site"]["site"]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"secure-only": "maybe"}, "secure-only must be true or false, got 'maybe'"),
        ({"min-members": 1}, "min-members must be a whole number of at least 2, got '1'"),
        ({"min-nodes": "x"}, "min-nodes must be a whole number of at least 2, got 'x'"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(config, said):
    with pytest.raises(ValueError, match=said):
        Policy.of(config)


def test_a_file_of_identities_that_makes_no_sense_is_refused(tmp_path):
    with pytest.raises(ValueError, match="peers must name a file of identities"):
        Policy.of({"peers": str(tmp_path / "none")}).trusted()
    (tmp_path / "peers").write_text("ssh-ed25519 AAAA")
    with pytest.raises(ValueError, match="an identity is 64 hexadecimal digits, got 'ssh-ed25519 AAAA'"):
        Policy.of({"peers": str(tmp_path / "peers")}).trusted()


def test_who_takes_part_is_a_secret_of_the_nodes(grid, task, shared):
    """All clients are asked, and nodes draw who takes part: sums and counts change from session to session."""
    cohort = secure_on(grid, task).sample(0.5)
    assert len(cohort) == 12 and cohort.share == 0.5
    counts = [cohort.combine(STEP, shared, slots=K).members.tolist() for _ in range(8)]
    assert len(set(map(tuple, counts))) > 1 and 0 < np.sum(counts) < 8 * 12


def test_a_node_of_which_nobody_takes_part_sends_zeros_under_masks(grid, task, shared, tmp_path):
    cohort = secure_on(grid, task).sample(1e-12)
    sums = cohort.combine(STEP, shared, slots=K)
    assert sums.members.tolist() == [0, 0, 0] and not sums.weight.any()


# --- hostile answers ----------------------------------------------------------------------------------------------


def payload(change):
    def what(answer):
        content = RecordDict(dict(answer.content))
        put_payload(content, change(get_payload(answer.content)))
        return Message(content, reply_to=answer)

    return what


def raw(**parts):
    def what(answer):
        content = RecordDict(dict(answer.content))
        put_tree(content, "payload", parts)
        return Message(content, reply_to=answer)

    return what


def form(change):
    def what(answer):
        content = RecordDict(dict(answer.content))
        change(content)
        return Message(content, reply_to=answer)

    return what


ANYWHERE = {
    "nothing": lambda answer: Message(RecordDict(), reply_to=answer),
    "no parts": payload(lambda p: {}),
    "short parts": payload(lambda p: {i: part[:-1] for i, part in p.items()}),
    "about others": payload(lambda p: {i + 1: part for i, part in p.items()}),
    "about one too many": payload(lambda p: {**p, 99: next(iter(p.values()))}),
    "other keys": raw(x=torch.zeros(1)),
    "about one twice": raw(about=torch.zeros(2, dtype=torch.long), bytes=torch.zeros(2, 1, dtype=torch.uint8)),
    "about a negative number": raw(about=-torch.ones(1, dtype=torch.long), bytes=torch.zeros(1, 1, dtype=torch.uint8)),
    "floats": raw(about=torch.zeros(1, dtype=torch.long), bytes=torch.zeros(1, 64)),
}
OF_SHEETS = {
    "no form": form(lambda c: c.pop("form")),
    "another form": form(lambda c: put_tree(c, "form", {"update": (), "weight": torch.zeros(0)})),
    "an enormous form": form(
        lambda c: put_tree(
            c,
            "form",
            {
                "update": torch.zeros(0, 2**30, 2**30),
                "weight": torch.zeros(0),
                "slot": torch.zeros(0).long(),
                "note": {},
            },
        )
    ),
}


@pytest.mark.parametrize(
    ("exchange", "what"),
    [pytest.param(e, w, id=f"{e}-{n}") for e in EXCHANGES for n, w in ANYWHERE.items()]
    + [pytest.param("sheets", w, id=f"sheets-{n}") for n, w in OF_SHEETS.items()],
)
def test_a_node_that_sends_nonsense_is_left_out(exchange, what, ragged, task, shared, tmp_path):
    grid = LocalGrid(nodes_of(ragged, tmp_path, nodes=3), Gone(exchange, {70}, what))
    cohort = secure_on(grid, task)
    sums = cohort.combine(STEP, shared, slots=K)
    late = exchange in ("lists", "counts", "sums")
    assert int(sums.members.sum()) == (12 if late else 8) and cohort.engine.inner.faults == {"site-0": 1}
    grid.spoil = None
    plain = in_the_open(cohort).only(range(0 if late else 4, 12)).at(0).combine(STEP, shared, slots=K)
    assert_close(plain.update, sums.update)


class Once:
    """One node's answer to one exchange of the first session is changed; it answers the others as it should."""

    def __init__(self, exchange, what, node=70):
        self.at, self.what, self.node, self.count = EXCHANGES.index(exchange), what, node, 0

    def __call__(self, node, answer):
        self.count += node == self.node
        return self.what(answer) if node == self.node and self.count == self.at + 1 else answer


def garbage(to=lambda i: True):
    """Bytes as many as were asked for, in those parts of a payload that are about some."""
    return payload(lambda p: {i: os.urandom(len(part)) if to(i) else part for i, part in p.items()})


def one_more(p):
    """Shares that differ by very little, and so give a seed, but another one."""
    return {i: (int.from_bytes(part, "big") ^ 1).to_bytes(len(part), "big") for i, part in p.items()}


@pytest.mark.parametrize("half", [0, 32])
def test_a_key_that_nobody_can_use_is_its_senders_fault(half, grid, task, shared):
    grid.spoil = Once("keys", payload(lambda p: {i: key[:half] + bytes(32) + key[half + 32 :] for i, key in p.items()}))
    cohort = secure_on(grid, task)
    assert int(cohort.combine(STEP, shared, slots=K).members.sum()) == 10
    assert cohort.engine.inner.faults == {"site-0": 1}


def test_a_node_that_cannot_open_a_share_takes_no_part(grid, task, shared, caplog):
    """Two nodes cannot open what the first has sealed for them, and four of six suffice."""
    plain = cohort_on(grid, task).only([0, 1, 2, 3, 6, 7, 8, 9]).at(0).combine(STEP, shared, slots=K)
    grid.spoil = Once("shares", garbage(lambda i: i in (2, 5)))
    cohort = secure_on(grid, task)
    sums = cohort.combine(STEP, shared, slots=K)
    assert_close(plain.update, sums.update)
    assert cohort.engine.inner.faults == {"site-2": 1, "site-5": 1}
    assert "node 2 refuses: it cannot open the shares of node 0" in caplog.text


@pytest.mark.parametrize(
    ("exchange", "what", "said"),
    [
        ("shares", garbage(), r"1 of 6 nodes answered exchange 2 .* refuses: it cannot open the shares of node 0"),
        ("counts", garbage(), "the shares of a secret of site 'site-0' do not fit together, so it or one of those"),
        ("sums", garbage(), "the shares of a secret of site 'site-0' do not fit together, so it or one of those"),
        ("sheets", garbage(), "the counts make no sense, so somebody has not kept to the protocol"),
        ("sums", payload(one_more), "the sums make no sense, so somebody has not kept to the protocol"),
    ],
)
def test_one_node_can_stop_a_sum_and_the_run_goes_on_later(exchange, what, said, grid, tmp_path):
    tables = {**TABLES, "algorithm": {"name": "fedavg", "tau": 2}, "run": {"rounds": 1, "secure": SECURE}}
    settings = Settings(nodes=6, out=str(tmp_path / "run"))
    hostile = Once(exchange, what)
    hostile.count = -1  # enrolment
    grid.spoil = hostile
    with pytest.raises(TooFewLeft, match=said):
        serve(grid, settings, tables)
    again = serve(grid, Settings(nodes=6, out=settings.out, resume=True), tables)
    assert len(again.history) == 1 and again.history[0]["members"] == [12]


# --- runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (ct.FedAvg, {"weights": "size", "batch": 4, "fraction": 0.7}),
        (ct.IFCA, {"k": K, "batch": 4, "weights": "size", "shared": ("layers.0.weight",)}),
        (ct.IFCA, {"k": K, "restarts": 2, "average": "gradient", "patience": 1}),
        (ct.FedX, {"k": K, "lr": 0.05, "soft": True}),
    ],
)
def test_a_run_is_that_in_the_open(cls, settings, grid, task, starts):
    algorithm = cls(tau=3, **settings, **({"init": starts} if "k" in settings else {}))
    plain, secure = (
        fit_on(
            lambda key: members_on(grid, task, key),
            algorithm,
            rounds=3,
            evaluations=1,
            secure=secure,
            secured=SecureFlower,
        )
        for secure in (None, ct.SecureSum(min_members=2, hide_sample=False))
    )
    for a, b in zip(plain.models, secure.models, strict=True):
        assert_close(a, b)
    for a, b in zip(plain.history, secure.history, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        if not settings.get("soft"):
            assert a["members"] == b["members"]
    assert secure.score == pytest.approx(plain.score, abs=1e-6)
    assert secure.scores.per_cluster == pytest.approx(plain.scores.per_cluster, abs=1e-6)
    assert set(secure.labels) == {-1} and set(secure.algorithm.labels(secure.state).tolist()) <= {-1, 0}


@pytest.mark.parametrize(
    ("algorithm", "task"),
    [
        (ct.UIFCA(k=3, init="random", restarts=2), ct.Task.density(ct.models.AffineFlow(6))),
        (
            ct.ClusterGAN(k=3, lr=1e-3, steps=1, critic=2, batch=8),
            ct.Task.adversarial(ct.models.GAN((6,), k=3, dz=2, hidden=(8,))),
        ),
    ],
)
def test_points_too(algorithm, task, points, tmp_path):
    grid = LocalGrid(nodes_of(points, tmp_path, nodes=4))

    def fit(name, secure):
        clients = partial(members_on, grid, task, run=name)
        return fit_on(clients, algorithm, rounds=3, evaluations=1, secure=secure, secured=SecureFlower)

    plain, secure = fit("open", None), fit("secure", ct.SecureSum())
    for a, b in zip(plain.models, secure.models, strict=True):
        assert torch.allclose(flat(a, 0), flat(b, 0), rtol=1e-4, atol=1e-5)
    assert secure.score == pytest.approx(plain.score, rel=1e-4) and secure.scores.per_cluster == {}


TABLES = {
    "algorithm": {"name": "ifca", "k": K, "tau": 2, "init": {"name": "random_groups", "rounds": 2}},
    "task": {"kind": "classifier", "model": {"name": "mlp", "sizes": [64, 16, 10]}},
    "run": {"rounds": 3, "evaluations": 2, "secure": SECURE},
}


def test_the_server_app_does_it(grid, tmp_path):
    settings = Settings(nodes=6, out=str(tmp_path / "run"))
    run = serve(grid, settings, TABLES)
    assert run.history[-1]["participants"] == 12 and sum(run.history[-1]["members"]) == 12
    assert run.score == run.history[-1]["accuracy"] and run.ari is None
    assert "secure = { threshold = 0.6, min_members = 2" in (run.path / "config.toml").read_text()
    open_ = {**TABLES, "run": {"rounds": 3, "evaluations": 2}}
    plain = serve(grid, Settings(nodes=6), open_)
    for a, b in zip(plain.models, run.models, strict=True):
        assert_close(a, b)
    assert plain.ari is not None


def test_show_lists_clusters_of_which_only_the_sizes_are_known(grid, tmp_path, monkeypatch):
    out = tmp_path / "run"
    run = serve(grid, Settings(nodes=6, out=str(out)), TABLES)
    monkeypatch.setattr(show, "console", Console(record=True, width=120))
    show.show(out)
    text = show.console.export_text()
    rows = [line.split() for line in text.splitlines()]
    at = rows.index(["cluster", "members", "accuracy"])
    scores = run.scores.per_cluster
    for j, n in enumerate(run.history[-1]["members"]):
        assert rows[at + 1 + j] == [str(j), str(n), *([f"{scores[j]:.4f}"] if j in scores else [])]
    assert ["-1"] not in [row[:1] for row in rows]


def test_a_run_that_has_too_few_left_goes_on_later(grid, tmp_path):
    settings = Settings(nodes=6, out=str(tmp_path / "run"))
    tables = {**TABLES, "algorithm": {"name": "fedavg", "tau": 2}}
    whole = serve(grid, Settings(nodes=6), tables)
    answers = {70: 0, 69: 0, 68: 0}

    def spoil(node, answer):
        answers[node] = answers.get(node, 0) + 1
        return Message(Error(2, "no"), reply_to=answer) if node > 67 and answers[node] > 10 else answer

    grid.spoil = spoil
    with pytest.raises(TooFewLeft):
        serve(grid, settings, tables)
    grid.spoil = None
    again = serve(grid, Settings(nodes=6, out=settings.out, resume=True), tables)
    assert len(again.history) == 3
    for a, b in zip(whole.models, again.models, strict=True):
        assert_close(a, b)


def test_a_run_goes_on_where_a_third_is_gone_after_the_keys_are_exchanged(grid, task):
    """In round 2 two nodes exchange keys and shares and are not heard of again; in round 3 they are back."""
    algorithm, gone, key = ct.FedAvg(tau=2), {69, 66}, Key.of(0)
    answers = dict.fromkeys(gone, 0)

    def spoil(node, answer):
        answers[node] = answers.get(node, 0) + 1
        return None if node in gone and answers[node] == 6 + 3 else answer

    grid.spoil = spoil
    clients = partial(members_on, grid, task, deadline=0.1)
    run = fit_on(clients, algorithm, rounds=3, evaluations=1, secure=ct.SecureSum(threshold=0.6), secured=SecureFlower)
    assert [row["members"] for row in run.history] == [[12]] * 3
    grid.spoil = None
    cohort = cohort_on(grid, task, key.fold(1))
    state = algorithm.start(task, cohort.at(0), key.fold(0))
    for t in range(3):
        some = cohort.without(torch.tensor([2, 3, 8, 9])) if t == 1 else cohort
        state, report = algorithm.round(state, some.at(t))
        assert run.history[t]["loss"] == pytest.approx(float(report.loss.mean()), rel=1e-5)
    assert_close(algorithm.models(state), tree_map(lambda x: x[None], run.models[0]))


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ({"name": "cfl"}, "CFL.step needs every client's own reply"),
        ({"name": "ifca", "k": 3}, "Tournament.train needs every client's own reply"),
        ({"name": "local_only"}, "LocalOnly.step needs every client's own reply"),
    ],
)
def test_methods_that_gather_refuse_before_anything_is_sent(algorithm, said, grid):
    with pytest.raises(ValueError, match=said):
        serve(grid, Settings(nodes=6), {**TABLES, "algorithm": algorithm})
    assert {m.metadata.message_type for m in grid.down} == {"query.enrol"}


def test_the_settings_are_checked(grid, task):
    for secure, said in ((True, r"\[run\] secure must be a table"), ({"members": 4}, r"has no key 'members'")):
        with pytest.raises(ValueError, match=said):
            serve(grid, Settings(nodes=6), {**TABLES, "run": {"rounds": 1, "secure": secure}})
    assert isinstance(secure_on(grid, task, ct.SecureSum()).engine, SecureFlower)


def test_every_client_may_choose_its_own_row_on_any_executor(grid, task, starts, ragged):
    """What a node does by itself is what `OwnChoice` says."""
    sent = Models(tree_map(lambda *xs: torch.stack(xs), *starts), label=torch.arange(K))
    here, there = cohort_on(grid, task), secure_on(grid, task)
    step, choose = Scorer().tally, ct.IFCA(k=K).choose
    own = OwnChoice(choose, "train")
    one, two = (c.on("test").combine(step, sent, slots=K, rows=own) for c in (here, there))
    assert_close(one.update, two.update)
    assert torch.equal(one.weight, two.weight)
