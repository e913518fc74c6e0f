"""Covariances of clusters from federated sums, shrunk by as much as they are likely to have overfitted.

A cluster's covariance has d² numbers. If it is fitted to few points, wrongly assigned ones among them, each of these is
likelier under it than a point of the same kind that was not there: so wrong assignments freeze. The cure is Ledoit and
Wolf's: a covariance S of n points is replaced by (1 - λ)S + λT, with λ the expected squared error of S over its squared
distance from T. T is what all clusters have in common, their mean covariance, which is itself shrunk towards its
diagonal. All columns are first brought to the same scale.

A Well-Conditioned Estimator for Large-Dimensional Covariance Matrices
    Olivier Ledoit, Michael Wolf. Journal of Multivariate Analysis 88, 2004.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Moments(NamedTuple):
    """Sums over the points of every cluster, about a common point."""

    number: Tensor  # (…, k)
    first: Tensor  # (…, k, d)
    second: Tensor  # (…, k, d, d)
    about: Tensor  # (d,)

    def of(self, restart: int) -> Moments:
        """The sums of one restart."""
        return Moments(self.number[restart], self.first[restart], self.second[restart], self.about)

    def less(self, part: Moments) -> Moments:
        """The sums without those over a part of the points."""
        return Moments(self.number - part.number, self.first - part.first, self.second - part.second, self.about)

    def each(self, times: int) -> Moments:
        """The sums of each restart so many times."""
        number, first, second = (x.repeat_interleave(times, 0) for x in self[:3])
        return Moments(number, first, second, self.about)


def covariances(moments: Moments, pull: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """Means (…, k, d) and covariances (…, k, d, d).

    Args:
        moments: The sums.
        pull: The part of λ that is taken (…): 0 does not shrink.
        ridge: Added to all variances, as a part of their mean.
    """
    count = moments.number.clamp(min=1)[..., None]
    mean = moments.first / count
    own = moments.second / count[..., None] - mean[..., :, None] * mean[..., None, :]
    points = moments.number.sum(-1)
    common = (moments.number[..., None, None] * own).sum(-3) / points[..., None, None]
    scale = common.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
    scale = torch.where(scale > 0, scale, 1.0)  # a column that is constant stays as it is
    by = scale[..., :, None] * scale[..., None, :]
    target = _shrunk(common / by, torch.diag_embed((common / by).diagonal(dim1=-2, dim2=-1)), points)
    shrunk = _shrunk(own / by[..., None, :, :], target[..., None, :, :].expand_as(own), moments.number.clamp(min=1))
    chosen = torch.lerp(own, shrunk * by[..., None, :, :], pull.to(own)[..., None, None, None])
    unit = torch.eye(own.shape[-1], dtype=own.dtype, device=own.device)
    width = torch.where(_trace(common) > 0, _trace(common), _spread(moments))  # clusters may be points
    thickened = ridge * width[..., None, None] / own.shape[-1] * unit
    return mean + moments.about.to(mean), chosen + thickened[..., None, :, :]


def _shrunk(own: Tensor, target: Tensor, count: Tensor) -> Tensor:
    """(1 - λ)S + λT; the expected squared error of S is that for Gaussian points, which S itself tells."""
    error = (_trace(own).square() + own.square().sum((-2, -1))) / count
    apart = (own - target).square().sum((-2, -1))
    share = (error / apart.clamp(min=1e-300)).clamp(max=1)[..., None, None]
    return (1 - share) * own + share * target


def _spread(moments: Moments) -> Tensor:
    """The variance of all points, over all columns together (…)."""
    points = moments.number.sum(-1)
    square = (moments.first.sum(-2) / points[..., None]).square().sum(-1)
    return _trace(moments.second).sum(-1) / points - square


def _trace(x: Tensor) -> Tensor:
    return x.diagonal(dim1=-2, dim2=-1).sum(-1)
