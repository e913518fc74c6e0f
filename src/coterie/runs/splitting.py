"""A split of a federation: rows of known clients, and whole clients, on which nothing is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from coterie.core.federation import Federation
from coterie.core.key import Key
from coterie.storage.packed import Packed

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
    key, sizes = Key.of(seed), federation.train.sizes.tolist()
    tested = federation.test.sizes.tolist() if federation.test is not None else [0] * len(sizes)
    order = key.fold(WHO).shuffle(federation.numbers).tolist()
    able = [i for i in order if sizes[i] + tested[i] > 1]  # to be placed by a row and scored on another
    held = set(able[: max(0, min(round(new * len(sizes)), len(sizes) - FEWEST))])
    at, new_at = (torch.tensor([i for i in range(len(sizes)) if (i in held) == out]) for out in (False, True))

    def taken(clients: Tensor, kept: Callable[[int], int]) -> Federation:
        own = [_divided(federation, i, kept(sizes[i]), key.fold(WHICH)) for i in clients.tolist()]
        train, test = (Packed.of([client[part] for client in own]) for part in (0, 1))
        return replace(federation.select(clients), train=train, test=test)

    known = taken(at, (lambda n: n) if any(tested) else (lambda n: n - min(max(1, round(holdout * n)), n - 1)))
    return Split(known, taken(new_at, lambda n: max(1, min(few, n // 2))) if held else None, at, new_at)


def _divided(
    federation: Federation, i: int, kept: int, key: Key
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A client's rows in two parts: so many of its training rows, and all its others."""
    x, y = federation.train.client(i)
    order = torch.randperm(len(x), generator=key.fold(int(federation.numbers[i])).generator())
    first, rest = order[:kept].sort().values, order[kept:].sort().values
    own = federation.test.client(i) if federation.test is not None else (x[:0], y[:0])
    return (x[first], y[first]), (torch.cat([x[rest], own[0]]), torch.cat([y[rest], own[1]]))
