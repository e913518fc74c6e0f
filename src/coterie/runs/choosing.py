"""`compare` and `choose_k`: candidates on the same splits, to find how much to share, and with how many."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from coterie.core.bars import counting, quietly
from coterie.core.federation import Federation
from coterie.core.key import Key
from coterie.core.method import Method
from coterie.core.settings import validate
from coterie.core.task import Task
from coterie.engines import find_device, find_engine
from coterie.methods.local_only import LocalOnly
from coterie.methods.personal import Personal
from coterie.runs.arguments import check_federation, check_method, check_task
from coterie.runs.candidates import candidates as default_candidates
from coterie.runs.comparison import Cell, ChosenK, Comparison, number_of_groups
from coterie.runs.fingerprint import fingerprint
from coterie.runs.fit import fit
from coterie.runs.run import Run
from coterie.runs.scores import Scores
from coterie.runs.side_by_side import can_copy, most_jobs, side_by_side
from coterie.runs.splitting import Split, split
from coterie.storage.reading import read_json
from coterie.storage.snapshot import write_text

CELLS = "cells"


class _Settings(NamedTuple):
    """What all cells of a comparison have in common."""

    rounds: int
    holdout: float
    new: float
    few: int
    device: str


def compare(
    candidates: Mapping[str, Method] | None,
    task: Task,
    federation: Federation,
    *,
    rounds: int = 100,
    seeds: int = 4,
    seed: int = 0,
    holdout: float = 0.25,
    new: float = 0.2,
    few: int = 5,
    device: str = "auto",
    jobs: int | None = None,
    out: str | Path | None = None,
) -> Comparison:
    """Train candidates on the same splits, score them on rows that none has seen, and recommend one.

    In every split a share of the clients is held out as a whole, and of the others a share of the rows. A client that
    was held out is placed by a few of its rows, or makes its own model from them, and the rest of its rows score it. If
    the federation has test rows, those are the held-out rows of known clients.

    Args:
        candidates: Methods by name; None takes those of `candidates(task, federation)`.
        task: What is learnt.
        federation: The clients and their rows.
        rounds: How many rounds to train; a method that has arrived before stops.
        seeds: How many splits. Each is also the seed of its runs.
        seed: The first of them.
        holdout: The share of a known client's rows that is held out.
        new: The share of the clients that is held out as a whole; 0 for none. It is also what new clients count in the
            recommendation.
        few: The rows by which a new client is placed; half of its rows at most.
        device: "auto", "cpu" or "cuda".
        jobs: How many runs at once; None takes one per core, or one on a GPU or a system other than Linux.
        out: A folder that keeps what is done: a comparison that is stopped goes on there, and candidates or seeds may
            be added. None keeps nothing.

    Raises:
        ValueError: The input is bad, or all candidates fail. One that fails is listed with the reason.

    Example:
        >>> import coterie as ct
        >>> federation = ct.data.linear_mixture(clients=20, rows=20, features=4, groups=2, seed=0)
        >>> task = ct.Task.regressor(ct.models.Linear(4, 1))
        >>> ways = {"one for all": ct.FedX(k=1), "two groups": ct.FedX(k=2), "three groups": ct.FedX(k=3)}
        >>> ct.compare(ways, task, federation, rounds=20).recommended
        'two groups'
    """
    check_task(task, "compare")
    check_federation(federation, "compare")
    federation.check(task)
    _check_numbers({"rounds": rounds, "seeds": seeds, "few": few}, low=1)
    _check_numbers({"seed": seed}, low=0)
    _check_shares(holdout, new)
    ways = _checked(default_candidates(task, federation) if candidates is None else candidates)
    settings = _Settings(rounds, holdout, new, few, str(find_device(device)))
    splits = {s: split(federation, s, holdout, new, few) for s in range(seed, seed + seeds)}
    if any(part.known.test is None or not len(part.known.test.x) for part in splits.values()):
        raise ValueError("compare: no client has two rows or test rows, so there are none to hold out")
    return Comparison(ways, task.metric, _cells(ways, task, federation, settings, splits, _jobs(jobs), out))


def choose_k(
    method: Method, task: Task, federation: Federation, *, ks: Iterable[int] = range(1, 7), **options: Any
) -> ChosenK:
    """Find the number of groups of a method: the fewest that are as good as the best number, on held-out data.

    Args:
        method: A method with a setting k, or one around such a method; its own k does not matter.
        task: What is learnt.
        federation: The clients and their rows.
        ks: The numbers to try.
        options: Those of `compare`: rounds, seeds, holdout, new, few, device, jobs, out.

    Returns:
        The comparison of all of them; its `k` is the number.

    Example:
        >>> import coterie as ct
        >>> federation = ct.data.linear_mixture(clients=20, rows=20, features=4, groups=2, seed=0)
        >>> task = ct.Task.regressor(ct.models.Linear(4, 1))
        >>> ct.choose_k(ct.FedX(k=1), task, federation, ks=range(1, 4), rounds=20).k
        2
    """
    check_method(method, "choose_k: method")
    number_of_groups(method)
    found = compare({f"k = {k}": with_k(method, k) for k in ks}, task, federation, **options)
    return ChosenK(found.methods, found.metric, found.cells)


def with_k(method: Method, k: int) -> Method:
    """The same method with another number of groups; of one around another, that of the inner one."""
    changed = {"method": with_k(method.method, k)} if isinstance(method, Personal) else {"k": k}
    return dataclasses.replace(method, **changed)


# --- the cells ------------------------------------------------------------------------------------------------------


def _cells(
    ways: dict[str, Method],
    task: Task,
    federation: Federation,
    settings: _Settings,
    splits: dict[int, Split],
    jobs: int,
    out: str | Path | None,
) -> dict[str, list[Cell]]:
    """Every candidate on every split: read where it is known from before, else done and kept."""
    marked = _mark(task, federation, settings) if out else ""
    wanted = [(name, seed) for seed in splits for name in ways]
    files = {at: Path(out) / CELLS / _file(*at, ways[at[0]], marked) for at in wanted} if out else {}
    found = {at: _read(file) for at, file in files.items() if file.is_file()}
    left = [at for at in wanted if at not in found]

    def work(at: tuple[str, int]) -> Cell:
        return _cell(ways[at[0]], task, splits[at[1]], at[1], settings)

    with counting("compare", len(wanted), len(found)) as bar:
        for at, cell in side_by_side(work, left, min(jobs, max(1, len(left)))):
            found[at] = cell
            if files:
                write_text(files[at], json.dumps(_plain(cell)) + "\n")
            bar.update()
    return {name: [found[name, seed] for seed in splits] for name in ways}


def _cell(method: Method, task: Task, parts: Split, seed: int, settings: _Settings) -> Cell:
    """Train a candidate on a split, and score it. One that cannot be trained says why."""
    options = {"rounds": settings.rounds, "seed": seed, "device": settings.device, "evaluations": 1}
    m = len(parts.at) + len(parts.new_at)
    score, error = np.full((2, m), np.nan)
    new = np.isin(np.arange(m), parts.new_at.numpy())
    with quietly():
        try:
            run = fit(method, task, parts.known, **options)
            each = [(parts.at, run.scores)]
            if parts.new is not None:
                each.append((parts.new_at, _scored(run, parts.new, options)))
        except ValueError as failure:  # it diverged, or refuses this task or these clients
            return Cell(score, error, new, failed=str(failure))
    for at, scores in each:
        score[at.numpy()], error[at.numpy()] = scores.per_client, scores.error  # a tensor of one would be a number
    return Cell(
        score=score,
        error=error,
        new=new,
        groups=len(np.unique(run.labels)),
        seconds=sum(row["seconds"] for row in run.history),
        sent=sum(row["bytes_down"] + row["bytes_up"] for row in run.history),
        warnings=tuple(run.warnings),
    )


def _scored(run: Run, new: Federation, options: dict[str, Any]) -> Scores:
    """Score clients that took no part. Where everybody is alone, they train on their few rows."""
    if isinstance(run.algorithm, LocalOnly):
        return fit(run.algorithm, run.task, new, **options).scores
    return run.evaluate(federation=new)


# --- what is kept ---------------------------------------------------------------------------------------------------


def _mark(task: Task, federation: Federation, settings: _Settings) -> str:
    """What the cells of a comparison follow from, but for the candidate and the seed."""
    engine = find_engine("vectorised")(federation, task, Key.of(0), torch.device("cpu"))
    return json.dumps([fingerprint(engine), task.spec, task.metric, settings], sort_keys=True)


def _file(name: str, seed: int, method: Method, marked: str) -> str:
    """A cell's file: two that could differ have different names."""
    digest = hashlib.blake2b(f"{method!r}{seed}{marked}".encode(), digest_size=6).hexdigest()
    words = "-".join(re.findall(r"[\w.+=]+", name))[:60]
    return f"{words},seed={seed},{digest}.json"


def _plain(cell: Cell) -> dict[str, Any]:
    def listed(values: np.ndarray) -> list[float | None]:
        return [None if np.isnan(v) else float(v) for v in values]

    return {**cell._asdict(), "score": listed(cell.score), "error": listed(cell.error), "new": cell.new.tolist()}


def _read(file: Path) -> Cell:
    try:
        stored = read_json(file, {})
        arrays = {name: np.array(stored[name], dtype=float) for name in ("score", "error")}
        return Cell(**{**stored, **arrays, "new": np.array(stored["new"]), "warnings": tuple(stored["warnings"])})
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged ({error}); delete it") from error


# --- arguments ------------------------------------------------------------------------------------------------------


def _checked(ways: Any) -> dict[str, Method]:
    if not isinstance(ways, Mapping) or not ways:
        raise ValueError(f"compare: candidates must be a dict of methods by name, or None, got {ways!r}")
    for name, method in ways.items():
        if not isinstance(name, str):
            raise ValueError(f"compare: a candidate's name must be a string, got {name!r}")
        check_method(method, f"compare: candidate '{name}'")
        validate(method)
        if method.needs.points:
            raise ValueError(f"compare: candidate '{name}' groups points, and their clients have no score to compare")
    return dict(ways)


def _check_numbers(given: dict[str, Any], low: int) -> None:
    for name, value in given.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ValueError(f"compare: {name} must be a whole number of at least {low}, got {value!r}")


def _check_shares(holdout: float, new: float) -> None:
    if not isinstance(holdout, int | float) or not 0 < holdout < 1:
        raise ValueError(f"compare: holdout must be a share between 0 and 1, got {holdout!r}")
    if not isinstance(new, int | float) or not 0 <= new < 1:
        raise ValueError(f"compare: new must be a share from 0 to below 1, got {new!r}")


def _jobs(jobs: int | None) -> int:
    """How many runs to do at once."""
    if jobs is None:
        return most_jobs()
    _check_numbers({"jobs": jobs}, low=1)
    if jobs > 1 and not can_copy():
        raise ValueError(f"compare: jobs must be 1 on a GPU, and on systems other than Linux, got {jobs}")
    return jobs
