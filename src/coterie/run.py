"""`fit`, the front door: rounds, evaluation, checkpoints, stopping."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from coterie import snapshot
from coterie.algorithms.base import Algorithm, PointAlgorithm, Report
from coterie.cohort import Absent, Cohort
from coterie.config import describe
from coterie.evaluate import Along, PointScores, Scores, evaluate
from coterie.executors import find_device, find_executor
from coterie.federation import Array, Federation
from coterie.key import Key
from coterie.parameter_tree import ParameterTree
from coterie.precision import check_precision
from coterie.progress import Progress
from coterie.record import Onlooker, Record
from coterie.secure import SecureSum
from coterie.settings import check_type, to_plain, validate
from coterie.task import Data, Task
from coterie.tree import Params, take, to_device

LISTED = 100  # clusters at most whose members and scores are listed in every row of the history

START, CLIENTS = 0, 1  # streams under the run's key

log = logging.getLogger("coterie")


class Diverged(ValueError):
    """The loss stopped being a number. `run` holds the last good state."""

    def __init__(self, message: str, run: Run) -> None:
        super().__init__(message)
        self.run = run


@dataclass(frozen=True)
class Run:
    """What `fit` returns.

    Attributes:
        algorithm: The method, with its hyperparameters.
        state: All that it has learnt.
        scores: Every client scored with its model, chosen on its training rows.
        history: One dict per round: loss, score (also per cluster), labels changed, groups, members per cluster, bytes
            down and up, seconds.
        path: The run folder, None if nothing was written.
    """

    algorithm: Algorithm
    state: Any
    scores: Scores
    history: list[dict[str, Any]]
    path: Path | None
    _cohort: Cohort

    @property
    def models(self) -> list[Params]:
        """One state dict per cluster; each loads into the task's module."""
        stacked = self.algorithm.models(self.state)
        return [{n: x.cpu() for n, x in take(stacked, j).items()} for j in range(len(next(iter(stacked.values()))))]

    @property
    def labels(self) -> np.ndarray:
        """The cluster of every client."""
        return self.scores.labels

    @property
    def accuracy(self) -> float:
        """Mean accuracy over clients, each with the model of its cluster."""
        if self.scores.metric != "accuracy":
            raise AttributeError(f"this task has no accuracy; it is scored by {self.scores.metric}: see run.score")
        return self.scores.mean

    @property
    def score(self) -> float:
        """The mean over clients of the task's own score."""
        return self.scores.mean

    @property
    def ari(self) -> float | None:
        """Adjusted Rand index of the labels against the true groups; None where those are not known."""
        return self.scores.clustering.get("ari")

    @property
    def purity(self) -> float | None:
        """The share of clients, or of points, that belong to the commonest group of their cluster; None if unknown."""
        return self.scores.clustering.get("purity")

    def assign(self, x: Array, y: Array | None = None) -> int | np.ndarray:
        """The cluster of a client that was not there; of methods that group points, the cluster of each row of x.

        Nothing is sent anywhere: a client that has the models can do it by itself.
        """
        if y is None and not isinstance(self.algorithm, PointAlgorithm):
            raise ValueError(f"assign: {type(self.algorithm).__name__} places a client by its rows x and targets y")
        return assign(self.algorithm, self.state, self._cohort.task, x, y)

    @property
    def tree(self) -> ParameterTree:
        """The tree of models that the algorithm left behind; `print(run.tree)` draws it."""
        if (tree := self.algorithm.tree(self.state)) is None:
            raise AttributeError(f"{type(self.algorithm).__name__} makes no tree of models")
        return tree

    def draw_tree(self, path: str | Path) -> None:
        """Write a picture of the tree."""
        from coterie import plots

        fig = plots.figure(5.5, 4)
        plots.tree(fig.subplots(), self.tree.outline(), len(self.history))
        plots.save(fig, Path(path))

    def evaluate(self, choose_on: Literal["train", "test"] = "train", along: Along = "leaf") -> Scores:
        """Score every client again.

        Args:
            choose_on: Its cluster is chosen on its "train" or its "test" rows.
            along: With the model of its cluster ("leaf"); where there is a tree also with that at the "root", or with
                the ensemble of the models on the "path".
        """
        return evaluate(self.algorithm, self.state, self._cohort, choose_on, along)


def assign(algorithm: Algorithm, state: Any, task: Task, x: Array, y: Array | None) -> int | np.ndarray:
    """The cluster of one client with these rows, or of each of its points."""
    client = Federation.from_clients([(x, torch.zeros(len(x), dtype=torch.long) if y is None else y)])
    client.check(task)
    device = next(iter(algorithm.models(state).values())).device
    rows = Data(client.train.x, client.train.y, torch.ones(len(client.train.x)))
    rows = Data(*(v.to(device) for v in rows))
    if isinstance(algorithm, PointAlgorithm):
        return algorithm.assign_points(state, task, rows).cpu().numpy()
    return algorithm.assign(state, task, rows)


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
    return _Loop(algorithm, cohort, key, rounds, every, record, listeners).run(resume)


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


class _Now(NamedTuple):
    """Where a run stands. It is replaced as a whole, so that a stop at any moment finds parts that fit together."""

    state: Any
    done: int  # rounds
    memory: dict[int, Any]  # what the clients keep for themselves


class _Loop:
    """The rounds of one run."""

    def __init__(
        self,
        algorithm: Algorithm,
        cohort: Cohort,
        key: Key,
        rounds: int,
        every: int,  # rounds between two evaluations
        record: Record | None,
        callbacks: list[Any],
    ) -> None:
        self.algorithm, self.cohort, self.key = algorithm, cohort, key
        self.rounds, self.every, self.record, self.callbacks = rounds, every, record, callbacks
        self.history: list[dict[str, Any]] = []
        self.now = _Now(None, 0, {})
        self.start_seconds = 0.0
        self.scored: tuple[int, Scores] | None = None  # after how many rounds all clients were last scored, and how

    @property
    def state(self) -> Any:
        return self.now.state

    def _publish(self, state: Any, done: int) -> None:
        self.now = _Now(state, done, dict(self.cohort.ledger.memory))

    def run(self, resume: bool) -> Run:
        try:
            if resume:
                self.cohort = self.cohort.renewed()  # clients may be reached in another way than before
            if not (resume and self._restore()):
                self._start()
            for t in range(self.now.done, self.rounds):
                if self.algorithm.done(self.state):
                    break
                self._round(t)
            return self._finish()
        except (KeyboardInterrupt, ConnectionError):  # the second where another process of the run is gone
            self._checkpoint(force=True)
            self._tell()  # it may say why
            if self.cohort.leads:
                _say(_interrupted(self.now.done, self.rounds, self.record))
            raise

    def _start(self) -> None:
        begin = time.perf_counter()
        first = self.key.fold(START)
        state = self._heard(lambda cohort: self.algorithm.start(cohort.task, cohort.attempt(0).at(0), first))
        if bad := self._not_finite(state):
            raise ValueError(f"the start of cluster {_names(bad)} is not finite; a smaller lr usually helps")
        self.start_seconds = time.perf_counter() - begin  # charged to the first round, as its bytes are
        if self.record:
            self.record.begin()
        self._keep(self.cohort)
        self._publish(state, 0)

    def _round(self, t: int) -> None:
        begin = time.perf_counter()
        before = self.cohort.ledger.bytes_down, self.cohort.ledger.bytes_up
        self._meet(t)
        state, report = self._heard(lambda cohort: self.algorithm.round(self.state, cohort.attempt(t + 1).at(t)))
        self._check_finite(t, state, report)
        seconds = time.perf_counter() - begin
        if t == 0:
            before, seconds = (0, 0), seconds + self.start_seconds
        row = self._row(t, state, report, seconds)
        row["bytes_down"] = self.cohort.ledger.bytes_down - before[0]
        row["bytes_up"] = self.cohort.ledger.bytes_up - before[1]
        if left_out := self.cohort.ledger.left_out:
            row["left_out"] = sorted(set(left_out))
            left_out.clear()
        self._tell()
        if self.record:
            self.record.event("round", **row)
        self.history.append(row)
        self._publish(state, t + 1)
        self._checkpoint(force=self.cohort.remote)
        for callback in self.callbacks:
            callback(row)

    def _meet(self, t: int) -> None:
        """Before a round: reach clients that are back, and let those in that are new."""
        cohort = self.cohort.renewed(lambda wider: self._admit(wider, t))
        if cohort is not self.cohort:
            self._keep(cohort)
        self.cohort = cohort

    def _admit(self, wider: Cohort, t: int) -> str:
        """Take the clients in that a wider cohort has at its end; how they were placed."""
        m = len(self.cohort)
        # What they keep is as if they had kept it in the last round: a new try at this one must not void it.
        new = wider.only(torch.arange(m, len(wider))).attempt(t).at(t)
        state = self.algorithm.join(self.state, new)
        placed = _placed(self.algorithm.labels(state)[m:].tolist())
        self._keep(wider)  # first: a resumed run finds clients that its checkpoint does not know, but never misses any
        self.cohort = wider
        self._publish(state, t)
        return placed

    def _keep(self, cohort: Cohort) -> None:
        """Have the run folder tell who the clients are."""
        if self.record and (told := cohort.listed()) is not None:
            self.record.roster(told)

    def _heard(self, work: Callable[[Cohort], Any]) -> Any:
        """Do a piece of work with all clients; where some were not heard, again from its beginning without them."""
        cohort = self.cohort
        while True:
            try:
                return cohort.do(work)
            except Absent as gone:
                cohort = cohort.without(gone.clients)

    def _scores(self, state: Any, t: int) -> Scores:
        scores, heard = self._heard(lambda c: (evaluate(self.algorithm, state, c.at(t)), c.clients))
        if len(heard) == len(self.cohort):
            return scores
        return scores.among(heard, self.algorithm.labels(state), self.cohort.federation.groups)

    def _row(self, t: int, state: Any, report: Report, seconds: float) -> dict[str, Any]:
        members = [int(n) for n in self.algorithm.members(state)]
        clusters = len(members)
        score, each = None, None
        if (t + 1) % self.every == 0 or t + 1 == self.rounds:
            scores = self._scores(state, t)
            self.scored = t + 1, scores
            score, own = scores.mean, scores.per_cluster
            each = [own.get(j) for j in range(clusters)]
        listed = clusters <= LISTED
        return {
            "round": t + 1,
            "loss": float(report.loss.mean()) if len(report.loss) else None,
            self.cohort.task.metric: score,
            "per_cluster": each if listed else None,
            "changed": self.algorithm.changed(self.state, state),
            "groups": sum(n > 0 for n in members),
            "members": members if listed else None,
            "participants": len(report.clients),
            "seconds": seconds,
        }

    def _check_finite(self, t: int, state: Any, report: Report) -> None:
        lost = report.clients[~torch.isfinite(report.loss).cpu()]
        bad = {*self.algorithm.labels(state)[lost].unique().tolist(), *self._not_finite(state)}
        if not bad:
            return
        self._checkpoint(force=True)
        where = f"in {self.record.path}" if self.record else "in the error's .run"
        raise Diverged(
            f"round {t + 1}: the loss of cluster {_names(bad)} is no longer finite; a smaller lr usually helps. "
            f"The state after round {t} is kept {where}",
            self._result(),
        )

    def _not_finite(self, state: Any) -> set[int]:
        """The clusters whose models hold a NaN or an infinity."""
        models = self.algorithm.models(state).values()
        return {j for x in models for j in (~torch.isfinite(x.flatten(1)).all(1)).nonzero().flatten().tolist()}

    def _checkpoint(self, *, force: bool = False) -> None:
        if self.record and self.state is not None:
            now = self.now
            self.record.checkpoint(now.done, {**now._asdict(), "chunks": self.cohort.ledger.chunks}, force=force)

    def _restore(self) -> bool:
        assert self.record is not None  # fit() has made sure
        types = snapshot.named_tuples(type(self.algorithm))
        content, warnings = self.record.restore(types)
        for warning in warnings:
            log.warning(warning)
        if content is None:
            self.record.rewind(0)
            return False
        if content["done"] > self.rounds:
            raise ValueError(f"{self.record.path} has {content['done']} rounds already, more than {self.rounds}")
        self.record.begin()  # it may be resumed for more rounds
        self.history = self.record.rewind(content["done"])
        if (m := len(self.algorithm.labels(content["state"]))) != len(self.cohort):
            self.cohort = self.cohort.first(m)
        self.cohort.ledger.memory = content["memory"]
        self.cohort.ledger.chunks = content["chunks"]
        self._publish(to_device(content["state"], self.cohort.device), content["done"])
        return True

    def _tell(self) -> None:
        messages = self.cohort.ledger.messages
        while messages:
            log.info(message := messages.pop(0))
            if self.record and self.state is not None:  # else there is no folder yet
                self.record.event("log", message=message)

    def _result(self) -> Run:
        done = self.now.done
        if self.scored is None or self.scored[0] != done:
            self.scored = done, self._scores(self.state, max(0, done - 1))
        return Run(
            self.algorithm,
            self.state,
            self.scored[1],
            self.history[: self.now.done],
            self.record and self.record.path,
            self.cohort,
        )

    def _finish(self) -> Run:
        run = self._result()
        losses = [row["loss"] for row in run.history if row["loss"] is not None] or [0.0]
        first, last = losses[0], losses[-1]
        grouped = isinstance(self.algorithm, PointAlgorithm)  # their losses may well go up: shrinking raises them
        if last > first + 0.02 * abs(first) and not grouped:
            log.warning("the loss went up, from %.4g to %.4g; a smaller lr usually helps", first, last)
        if self.record:
            self._checkpoint(force=True)
            self.record.finish(self.algorithm.models(self.state), _summary(run))
            self.record.event("end", rounds=self.now.done)
        return run


def _config(algorithm: Algorithm, task: Task, federation: Federation, run: dict[str, Any]) -> dict[str, Any]:
    return {
        "algorithm": describe(algorithm),
        "task": task.spec or {"kind": "custom"},
        "data": federation.source or {"name": "custom", "clients": len(federation)},
        "run": run,
    }


def _summary(run: Run) -> dict[str, Any]:
    names = run._cohort.federation.ids
    return {
        "metric": run.scores.metric,
        "score": run.score,
        "clusters": len(run.algorithm.members(run.state)),
        **run.scores.clustering,
        "per_cluster": {str(j): v for j, v in run.scores.per_cluster.items()},
        "per_client": [None if math.isnan(v) else v for v in run.scores.per_client.tolist()],
        "labels": run.labels.tolist(),
        "ids": list(names) if names else None,
        "groups": None if run.scores.groups is None else run.scores.groups.tolist(),
        "table": run.scores.table.tolist() if isinstance(run.scores, PointScores) else None,
        "tree": None if (tree := run.algorithm.tree(run.state)) is None else tree.outline(),
        "seconds": sum(row["seconds"] for row in run.history),
        "bytes_down": sum(row["bytes_down"] for row in run.history),
        "bytes_up": sum(row["bytes_up"] for row in run.history),
        "left_out": dict(Counter(site for row in run.history for site in row.get("left_out", []))),
        "executor": run._cohort.executor,
        "device": _device_name(run._cohort.device),
    }


def _placed(labels: list[int]) -> str:
    """How many clients there are, and in which clusters.

    Example:
        >>> _placed([0, 1, 0, -1])
        '4 clients: 2 in cluster 0, 1 in cluster 1'
    """
    each = [f"{n} in cluster {j}" for j, n in sorted(Counter(j for j in labels if j >= 0).items())]
    return f"{len(labels)} client{'s' if len(labels) > 1 else ''}{': ' if each else ''}{', '.join(each)}"


def _names(clusters: set[int]) -> str:
    return ", ".join(str(j) for j in sorted(clusters)[:5])


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _progress(algorithm: Algorithm, rounds: int, task: Task, device: torch.device) -> list[Progress]:
    if not (sys.stderr.isatty() or "ipykernel" in sys.modules):
        return []
    return [Progress(type(algorithm).__name__, rounds, task.metric, str(device))]


def _interrupted(done: int, rounds: int, record: Record | None) -> str:
    done_so_far = f"\ninterrupted after round {done} of {rounds}"
    if record is None:
        return f"{done_so_far}; nothing was kept, because fit() was given no out folder"
    return f"{done_so_far}; go on with --resume (in Python, resume=True) and the folder {record.path}"


def _say(message: str) -> None:
    sys.stderr.write(message + "\n")
