"""Benchmark of speed: one round on every executor, against the plain loop and against the arithmetic floor."""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from coterie import FedAvg
from coterie.core.key import Key
from coterie.core.precision import Precision
from coterie.core.pytree import Params, flat, to_device
from coterie.engines import ENGINES, find_device, simulated
from coterie.engines.chunks import compiling_after
from coterie_lab.bench.loop import loop_round
from coterie_lab.bench.peers import PEERS, Job, PeerFailed, Timing, installed, time_peer
from coterie_lab.bench.workloads import Workload, workloads

WARM, ROUNDS = 3, 7  # rounds to warm up, then timed rounds, of which the median is taken
LARGE = {"cpu": 4096, "cuda": 8192}  # side of the matrix product that sets the rate of the floor

log = logging.getLogger("coterie")


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
