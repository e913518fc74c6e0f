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
EXACT = 1e-10  # of the mean square of targets: smaller errors are rounding
FREE = 1e-6  # the least pull in a closed form: with none, few rows have no single solution


class Descent(NamedTuple):
    """How a client goes on from a model by gradient steps.

    Attributes:
        lr: The step size.
        steps: After how many steps there is a candidate.
        strengths: Pulls s towards the model that was sent, for each of which steps are made.
        optimiser: How to step.
        clip: The length to which longer gradients are shortened.
    """

    lr: float
    steps: Sequence[int]
    strengths: Sequence[float]
    optimiser: Optimiser
    clip: float | None


# --- models that are linear in their parameters ----------------------------------------------------------------------


def fit_exactly(task: Task, theta: Params, own: Tensor, data: Data, strengths: Sequence[float]) -> Params:
    """The own model of a client, by ridge regressions of the residuals of each model that was sent.

    Args:
        task: With squared loss, and a model that is linear in its parameters.
        theta: The models that were sent (k, …).
        own: Which of them is the client's.
        data: Its rows.
        strengths: Pulls s, in rows: towards a sent model θ, Σ(y - ⟨φ, v⟩)² + s‖v - θ‖² is least.
    """
    phi, sent, rows = features(task, data).double(), flat(theta).double(), data.mask.sum()
    phi = phi * data.mask[:, None]
    scale = (phi.square().sum(0) / rows.clamp(min=1)).sqrt().clamp(min=1)  # no column counts by its unit
    level = features(task, data._replace(x=torch.zeros_like(data.x[:1])))[0].double() / scale
    errors = residuals(phi, data._replace(y=data.y.double()), sent)
    spread = _spreads(strengths, phi)
    change, left_out = _ridge(phi / scale, errors, _unit(level), spread)
    change = torch.cat([torch.zeros_like(sent)[None], (change / scale[:, None]).mT])  # (c + 1, k, d)
    left_out = torch.cat([errors.T[None], left_out.mT])  # (c + 1, k, n)
    loss = left_out.square().sum(-1) / rows.clamp(min=1) + EXACT * data.y.double().square().mean()
    share = _shares(loss, _prior(len(spread), loss)[:, None], rows, squared=True)
    mean = torch.tensordot(share, sent + change, 2)
    before = take(errors.T, own).square()
    helps = _helps(before, torch.tensordot(share, left_out, 2).square(), data.mask)
    return _if(helps, unflat(mean.to(data.x.dtype), take(theta, 0)), take(theta, own))


def _spreads(strengths: Sequence[float], like: Tensor) -> Tensor:
    """Standard deviations beforehand (c, 2): of a client's level, and of its other parameters, which vary no more."""
    each = [max(s, FREE) ** -0.5 for s in strengths]
    return like.new_tensor([(level, other) for level in each for other in (*each, 0.0) if other <= level])


def _unit(direction: Tensor) -> Tensor:
    """The same of length 1; 0 if it is 0."""
    return direction / direction.norm().clamp(min=torch.finfo(direction.dtype).tiny)


def _ridge(phi: Tensor, errors: Tensor, level: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    """How parameters change, and what is then left of errors on every row if it is left out.

    Args:
        phi: Features (n, d).
        errors: Of k models (n, k).
        level: The direction (d,) in which parameters change the output by the same number for all rows.
        spread: Of changes beforehand (c, 2): along that direction, and otherwise.

    Returns:
        Changes (c, d, k), and errors (c, n, k) of the fit to all other rows.
    """
    along, other = spread[:, 0, None], spread[:, 1, None]
    spread_out = other[..., None] * phi + (along - other)[..., None] * (phi @ level)[:, None] * level  # (c, n, d)
    n, d = phi.shape
    if n <= d:
        inverse = torch.linalg.inv(torch.eye(n).to(phi) + spread_out @ spread_out.mT)
        fitted = inverse @ errors
        left_out, found = fitted / inverse.diagonal(dim1=1, dim2=2)[..., None], spread_out.mT @ fitted
    else:
        inverse = torch.linalg.inv(torch.eye(d).to(phi) + spread_out.mT @ spread_out)
        found = inverse @ (spread_out.mT @ errors)
        leverage = ((spread_out @ inverse) * spread_out).sum(-1, keepdim=True)
        left_out = (errors - spread_out @ found) / (1 - leverage)
    change = other[..., None] * found + (along - other)[..., None] * level[:, None] * (level @ found)[:, None]
    return change, left_out


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

    found = each_model(fitted)(stack(starts), rest)  # (FOLDS + 1, c + 1, …)
    of_folds = tree_map(lambda x: x[:-1], found)
    losses = left_out(of_folds, each_model(lambda t: scored.loss(t, data)))  # (c + 1, n)
    mean_losses = losses.sum(1) / rows.clamp(min=1) + torch.finfo(losses.dtype).tiny
    share = _shares(mean_losses, _prior(len(losses) - 1, losses), rows, squared=task.features is not None)
    averaged = left_out(of_folds, lambda t: scored.loss(_mean(t, share), data))  # (n,)
    return _if(_helps(losses[0], averaged, data.mask), _mean(take(found, FOLDS), share), starts[-1])


def _folds(mask: Tensor) -> Tensor:
    """1 for rows that are left out (FOLDS + 1, n): in turn, and in the end none. Each of few rows has its own turn."""
    turn = torch.arange(len(mask), device=mask.device) % FOLDS
    out = (turn == torch.arange(FOLDS + 1, device=mask.device)[:, None]).to(mask)
    return out * mask


def _path(task: Task, theta: Params, data: Data, descent: Descent, fixed: set[str]) -> Params:
    """The model to begin with, and those after some steps with each pull towards it (c + 1, …)."""
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


def _prior(c: int, like: Tensor) -> Tensor:
    """How likely the model as it was sent and c others are beforehand (c + 1,)."""
    return like.new_tensor([AS_SENT, *[(1 - AS_SENT) / c] * c])


def _shares(loss: Tensor, prior: Tensor, rows: Tensor, *, squared: bool) -> Tensor:
    """How likely candidates are, all together 1, given their mean losses on rows that were left out.

    A loss is taken for a negative log-likelihood; a squared one for that of a normal error with the likeliest variance.
    """
    likely = -rows * (loss.log() / 2 if squared else loss) + prior.log()
    return likely.nan_to_num(-torch.inf).flatten().softmax(0).reshape(loss.shape)


def _mean(theta: Params, share: Tensor) -> Params:
    """The mean of models (c, …); one without a share may be anything."""

    def mean(x: Tensor) -> Tensor:
        if not x.is_floating_point():  # a buffer that counts, which no candidate has moved
            return x[0]
        by = share.reshape(-1, *[1] * (x.dim() - 1)).to(x.dtype)
        return torch.where(by > 0, x * by, 0).sum(0)

    return tree_map(mean, theta)


def _helps(before: Tensor, after: Tensor, mask: Tensor) -> Tensor:
    """Whether losses (n,) on rows that were left out are lower than those of the model as it was sent; one is none."""
    return (((before - after) * mask).sum() > 0) & (mask.sum() > 1)


def _if(helps: Tensor, own: Params, sent: Params) -> Params:
    finite = torch.stack([x.isfinite().all() for x in own.values()]).all()
    return {name: torch.where(helps & finite, x, sent[name]) for name, x in own.items()}
