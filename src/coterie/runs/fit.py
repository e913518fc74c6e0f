"""`fit`, the front door: train a method on a federation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial, reduce
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from coterie.core.cohort import Cohort
from coterie.core.engine import Engine
from coterie.core.federation import Federation
from coterie.core.key import Key
from coterie.core.membership import Membership
from coterie.core.method import Method
from coterie.core.precision import check_precision
from coterie.core.settings import check_type, to_plain, validate
from coterie.core.task import Task
from coterie.core.uplink import Transform, Uplink
from coterie.engines import find_device, find_engine
from coterie.privacy import Privacy
from coterie.robust.engine import robust_engine
from coterie.robust.rules import Aggregate, Buckets, find_aggregate
from coterie.runs.arguments import check_callbacks, check_federation, check_method, check_task
from coterie.runs.config import describe, describe_aggregate, describe_uplink
from coterie.runs.fingerprint import fingerprint
from coterie.runs.folder import Onlooker, Record, alone_in
from coterie.runs.loop import CLIENTS, Loop
from coterie.runs.progress import Progress
from coterie.runs.run import Run
from coterie.secure import SecureSum

Callback = Callable[[dict[str, Any], Run], Any]


@runtime_checkable
class Tracker(Protocol):
    """A callback that is also told how a run begins and ends, by the process that writes the run folder alone."""

    def begin(self, config: dict[str, Any]) -> None:
        """Called before the first round, or the first after a resume, with what config.toml says."""
        ...

    def end(self, run: Run | None) -> None:
        """Called with the finished run, or with None where it has failed or was interrupted."""
        ...


def fit(
    algorithm: Method,
    task: Task | None,
    federation: Federation,
    *,
    rounds: int,
    seed: int = 0,
    executor: str = "vectorised",
    device: str = "auto",
    precision: str = "float32",
    evaluations: int = 100,
    secure: SecureSum | None = None,
    privacy: Privacy | None = None,
    uplink: Sequence[Transform] = (),
    aggregate: str | Aggregate | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Train a method on a federation, and return what it has learnt.

    Args:
        algorithm: The method and its hyperparameters, such as `IFCA(k=4)`.
        task: What is learnt; None for methods that know it themselves, such as `KFED`.
        federation: The clients and their rows.
        rounds: How many rounds to train.
        seed: Every random number follows from it; the same seed gives the same run.
        executor: "vectorised" (many clients at once, the fastest), "vmap" (the same without fused steps), "sequential"
            (one client after the other, the reference), or "sharded" (each process that torchrun started does a share
            of the clients; all return the same run, and the first one writes it).
        device: "auto" (a GPU if there is one), "cpu" or "cuda".
        precision: Of matrix products: "float32", or on a GPU the faster "tf32", or "bfloat16". Only with float32 do
            executors agree to within rounding.
        evaluations: How often at most all clients are scored on the way, evenly spaced; the last round always is.
        secure: Have updates added up so that the server sees only sums by cluster, and not who is in which. For methods
            that only `combine`; scores are still those of every client. None adds in the open.
        privacy: Have clients' replies bounded and noise added, so that what is learnt is (ε, δ)-differentially private
            for every client; for methods that only `combine`. None adds no noise.
        uplink: What is done to every client's reply before it is added up, in this order, such as `Quantise(bits=8)`.
        aggregate: A robust mean of the models of a cluster's clients, which a few hostile ones cannot move far:
            "median", "geometric_median", "trimmed", "krum", "clipped", "buckets" (the one for a secure sum), or one of
            their classes with settings of your own, such as `Trimmed(share=0.2)`. None takes the mean.
        out: The run folder to write; None writes nothing.
        resume: Go on from the newest checkpoint in `out`.
        overwrite: Replace the run that is in `out`, if there is one.
        callbacks: Functions that are called after every round with its row of the history and the run so far; one that
            returns True ends the run. See `coterie.callbacks`. A run that is resumed calls them with its last round
            first. Where torchrun started several processes, each calls them.

    Raises:
        ValueError: The input is bad; the message says what was given, what is allowed and where.
        Diverged: The loss is no longer finite.
        ConnectionError: Another process of a sharded run is gone, or too many clients of a secure sum.
    """
    _check(algorithm, rounds, seed, evaluations, out, resume, overwrite)
    check_callbacks(callbacks)
    task = algorithm.default_task() if task is None else task
    check_task(task)
    check_federation(federation)
    algorithm.check_task(task)
    place, make = find_device(device), find_engine(executor)
    federation.check(task)
    checked, transforms = check_precision(precision, place), check_uplink(uplink)

    def members(key: Key) -> Membership:
        return Membership(Cohort(make(federation, task, key, place, transforms, checked)))

    return fit_on(
        members,
        algorithm,
        rounds=rounds,
        seed=seed,
        evaluations=evaluations,
        secure=secure,
        privacy=privacy,
        uplink=transforms,
        aggregate=aggregate,
        out=out,
        resume=resume,
        overwrite=overwrite,
        callbacks=callbacks,
    )


def fit_on(
    members: Callable[[Key], Membership],
    algorithm: Method,
    *,
    rounds: int,
    seed: int = 0,
    evaluations: int = 100,
    secure: SecureSum | None = None,
    secured: Callable[[Any, SecureSum], Engine] | None = None,
    privacy: Privacy | None = None,
    uplink: Uplink | None = None,
    aggregate: str | Aggregate | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Train on clients that are reached in a way of their own, such as those of a Flower federation.

    Args:
        members: Given the key that the clients' random numbers follow from, says who takes part.
        algorithm: The method and its hyperparameters.
        rounds: How many rounds to train.
        seed: Every random number follows from it.
        evaluations: How often at most all clients are scored on the way.
        secure: The secure sum by which updates are added up; None adds in the open.
        secured: Puts the engine of a secure sum around the clients' own; None takes the simulator's.
        privacy: Bounds and noise for every client's reply; None adds no noise.
        uplink: What the engine does to every reply, for the run folder.
        aggregate: The robust mean of the models of a cluster's clients; None takes the mean.
        out: The run folder to write; None writes nothing.
        resume: Go on from the newest checkpoint in `out`.
        overwrite: Replace the run that is in `out`, if there is one.
        callbacks: Functions that are called after every round with its row of the history and the run so far; one that
            returns True ends the run. See `coterie.callbacks`. A run that is resumed calls them with its last round
            first. Where torchrun started several processes, each calls them.
    """
    _check(algorithm, rounds, seed, evaluations, out, resume, overwrite)
    check_callbacks(callbacks)
    key = Key.of(seed)
    membership = members(key.fold(CLIENTS))
    engine = membership.engine
    algorithm.check_task(engine.task)
    options: dict[str, Any] = {"rounds": rounds, "seed": seed, "precision": engine.precision}
    if uplink is not None and uplink.transforms:
        options["uplink"] = describe_uplink(uplink)
    wraps: list[Callable[[Any], Engine]] = []
    if secure is not None:
        options["secure"] = to_plain(secure)
        wraps.append(_secured(secure, secured))
    if aggregate is not None:
        rule = _check_aggregate(aggregate, algorithm, secure, privacy)
        options["aggregate"] = describe_aggregate(rule)
        wraps.append(partial(robust_engine, aggregate=rule))
    if privacy is not None:
        options["privacy"] = to_plain(privacy)
        wraps.append(_private(privacy, algorithm, rounds, distributed=secure is not None))
    if wraps:
        membership = membership.wrapped(lambda engine: reduce(lambda inner, wrap: wrap(inner), wraps, engine))
    config = config_of(algorithm, engine.task, engine.federation, options)
    name, metric, device = type(algorithm).__name__, engine.task.metric, str(engine.device)
    progress = Progress(name, rounds, metric, device, hidden=not engine.leads)
    every = math.ceil(rounds / evaluations)
    with alone_in(Path(out), overwrite=overwrite) if out and engine.leads else nullcontext():
        record = None
        if out:
            record = Record(out, config, fingerprint(engine), resume=resume) if engine.leads else Onlooker(out)
        loop = Loop(algorithm, membership, key, rounds, every, record, list(callbacks), progress)
        trackers = [c for c in callbacks if isinstance(c, Tracker)] if engine.leads else []
        return _tracked(loop, resume, trackers, config)


def _tracked(loop: Loop, resume: bool, trackers: list[Tracker], config: dict[str, Any]) -> Run:
    """Do the rounds, and tell trackers before and after, however they end."""
    run = None
    for tracker in trackers:
        tracker.begin(config)
    try:
        run = loop.run(resume)
        return run
    finally:
        for tracker in trackers:
            tracker.end(run)


def check_uplink(uplink: Sequence[Transform]) -> Uplink:
    """The transforms that are given, if they are functions, with their settings checked."""
    for transform in uplink if isinstance(uplink, list | tuple) else [uplink]:
        if not callable(transform) or isinstance(transform, type) or transform is uplink:
            raise ValueError(
                f"fit: uplink must be a list of functions of a reply, such as Quantise(), got {transform!r}"
            )
        if hasattr(transform, "__dataclass_fields__"):
            validate(transform)
    return Uplink(tuple(uplink))


def _check(
    algorithm: Method,
    rounds: int,
    seed: int,
    evaluations: int,
    out: str | Path | None,
    resume: bool,
    overwrite: bool,
) -> None:
    check_method(algorithm)
    validate(algorithm)
    for name, value, low in (("rounds", rounds, 1), ("seed", seed, 0), ("evaluations", evaluations, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ValueError(f"fit: {name} must be a whole number of at least {low}, got {value!r}")
    if resume and overwrite:
        raise ValueError("fit: resume goes on with a run and overwrite replaces it: give one of them")
    if resume and out is None:
        raise ValueError("fit: resume=True needs out, the folder of the run to go on with")


def _check_aggregate(
    given: str | Aggregate, algorithm: Method, secure: SecureSum | None, privacy: Privacy | None
) -> Aggregate:
    """The robust mean that is given, if the method's server takes means of models, and is allowed to see them."""
    rule, needs = find_aggregate(given), algorithm.needs
    if privacy is not None:
        raise ValueError("fit: the noise of privacy is made for sums, of which aggregate takes none: give one of them")
    if secure is not None and not isinstance(rule, Buckets):
        raise ValueError(
            f"fit: aggregate={type(rule).__name__}() needs every client's own reply, and of a secure sum the server "
            "gets nothing but sums; give aggregate=Buckets(), or leave secure out"
        )
    if needs.gather or needs.soft or needs.points:
        raise ValueError(
            f"fit: aggregate takes a mean of the models of a cluster's clients, which {type(algorithm).__name__} "
            "does not; choose IFCA, FedAvg, or FedX(refine='fedavg'), or leave aggregate out"
        )
    return rule


def _secured(secure: SecureSum, around: Callable[[Any, SecureSum], Engine] | None) -> Callable[[Any], Engine]:
    if find_spec("cryptography") is None:
        raise ValueError("fit: secure needs the package cryptography: pip install 'coterie[secure]'")
    check_type("fit: secure", secure, SecureSum)
    validate(secure)
    from coterie.secure.engine import Secure  # which needs that package

    make = around or Secure
    return lambda engine: make(engine, secure)


def _private(privacy: Privacy, algorithm: Method, rounds: int, *, distributed: bool) -> Callable[[Any], Engine]:
    if find_spec("dp_accounting") is None:
        raise ValueError("fit: privacy needs the package dp-accounting: pip install 'coterie[privacy]'")
    check_type("fit: privacy", privacy, Privacy)
    validate(privacy)
    from coterie.privacy.engine import Private, resolved  # which needs that package

    settings = resolved(privacy, rounds, getattr(algorithm, "fraction", 1.0), distributed=distributed)
    return lambda engine: Private(engine, settings, distributed=distributed)


def config_of(algorithm: Method, task: Task, federation: Federation, run: dict[str, Any]) -> dict[str, Any]:
    """What a run folder's config.toml says; `run` is its table of that name."""
    return {
        "algorithm": describe(algorithm),
        "task": task.spec or {"kind": "custom"},
        "data": federation.source or {"name": "custom", "clients": len(federation)},
        "run": run,
    }
