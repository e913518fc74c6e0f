"""Runs beside each other, read from their folders: those that differ only in their seed are one group."""

from __future__ import annotations

import json
import os
import re
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from coterie.runs.folder import finished, is_run, read_config, read_history, read_result

NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)")
SEED = "run.seed"


class Spread(NamedTuple):
    """A figure over several runs.

    Attributes:
        mean: Its mean.
        sd: The standard deviation of the sample; None for a single run.
    """

    mean: float
    sd: float | None

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Summarise one value per run.

        Args:
            values: The values.

        Example:
            >>> Spread.of([1.0, 2.0, 3.0])
            Spread(mean=2.0, sd=1.0)
        """
        listed = list(values)
        return cls(statistics.fmean(listed), statistics.stdev(listed) if len(listed) > 1 else None)


@dataclass(frozen=True)
class _Finished:
    """A finished run.

    Attributes:
        path: Its folder.
        settings: Its configuration by dotted name, and where it was computed; without the seed.
        seed: The seed.
        result: Its result.json.
        history: Its rounds.
    """

    path: Path
    settings: dict[str, Any]
    seed: int | None
    result: dict[str, Any]
    history: list[dict[str, Any]]

    @property
    def found(self) -> int:
        """How many clusters have members at the end."""
        return self.history[-1]["groups"] if self.history else self.result["clusters"]

    @property
    def curve(self) -> np.ndarray:
        """The rounds in which all clients were scored, and their scores (n, 2); the last round always is one."""
        metric, last = self.result["metric"], len(self.history)
        scored = [(row["round"], row[metric]) for row in self.history if row.get(metric) is not None]
        if not scored or scored[-1][0] != last:  # it stopped early
            scored.append((last, self.result["score"]))
        return np.array(scored)

    @property
    def key(self) -> str:
        """What runs of one group have in common."""
        return json.dumps([self.settings, self.result["metric"]], sort_keys=True)


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed.

    Attributes:
        runs: The runs, one per seed.
        differing: Which settings tell the groups of the comparison apart, by dotted name, and this group's values. A
            method without the setting has no value.
    """

    runs: list[_Finished]
    differing: dict[str, Any]

    @property
    def method(self) -> str:
        """The name of the method."""
        return self.runs[0].settings["algorithm.name"]

    @property
    def metric(self) -> str:
        """The name of the score."""
        return self.runs[0].result["metric"]

    @property
    def settings(self) -> str:
        """What tells the group apart, for tables and pictures."""
        return " ".join(f"{key}={short(value)}" for key, value in _shortened(self.differing).items())

    def spread(self, figure: str) -> Spread | None:
        """Summarise a figure of the results over the seeds.

        Args:
            figure: A key of result.json, or "found", the number of clusters that have members.

        Returns:
            The mean and the standard deviation; None where the runs do not know the figure.
        """
        values = [run.found if figure == "found" else run.result.get(figure) for run in self.runs]
        return None if None in values else Spread.of(v for v in values if v is not None)

    def curve(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Return the rounds, the mean score after each, and its standard deviation, None for a single run.

        A run that stopped early keeps its last score.
        """
        own = [run.curve for run in self.runs]
        begin = max(scored[0, 0] for scored in own)
        rounds = np.unique(np.concatenate([scored[:, 0] for scored in own]))
        rounds = rounds[rounds >= begin]
        scores = np.array([np.interp(rounds, scored[:, 0], scored[:, 1]) for scored in own])
        return rounds, scores.mean(0), scores.std(0, ddof=1) if len(own) > 1 else None

    def as_dict(self) -> dict[str, Any]:
        """Return the group as plain values, for JSON."""
        figures = {
            name: None if (spread := self.spread(figure)) is None else spread._asdict()
            for name, figure in {"score": "score", "ari": "ari", "clusters": "found", "seconds": "seconds",
                                 "bytes_down": "bytes_down", "bytes_up": "bytes_up"}.items()
        }  # fmt: skip
        return {
            "method": self.method,
            "settings": self.differing,
            "metric": self.metric,
            "seeds": [run.seed for run in self.runs],
            **figures,
            "runs": [str(run.path) for run in self.runs],
        }


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """Return run folders, each once.

    Args:
        paths: Run folders, and folders that contain run folders at any depth.

    Raises:
        ValueError: A folder neither is nor contains a run folder.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        runs = _within(path, set()) if path.is_dir() else []
        if not runs:
            raise ValueError(f"{path} is not a run folder: it has no config.toml, and contains no run folder")
        for run in runs:
            found.setdefault(run.resolve(), run)
    return list(found.values())


def is_finished(path: Path) -> bool:
    """Return whether a folder holds a run with a result.

    Args:
        path: The run folder.
    """
    return finished(path)


def group_runs(paths: Iterable[Path]) -> list[Group]:
    """Group finished runs by all but their seed.

    A run with the configuration and the seed of another one (such as the same run of another sweep) is in a group of
    its own, which is told apart by its folder.

    Args:
        paths: The run folders.
    """
    groups: dict[tuple[str, int], list[_Finished]] = {}
    repeated: Counter[tuple[str, int | None]] = Counter()
    for path in paths:
        run = _read(path)
        groups.setdefault((run.key, repeated[run.key, run.seed]), []).append(run)
        repeated[run.key, run.seed] += 1
    alike = Counter(key for key, _ in groups)
    configs: dict[str, list[dict[str, Any]]] = {}  # by metric: only runs of one metric are compared
    for runs in groups.values():
        configs.setdefault(runs[0].result["metric"], []).append(runs[0].settings)
    names = {metric: _differing(own) for metric, own in configs.items()}
    return [
        Group(runs, _told_apart(runs, names[runs[0].result["metric"]], by_folder=alike[key] > 1))
        for (key, _), runs in groups.items()
    ]


def flattened(tables: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a configuration by the names of their table and key.

    Args:
        tables: The configuration.

    Example:
        >>> flattened({"algorithm": {"name": "ifca", "k": 4}, "run": {"rounds": 3}})
        {'algorithm.name': 'ifca', 'algorithm.k': 4, 'run.rounds': 3}
    """
    return {f"{table}.{key}": value for table, values in tables.items() for key, value in values.items()}


def _shortened(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings, given by dotted name, by key alone where no other table has the same key.

    Example:
        >>> _shortened({"algorithm.k": 4, "algorithm.lr": 0.1, "data.k": 3})
        {'algorithm.k': 4, 'lr': 0.1, 'data.k': 3}
    """
    ends = Counter(_key(name) for name in settings)
    return {_key(name) if ends[_key(name)] == 1 else name: value for name, value in settings.items()}


def short(value: Any) -> str:
    """Return a setting in few characters.

    Args:
        value: A plain value, or a table with a name.

    Example:
        >>> short({"name": "farthest_first", "steps": 50}), short([64, 32, 10])
        ('farthest_first(steps=50)', '64-32-10')
    """
    if isinstance(value, dict):
        rest = ", ".join(f"{k}={short(v)}" for k, v in value.items() if k != "name")
        return f"{value.get('name', '')}({rest})"
    if isinstance(value, list):
        return "-".join(map(short, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _within(path: Path, seen: set[Path]) -> list[Path]:
    """List the run folders in a folder; k=10 comes after k=2. Links may lead back to folders that were seen."""
    if is_run(path):
        return [path]
    seen.add(path.resolve())
    below = [p for p in path.iterdir() if p.is_dir() and not p.name.startswith(".")]
    return [run for p in sorted(below, key=_in_order) if p.resolve() not in seen for run in _within(p, seen)]


def _in_order(path: Path) -> list[tuple[float, str]]:
    return [(float(part), "") if i % 2 else (0.0, part) for i, part in enumerate(NUMBER.split(path.name))]


def _read(path: Path) -> _Finished:
    result = read_result(path)
    settings = flattened(read_config(path))
    where = {f"run.{key}": result[key] for key in ("executor", "device") if key in result}
    seed = settings.pop(SEED, None)
    return _Finished(path, {**settings, **where}, seed, result, read_history(path))


def _differing(configs: list[dict[str, Any]]) -> list[str]:
    """Name the settings that tell configurations apart, in their order.

    A setting that only some have tells apart those of the same method (or data set, or kind of task): other methods
    cannot have it.
    """
    names = list(dict.fromkeys(name for config in configs for name in config if name != "algorithm.name"))
    return [name for name in names if _tells_apart(name, configs)]


def _tells_apart(name: str, configs: list[dict[str, Any]]) -> bool:
    table = name.partition(".")[0]
    owned: dict[Any, set[str | None]] = {}
    for config in configs:
        owner = config.get(f"{table}.name", config.get(f"{table}.kind"))
        owned.setdefault(owner, set()).add(json.dumps(config[name]) if name in config else None)
    return any(len(values) > 1 for values in owned.values()) or len(set().union(*owned.values()) - {None}) > 1


def _told_apart(runs: list[_Finished], names: list[str], *, by_folder: bool) -> dict[str, Any]:
    """Return what tells the runs of a group apart from others: their values of some settings, perhaps their folder."""
    values = {name: runs[0].settings[name] for name in names if name in runs[0].settings}
    folder = str(runs[0].path) if len(runs) == 1 else os.path.commonpath([run.path for run in runs])
    return {**values, "folder": folder} if by_folder else values


def _key(name: str) -> str:
    return name.partition(".")[2] or name
