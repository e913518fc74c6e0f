"""A client's own model: near one that it was sent, and as far from it as rows that were left out speak for.

There are several candidates, from "as it was sent" to "almost alone". A client with few rows cannot tell which is best,
so it does not pick one. It averages them, each by how likely it makes the rows that it was not fitted to; and it
keeps the result only if that serves those rows better than what was sent.

Throughout, n is the client's rows, d the parameters, c the candidates, k the models that were sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from coterie.core.local import clipped, each_model, gradient_of, mean_loss
from coterie.core.optimisers import Optimiser
from coterie.core.pytree import Params, flat, stack, take, tree_map, unflat
from coterie.core.task import SHARE, Data, Task
from coterie.parts.residuals import features, residuals

FOLDS = 5  # in which rows are left out where there is no formula for leaving out each
AS_SENT = 0.5  # how likely it is beforehand that a client needs no model of its own
EXACT = 1e-10  # of the squares of targets: smaller errors are rounding
FREE = 1e-6  # the least pull in a closed form: with none, few rows have no single solution


class Descent(NamedTuple):
    """How a client goes on from a model by gradient steps.

    Attributes:
        lr: The step size.
        steps: After how many steps there is a candidate.
        strengths: Pulls s towards the model that was sent, for each of which steps are made.
        optimiser: How to step.
        clip: The length to which longer gradients are shortened.
        caution: Standard errors by which the result must serve rows that were left out better.
    """

    lr: float
    steps: Sequence[int]
    strengths: Sequence[float]
    optimiser: Optimiser
    clip: float | None
    caution: float


# --- models that are linear in their parameters ----------------------------------------------------------------------


def fit_exactly(
    task: Task, theta: Params, own: Tensor, data: Data, strengths: Sequence[float], caution: float
) -> Params:
    """The own model of a client, by ridge regressions of the errors of each model that was sent.

    Args:
        task: With squared loss, and a model that is linear in its parameters.
        theta: The models that were sent (k, …).
        own: Which of them is the client's.
        data: Its rows.
        strengths: Pulls s, in rows: towards a sent model θ, Σ(y - ⟨φ, v⟩)² + s‖v - θ‖² is least.
        caution: Standard errors by which it must serve rows that were left out better.
    """
    sent, phi = flat(theta).double(), features(task, data).double() * data.mask[:, None]
    scale = (phi.square().sum(0) / data.mask.sum().clamp(min=1)).sqrt().clamp(min=1)  # no column counts by its unit
    level = features(task, data._replace(x=torch.zeros_like(data.x[:1])))[0].double() / scale
    errors = residuals(phi, data._replace(y=data.y.double()), sent)
    rounding = EXACT * (data.y.double() * data.mask).square().sum()
    found = _ridge(phi / scale, errors, _unit(level), _spreads(strengths, phi))
    share = _shares(_likely(found, data.mask.sum(), rounding), _prior(found.surprise))
    mean = torch.einsum("ck,ckd->d", share, sent + (found.change / scale[:, None]).mT)
    averaged = torch.einsum("ck,cnk->n", share, found.left_out)
    helps = _helps(take(errors.T, own).square(), averaged.square(), data.mask, caution)
    return _if(helps, unflat(mean.to(data.x.dtype), take(theta, 0)), take(theta, own))


def _spreads(strengths: Sequence[float], like: Tensor) -> Tensor:
    """Standard deviations beforehand (c, 2): of a client's level, and of its other parameters, which vary no more.

    In the first candidate nothing varies: it is the model as it was sent.
    """
    each = [max(s, FREE) ** -0.5 for s in strengths]
    pairs = [(level, other) for level in each for other in (*each, 0.0) if other <= level]
    return like.new_tensor([(0.0, 0.0), *pairs])


def _unit(direction: Tensor) -> Tensor:
    """The same of length 1; 0 if it is 0."""
    return direction / direction.norm().clamp(min=torch.finfo(direction.dtype).tiny)


class _Fits(NamedTuple):
    """Ridge regressions of the errors of k models.

    With C = (I + ΨΨᵀ)⁻¹, where ΨΨᵀ is the covariance of the rows' outputs beforehand, in units of the noise.
    """

    change: Tensor  # of the parameters (c, d, k)
    left_out: Tensor  # errors on every row of the fit to all others (c, n, k): (C·errors)_i / C_ii
    surprise: Tensor  # errorsᵀ·C·errors (c, k)
    volume: Tensor  # -log det C (c, 1)


def _ridge(phi: Tensor, errors: Tensor, level: Tensor, spread: Tensor) -> _Fits:
    """Fit errors (n, k) by features (n, d).

    Args:
        phi: The features.
        errors: Of the models.
        level: The direction (d,) in which parameters change the output by the same number for all rows.
        spread: Of changes beforehand (c, 2): along that direction, and otherwise.
    """
    few = phi.shape[0] <= phi.shape[1]
    values, vectors = torch.linalg.eigh(phi @ phi.mT if few else phi.mT @ phi)  # once for all candidates
    values, basis = values.clamp(min=0), vectors if few else phi @ vectors
    other = spread[:, 1, None].square()
    more = spread[:, 0, None, None].square() - other[..., None]  # along the level: C⁻¹ has one more term, of rank 1
    shrink = other * (values if few else 1) / (1 + other * values)

    def left(v: Tensor) -> Tensor:
        return v - basis @ (shrink[..., None] * (basis.mT @ v))  # (c, n, k)

    offset = (phi @ level)[:, None]
    moved = left(offset)
    bulk = more * (offset * moved).sum(1, keepdim=True)
    gain = more / (1 + bulk)
    rest = left(errors) - gain * moved * (moved.mT @ errors)
    own = 1 - (basis.square() @ shrink.mT).mT[..., None] - gain * moved.square()
    found = phi.mT @ rest
    return _Fits(
        change=other[..., None] * found + more * level[:, None] * (level @ found)[:, None],
        left_out=rest / own,
        surprise=(errors * rest).sum(1),
        volume=(other * values).log1p().sum(1, keepdim=True) + bulk[:, 0].log1p(),
    )


def _likely(found: _Fits, rows: Tensor, rounding: Tensor) -> Tensor:
    """How likely each fit makes rows that it has not seen, as a logarithm (c, k), for the likeliest noise.

    Rows can be left out one at a time, or in all ways and numbers, which amounts to the likelihood of all of them under
    what was known beforehand. The first forgives fits that need nearly all rows, the second what is known wrongly
    beforehand; the mean of both serves better than either.
    """
    one_by_one = -rows / 2 * (found.left_out.square().sum(1) + rounding).log()
    in_all_ways = -rows / 2 * (found.surprise + rounding).log() - found.volume / 2
    return (one_by_one + in_all_ways) / 2


# --- all others ------------------------------------------------------------------------------------------------------


def fit_by_steps(task: Task, begin: Callable[[Data], Params], data: Data, descent: Descent, fixed: set[str]) -> Params:
    """The own model of a client, by gradient steps from the model that it begins with.

    Args:
        task: Any with a loss per row.
        begin: The model to begin with, given the rows that may be used.
        data: The client's rows.
        descent: How to step.
        fixed: Names of what is not trained.
    """
    rows, held = data.mask.sum(), _folds(data.mask)
    rest = data.mask * (1 - held)
    starts = [begin(data._replace(mask=mask)) for mask in rest]
    scored = task.serving(starts[-1])

    def fitted(start: Params, mask: Tensor) -> Params:
        return _path(scored, start, data._replace(mask=mask), descent, {*fixed, SHARE})

    def left_out(theta: Params, loss: Callable[[Params], Tensor]) -> Tensor:
        each = each_model(loss)(theta)  # (FOLDS, …, n)
        return torch.where(held[:-1].reshape(FOLDS, *[1] * (each.dim() - 2), -1) > 0, each, 0).sum(0)

    found = each_model(fitted)(stack(starts), rest)  # (FOLDS + 1, c, …)
    of_folds = tree_map(lambda x: x[:-1], found)
    losses = left_out(of_folds, each_model(lambda t: scored.loss(t, data)))  # (c, n)
    squared = task.features is not None  # then for the likeliest noise; other losses are minus a log-likelihood
    likely = -rows / 2 * losses.sum(1).log() if squared else -losses.sum(1)
    share = _shares(likely, _prior(likely))
    averaged = left_out(of_folds, lambda t: scored.loss(_mean(t, share), data))  # (n,)
    helps = _helps(losses[0], averaged, data.mask, descent.caution)
    return _if(helps, _mean(take(found, FOLDS), share), starts[-1])


def _folds(mask: Tensor) -> Tensor:
    """1 for rows that are left out (FOLDS + 1, n): in turn, and in the end none. Each of few rows has its own turn."""
    turn = torch.arange(len(mask), device=mask.device) % FOLDS
    out = (turn == torch.arange(FOLDS + 1, device=mask.device)[:, None]).to(mask)
    return out * mask


def _path(task: Task, theta: Params, data: Data, descent: Descent, fixed: set[str]) -> Params:
    """The model to begin with, and those after some steps with each pull towards it (c, …)."""
    start = {n: p for n, p in theta.items() if n not in fixed}
    rest, rows, found = {n: p for n, p in theta.items() if n in fixed}, data.mask.sum().clamp(min=1), [theta]
    lr = data.mask.new_tensor(descent.lr)
    for strength in descent.strengths:
        now, moments = start, descent.optimiser.begin(start)
        pull = 2 * strength * lr / rows
        for q in range(max(descent.steps)):
            gradient, _ = gradient_of(lambda p: mean_loss(task, {**p, **rest}, data), now)
            gradient = gradient if descent.clip is None else clipped(gradient, descent.clip)
            now, moments = descent.optimiser.step(now, gradient, moments, lr)
            now = tree_map(lambda p, s, a=pull: (p + a * s) / (1 + a), now, start)  # implicit: no pull is too strong
            if q + 1 in descent.steps:
                found.append({**theta, **now})
    return stack(found)


# --- averaging, and whether it helps ---------------------------------------------------------------------------------


def _prior(like: Tensor) -> Tensor:
    """How likely candidates are beforehand (c, …): the first is the model as it was sent."""
    as_sent = torch.eye(len(like)).to(like)[0].reshape(-1, *[1] * (like.dim() - 1))
    return torch.where(as_sent > 0, AS_SENT, (1 - AS_SENT) / (len(like) - 1))


def _shares(likely: Tensor, prior: Tensor) -> Tensor:
    """Shares of candidates, all together 1, given how likely each makes rows that were left out."""
    return (likely + prior.log()).nan_to_num(-torch.inf).flatten().softmax(0).reshape(likely.shape)


def _mean(theta: Params, share: Tensor) -> Params:
    """The mean of models (c, …); one without a share may be anything."""

    def mean(x: Tensor) -> Tensor:
        if not x.is_floating_point():  # a buffer that counts, which no candidate has moved
            return x[0]
        by = share.reshape(-1, *[1] * (x.dim() - 1)).to(x.dtype)
        return torch.where(by > 0, x * by, 0).sum(0)

    return tree_map(mean, theta)


def _helps(before: Tensor, after: Tensor, mask: Tensor, caution: float) -> Tensor:
    """Whether losses (n,) on rows that were left out are lower than those of the model as it was sent; one is none.

    Args:
        before: Of the model as it was sent.
        after: Of the client's own.
        mask: 1 for real rows.
        caution: Paired standard errors by which they must be lower on average.
    """
    rows, gain = mask.sum(), (before - after) * mask
    mean = gain.sum() / rows.clamp(min=1)
    variance = ((gain - mean) * mask).square().sum() / (rows - 1).clamp(min=1) / rows.clamp(min=1)
    return (mean > caution * variance.sqrt()) & (rows > 1)


def _if(helps: Tensor, own: Params, sent: Params) -> Params:
    finite = torch.stack([x.isfinite().all() for x in own.values()]).all()
    return {name: torch.where(helps & finite, x, sent[name]) for name, x in own.items()}
