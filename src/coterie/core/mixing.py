"""The outputs of several models (j, n, …) as one (n, …), by the models' shares (j,)."""

from __future__ import annotations

import torch
from torch import Tensor


def mean_output(outs: Tensor, shares: Tensor) -> Tensor:
    """The mean of the outputs."""
    return torch.tensordot(shares, outs, 1)


def mean_exponential(outs: Tensor, shares: Tensor) -> Tensor:
    """The log of the mean of densities, or of rates, given their logs."""
    return (outs + shares.log().reshape(-1, *[1] * (outs.dim() - 1))).logsumexp(0)


def mean_probability(outs: Tensor, shares: Tensor) -> Tensor:
    """The log of the mean of the probabilities that logits (j, n, …, classes) give."""
    return mean_exponential(outs.log_softmax(-1), shares)
