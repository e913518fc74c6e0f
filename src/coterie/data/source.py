"""The registry of data sets, the data folder, and the distribution of rows to clients."""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import torch
from torch import Tensor

from coterie.core.federation import Array, Federation, Packed
from coterie.core.key import Key
from coterie.core.settings import check_type

DATASETS: dict[str, Callable[..., Federation]] = {}
CHANGES: dict[str, Callable[..., Federation]] = {}

NO_DATA = "or set COTERIE_DATA to a folder that has it; coterie demo needs no data set"  # ends messages

Maker = TypeVar("Maker", bound=Callable[..., Federation])


def dataset(make: Maker) -> Maker:
    """Register a function that makes a federation, and record its arguments in the federation's `source`.

    Args:
        make: The function, which is registered under its name.
    """

    @functools.wraps(make)
    def noted(*args: Any, **kwargs: Any) -> Federation:
        given = _arguments(make, args, kwargs)
        return replace(make(*args, **kwargs), source={"name": make.__name__, **_plain(given)})

    DATASETS[make.__name__] = noted
    return noted  # pyright: ignore[reportReturnType] - functools.wraps keeps the signature


def change(make: Maker) -> Maker:
    """Register a function that makes a federation from another one, and add it to the federation's `source`.

    Args:
        make: The function, which is registered under its name. Its first argument is a federation.
    """

    @functools.wraps(make)
    def noted(federation: Federation, *args: Any, **kwargs: Any) -> Federation:
        given = _arguments(make, (federation, *args), kwargs)
        made = make(federation, *args, **kwargs)
        if not federation.source:
            return replace(made, source={})
        entry = {"name": make.__name__, **_plain(given)}
        return replace(made, source={**federation.source, "change": [*federation.source.get("change", []), entry]})

    CHANGES[make.__name__] = noted
    return noted  # pyright: ignore[reportReturnType] - functools.wraps keeps the signature


def folder() -> Path:
    """Return the data folder: the environment variable `COTERIE_DATA`, or `coterie` in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("COTERIE_DATA") or Path(cache) / "coterie")


def fetch(name: str, url: str, sha256: str) -> Path:
    """Return the path of a verified file in the data folder, which is downloaded first if it is missing.

    Args:
        name: Path of the file, relative to the data folder.
        url: Where to download it.
        sha256: Expected digest of its content, in hexadecimal digits.
    """
    path = folder() / name
    if not path.exists():
        keep(path, download(name, url, sha256))
    _verify(_content(path), sha256, str(path), "sha256")
    return path


def download(name: str, url: str, digest: str, kind: str = "sha256") -> bytes:
    """Download a file and return its content, after verifying its digest.

    Args:
        name: The file of the data folder that the content is for, used in error messages.
        url: Where to download it.
        digest: Expected digest of the content, in hexadecimal digits.
        kind: Name of the digest in `hashlib`.
    """
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            content = answer.read()
    except OSError as error:
        raise ValueError(
            f"{name} is not in {folder()} and could not be downloaded from {url} ({error}): download it, {NO_DATA}"
        ) from error
    _verify(content, digest, url, kind)
    return content


def keep(path: Path, content: bytes) -> None:
    """Write a file atomically, and create its folder if needed.

    Args:
        path: The file.
        content: Its content.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")  # several processes may write it at the same time
    part.write_bytes(content)
    part.replace(path)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None


def _verify(content: bytes, digest: str, where: str, kind: str) -> None:
    if (found := hashlib.new(kind, content, usedforsecurity=False).hexdigest()) != digest:
        raise ValueError(f"{where} is not the file it should be: its {kind} is {found}, expected {digest}")


def deal(
    x: Array,
    y: Array,
    x_test: Array,
    y_test: Array,
    *,
    clients: int,
    seed: int,
    copies: int = 1,
    rows: int | None = None,
) -> Federation:
    """Distribute rows to clients evenly and at random; float64 becomes float32.

    Args:
        x: Training rows.
        y: Labels of the training rows.
        x_test: Test rows.
        y_test: Labels of the test rows.
        clients: Number of clients m, a multiple of `copies`.
        seed: Seed of the shuffling.
        copies: Number of equal blocks of clients. Each block gets all rows, in a different order. The IFCA paper makes
            its rotated data this way: every image occurs in every rotation.
        rows: Number of training rows per client, leaving out the others; None uses all. Test rows are all used.
    """
    whole = Federation.from_clients([(x, y)], test=[(x_test, y_test)], ids=["deal"])
    if copies < 1:
        raise ValueError(f"copies must be at least 1, got {copies}")
    if clients < 1 or clients % copies:
        raise ValueError(f"clients must be a positive multiple of {copies}, got {clients}")
    if (per_copy := clients // copies) > len(x):
        raise ValueError(f"{len(x)} rows cannot be dealt to {per_copy} clients")
    if rows is not None and not 1 <= rows <= (most := len(x) // per_copy):
        raise ValueError(f"rows must be 1 to {most}, for {len(x)} rows are dealt to {per_copy} clients, got {rows}")

    def part(all_rows: Packed, stream: int, used: int) -> Packed:
        x, y = all_rows.client(0)
        order = [torch.randperm(len(x), generator=Key.of(seed).fold(stream, c).generator()) for c in range(copies)]
        sizes = torch.cat([_even(used, per_copy) for _ in range(copies)])
        picked = torch.cat([rows[:used] for rows in order])
        return Packed(x[picked], y[picked], torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)]))

    groups = torch.zeros(clients, dtype=torch.long)
    used = len(x) if rows is None else per_copy * rows
    return Federation(part(whole.train, 0, used), part(whole.part("test"), 1, len(x_test)), groups)


def converted(federation: Federation, change: Callable[[Tensor], Tensor]) -> Federation:
    """Return a federation with all its rows changed; images are distributed as bytes, a quarter of what floats take.

    Args:
        federation: The clients.
        change: Takes all rows of a part, and returns as many.
    """

    def part(own: Packed) -> Packed:
        return own._replace(x=change(own.x))

    return replace(federation, train=part(federation.train), test=federation.test and part(federation.test))


def _even(rows: int, clients: int) -> Tensor:
    """Return sizes that sum to `rows` and differ by one at most."""
    return torch.tensor([rows // clients + (i < rows % clients) for i in range(clients)])


def _arguments(make: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, if all are of the types that they should be."""
    bound = inspect.signature(make).bind(*args, **kwargs)
    bound.apply_defaults()
    hints = get_type_hints(make)
    for name, value in bound.arguments.items():
        check_type(f"{make.__name__}: {name}", value, hints[name])
    return bound.arguments


def _plain(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments as a configuration has them."""
    plain = {n: list(v) if isinstance(v, tuple) else v for n, v in arguments.items() if not isinstance(v, Federation)}
    return {n: str(v) if isinstance(v, Path) else v for n, v in plain.items() if v is not None}
