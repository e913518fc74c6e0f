"""Which attributes of clients go with the groups: income with one, size with another?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from coterie.tables.column_sums import ColumnSums, as_words
from coterie.tables.columns import Category, Number, recognise
from coterie.tables.rows import check_columns

FEWEST = 5  # clients with a value, for anything to be said


class Association(NamedTuple):
    """An attribute and the groups.

    Attributes:
        name: Of the attribute.
        strength: From 0, nothing, to 1: of numbers the share of the ranks' variation that is between groups (ε² of
            Kruskal and Wallis), of words Cramér's V.
        p: How likely so much would be by chance, for all attributes together (Holm's correction).
        by_group: The median, or the commonest word, in every group.
        clients: Clients with a value.
    """

    name: str
    strength: float
    p: float
    by_group: tuple[str, ...]
    clients: int


def attributes_of(about: Any, client: str, ids: Sequence[str]) -> Any:
    """The attributes of clients, one row each in their order; empty where the table lacks a client.

    Args:
        about: A pandas table with a row for every client.
        client: Its column that names the client; where there is none of that name, the first.
        ids: The clients.

    Raises:
        ValueError: A client has two rows, or none of the clients is in the table.
    """
    key = next((c for c in about.columns if str(c).lower() == client.lower()), about.columns[0])
    check_columns(about, [key])
    names = as_words(about[key])
    if len(set(names)) < len(names):
        twice = next(n for i, n in enumerate(names) if n in set(names[:i]))
        raise ValueError(f"attributes: client '{twice}' has several rows; give one row for every client")
    at = {name: i for i, name in enumerate(names)}
    if not any(name in at for name in ids):
        raise ValueError(f"attributes: column '{key}' names none of the clients, such as '{ids[0]}'")
    return about.set_axis(names).drop(columns=key).reindex(list(ids)).reset_index(drop=True)


def associations(attributes: Any, labels: np.ndarray) -> tuple[Association, ...]:
    """Test every attribute, the strongest first; none where there is one group.

    Args:
        attributes: Those of every client, as `attributes_of` has them.
        labels: The group of each client (m,).
    """
    if len(np.unique(labels)) < 2:
        return ()
    found = [_tested(name, attributes[name], labels) for name in attributes.columns]
    return _corrected([each for each in found if each is not None])


def _tested(name: str, values: Any, labels: np.ndarray) -> Association | None:
    column = recognise(str(name), ColumnSums.of(values, np.zeros(len(values)))).column
    if isinstance(column, Number):
        return _numbers(str(name), column.encode(values)[:, 0], labels)
    return _words(str(name), as_words(values), labels) if isinstance(column, Category) else None


def _numbers(name: str, values: np.ndarray, labels: np.ndarray) -> Association | None:
    from scipy.stats import kruskal

    there = ~np.isnan(values)
    values, labels = values[there], labels[there]
    groups = [values[labels == j] for j in np.unique(labels)]
    if len(values) < FEWEST or len(groups) < 2 or len(np.unique(values)) < 2:
        return None
    found = kruskal(*groups)
    medians = tuple(f"{np.median(values[labels == j]):.4g}" for j in np.unique(labels))
    return Association(name, float(found.statistic / (len(values) - 1)), float(found.pvalue), medians, len(values))


def _words(name: str, words: np.ndarray, labels: np.ndarray) -> Association | None:
    from scipy.stats import chi2_contingency

    there = words != ""
    words, labels = words[there], labels[there]
    levels, groups = np.unique(words), np.unique(labels)
    if len(words) < FEWEST or len(levels) < 2 or len(groups) < 2:
        return None
    table = np.array([[((labels == j) & (words == level)).sum() for level in levels] for j in groups])
    found: Any = chi2_contingency(table)
    strength = np.sqrt(found.statistic / len(words) / (min(table.shape) - 1))
    common = tuple(str(levels[row.argmax()]) for row in table)
    return Association(name, float(strength), float(found.pvalue), common, len(words))


def _corrected(found: list[Association]) -> tuple[Association, ...]:
    """Holm's correction: the smallest p times how many there are, the next times one fewer, and never falling."""
    order = sorted(found, key=lambda each: each.p)
    p, least = [], 0.0
    for i, each in enumerate(order):
        least = max(least, min(1.0, each.p * (len(order) - i)))
        p.append(least)
    corrected = [each._replace(p=value) for each, value in zip(order, p, strict=True)]
    return tuple(sorted(corrected, key=lambda each: (each.p, -each.strength)))
