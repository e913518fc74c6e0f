"""Snapshots: a state as one safetensors file, written atomically. Nothing here reads or writes pickle."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from coterie.storage.reading import Damaged, parse_json, read_tensors


class Unwritten(OSError):
    """A file cannot be written, because the disk is full or for another reason of the system's."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Have errors of the system say which file they are about, in one line.

    Args:
        path: The file that is written.

    Raises:
        Unwritten: It cannot be written.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise Unwritten(f"{path} cannot be written: {why}") from error


@contextmanager
def atomic(path: Path, *, private: bool = False) -> Iterator[Path]:
    """Write a file atomically: yield a temporary path, which is renamed to `path` at the end.

    A reader sees the old file or the new one, never a part. The temporary file is made anew under a name that nobody
    can guess: in a folder that came from a stranger, a link that waits there under its name would lead elsewhere.

    Args:
        path: The file to write.
        private: Whether only its owner may read it.

    Raises:
        Unwritten: It cannot be written; the old file is still there, and no part of the new one.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob(f".{escape(path.name)}.*.part"):  # by a process that was killed
            left.unlink(missing_ok=True)
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666))
        try:
            yield part
            with part.open("rb") as f:
                os.fsync(f.fileno())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def discard(folder: Path) -> None:
    """Delete a folder, if it is there. A kill leaves it whole, or none under its name.

    Args:
        folder: The folder.
    """
    aside = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(aside, ignore_errors=True)  # left by one that was killed
    if folder.is_dir():
        folder.rename(aside)
        shutil.rmtree(aside)


def append_text(path: Path, text: str) -> None:
    """Append to a text file, which must not be a link: one in a stranger's folder would lead elsewhere.

    Args:
        path: The file; it is made where there is none.
        text: What is added.

    Raises:
        Unwritten: It cannot be written.
    """
    with writing(path):
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        with os.fdopen(os.open(path, flags, 0o666), "a", encoding="utf-8") as f:
            f.write(text)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically.

    Args:
        path: The file.
        text: Its content.
    """
    with atomic(path) as part:
        part.write_text(text, encoding="utf-8")


def write_private(path: Path, text: str) -> None:
    """Write a text file atomically, readable by its owner only.

    Args:
        path: The file.
        text: Its content.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "key"
        >>> write_private(path, "secret")
        >>> oct(path.stat().st_mode & 0o777)
        '0o600'
    """
    with atomic(path, private=True) as part:
        part.write_text(text, encoding="utf-8")


def save(path: Path, tree: Any, *, private: bool = False) -> None:
    """Save a tree of dicts, tuples, NamedTuples, tensors and plain values, with a digest of it.

    Args:
        path: The file.
        tree: The tree.
        private: Whether only its owner may read the file.
    """
    tensors: dict[str, Tensor] = {}
    plain = json.dumps(_pack(tree, "", tensors))
    write_tensors(path, tensors, {"tree": plain, "digest": _digest(plain, tensors)}, private=private)


def write_tensors(
    path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None, *, private: bool = False
) -> None:
    """Write tensors to a safetensors file atomically, with the permissions of any other new file.

    Args:
        path: The file.
        tensors: The tensors by name, contiguous and on the CPU.
        metadata: What the file's header says besides.
        private: Whether only its owner may read the file.
    """
    from safetensors.torch import save_file

    with atomic(path, private=private) as part:
        mode = part.stat().st_mode
        save_file(tensors, part, metadata)
        part.chmod(mode)  # safetensors puts a new file in its place, which only the owner may read


def load(path: Path, types: dict[str, type]) -> Any:
    """Load a tree that `save` has written. Of a file from before there were digests, none is compared.

    Args:
        path: The file.
        types: The NamedTuples that may be built, by name.

    Raises:
        Damaged: The file is truncated, not a snapshot, or not what was saved: a bit of it has changed.
        Unreadable: The system does not let it be read, which says nothing about its content.
        ValueError: Another version of coterie wrote the file.
    """
    tensors, header = read_tensors(path)
    written = header.get("tree", "")
    if header.get("digest", digest := _digest(written, tensors)) != digest:
        raise Damaged(f"{path} is damaged (its digest is another)")
    plain = parse_json(written, path)
    try:
        return _unpack(plain, tensors, types)
    except _OtherFields:
        raise ValueError(f"{path} was made by another version of coterie, and cannot be gone on with") from None
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise Damaged(f"{path} is damaged ({type(error).__name__}: {error})") from None


class _OtherFields(Exception):
    """The fields of a NamedTuple have changed."""


def named_tuples(owner: Any) -> dict[str, type]:
    """Return the NamedTuples in the modules of an object's class, its base classes and its settings', by name.

    Args:
        owner: The method that a tree is the state of, or whose step it was sent to. Its own come before its settings'.
    """
    settings = dataclasses.fields(owner) if dataclasses.is_dataclass(owner) else ()
    nested = [getattr(owner, f.name) for f in settings]
    inner = {n: t for value in nested if dataclasses.is_dataclass(value) for n, t in named_tuples(value).items()}
    known = [vars(sys.modules[c.__module__]).items() for c in reversed(type(owner).__mro__)]
    return inner | {n: t for own in known for n, t in own if isinstance(t, type) and hasattr(t, "_fields")}


def _pack(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {"tensor": name}
    if isinstance(value, dict):
        return {"dict": [[k, _pack(v, f"{name}/{k}", tensors)] for k, v in value.items()]}
    if isinstance(value, tuple | list):
        kind = {"named": type(value).__name__} if hasattr(value, "_fields") else {}
        return {"tuple": [_pack(v, f"{name}/{i}", tensors) for i, v in enumerate(value)], **kind}
    return {"value": value}


def _unpack(plain: Any, tensors: dict[str, Tensor], types: dict[str, type]) -> Any:
    if "tensor" in plain:
        return tensors[plain["tensor"]]
    if "dict" in plain:
        return {k: _unpack(v, tensors, types) for k, v in plain["dict"]}
    if "tuple" in plain:
        parts = [_unpack(v, tensors, types) for v in plain["tuple"]]
        return _named(types[plain["named"]], parts) if "named" in plain else tuple(parts)
    return plain["value"]


def _named(kind: type, parts: list[Any]) -> Any:
    try:
        return kind(*parts)
    except TypeError:
        raise _OtherFields from None


def _digest(plain: str, tensors: dict[str, Tensor]) -> str:
    """A hash of a tree and its tensors."""
    found = hashlib.blake2b(plain.encode(), digest_size=16)
    for name, x in sorted(tensors.items()):
        found.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        found.update(x.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
