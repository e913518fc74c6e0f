"""Whether clients want different things of one model, or only seem to: CFL's (32) and (33) with the noise taken out.

A gradient of few rows is mostly chance, and one of other classes points elsewhere without any contradiction. So a
client sends the sums of its rows' gradients by class, and by two random halves of its rows:

- Clients are compared class by class: what a client wants is what its rows of a class want beyond those of all clients.
  Clients that merely have other classes, or other shares of them, want nothing of their own.
- What both halves of a client want is real, what one half wants is chance. The product of the two halves is the squared
  length of what the client wants, free of chance; their difference is how large chance is.

So nothing here has a scale: neither the model's, nor that of its loss, nor of step sizes.

Throughout, m is the clients, h = 2 the halves of a client's rows, k the classes, s the numbers of a gradient or of its
sketch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from coterie.core.local import gradient_of, mean_loss
from coterie.core.pytree import Params, exact
from coterie.core.task import Data, Task
from coterie.parts.bipartition import Linkage, bipartition

CLASSES = 16  # that are told apart; if there are more, several are taken as one
TRUSTED = 0.5  # of the median number of rows: what clients want that have fewer is mostly chance
TINY = 1e-30


class Gradients(NamedTuple):
    """What clients' rows want of a model."""

    sums: Tensor  # of the rows' gradients (m, h, k, s)
    rows: Tensor  # how many there are (m, h, k)


class Cleft(NamedTuple):
    """How clients are best cut in two, and what speaks for it."""

    trusted: Tensor  # clients that have enough rows to be told apart (t,), as positions
    second: np.ndarray  # whether each of them is in the second half (t,)
    cross: float  # α_cross, the largest similarity of two clients from different halves
    contrast: float  # how far apart the halves are, squared, over the farthest that chance could put them
    signal: float  # how much clients want of their own, in standard deviations of what chance makes them seem to want
    drift: float  # the squared length of the mean gradient over that of what clients want of their own, if anything


def class_gradients(
    task: Task, theta: Params, data: Data, rank: Tensor, vector: Callable[[Params], Tensor]
) -> Gradients:
    """One client's `Gradients`, without the axis of clients.

    Args:
        task: Gives the loss.
        theta: The model.
        data: The client's rows.
        rank: A random order of them.
        vector: What is sent of a gradient.
    """
    trained = {n: p for n, p in theta.items() if n not in task.moving}
    classes = _classes(task, theta, data)
    label = data.y % classes if classes > 1 else torch.zeros_like(data.mask).long()
    half = _halves(label, rank, data.mask)

    def wanted(rows: Tensor) -> Tensor:
        own = data._replace(mask=rows)
        return vector(gradient_of(lambda p: mean_loss(task, {**theta, **p}, own), trained)[0]) * rows.sum()

    members = [data.mask * (half == h) * (label == c) for h in range(2) for c in range(classes)]
    sums = torch.stack([wanted(rows) for rows in members])
    return Gradients(sums.unflatten(0, (2, classes)), torch.stack([r.sum() for r in members]).reshape(2, classes))


def _classes(task: Task, theta: Params, data: Data) -> int:
    """How many classes are told apart: one where targets are no classes, or it is not known how many there are."""
    if task.functions is None or data.y.is_floating_point() or data.y.dim() != 1:
        return 1
    out = task.functions.output(theta, data.x, data.mask)
    return min(CLASSES, out.shape[-1]) if out.dim() == 2 else 1


def _halves(label: Tensor, rank: Tensor, mask: Tensor) -> Tensor:
    """Which half each row is in (n,): every second one of each class, in a random order."""
    rows = len(label)
    order = (torch.where(mask > 0, label, label.amax() + 1) * (rows + 1) + rank).argsort()
    return torch.zeros_like(order).scatter(0, order, torch.arange(rows, device=order.device) % 2)


def cleft(gradients: Gradients, weight: Tensor, linkage: Linkage) -> Cleft:
    """The best cut of clients by what they want of a model, and what speaks for it.

    Args:
        gradients: What their rows want.
        weight: How heavily each counts in the mean gradient (m,).
        linkage: See `bipartition`.

    Example:
        >>> g = torch.Generator().manual_seed(0)
        >>> noise, group = torch.randn(12, 2, 1, 99, generator=g), torch.arange(12) % 2
        >>> rows = torch.full((12, 2, 1), 9.0)
        >>> [round(cleft(Gradients(noise + x * group[:, None, None, None], rows), torch.ones(12), "single").contrast, 1)
        ...  for x in (0, 2)]
        [0.6, 5.3]
    """
    sums, rows = exact(gradients.sums), exact(gradients.rows)
    common = sums.sum((0, 1)) / rows.sum((0, 1)).clamp(min=1)[:, None]  # what all clients' rows of a class want (k, s)
    own, chance = sums - rows[..., None] * common, _chance(sums, rows)
    total, size = own.sum(1), rows.sum(1)
    trusted = (size.sum(1) >= TRUSTED * size.sum(1).median()).nonzero().flatten()
    halves = bipartition(_similarities(total[trusted], size[trusted]), linkage)
    second = torch.from_numpy(halves.second)
    signal, error = _signal(own, rows, chance)
    return Cleft(
        trusted=trusted,
        second=halves.second,
        cross=halves.cross,
        contrast=_contrast(total[trusted], size[trusted], second, chance),
        signal=signal / max(error, TINY),
        drift=_mean_length(sums, rows, exact(weight)) / signal if signal > 0 else torch.inf,
    )


def _similarities(own: Tensor, rows: Tensor) -> np.ndarray:
    """α of every pair, over the classes that both have; 1 for pairs that have none. As `bipartition` wants it."""
    mean = own / rows.clamp(min=1)[..., None]
    dot, weight = torch.einsum("iks,jks->ijk", mean, mean), rows[:, None] * rows
    squared = dot.diagonal().T  # (m, k)
    length = (weight * squared[:, None]).sum(2) * (weight * squared).sum(2)
    alpha = (weight * dot).sum(2) / length.sqrt().clamp(min=TINY)
    alpha = torch.where((weight > 0).any(2), alpha, 1.0).clamp(-1, 1)
    return alpha[tuple(torch.triu_indices(len(rows), len(rows), 1))].numpy()


def _means(own: Tensor, rows: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """What the rows of either half want on average (2, k, s), and how many there are (2, k)."""
    half = torch.stack([~second, second]).to(own)
    count = half @ rows
    return torch.einsum("hm,mks->hks", half, own) / count.clamp(min=1)[..., None], count


class Chance(NamedTuple):
    """How rows of the same client and class differ."""

    variance: Tensor  # of a row's gradient, in every class (k,)
    dimensions: float  # in which it varies


def _chance(sums: Tensor, rows: Tensor) -> Chance:
    """What the two halves of clients' rows differ by: they want the same but for chance.

    The squared cosine of two clients' differences is on average 1 over the dimensions.
    """
    both = (rows > 0).all(1)
    mean = sums / rows.clamp(min=1)[..., None]
    weight = both * rows[:, 0] * rows[:, 1] / rows.sum(1).clamp(min=1)
    difference = weight.sqrt()[..., None] * (mean[:, 0] - mean[:, 1])  # (m, k, s)
    known = both.sum(0)
    variance = difference.square().sum((0, 2)) / known.clamp(min=1)
    typical = variance[known > 0].mean() if bool(known.any()) else torch.tensor(torch.inf, dtype=variance.dtype)
    unit = normalize(difference.flatten(1))
    unit = unit[unit.norm(dim=1) > 0]
    squared = (unit @ unit.T).square()
    pairs = len(unit) * (len(unit) - 1)
    alike = float((squared.sum() - squared.diagonal().sum()) / pairs) if pairs else 1.0
    return Chance(torch.where(known > 0, variance, typical), 1 / max(alike, TINY))


def _signal(own: Tensor, rows: Tensor, chance: Chance) -> tuple[float, float]:
    """The mean squared length of what clients want of their own, without chance, and its standard error by chance."""
    pairs = rows[:, 0] * rows[:, 1]  # of a row of one half and one of the other, in every class (m, k)
    mean = own / rows.clamp(min=1)[..., None]
    total = (pairs * (mean[:, 0] * mean[:, 1]).sum(2)).sum()
    error = ((pairs * chance.variance.square()).nansum() / chance.dimensions).sqrt()
    number = pairs.sum().clamp(min=1)
    return float(total / number), float(error / number)


def _mean_length(sums: Tensor, rows: Tensor, weight: Tensor) -> float:
    """The squared length of the mean gradient, without chance."""
    have = (rows.sum(2) > 0).all(1) * weight
    each = sums.sum(2) / rows.sum(2).clamp(min=1)[..., None]  # every client's mean gradient, by halves (m, h, s)
    one, other = torch.einsum("m,mhs->hs", have, each) / have.sum().clamp(min=TINY)
    return float(one @ other)


def _contrast(own: Tensor, rows: Tensor, second: Tensor, chance: Chance) -> float:
    """How far apart the halves are, squared, over the farthest that chance could put them.

    By chance alone, a cut that does not look is 1 time the gradients' variance apart. The best of all cuts of m clients
    is up to (1 + √(m/d))² times that far apart, the edge of Marchenko and Pastur's law, where chance has d dimensions.
    """
    means, count = _means(own, rows, second)
    weight = count[0] * count[1] / count.sum(0).clamp(min=1)
    apart = (weight * (means[0] - means[1]).square().sum(1)).sum()
    edge = (1 + (len(rows) / chance.dimensions) ** 0.5) ** 2
    return float(apart / (chance.variance * (weight > 0)).nansum().clamp(min=TINY) / edge)
