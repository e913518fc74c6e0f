"""FEMNIST: handwritten digits and letters, each client a writer, as LEAF makes it from NIST's Special Database 19."""

from __future__ import annotations

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
    found = f"{home} has {len(compact)} files *.npz, but one is expected" if compact else f"FEMNIST is not in {home}"
    raise ValueError(
        f"{found}, and it is not downloaded by itself: make it with {_HOME} (data/femnist/preprocess.sh -s niid --sf "
        f"0.05 -k 0 -t sample) and put its data/train and data/test in {home}, {NO_DATA}"
    )


def _images(federation: Federation, path: Path) -> Federation:
    def square(i: int, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.reshape(-1, 1, _SIDE, _SIDE), y

    shape = tuple(federation.train.x.shape[1:])
    if shape != (_SIDE**2,):
        raise ValueError(f"{path} is not FEMNIST: rows have shape {shape}, expected ({_SIDE**2},)")
    for part in (federation.train, federation.part("test")):
        low, high = (int(value) for value in part.y.aminmax())
        if part.y.is_floating_point() or low < 0 or high >= _CLASSES:
            raise ValueError(f"{path} is not FEMNIST: labels run from {low} to {high}, expected 0 to {_CLASSES - 1}")
    return federation.map(square)


def _compact(path: Path) -> Federation:
    """Read a compact file, writer by writer."""
    arrays = read_npz(path)
    if missing := [name for name in _ARRAYS if name not in arrays]:
        raise ValueError(f"{path} has no array {missing[0]}; FEMNIST has {', '.join(_ARRAYS)}")
    images, labels, writer, split, dup, names = (arrays[name] for name in _ARRAYS)
    lengths = {len(images), len(labels), len(writer), len(split), len(dup)}
    if len(lengths) > 1 or images.dtype != np.uint8 or not 0 <= writer.min() <= writer.max() < len(names):
        raise ValueError(f"{path} is damaged: its arrays do not belong together")

    def part(number: int) -> Packed:
        at = np.flatnonzero((dup == 0) & (split == number))
        at = at[np.argsort(writer[at], kind="stable")]
        x = torch.from_numpy(images[at].reshape(len(at), -1)).float().div_(255)
        sizes = torch.from_numpy(np.bincount(writer[at], minlength=len(names)))
        offsets = torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)])
        return Packed(x, torch.from_numpy(labels[at].astype(np.int64)), offsets)

    return Federation(part(0), part(1), ids=tuple(str(name) for name in names))
