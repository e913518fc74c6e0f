"""Benchmark of speed: one round on every executor, against the plain loop and against the arithmetic floor."""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from coterie import IFCA, FedAvg
from coterie.core.federation import Federation
from coterie.core.key import Key
from coterie.core.method import Method
from coterie.core.precision import Precision
from coterie.core.pytree import Params, flat, to_device
from coterie.core.task import Task
from coterie.engines import ENGINES, find_device, simulated
from coterie.engines.chunks import compiling_after
from coterie.models import CNN, MLP, Linear, ResNet
from coterie_lab.bench.loop import loop_round, loss
from coterie_lab.bench.peers import PEERS, Job, PeerFailed, Timing, installed, time_peer

WARM, ROUNDS = 3, 7  # rounds to warm up, then timed rounds, of which the median is taken
LARGE = {"cpu": 4096, "cuda": 8192}  # side of the matrix product that sets the rate of the floor

log = logging.getLogger("coterie")


@dataclass(frozen=True)
class Workload:
    """A round to run: the model, the clients, the method, and the minimum number of operations that it takes."""

    name: str
    module: torch.nn.Module
    federation: Federation
    k: int
    tau: int
    lr: float
    flops: float
    batch: int | None = None
    features: bool = True  # whether rows pass through frozen layers only once
    compiled: bool = False  # whether graphs are compiled before rounds are timed, as they are in a run of minutes

    @property
    def frozen(self) -> bool:
        """Whether some layers are frozen."""
        return not all(p.requires_grad for p in self.module.parameters())

    @cached_property
    def task(self) -> Task:
        """A classifier if the labels are integers, else a regressor; one for all executors, which share its graphs."""
        kind = Task.regressor if self.federation.train.y.is_floating_point() else Task.classifier
        task = kind(self.module)
        return task if self.features else replace(task, trunk=lambda x: None)

    @property
    def algorithm(self) -> Method:
        """IFCA from a random start, or FedAvg for a single model."""
        plain = {"lr": self.lr, "tau": self.tau, "batch": self.batch}
        return IFCA(self.k, init="random", **plain) if self.k > 1 else FedAvg(**plain)


def measure(device: str = "auto", *, quick: bool = False, only: str = "") -> list[dict[str, Any]]:
    """Time every workload on every executor, and return rows as `coterie bench speed --json` prints them.

    Other libraries that are installed are timed on a CPU only.

    Args:
        device: "auto", "cpu" or "cuda".
        quick: Whether to use few clients and smaller networks.
        only: A part of the names of the workloads to time.
    """
    where = find_device(device)
    known = workloads(quick, where)
    if not (chosen := [work for work in known if only in work.name]):
        names = "; ".join(work.name for work in known)
        raise ValueError(f"--only: no workload on {where} has '{only}' in its name; they are: {names}")
    peers = installed() if where.type == "cpu" else []
    rate = product_rate(where)
    rows = []
    for work in chosen:
        floor = work.flops / rate
        ways: dict[str, Callable[[], Timing]] = {"loop": lambda w=work: _loop(w, where)}
        for name in (n for n in ENGINES if n != "sharded"):  # in one process it is the same as the vectorised one
            ways[name] = lambda w=work, n=name: _executor(w, n, where)
        if work.frozen:
            ways["vectorised, no features"] = lambda w=work: _executor(replace(w, features=False), "vectorised", where)
        for precision in get_args(Precision)[1:] if where.type == "cuda" else ():
            ways[f"vectorised, {precision}"] = lambda w=work, p=precision: _executor(w, "vectorised", where, p)
        with compiling_after(0.0 if work.compiled else None):  # 0: before the first round that counts
            found = {name: _watched(work, name, way, where) for name, way in ways.items()}
        found |= _peers(work, peers)
        if where.type == "cpu":
            found |= _in_turn(work, where, found)
        for name, timing in found.items():
            rows.append({
                "workload": work.name,
                "way": name,
                "seconds": timing.seconds,
                "loop_ratio": found["loop"].seconds / timing.seconds,
                "floor_ratio": timing.seconds / floor,
                "peak_mib": timing.peak_mib,
                **_differences(timing, found["sequential"]),
            })  # fmt: skip
        none = {"peak_mib": None, "max_rel_diff": None, "other_labels": None}
        rows.append({"workload": work.name, "way": "floor", "seconds": floor,
                     "loop_ratio": found["loop"].seconds / floor, "floor_ratio": 1.0, **none})  # fmt: skip
    return rows


def _differences(timing: Timing, reference: Timing) -> dict[str, float | int | None]:
    """How far the models are from the reference's, as a share of its largest number, and how many labels differ."""
    own, theirs = flat({n: timing.models[n] for n in reference.models}), flat(reference.models)
    labels = None if timing.labels is None or reference.labels is None else timing.labels != reference.labels
    return {
        "max_rel_diff": float((own - theirs).abs().max() / theirs.abs().max()),
        "other_labels": None if labels is None else int(labels.sum()),
    }


def workloads(quick: bool, device: torch.device) -> list[Workload]:
    """Return the workloads: the IFCA paper's MLP with four clusters, one, and on minibatches, a linear model, CNNs.

    The third CNN is that of the paper's FEMNIST experiment, frozen but for its last layer. On a GPU there are two more,
    a CNN and a ResNet with two clusters; a CPU would need minutes for a round of these.

    On a GPU the first has as many clients as in the paper; the others have fewer, because the loop takes minutes there.

    Args:
        quick: Whether to use few clients and smaller networks.
        device: Where the workloads will run.
    """
    m, one = (16, 16) if quick else (480, 480) if device.type == "cpu" else (4800, 480)
    images = grouped(m, 50, 784, 10, groups=4)
    fewer = images if one == m else grouped(one, 50, 784, 10, groups=4)
    points = linear(50 if quick else 500, 20, 20)
    mlp = MLP(784, 200, 10)
    small, leaf = CNN((1, 28, 28), 10, (8, 16), 5, 32), CNN((1, 28, 28), 10)
    few = grouped(4 if quick else 48, 50, 784, 10, groups=4).map(lambda i, x, y: (x.reshape(-1, 1, 28, 28), y))
    letters = grouped(2 if quick else 12, 100, 784, 62, groups=4).map(lambda i, x, y: (x.reshape(-1, 1, 28, 28), y))
    hidden = 256 if quick else 2048
    femnist = CNN((1, 28, 28), 62, hidden=hidden).requires_grad_(False)
    femnist.head.requires_grad_(True)
    head = 4.0 * 10 * hidden * 62 * 10 * len(letters)  # outputs and gradient of the head, ten rows, ten steps
    line = len(points) * (4.0 * 20 * 20 + 2.0 * 20 * 20)  # residuals, gradient, and all steps in one product
    return [
        Workload(f"IFCA, {m} × 50, 784-200-10, τ=10, k=4", mlp, images, 4, 10, 0.1, gram_flops(m, 4)),
        Workload(f"FedAvg, {one} × 50, 784-200-10, τ=10", mlp, fewer, 1, 10, 0.1, gram_flops(one, 1)),
        Workload(
            f"FedAvg, {one} × 50, 784-200-10, batch 10, τ=10", mlp, fewer, 1, 10, 0.1, gram_flops(one, 1, batch=10), 10
        ),
        Workload(f"FedAvg, {len(points)} × 20, linear, d=20, τ=10", Linear(20, 1), points, 1, 10, 0.02, line),
        Workload(
            f"FedAvg, {len(few)} × 50, small CNN, batch 10, τ=5", small, few, 1, 5, 0.1, sgd_flops(small, few, 5), 10
        ),
        Workload(
            f"FedAvg, {len(few)} × 50, LEAF's CNN, batch 10, τ=5", leaf, few, 1, 5, 0.1, sgd_flops(leaf, few, 5), 10
        ),
        Workload(
            f"FedAvg, {len(letters)} × 100, FEMNIST's CNN, frozen but for its last layer, batch 10, τ=10",
            femnist,
            letters,
            1,
            10,
            0.1,
            head,
            10,
        ),
        *(colour_images(quick) if quick or device.type == "cuda" else ()),
    ]


def colour_images(quick: bool) -> list[Workload]:
    """Return two rounds of IFCA on clients of 500 images of CIFAR-10's size, with a CNN and with a ResNet.

    Args:
        quick: Whether to use few and small clients.
    """
    m, n, batch, tau = (4, 4, 2, 1) if quick else (64, 500, 50, 10)
    images = grouped(m, n, 3 * 32 * 32, 10, groups=2).map(lambda i, x, y: (x.reshape(-1, 3, 32, 32), y))
    modules = {"CNN 32-64": CNN((3, 32, 32), 10), "ResNet of 7 convolutions": ResNet(3, 10)}
    return [
        Workload(
            f"IFCA, {m} × {n}, {name}, batch {batch}, τ={tau}, k=2",
            module,
            images,
            2,
            tau,
            0.01,
            choosing_flops(module, images, 2) + sgd_flops(module, images, tau, batch),
            batch,
            compiled=True,
        )
        for name, module in modules.items()
    ]


def gram_flops(
    m: int, k: int, n: int = 50, d: int = 784, h: int = 200, classes: int = 10, tau: int = 10, batch: int | None = None
) -> float:
    """Return the operations of a round of a two-layer MLP in the cheapest exact form known, `coterie.engines.fused`.

    The Gram matrices are computed once per run and not counted.

    Args:
        m: Number of clients.
        k: Number of clusters.
        n: Number of rows per client.
        d: Number of features.
        h: Number of hidden units.
        classes: Number of classes.
        tau: Number of local steps.
        batch: Number of rows of a step; None for all.
    """
    rows = batch or n
    choose = 2.0 * m * n * d * h * k
    steps = (tau - 1) * 2.0 * m * rows * n * h
    tail = tau * 6.0 * m * rows * h * classes
    total = 2.0 * m * n * h * d
    return choose + steps + tail + total


def sgd_flops(module: torch.nn.Module, federation: Federation, tau: int, batch: int = 10) -> float:
    """Return the operations of τ steps on minibatches for all clients, from torch's count for one step.

    Args:
        module: The model.
        federation: The clients.
        tau: Number of local steps τ.
        batch: Number of rows of a minibatch.
    """
    x, y = federation.train.client(0)
    with FlopCounterMode(display=False) as counter:
        loss(module, x[:batch], y[:batch]).backward()
    module.zero_grad()
    return float(counter.get_total_flops()) * tau * len(federation)


def choosing_flops(module: torch.nn.Module, federation: Federation, k: int) -> float:
    """Return the operations of k models' outputs for all rows, from torch's count for one row.

    Args:
        module: The model.
        federation: The clients.
        k: Number of models.
    """
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(federation.train.x[:1])
    return float(counter.get_total_flops()) * k * len(federation.train.x)


def grouped(m: int, n: int, d: int, classes: int, groups: int) -> Federation:
    """Return clients in well separated groups, so that rounding errors never change the choice of a cluster.

    Args:
        m: Number of clients.
        n: Number of rows per client.
        d: Number of features.
        classes: Number of classes.
        groups: Number of groups.
    """
    g = torch.Generator().manual_seed(0)
    centres = torch.rand(groups, classes, d, generator=g)
    clients = []
    for i in range(m):
        y = torch.randint(classes, (n,), generator=g)
        clients.append((centres[i * groups // m][y] + 0.1 * torch.randn(n, d, generator=g), y))
    return Federation.from_clients(clients)


def linear(m: int, n: int, d: int) -> Federation:
    """Return clients whose rows all follow the same linear regression.

    Args:
        m: Number of clients.
        n: Number of rows per client.
        d: Number of features.
    """
    g = torch.Generator().manual_seed(0)
    theta = torch.randn(d, generator=g)
    rows = [torch.randn(n, d, generator=g) for _ in range(m)]
    return Federation.from_clients([(x, x @ theta) for x in rows])


def product_rate(device: torch.device) -> float:
    """Return the operations per second of a large matrix product, the best of six.

    Args:
        device: Where to measure.
    """
    side = LARGE[device.type]
    a = torch.randn(side, side, device=device)
    return 2 * side**3 / min(_timed(lambda: a @ a, device) for _ in range(6))


def _watched(work: Workload, name: str, way: Callable[[], Timing], device: torch.device) -> Timing:
    """Measure a way, and its peak of memory too."""
    _reset_peak(device)
    timing = way()
    log.info("%s: %s %.4f s a round", work.name, name, timing.seconds)
    return timing._replace(peak_mib=peak_mib(device))


def _executor(work: Workload, name: str, device: torch.device, precision: Precision = "float32") -> Timing:
    """Measure an executor."""
    run, states = _round(work, name, device, precision), deque(maxlen=1)
    warm, rounds = (WARM, ROUNDS) if name != "sequential" else (int(device.type == "cpu"), 1)  # it takes long
    times = [_timed(lambda: states.append(run()), device) for _ in range(warm + rounds)]
    method, state = work.algorithm, states[-1]
    return Timing(statistics.median(times[warm:]), method.models(state), None, method.labels(state))


def _loop(work: Workload, device: torch.device) -> Timing:
    run, found = _loop_round(work, device), []
    seconds = [
        _timed(lambda: found.append(run()), device)
        for _ in range(3 if device.type == "cpu" else 1)  # it takes most of a minute on a GPU
    ]
    return Timing(statistics.median(seconds[1:] or seconds), found[-1], None)


def _in_turn(work: Workload, device: torch.device, found: dict[str, Timing]) -> dict[str, Timing]:
    """The loop and the executors for many clients, timed once more, by a round of each in turn.

    Whatever else a machine does slows all of them down then; of rounds that lie minutes apart it may slow one.
    """
    ways = {"loop": _loop_round(work, device)}
    ways |= {name: _round(work, name, device, "float32") for name in ("vmap", "vectorised")}
    if work.frozen:
        ways["vectorised, no features"] = _round(replace(work, features=False), "vectorised", device, "float32")
    rounds = [[_timed(run, device) for run in ways.values()] for _ in range(WARM + ROUNDS)]
    seconds = map(statistics.median, zip(*rounds[WARM:], strict=True))
    return {name: found[name]._replace(seconds=each) for name, each in zip(ways, seconds, strict=True)}


def _round(work: Workload, name: str, device: torch.device, precision: Precision) -> Callable[[], Any]:
    """A round on an executor, always from the same models, which returns the state after it."""
    cohort = simulated(work.federation, work.task, Key.of(0), executor=name, device=device, precision=precision)
    start = to_device(work.algorithm.start(work.task, cohort.at(0), Key.of(0)), device)
    return lambda: work.algorithm.round(start, cohort.at(0))[0]


def _loop_round(work: Workload, device: torch.device) -> Callable[[], Params]:
    """The same round in the plain loop, which returns the models after it."""
    start = _start(work, device)
    clients = [tuple(a.to(device) for a in work.federation.train.client(i)) for i in range(len(work.federation))]
    batches = None if work.batch is None else _batches(work, device)
    return lambda: loop_round(work.module, start, clients, work.lr, work.tau, batches)


def _batches(work: Workload, device: torch.device) -> list[Tensor]:
    """Return the minibatches that the executors draw for every client's steps."""
    cohort = simulated(work.federation, work.task, Key.of(0)).at(0)
    draw = FedAvg(tau=work.tau, batch=work.batch).step(work.task).draw
    sizes, key = cohort.sizes.tolist(), cohort.engine.client_key
    return [draw(n, key(i), cohort.when)["batches"].to(device) for i, n in enumerate(sizes)]


def _peers(work: Workload, names: list[str]) -> dict[str, Timing]:
    """Time the libraries that support the workload; log a warning for each that fails."""
    job = Job(work.federation.train, _start(work, torch.device("cpu")), work.task.spec["model"], work.lr, work.tau)
    found = {}
    for name in names:
        if work.batch or (work.k > 1 and not PEERS[name].clusters):  # they would draw different minibatches
            continue
        try:
            found[name] = time_peer(name, job)
        except PeerFailed as failure:
            log.warning("%s: %s failed: %s", work.name, name, failure)
    return found


def _start(work: Workload, device: torch.device) -> Params:
    """Return the models that every executor and library starts from."""
    cohort = simulated(work.federation, work.task, Key.of(0), executor="sequential", device=device)
    return to_device(work.algorithm.models(work.algorithm.start(work.task, cohort.at(0), Key.of(0))), device)


def _timed(run: Callable[[], Any], device: torch.device) -> float:
    begin = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - begin


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _reset_peak(device: torch.device) -> None:
    """Reset the measurement of peak memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif (file := Path("/proc/self/clear_refs")).exists():
        file.write_text("5")  # Linux then resets the peak resident size


def peak_mib(device: torch.device) -> float | None:
    """Return the peak memory in MiB: allocated on a GPU, or resident in total; None if the system does not report it.

    Args:
        device: Where to measure.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:")), None)
