"""Real panels: tables in which shops, states, men or users have several rows each, and are the clients."""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from coterie.core.federation import Federation
from coterie.core.key import Key
from coterie.data.source import NO_DATA, dataset, folder
from coterie.storage.names import nearest_name
from coterie.tables.reading import open_text

Columns = dict[str, np.ndarray]

_SUFFIXES = (".csv", ".csv.xz", ".csv.gz")
_RDATASETS = "https://vincentarelbundock.github.io/Rdatasets/csv"
_BRAND = 1  # of orange juice: Tropicana Premium, 64 oz.
_GENRES = ("Drama", "Comedy", "Thriller", "Action", "Romance")  # the five with the most ratings


class Panel(NamedTuple):
    """A table, and what of it is learnt.

    Attributes:
        client: The column that names the client.
        rows: How many rows a client trains on, at most.
        numbers: The columns that hold numbers.
        words: The columns that hold words.
        model: Makes the target, which comes first, and the features.
        export: How to write the table in R.
        download: Where a copy can be downloaded, where there is one.
        only: The value of a column that the rows must have; all are taken where it is empty.
        old: Other names that columns have in some versions, and the name here.
    """

    client: str
    rows: int
    numbers: tuple[str, ...]
    words: tuple[str, ...]
    model: Callable[[Columns], Columns]
    export: str
    download: str = ""
    only: Mapping[str, float] = {}
    old: Mapping[str, str] = {}


@dataset
def panel(table: str, seed: int = 0, rows: int | None = None) -> Federation:
    """A real table as a federation, for linear regression: a client per shop, state, man or user; no groups are known.

    Half of each client's rows, at random, are test rows; of the others it trains on `rows` at most. The target and the
    features have mean 0 and deviation 1 over the training rows of all clients together. There is no column of ones: the
    model's bias is the intercept.

    | table | clients | target | features |
    |---|---|---|---|
    | `"cheese"` | 88 shops, 12 weeks | log volume | display, log price |
    | `"cigar"` | 46 states, 15 years | log sales | log price, log price nearby, log income (deflated), year |
    | `"males"` | 545 men, 4 years | log wage | experience and its square, union, married, school |
    | `"orange_juice"` | 83 stores, 30 weeks | log sales of one brand | log price, deal, feature |
    | `"movielens"` | 671 users, up to 20 ratings | rating | year, five genres |

    The tables are those of the R packages bayesm, Ecdat and dslabs. They are not downloaded: put `cheese.csv`,
    `cheese.csv.xz` or `cheese.csv.gz` into the folder `tables` of the data folder. Other columns are passed over, and
    so are rows in which a value is missing.

    Args:
        table: Name of the table.
        seed: Seed of the split into training and test rows.
        rows: The most rows that a client trains on; None takes the number in the list above.
    """
    if table not in PANELS:
        raise ValueError(f"panel: there is no table '{table}'{nearest_name(table, PANELS)}")
    spec = PANELS[table]
    if (most := spec.rows if rows is None else rows) < 1:
        raise ValueError(f"panel: rows must be at least 1, got {rows}")
    path = file_of(table)
    read = _read(path, spec)
    columns = spec.model(read)
    names, client = np.unique(read[spec.client], return_inverse=True)
    own = [_shuffled(np.flatnonzero(client == i), Key.of(seed).fold(i)) for i in range(len(names))]
    train, test = [at[: len(at) // 2][:most] for at in own], [at[len(at) // 2 :] for at in own]
    values = _standardised(columns, torch.cat(train), path)
    x, y = values[:, 1:], values[:, 0]
    return Federation.from_clients(
        [(x[at], y[at]) for at in train],
        [(x[at], y[at]) for at in test],
        ids=[str(name) for name in names],
        columns=list(columns)[1:],
    )


def _shuffled(rows: np.ndarray, key: Key) -> Tensor:
    return torch.from_numpy(rows)[torch.randperm(len(rows), generator=key.generator())]


def file_of(table: str) -> Path:
    """The file of a table in the data folder.

    Args:
        table: Name of the table.
    """
    spec = PANELS[table]
    for path in (folder() / "tables" / f"{table}{suffix}" for suffix in _SUFFIXES):
        if path.exists():
            return path
    copy = f", or download {spec.download} as that file" if spec.download else ""
    raise ValueError(
        f"tables/{table}.csv (or .csv.xz, .csv.gz) is not in {folder()}, and is not downloaded by itself: write it in "
        f"R by {spec.export}{copy}; {NO_DATA}"
    )


def _read(path: Path, spec: Panel) -> Columns:
    """The columns that are used, of the rows that have a value in each."""
    import pandas as pd  # takes half a second, and only tables need it

    try:
        with open_text(path) as file:
            frame: Any = pd.read_csv(file)
    except (ValueError, OSError, EOFError, lzma.LZMAError, zlib.error) as error:  # pandas' own errors are ValueErrors
        raise ValueError(f"{path} is not a table of comma-separated values ({error})") from error
    frame = frame.rename(columns={old: new for old, new in spec.old.items() if new not in frame})
    used = list(dict.fromkeys((spec.client, *spec.numbers, *spec.words)))
    if missing := [name for name in used if name not in frame]:
        raise ValueError(f"{path} has no column '{missing[0]}'; its columns are {', '.join(map(str, frame))}")
    for name in spec.numbers:
        if not pd.api.types.is_numeric_dtype(frame[name]):
            raise ValueError(f"{path}: column '{name}' holds something that is not a number")
    for name, value in spec.only.items():
        frame = frame[frame[name] == value]
    whole = frame[used].dropna()
    return {name: whole[name].to_numpy(float if name in spec.numbers else str) for name in used}


def _standardised(columns: Columns, train: Tensor, path: Path) -> Tensor:
    """All columns side by side, each with mean 0 and deviation 1 over the training rows."""
    values = torch.stack([torch.tensor(column, dtype=torch.float64) for column in columns.values()], 1)
    own = values[train]
    for name, column, spread in zip(columns, values.T, own.std(0, correction=0), strict=True):
        if not bool(column.isfinite().all()):
            raise ValueError(f"{path}: '{name}' is not finite in all rows; is it a logarithm of 0 or less?")
        if not spread > 0:
            raise ValueError(f"{path}: '{name}' is the same in all training rows")
    return ((values - own.mean(0)) / own.std(0, correction=0)).float()


# --- target and features ----------------------------------------------------------------------------------------------


def _log(column: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):  # what comes of it is refused
        return np.log(column)


def _cheese(t: Columns) -> Columns:
    return {"log volume": _log(t["VOLUME"]), "display": t["DISP"], "log price": _log(t["PRICE"])}


def _cigar(t: Columns) -> Columns:
    """The demand equation of Baltagi and Levin; prices and incomes are deflated, and the year is for common trends."""
    real = {name: _log(t[name] / t["cpi"]) for name in ("price", "pimin", "ndi")}
    return {
        "log sales": _log(t["sales"]),
        "log price": real["price"],
        "log price nearby": real["pimin"],
        "log income": real["ndi"],
        "year": t["year"],
    }


def _males(t: Columns) -> Columns:
    return {
        "log wage": t["wage"],  # which is a logarithm already
        "experience": t["exper"],
        "experience²": (t["exper"] - t["exper"].mean()) ** 2,  # about the mean, or it is nearly the experience itself
        "union": t["union"] == "yes",
        "married": t["married"] == "yes",
        "school": t["school"],
    }


def _orange_juice(t: Columns) -> Columns:
    return {
        "log sales": t["logmove"], "log price": _log(t[f"price{_BRAND}"]), "deal": t["deal"], "feature": t["feat"],
    }  # fmt: skip


def _movielens(t: Columns) -> Columns:
    genres = {g: np.char.find(t["genres"].astype(str), g) >= 0 for g in _GENRES}
    return {"rating": t["rating"], "year": t["year"], **genres}


PANELS = {
    "cheese": Panel(
        client="RETAILER",
        rows=12,
        numbers=("VOLUME", "DISP", "PRICE"),
        words=(),
        model=_cheese,
        export='data(cheese, package = "bayesm"); write.csv(cheese, "cheese.csv")',
    ),
    "cigar": Panel(
        client="state",
        rows=15,
        numbers=("year", "sales", "price", "pimin", "ndi", "cpi"),
        words=(),
        model=_cigar,
        export='data(Cigar, package = "Ecdat"); write.csv(Cigar, "cigar.csv")',
        download=f"{_RDATASETS}/Ecdat/Cigar.csv",
    ),
    "males": Panel(
        client="nr",
        rows=4,
        numbers=("wage", "exper", "school"),
        words=("union", "married"),
        model=_males,
        export='data(Males, package = "Ecdat"); write.csv(Males, "males.csv")',
        download=f"{_RDATASETS}/Ecdat/Males.csv",
        old={"maried": "married"},
    ),
    "orange_juice": Panel(
        client="store",
        rows=30,
        numbers=("brand", "logmove", f"price{_BRAND}", "deal", "feat"),
        words=(),
        model=_orange_juice,
        export='data(orangeJuice, package = "bayesm"); write.csv(orangeJuice$yx, "orange_juice.csv")',
        only={"brand": _BRAND},
    ),
    "movielens": Panel(
        client="userId",
        rows=20,
        numbers=("rating", "year"),
        words=("genres",),
        model=_movielens,
        export='data(movielens, package = "dslabs"); write.csv(movielens, "movielens.csv")',
    ),
}
