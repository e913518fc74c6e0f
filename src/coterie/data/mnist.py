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
from coterie.core.partitions import held_out
from coterie.data.points import dealt
from coterie.data.rotated import rotated_by_group
from coterie.data.source import converted, dataset, deal, fetch

_HOME = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_FILES = {
    "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}
_QMNIST = "https://raw.githubusercontent.com/facebookresearch/qmnist/master/qmnist-train-labels-idx2-int.gz"
_QMNIST_SHA256 = "2c05dc77f6b916b38e455e97ab129a42a444f3dbef09b278a366f82904e0dd9f"
_SERIES, _WRITER = 1, 2  # columns of QMNIST's labels


@dataset
def mnist(clients: int, seed: int = 0, rows: int | None = None) -> Federation:
    """MNIST distributed to clients at random, as one group.

    Args:
        clients: Number of clients m.
        seed: Seed of the shuffling.
        rows: Number of training images per client; None distributes all 60,000.
    """
    return converted(deal(*_bytes(), clients=clients, seed=seed, rows=rows), _scaled)


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
    turned = rotated_by_group(_bytes(), "rotated_mnist", clients=clients, rows=rows, seed=seed, turns=range(groups))
    return converted(turned, _scaled)


@dataset
def mnist_by_writer(test: float = 0.2, seed: int = 0) -> Federation:
    """MNIST by the person who wrote it: the 539 writers of the 60,000 training images, 19 to 131 images each.

    Who wrote an image is in the labels of QMNIST. Clients are in the order of these ids and are named by them. Of each
    writer a share of the images, drawn at random, is its test rows. The official test images of MNIST are not used:
    they are by 297 other writers, and none of these writers is among them.

    The groups are the two series of NIST's forms: 0 for 289 employees (series 0), 1 for 250 high-school students
    (series 4). They are used only to score.

    Args:
        test: The share of each writer's images that are test rows, above 0 and below 1; at least one image.
        seed: Seed of that draw.
    """
    if not 0 < test < 1:
        raise ValueError(f"mnist_by_writer: test must be above 0 and below 1, got {test}")
    x, y, _, _ = images()
    series, writer = _written()
    names, code = writer.unique(return_inverse=True)
    order, sizes = code.argsort(stable=True), code.bincount()
    whole = Packed(x[order], y[order], torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)]))
    train, tests = held_out(whole, test, names, seed)
    first = whole.offsets[:-1]
    return Federation(train, tests, (series[order[first]] != 0).long(), tuple(str(n) for n in names.tolist()))


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
    x, y, x_test, y_test = _bytes()
    return _scaled(x), y, _scaled(x_test), y_test


def _bytes() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `images` with pixels as they are in the files."""
    parts = [_idx(fetch(f"mnist/{name}", _HOME + name, digest)) for name, digest in _FILES.items()]
    x, y, x_test, y_test = (torch.from_numpy(p) for p in parts)
    return x[:, None], y.long(), x_test[:, None], y_test.long()


def _scaled(x: Tensor) -> Tensor:
    return x.float().div_(255)


def _written() -> tuple[Tensor, Tensor]:
    """Return NIST's series and the writer of every training image, from the labels of QMNIST."""
    labels = torch.from_numpy(_idx(fetch(f"mnist/{Path(_QMNIST).name}", _QMNIST, _QMNIST_SHA256)))
    return labels[:, _SERIES].long(), labels[:, _WRITER].long()


def _idx(path: Path) -> np.ndarray:
    """Read an idx file of bytes or 32-bit integers: two zeros, the type, the number of axes, their lengths, values."""
    raw = gzip.decompress(path.read_bytes())
    axes, kind = raw[3], {8: ">u1", 12: ">i4"}[raw[2]]
    shape = struct.unpack(f">{axes}I", raw[4 : 4 + 4 * axes])
    values = np.frombuffer(raw, kind, offset=4 + 4 * axes).reshape(shape)
    return values.astype(values.dtype.newbyteorder("="))
