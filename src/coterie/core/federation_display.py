"""What a federation shows of itself. It reads a few rows at most: there may be more than fit into memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie.core.card import Card
from coterie.storage.packed import Packed

if TYPE_CHECKING:
    from coterie.core.federation import Federation

SAMPLE = 256  # rows at most whose targets are looked at
NAMES, LONG = 5, 24  # clients at most that are named, and letters of a name


def card(federation: Federation) -> Card:
    """The clients, their rows and targets, and what is known about them."""
    m, train, test = len(federation), federation.train, federation.test
    source = f" ({federation.source['name']})" if "name" in federation.source else ""
    rows = [
        ("train", _rows(train)),
        ("test", "none: clients are scored on their training rows" if test is None else _rows(test)),
        ("a row", _kind(train.x)),
        ("targets", _targets(train.y)),
        ("true groups", _groups(federation.groups)),
        ("names", _names(federation.ids, m)),
    ]
    return Card(f"Federation of {m:,} client{'' if m == 1 else 's'}{source}", rows)


def _rows(part: Packed) -> str:
    sizes = part.sizes
    low, middle, high = int(sizes.min()), int(sizes.median()), int(sizes.max())
    each = f"{low:,} per client" if low == high else f"{low:,} to {high:,} per client, median {middle:,}"
    return f"{int(part.offsets[-1] - part.offsets[0]):,} rows, {each}"


def _kind(values: Tensor) -> str:
    """The type and the shape of a row."""
    name, shape = str(values.dtype).removeprefix("torch."), tuple(values.shape[1:])
    return f"{name}, shape {shape}" if shape else name


def _targets(y: Tensor) -> str:
    few = len(y) > SAMPLE
    some = y[torch.linspace(0, len(y) - 1, SAMPLE).long()] if few else y
    seen = f" ({SAMPLE} rows looked at)" if few else ""
    low, high = some.min().item(), some.max().item()
    if y.is_floating_point():
        return f"{_kind(y)}, from {low:.3g} to {high:.3g}{seen}"
    if low == high == -1:
        return "not known"
    if y.dim() > 1:
        return f"{_kind(y)}, from {low} to {high}{seen}"
    count = len(some.unique())
    return f"{_kind(y)}, {count} class{'' if count == 1 else 'es'} from {low} to {high}{seen}"


def _groups(groups: Tensor | None) -> str:
    if groups is None:
        return "not known"
    sizes = groups.unique(return_counts=True)[1]
    low, high = int(sizes.min()), int(sizes.max())
    each = f"{low:,} client{'' if high == 1 else 's'} each" if low == high else f"{low:,} to {high:,} clients"
    return f"{len(sizes):,}, of {each}"


def _names(ids: tuple[str, ...] | None, m: int) -> str:
    if ids is None:
        return "none; clients are numbered from 0"
    short = [name if len(name) <= LONG else f"{name[: LONG - 1]}…" for name in ids[:NAMES]]
    return ", ".join([*short, *["…"] * (m > NAMES)])
