"""Algorithms, tasks and data sets as plain tables, and back: the contents of a config.toml."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

from coterie.algorithms import ALGORITHMS
from coterie.algorithms.base import Algorithm
from coterie.algorithms.starts import STARTS
from coterie.algorithms.uifca import Disturbed
from coterie.data import CHANGES, DATASETS
from coterie.federation import Federation
from coterie.models import MODELS
from coterie.secure import SecureSum
from coterie.settings import check_type, nearest_name, to_plain, validate
from coterie.task import Task

INITS = {**STARTS, "disturbed": Disturbed}  # what an algorithm may start from that has settings of its own
RUN_KEYS = ("rounds", "seed", "executor", "device", "precision", "evaluations", "secure")
TASKS = {
    "classifier": Task.classifier,
    "regressor": Task.regressor,
    "language_model": Task.language_model,
    "density": Task.density,
    "adversarial": Task.adversarial,
}


@dataclasses.dataclass(frozen=True)
class Config:
    """What a config.toml asks for."""

    algorithm: Algorithm
    task: Task
    federation: Federation
    run: dict[str, Any]


def describe(algorithm: Algorithm) -> dict[str, Any]:
    """An algorithm as a table: its name and its hyperparameters."""
    name = next((n for n, c in ALGORITHMS.items() if c is type(algorithm)), type(algorithm).__name__)
    table = {"name": name, **to_plain(algorithm)}
    init = getattr(algorithm, "init", None)
    if type(init) in INITS.values():
        named = next(n for n, c in INITS.items() if c is type(init))
        table["init"] = {"name": named, **to_plain(init)}
    elif init is not None and not isinstance(init, str):
        table["init"] = "given"
    return table


def build_algorithm(table: dict[str, Any]) -> Algorithm:
    """The algorithm that a table describes."""
    cls, values = _named(table, ALGORITHMS, "algorithm")
    _known(values, [f.name for f in dataclasses.fields(cls)], "algorithm")
    if isinstance(values.get("init"), dict):
        start, settings = _named(values["init"], INITS, "algorithm.init")
        _known(settings, [f.name for f in dataclasses.fields(start)], "algorithm.init")
        values["init"] = start(**settings)
    missing = [f.name for f in dataclasses.fields(cls) if f.name not in values and _required(f)]
    if missing:
        raise ValueError(f"[algorithm] needs {', '.join(missing)}")
    algorithm = cls(**{n: tuple(v) if isinstance(v, list) else v for n, v in values.items()})
    validate(algorithm)
    return algorithm


def build_task(table: dict[str, Any]) -> Task:
    """The task that a table describes: `kind` and a `model` table of `name` and `sizes`."""
    _known(table, ["kind", "model"], "task")
    kind = table.get("kind", "classifier")
    if kind == "distance":  # of points to centres, which have no model
        return Task.distance()
    if kind not in TASKS:
        raise ValueError(
            f"[task] kind must be {' or '.join([*TASKS, 'distance'])}, got {kind!r}{nearest_name(str(kind), TASKS)}"
        )
    if not isinstance(table.get("model"), dict):
        raise ValueError('[task] needs a model, such as model = { name = "mlp", sizes = [64, 32, 10] }')
    model, values = _named(table["model"], MODELS, "task.model")
    return TASKS[kind](_call(model, values, "task.model"))


def build_federation(table: dict[str, Any]) -> Federation:
    """The federation that a table describes: a data set, then the changes listed under `change`."""
    changes = table.get("change", [])
    if not isinstance(changes, list):
        raise ValueError(f"[data] change must be a list of tables, got {changes!r}")
    make, values = _named({k: v for k, v in table.items() if k != "change"}, DATASETS, "data")
    federation = _call(make, values, "data")
    for entry in changes:
        change, values = _named(entry, CHANGES, "data.change")
        federation = _call(change, values, "data.change", federation)
    return federation


def build_secure(table: dict[str, Any]) -> SecureSum:
    """The secure sum that a table describes; an empty one takes its defaults."""
    if not isinstance(table, dict):
        raise ValueError(f"[run] secure must be a table, such as {{ min_members = 3 }}, got {table!r}")
    _known(table, [f.name for f in dataclasses.fields(SecureSum)], "run.secure")
    secure = SecureSum(**table)
    validate(secure)
    return secure


def build(tables: dict[str, Any]) -> Config:
    """All of a config.toml."""
    _known(tables, ["algorithm", "task", "data", "run"], "")
    for needed in ("algorithm", "data", "run"):
        if not isinstance(tables.get(needed), dict):
            raise ValueError(f"the configuration has no [{needed}] table")
    algorithm = build_algorithm(tables["algorithm"])
    needless = "task" not in tables and type(algorithm).default_task is not Algorithm.default_task
    if not needless and not isinstance(tables.get("task"), dict):
        raise ValueError("the configuration has no [task] table")
    task = algorithm.default_task() if needless else build_task(tables["task"])
    _known(tables["run"], list(RUN_KEYS), "run")
    if "rounds" not in tables["run"]:
        raise ValueError("[run] needs rounds")
    return Config(
        algorithm,
        task,
        build_federation(tables["data"]),
        {n: build_secure(v) if n == "secure" else v for n, v in tables["run"].items()},
    )


def _named(table: dict[str, Any], known: dict[str, Any], where: str) -> tuple[Any, dict[str, Any]]:
    """The thing that `table["name"]` names, and the rest of the table."""
    if not isinstance(table, dict):
        raise ValueError(f"[{where}] must be a table with a name, got {table!r}")
    values = dict(table)
    name = values.pop("name", None)
    if name is None:
        raise ValueError(f"[{where}] needs a name{nearest_name('', known)}")
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"[{where}] knows no {name!r}{nearest_name(str(name), known)}")
    return known[name], values


def _known(values: dict[str, Any], names: list[str], where: str) -> None:
    for name in values:
        if name not in names:
            table = f"[{where}]" if where else "the configuration"
            raise ValueError(f"{table} has no key '{name}'{nearest_name(name, names)}")


def _call(function: Callable[..., Any], values: dict[str, Any], where: str, *first: Any) -> Any:
    parameters = list(inspect.signature(function).parameters.values())[len(first) :]
    names = [p.name for p in parameters]
    _known(values, names, where)
    starred = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
    listed = values.pop(starred, []) if starred else []
    if not isinstance(listed, list):
        raise ValueError(f"[{where}] {starred} must be a list, got {listed!r}")
    positional = list(listed)
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in values and p.name != starred]
    if missing:
        raise ValueError(f"[{where}] needs {', '.join(missing)}")
    hints = get_type_hints(function.__init__ if isinstance(function, type) else function)
    for name, value in [*values.items(), *((starred or "", v) for v in positional)]:
        check_type(f"[{where}] {name}", value, hints[name])
    return function(*first, *positional, **{n: tuple(v) if isinstance(v, list) else v for n, v in values.items()})


def _required(f: dataclasses.Field[Any]) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
