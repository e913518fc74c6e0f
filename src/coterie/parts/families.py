"""How targets other than numbers are drawn, given a model's outputs: classes by their logits, counts by a log rate.

Around any outputs the log-likelihood is a parabola, which is that of a regression with weighted rows. This is all that
`coterie.parts.laplace` needs to know of a family. Throughout, n is a client's rows, c the outputs, d the parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from coterie.core.losses import LARGEST, cross_entropy, excess, least, poisson
from coterie.core.module_task import PerRow
from coterie.core.task import Data, Task
from coterie.parts.residuals import values_of

UNLIKELY = 1e-12  # the least probability of a class, and the least weight of a count
HEAVY = 1e12  # the largest weight of a count: with more, what a client knew beforehand would be lost in rounding
HALF = 0.5  # that is added to a count before its logarithm is taken


class Family(NamedTuple):
    """A kind of targets.

    Attributes:
        likely: `likely(data)`: a function from outputs (…, n, c) to log p(y | out) of every row (…, n).
        linearised: `linearised(out, phi, data)`: the regression that is like these targets around some outputs: W^½φ
            (…, n·c, d) with W the curvature, and its residuals there W^-½ ∂log p/∂out (…, n·c). φ are the gradients
            (n, c, d).
        first: `first(phi, data)`: rows (n·c, d) and targets (n·c,) by which one model for all is found to begin with.
        near: `near(phi, data)`: the regression around outputs that fit every row by itself, W^½φ (n·c, d) and its
            targets (n·c,), whose solution is near the mode; None where the mode is looked for from the mean alone.
        weight: `weight(data)`: the curvature W there (n,), which may be of any size; None where it is about 1.
        skew: `skew(out, leverage)`: by how much less than at the mode the residuals are on average (…, n), for
            leverages W^½φ Cov(θ) φᵀW^½ (…, n); None where the mode is taken for the mean.
        steps: Newton's, to the mode.
        lengths: Of each step, that which does best: the parabola may be a bad guide far out.
    """

    likely: Callable[[Data], Callable[[Tensor], Tensor]]
    linearised: Callable[[Tensor, Tensor, Data], tuple[Tensor, Tensor]]
    first: Callable[[Tensor, Data], tuple[Tensor, Tensor]]
    near: Callable[[Tensor, Data], tuple[Tensor, Tensor]] | None
    weight: Callable[[Data], Tensor] | None
    skew: Callable[[Tensor, Tensor], Tensor] | None
    steps: int
    lengths: tuple[float, ...]


# --- classes ---------------------------------------------------------------------------------------------------------


def _likely_classes(data: Data) -> Callable[[Tensor], Tensor]:
    label = data.y.long().clamp(min=0)[..., None]

    def likely(logits: Tensor) -> Tensor:
        out = logits.log_softmax(-1)
        return out.gather(-1, label.expand(*out.shape[:-1], 1))[..., 0]

    return likely


def _linearised_classes(logits: Tensor, phi: Tensor, data: Data) -> tuple[Tensor, Tensor]:
    """W is diag(p) - ppᵀ."""
    p = logits.softmax(-1).clamp(min=UNLIKELY)
    about = (p[..., None] * phi).sum(-2, keepdim=True)
    weight = p.sqrt() * data.mask[:, None]
    label = torch.nn.functional.one_hot(data.y.long().clamp(min=0), p.shape[-1])
    rows, off = weight[..., None] * (phi - about), (label - p) / p.sqrt() * data.mask[:, None]
    return rows.flatten(-3, -2), off.flatten(-2, -1)


def _first_classes(phi: Tensor, data: Data) -> tuple[Tensor, Tensor]:
    """Around θ = 0."""
    return _linearised_classes(torch.zeros_like(phi[..., 0]), phi, data)


# --- counts ----------------------------------------------------------------------------------------------------------


def _counts(data: Data) -> Tensor:
    return data.y.reshape(-1).double().clamp(min=0)


def _likely_counts(data: Data) -> Callable[[Tensor], Tensor]:
    y = _counts(data)
    most = -least(y)
    return lambda out: most - excess(out[..., 0], y)


def _weight(out: Tensor) -> Tensor:
    return out[..., 0].clamp(max=LARGEST).exp().clamp(UNLIKELY, HEAVY)


def _linearised_counts(out: Tensor, phi: Tensor, data: Data) -> tuple[Tensor, Tensor]:
    """W is the rate."""
    slope, root = _counts(data) - out[..., 0].clamp(max=LARGEST).exp(), _weight(out).sqrt()
    return (root * data.mask)[..., None] * phi[:, 0], slope / root * data.mask


def _first_counts(phi: Tensor, data: Data) -> tuple[Tensor, Tensor]:
    """Logarithms of counts; all rows count alike, or a client with large counts would speak for all."""
    return phi[:, 0] * data.mask[:, None], (_counts(data) + HALF).log() * data.mask


def _near_counts(phi: Tensor, data: Data) -> tuple[Tensor, Tensor]:
    out = (_counts(data) + HALF).log()[:, None]
    rows, off = _linearised_counts(out, phi, data)
    return rows, off + _weight(out).sqrt() * out[:, 0] * data.mask


def _weight_counts(data: Data) -> Tensor:
    return (_counts(data) + HALF) * data.mask


def _skew_counts(out: Tensor, leverage: Tensor) -> Tensor:
    """The mean of e^out exceeds e to the mean by half the variance of out, as a share."""
    return 0.5 * leverage / _weight(out).sqrt()


CLASSES = Family(
    likely=_likely_classes,
    linearised=_linearised_classes,
    first=_first_classes,
    near=None,
    weight=None,
    skew=None,
    steps=6,
    lengths=(1.0, 0.5, 0.2, 0.05, 0.0),
)

COUNTS = Family(
    likely=_likely_counts,
    linearised=_linearised_counts,
    first=_first_counts,
    near=_near_counts,
    weight=_weight_counts,
    skew=_skew_counts,
    steps=8,
    lengths=(0.0, 1.0, 0.5, 0.2, 0.05, 0.01, 0.001, 3.0, 10.0),  # too short far above the mode, too long far below it
)

FAMILIES: dict[PerRow, Family] = {cross_entropy: CLASSES, poisson: COUNTS}


# --- of any task -----------------------------------------------------------------------------------------------------


def family_of(task: Task) -> Family | None:
    """The family of a task's targets; None of those that are numbers."""
    return None if task.jacobian is None or task.functions is None else FAMILIES[task.functions.loss]


def first_values(task: Task, data: Data) -> Tensor:
    """φ and y side by side (n, p + 1), 0 for padding; of classes and counts, those of a regression to begin with."""
    if task.jacobian is not None and (family := family_of(task)):
        rows, y = family.first(task.jacobian(data.x).double(), data)
        return torch.cat([rows, y[:, None]], 1)
    return values_of(task, data)


def weight_of(task: Task, data: Data) -> dict[str, Tensor]:
    """The root of what a row tells of its output on average, where that may be anything: of counts."""
    family = family_of(task)
    if family is None or family.weight is None:
        return {}
    return {"weight": (family.weight(data).sum() / data.mask.sum()).sqrt(), "clients": data.mask.amax().double()}


def known_noise(task: Task, sums: dict[str, Tensor]) -> float | None:
    """σ² where it is no parameter; of counts, from sums of `weight_of`, one with which all sums are of usual size."""
    if task.features is not None:
        return None
    return float((sums["clients"] / sums["weight"]).square()) if "weight" in sums else 1.0
