"""Whether a run came to anything: its losses, its score beside that of a constant, and the scales of x."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean, median

import torch
from torch import Tensor

from coterie.core.engine import Engine
from coterie.core.federation import Federation
from coterie.core.losses import poisson_deviance
from coterie.storage.packed import Packed

ROWS = 100_000  # rows at most that are looked at
NUMBERS = 10**7  # numbers of x at most that are looked at
BLOCKS = 100  # places from which rows are taken where not all are: what is mapped from a file is read in pages
APART = 100  # times that columns may differ in scale
NOTABLE = 0.02  # of the first loss, by which the loss has to go up
TINY = 1e-9  # a deviance that is none: all counts are the same
HELP = "a smaller lr usually helps"


def doubts(losses: Sequence[float], score: float, engine: Engine) -> Iterator[str]:
    """Say what speaks against the result of a run; nothing if it looks sound.

    Args:
        losses: The loss in every round.
        score: The mean score over clients at the end.
        engine: Whose clients were trained.
    """
    if rise := rising(losses):
        yield f"{rise}; {HELP}"
    if not engine.remote and (worse := _worse_than_constant(score, engine)):
        yield worse + scale_hint(engine)


def rising(losses: Sequence[float]) -> str | None:
    """Say that the loss has gone up, since the first round or since its best; None if it has not.

    Means over a tenth of the rounds are compared, so that the draw of one round's clients or rows counts for little.

    Args:
        losses: The loss in every round.

    Example:
        >>> rising([2.0, 1.0, 0.5, 0.4]), rising([2.0, 40.0, 20.0, 8.0])
        (None, 'the loss went up, from 2 to 8')
        >>> rising([2.0, 1.0, 0.5, 0.4, 0.9, 1.4, 1.9])
        'the loss went up again, from 0.4 in round 4 to 1.9'
    """
    if len(losses) < 2:
        return None
    width = max(1, len(losses) // 10)
    means = [fmean(losses[i : i + width]) for i in range(len(losses) - width + 1)]
    first, best, last = losses[0], min(means), means[-1]
    if last > first + NOTABLE * abs(first):
        return f"the loss went up, from {first:.4g} to {last:.4g}"
    jitter = median([abs(b - (a + c) / 2) for a, b, c in zip(losses, losses[1:], losses[2:], strict=False)] or [0.0])
    if last - best > max((first - best) / 2, NOTABLE * abs(first), 3 * jitter):
        return f"the loss went up again, from {best:.4g} in round {means.index(best) + 1} to {last:.4g}"
    return None


def scale_hint(engine: Engine) -> str:
    """Return the end of a message that says how far columns of x differ in scale; empty if it is not far.

    Args:
        engine: Whose clients were trained.
    """
    if engine.remote or (apart := _scales_apart(engine.federation)) <= APART:
        return ""
    return f"; columns of x differ in scale by {apart:.0e}: standardise them".replace("e+0", "e").replace("e+", "e")


def _worse_than_constant(score: float, engine: Engine) -> str | None:
    """Compare a score with that of the best constant, on the same rows and with the same weight for every client."""
    kind, rows = engine.task.spec.get("kind"), engine.federation.part("test")
    if kind == "regressor":
        at = _some(rows, ROWS)
        y = rows.y[at].double().reshape(len(at), -1)
        spread = _mean_over_clients((y - y.mean(0)).square().sum(1), at, rows)
        if score > 1.05 * spread:
            return f"the models do worse than the mean of y (MSE {score:.4g}, variance {spread:.4g})"
    if kind == "counts":
        at = _some(rows, ROWS)
        y = rows.y[at].double().flatten()
        alone = _mean_over_clients(poisson_deviance(y.mean().clamp(min=TINY).log().expand(len(y)), y), at, rows)
        if score > 1.05 * alone > TINY:
            return f"the models do worse than the mean of y (deviance {score:.4g}, of the mean {alone:.4g})"
    if kind == "classifier":
        at = _some(rows, ROWS)
        y = rows.y[at]
        share = _mean_over_clients((y == y.mode().values).double(), at, rows)
        if score <= share < 1:
            figures = f"accuracy {score:.4g}, share {share:.4g}"
            return f"the models do no better than always naming the commonest label ({figures})"
    return None


def _scales_apart(federation: Federation) -> float:
    """How many times the column of x with the largest values exceeds that with the smallest.

    Zeros do not count: a pixel that is seldom lit is not small for that.
    """
    x = federation.train.x
    if not x.is_floating_point() or x.dim() < 2:
        return 1.0
    values = x[_some(federation.train, min(ROWS, max(1, NUMBERS // x[0].numel())))].flatten(1).double()
    lit = (values != 0).sum(0)
    scales = (values.square().sum(0)[lit > 0] / lit[lit > 0]).sqrt()
    return float(scales.max() / scales.min()) if len(scales) else 1.0


def _some(rows: Packed, most: int) -> Tensor:
    """Positions of at most so many rows: all, or blocks from everywhere."""
    n = len(rows.x)
    if n <= most:
        return torch.arange(n)
    length = max(1, most // BLOCKS)
    starts = torch.linspace(0, n - length, most // length).long()
    return (starts[:, None] + torch.arange(length)).flatten().unique()


def _mean_over_clients(values: Tensor, at: Tensor, rows: Packed) -> float:
    """The mean over clients of the means over their rows, of values of the rows at these positions."""
    owner = torch.searchsorted(rows.offsets, at, right=True) - 1
    clients, owner, count = owner.unique(return_inverse=True, return_counts=True)
    total = torch.zeros(len(clients), dtype=values.dtype).index_add_(0, owner, values)
    return float((total / count).mean())
