"""The conformance suite for methods: what every method must do on every engine, as `check_method`.

    from coterie.testing import check_method
    check_method(FeSEM(k=2))

The problem that a method is tried on follows from what it declares in `needs`. Each check can also be run as a test of
its own: `checks(method)` lists them.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from coterie.core.cohort import Cohort
from coterie.core.federation import Federation
from coterie.core.key import Key
from coterie.core.membership import Membership
from coterie.core.method import Groups, Method
from coterie.core.pytree import leaves, stacked, tree_map
from coterie.core.registry import named
from coterie.core.settings import validate
from coterie.core.task import Data, Task
from coterie.engines import ENGINES, simulated
from coterie.runs.config import build_algorithm, describe
from coterie.runs.evaluate import evaluate
from coterie.runs.fit import fit
from coterie.secure import SecureSum

ROUNDS = 3
ALIKE = tuple(name for name in ENGINES if name != "sharded")  # which in one process is the vectorised engine
CLOSE = 1e-5  # how far engines may be apart after so few rounds


class Skip(Exception):
    """A check does not apply to a method; says why."""


class Problem(NamedTuple):
    """What a method is tried on."""

    task: Task
    federation: Federation


class Check(NamedTuple):
    """One check of one method."""

    name: str
    run: Callable[[], None]


class Outcome(NamedTuple):
    """What `check_method` found: the names of the checks that passed, and why others do not apply."""

    passed: list[str]
    skipped: dict[str, str]


def check_method(method: Method, problem: Problem | None = None) -> Outcome:
    """Run every check of a method.

    Args:
        method: A method with settings that suit a dozen small clients.
        problem: A task and a federation to try it on; None takes one that suits what the method declares it needs.

    Raises:
        AssertionError: Some checks failed; the message names each, with its reason.

    Example:
        >>> import coterie as ct
        >>> found = check_method(ct.FedAvg(tau=2))
        >>> "engines_agree" in found.passed, list(found.skipped)
        (True, [])
    """
    passed, skipped, failed = list[str](), dict[str, str](), dict[str, str]()
    for check in checks(method, problem):
        try:
            check.run()
            passed.append(check.name)
        except Skip as why:
            skipped[check.name] = str(why)
        except Exception as error:  # whatever it is, the method has failed this check, and others are still run
            failed[check.name] = f"{type(error).__name__}: {error}"
    if failed:
        told = "\n".join(f"  {name}: {why}" for name, why in failed.items())
        raise AssertionError(f"{method!r} failed {len(failed)} of {len(failed) + len(passed)} checks:\n{told}")
    return Outcome(passed, skipped)


def checks(method: Method, problem: Problem | None = None) -> list[Check]:
    """All checks of a method, to be run one by one. A check that does not apply raises `Skip`."""
    given = problem or problem_for(method)
    return [Check(name, lambda check=check: check(method, given)) for name, check in _CHECKS.items()]


def small(cls: type[Method], **settings: Any) -> Method:
    """A method of a class with little to do: few clusters and steps, and what the class declares as `quick`.

    Args:
        cls: The class of the method.
        settings: Others; those that the class does not have are left out.
    """
    fields = {f.name for f in dataclasses.fields(cls)}
    wanted = {"k": 3, "tau": 3, "lr": 0.1, **cls.quick, **settings}
    return cls(**{name: value for name, value in wanted.items() if name in fields})


def problem_for(method: Method) -> Problem:
    """A task and clients of very unequal sizes that suit what a method needs."""
    from coterie import models

    needs, k = method.needs, getattr(method, "k", 3)
    if needs.points:
        tasks = {
            "distance": Task.distance,
            "density": lambda: Task.density(models.AffineFlow(6)),
            "adversarial": lambda: Task.adversarial(models.GAN((6,), k=k, dz=2, hidden=(8,))),
        }
        return Problem(tasks[needs.task](), points())
    if needs.linear or getattr(method, "refine", None) == "least_squares":
        return Problem(Task.regressor(models.Linear(4, 1)), regressions())
    return Problem(Task.classifier(models.MLP(64, 16, 10)), ragged())


def ragged() -> Federation:
    """Twelve clients of very unequal size in three well separated groups."""
    g = torch.Generator().manual_seed(0)
    centres = 3 * torch.randn(3, 10, 64, generator=g)
    clients, tests = [], []
    for i in range(12):
        for part, n in ((clients, 5 + 7 * i), (tests, 8)):
            y = torch.randint(10, (n,), generator=g)
            part.append((centres[i % 3][y] + 0.3 * torch.randn(n, 64, generator=g), y))
    return Federation.from_clients(clients, tests, groups=[i % 3 for i in range(12)])


def regressions() -> Federation:
    """Forty clients of very unequal size in three mixed regressions."""
    from coterie.data import mixed_regression

    return mixed_regression(k=3, d=4, seed=1, anchors=6, anchor_rows=40, pairs=14, rest=20, rest_rows=(1, 3, 6, 11))


def points() -> Federation:
    """Eight clients of very unequal size with points of three clusters, half of each client's of one."""
    from coterie.data import gaussian_clusters

    whole = gaussian_clusters(k=3, p=0.5, seed=2, clients=8, points=120, d=6, separation=6.0)
    rows = [(x[: 20 + 14 * i].flip(0), y[: 20 + 14 * i].flip(0)) for i in range(8) for x, y in [whole.train.client(i)]]
    return Federation.from_clients(rows)


def run_rounds(method: Method, members: Membership | Cohort, rounds: int = ROUNDS, seed: int = 0) -> tuple[Any, Any]:
    """The state and the last report after so many plain rounds."""
    membership = members if isinstance(members, Membership) else Membership(members)
    key = Key.of(seed)
    state = membership.perform(lambda cohort: method.start(cohort.task, cohort.at(0), key), unit=0)
    report = None
    for t in range(rounds):
        if not method.done(state):
            state, report = membership.perform(lambda c, s=state, t=t: method.round(s, c.at(t)), unit=t + 1)
    return state, report


def assert_same(a: Any, b: Any, tolerance: float = 0.0) -> None:
    """Whether two trees hold the same numbers, within a tolerance of each, or of the largest that is beside it.

    Sums of clients' numbers cancel, and what is left of float32's rounding is the processor's affair. Beside a number
    are those of the same model or client, by which stacked tensors lead.
    """
    for x, y in zip(leaves(a), leaves(b), strict=True):
        assert x.shape == y.shape, f"shapes {tuple(x.shape)} and {tuple(y.shape)}"
        if x.is_floating_point():
            apart = float((x - y).nan_to_num(posinf=0, neginf=0).abs().max()) if x.numel() else 0.0
            for one, two in zip(x, y, strict=True) if y.dim() > 1 else [(x, y)]:
                largest = float(two.nan_to_num(posinf=0, neginf=0).abs().max().clamp(min=1)) if two.numel() else 1.0
                assert torch.allclose(one, two, rtol=tolerance, atol=tolerance * largest), f"{apart:g} apart"
        else:
            assert torch.equal(x, y), f"{int((x != y).sum())} of {x.numel()} whole numbers differ"


# --- the checks ------------------------------------------------------------------------------------------------------


def _settings(method: Method, problem: Problem) -> None:
    assert dataclasses.is_dataclass(method), "a method is a dataclass"
    assert type(method).__dataclass_params__.frozen, "a method is a frozen dataclass"  # pyright: ignore
    validate(method)
    assert named(type(method)) is not None, "register it: @coterie.register(name)"
    again = build_algorithm(json.loads(json.dumps(describe(method))))
    assert again == method, f"settings do not survive JSON: {again!r}"


def _shapes(method: Method, problem: Problem) -> None:
    cohort = _cohort(problem)
    state, report = run_rounds(method, cohort, 1)
    m, models, labels = len(cohort), method.models(state), method.labels(state)
    k = stacked(models)
    assert hasattr(state, "_fields"), "a state is a NamedTuple"
    assert all(len(x) == k for x in models.values()), "models lead with an axis of clusters"
    assert labels.shape == (m,) and not labels.is_floating_point(), f"labels {tuple(labels.shape)} for {m} clients"
    assert len(report.loss) == len(report.clients), "a report has one loss per participant"
    clusters = len(method.members(state))
    assert int(labels.max()) < clusters, f"a label is {int(labels.max())}, but there are {clusters} clusters"
    placed = method.place(state, cohort)
    assert placed.shape == (m,) and int(placed.min()) >= 0 and int(placed.max()) < clusters, "place gives clusters"


def _engines_agree(method: Method, problem: Problem) -> None:
    states = {name: run_rounds(method, _cohort(problem, name))[0] for name in ALIKE}
    for name, other in states.items():
        try:
            assert_same(states["sequential"], other, CLOSE)
        except AssertionError as why:
            raise AssertionError(f"{name} differs from sequential: {why}") from None


def _scores_agree(method: Method, problem: Problem) -> None:
    """Clients are served alike on every engine, and on three nodes: also with models of their own."""
    state, _ = run_rounds(method, _cohort(problem))
    wanted = evaluate(method, state, _cohort(problem, "sequential"))
    found = {name: evaluate(method, state, _cohort(problem, name)) for name in ALIKE}
    with nodes(problem) as there:
        found["flower"] = evaluate(method, state, there.everyone)
    for name, scores in found.items():
        assert np.array_equal(scores.labels, wanted.labels), f"{name}: clients are in other clusters"
        close = np.allclose(scores.per_client, wanted.per_client, rtol=CLOSE, atol=CLOSE, equal_nan=True)
        assert close, f"{name}: scores differ from those of sequential"


def _same_key_same_result(method: Method, problem: Problem) -> None:
    one, _ = run_rounds(method, _cohort(problem), 2)
    cohort = _cohort(problem)
    state, _ = run_rounds(method, cohort, 1)
    copy = tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, state)
    two = state if method.done(state) else method.round(state, cohort.at(1))[0]
    assert_same(one, two)
    try:
        assert_same(state, copy)
    except AssertionError as why:
        raise AssertionError(f"a round has changed the state that it was given: {why}") from None


def _stop_and_resume(method: Method, problem: Problem) -> None:
    for executor in ALIKE:
        with tempfile.TemporaryDirectory() as folder:

            def go(rounds: int, name: str, resume: bool = False, executor: str = executor, at: str = folder) -> Any:
                out = Path(at) / name
                options: Any = {"executor": executor, "out": out, "resume": resume, "evaluations": 1}
                return fit(method, *problem, rounds=rounds, seed=3, **options)

            whole, _, parts = go(6, "whole"), go(3, "parts"), go(6, "parts", resume=True)
        assert_same(whole.state, parts.state)
        losses = [[row["loss"] for row in run.history] for run in (whole, parts)]
        assert losses[0] == losses[1], f"{executor}: the history of a resumed run differs"


def _renumbering_clients_renumbers_labels(method: Method, problem: Problem) -> None:
    task, federation = problem
    federation = dataclasses.replace(federation, ids=tuple(f"site-{i}" for i in range(len(federation))))
    order = torch.randperm(len(federation), generator=torch.Generator().manual_seed(5))
    plain, moved = (fit(method, task, x, rounds=4, evaluations=1) for x in (federation, federation.select(order)))
    a, b = plain.labels[order.numpy()], moved.labels
    pairs = set(zip(a.tolist(), b.tolist(), strict=True))
    assert len(pairs) == len(set(a)) == len(set(b)), "other clients are together"
    assert np.allclose(plain.scores.per_client[order.numpy()], moved.scores.per_client), "scores differ"


def _an_empty_cluster_keeps_its_model(method: Method, problem: Problem) -> None:
    """With a fifth of the clients there are too few to fill all clusters: some models must come through untouched."""
    if method.needs.points:
        raise Skip("the points of every client may be of all clusters")
    if method.needs.soft:
        raise Skip("every client adds to all clusters")
    fields = {f.name for f in dataclasses.fields(method)}
    if "fraction" not in fields:
        raise Skip("it has no setting `fraction`")
    few = dataclasses.replace(method, fraction=0.2)
    cohort = _cohort(problem)
    state = few.start(problem.task, cohort.at(0), Key.of(0))
    after, report = few.round(state, cohort.at(0))
    chosen = set(few.labels(after)[report.clients].tolist())
    for name, before in few.models(state).items():
        now = few.models(after)[name]
        for j in set(range(len(before))) - chosen:
            assert torch.equal(before[j].to(now), now[j]), f"nobody chose cluster {j}, but its model has changed"


def _assign_of_a_training_client_is_its_label(method: Method, problem: Problem) -> None:
    task, federation = problem
    run = fit(method, task, federation, rounds=8, evaluations=1)
    for i in range(len(federation)):
        x, y = federation.train.client(i)
        assigned, label = run.assign(x, y), run.labels[i]
        if isinstance(assigned, np.ndarray):
            assigned = int(np.bincount(assigned).argmax())  # labels are the clients' commonest clusters
        if len(run.models) == len(federation):  # no groups: another client's model may serve it better than its own
            rows = Data(x, y, torch.ones(len(x)))
            loss = [float(task.loss(run.models[j], rows).mean()) for j in (assigned, label)]
            assert loss[0] <= loss[1] + 1e-6, f"client {i} is assigned to a model that serves it worse than its own"
        else:
            assert assigned == label, f"client {i} is in cluster {label}, but assigned to {assigned}"


def _adopted_clients_are_where_they_were(method: Method, problem: Problem) -> None:
    """A state that goes on with the same models and half of the clients, in another order, knows the same of them."""
    cohort, half = _cohort(problem), torch.arange(len(problem.federation)).flip(0)[::2]
    state, _ = run_rounds(method, cohort)
    models, labels = method.models(state), method.labels(state)[half]
    try:
        after, now = method.adopt(state, Groups(models, half, labels), problem.task)
    except ValueError as why:
        raise Skip(str(why)) from None
    assert_same(after.models(now), models, CLOSE)
    assert_same(after.labels(now), labels)
    some = Problem(problem.task, problem.federation.select(half))
    state, report = after.round(now, _cohort(some).at(ROUNDS))
    assert len(after.labels(state)) == len(half), "a round must know the clients that were adopted, and no others"
    assert report.clients.max() < len(half)


def _steps_can_be_batched(method: Method, problem: Problem) -> None:
    cohort = _cohort(problem, "vmap")
    run_rounds(method, cohort)
    slow = [message for message in cohort.ledger.messages if "vmap cannot batch" in message]
    assert not slow, slow[0] if slow else ""


def _secure_sum(method: Method, problem: Problem) -> None:
    fields = {f.name: f for f in dataclasses.fields(method)}
    if "init" in fields and fields["init"].default in (None, "farthest_first", "centres"):
        method = dataclasses.replace(method, init="random")  # the default asks single clients for their models
    try:
        fit(method, *problem, rounds=2, secure=SecureSum(), evaluations=1)
    except ValueError as error:
        assert str(error).startswith("secure sum:"), str(error)
        assert method.needs.gather, f"declare needs = Needs(gather=True): {error}"
        raise Skip(f"it needs every client's own reply: {error}") from None


def _real_federation(method: Method, problem: Problem) -> None:
    """Three nodes with several clients each, over Flower's messages, against the simulator."""
    here = _cohort(problem)
    with nodes(problem) as there:
        (one, _), (two, _) = run_rounds(method, here), run_rounds(method, there)
        assert torch.equal(method.labels(one), method.labels(two)), "labels differ from the simulator's"
        assert_same(one, two, CLOSE)
        placed = method.place(one, here), method.place(two, there.everyone)
        assert torch.equal(*placed), "clients are placed otherwise than by the simulator"
        assert not there.nodes.faults, f"sites have failed: {dict(there.nodes.faults)}"


_CHECKS: dict[str, Callable[[Method, Problem], None]] = {
    check.__name__.removeprefix("_"): check
    for check in (
        _settings, _shapes, _engines_agree, _scores_agree, _same_key_same_result, _stop_and_resume,
        _renumbering_clients_renumbers_labels, _an_empty_cluster_keeps_its_model,
        _assign_of_a_training_client_is_its_label, _adopted_clients_are_where_they_were, _steps_can_be_batched,
        _secure_sum, _real_federation,
    )
}  # fmt: skip


def _cohort(problem: Problem, executor: str = "vectorised") -> Cohort:
    return simulated(problem.federation, problem.task, Key.of(0).fold(1), executor=executor)


@contextmanager
def nodes(problem: Problem, **options: Any) -> Iterator[Any]:
    """The clients of a problem on three nodes of a Flower grid in this process.

    Args:
        problem: The task, and the clients to be spread over the nodes.
        options: Of `FlowerEngine`.

    Raises:
        Skip: Flower is not installed.
    """
    try:
        from coterie.flower.engine import FlowerEngine
        from coterie.flower.enrolment import enrol
        from coterie.flower.local import LocalGrid
        from coterie.flower.membership import FlowerMembership
        from coterie.flower.node import Node
    except ImportError:
        raise Skip("Flower is not installed: pip install 'coterie[flower]'") from None
    task, federation = problem
    m = len(federation)
    shares = [federation.select(range(a, b)) for a, b in pairwise([0, m // 4, m // 2, m])]
    with tempfile.TemporaryDirectory() as folder:
        grid = LocalGrid({9 - i: Node(f"site-{i}", share, Path(folder)) for i, share in enumerate(shares)})
        roster = enrol(grid, task, nodes=3, deadline=10)
        engine = FlowerEngine(grid, roster, task, Key.of(0).fold(1), run="check", **{"deadline": 10, **options})
        yield FlowerMembership(engine)
