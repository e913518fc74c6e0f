"""A sample of a federation, on which methods are compared where all of it would take too long."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from coterie.core.federation import Federation
from coterie.core.key import Key
from coterie.storage.packed import Packed

WHO, WHICH = 0, 1  # streams under the key of a sample
PRODUCTS = 500_000  # of columns that a sample for linear models may have
FEWEST = 50  # clients of a sample, where there are so many: larger ones are cut down before others are left out


def sampled(federation: Federation, rows: int, seed: int, products: int | None = None) -> Federation:
    """Whole clients that have about so many training rows together; all clients if they have no more.

    Who is taken follows from the clients' names and the seed. Clients with more than a fiftieth of `rows` (with fewer
    clients than fifty, more than an equal part) are cut down to that, by a draw of their rows, so that a few large
    clients are not the whole sample. Test rows are kept.

    Args:
        federation: The clients.
        rows: How many training rows there may be.
        seed: Of the draw.
        products: How many products of two columns there may be over all clients; None for any number. The time that
            random effects take grows with these. Fifty clients are taken in any case.

    Example:
        >>> import coterie as ct
        >>> federation = ct.data.linear_mixture(clients=100, rows=20, features=2, groups=2, seed=0)
        >>> some = sampled(federation, 1200, seed=0)
        >>> len(some), len(some.train.x)
        (60, 1200)
    """
    sizes, many = federation.train.sizes, len(federation)
    if products is not None:
        many = max(FEWEST, products // federation.train.x[0].numel() ** 2)
    if int(sizes.sum()) <= rows and len(federation) <= many:
        return federation
    most = max(1, rows // min(FEWEST, len(federation)))
    order = Key.of(seed).fold(WHO).shuffle(federation.numbers)
    fit = min(many, int((sizes[order].clamp(max=most).cumsum(0) <= rows).sum()))
    chosen = order[: max(1, fit)].sort().values
    some = federation.select(chosen)
    key = Key.of(seed).fold(WHICH)
    return replace(some, train=Packed.of([_cut(some, i, most, key) for i in range(len(some))]))


def _cut(federation: Federation, i: int, most: int, key: Key) -> tuple[Tensor, Tensor]:
    """A client's training rows, or a draw of as many as there may be."""
    x, y = federation.train.client(i)
    if len(x) <= most:
        return x, y
    drawn = key.fold(int(federation.numbers[i])).shuffle(torch.arange(len(x)))[:most].sort().values
    return x[drawn], y[drawn]
