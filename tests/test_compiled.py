"""Losses and steps of stacked clients by graphs, as engines compute them on a GPU."""

import gc
import itertools
import math
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import coterie as ct
from coterie.core.key import Key
from coterie.core.local import local_update, stacked_by
from coterie.core.precision import arithmetic
from coterie.core.task import Data
from coterie.engines import chunks, compiled, vmap
from coterie.engines.compiled import Products


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({}, 3),
        ({"padding": 1, "bias": False}, 3),
        ({"stride": 2, "padding": (2, 1)}, (5, 3)),
        ({"stride": 3, "dilation": (1, 2)}, (2, 3)),
        ({"padding": 3}, 2),
        ({"dilation": (2, 1), "padding": "same"}, (3, 5)),
        ({"dilation": 2, "padding": "same"}, 2),
        ({"padding": "valid", "stride": (1, 2)}, 2),
        ({"groups": 2}, 3),
        ({"padding": 1, "padding_mode": "circular"}, 3),
    ],
)
@pytest.mark.parametrize("channels", [4, 10])  # few, and more
def test_a_convolution_as_a_product_is_the_same(settings, size, channels):
    g = torch.Generator().manual_seed(0)
    layer = nn.Conv2d(channels, 6, size, **settings).double()
    x = torch.randn(3, channels, 9, 8, generator=g, dtype=torch.double, requires_grad=True)
    plain = layer(x)
    with Products():
        product = layer(x)
    assert product.shape == plain.shape and torch.allclose(product, plain)
    weights, given = torch.randn(plain.shape, generator=g, dtype=torch.double), (x, *layer.parameters())
    theirs, ours = (torch.autograd.grad((y * weights).sum(), given) for y in (plain, product))
    assert all(torch.allclose(a, b) for a, b in zip(ours, theirs, strict=True))


def test_images_are_spared_a_gradient_that_nobody_asks_for():
    x, weight = torch.randn(1, 3, 16, 16), torch.randn(4, 3, 8, 8, requires_grad=True)
    with Products(), torch.profiler.profile(profile_memory=True) as seen:
        torch.conv2d(x, weight, stride=8).sum().backward()
    assert sum(max(0, event.self_cpu_memory_usage) for event in seen.events()) < 4 * 20 * x.numel()


def test_channels_that_do_not_fit_are_refused():
    with Products(), pytest.raises(RuntimeError, match="channels"):
        torch.conv2d(torch.randn(2, 3, 4, 4), torch.randn(2, 5, 1, 1))


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("channels", [4, 10])
def test_a_product_can_be_differentiated_again(channels, stride):
    """As where a loss takes a step of its own: the gradient of the weights depends on the images."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, channels, 5, 5, generator=g, dtype=torch.double, requires_grad=True)
    weight = torch.randn(3, channels, 3, 3, generator=g, dtype=torch.double, requires_grad=True)

    def twice():
        found = torch.conv2d(x, weight, padding=1, stride=stride)
        first = torch.autograd.grad(found.square().sum(), weight, create_graph=True)[0]
        return torch.autograd.grad(first.square().sum(), (x, weight))

    plain = twice()
    with Products():
        product = twice()
    assert all(torch.allclose(a, b) for a, b in zip(product, plain, strict=True))


def test_a_single_image_is_left_to_torch():
    layer, x = nn.Conv2d(2, 3, 3), torch.ones(2, 5, 5)
    plain = layer(x)
    with Products():
        assert torch.equal(layer(x), plain)


@pytest.fixture(params=[1, 2], ids=["grouped", "products"])
def at_once(monkeypatch, request):
    """Graphs on a CPU, from the first round on and not fused, which would take a minute; and whether one convolves."""
    graphs = []
    monkeypatch.setattr(compiled.GRAPHS, "_graphs", OrderedDict())
    monkeypatch.setattr(compiled.GRAPHS, "_found", {})
    monkeypatch.setattr(vmap, "COMPILING", ("cpu",))
    monkeypatch.setattr(chunks, "PATIENCE", -1.0)
    monkeypatch.setattr(chunks, "SMALL", 0)
    monkeypatch.setattr(chunks.Chunks, "_tried", lambda self, ways, chunk: (request.param, "told so"))
    monkeypatch.setattr(compiled, "compiled", lambda graph: graphs.append(_convolves(graph)) or graph)
    return graphs


def _convolves(graph):
    return any("convolution" in str(node.target) for node in graph.graph.nodes)


def images():
    g = torch.Generator().manual_seed(0)
    sizes = (5, 7, 6, 5, 9, 4)
    return ct.Federation.from_clients(
        [(torch.randn(n, 2, 6, 6, generator=g), torch.randint(3, (n,), generator=g)) for n in sizes]
    )


def network(*middle):
    torch.manual_seed(0)
    first, second = nn.Conv2d(2, 10, 3, stride=2, padding=1), nn.Conv2d(10, 4, 3, padding="same")
    return nn.Sequential(first, *middle, nn.ReLU(), second, nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(36, 3))


TASK = ct.Task.classifier(network())
CASES = {
    "plain": (network(), ct.FedAvg(tau=3, batch=2)),
    "restarts, choosing": (network(), ct.IFCA(2, init="random", tau=2, restarts=2)),
    "gradients": (network(), ct.IFCA(2, init="random", average="gradient")),
    "dropout": (network(nn.Dropout(0.3)), ct.FedAvg(epochs=2, batch=4)),
    "BatchNorm": (network(nn.BatchNorm2d(10)), ct.FedAvg(tau=2, batch=4)),
    "Adam": (network(), ct.FedAvg(tau=3, batch=4, optimiser=ct.Adam())),
    "Adam, choosing": (network(), ct.IFCA(2, init="random", tau=4, lr=0.01, optimiser=ct.Adam(keep=True))),
    "AdamW, restarts": (network(), ct.IFCA(2, init="random", tau=3, batch=2, lr=0.01, restarts=2, optimiser="adamw")),
    "prox": (network(), ct.FedAvg(tau=4, batch=2, prox=5.0)),
}


@pytest.mark.parametrize("case", CASES)
def test_graphs_give_what_the_loop_gives(case, at_once, request):
    net, method = CASES[case]
    task, federation = ct.Task.classifier(net), images()
    loop = ct.fit(method, task, federation, rounds=3, seed=0, executor="sequential", device="cpu")
    assert not at_once
    graphs = ct.fit(method, task, federation, rounds=3, seed=0, device="cpu")
    products, choosing = "products" in request.node.name, isinstance(method, ct.IFCA)
    assert set(at_once) == ({True, False} if products and choosing else {not products})  # choosing is dense
    assert graphs.labels.tolist() == loop.labels.tolist()
    for ours, theirs in zip(graphs.models, loop.models, strict=True):
        assert all(torch.allclose(ours[n], theirs[n], atol=1e-5) for n in theirs)


def test_arguments_that_are_one_tensor_at_first_may_be_two_later(at_once):
    """As the model that a client begins with and the one that it has, which a step pulls towards the first."""
    task, g = ct.Task.classifier(network()), torch.Generator().manual_seed(0)
    theta = {n: torch.stack([p, p + 0.1]) for n, p in task.init(Key.of(0)).items()}
    rows = Data(torch.randn(2, 5, 2, 6, 6, generator=g), torch.randint(3, (2, 5), generator=g), torch.ones(2, 5))

    def trained(theta, rows):
        return local_update(task, theta, rows, lr=torch.tensor(0.1), tau=4, prox=5.0).theta

    plain = torch.vmap(trained)(theta, rows)
    with stacked_by(compiled.GRAPHS.way("float32")):
        graph = torch.vmap(trained)(theta, rows)
    assert at_once and all(torch.allclose(graph[n], plain[n], atol=1e-6) for n in plain)


def test_a_step_copies_nobodys_rows_and_is_one_graph_however_many_there_are(monkeypatch, at_once):
    inputs = []
    monkeypatch.setattr(compiled, "compiled", lambda graph: inputs.append(_numbers(graph)) or graph)
    method = ct.IFCA(2, init="random", tau=2, batch=2, restarts=3)
    for clients in ([0, 3], [1, 2]):  # of 5 rows, and of up to 7
        ct.fit(method, TASK, images().select(clients), rounds=1, device="cpu")
    models, row = 2 * 3 * sum(p.numel() for p in TASK.init(Key.of(0)).values()), 2 * 6 * 6 + 2
    step, *choosing = sorted(inputs)
    assert step == models + 2 * 2 * row + 1  # two rows of both clients, their labels and masks, and the step size
    assert choosing == [models + 2 * n * row for n in (4, 6)]  # restarts are judged by the others


def _numbers(graph):
    return sum(n.meta["tensor_meta"].shape.numel() for n in graph.graph.nodes if n.op == "placeholder")


def test_an_optimiser_that_is_no_dataclass_has_graphs_of_its_own(at_once):
    class Scaled(ct.SGD):
        def __init__(self, factor):
            super().__init__()
            object.__setattr__(self, "factor", factor)

        def step(self, theta, gradient, moments, lr):
            factor = self.factor if isinstance(self.factor, float) else self.factor["sum"].sum()
            return super().step(theta, gradient, moments, lr * factor)

    long = torch.full((2000,), 1 / 2000)  # torch prints the ends of it
    other = long.index_fill(0, torch.tensor(1000), 2.0)
    factors = 1.0, 3.0, *({"sum": x} for x in (long, other))
    for method in (ct.FedAvg(tau=2, optimiser=Scaled(factor)) for factor in factors):
        loop, graphs = (
            ct.fit(method, TASK, images(), rounds=1, device="cpu", executor=executor).models[0]
            for executor in ("sequential", "vectorised")
        )
        assert all(torch.allclose(graphs[n], loop[n], atol=1e-5) for n in loop)


def test_of_few_channels_a_convolution_is_a_product_in_every_graph(monkeypatch, at_once, request):
    shapes = []
    monkeypatch.setattr(compiled, "compiled", lambda graph: shapes.append(_weights(graph)) or graph)
    ct.fit(ct.FedAvg(tau=3, batch=2), ct.Task.classifier(network()), images().select([0, 3]), rounds=1, device="cpu")
    assert shapes == ([[]] if "products" in request.node.name else [[(8, 10, 3, 3)]])  # of two clients, grouped


def _weights(graph):
    return [tuple(n.args[1].meta["tensor_meta"].shape) for n in graph.graph.nodes if n.target is CONVOLUTION]


CONVOLUTION = torch.ops.aten.convolution.default


def test_graphs_in_bfloat16_convolve_in_it(monkeypatch, at_once):
    """Also where clients choose. Modes of torch that are on around a graph are off while it is made."""
    kinds = []

    def seen(graph):
        for node in graph.graph.nodes:
            if node.target is CONVOLUTION:
                kinds.extend(x.meta["tensor_meta"].dtype for x in node.args[:3] if x is not None)
        return graph

    monkeypatch.setattr(compiled, "compiled", seen)
    method, task = ct.IFCA(2, init="random", tau=1, batch=2), ct.Task.classifier(network())
    ct.fit(method, task, images().select([0, 3]), rounds=1, device="cpu", precision="bfloat16")
    assert set(kinds) == {torch.bfloat16}


def test_what_cannot_be_compiled_goes_on_without(monkeypatch, caplog):
    def refuse(graph):
        raise RuntimeError("no compiler\nmore")

    monkeypatch.setattr(compiled.GRAPHS, "_found", {})
    monkeypatch.setattr(vmap, "COMPILING", ("cpu",))
    monkeypatch.setattr(chunks, "PATIENCE", -1.0)
    monkeypatch.setattr(chunks, "SMALL", 0)
    monkeypatch.setattr(compiled, "compiled", refuse)
    with caplog.at_level("INFO", "coterie"):
        ct.fit(ct.FedAvg(tau=2, batch=4), ct.Task.classifier(network()), images(), rounds=2, device="cpu")
    told = [r.getMessage() for r in caplog.records if ", compiled:" in r.getMessage()]
    assert told and all("by vmap (" in line and "it cannot be compiled: no compiler" in line for line in told)
    assert not any(compiled.GRAPHS._found.values())  # a later run may have one


def test_the_fastest_way_is_taken_and_all_are_told():
    seconds = {"plain": 3.0, "slow": 4.0, "fast": 2.0}

    class Told(chunks.Chunks):
        def __init__(self):
            pass

        def _seconds(self, work, at):
            return seconds[work(at)]

    def broken(at):
        raise RuntimeError("no room\nfor it")

    graphs = {"slowly": lambda at: "slow", "fast": lambda at: "fast", "never": broken}
    ways = chunks.Ways("work", lambda at: "plain", None, 0, graphs)
    best, why = Told()._tried(ways, torch.arange(4))
    assert best == 2 and why.startswith("fast (3000.0 ms a client by vmap; 4000.0 slowly, 0 s to compile; 2000.0 fast")
    assert why.endswith("never it cannot be compiled: no room)")
    late = {"late": iter(["fast"]).__next__}  # as where a recording finds no room

    def recorded(at):
        return late["late"]()

    assert Told()._tried(ways._replace(compiled={"late": recorded, "fast": graphs["fast"]}), torch.arange(4))[0] == 2
    assert Told()._tried(ways._replace(compiled={"never": broken}), torch.arange(4))[0] == 0


def test_a_graph_is_compiled_only_once_it_may_pay(monkeypatch):
    tried, ticks = [], itertools.count(0, 8.0)  # every look at the clock is 8 seconds after the last
    monkeypatch.setattr(vmap, "COMPILING", ("cpu",))
    monkeypatch.setattr(chunks, "SMALL", 0)
    monkeypatch.setattr(chunks, "LONG", math.inf)
    monkeypatch.setattr(chunks.Chunks, "_tried", lambda self, ways, chunk: (tried.append(1), (0, ""))[1])
    monkeypatch.setattr(chunks, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    task, method = ct.Task.classifier(network()), ct.FedAvg(tau=2, batch=4)
    few = images().select([0, 3])  # of one size
    ct.fit(method, task, few, rounds=8, device="cpu")
    assert not tried  # 64 seconds, but before the last round it was 56
    ct.fit(method, task, few, rounds=10, device="cpu")
    assert len(tried) == 1


def test_what_was_found_of_a_step_need_not_be_found_again(monkeypatch, at_once):
    tried, tries = [], chunks.Chunks._tried
    monkeypatch.setattr(chunks.Chunks, "_tried", lambda *args: (tried.append(1), tries(*args))[1])
    task, few = ct.Task.classifier(network()), images().select([0, 3])  # of one size
    first = ct.fit(ct.FedAvg(tau=2, batch=4), task, few, rounds=2, seed=0, device="cpu")
    assert len(tried) == 1
    monkeypatch.setattr(chunks, "PATIENCE", math.inf)
    made = len(at_once)
    again = ct.fit(ct.FedAvg(tau=2, batch=4), task, few, rounds=2, seed=0, device="cpu")
    assert len(tried) == 1 and torch.equal(again.models[0]["0.weight"], first.models[0]["0.weight"])
    ct.fit(ct.FedAvg(tau=2, batch=2), task, few, rounds=2, seed=0, device="cpu")  # not yet
    ct.fit(ct.FedAvg(tau=2, batch=4), task, few, rounds=2, seed=0, device="cpu", precision="bfloat16")
    ct.fit(ct.FedAvg(tau=2, batch=4), ct.Task.classifier(network()), few, rounds=2, seed=0, device="cpu")
    assert len(tried) == 1 and len(at_once) == made
    monkeypatch.setattr(chunks, "PATIENCE", -1.0)
    ct.fit(ct.FedAvg(tau=2, batch=2), task, few, rounds=2, seed=0, device="cpu")
    assert len(tried) == 2
    del task, first, again
    gc.collect()
    assert not compiled.GRAPHS._found  # of tasks that are gone


@pytest.mark.parametrize(("best", "kept"), [(1, 1), (0, 0)])
def test_a_graph_that_works_is_remembered_although_another_does_not(monkeypatch, at_once, best, kept):
    monkeypatch.setattr(chunks.Chunks, "_tried", lambda *args: (best, f"another: {chunks.FAILED}: no room"))
    task = ct.Task.classifier(network())
    ct.fit(ct.FedAvg(tau=2, batch=4), task, images().select([0, 3]), rounds=2, seed=0, device="cpu")
    assert [len(found) for found in compiled.GRAPHS._found.values()] == [kept]


def test_shapes_that_do_not_recur_are_not_compiled(at_once, monkeypatch):
    monkeypatch.setattr(chunks, "PATIENCE", 60.0)
    g = torch.Generator().manual_seed(0)
    sizes = range(4, 24)
    federation = ct.Federation.from_clients(
        [(torch.randn(n, 2, 6, 6, generator=g), torch.randint(3, (n,), generator=g)) for n in sizes]
    )
    ct.fit(ct.FedAvg(tau=1, batch=4, fraction=0.2), ct.Task.classifier(network()), federation, rounds=5, device="cpu")
    assert not at_once


def test_a_resumed_run_goes_on_where_nothing_can_be_compiled(at_once, monkeypatch, tmp_path):
    task, federation, method = ct.Task.classifier(network()), images(), ct.FedAvg(tau=2, batch=4)
    ct.fit(method, task, federation, rounds=2, device="cpu", out=tmp_path / "run")
    assert at_once

    def refuse(graph):
        raise AssertionError  # without a word

    monkeypatch.setattr(compiled, "compiled", refuse)
    monkeypatch.setattr(compiled.GRAPHS, "_graphs", OrderedDict())
    ct.fit(method, task, federation, rounds=4, device="cpu", out=tmp_path / "run", resume=True)
    told = (tmp_path / "run" / "events.jsonl").read_text()
    assert "compiled: by vmap (AssertionError)" in told


def test_convolutions_in_bfloat16_are_so_as_a_whole():
    """Of stacked clients too, whose convolutions vmap takes apart."""
    x, weight, bias = torch.randn(3, 2, 4, 6, 6), torch.randn(3, 5, 4, 3, 3), torch.randn(3, 5)
    with arithmetic("bfloat16", torch.device("cpu")):
        stacked = torch.vmap(torch.nn.functional.conv2d)(x, weight, bias)
        twice = torch.vmap(lambda x: torch.conv2d(torch.conv2d(x, weight[0], bias[0]), weight[1][:, :1], groups=5))(x)
        with Products():
            product = torch.vmap(torch.conv2d)(x, weight, bias)
        turned = torch.vmap(torch.conv_transpose2d)(x, weight.transpose(1, 2), bias)
        with torch.autocast("cpu", enabled=False):
            whole = torch.conv2d(x[0], weight[0], bias[0])
    assert {y.dtype for y in (stacked, twice, product, turned)} == {torch.bfloat16} and whole.dtype == torch.float32
    one = torch.stack([torch.nn.functional.conv2d(*each) for each in zip(x, weight, bias, strict=True)])
    assert torch.allclose(stacked.float(), one, atol=0.2)


def test_bfloat16_is_batched_and_near_float32(at_once):
    task, federation = ct.Task.classifier(network()), images()
    method = ct.IFCA(2, init="random", tau=2, batch=3, lr=0.01)
    whole = ct.fit(method, task, federation, rounds=2, seed=0, device="cpu")
    short = ct.fit(method, task, federation, rounds=2, seed=0, device="cpu", precision="bfloat16")
    assert short.labels.tolist() == whole.labels.tolist() and at_once
    for ours, theirs in zip(short.models, whole.models, strict=True):
        assert all(torch.allclose(ours[n], theirs[n], atol=2e-3) for n in theirs)


def test_runs_of_one_task_share_their_graphs_and_others_do_not(at_once, monkeypatch):
    task, federation, method = ct.Task.classifier(network()), images(), ct.FedAvg(tau=2, batch=4)
    first = ct.fit(method, task, federation, rounds=2, seed=0, device="cpu")
    made = len(at_once)
    again = ct.fit(method, task, federation, rounds=2, seed=0, device="cpu")
    assert len(at_once) == made and torch.equal(again.models[0]["0.weight"], first.models[0]["0.weight"])
    ct.fit(method, ct.Task.classifier(network()), federation, rounds=2, seed=0, device="cpu")
    assert len(at_once) == 2 * made
    ct.fit(method, task, federation, rounds=2, seed=0, device="cpu", precision="bfloat16")
    assert len(at_once) == 3 * made
    del task, first, again
    gc.collect()
    assert not compiled.GRAPHS._graphs  # of tasks that are gone
    monkeypatch.setattr(compiled, "KEPT", 1)
    task = ct.Task.classifier(network())
    ct.fit(method, task, federation, rounds=2, seed=0, device="cpu")
    assert len(compiled.GRAPHS._graphs) == 1
