"""FEMNIST: handwritten digits and letters, each client a writer, as LEAF makes it from NIST's Special Database 19."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch

from coterie.core.federation import Federation, Packed
from coterie.data.leaf import read_leaf
from coterie.data.source import NO_DATA, dataset, folder
from coterie.storage.archives import read_npz

_HOME = "https://github.com/TalwalkarLab/leaf"
_SIDE, _CLASSES = 28, 62
_ARRAYS = ("images", "labels", "writer", "split", "dup", "writer_names")


@dataset
def femnist(min_rows: int = 1) -> Federation:
    """FEMNIST by writer: images (1, 28, 28) of 62 classes, white paper 1 and ink 0 as in LEAF; training and test rows.

    It is read from LEAF's JSON files `femnist/{train,test}/*.json` in the data folder, as they are, or else from one
    compact file `femnist/*.npz` with the arrays `images` (n, 28, 28) and `labels` of bytes, `writer` (n,), `split` (0
    train, 1 test), `dup` (1 for a second copy of an image, which is left out: some are in training and test rows) and
    `writer_names`.

    Args:
        min_rows: Leaves out writers with fewer images, training and test rows together.
    """
    if min_rows < 1:
        raise ValueError(f"femnist: min_rows must be at least 1, got {min_rows}")
    federation = _read(folder() / "femnist")
    assert federation.test is not None  # both forms have test rows
    sizes = federation.train.sizes + federation.test.sizes
    if min_rows > int(sizes.max()):
        raise ValueError(f"femnist: no writer has {min_rows} images, the most is {int(sizes.max())}")
    keep = (sizes >= min_rows).nonzero().flatten()
    return federation if len(keep) == len(federation) else federation.select(keep)


def _read(home: Path) -> Federation:
    compact = sorted(home.glob("*.npz"))
    if (home / "train").is_dir():
        return _images(read_leaf(home), home)
    if len(compact) == 1:
        return _images(_compact(compact[0]), compact[0])
    if compact:
        raise ValueError(f"{home} has {len(compact)} files *.npz, but one is expected: leave one of them there")
    raise ValueError(
        f"FEMNIST is not in {home}, and it is not downloaded by itself: make it with {_HOME} (data/femnist/"
        f"preprocess.sh -s niid --sf 0.05 -k 0 -t sample) and put its data/train and data/test in {home}, {NO_DATA}"
    )


def _images(federation: Federation, path: Path) -> Federation:
    def square(i: int, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.reshape(-1, 1, _SIDE, _SIDE), y

    shape = tuple(federation.train.x.shape[1:])
    if shape != (_SIDE**2,):
        raise ValueError(f"{path} is not FEMNIST: rows have shape {shape}, expected ({_SIDE**2},)")
    for part in (federation.train, federation.part("test")):
        if part.y.is_floating_point():
            raise ValueError(f"{path} is not FEMNIST: labels are not whole numbers")
        for what, values, most in (("labels", part.y, _CLASSES - 1), ("pixels", part.x, 1)):
            low, high = (value.item() for value in values.aminmax()) if values.numel() else (0, 0)
            if low < 0 or high > most:
                raise ValueError(f"{path} is not FEMNIST: {what} run from {low:g} to {high:g}, expected 0 to {most}")
    return federation.map(square)


def _compact(path: Path) -> Federation:
    """Read a compact file, writer by writer."""
    arrays = read_npz(path)
    if missing := [name for name in _ARRAYS if name not in arrays]:
        raise ValueError(f"{path} has no array {missing[0]}; FEMNIST has {', '.join(_ARRAYS)}")
    images, labels, writer, split, dup, names = _together(path, arrays)
    here = np.unique(writer[(dup == 0) & (split == 0)])
    if len(here) < len(names):
        none = names[np.setdiff1d(np.arange(len(names)), here)[0]]
        raise ValueError(f"{path}: writer '{none}' has no training rows (split 0, dup 0), needs at least 1")

    def part(number: int) -> Packed:
        at = np.flatnonzero((dup == 0) & (split == number))
        at = at[np.argsort(writer[at], kind="stable")]
        x = torch.from_numpy(images[at].reshape(len(at), math.prod(images.shape[1:]))).float().div_(255)
        sizes = torch.from_numpy(np.bincount(writer[at], minlength=len(names)))
        offsets = torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)])
        return Packed(x, torch.from_numpy(labels[at].astype(np.int64)), offsets)

    return Federation(part(0), part(1), ids=tuple(str(name) for name in names))


def _together(path: Path, arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    """The arrays of a compact file in order, if each has the form that it should have and they belong together."""
    images, *columns, names = (arrays[name] for name in _ARRAYS)
    if images.dtype != np.uint8 or images.ndim != 3:
        given = f"{images.dtype} of shape {images.shape}"
        raise ValueError(f"{path}: images must be bytes (n, {_SIDE}, {_SIDE}), got {given}")
    for name, column in zip(_ARRAYS[1:-1], columns, strict=True):
        if column.shape != (len(images),) or column.dtype.kind not in "iub":
            given = f"{column.dtype} of shape {column.shape}"
            raise ValueError(
                f"{path}: {name} must be one whole number for each of the {len(images)} images, got {given}"
            )
    if names.ndim != 1 or names.dtype.kind != "U":
        raise ValueError(f"{path}: writer_names must be a list of words, got {names.dtype} of shape {names.shape}")
    writer = arrays["writer"]
    if len(images) and not 0 <= writer.min() <= writer.max() < len(names):
        run = f"from {writer.min()} to {writer.max()}"
        raise ValueError(f"{path} is damaged: writers run {run}, but writer_names has {len(names)}")
    return images, *columns, names
