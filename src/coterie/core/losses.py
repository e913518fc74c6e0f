"""Losses, one value per row."""

from __future__ import annotations

from torch import Tensor


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
