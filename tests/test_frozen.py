"""Weight sharing: layers in common, jointly trained, or frozen and passed once by every row."""

import dataclasses
import logging
import re
import shutil
import tomllib

import pytest
import torch
from torch import nn

import coterie as ct
from coterie.core.key import Key
from coterie.core.task import Trunk
from coterie.engines import features
from coterie.runs.config import build_task
from coterie.runs.fit import fit_on
from coterie_lab.bench.workloads import grouped

HEAD = ("head.weight", "head.bias")


def images(clients=6, rows=12, side=8, classes=4):
    """Clients of unequal size, in two groups, with test rows."""
    whole = grouped(clients, rows, side * side, classes, groups=2)
    parts = [whole.train.client(i) for i in range(clients)]
    square = [(x[i % 3 :].reshape(-1, 1, side, side), y[i % 3 :]) for i, (x, y) in enumerate(parts)]
    return ct.Federation.from_clients(
        square, [(x[:5], y[:5]) for x, y in square], ids=[f"c{i}" for i in range(clients)]
    )


def net(classes=4):
    return ct.models.CNN((1, 8, 8), classes, channels=(3, 6), kernel=3, hidden=16)


def frozen_net():
    made = net()
    made.requires_grad_(False).head.requires_grad_(True)
    return made


@pytest.fixture(autouse=True)
def drawn_the_same():
    """Modules are drawn from the global generator."""
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def federation():
    return images()


@pytest.fixture(scope="module")
def pretrained(federation, tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "whole"
    return ct.fit(ct.FedAvg(lr=0.2), ct.Task.classifier(net()), federation, rounds=3, out=path, device="cpu")


def through(task):
    """The same task, whose rows pass through the frozen layers in every step."""
    return dataclasses.replace(task, trunk=lambda x: None)


def fit(method, task, federation, **options):
    return ct.fit(method, task, federation, **{"rounds": 3, "device": "cpu", **options})


def gap(a, b):
    pairs = zip(a.models, b.models, strict=True)
    return max(float((one[n] - other[n]).abs().max()) for one, other in pairs for n in one)


# --- the same result --------------------------------------------------------------------------------------------------

METHODS = {
    "FedAvg": ct.FedAvg(lr=0.3, tau=3),
    "FedAvg, minibatches": ct.FedAvg(lr=0.3, epochs=1, batch=4, fraction=0.5),
    "IFCA": ct.IFCA(k=2, lr=0.3, tau=3, init="random"),
    "IFCA, minibatches": ct.IFCA(k=2, lr=0.3, epochs=1, batch=4, init="random"),
    "IFCA, Adam": ct.IFCA(k=2, lr=0.01, optimiser=ct.Adam(keep=True), init="random_groups"),
    "IFCA, gradients": ct.IFCA(k=2, lr=0.3, average="gradient", init="random"),
    "LocalOnly": ct.LocalOnly(lr=0.3, tau=3),
    "FedEM": ct.FedEM(k=2, lr=0.3, tau=2, init="random"),
    "CFL": ct.CFL(lr=0.3, tau=3),
    "Personal": ct.Personal(ct.FedAvg(lr=0.3, tau=3)),
    "OneShot": ct.OneShot(2, lr=0.3, steps=5),
    "OneShot, angles": ct.OneShot(2, "angles", lr=0.3),
}


@pytest.mark.parametrize("executor", ["sequential", "vmap", "vectorised"])
@pytest.mark.parametrize("name", METHODS)
def test_training_on_features_is_training_through_the_trunk(name, executor, pretrained, federation):
    task = ct.freeze(pretrained, "head")
    assert isinstance(task.trunk(federation.train.x[:2]), Trunk)
    fast, slow = (fit(METHODS[name], t, federation, executor=executor) for t in (task, through(task)))
    assert gap(fast, slow) < 1e-5
    assert (fast.labels == slow.labels).all()
    assert abs(fast.scores.per_client - slow.scores.per_client).max() < 1e-5
    sent = [[row[what] for row in run.history for what in ("bytes_down", "bytes_up")] for run in (fast, slow)]
    assert sent[0] == sent[1]


def test_a_linear_head_is_fused_and_the_log_says_that_rows_pass_once(pretrained, federation, caplog):
    with caplog.at_level(logging.INFO, "coterie"):
        fit(ct.FedAvg(lr=0.3), ct.freeze(pretrained, "head"), federation, rounds=1)
    said = (
        "a row passes through the frozen layers once; the 16 numbers that come out are kept, and head.weight, head.bias"
    )
    assert f"vectorised: {said} trained on them" in caplog.text
    assert "FedAvg.step: fused" in caplog.text


def test_rows_pass_once_per_run_and_only_those_of_clients_that_are_asked(pretrained, federation, monkeypatch):
    passed = []
    original = features.Features.see

    def see(self, name, clients):
        trunk = self.trunk
        counting = dataclasses.replace(trunk, see=lambda x: (passed.append(len(x)), trunk.see(x))[1])
        self.trunk, self._at_once = counting, 100
        original(self, name, clients)
        self.trunk = trunk

    monkeypatch.setattr(features.Features, "see", see)
    task, rows = ct.freeze(pretrained, "head"), len(federation.train.x)
    first = fit(ct.FedAvg(lr=0.3), task, federation, rounds=1, evaluations=1)
    assert sum(passed) == rows + len(federation.test.x)
    again = fit(ct.IFCA(k=2, lr=0.3), task, federation, rounds=4)  # while the first run is there, it shares them
    assert sum(passed) == rows + len(federation.test.x)
    del first, again
    passed.clear()
    one = features.Features(federation, task.trunk(federation.train.x[:2]), torch.device("cpu"), "float32")
    one.see("train", torch.tensor([1, 4]))
    assert sum(passed) == int(federation.train.sizes[[1, 4]].sum())
    x, _ = federation.train.client(4)
    expected = task.trunk(x).see(x)
    own = one.part("train").client(4)[0]
    assert torch.allclose(own, expected, atol=1e-6)


def test_features_that_do_not_fit_in_memory_are_not_kept(pretrained, federation, monkeypatch, caplog):
    monkeypatch.setattr(features, "free_memory", lambda device: 1000)
    task = ct.freeze(pretrained, "head")
    with caplog.at_level(logging.INFO, "coterie"):
        run = fit(ct.FedAvg(lr=0.3), task, federation)
    assert "rows pass through the frozen layers in every step: their features would take" in caplog.text
    assert gap(run, fit(ct.FedAvg(lr=0.3), through(task), federation)) == 0


# --- where the cut is -------------------------------------------------------------------------------------------------


class Two(nn.Module):
    """A frozen layer and a trained one, and some ways to use them that cannot be taken apart."""

    def __init__(self, way=""):
        super().__init__()
        self.way, self.body, self.head = way, nn.Linear(5, 6).requires_grad_(False), nn.Linear(6, 3)

    def forward(self, x):
        seen = self.body(x)
        if self.way == "skip":
            return self.head(seen) + x[:, :1]
        if self.way == "asks" and seen.abs().sum() >= 0:  # which it is
            seen = seen + 1
        if self.way == "dropout":
            seen = nn.functional.dropout(seen, 0.5, self.training)
        if self.way == "in place":
            return self.head(seen.clone()) + seen.mul_(2)[:, :3]
        return nn.functional.log_softmax(self.head(seen.relu()), 1)


class Residual(Two):
    """What is trained is used twice, and frozen layers come after it, too."""

    def __init__(self):
        super().__init__()
        self.after = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x):
        seen = self.body(x.view(x.shape[0], -1)).tanh()
        return self.after(self.head(seen)) + self.head(seen * 2)


def mixed(*middle, frozen=2):
    made = nn.Sequential(nn.Linear(5, 6), *middle, nn.ReLU(), nn.Linear(6, 6), nn.Dropout(0.3), nn.Linear(6, 3))
    made[:frozen].requires_grad_(False)
    return made


def rows(n=6):
    g = torch.Generator().manual_seed(0)
    clients = [(torch.randn(6 + i, 5, generator=g), torch.randint(3, (6 + i,), generator=g)) for i in range(n)]
    return ct.Federation.from_clients(clients)


APART = {
    "a function after the head": Two,
    "a residual head": Residual,
    "dropout in the head": mixed,
    "dropout in front of frozen layers": lambda: mixed(nn.Dropout(0.5), frozen=4),
    "BatchNorm in the head": lambda: mixed(nn.BatchNorm1d(6), frozen=1),
    "BatchNorm that is frozen": lambda: mixed(nn.BatchNorm1d(6), frozen=3),
    "a function that builds it": lambda: mixed,
}


@pytest.mark.parametrize("name", APART)
def test_what_can_be_taken_apart(name):
    task, clients = ct.Task.classifier(APART[name]()), rows()
    trunk = task.trunk(clients.train.x[:2])
    assert isinstance(trunk, Trunk)
    theta = task.init(Key.of(3))
    assert all(torch.equal(p, trunk.head.init(Key.of(3))[n]) for n, p in theta.items())
    method = ct.IFCA(k=2, lr=0.1, tau=3, batch=4, init="random")
    for executor in ("sequential", "vectorised"):
        fast, slow = (fit(method, t, clients, executor=executor) for t in (task, through(task)))
        assert gap(fast, slow) < 1e-5


WHOLE = {
    "skip": r"needs more than one value of what is frozen: x, body",
    "asks": r"its forward cannot be followed \(symbolically traced variables",
    "dropout": r"its forward asks whether it is in training; dropout should be a layer, nn.Dropout",
    "in place": r"it changes the output of a frozen layer in place",
}


@pytest.mark.parametrize("way", WHOLE)
def test_what_cannot_be_taken_apart_is_trained_as_before(way, caplog):
    clients, task = rows(), ct.Task.classifier(Two(way))
    why = task.trunk(clients.train.x[:2])
    assert isinstance(why, str)
    with caplog.at_level(logging.INFO, "coterie"):
        run = fit(ct.FedAvg(lr=0.1), task, clients)
    assert pytest.approx(0) == gap(run, fit(ct.FedAvg(lr=0.1), through(task), clients))
    assert any("rows pass through the frozen layers in every step" in line for line in caplog.messages)
    assert re.search(WHOLE[way], why)


def test_crops_have_other_features_in_every_step(caplog):
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))
    net[0].requires_grad_(False)
    g = torch.Generator().manual_seed(0)
    images = [(torch.randn(6, 1, 6, 6, generator=g), torch.randint(3, (6,), generator=g)) for _ in range(3)]
    task = ct.Task.classifier(net, augment=ct.CropFlip(4))
    with caplog.at_level(logging.INFO, "coterie"):
        ct.fit(ct.FedAvg(batch=3), task, ct.Federation.from_clients(images), rounds=1, device="cpu")
    assert "in every step: rows are cropped at random" in caplog.text


@pytest.mark.parametrize(
    "module", [nn.Linear(5, 3), nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3).requires_grad_(False))]
)
def test_nothing_is_frozen_in_front(module):
    assert ct.Task.classifier(module).trunk(torch.randn(2, 5)) is None


def test_several_inputs_become_features():
    class Texts(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(9, 4).requires_grad_(False), nn.Linear(4, 2)

        def forward(self, ids, mask):
            return {"logits": self.head((self.words(ids) * mask[..., None]).sum(1))}

    g = torch.Generator().manual_seed(0)
    ids = [torch.randint(9, (8, 5), generator=g) for _ in range(4)]
    texts = [{"ids": x, "mask": torch.ones_like(x), "labels": (x.sum(1) > 20).long()} for x in ids]
    federation, task = ct.Federation.from_clients(texts), ct.Task.classifier(Texts())
    assert isinstance(task.taking(federation.inputs).trunk(federation.train.x[:2]), Trunk)
    run = fit(ct.FedAvg(lr=0.3), task, federation)
    params, known = run.models[0], Texts()
    known.load_state_dict(params)
    out = run.predict({"ids": ids[0], "mask": torch.ones_like(ids[0])}, probabilities=True)
    expected = known(ids[0], torch.ones_like(ids[0]))["logits"].softmax(-1)
    assert torch.allclose(torch.from_numpy(out), expected, atol=1e-5)


# --- freeze -----------------------------------------------------------------------------------------------------------


def test_freeze_keeps_the_trunk_and_draws_heads_anew(pretrained, federation):
    task = ct.freeze(pretrained, "head")
    before = pretrained.models[0]
    a, b = (task.init(Key.of(i)) for i in range(2))
    assert tuple(a) == HEAD
    assert not torch.equal(a["head.weight"], b["head.weight"])
    assert not torch.equal(a["head.weight"], before["head.weight"])
    run = fit(ct.IFCA(k=2, lr=0.3, init="random"), task, federation, rounds=1)
    for model in run.models:
        assert all(torch.equal(model[n], before[n]) for n in before if n not in HEAD)
    assert not torch.equal(run.models[0]["head.weight"], run.models[1]["head.weight"])


def test_bytes_of_joint_and_frozen_layers(pretrained, federation):
    """With k = 2: joint training sends one trunk and two heads down, one model up; frozen, heads alone."""
    numbers = {n: p.numel() for n, p in net().named_parameters()}
    head = sum(numbers[n] for n in HEAD)
    trunk = sum(numbers.values()) - head
    shared = tuple(n for n in numbers if n not in HEAD)
    m = len(federation)
    joint = fit(ct.IFCA(k=2, init="random", shared=shared), ct.Task.classifier(net()), federation).history[-1]
    alone = fit(ct.IFCA(k=2, init="random"), ct.freeze(pretrained, "head"), federation).history[-1]
    assert joint["bytes_down"] - alone["bytes_down"] == 4 * m * trunk
    assert joint["bytes_up"] - alone["bytes_up"] == 4 * m * trunk
    assert alone["bytes_down"] // m // 4 in range(2 * head, 2 * head + 4)


def normed():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.5), nn.Linear(12, 4)
    )


@pytest.mark.parametrize("source", [normed(), normed], ids=["a module", "a function"])
def test_frozen_layers_are_as_they_are_scored(source, federation):
    """Their BatchNorm keeps its statistics, and their dropout is off: what is left is a plain linear head."""
    whole = fit(ct.FedAvg(lr=0.1), ct.Task.classifier(source), federation)
    task = ct.freeze(whole, "5")
    assert task.functions.pure.kinds.carried == ()
    x = federation.train.x
    assert isinstance(task.trunk(x[:2]), Trunk)
    assert not task.trunk(x[:2]).head.functions.pure.moves
    run = fit(ct.FedAvg(lr=0.1), task, federation)
    before, after = whole.models[0], run.models[0]
    assert all(torch.equal(before[n], after[n]) for n in before if not n.startswith("5.") and "num_batches" not in n)
    assert float(before["2.running_mean"].abs().max()) > 0
    assert gap(run, fit(ct.FedAvg(lr=0.1), through(task), federation)) < 1e-5


def test_a_run_that_began_as_the_module_gets_new_heads(federation):
    whole = fit(ct.FedAvg(lr=0.1), ct.Task.classifier(net(), init="module"), federation, rounds=1)
    task = ct.freeze(whole, ["hidden", "head"])
    assert not task.same_start
    assert set(task.init(Key.of(0))) == {*HEAD, "hidden.weight", "hidden.bias"}


def test_models_that_share_their_layers_can_be_frozen(federation):
    shared = tuple(n for n, _ in net().named_parameters() if n not in HEAD)
    joint = fit(ct.IFCA(k=2, init="random", shared=shared), ct.Task.classifier(net()), federation)
    task = ct.freeze(joint, "head")
    assert torch.equal(task.functions.pure.fixed["hidden.bias"], joint.models[1]["hidden.bias"])
    with pytest.raises(
        ValueError, match=r"the 2 models of the run differ in 'hidden.weight', which is not in the head"
    ):
        apart = tuple(n for n in shared if not n.startswith("hidden"))
        ct.freeze(fit(ct.IFCA(k=2, init="random", shared=apart), ct.Task.classifier(net()), federation), "head")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.middle(self.first(x)))


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ("haed", r"freeze: the model has no layer 'haed' with parameters; did you mean 'head'\?"),
        ((), r"freeze: head names no layer; those with parameters are convolutions"),
        (None, r"freeze: head must be a word or a list, each entry a word, got None"),
        (["head", 5], r"freeze: head must be a word or a list, each entry a word, got \['head', 5\]"),
        (
            ("convolutions", "hidden", "head"),
            r"freeze: nothing is left to freeze: .*'head' are all layers of the model",
        ),
    ],
)
def test_heads_that_are_refused(head, message, pretrained):
    with pytest.raises(ValueError, match=message):
        ct.freeze(pretrained, head)


def test_other_runs_that_are_refused(federation, pretrained):
    with pytest.raises(ValueError, match=r"freeze: run must be what fit returned, got a Task"):
        ct.freeze(pretrained.task, "head")
    tied = fit(ct.FedAvg(), ct.Task.classifier(Tied()), rows(), rounds=1)
    with pytest.raises(
        ValueError, match=r"freeze: 'last' cannot be drawn anew: it shares a parameter with 'first.weight'"
    ):
        ct.freeze(tied, "last")
    locals_ = fit(ct.FedAvg(), ct.Task.classifier(normed(), batch_norm="local"), federation, rounds=1)
    with pytest.raises(ValueError, match=r"freeze: every client has a '2.\w+' of its own \(batch_norm='local'\)"):
        ct.freeze(locals_, "5")
    with pytest.raises(ValueError, match=r"Task: .* has no parameter that could be trained and sent"):
        ct.Task.classifier(net().requires_grad_(False))
    half = fit(ct.FedAvg(), ct.Task.classifier(Two()), rows(), rounds=1)
    with pytest.raises(
        ValueError, match=r"freeze: nothing is left to train: all parameters of 'body' are frozen already"
    ):
        ct.freeze(half, "body")


# --- after training, folders, configurations --------------------------------------------------------------------------


def test_after_training_users_see_rows(pretrained, federation, tmp_path):
    task = ct.freeze(pretrained, "head")
    method = ct.IFCA(k=2, lr=0.3)
    run = fit(method, task, federation, out=tmp_path / "run")
    x, y = federation.test.client(0)
    with torch.no_grad():
        expected = run.module(client=0)(x).argmax(-1).numpy()
    assert (run.predict(x, client=0) == expected).all()
    assert run.assign(*federation.train.client(0)) == run.labels[0]
    assert abs(run.evaluate(federation=federation).mean - run.score) < 1e-6
    loaded = ct.load(tmp_path / "run")
    assert (loaded.predict(x, client=0) == expected).all()
    assert loaded.assign(x, y) == run.assign(x, y)
    with pytest.raises(
        ValueError, match=r"another model: some of its layers are frozen, other than in this task; ct.fr"
    ):
        ct.load(tmp_path / "run", task=pretrained.task)
    newer = loaded.update(federation, rounds=1)
    assert torch.equal(newer.models[0]["hidden.weight"], pretrained.models[0]["hidden.weight"])


def test_a_run_on_features_is_resumed(pretrained, federation, tmp_path):
    task, method = ct.freeze(pretrained, "head"), ct.IFCA(k=2, lr=0.3)
    straight = fit(method, task, federation, rounds=4)
    fit(method, task, federation, rounds=2, out=tmp_path / "run")
    assert gap(straight, fit(method, task, federation, rounds=4, out=tmp_path / "run", resume=True)) == 0
    retrained = fit(ct.FedAvg(lr=0.1), ct.Task.classifier(net()), federation)
    with pytest.raises(ValueError, match=r"another model: its frozen parameters or constants differ"):
        other = dataclasses.replace(ct.freeze(retrained, "head"), spec=task.spec)
        fit(method, other, federation, rounds=5, out=tmp_path / "run", resume=True)


def test_a_configuration_names_the_run_and_the_head(pretrained, federation, tmp_path):
    path = tmp_path / "whole"
    shutil.copytree(pretrained.path, path)
    table = tomllib.loads(f'from = "{path}"\nhead = "head"')
    task = build_task(table)
    run = fit(ct.FedAvg(lr=0.3), task, federation, out=tmp_path / "run")
    assert gap(run, fit(ct.FedAvg(lr=0.3), ct.freeze(pretrained, "head"), federation)) == 0
    written = tomllib.loads((tmp_path / "run" / "config.toml").read_text())["task"]
    assert build_task(written).spec == task.spec == written
    with pytest.raises(ValueError, match=r"\[task\] kind is that of the run in .*, classifier: leave it out"):
        build_task({**table, "kind": "regressor"})
    with pytest.raises(ValueError, match=r"\[task\] a frozen model needs both"):
        build_task({"head": "head"})
    with pytest.raises(ValueError, match=r"no layer 'haed'.*did you mean 'head'"):
        build_task({**table, "head": "haed"})
    with pytest.raises(ValueError, match=r"is not a run folder|no run|is not there"):
        build_task({**table, "from": str(tmp_path / "nowhere")})
    shutil.rmtree(path)
    assert (ct.load(tmp_path / "run").predict(federation.train.x[:5]) == run.predict(federation.train.x[:5])).all()
    again = fit(ct.FedAvg(lr=0.1), ct.Task.classifier(net()), federation, out=path)
    assert again.path == path
    with pytest.raises(ValueError, match=r"has other values now than those that were frozen"):
        build_task(written)


def test_nodes_of_flower_read_the_run_and_compute_features_once(pretrained, federation, on_flower, monkeypatch):
    """Features are kept from message to message, as long as the node is there."""
    passed = []
    original = features.Features.__init__

    def init(self, clients, trunk, *rest):
        counting = dataclasses.replace(trunk, see=lambda x: (passed.append(len(x)), trunk.see(x))[1])
        original(self, clients, trunk, *rest)
        self.trunk, self._at_once = counting, 100

    monkeypatch.setattr(features.Features, "__init__", init)
    task, method = ct.freeze(pretrained, "head"), ct.IFCA(k=2, lr=0.3, init="random")
    there = fit_on(lambda key: on_flower(federation, task, key), method, rounds=4, evaluations=1)
    assert sum(passed) == len(federation.train.x) + len(federation.test.x)
    assert gap(there, fit(method, through(task), federation, rounds=4, evaluations=1)) < 1e-5


@pytest.mark.parametrize("training", [False, True])
def test_batch_norm_that_is_frozen_by_hand_and_in_evaluation_keeps_its_statistics(training):
    trunk = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten()).requires_grad_(False)
    task = ct.Task.classifier(nn.Sequential(trunk.train(training), nn.Linear(72, 10)), init="module")
    run = ct.fit(ct.FedAvg(tau=2), task, ct.data.digits(4), rounds=1)
    moved = not torch.equal(run.module(0).get_buffer("0.1.running_mean"), trunk[1].running_mean)
    assert moved == training
