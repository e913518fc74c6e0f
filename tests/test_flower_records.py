"""What is sent: trees of tensors and descriptions of steps, there and back."""

import io
import json
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict

import coterie as ct
from coterie.core.pytree import Outer
from coterie.core.registry import known, owners
from coterie.core.step import client_step, client_steps
from coterie.flower.client_app import make_app
from coterie.flower.engine import TYPE
from coterie.flower.local import LocalGrid
from coterie.flower.records import get_tree, put_tree
from coterie.flower.steps import describe_step, rebuild_step
from coterie.parts.starts import FarthestFirst
from coterie.runs.evaluate import PointScorer, Scorer


class Stranger:
    """A class that is not registered."""

    @client_step
    def step(self, task):
        return None


class Pair(NamedTuple):
    a: torch.Tensor
    b: tuple


TREES = {
    "dict": {"w": torch.randn(3, 2), "b": {"/": torch.zeros(1), "a/b": torch.ones(1)}},
    "tuple": (torch.arange(3), (torch.tensor(True), ())),
    "named": Pair(torch.zeros(2, 0), ({"x": torch.tensor(2.5, dtype=torch.float64)},)),
    "empty": (),
    "nothing": {"exact": (), "more": {}},
    "tensor": torch.tensor(7),
    "types": tuple(
        torch.tensor([0, 1], dtype=t) for t in (torch.bool, torch.uint8, torch.int32, torch.float16, torch.float64)
    ),
    "strided": torch.randn(4, 3).T,
}


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return type(b) is dict and list(a) == list(b) and all(same(a[n], b[n]) for n in a)
    return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))


@pytest.mark.parametrize("name", TREES)
def test_a_tree_comes_back_exactly(name):
    content = RecordDict()
    put_tree(content, "t", TREES[name])
    assert same(get_tree(content, "t", {"Pair": Pair}), TREES[name])


def test_a_product_is_formed_before_it_is_sent():
    content, factors = RecordDict(), Outer(torch.randn(5, 2), torch.randn(5, 3))
    put_tree(content, "t", {"a": factors})
    assert torch.equal(get_tree(content, "t", {})["a"], factors.product())


@pytest.mark.parametrize("tree", [{"a": 3}, {1: torch.zeros(1)}, torch.zeros(2, dtype=torch.bfloat16)])
def test_what_cannot_be_sent_is_refused(tree):
    with pytest.raises(ValueError, match=r"t\["):
        put_tree(RecordDict(), "t", tree)


def header(shape):
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(8)


def hostile():
    array = Array(torch.zeros(2).numpy())
    whole = {"[]": array}
    yield "absent", None, '"tensor"'
    yield "no array", {}, '"tensor"'
    yield "one too many", {**whole, "x": array}, '"tensor"'
    yield "no JSON", whole, "{"
    yield "no tree", whole, "[1]"
    yield "unknown tuple", whole, '{"tuple": ["tensor"], "named": "Popen"}'
    yield "wrong length", {"[0]": array}, '{"tuple": ["tensor"], "named": "Pair"}'
    yield "deep", whole, '{"tuple": [' * 400 + "]}" * 400
    yield "very deep", whole, "[" * 100_000
    yield "lies", {"[]": Array("float32", (9,), "numpy.ndarray", array.data)}, '"tensor"'
    yield "cut", {"[]": Array("float32", (2,), "numpy.ndarray", array.data[:-3])}, '"tensor"'
    yield "noise", {"[]": Array("float32", (2,), "numpy.ndarray", b"\x80\x04K\x01.")}, '"tensor"'
    yield "a zip", {"[]": Array("float32", (2,), "numpy.ndarray", b"PK\x03\x04" + 40 * b"\0")}, '"tensor"'
    yield "huge", {"[]": Array("float32", (2**60,), "numpy.ndarray", header("(1152921504606846976,)"))}, '"tensor"'
    yield "negative", {"[]": Array("float32", (-1, -2), "numpy.ndarray", header("(-1, -2)"))}, '"tensor"'
    yield "objects", {"[]": Array("object", (1,), "numpy.ndarray", b"\x93NUMPY\x01\x00")}, '"tensor"'


def test_bytes_of_another_order_or_type_are_refused():
    """They have the right length, and would be other numbers."""
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    told = Array(x)
    for lie in (np.asfortranarray(x), x.view(np.int32), x.astype(">f4"), x.reshape(3, 2)):
        np.save(file := io.BytesIO(), lie)
        assert len(file.getvalue()) == len(told.data)
        content = RecordDict({"t.tree": ConfigRecord({"tree": '"tensor"'})})
        content["t"] = ArrayRecord({"[]": Array(told.dtype, told.shape, told.stype, file.getvalue())})
        with pytest.raises(ValueError, match=r"the bytes of an array are not those of float32 \(2, 3\)"):
            get_tree(content, "t", {})


@pytest.mark.parametrize(("arrays", "tree"), [pytest.param(a, t, id=n) for n, a, t in hostile()])
def test_what_is_no_tree_is_refused(arrays, tree):
    content = RecordDict({"t.tree": ConfigRecord({"tree": tree})})
    if arrays is not None:
        content["t"] = ArrayRecord(arrays)
    with pytest.raises(ValueError, match="'t' cannot be read"):
        get_tree(content, "t", {"Pair": Pair})


REQUIRED = {  # the settings that have no default
    "method.clustergan": {"k": 2},
    "method.fedem": {"k": 2},
    "method.fedx": {"k": 2},
    "method.ifca": {"k": 2},
    "method.kfed": {"k": 2},
    "method.mixed_regression": {"k": 2},
    "method.personal": {"method": {"name": "method.fedavg"}},
    "method.uifca": {"k": 2},
    "service.bounded": {"owner": {"name": "method.fedavg"}, "name": "step", "clip": 1.0},
    "service.point_scorer": {"algorithm": {"name": "method.kfed", "k": 2}, "groups": 2},
}

STEPS_SENT = [
    ct.IFCA(k=3, shared=("a", "b"), batch=4).step,
    ct.IFCA(k=2, init=FarthestFirst(clients=5)).choose,
    ct.Personal(ct.IFCA(k=2, init=FarthestFirst(clients=5)), steps=(1, 2)).personalise,
    ct.FedX(k=2, lr=None).curvature,
    ct.FedX(k=2, refine="conjugate").product_step,
    ct.MixedRegression(k=2, init=ct.MomentDescent(clients=12, noise=0.1)).step,
    ct.MomentDescent().pool,
    ct.UIFCA(k=2, init=ct.Disturbed(0.3)).begin,
    ct.CFL(schedule=(1, 3)).probe,
    Scorer().score_ensemble,
    PointScorer(ct.KFED(k=3, local=2), 4).score,
]


@pytest.mark.parametrize("step", STEPS_SENT, ids=lambda s: s.__qualname__)
def test_a_step_comes_back(step):
    plain = json.loads(json.dumps(describe_step(step)))
    again = rebuild_step(plain)
    assert again.__name__ == step.__name__
    assert again.__self__ == step.__self__ and type(again.__self__) is type(step.__self__)


def test_models_that_the_user_brought_stay_at_the_server():
    step = ct.UIFCA(k=1, init=[{"w": torch.zeros(2)}]).begin
    assert rebuild_step(describe_step(step)).__self__.init == ()


def test_every_class_that_has_steps_is_known():
    assert set(known("method").values()) <= set(owners().values())
    assert all(client_steps(cls) for cls in known("method").values())
    for name, owner in owners().items():
        for step in client_steps(owner):  # found by its name, whatever the settings
            told = {"owner": name, "settings": json.dumps(REQUIRED.get(name, {})), "step": step}
            assert rebuild_step(told).__func__ is getattr(owner, step), (name, step)


def test_the_client_app_has_no_list_of_steps():
    """Whichever step it is, its message has one of two types; see `coterie.flower.engine.TYPE`."""
    LocalGrid({})  # sets what Flower sets for a run
    seen = []
    app = make_app(lambda kind, content, context: seen.append(kind) or content)
    for kind in ("query.enrol", *TYPE.values()):
        app(Message(RecordDict(), dst_node_id=1, message_type=kind), Context(1, 1, {}, RecordDict(), {}))
    assert seen == ["query.enrol", "train.step", "query.step"]


def test_the_client_app_loads_no_torch():
    code = "import sys, coterie.flower.client_app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_what_clients_could_not_rebuild_is_refused():
    def look(task):
        return None

    with pytest.raises(ValueError, match="'look' of no class cannot be sent"):
        describe_step(look)
    with pytest.raises(ValueError, match="FedAvg: lr cannot be sent to clients: it is of type Tensor"):
        describe_step(ct.FedAvg(lr=torch.tensor(0.1)).step)
    with pytest.raises(ValueError, match=r"'step' of Stranger .* registered with @coterie.register"):
        describe_step(Stranger().step)
    with pytest.raises(ValueError, match=r"'round' of FedAvg .* must be marked with @client_step"):
        describe_step(ct.FedAvg().round)


@pytest.mark.parametrize(
    ("plain", "said"),
    [
        ({"owner": "os", "step": "system"}, "'os' is not known here"),
        ({"owner": "method.fedavg", "step": "__init__"}, "has no client step"),
        ({"owner": "method.fedavg", "step": "round"}, "has no client step"),
        ({"owner": "method.ifca", "step": "step"}, "missing 1 required"),
        ({"owner": "method.ifca", "settings": '{"k": "3"}', "step": "step"}, "k must be a whole number"),
        ({"owner": "method.ifca", "settings": '{"k": 0}', "step": "step"}, "k must be at least 1"),
        ({"owner": "method.ifca", "settings": '{"size": 0}', "step": "step"}, "no setting 'size'"),
        (
            {"owner": "method.ifca", "settings": '{"k": 1, "init": {"name": "x"}}', "step": "step"},
            "'x' is not known here",
        ),
        ({"owner": "method.ifca", "settings": "[]", "step": "step"}, "not known here"),
        ({"owner": "method.ifca", "settings": "{", "step": "step"}, "Expecting"),
    ],
)
def test_a_node_builds_only_what_it_knows(plain, said):
    with pytest.raises(ValueError, match=said):
        rebuild_step(plain)
