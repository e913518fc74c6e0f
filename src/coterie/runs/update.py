"""`Run.update`: go on with a run on clients as they are now.

1. Clients are matched by their names; newcomers join, who left is dropped, and memory follows.
2. Every client is placed by its rows of now, on which no model was trained yet. Who is served better by another group
   waits, and is moved once that has been so for several updates.
3. If clients are served by no model, a new one is tried (`runs/new_group.py`).
4. The method's own rounds go on with all but those who wait: their rows are probably another group's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.core.cohort import Cohort
from coterie.core.engine import Ledger
from coterie.core.federation import Federation
from coterie.core.membership import Membership, Result
from coterie.core.method import Groups, Method
from coterie.core.pytree import all_on, to_device
from coterie.robust.engine import Bucketed, Robust
from coterie.runs.arguments import check_federation
from coterie.runs.evaluate import evaluate
from coterie.runs.fingerprint import fingerprint
from coterie.runs.fit import config_of
from coterie.runs.folder import Record, alone_in, read_config
from coterie.runs.load import Absent
from coterie.runs.loop import LISTED, Loop
from coterie.runs.new_group import NewGroup, Standing, joined, new_group
from coterie.runs.progress import Progress
from coterie.runs.run import Move, Run
from coterie.runs.scores import Scores
from coterie.runs.splitting import split
from coterie.runs.summary import summary

log = logging.getLogger("coterie")

SIMULATED = ("sequential", "vmap", "vectorised")


def update(
    run: Run, federation: Federation, rounds: int, patience: int, out: str | Path | None, overwrite: bool
) -> Run:
    """See `Run.update`."""
    _check(run, federation, rounds, patience)
    at = matched(run._cohort.federation, federation)
    with alone_in(Path(out), overwrite=overwrite) if out else nullcontext():
        cohort = _reached(run, federation, at)
        record = Record(out, {}, fingerprint(cohort.engine)) if out else None
        after = _Update(run, cohort, at, rounds, patience).done()
        return after if record is None else _written(record, after)


# --- who is there ---------------------------------------------------------------------------------------------------


def matched(before: Federation, now: Federation) -> Tensor:
    """Where each client of now was before (m,), -1 for one that is new.

    Args:
        before: The clients of the run.
        now: Those of now.

    Raises:
        ValueError: Clients have no names to be matched by, or nobody is left.
    """
    if before.ids is None and now.ids is None and len(before) == len(now):
        return torch.arange(len(now))
    if before.ids is None or now.ids is None:
        which = [what for what, each in (("the run's", before), ("those of now", now)) if each.ids is None]
        raise ValueError(
            f"update: clients are matched by their names, which {' and '.join(which)} do not have "
            f"({len(before)} clients before, {len(now)} now); give them, as by Federation.from_clients(…, ids=…)"
        )
    place = {name: i for i, name in enumerate(before.ids)}
    at = torch.tensor([place.get(name, -1) for name in now.ids])
    if not bool((at >= 0).any()):
        raise ValueError("update: no client of now took part in the run; train a new one by ct.fit")
    return at


def _reached(run: Run, federation: Federation, at: Tensor) -> Cohort:
    """The clients of now, who remember what they did before."""
    engine, memory = run.cohort_of(federation).engine, run._cohort.ledger.memory
    own = {i: memory[old] for i, old in enumerate(at.tolist()) if old in memory}
    return Cohort(engine, Ledger(memory=all_on(engine.device, own))).at(len(run.history))


# --- what is decided ------------------------------------------------------------------------------------------------


class Decision(NamedTuple):
    """Who is where, and who is to be."""

    labels: Tensor  # the cluster of every client (m,)
    moves: list[Move]
    waiting: dict[str, tuple[int, int]]  # by name: the cluster that its rows speak for, and since which update

    def founded(
        self, clients: list[int], cluster: int, before: Tensor, federation: Federation, number: int
    ) -> Decision:
        """With a new cluster of these clients; those of them that were in another `before` (m,), not -1, have moved."""
        labels, names = self.labels.clone(), {i: _name(federation, i) for i in clients}
        labels[clients] = cluster
        stay = [move for move in self.moves if move.client not in names.values()]
        new = [Move(names[i], int(before[i]), cluster, number) for i in clients if before[i] >= 0]
        told = {str(name) for name in names.values()}
        return Decision(labels, stay + new, {who: wish for who, wish in self.waiting.items() if who not in told})

    def pending(self, federation: Federation) -> Tensor:
        """Who waits, as positions."""
        waits = [i for i in range(len(federation)) if str(_name(federation, i)) in self.waiting]
        return torch.tensor(waits, dtype=torch.long)


def decide(
    own: Tensor, best: Tensor, federation: Federation, earlier: dict[str, Any], number: int, patience: int
) -> Decision:
    """Who is moved, and who waits.

    Args:
        own: The clusters that clients have (m,).
        best: Those that their rows of now speak for (m,).
        federation: The clients.
        earlier: Who has been waiting since the update before.
        number: Of this update.
        patience: Updates in a row in which a client's rows must speak for the same cluster.
    """
    labels, moves, waiting = own.clone(), list[Move](), dict[str, tuple[int, int]]()
    for i in (own != best).nonzero().flatten().tolist():
        name, wish = _name(federation, i), int(best[i])
        wished, since = earlier.get(str(name), (wish, number))
        since = since if wished == wish else number
        if number - since + 1 < patience:
            waiting[str(name)] = wish, since
        else:
            labels[i] = wish
            moves.append(Move(name, int(own[i]), wish, since))
    return Decision(labels, moves, waiting)


def _name(federation: Federation, i: int) -> str | int:
    return i if federation.ids is None else federation.ids[i]


# --- the update -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Update:
    """One update of a run."""

    run: Run
    cohort: Cohort  # the clients of now, at the moment of the first round
    at: Tensor  # where each was before (m,), -1 for one that is new
    rounds: int
    patience: int

    @property
    def number(self) -> int:
        """Of the update, from 1."""
        return len(self.run.updates) + 1

    def done(self) -> Run:
        """The run after it."""
        cohort, (method, state) = self.cohort, self._followed()
        own, best = self._placed(method, state)
        before = evaluate(method, state, cohort, labels=own).mean
        earlier = self.run.updates[-1]["waiting"] if self.run.updates else {}
        decision = decide(own, best, cohort.federation, earlier, self.number, self.patience)
        models, fresh = method.models(state), None
        if method.grows():
            fresh = self._new_group(method, state, Standing(decision.labels, best, self.at >= 0))
        if fresh is not None:
            last, known = len(method.members(state)), torch.where(self.at >= 0, own, -1)
            decision = decision.founded(fresh.clients.tolist(), last, known, cohort.federation, self.number)
            models = joined(models, fresh.model)
        found = self._counts(decision, before)
        method, state = method.adopt(state, Groups(models, torch.arange(len(own)), decision.labels), cohort.task)
        return self._trained(method, state, decision, found)

    def _followed(self) -> tuple[Method, Any]:
        """The method and its state about the clients of now, newcomers as `join` places them."""
        old, at, task = self.run.algorithm, self.at, self.cohort.task
        state = to_device(self.run.state, self.cohort.engine.device)
        stayed, new = (at >= 0).nonzero().flatten(), (at < 0).nonzero().flatten()
        method, state = old.adopt(state, Groups(old.models(state), at[stayed], old.labels(state)[at[stayed]]), task)
        if len(new):
            state = method.join(state, self.cohort.only(new))
        order = torch.cat([stayed, new]).argsort()  # `join` has newcomers last
        return method.adopt(state, Groups(method.models(state), order, method.labels(state)[order]), task)

    def _placed(self, method: Method, state: Any) -> tuple[Tensor, Tensor]:
        """The clusters that clients have, and those that their rows of now speak for."""
        own = method.labels(state)
        unknown = Groups(method.models(state), torch.arange(len(own)), torch.full_like(own, -1))
        best = method.place(
            method.adopt(state, unknown, self.cohort.task)[1], self.cohort
        )  # CFL would keep who is known
        return torch.where(own < 0, best, own), best  # who never took part has no group to keep

    def _new_group(self, method: Method, state: Any, standing: Standing) -> NewGroup | None:
        judges = list(self._judges())
        found = new_group(method, state, self.cohort, judges, standing, self.rounds)
        for judge in judges:
            self.cohort.ledger.charge(judge.ledger.bytes_down, judge.ledger.bytes_up)
        return found

    def _judges(self) -> Iterator[Cohort]:
        """The same clients, with rows on which nothing is trained: test rows, or each half of all rows in turn."""
        federation, ledger = self.cohort.federation, self.cohort.ledger
        tested = federation.test is not None and len(federation.test.x) > 0
        seeds = [] if tested else [2 * self.number, 2 * self.number + 1]  # these two take turns
        for part in [split(federation, seed, 0.5, 0, 1).known for seed in seeds] or [federation]:
            engine = self.run.cohort_of(part).engine
            yield Cohort(engine, Ledger(memory=dict(ledger.memory))).at(self.cohort.when[0])

    def _counts(self, decision: Decision, before: float) -> dict[str, Any]:
        """What the history says of an update before it trains."""
        return {
            "number": self.number,
            "clients": len(self.at),
            "joined": int((self.at < 0).sum()),
            "left": len(self.run._cohort.federation) - int((self.at >= 0).sum()),
            "moved": len(decision.moves),
            "pending": len(decision.waiting),
            "moves": [list(move) for move in decision.moves],
            "waiting": {who: list(wish) for who, wish in decision.waiting.items()},
            "bytes_down": self.cohort.ledger.bytes_down,
            "bytes_up": self.cohort.ledger.bytes_up,
            "before": before,
        }

    def _trained(self, method: Method, state: Any, decision: Decision, found: dict[str, Any]) -> Run:
        """The run after the rounds, with the groups that were decided."""
        done = self._rounds(method, state, decision.pending(self.cohort.federation))
        moment, clusters = self.cohort.at(len(done.history) - 1), len(method.members(state))
        warnings = list(method.doubts(done.state, moment.uncharged()))
        if len(method.members(done.state)) == clusters:
            labels = decision.labels  # in a round clients may have chosen others
            groups = Groups(method.models(done.state), torch.arange(len(labels)), labels)
            method, state = method.adopt(done.state, groups, self.cohort.task)
        else:  # CFL has split a cluster, or joined two again
            state, labels = done.state, method.place(done.state, moment)
        scores, members = evaluate(method, state, moment, labels=labels), method.members(state).tolist()
        more = len(members) - len(self.run.algorithm.members(self.run.state))
        empty = [j for j, n in enumerate(members) if n == 0]
        found = {**found, "new_groups": max(0, more), "after": scores.mean, "empty": empty}
        last = {**done.history[-1], **_scored(scores, members), "update": found}
        after = Run(method, state, [*done.history[:-1], last], None, self.cohort, lambda: scores, warnings=warnings)
        for line in [*told(found, after.moved), *warnings]:
            log.info(line)
        return after

    def _rounds(self, method: Method, state: Any, pending: Tensor) -> Run:
        """The method's own rounds, without those who wait; somebody has to train, though."""
        absent = pending if len(pending) < len(self.at) else pending[:0]
        engine, total = self.cohort.engine, len(self.run.history) + self.rounds
        progress = Progress(type(method).__name__, self.rounds, engine.task.metric, str(engine.device))
        membership = _Settled(self.cohort, absent)
        return Loop(method, membership, engine.key, total, total, None, [], progress).go_on(state, self.run.history)


class _Settled(Membership):
    """Everybody is scored, but some train nothing."""

    def __init__(self, everyone: Cohort, absent: Tensor) -> None:
        super().__init__(everyone)
        self.absent = absent

    def perform(self, work: Callable[[Cohort], Result], unit: int | None = None) -> Result:
        """Do a piece of work; that of a round without those who are absent."""
        return work(self.everyone if unit is None else self.everyone.without(self.absent))


# --- what is told and written ---------------------------------------------------------------------------------------


def _scored(scores: Scores, members: list[int]) -> dict[str, Any]:
    """What a row of the history says of scores and members, by the clusters that were decided."""
    listed = len(members) <= LISTED
    return {
        scores.metric: scores.mean,
        "per_cluster": [scores.per_cluster.get(j) for j in range(len(members))] if listed else None,
        "groups": sum(n > 0 for n in members),
        "members": members if listed else None,
    }


def told(found: dict[str, Any], moves: list[Move]) -> Iterator[str]:
    """What an update found, in words.

    Args:
        found: Its record.
        moves: The clients that it moved.
    """
    counts = ", ".join(f"{found[what]} {what}" for what in ("joined", "left", "moved", "pending"))
    scores = f"score {found['before']:.4g} before, {found['after']:.4g} after"
    yield f"update {found['number']}: {found['clients']} clients, {counts}, {found['new_groups']} new groups; {scores}"
    for move in moves:
        since = f"update {move.since}"
        yield f"update {found['number']}: {move.client} moved from cluster {move.before} to {move.after}, since {since}"
    for j in found["empty"]:
        yield f"update {found['number']}: cluster {j} has no clients; its model is kept for those who may come back"


def _written(record: Record, run: Run) -> Run:
    """Write the folder of an updated run, all at once: an update that stops leaves none."""
    engine, ledger, done = run._cohort.engine, run._cohort.ledger, len(run.history)
    options = {"rounds": done, "seed": engine.key.path[0], "precision": engine.precision, "updates": len(run.updates)}
    record.config = config_of(run.algorithm, engine.task, engine.federation, options)
    record.begin()
    for row in run.history:
        record.event("round", **row)
    content = {"state": run.state, "done": done, "memory": ledger.memory, "chunks": ledger.chunks}
    record.checkpoint(done, content, force=True)
    record.finish(run.models, summary(run))
    record.event("end", rounds=done)
    return replace(run, path=record.path)


# --- what is refused ------------------------------------------------------------------------------------------------


def _check(run: Run, federation: Federation, rounds: int, patience: int) -> None:
    for name, value in (("rounds", rounds), ("patience", patience)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"update: {name} must be a whole number of at least 1, got {value!r}")
    check_federation(federation, "update")
    engine = run._cohort.engine
    if engine.name not in SIMULATED:
        raise ValueError(
            f"update: only runs of the executors {', '.join(SIMULATED)} can be updated, not of '{engine.name}'"
        )
    options: dict[str, Any] = {
        "aggregate": isinstance(engine, Robust | Bucketed),
        "privacy": bool(run._cohort.ledger.account),
        "secure": engine.in_the_open() is not engine,
    }
    if uplink := getattr(engine.in_the_open(), "uplink", None):
        options["uplink"] = uplink.transforms
    if isinstance(engine, Absent):
        config = read_config(engine.path)
        options = config["run"]
        if isinstance(config["algorithm"].get("lr_schedule"), str):
            raise ValueError("update: the run's lr_schedule is a function, which its folder does not keep")
    unlike = {
        "uplink": "an uplink",
        "aggregate": "a robust mean",
        "privacy": "a privacy budget",
        "secure": "a secure sum",
    }
    for name, what in unlike.items():
        if options.get(name):
            raise ValueError(f"update: the run had {what}, without which it cannot go on")
    before, now = run._cohort.federation.columns, federation.columns
    if before and now and before != now:
        raise ValueError(f"update: columns must be {', '.join(before)} as in the run, got {', '.join(now)}")
    federation.check(run.task)
