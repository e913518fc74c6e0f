"""The rounds of a run: evaluation, checkpoints, clients that come and go, stopping."""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from coterie.core.cohort import Cohort
from coterie.core.engine import Spent
from coterie.core.key import Key
from coterie.core.membership import Membership
from coterie.core.method import Method, Report
from coterie.core.pytree import all_on, to_device
from coterie.runs import sanity
from coterie.runs.evaluate import evaluate
from coterie.runs.folder import Record
from coterie.runs.progress import Progress
from coterie.runs.run import Diverged, Run
from coterie.runs.scores import Scores
from coterie.runs.summary import summary
from coterie.runs.timeline import moved, timeline
from coterie.storage import snapshot

log = logging.getLogger("coterie")

LISTED = 100  # clusters at most whose members and scores are listed in every row of the history

_SINGULAR = "a model has a matrix without an inverse"
START, CLIENTS = 0, 1  # streams under the run's key


class _Now(NamedTuple):
    """Where a run stands. It is replaced as a whole, so that a stop at any moment finds parts that fit together."""

    state: Any
    done: int  # rounds
    memory: dict[int, Any]  # what the clients keep for themselves
    account: dict[str, Any]  # what a private run has released


class Loop:
    """The rounds of one run."""

    def __init__(
        self,
        method: Method,
        membership: Membership,
        key: Key,
        rounds: int,
        every: int,  # rounds between two evaluations
        record: Record | None,
        callbacks: list[Any],
        progress: Progress,
    ) -> None:
        self.method, self.membership, self.key = method, membership, key
        self.rounds, self.every, self.record = rounds, every, record
        self.callbacks, self.progress = callbacks, progress
        self.history: list[dict[str, Any]] = []
        self.now = _Now(None, 0, {}, {})
        self.start_seconds = 0.0
        self.tracked = True  # whether the history names who moved
        self.told: Tensor | None = None  # every client's cluster, as far as the history says
        self.scored: tuple[int, Scores] | None = None  # after how many rounds all clients were last scored, and how

    @property
    def cohort(self) -> Cohort:
        """All clients."""
        return self.membership.everyone

    @property
    def state(self) -> Any:
        """All that has been learnt so far."""
        return self.now.state

    def _publish(self, state: Any, done: int) -> None:
        ledger = self.cohort.ledger
        self.now = _Now(state, done, dict(ledger.memory), dict(ledger.account))

    def run(self, resume: bool) -> Run:
        """Do the rounds, or those after the newest checkpoint; a run that is interrupted leaves one."""
        try:
            if resume:
                self.membership.renew()  # clients may be reached in another way than before
            restored = resume and self._restore()
            with self.progress:  # its line ends before anything else is said
                if not restored:
                    self._start()
                self._rounds()
            return self._finish()
        except (KeyboardInterrupt, ConnectionError):  # the second where another process of the run is gone
            self._checkpoint(force=True)
            self._write_log()  # it may say why
            if self.cohort.engine.leads:
                _say(_interrupted(self.now.done, self.rounds, self.record))
            raise
        except snapshot.Unwritten as error:
            if self.state is None:  # nothing is there yet that could be gone on with
                raise
            stopped = f"the run stopped after round {self.now.done} of {self.rounds}"
            on = "once there is room, go on with --resume (in Python, resume=True) from its last checkpoint"
            raise snapshot.Unwritten(f"{error}; {stopped}: {on}") from error

    def go_on(self, state: Any, history: list[dict[str, Any]]) -> Run:
        """Do the rounds after those of a history, and return the run as it then stands.

        Args:
            state: After the rounds of the history.
            history: Its rounds are not done again, and count.
        """
        self.history = list(history)
        self.tracked = False  # a client's position may be another's in the history
        self._publish(to_device(state, self.cohort.engine.device), len(history))
        with self.progress:
            self._rounds()
        return self._result()

    def _rounds(self) -> None:
        """Do the rounds. A run that is resumed asks its callbacks first: they may have ended it here."""
        for t in range(self.now.done, self.rounds):
            if self._called_off():
                self._say(f"a callback ended the run after round {t} of {self.rounds}")
                break
            if self.method.done(self.state):
                break
            try:
                self._round(t)
            except Spent as why:
                self._say(f"{why}: the run ends after round {t} of {self.rounds}")
                break
        else:
            self._called_off()  # there is nothing to end

    def _say(self, message: str) -> None:
        self.cohort.ledger.messages.append(message)
        self._write_log()

    def _start(self) -> None:
        begin = time.perf_counter()
        first = self.key.fold(START)
        try:
            state = self.membership.perform(lambda cohort: self.method.start(cohort.task, cohort.at(0), first), unit=0)
        except Spent as why:
            raise ValueError(f"{why}: the start alone takes more than the budget") from None
        except torch.linalg.LinAlgError as error:  # pyright: ignore[reportPrivateImportUsage] - torch documents it
            hint = sanity.HELP + sanity.scale_hint(self.cohort.engine)
            raise ValueError(f"the start diverges: {_SINGULAR}; {hint}") from error
        state = to_device(state, self.cohort.engine.device)
        if bad := self._not_finite(state):
            hint = sanity.HELP + sanity.scale_hint(self.cohort.engine)
            raise ValueError(f"the start of cluster {_names(bad)} is not finite; {hint}")
        self.start_seconds = time.perf_counter() - begin  # charged to the first round, as its bytes are
        if self.record:
            self.record.begin()
        self._write_roster(self.membership.roster())
        self._publish(state, 0)

    def _round(self, t: int) -> None:
        begin = time.perf_counter()
        before = self.cohort.ledger.bytes_down, self.cohort.ledger.bytes_up
        self._meet(t)
        try:
            state, report = self.membership.perform(lambda c: self.method.round(self.state, c.at(t)), unit=t + 1)
            self._check_finite(t, state, report)
            seconds = time.perf_counter() - begin
            if t == 0:
                before, seconds = (0, 0), seconds + self.start_seconds
            row = self._row(t, state, report, seconds)
        except torch.linalg.LinAlgError as error:  # pyright: ignore[reportPrivateImportUsage] - torch documents it
            raise self._diverged(t, _SINGULAR) from error
        row["bytes_down"] = self.cohort.ledger.bytes_down - before[0]
        row["bytes_up"] = self.cohort.ledger.bytes_up - before[1]
        if left_out := self.cohort.ledger.left_out:
            row["left_out"] = sorted(set(left_out))
            left_out.clear()
        row = self.cohort.engine.told(row, self.cohort.ledger)
        self._write_log()
        if self.record:
            self.record.event("round", **row)
        self.history.append(row)
        self._publish(state, t + 1)
        self._checkpoint(force=self.cohort.engine.remote)
        self.progress(row)

    def _called_off(self) -> bool:
        """Whether a callback says that the run is to end here."""
        if not self.callbacks or not self.history:
            return False
        row, run = self.history[-1], self._result()
        with self.progress.aside():
            answers = [callback(row, run) for callback in self.callbacks]
        # Not the number of letters that one has written.
        return any(isinstance(answer, bool | np.bool_ | torch.Tensor) and bool(answer) for answer in answers)

    def _meet(self, t: int) -> None:
        """Before a round: reach clients that are back, and let those in that are new."""
        if self.membership.renew(lambda wider, roster: self._admit(wider, roster, t), unit=t):
            self._write_roster(self.membership.roster())

    def _admit(self, wider: Cohort, roster: Any, t: int) -> str:
        """Take the clients in that a wider cohort has at its end; how they were placed."""
        m = len(self.cohort)
        state = self.method.join(self.state, wider.only(torch.arange(m, len(wider))).at(t))
        placed = _placed(self.method.labels(state)[m:].tolist())
        # First: a resumed run may find clients that its checkpoint does not know, but must never miss any.
        self._write_roster(roster)
        self._publish(state, t)
        return placed

    def _write_roster(self, roster: Any) -> None:
        """Have the run folder say who the clients are."""
        if self.record and roster is not None:
            self.record.roster(roster)

    def _scores(self, state: Any, t: int) -> Scores:
        scores, scored = self.membership.perform(lambda c: (evaluate(self.method, state, c.at(t)), c.clients))
        if len(scored) == len(self.cohort):
            return scores
        return scores.among(scored, self.method.labels(state), self.cohort.federation.groups)

    def _row(self, t: int, state: Any, report: Report, seconds: float) -> dict[str, Any]:
        members = [int(n) for n in self.method.members(state)]
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
            "loss_per_cluster": _loss_of_each(report, self.method.labels(state), clusters) if listed else None,
            "per_cluster": each if listed else None,
            "changed": self.method.changed(self.state, state),
            "moved": self._moved(state) if listed and self.tracked else None,
            "groups": sum(n > 0 for n in members),
            "members": members if listed else None,
            "participants": len(report.clients),
            "seconds": seconds,
        }

    def _moved(self, state: Any) -> dict[str, list[int]] | None:
        """Whom the history has not told yet to be where they are now: clients that moved, and that came."""
        now = self.method.labels(state).cpu()
        if self.told is None:  # this is the first round, or the first after a resume
            known = timeline(self.history)
            self.told = torch.from_numpy(known[-1]) if known is not None else torch.empty(0, dtype=torch.long)
        before = torch.full_like(now, -1)
        before[: len(self.told)] = self.told
        self.told = now
        return moved(before, now)

    def _check_finite(self, t: int, state: Any, report: Report) -> None:
        lost = report.clients[~torch.isfinite(report.loss).cpu()]
        bad = {*self.method.labels(state)[lost].unique().tolist(), *self._not_finite(state)} - {-1}
        if not bad and not len(lost):
            return
        # Where points are grouped, those of a client may be of any cluster.
        whose = f"cluster {_names(bad)}" if bad else f"{len(lost)} of {len(report.clients)} clients"
        raise self._diverged(t, f"the loss of {whose} is no longer finite")

    def _diverged(self, t: int, what: str) -> Diverged:
        self._checkpoint(force=True)
        where = f"in {self.record.path}" if self.record else "in the error's .run"
        hint = sanity.HELP + sanity.scale_hint(self.cohort.engine)
        message = f"round {t + 1}: {what}; {hint}. The state after round {t} is kept {where}"
        run = self._result()
        return Diverged(message, run)

    def _not_finite(self, state: Any) -> set[int]:
        """The clusters whose models hold a NaN or an infinity."""
        models = self.method.models(state).values()
        return {j for x in models for j in (~torch.isfinite(x.reshape(len(x), -1)).all(1)).nonzero().flatten().tolist()}

    def _checkpoint(self, *, force: bool = False) -> None:
        if self.record and self.state is not None:
            now, ledger = self.now, self.cohort.ledger
            kept = {**now._asdict(), "chunks": ledger.chunks, "usual": ledger.usual}
            if self.cohort.engine.remote:  # half a round that is done again has other noise there, and costs again
                kept["account"] = ledger.account
            self.record.checkpoint(now.done, kept, force=force)

    def _restore(self) -> bool:
        assert self.record is not None  # fit() has made sure
        content, warnings = self.record.restore(self.method, self.cohort.task)
        for warning in warnings:
            log.warning(warning)
        if content is None:
            self.record.rewind(0)
            return False
        if content["done"] > self.rounds:
            raise ValueError(f"{self.record.path} has {content['done']} rounds already, more than {self.rounds}")
        self.record.begin()  # it may be resumed for more rounds
        self.history = self.record.rewind(content["done"])
        if (m := len(self.method.labels(content["state"]))) != len(self.cohort):
            self.membership.restrict(m)
        self.cohort.ledger.memory = all_on(self.cohort.engine.device, content["memory"])
        self.cohort.ledger.chunks = content["chunks"]
        self.cohort.ledger.usual = content.get("usual", {})  # checkpoints of earlier versions have none
        self.cohort.ledger.account = dict(content.get("account", {}))  # older checkpoints have none
        self._publish(to_device(content["state"], self.cohort.engine.device), content["done"])
        return True

    def _write_log(self) -> None:
        messages = self.cohort.ledger.messages
        while messages:
            log.info(message := messages.pop(0))
            if self.record and self.state is not None:  # else there is no folder yet
                self.record.event("log", message=message)

    def _result(self) -> Run:
        """The run as it stands. Clients are scored when somebody looks."""
        state, done = self.state, self.now.done

        def score() -> Scores:
            if self.scored is None or self.scored[0] != done:
                self.scored = done, self._scores(state, max(0, done - 1))
            return self.scored[1]

        path = self.record and self.record.path
        return Run(self.method, state, self.history[:done], path, self.cohort, score)

    def _doubts(self) -> list[str]:
        """What the method says against the last state; clients that it asks are asked by all processes of a run."""
        t = max(0, self.now.done - 1)
        return self.membership.perform(lambda c: list(self.method.doubts(self.state, c.at(t).uncharged())))

    def _finish(self) -> Run:
        run = self._result()
        scored = run.score  # by all processes of a run together
        losses = [row["loss"] for row in run.history if row["loss"] is not None]
        doubts = self._doubts()
        if self.cohort.engine.leads and not self.method.needs.points:  # their losses may go up: shrinking raises them
            run.warnings.extend(sanity.doubts(losses, scored, self.cohort.engine))
        run.warnings.extend(doubts if self.cohort.engine.leads else [])
        for warning in run.warnings:
            log.warning(warning)
        if self.record:
            self._checkpoint(force=True)
            self.record.finish(run.models, summary(run))
            self.record.event("end", rounds=self.now.done)
        return run


def _loss_of_each(report: Report, labels: Tensor, clusters: int) -> list[float | None] | None:
    """The mean loss of those of each cluster who took part; None where nobody says who is in which.

    Example:
        >>> report = Report(torch.tensor([0, 2]), torch.tensor([1.0, 3.0]))
        >>> _loss_of_each(report, torch.tensor([1, 0, 1]), 2)
        [None, 2.0]
    """
    own = labels.cpu()[report.clients.cpu()]
    if not len(own) or bool((own < 0).any()):
        return None
    count = torch.bincount(own, minlength=clusters)
    total = torch.bincount(own, report.loss.cpu().double(), minlength=clusters)
    return [float(loss / n) if n else None for loss, n in zip(total, count, strict=True)]


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


def _interrupted(done: int, rounds: int, record: Record | None) -> str:
    done_so_far = f"interrupted after round {done} of {rounds}"
    if record is None:
        return f"{done_so_far}; nothing was kept, because fit() was given no out folder"
    return f"{done_so_far}; go on with --resume (in Python, resume=True) and the folder {record.path}"


def _say(message: str) -> None:
    sys.stderr.write(message + "\n")
