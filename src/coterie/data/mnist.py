"""The MNIST data set, read from its four idx files."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from coterie.core.federation import Federation, Packed
from coterie.core.key import Key
from coterie.data.points import dealt
from coterie.data.source import dataset, deal, fetch

_HOME = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_FILES = {
    "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}


@dataset
def mnist(clients: int, seed: int = 0, rows: int | None = None) -> Federation:
    """MNIST distributed to clients at random, as one group.

    Args:
        clients: Number of clients m.
        seed: Seed of the shuffling.
        rows: Number of training images per client; None distributes all 60,000.
    """
    return deal(*images(), clients=clients, seed=seed, rows=rows)


@dataset
def rotated_mnist(clients: int, rows: int, seed: int = 0, groups: int = 4) -> Federation:
    """The IFCA paper's rotated MNIST (Section 6.2), in which each group rotates all of MNIST by its own angle.

    In every group all 60,000 training images are shuffled and split into clients of `rows` images. The group's test
    images are split, unshuffled, into machines of `rows`; each is the test data of equally many clients, so that the
    mean over clients is the paper's mean over test machines.

    Args:
        clients: Number of clients m, at most groups · 60,000 / rows.
        rows: Number of images per client n.
        seed: Seed of the shuffling.
        groups: Number of groups, 1 to 4; group g is rotated by g quarter turns.
    """
    if not 1 <= groups <= 4:
        raise ValueError(f"rotated_mnist: groups must be 1 to 4, the quarter turns there are, got {groups}")
    if clients < groups or clients % groups:
        raise ValueError(f"rotated_mnist: clients must be a positive multiple of {groups}, got {clients}")
    x, y, x_test, y_test = images()
    per_group, machines = clients // groups, len(x_test) // rows
    if rows < 1 or per_group * rows > len(x) or not machines:
        raise ValueError(
            f"rotated_mnist: {per_group} clients a group with {rows} rows each want more than {len(x)} images"
        )
    orders = [torch.randperm(len(x), generator=Key.of(seed).fold(g).generator()) for g in range(groups)]
    picked = [order[: per_group * rows] for order in orders]
    tested = (torch.arange(per_group) % machines)[:, None] * rows + torch.arange(rows)

    def packed(x: Tensor, y: Tensor, picks: list[Tensor]) -> Packed:
        turned = torch.cat([torch.rot90(x[at], g, (-2, -1)) for g, at in enumerate(picks)])
        return Packed(turned, torch.cat([y[at] for at in picks]), torch.arange(clients + 1) * rows)

    return Federation(
        train=packed(x, y, picked),
        test=packed(x_test, y_test, [tested.flatten()] * groups),
        groups=torch.arange(clients) // per_group,
    )


@dataset
def mnist_digits(
    p: float = 0.0,
    seed: int = 0,
    *,
    digits: tuple[int, ...] = tuple(range(10)),
    clients: int | None = None,
    points: int | None = None,
) -> Federation:
    """MNIST as unlabelled points whose clusters are the digits; y holds the true cluster, for scores only.

    Args:
        p: Heterogeneity: the fraction of a digit's images that goes to the clients of that digit; the others go to any
            client. Client i belongs to the i-th digit modulo the number of digits.
        seed: Seed of the distribution to clients.
        digits: The digits to use.
        clients: Number of clients; None takes one for each digit.
        points: Largest number of training images per digit; None takes all.
    """
    _check_digits("mnist_digits", digits)
    _check_counts("mnist_digits", clients=clients, points=points)
    x, y, _, _ = images()
    own = [(y == digit).nonzero().flatten()[:points] for digit in digits]
    z = torch.cat([torch.full((len(at),), c) for c, at in enumerate(own)])
    return dealt(x[torch.cat(own)], z, p, clients or len(digits), Key.of(seed))


@dataset
def mnist_rotations(
    p: float = 0.0, seed: int = 0, *, digit: int = 2, clients: int | None = None, points: int | None = None
) -> Federation:
    """One digit of MNIST, every image in all four rotations: unlabelled points whose clusters are the rotations.

    Args:
        p: Heterogeneity: the fraction of a rotation's images that goes to the clients of that rotation; the others go
            to any client. Client i belongs to rotation i modulo 4.
        seed: Seed of the distribution to clients.
        digit: The digit to use. The rotations of some digits, such as 0 and 8, cannot be distinguished.
        clients: Number of clients; None takes four.
        points: Largest number of training images to use, before rotation; None takes all.
    """
    _check_digits("mnist_rotations", (digit,))
    _check_counts("mnist_rotations", clients=clients, points=points)
    x, y, _, _ = images()
    own = x[y == digit][:points]
    turned = torch.cat([torch.rot90(own, g, (-2, -1)) for g in range(4)])
    return dealt(turned, torch.arange(4).repeat_interleave(len(own)), p, clients or 4, Key.of(seed))


def _check_digits(name: str, digits: tuple[int, ...]) -> None:
    if not digits or len(set(digits)) < len(digits) or not set(digits) <= set(range(10)):
        raise ValueError(f"{name}: digits must be different ones of 0 to 9, got {', '.join(map(str, digits))}")


def _check_counts(name: str, **counts: int | None) -> None:
    for what, value in counts.items():
        if value is not None and value < 1:
            raise ValueError(f"{name}: {what} must be at least 1, got {value}")


def images() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the training images (60000, 1, 28, 28) in [0, 1], their digits, the test images and their digits."""
    parts = [_idx(fetch(f"mnist/{name}", _HOME + name, digest)) for name, digest in _FILES.items()]
    x, y, x_test, y_test = (torch.from_numpy(p) for p in parts)
    return x[:, None].float() / 255, y.long(), x_test[:, None].float() / 255, y_test.long()


def _idx(path: Path) -> np.ndarray:
    """Read an idx file of bytes: two zeros, the type, the number of axes, their lengths, the values."""
    raw = gzip.decompress(path.read_bytes())
    axes = raw[3]
    shape = struct.unpack(f">{axes}I", raw[4 : 4 + 4 * axes])
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * axes).reshape(shape).copy()
