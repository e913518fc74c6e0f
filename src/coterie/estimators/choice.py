"""The method that an estimator trains: the recommended one, or one by its name, with a number of groups and a step."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

from coterie.core.features import is_linear
from coterie.core.federation import Federation
from coterie.core.method import Method
from coterie.core.registry import find, named
from coterie.core.task import Task
from coterie.methods.fedavg import FedAvg
from coterie.methods.fedem import FedEM
from coterie.methods.fedx import FedX
from coterie.methods.mixed_effects import MixedEffects
from coterie.methods.personal import Personal
from coterie.runs.arguments import check_method
from coterie.runs.candidates import ALONE, LR, Simplicity, bearable, candidates, ways_to_share
from coterie.runs.choosing import choose_k, compare, with_k
from coterie.runs.comparison import Comparison
from coterie.runs.group_count import count_groups
from coterie.runs.sampling import PRODUCTS, sampled

ROWS = 50_000  # training rows at most on which candidates are compared
SPLITS, FEWER = 4, 2  # of a comparison, and of one with more than a quarter of these rows
MOST = 6  # groups, where a method's number of them is found by trying

Number = int | Literal["auto"]


class Problem(NamedTuple):
    """What is to be learnt, from whom, and how long.

    Attributes:
        task: What.
        federation: From whom.
        rounds: How many at most.
        seed: Of all draws.
        device: "auto", "cpu" or "cuda".
    """

    task: Task
    federation: Federation
    rounds: int
    seed: int
    device: str

    @property
    def linear(self) -> bool:
        """Whether it is a regression that is linear in its parameters."""
        return is_linear(self.task, self.federation.train.x[:2])

    def compared(self) -> tuple[Task, Federation]:
        """On what candidates are compared."""
        return self.task, sampled(self.federation, ROWS, self.seed, PRODUCTS if self.linear else None)

    def options(self) -> dict[str, Any]:
        """Those of `compare`."""
        seeds = SPLITS if len(self.federation.train.x) <= ROWS // SPLITS else FEWER
        return {"rounds": self.rounds, "seeds": seeds, "seed": self.seed, "device": self.device}


class Choice(NamedTuple):
    """A method, and the comparison that it comes from; None where nothing was compared."""

    method: Method
    comparison: Comparison | None = None


def choose(method: Any, k: Number, lr: float | None, problem: Problem, where: str) -> Choice:
    """The method to train.

    Args:
        method: "auto", the name of a method, or a method.
        k: The number of groups; "auto" finds it, or leaves a method as it is.
        lr: The step size; None takes the method's, or of a linear regression what its curvature bears.
        problem: What is to be learnt.
        where: The beginning of messages.

    Raises:
        ValueError: There is no such method, or not with such settings.
    """
    if k != "auto" and k > (m := len(problem.federation)):
        raise ValueError(f"{where}: k must be at most the number of clients, {m}, got {k}")
    if isinstance(method, Method):
        return Choice(_with_lr(_with_groups(_for_targets(method, where), k, where), lr, where))
    if method == "auto":
        return _recommended(k, lr, problem, where)
    if not isinstance(method, str):
        check_method(method, f"{where}: method")
    return _named(method, k, lr, problem, where)


def _recommended(k: Number, lr: float | None, problem: Problem, where: str) -> Choice:
    """What `compare` recommends; for a single client there is nothing to compare."""
    if (m := len(problem.federation)) == 1:
        return Choice(FedX(k=1) if problem.linear else FedAvg(lr=LR if lr is None else lr))
    if k != "auto" and k > max(1, most := m // 2):
        raise ValueError(f"{where}: method='auto' tries groups of two clients or more; k is {most} at most, got {k}")
    ways = _likely(lr, problem) if k == "auto" else _of_groups(k, lr, problem)
    found = compare(ways, *problem.compared(), **problem.options())
    return Choice(found.method, found)


def _likely(lr: float | None, problem: Problem) -> dict[str, Method]:
    """The candidates for as many groups as a diagnosis finds, where it can tell."""
    task, some = problem.compared()
    found = count_groups(task, some, problem.seed, problem.device)
    return ways_to_share(task, some, found and found.count, MOST, lr)


def _of_groups(k: int, lr: float | None, problem: Problem) -> dict[str, Method]:
    """The candidates with so many groups."""
    ways = {n: (way, Simplicity.of(way)) for n, way in candidates(problem.task, problem.federation, k, lr).items()}
    found = {n: way for n, (way, place) in ways.items() if place.k == k and place.kind != ALONE}
    return found | ({f"{k} groups of random effects": MixedEffects(k=k)} if problem.linear and k > 1 else {})


def _named(name: str, k: Number, lr: float | None, problem: Problem, where: str) -> Choice:
    """A registered method, with k found by held-out rows where it must be given and is not."""
    cls: type[Method] = find("method", name, f"{where}: method")
    needed = [f.name for f in dataclasses.fields(cls) if f.default is f.default_factory is dataclasses.MISSING]
    if missing := [n for n in needed if n != "k"]:
        raise ValueError(f"{where}: method {name!r} needs {missing[0]}; give it as {cls.__name__}({missing[0]}=…)")
    tries = "k" in needed and k == "auto"
    made = _for_targets(cls(k=1) if "k" in needed else cls(), where)  # pyright: ignore[reportCallIssue]
    if isinstance(made, MixedEffects) and k == "auto":
        made = dataclasses.replace(made, k="auto")
    made = _with_lr(_with_groups(made, k, where), _step(made, problem) if lr is None else lr, where)
    most = min(MOST, len(problem.federation) // 2)
    if not tries or most < 2:
        return Choice(made)
    found = choose_k(made, *problem.compared(), ks=range(1, most + 1), **problem.options())
    return Choice(found.method, found)


def _step(method: Method, problem: Problem) -> float | None:
    """The step size of a method that is given none: of a linear regression, what its curvature bears."""
    if isinstance(method, Personal):
        return _step(method.method, problem)
    if getattr(method, "lr", None) is None or not problem.linear:
        return None
    clients, rows = bearable(problem.task, problem.federation)
    return rows if isinstance(method, FedEM) else clients


def _for_targets(method: Method, where: str) -> Method:
    if method.needs.points:
        raise ValueError(f"{where}: {type(method).__name__} groups points, and looks at no target")
    return method


def _with_groups(method: Method, k: Number, where: str) -> Method:
    if k == "auto":
        return method
    inner = method
    while isinstance(inner, Personal):
        inner = inner.method
    if not hasattr(inner, "k"):
        raise ValueError(f"{where}: {_name(inner)} has no number of groups to be given; leave k='auto', got {k}")
    return with_k(method, k)


def _with_lr(method: Method, lr: float | None, where: str) -> Method:
    if lr is None:
        return method
    if isinstance(method, Personal):
        return dataclasses.replace(method, method=_with_lr(method.method, lr, where))
    if not hasattr(method, "lr"):
        raise ValueError(f"{where}: {_name(method)} takes no steps; leave lr=None, got {lr!r}")
    return dataclasses.replace(method, lr=lr)  # pyright: ignore[reportCallIssue]


def _name(method: Method) -> str:
    return named(type(method)) or type(method).__name__
