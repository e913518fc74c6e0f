"""Losses and scores, one value per row."""

from __future__ import annotations

import math

import torch
from torch import Tensor

LARGEST = 45.0  # the log of a rate above all whole numbers of 64 bits: from there on losses rise as a straight line


def cross_entropy(out: Tensor, y: Tensor) -> Tensor:
    """-log of the probability that the logits (n, classes) give the label; torch's own is slow under vmap."""
    return out.logsumexp(-1) - out.gather(-1, y[..., None])[..., 0]


def word_cross_entropy(out: Tensor, y: Tensor) -> Tensor:
    """The mean over the positions of -log of the probability that the logits (n, length, words) give the word."""
    return cross_entropy(out, y).mean(-1)


def squared_error(out: Tensor, y: Tensor) -> Tensor:
    """(y - f(x))², summed over the outputs; of a single output, it or the targets may be of shape (n,) or (n, 1)."""
    off = (out.reshape(y.shape) - y).square()
    return off.flatten(1).sum(1) if y.dim() > 1 else off


def poisson(out: Tensor, y: Tensor) -> Tensor:
    """-log of the probability of a count, e^out - y·out + log y!; both may be of shape (n,) or (n, 1)."""
    out, y = out.reshape(len(y)), y.reshape(len(y))
    return excess(out, y.to(out)) + least(y).to(out)


def poisson_deviance(out: Tensor, y: Tensor) -> Tensor:
    """Twice by how much a count is less likely than under a rate equal to it."""
    out, y = out.reshape(len(y)), y.reshape(len(y))
    return 2 * excess(out, y.to(out))


def excess(out: Tensor, y: Tensor) -> Tensor:
    """By how much -log of a count's probability exceeds its least: e^out - y - y(out - log y), e^out for y = 0.

    It is computed from out - log y, so that large counts are not lost in rounding.
    """
    about, beyond = y.clamp(min=1), (out - LARGEST).clamp(min=0)
    off = out.clamp(max=LARGEST) - about.log()
    return about * off.expm1() - y * off + (about - y) + beyond * (math.exp(LARGEST) - y)


def least(y: Tensor) -> Tensor:
    """-log of the probability of a count under the rate that makes it likeliest, in double precision."""
    y = y.double()
    return y - torch.xlogy(y, y) + (y + 1).lgamma()


def is_right(out: Tensor, y: Tensor) -> Tensor:
    """1 where the largest logit is that of the label."""
    return (out.argmax(-1) == y).float()


def surprise(out: Tensor, y: Tensor) -> Tensor:
    """-log-likelihood, given the log-likelihood."""
    return -out


def doubt(out: Tensor, y: Tensor) -> Tensor:
    """-log of the probability of the likeliest class."""
    return -out.log_softmax(-1).amax(-1)
