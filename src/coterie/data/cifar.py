"""The CIFAR-10 data set, read from its binary version."""

from __future__ import annotations

import io
import tarfile

import numpy as np
import torch
from torch import Tensor

from coterie.core.federation import Federation
from coterie.data.rotated import rotated_by_group
from coterie.data.source import converted, dataset, deal, download, folder, keep

_URL, _MD5 = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"
_FILES = [f"cifar-10-batches-bin/{name}.bin" for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")]
_RECORDS, _SHAPE = 10_000, (3, 32, 32)  # images per file; each is a byte for the label, then the pixels
_MEANS, _DEVIATIONS = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


@dataset
def cifar10(clients: int, seed: int = 0, rows: int | None = None) -> Federation:
    """CIFAR-10 distributed to clients at random, as one group. Each colour has mean 0 and standard deviation 1.

    Args:
        clients: Number of clients m.
        seed: Seed of the shuffling.
        rows: Number of training images per client; None distributes all 50,000.
    """
    return converted(deal(*_images(), clients=clients, seed=seed, rows=rows), _standardised)


@dataset
def rotated_cifar10(
    clients: int = 200, rows: int = 500, seed: int = 0, turns: tuple[int, ...] = (0, 2), by_image: bool = False
) -> Federation:
    """The IFCA paper's rotated CIFAR-10 (Section 6.2), in which each group rotates all of CIFAR-10 by its own angle.

    In every group all 50,000 training images are shuffled and split into clients of `rows` images. The group's test
    images are split, unshuffled, into machines of `rows`; each is the test data of equally many clients, so that the
    mean over clients is the paper's mean over its 40 test machines. Each colour has mean 0 and standard deviation 1.

    Args:
        clients: Number of clients m, at most (number of groups) · 50,000 / rows.
        rows: Number of images per client n.
        seed: Seed of the shuffling.
        turns: By how many quarter turns each group is rotated: 0 and 180 degrees.
        by_image: Whether every image by itself has mean 0 and standard deviation 1, as in the authors' code, in place
            of every colour over all images.
    """
    if not turns or len(set(turns)) < len(turns) or not set(turns) <= set(range(4)):
        given = ", ".join(map(str, turns))
        raise ValueError(f"rotated_cifar10: turns must be different ones of 0 to 3, quarter turns, got {given}")
    turned = rotated_by_group(_images(), "rotated_cifar10", clients=clients, rows=rows, seed=seed, turns=turns)
    return converted(turned, _each_standardised if by_image else _standardised)


def _standardised(x: Tensor) -> Tensor:
    means, deviations = (torch.tensor(values)[:, None, None] for values in (_MEANS, _DEVIATIONS))
    return x.float().div_(255).sub_(means).div_(deviations)


def _each_standardised(x: Tensor) -> Tensor:
    """As TensorFlow's `per_image_standardization`, which also spares an image of one colour."""
    x = x.float().div_(255)
    deviations, means = torch.std_mean(x, (1, 2, 3), correction=0, keepdim=True)
    return x.sub_(means).div_(deviations.clamp(min=x[0].numel() ** -0.5))


def _images() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the training images as bytes, their labels, the test images and theirs."""
    _complete()
    *train, test = (_records(name) for name in _FILES)
    return torch.cat([x for x, _ in train]), torch.cat([y for _, y in train]), *test


def _complete() -> None:
    """Download the files that are missing from the data folder."""
    if not (missing := [name for name in _FILES if not (folder() / name).exists()]):
        return
    with tarfile.open(fileobj=io.BytesIO(download(missing[0], _URL, _MD5, "md5"))) as archive:
        for name in missing:
            content = archive.extractfile(name)
            assert content is not None, name
            keep(folder() / name, content.read())


def _records(name: str) -> tuple[Tensor, Tensor]:
    path = folder() / name
    each = 1 + int(np.prod(_SHAPE))
    if (size := path.stat().st_size) != _RECORDS * each:
        raise ValueError(f"{path} has {size:,} bytes, but {_RECORDS:,} images of {each:,} bytes were expected")
    raw = torch.from_numpy(np.fromfile(path, np.uint8)).reshape(_RECORDS, each)
    if (label := int(raw[:, 0].max())) > 9:
        raise ValueError(f"{path} is not a file of CIFAR-10: it has label {label}, the last should be 9")
    return raw[:, 1:].reshape(-1, *_SHAPE), raw[:, 0].long()
