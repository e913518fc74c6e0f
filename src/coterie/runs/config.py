"""Algorithms, tasks and data sets as plain tables, and back: the contents of a config.toml."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

from coterie.core.augment import AUGMENTATIONS
from coterie.core.federation import Federation
from coterie.core.method import Method
from coterie.core.registry import Kind, find, named
from coterie.core.settings import check_type, to_plain, validate
from coterie.core.task import Task
from coterie.core.uplink import Transform, Uplink
from coterie.data import CHANGES, DATASETS
from coterie.models import MODELS
from coterie.privacy import Privacy
from coterie.robust.rules import Aggregate
from coterie.runs.candidates import candidates
from coterie.secure import SecureSum
from coterie.storage.names import nearest_name

COMPARE_KEYS = ("seeds", "holdout", "new", "few")  # of [compare], besides the candidates
RUN_KEYS = (
    "rounds",
    "seed",
    "executor",
    "device",
    "precision",
    "evaluations",
    "secure",
    "privacy",
    "uplink",
    "aggregate",
)
NESTED: dict[str, Kind] = {  # settings that are dataclasses of settings, and what kind of thing they name
    "init": "start",
    "method": "method",
    "optimiser": "optimiser",
    "server": "optimiser",
    "lr_schedule": "schedule",
    "then": "schedule",
}
TASKS = {
    "classifier": Task.classifier,
    "regressor": Task.regressor,
    "counts": Task.counts,
    "language_model": Task.language_model,
    "density": Task.density,
    "adversarial": Task.adversarial,
}
NORMED = ("classifier", "regressor", "counts", "language_model")  # whose models may have BatchNorm


@dataclasses.dataclass(frozen=True)
class Config:
    """What a config.toml asks for."""

    algorithm: Method
    task: Task
    federation: Federation
    run: dict[str, Any]
    callbacks: list[Any]


@dataclasses.dataclass(frozen=True)
class ComparisonConfig:
    """What a configuration with several candidates asks for."""

    candidates: dict[str, Method]
    task: Task
    federation: Federation
    options: dict[str, Any]  # of `compare`


def describe(algorithm: Method) -> dict[str, Any]:
    """A method as a table: its name and its hyperparameters."""
    return _table(algorithm)


def describe_uplink(uplink: Uplink) -> list[dict[str, Any]]:
    """The transforms of an uplink as tables; of a function of the user's, its name."""
    return [
        _table(t) if dataclasses.is_dataclass(t) else {"name": getattr(t, "__name__", "custom")}
        for t in uplink.transforms
    ]


def _table(value: Any) -> dict[str, Any]:
    """A dataclass of settings as a table, which holds the tables of settings that are dataclasses themselves."""
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    nested = {n: _table(v) for n, v in fields.items() if n in NESTED and dataclasses.is_dataclass(v)}
    table = {"name": named(type(value)) or type(value).__name__, **to_plain(value), **nested}
    init, schedule = fields.get("init"), fields.get("lr_schedule")
    if init is not None and not isinstance(init, str) and not dataclasses.is_dataclass(init):
        table["init"] = "given"
    if callable(schedule) and not dataclasses.is_dataclass(schedule):
        table["lr_schedule"] = getattr(schedule, "__qualname__", type(schedule).__name__)
    return table


def build_algorithm(table: dict[str, Any], where: str = "algorithm") -> Method:
    """The method that a table describes."""
    return _registered(table, "method", where)


def build_uplink(tables: Any) -> list[Transform]:
    """The transforms that a list of tables describes."""
    if not isinstance(tables, list):
        example = '[{ name = "quantise", bits = 8 }]'
        raise ValueError(f"[run] uplink must be a list of tables, such as {example}, got {tables!r}")
    return [_registered(table, "uplink", "run.uplink") for table in tables]


def describe_aggregate(aggregate: Aggregate) -> dict[str, Any]:
    """A robust mean as a table: its name and its settings."""
    return _table(aggregate)


def build_aggregate(given: Any) -> Aggregate:
    """The robust mean that a name describes, or a table of a name and settings."""
    return _registered({"name": given} if isinstance(given, str) else given, "aggregate", "run.aggregate")


def build_callbacks(tables: Any) -> list[Any]:
    """The callbacks that a list of tables describes. They are no part of what a run is: config.toml has none."""
    if not isinstance(tables, list):
        raise ValueError(f"callbacks must be a list of tables, each under [[callbacks]], got {tables!r}")
    return [_registered(table, "callback", "[callbacks]") for table in tables]


def _registered(table: Any, kind: Kind, where: str) -> Any:
    """The object that a table describes by a registered name and its settings."""
    name, values = _name_and_rest(table, where)
    return _settings(find(kind, name, f"[{where}]"), values, where)


def _settings(cls: type, values: dict[str, Any], where: str) -> Any:
    """A dataclass of settings from a table's values."""
    _known(values, [f.name for f in dataclasses.fields(cls)], where)
    missing = [f.name for f in dataclasses.fields(cls) if f.name not in values and _required(f)]
    if missing:
        raise ValueError(f"[{where}] needs {', '.join(missing)}")
    for name, value in values.items():
        if name in NESTED and isinstance(value, dict):
            values = {**values, name: _registered(value, NESTED[name], f"{where}.{name}")}
    built = cls(**{n: tuple(v) if isinstance(v, list) else v for n, v in values.items()})
    validate(built)
    return built


def build_task(table: dict[str, Any]) -> Task:
    """The task that a table describes: `kind` and a `model` table of `name` and `sizes`, or `from` a run and `head`."""
    _known(table, ["kind", "model", "batch_norm", "augment", "from", "head", "trunk"], "task")
    if "from" in table or "head" in table:
        return _build_frozen(table)
    kind = table.get("kind", "classifier")
    if kind == "distance":  # of points to centres, which have no model
        return Task.distance()
    if not isinstance(kind, str) or kind not in TASKS:
        raise ValueError(
            f"[task] kind must be {' or '.join([*TASKS, 'distance'])}, got {kind!r}{nearest_name(str(kind), TASKS)}"
        )
    if not isinstance(table.get("model"), dict):
        raise ValueError('[task] needs a model, such as model = { name = "mlp", sizes = [64, 32, 10] }')
    model, values = _named(table["model"], MODELS, "task.model")
    options: dict[str, Any] = {n: v for n, v in table.items() if n == "batch_norm"}
    if options and kind not in NORMED:
        raise ValueError(f"[task] batch_norm goes with {', '.join(NORMED)}, not with {kind}")
    if "augment" in table:
        if kind != "classifier":
            raise ValueError(f"[task] augment goes with classifier, not with {kind}")
        augmentation, settings = _named(table["augment"], AUGMENTATIONS, "task.augment")
        options["augment"] = _settings(augmentation, settings, "task.augment")
    return TASKS[kind](_call(model, values, "task.model"), **options)


def _build_frozen(table: dict[str, Any]) -> Task:
    """The task of a run's model with all but its head frozen."""
    from coterie.runs.freezing import freeze
    from coterie.runs.load import load  # which reads configurations

    folder, head = table.get("from"), table.get("head")
    names = [head] if isinstance(head, str) else head
    if not isinstance(folder, str) or not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise ValueError('[task] a frozen model needs both, such as from = "runs/whole" and head = "layers.1"')
    task = freeze(load(folder), names)
    for name in ("kind", "model", "batch_norm", "augment"):
        if name in table and table[name] != task.spec.get(name):
            raise ValueError(f"[task] {name} is that of the run in {folder}, {task.spec.get(name)}: leave it out")
    if table.get("trunk", task.spec["trunk"]) != task.spec["trunk"]:
        raise ValueError(f"[task] the run in {folder} has other values now than those that were frozen")
    return task


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
    return _settings(SecureSum, table, "run.secure")


def build_privacy(table: dict[str, Any]) -> Privacy:
    """The settings of privacy that a table describes; an empty one takes its defaults."""
    if not isinstance(table, dict):
        raise ValueError(f"[run] privacy must be a table, such as {{ epsilon = 8.0 }}, got {table!r}")
    return _settings(Privacy, table, "run.privacy")


def build(tables: dict[str, Any]) -> Config:
    """All of a config.toml."""
    algorithm, task, run = build_settings(tables)
    callbacks = build_callbacks(tables.get("callbacks", []))
    return Config(algorithm, task, build_federation(tables["data"]), run, callbacks)


def build_settings(tables: dict[str, Any]) -> tuple[Method, Task, dict[str, Any]]:
    """All of a config.toml but the federation, which may take long to make."""
    _known(tables, ["algorithm", "task", "data", "run", "callbacks"], "")
    for needed in ("algorithm", "data", "run"):
        if not isinstance(tables.get(needed), dict):
            raise ValueError(f"the configuration has no [{needed}] table")
    algorithm = build_algorithm(tables["algorithm"])
    needless = "task" not in tables and type(algorithm).default_task is not Method.default_task
    if not needless and not isinstance(tables.get("task"), dict):
        raise ValueError("the configuration has no [task] table")
    task = algorithm.default_task() if needless else build_task(tables["task"])
    _known(tables["run"], list(RUN_KEYS), "run")
    if "rounds" not in tables["run"]:
        raise ValueError("[run] needs rounds")
    return algorithm, task, build_run(tables["run"])


def build_comparison(tables: dict[str, Any]) -> ComparisonConfig:
    """All of a configuration with several candidates: those that are named in [compare.candidates], else the usual.

    The method in [algorithm], if there is one, is a candidate beside the usual.
    """
    _known(tables, ["algorithm", "task", "data", "run", "compare"], "")
    for needed in ("task", "data"):
        if not isinstance(tables.get(needed), dict):
            raise ValueError(f"the configuration has no [{needed}] table")
    own, run = (tables.get(name, {}) for name in ("compare", "run"))
    for name, table in (("compare", own), ("run", run)):
        if not isinstance(table, dict):
            raise ValueError(f"[{name}] must be a table, got {table!r}")
    _known(own, ["candidates", "k", "lr", *COMPARE_KEYS], "compare")
    _known(run, list(RUN_KEYS), "run")
    if unused := [name for name in run if name not in ("rounds", "seed", "device", "evaluations")]:
        raise ValueError(f"[run] {unused[0]} has no meaning in a comparison, which trains with the usual executor")
    task, federation = build_task(tables["task"]), build_federation(tables["data"])
    options = {n: v for n, v in {**run, **own}.items() if n in ("rounds", "seed", "device", *COMPARE_KEYS)}
    return ComparisonConfig(_candidates(tables, own, task, federation), task, federation, options)


def _candidates(tables: dict[str, Any], own: dict[str, Any], task: Task, federation: Federation) -> dict[str, Method]:
    """The candidates by name."""
    given, usual = own.get("candidates"), {n: own[n] for n in ("k", "lr") if n in own}
    if given is None:
        beside = {"[algorithm]": build_algorithm(tables["algorithm"])} if "algorithm" in tables else {}
        return {**candidates(task, federation, **usual), **beside}
    if not isinstance(given, dict) or not given:
        example = 'pairs = { name = "ifca", k = 2 }'
        raise ValueError(f"[compare.candidates] must be tables by name, such as {example}, got {given!r}")
    if usual or "algorithm" in tables:
        extra = "[algorithm]" if "algorithm" in tables else f"[compare] {next(iter(usual))}"
        raise ValueError(f"{extra} is for the usual candidates; [compare.candidates] names others")
    return {name: build_algorithm(table, f"compare.candidates.{name}") for name, table in given.items()}


def build_run(table: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `fit` that a [run] table describes."""
    build = {"secure": build_secure, "privacy": build_privacy, "uplink": build_uplink, "aggregate": build_aggregate}
    return {name: build[name](value) if name in build else value for name, value in table.items()}


def set_value(tables: dict[str, Any], name: str, value: Any) -> None:
    """Set the value of a dotted name, such as algorithm.k; a table that is not there is made.

    Example:
        >>> tables = {"algorithm": {"k": 2}}
        >>> set_value(tables, "algorithm.init.steps", 5)
        >>> tables
        {'algorithm': {'k': 2, 'init': {'steps': 5}}}
    """
    *path, key = name.split(".")
    for i, part in enumerate(path):
        tables = tables.setdefault(part, {})
        if not isinstance(tables, dict):
            raise ValueError(f"{name} cannot be set: {'.'.join(path[: i + 1])} is {tables!r}, not a table")
    tables[key] = value


def _name_and_rest(table: Any, where: str) -> tuple[Any, dict[str, Any]]:
    """`table["name"]`, and the rest of the table."""
    if not isinstance(table, dict):
        raise ValueError(f"[{where}] must be a table with a name, got {table!r}")
    values = dict(table)
    if "name" not in values:
        raise ValueError(f"[{where}] needs a name")
    return values.pop("name"), values


def _named(table: dict[str, Any], known: dict[str, Any], where: str) -> tuple[Any, dict[str, Any]]:
    """The thing that `table["name"]` names, and the rest of the table."""
    name, values = _name_and_rest(table, where)
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"[{where}] {name!r} is not known{nearest_name(str(name), known)}")
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
