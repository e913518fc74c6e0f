"""A made-up table of stores whose truth is known: how sales respond to price, promotion and weather."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

WEATHER = ("cloudy", "sunny", "rainy")
DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
REGIONS = ("north", "south", "west")
USUAL = {"price": -2.0, "competitor": 1.0, "promotion": 1.5, "display": 1.0, "holiday": 0.0, "temperature": 0.0}
APART = 1.5  # the least distance between the responses of two kinds, in deviations of noise for one of a column
VARIED = 1.0  # how much the responses of kinds vary
LEVEL = 0.3  # how much the levels of stores vary
NOISE = 1.0


class Stores(NamedTuple):
    """The table and its truth.

    Attributes:
        rows: One row per store and day: store, day, weekday, price, competitor, promotion, display, holiday,
            temperature, weather, sales.
        about: One row per store: store, size, region.
        kind: Of every store, in the order of `about` (m,).
        response: Of every kind: how sales respond to one more of each cause, by name (groups, causes).
    """

    rows: pd.DataFrame
    about: pd.DataFrame
    kind: np.ndarray
    response: pd.DataFrame


def stores(stores: int = 200, groups: int = 3, rows: tuple[int, int] = (30, 500), seed: int = 0) -> Stores:
    """Daily sales of stores, of which those of one kind respond alike to prices, promotions, weather and weekdays.

    Every store has a level of sales of its own. Stores of the first kind are mostly large; the region plays no part.

    Args:
        stores: How many.
        groups: Kinds of response.
        rows: Days per store: the fewest and the most. There are more stores with few days than with many.
        seed: Of all draws.

    Example:
        >>> table = stores(stores=10, seed=1)
        >>> len(table.rows.columns), len(table.about), table.response.shape
        (11, 10, (3, 14))
    """
    import pandas as pd

    if not 1 <= groups <= stores:
        raise ValueError(f"stores: groups must be from 1 to {stores}, got {groups}")
    if not 1 <= rows[0] <= rows[1]:
        raise ValueError(f"stores: rows must be two numbers from 1 on, the smaller first, got {rows}")
    rng = np.random.default_rng(seed)
    kind = rng.permutation(np.arange(stores) % groups)
    days = np.exp(rng.uniform(np.log(rows[0]), np.log(rows[1] + 1), stores)).astype(int)
    at = np.repeat(np.arange(stores), days)
    names = np.array([f"store {i:03d}" for i in range(stores)])
    table = _days(rng, len(at))
    table.insert(0, "store", names[at])
    table.insert(1, "day", np.arange(len(at)) - np.repeat(days.cumsum() - days, days))
    causes = _causes(table)
    response = _responses(rng, groups, causes.to_numpy())
    level = rng.normal(20, LEVEL, stores)
    sales = level[at] + (causes.to_numpy() * response[kind[at]]).sum(1) + NOISE * rng.normal(size=len(at))
    size = np.exp(rng.normal(5 + (kind == 0), 0.4)).round()
    about = pd.DataFrame({"store": names, "size": size, "region": rng.choice(REGIONS, stores)})
    return Stores(table.assign(sales=sales.round(3)), about, kind, pd.DataFrame(response, columns=causes.columns))


def _days(rng: np.random.Generator, n: int) -> pd.DataFrame:
    """What days are like: the same for stores of every kind."""
    import pandas as pd

    def often(share: float) -> np.ndarray:
        return np.where(rng.random(n) < share, "yes", "no")

    return pd.DataFrame(
        {
            "weekday": rng.choice(DAYS, n),
            "price": rng.normal(3, 0.5, n).round(2),
            "competitor": rng.normal(3, 0.5, n).round(2),
            "promotion": often(0.3),
            "display": often(0.4),
            "holiday": often(0.1),
            "temperature": rng.normal(15, 8, n).round(1),
            "weather": rng.choice(WEATHER, n, p=[0.5, 0.3, 0.2]),
        }
    )


def _causes(table: pd.DataFrame) -> pd.DataFrame:
    """What sales respond to, as numbers: flags are 1 for yes; days and weather are compared with the first."""
    import pandas as pd

    flags = {name: (table[name] == "yes").astype(float) for name in ("promotion", "display", "holiday")}
    numbers = {"price": table["price"] - 3, "competitor": table["competitor"] - 3}
    words = {word: (table[name] == word).astype(float) for name, all_ in
             (("weather", WEATHER), ("weekday", DAYS)) for word in all_[1:]}  # fmt: skip
    return pd.DataFrame({**numbers, **flags, "temperature": (table["temperature"] - 15) / 8, **words})


def _responses(rng: np.random.Generator, groups: int, causes: np.ndarray) -> np.ndarray:
    """Responses of kinds that are far enough apart: a response counts by how much it moves sales."""
    usual = np.zeros(causes.shape[1])
    usual[: len(USUAL)] = list(USUAL.values())
    while True:
        drawn = rng.normal(usual, VARIED, (groups, causes.shape[1]))
        apart = np.linalg.norm((drawn[:, None] - drawn) * causes.std(0), axis=2)[np.triu_indices(groups, 1)]
        if apart.min(initial=np.inf) > APART:
            return drawn
