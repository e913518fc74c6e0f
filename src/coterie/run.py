"""`fit`, the front door."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from coterie.algorithms.base import Algorithm
from coterie.cohort import Cohort
from coterie.config import describe
from coterie.executors import find_device, find_executor
from coterie.federation import Federation
from coterie.key import Key
from coterie.loop import CLIENTS, Loop
from coterie.precision import check_precision
from coterie.progress import Progress
from coterie.record import Onlooker, Record
from coterie.result import Run
from coterie.secure import SecureSum
from coterie.settings import check_type, to_plain, validate
from coterie.task import Task


def fit(
    algorithm: Algorithm,
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
    out: str | Path | None = None,
    resume: bool = False,
    callbacks: Sequence[Callable[[dict[str, Any]], None]] = (),
) -> Run:
    """Train.

    Args:
        algorithm: The method and its hyperparameters.
        task: What is learnt; None for methods that know it themselves, such as `KFED`.
        federation: From whom.
        rounds: For how many rounds.
        seed: Every random number follows from it; the same seed gives the same run.
        executor: "vectorised" (many clients at once), "vmap" (the same without fused plans), "sequential" (the
            reference), or "sharded" (each process that torchrun started does a share of the clients; all return the
            same run, and the first one writes it).
        device: "auto" (a GPU if there is one), "cpu" or "cuda".
        precision: Of matrix products: "float32", or on a GPU the faster "tf32", or "bfloat16". Only with float32 do
            executors agree to within rounding.
        evaluations: How often at most all clients are scored on the way, evenly spaced; the last round always is.
        secure: Have updates added up so that the server sees only sums by cluster, and who is in which is not known
            to it. For algorithms that only `combine`; scores are still those of every client. None adds in the open.
        out: The run folder to write; None writes nothing.
        resume: Go on from the newest checkpoint in `out`.
        callbacks: Each is called with every new row of the history, by the process that writes.

    Raises:
        ValueError: The input is bad; says what was given, what is allowed and where.
        Diverged: The loss is no longer finite.
        ConnectionError: Another process of a sharded run is gone, or too many clients of a secure sum.
    """
    _check(algorithm, rounds, seed, evaluations, out, resume)
    task = algorithm.default_task() if task is None else task
    place = find_device(device)
    make = find_executor(executor)
    federation.check(task)
    checked = check_precision(precision, place)
    return fit_on(
        lambda key: make(federation, task, key, place, precision=checked),
        algorithm,
        rounds=rounds,
        seed=seed,
        evaluations=evaluations,
        out=out,
        resume=resume,
        callbacks=callbacks,
        secure=secure,
    )


def fit_on(
    clients: Callable[[Key], Cohort],
    algorithm: Algorithm,
    *,
    rounds: int,
    seed: int = 0,
    evaluations: int = 100,
    out: str | Path | None = None,
    resume: bool = False,
    callbacks: Sequence[Callable[[dict[str, Any]], None]] = (),
    secure: SecureSum | None = None,
) -> Run:
    """Train on clients that are reached in a way of their own, such as those of a Flower federation.

    Args:
        clients: Makes the cohort of all clients, given the key that their random numbers follow from.
        algorithm: The method and its hyperparameters.
        rounds: As for `fit`, like all that follow.
        seed: See there.
        evaluations: See there.
        out: See there.
        resume: See there.
        callbacks: See there.
        secure: See there.
    """
    _check(algorithm, rounds, seed, evaluations, out, resume)
    key = Key.of(seed)
    cohort = clients(key.fold(CLIENTS))
    task = cohort.task
    options: dict[str, Any] = {"rounds": rounds, "seed": seed, "precision": cohort.precision}
    if secure is not None:
        cohort, options["secure"] = _secured(cohort, secure), to_plain(secure)
    config = _config(algorithm, task, cohort.federation, options)
    record = None
    if out:
        record = Record(out, config, resume=resume) if cohort.leads else Onlooker(out)
    listeners = [*callbacks, *_progress(algorithm, rounds, task, cohort.device)] if cohort.leads else []
    every = math.ceil(rounds / evaluations)
    return Loop(algorithm, cohort, key, rounds, every, record, listeners).run(resume)


def _check(
    algorithm: Algorithm, rounds: int, seed: int, evaluations: int, out: str | Path | None, resume: bool
) -> None:
    validate(algorithm)
    for name, value, low in (("rounds", rounds, 1), ("seed", seed, 0), ("evaluations", evaluations, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ValueError(f"fit: {name} must be a whole number of at least {low}, got {value!r}")
    if resume and out is None:
        raise ValueError("fit: resume=True needs out, the folder of the run to go on with")


def _secured(cohort: Cohort, secure: SecureSum) -> Cohort:
    if find_spec("cryptography") is None:
        raise ValueError("fit: secure needs the package cryptography: pip install 'coterie[secure]'")
    check_type("fit: secure", secure, SecureSum)
    validate(secure)
    if cohort.remote:
        from coterie.executors.flower_secure import secured

        return secured(cohort, secure)
    from coterie.secure.cohort import Secure

    return Secure(cohort, secure)


def _config(algorithm: Algorithm, task: Task, federation: Federation, run: dict[str, Any]) -> dict[str, Any]:
    return {
        "algorithm": describe(algorithm),
        "task": task.spec or {"kind": "custom"},
        "data": federation.source or {"name": "custom", "clients": len(federation)},
        "run": run,
    }


def _progress(algorithm: Algorithm, rounds: int, task: Task, device: torch.device) -> list[Progress]:
    if not (sys.stderr.isatty() or "ipykernel" in sys.modules):
        return []
    return [Progress(type(algorithm).__name__, rounds, task.metric, str(device))]
