"""`fit_table`: from one table to the number of groups, the best way to share, and models for every client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from coterie.analysis.attributes import Association, associations, attributes_of
from coterie.analysis.differences import Differences, differences
from coterie.analysis.report import text
from coterie.analysis.ways import Way, scored, shown, unsure
from coterie.core.bars import counting, quietly
from coterie.core.federation import Federation
from coterie.core.method import Method
from coterie.core.task import Source, Task
from coterie.estimators.choice import Problem, choose
from coterie.methods.mixed_effects import MixedEffects
from coterie.models import MLP, Linear
from coterie.runs.candidates import ALL, GROUPS, Simplicity, ways_to_share
from coterie.runs.choosing import compare, with_k
from coterie.runs.comparison import Comparison
from coterie.runs.fit import fit
from coterie.runs.group_count import GroupCount, count_groups
from coterie.runs.run import Run
from coterie.runs.sampling import PRODUCTS, sampled
from coterie.storage.packed import Packed
from coterie.tables.preparation import Preparation
from coterie.tables.rows import Rows, as_pandas, usable
from coterie.tables.target import Kind, Target

COMPARED = 20_000  # training rows on which groups are counted and ways compared; else a sample of the clients
COUNTED = 200_000  # products of two columns, over the clients on which groups are counted
NEW = 0.1  # of the clients that are held out as a whole
ENOUGH = 20  # clients from which on some are
FEW = 5  # rows by which such a client is placed
HIDDEN = 64  # units of the model "mlp"
BY_STEPS = 4_000  # the same for models that are trained by steps
MOST = 4  # groups that are tried where held-out rows must tell how many there are
MODEL, FOUND = "model", "groups"  # folders of runs
STAGES = 5  # of an analysis


@dataclass(frozen=True)
class TableFit:
    """What `fit_table` has found; printing it shows the answers.

    Attributes:
        federation: All clients with all rows, prepared.
        groups: How many groups there are.
        comparison: The candidates on splits of the training rows; None where the method was given.
        ways: Those that were trained on all training rows, with what they come to on test rows and on new clients.
        recommended: The name of the one to take.
        run: The recommended method, trained on all rows of all clients.
        labels: The group of every client (m,), all 0 where there is one.
        unsure: Which clients could as well be in another group (m,).
        differences: What differs between groups; None where there is one.
        associations: Which attributes of clients go with the groups; empty without a table of them.
    """

    federation: Federation
    groups: GroupCount
    comparison: Comparison | None
    ways: tuple[Way, ...]
    recommended: str
    run: Run
    labels: np.ndarray
    unsure: np.ndarray
    differences: Differences | None
    associations: tuple[Association, ...]

    @property
    def preparation(self) -> Preparation:
        """How rows of the table became numbers."""
        assert self.federation.preparation is not None
        return self.federation.preparation

    def way(self, name: str) -> Way | None:
        """One of the ways, None if it was not tried."""
        return next((way for way in self.ways if way.name == name), None)

    def __str__(self) -> str:
        return text(self)

    __repr__ = __str__


def fit_table(
    frame: Any,
    client: str,
    target: str,
    *,
    method: str | Method = "auto",
    k: int | Literal["auto"] = "auto",
    model: str | Source = "linear",
    kind: Kind = "auto",
    time: str | None = None,
    about: Any = None,
    rounds: int = 100,
    seed: int = 0,
    device: str = "auto",
    jobs: int | None = None,
    out: str | Path | None = None,
) -> TableFit:
    """Find out how the clients of a table differ, and train models for them.

    A quarter of every client's rows is held out for testing, and a tenth of the clients as a whole. Everything is
    decided without them. What is recommended is then trained on all rows.

    Args:
        frame: The rows: a table of pandas', or any that narwhals knows, such as those of polars.
        client: The column that says whose a row is.
        target: The column that is to be predicted.
        method: "auto" compares ways to share and takes what `compare` recommends; or the name of a method, such as
            "ifca" or "mixed_effects"; or a method.
        k: The number of groups; "auto" finds it out.
        model: "linear", "mlp" (64 hidden units), or a `torch.nn.Module` or function that builds one.
        kind: What the target is, where it is not to be found out: "number", "log" or "classes".
        time: A column that orders the rows of a client; the last ones are held out.
        about: A table with a row for every client and attributes of it; its column `client` names the client.
        rounds: How many rounds to train at most.
        seed: Of all draws.
        device: "auto", "cpu" or "cuda".
        jobs: How many runs of the comparison at once; None takes one per core.
        out: A folder for the runs on all rows; `write_folder` adds the rest. None keeps nothing.

    Raises:
        ValueError: The table or an option is bad; says what is wrong in one line.
    """
    rows = usable(frame, client, target)
    attributes = None if about is None else attributes_of(as_pandas(about), client, rows.by_client()[0])
    if isinstance(k, int) and not 1 <= k <= (m := len(rows.by_client()[0])):
        raise ValueError(f"k must be from 1 to the number of clients, {m}, got {k}")
    train, new = _divided(rows, client, target, kind, time, seed)
    task = _task(model, train)
    train.check(task)
    options = {"rounds": rounds, "seed": seed, "device": device}
    with counting("looking for groups", STAGES, 0) as bar:
        groups = _groups(k, task, sampled(train, COMPARED, seed, products=COUNTED), options)
        _next(bar, "comparing ways to share")
        if method == "auto":
            comparison = _compared(task, train, groups, k, jobs, options)
            names, methods, recommended = shown(comparison), comparison.methods, comparison.recommended
            groups = groups or _by_comparison(comparison)
        else:
            methods = _given(method, groups, Problem(task, train, rounds, seed, device))
            comparison, recommended = None, list(methods)[1]
            names, groups = list(methods), groups or GroupCount(1, None, "")
        _next(bar, "training on training rows")
        with quietly():
            ways = tuple(scored(name, methods[name], task, train, new, options) for name in names)
            _next(bar, "training on all rows")
            whole = Federation.from_table(frame, client, target, test=0, preparation=train.preparation)
            kept = {"evaluations": 1, **options}
            final = fit(methods[recommended], task, whole, out=_below(out, MODEL), **kept)
            _next(bar, "explaining groups")
            grouped = _grouped(final, groups, methods, lambda m: fit(m, task, whole, out=_below(out, FOUND), **kept))
            labels = np.zeros(len(whole), dtype=np.int64) if grouped is None else grouped.labels
            found = TableFit(
                federation=whole,
                groups=groups,
                comparison=comparison,
                ways=ways,
                recommended=recommended,
                run=final,
                labels=labels,
                unsure=np.zeros(len(whole), dtype=bool) if grouped is None else unsure(grouped),
                differences=None if grouped is None else differences(grouped),
                associations=() if attributes is None else associations(attributes, labels),
            )
            _next(bar, "")
    return found


# --- the parts --------------------------------------------------------------------------------------------------------


def _divided(
    rows: Rows, client: str, target: str, kind: Kind, time: str | None, seed: int
) -> tuple[Federation, Federation | None]:
    """Known clients with training and test rows; and new ones, whose training rows are those that place them."""
    held = _new_clients(rows, seed)
    known = rows.only(~held).frame
    train = Federation.from_table(known, client, target, kind=kind, time=time, seed=seed)
    own = train.preparation
    assert own is not None  # it was made from a table
    if not held.any():
        return train, None
    if own.target.classes:  # new clients may have a class that others have not
        own = own.with_classes(Target.of_rows(rows.frame[target], "classes").classes)
        train = Federation.from_table(known, client, target, time=time, seed=seed, preparation=own)
    each = Federation.from_table(rows.only(held).frame, client, target, test=0, preparation=own)
    return train, _placed_by_few(each)


def _new_clients(rows: Rows, seed: int) -> np.ndarray:
    """Which rows are of clients that are held out as a whole (n,)."""
    names, code = rows.by_client()
    sizes = np.bincount(code)
    able = np.flatnonzero(sizes > 1)
    count = round(NEW * len(names)) if len(names) >= ENOUGH else 0
    chosen = np.random.default_rng(seed).permutation(able)[:count]
    return np.isin(code, chosen)


def _placed_by_few(clients: Federation) -> Federation:
    """The first rows of every client place it, half of them at most; the others score it."""
    pairs = [clients.train.client(i) for i in range(len(clients))]
    cuts = [max(1, min(FEW, len(x) // 2)) for x, _ in pairs]
    train = Packed.of([(x[:n], y[:n]) for (x, y), n in zip(pairs, cuts, strict=True)])
    test = Packed.of([(x[n:], y[n:]) for (x, y), n in zip(pairs, cuts, strict=True)])
    return replace(clients, train=train, test=test)


def _task(model: str | Source, federation: Federation) -> Task:
    own = federation.preparation
    assert own is not None  # it was made from a table
    inputs, outputs = len(own.names), max(1, len(own.target.classes))
    built: Source
    if isinstance(model, str):
        if model not in ("linear", "mlp"):
            raise ValueError(f"model must be 'linear', 'mlp' or a module, got {model!r}")
        built = Linear(inputs, outputs) if model == "linear" else MLP(inputs, HIDDEN, outputs)
    else:
        built = model
    return Task.classifier(built) if own.target.classes else Task.regressor(built)


def _groups(k: int | str, task: Task, federation: Federation, options: dict[str, Any]) -> GroupCount | None:
    if isinstance(k, int):
        return GroupCount(k, True, f"{k} groups, as it was asked for.")
    with quietly():
        return count_groups(task, federation, options["seed"], options["device"])


def _compared(
    task: Task, train: Federation, groups: GroupCount | None, k: int | str, jobs: int | None, options: dict[str, Any]
) -> Comparison:
    rows = COMPARED if groups is not None else BY_STEPS
    some = replace(sampled(train, rows, options["seed"], products=PRODUCTS), test=None)
    most = k if isinstance(k, int) else MOST
    ways = ways_to_share(task, some, groups and groups.count, most)
    return compare(ways, task, some, new=NEW, few=FEW, jobs=jobs, **options)


def _by_comparison(comparison: Comparison) -> GroupCount:
    """The number of groups that held-out rows speak for, among the candidates that have nothing but groups."""
    hard = {n: m for n, m in comparison.methods.items() if Simplicity.of(m).kind in (ALL, GROUPS)}
    among = Comparison(hard, comparison.metric, {n: comparison.cells[n] for n in hard})
    return GroupCount(Simplicity.of(among.method).k, True, among.reason)


def _given(method: str | Method, groups: GroupCount | None, train: Problem) -> dict[str, Method]:
    """The method that was asked for, with as many groups as there are, and one model for all and one each beside it."""
    count = "auto" if groups is None or groups.count == 1 else groups.count
    chosen = choose(method, count, None, train, "fit_table").method
    name = method if isinstance(method, str) else type(method).__name__
    plain = ways_to_share(train.task, train.federation, 1, 1)
    return {"one for all": plain["one for all"], f"{name}, as given": chosen, "one each": plain["one each"]}


def _grouped(
    final: Run, groups: GroupCount, methods: Mapping[str, Method], train: Callable[[Method], Run]
) -> Run | None:
    """The run whose groups are told about: the recommended one's if it has as many, else one of its own."""
    if groups.count == 1:
        return None
    if len(np.unique(final.labels)) == groups.count:
        return final
    name = f"{groups.count} groups"
    method = methods.get(f"{name} of random effects") or methods.get(name) or MixedEffects(k=groups.count)
    return train(with_k(method, groups.count))


def _below(out: str | Path | None, name: str) -> Path | None:
    return None if out is None else Path(out) / name


def _next(bar: Any, what: str) -> None:
    bar.update()
    bar.set_description_str(what)
