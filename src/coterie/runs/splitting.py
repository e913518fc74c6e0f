"""A split of a federation: rows of known clients, and whole clients, on which nothing is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from coterie.core.federation import Federation
from coterie.core.key import Key
from coterie.storage.packed import Packed, Pair

WHO, WHICH = 0, 1  # streams under a split's key
FEWEST = 2  # clients that are left to train on


@dataclass(frozen=True)
class Split:
    """What is trained on and what scores; both parts have the rest of each client's rows as their test rows.

    Attributes:
        known: The clients that are trained on.
        new: The clients that are held out as a whole, with the few rows by which they are placed; None without any.
        at: Positions of the known clients in the whole federation.
        new_at: Those of the others.
    """

    known: Federation
    new: Federation | None
    at: Tensor
    new_at: Tensor


def split(federation: Federation, seed: int, holdout: float, new: float, few: int) -> Split:
    """Hold out rows of known clients and whole clients. Who and which follows from the clients' names and the seed.

    Consecutive seeds take turns, as folds do: they hold out other rows and other clients until all had theirs, and then
    draw anew. Means over several splits vary less for it.

    A federation with test rows of its own keeps them: they are what known clients' held-out rows are. Those of a client
    that is held out score it together with the training rows by which it is not placed.

    Args:
        federation: The clients.
        seed: Of the draw.
        holdout: The share of a known client's rows that is held out: at least one, and not all. A client with a single
            row is trained on and not scored.
        new: The share of the clients that is held out as a whole.
        few: The rows by which such a client is placed; of one with few rows, half of them at most.
    """
    sizes, m = federation.train.sizes.tolist(), len(federation)
    tested = federation.test.sizes.tolist() if federation.test is not None else [0] * m
    able = torch.tensor([i for i in range(m) if sizes[i] + tested[i] > 1])  # to be placed by a row, and scored
    count = max(0, min(round(new * m), m - FEWEST, len(able)))
    held = set(able[_turn(federation.numbers[able], count, seed, WHO)].tolist()) if count else set()
    at, new_at = (torch.tensor([i for i in range(m) if (i in held) == out]) for out in (False, True))

    def taken(clients: Tensor, out: Callable[[int], int]) -> Federation:
        own = [_divided(federation, i, out(sizes[i]), seed) for i in clients.tolist()]
        train, test = (Packed.of([client[part] for client in own]) for part in (0, 1))
        return replace(federation.select(clients), train=train, test=test)

    known = taken(at, (lambda n: 0) if any(tested) else (lambda n: min(max(1, round(holdout * n)), n - 1)))
    return Split(known, taken(new_at, lambda n: n - max(1, min(few, n // 2))) if held else None, at, new_at)


def _turn(numbers: Tensor, count: int, seed: int, *stream: int) -> Tensor:
    """The positions of so many of these numbers whose turn it is."""
    turns = len(numbers) // count
    order = Key.of(seed // turns).fold(*stream).shuffle(numbers)
    return order[seed % turns * count :][:count]


def _divided(federation: Federation, i: int, out: int, seed: int) -> tuple[Pair, Pair]:
    """A client's rows in two parts: its training rows but for so many, and these with its test rows."""
    x, y = federation.train.client(i)
    held = torch.zeros(len(x), dtype=torch.bool)
    if out:
        held[_turn(torch.arange(len(x)), out, seed, WHICH, int(federation.numbers[i]))] = True
    own = federation.test.client(i) if federation.test is not None else (x[:0], y[:0])
    return (x[~held], y[~held]), (torch.cat([x[held], own[0]]), torch.cat([y[held], own[1]]))
