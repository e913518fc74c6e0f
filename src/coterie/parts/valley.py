"""Two groups, or one hump? Numbers that are known up to an error of their own, such as where clients lie on a line.

Any distribution with one mode c is a mixture of uniform ones that begin or end at c (Khinchine 1938). So the best
distribution with one hump is found by its weights alone, without a shape that it must have: a continuum of clients is
not taken for two groups because it is flat, skewed or heavy-tailed rather than normal.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

STEPS = 200  # of expectation and maximisation
MODES = 17  # tried for the hump, from a little left of one group to a little right of the other
WIDTHS = 22  # of the uniform distributions to either side of the mode
BLIND = 100.0  # an error from which on a number says nothing; the groups are 1 apart
NARROW = 0.25  # the least variance of a group, of that of both
LEAST = 1e-8  # the same, where both have none


def valley(at: Tensor, error: Tensor) -> float:
    """The log-likelihood of two normal groups, less that of the best distribution with one hump.

    Args:
        at: The numbers (m,), on a scale on which the groups are near 0 and 1.
        error: The standard error of each (m,).

    Example:
        >>> near = torch.linspace(-0.1, 0.1, 20)
        >>> valley(torch.cat([near, 1 + near]), torch.full((40,), 0.05)) > 10
        True
        >>> valley(torch.linspace(0, 1, 40), torch.full((40,), 0.05)) > 0
        False
    """
    seen = error < BLIND
    at, error = at[seen].double(), error[seen].double()
    return two_groups(at, error) - one_hump(at, error) if len(at) else 0.0


def two_groups(at: Tensor, error: Tensor) -> float:
    """The greatest log-likelihood of two normal groups, from 0 and 1 on."""
    centres, variance, share = at.new_tensor([0.0, 1.0]), at.new_tensor([0.05, 0.05]), at.new_tensor([0.5, 0.5])
    found = -math.inf
    for _ in range(STEPS):
        total = variance + error[:, None].square()
        off = at[:, None] - centres
        each = share.log() - 0.5 * (off.square() / total + (2 * math.pi * total).log())
        before, found = found, float(each.logsumexp(1).sum())
        if found - before < 1e-3:
            break
        own, known = each.softmax(1), variance / total
        squares = own * ((known * off).square() + known * error[:, None].square())
        least = max(NARROW * float(squares.sum()) / len(at), LEAST)  # a few clients at one point are no group
        variance = (squares.sum(0) / own.sum(0).clamp(min=1e-9)).clamp(min=least)
        share = own.mean(0).clamp(min=1e-6)
        centres = (own / total * at[:, None]).sum(0) / (own / total).sum(0).clamp(min=1e-12)
    return found


def one_hump(at: Tensor, error: Tensor) -> float:
    """The greatest log-likelihood of a distribution with one mode, wherever that is."""
    mode = torch.linspace(-0.1, 1.1, MODES, dtype=at.dtype)[:, None]
    span = max(float(at.max() - at.min()), 1.0) + 0.2
    width = torch.cat([at.new_tensor([1e-3]), torch.logspace(-1.7, math.log10(span), WIDTHS, dtype=at.dtype)])
    end = mode + torch.cat([-width, width])
    low, high = torch.minimum(mode, end)[:, None], torch.maximum(mode, end)[:, None]  # (c, 1, w)
    density = _between((low - at[:, None]) / error[:, None], (high - at[:, None]) / error[:, None]) / (high - low)
    density = density.float().clamp(min=1e-30)  # (c, m, w)
    weight = torch.full_like(density[:, :1], 1 / density.shape[2])
    for _ in range(STEPS):
        part = density * weight
        weight = (part / part.sum(2, keepdim=True)).mean(1, keepdim=True)
    return float((density * weight).sum(2).log().sum(1).max())


def _between(low: Tensor, high: Tensor) -> Tensor:
    """Φ(high) - Φ(low), from the tail that has the digits."""
    right = low > 0
    a, b = torch.where(right, -high, low), torch.where(right, -low, high)
    return torch.special.ndtr(b) - torch.special.ndtr(a)
