"""The rows of many clients, packed into one array, and the checks of rows that users pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from coterie.storage.pages import Pages

Array = np.ndarray | Tensor
Name = Callable[[int], str]  # the name of client i in messages

PIECE = 8 * 2**20  # bytes of rows that are processed at a time


def raw_bytes(x: Tensor) -> bytes:
    """The numbers of a tensor as bytes, in the order of its axes, wherever they lie in memory.

    Args:
        x: The tensor.

    Example:
        >>> raw_bytes(torch.tensor([[97, 98]], dtype=torch.uint8).T)
        b'ab'
    """
    in_order = x.cpu().clone(memory_format=torch.contiguous_format)  # `contiguous` leaves an axis of length 1 as it is
    return in_order.reshape(-1).view(torch.uint8).numpy().tobytes()


class Packed(NamedTuple):
    """The rows of all clients one after the other; client i owns rows offsets[i] to offsets[i+1]."""

    x: Tensor
    y: Tensor
    offsets: Tensor  # (m+1,)
    pages: tuple[Pages, Pages] | None = None  # of x and y, if they are files mapped into memory

    @property
    def sizes(self) -> Tensor:
        """Number of rows of each client (m,)."""
        return self.offsets.diff()

    def client(self, i: int) -> tuple[Tensor, Tensor]:
        """Return the rows (x, y) of one client, as views.

        Args:
            i: Index of the client.
        """
        rows = slice(int(self.offsets[i]), int(self.offsets[i + 1]))
        return self.x[rows], self.y[rows]

    def clients(self, first: int, last: int) -> Packed:
        """Return the rows of a range of clients, as views.

        Args:
            first: Index of the first client.
            last: Index after the last client.
        """
        own = self.offsets[first : last + 1]
        rows = slice(int(own[0]), int(own[-1]))
        return Packed(self.x[rows], self.y[rows], own - own[0])

    def pieces(self, size: int = PIECE) -> Iterator[tuple[int, Packed]]:
        """Iterate over all clients in pieces: yield the index of a piece's first client, and the clients' rows.

        Memory of rows that are mapped from a file is released before the next piece.

        Args:
            size: Approximate number of bytes of a piece.

        Example:
            >>> rows = Packed(torch.zeros(6, 2), torch.zeros(6), torch.tensor([0, 2, 3, 6]))
            >>> [(first, piece.sizes.tolist()) for first, piece in rows.pieces(size=40)]
            [(0, [2, 1]), (2, [3])]
        """
        rows = size // max(1, self.x[:1].nbytes + self.y[:1].nbytes)
        first, m = 0, len(self.offsets) - 1
        while first < m:
            start = int(self.offsets[first])
            fit = int(torch.searchsorted(self.offsets, start + rows, right=True)) - 1
            last = max(first + 1, fit)
            yield first, self.clients(first, last)
            self.forget(start, int(self.offsets[last]))
            first = last

    def forget(self, start: int, stop: int) -> None:
        """Release the memory of a range of rows, if they are mapped from a file.

        Args:
            start: The first row.
            stop: The row after the last.
        """
        for values, pages in zip((self.x, self.y), self.pages or (), strict=False):
            each = values[:1].nbytes
            pages.forget(start * each, stop * each)

    @classmethod
    def of(cls, clients: Sequence[tuple[Array, Array] | Packed]) -> Packed:
        """Pack the rows of several clients.

        Args:
            clients: For each client a pair (x, y), or pieces of several clients each.
        """
        parts = [c if isinstance(c, Packed) else cls.one(*c) for c in clients]
        sizes = torch.cat([torch.zeros(1, dtype=torch.long), *(p.sizes for p in parts)])
        return cls(torch.cat([p.x for p in parts]), torch.cat([p.y for p in parts]), sizes.cumsum(0))

    @classmethod
    def one(cls, x: Array, y: Array) -> Packed:
        """Pack the rows of a single client.

        Args:
            x: The rows.
            y: The target of each row.
        """
        return cls(torch.as_tensor(x), torch.as_tensor(y), torch.tensor([0, len(x)]))


Pair = tuple[Tensor, Tensor]  # rows and their targets
Client = tuple[Array, Array | None] | Packed  # one client's (x, y), with None if y is unknown, or many clients
Read = Callable[[Any, str, str], Sequence[Pair]]  # one client's rows in pieces, from what a user passes and its name


def client_name(i: int, names: Sequence[str] | None) -> str:
    """Return the name of a client for messages.

    Args:
        i: Index of the client.
        names: Names of the clients, or None if they have none.
    """
    return f"client {i}" if names is None or i >= len(names) else f"client '{names[i]}'"


def take_in(clients: Iterable[Any], name: Name, what: str, read: Read, like: Pair | None = None) -> Iterator[Packed]:
    """Yield the clients that a user passes, after checking that their types and shapes agree with the first one's.

    Args:
        clients: The clients, each in any form that `read` takes.
        name: Returns the name of client i, for messages.
        what: What messages call the rows: "rows" or "test rows".
        read: Returns the rows and targets of one client, in pieces: see `coterie.storage.clients.Reader.read`.
        like: Rows whose type and shape the x of every client must have, with targets; None takes the first client's.

    Raises:
        ValueError: A client does not agree with the first; the message names it.
    """
    i, targets = 0, None
    for given in clients:
        who = name(i)
        x, y = _whole(read(given, who, what), like, who, what)
        like, targets = (x, y) if like is None else like, y if targets is None else targets
        if y.dtype != targets.dtype or y.shape[1:] != targets.shape[1:]:
            raise ValueError(f"{who}: its targets are {_kind(y)}, those of {name(0)} {_kind(targets)}")
        if len(x) != len(y):
            raise ValueError(f"{who}: has {len(x)} {what} of x but {len(y)} of y")
        if x.shape[1:] != (shape := like[0].shape[1:]):
            raise ValueError(f"{who}: its {what} have shape {tuple(x.shape[1:])}, the rows of {name(0)} {tuple(shape)}")
        if x.dtype != like[0].dtype:
            raise ValueError(f"{who}: its {what} are {x.dtype}, the rows of {name(0)} {like[0].dtype}")
        piece = Packed(x, y, _offsets(given, who)) if isinstance(given, Packed) else Packed.one(x, y)
        yield piece
        i += len(piece.offsets) - 1


def as_pair(given: Client, who: str, what: str) -> Pair:
    """Return the rows and targets that a user passes as tensors; unknown targets become -1 for all rows.

    Args:
        given: A pair (x, y), of which y may be None, or a piece of several clients.
        who: The name of the client, for messages.
        what: What messages call the rows: "rows" or "test rows".

    Raises:
        ValueError: It is no pair of arrays; names the client.
    """
    if not isinstance(given, Packed) and (not isinstance(given, tuple | list) or len(given) != 2):
        kinds = "a pair (x, y), a dict of arrays, a Dataset or a DataLoader"
        raise ValueError(f"{who}: its {what} must be {kinds}, got {_what(given)}")
    x, y = _tensor(given[0], who, what), given[1]
    return x, torch.full((len(x),), -1) if y is None else _labels(_tensor(y, who, what))


def check_rows(rows: Packed, part: str, name: Name) -> None:
    """Check that all clients have training rows, and that all values are finite.

    Args:
        rows: The rows to check.
        part: "train" or "test".
        name: Returns the name of client i, for messages.

    Raises:
        ValueError: A client fails the check; the message names it.
    """
    if part == "train" and bool((none := rows.sizes < 1).any()):
        raise ValueError(f"{name(int(none.nonzero()[0]))}: has no train rows, needs at least 1")
    for what, values in (("x", rows.x), ("y", rows.y)):
        if values.is_floating_point() and not _is_finite(_distinct(values)):
            bad = ~torch.isfinite(values).flatten(1).all(1) if values.dim() > 1 else ~torch.isfinite(values)
            first = int(bad.nonzero()[0])
            i = int(torch.searchsorted(rows.offsets, first, right=True)) - 1
            own = bad[int(rows.offsets[i]) : int(rows.offsets[i + 1])]
            raise ValueError(
                f"{name(i)}: {int(own.sum())} of its {len(own)} {part} rows have a value of {what} that is "
                f"NaN or infinite (the first is row {first - int(rows.offsets[i])})"
            )


def _is_finite(values: Tensor) -> bool:
    """Whether all are finite: then so are the least and the largest, which one pass finds without other memory."""
    return not values.numel() or bool(torch.isfinite(torch.stack(values.aminmax())).all())


def _distinct(values: Tensor) -> Tensor:
    """Return the rows, or only the first if all are views of it: such rows take no memory, and must not here."""
    return values[:1] if values.stride(0) == 0 else values


def _tensor(values: Array, name: str, what: str) -> Tensor:
    try:
        t = torch.as_tensor(values).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name}: its {what} cannot be read as an array of numbers ({error})") from None
    if t.dim() == 0:
        raise ValueError(f"{name}: its {what} must be an array with one entry per row, got a single number")
    return t.float() if t.dtype == torch.float64 else t


def _whole(pieces: Sequence[Pair], like: Pair | None, who: str, what: str) -> Pair:
    """Return the rows and targets of one client; of a client without any, no rows of the others' kind."""
    if not pieces:
        if like is None:
            raise ValueError(f"{who}: has no train rows, needs at least 1")
        return like[0][:0], like[1][:0]
    x, y = zip(*pieces, strict=True)
    return _end_to_end(x, f"{who}: its {what}"), _end_to_end(y, f"{who}: its targets")


def _end_to_end(parts: tuple[Tensor, ...], which: str) -> Tensor:
    shapes = list(dict.fromkeys(tuple(part.shape[1:]) for part in parts))
    if len(shapes) > 1:
        raise ValueError(f"{which} have shape {shapes[0]} in one batch and {shapes[1]} in another")
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _what(given: object) -> str:
    """Describe what a user passed instead of a pair."""
    size = f" of {len(given)}" if isinstance(given, tuple | list) else ""
    return f"a {type(given).__name__}{size}"


def _labels(y: Tensor) -> Tensor:
    return y if y.is_floating_point() else y.long()  # bytes and booleans are labels too


def _kind(y: Tensor) -> str:
    return f"{y.dtype} of shape {tuple(y.shape[1:])} per row"


def _offsets(piece: Packed, who: str) -> Tensor:
    at, n = piece.offsets, len(piece.x)
    if len(at) < 2 or int(at[0]) != 0 or int(at[-1]) != n or bool((at.diff() < 0).any()):
        raise ValueError(f"{who}: the offsets of the piece that begins with it must rise from 0 to {n}, its rows")
    return at
