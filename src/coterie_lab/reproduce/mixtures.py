"""IFCA with gradient averaging on many mixtures of linear regressions at once.

A grid of settings is a batch. Each trial has its own rows x; the settings of a trial (separation, noise) share these
rows and differ in y; and every setting is run from several starts with several step sizes. A round of all of them is
one product of x with a wide matrix of models, and one product back. The tests compare every run with `IFCA` itself.

Shapes are written with t trials, s settings of each, l step sizes, r starts, u = s·l·r runs per trial, k clusters, m
clients and n rows per client.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from coterie.engines.products import Factor

SPAN = 20  # rounds after which runs that have converged are removed from the batch
STILL = 1e-6  # a run has converged if no parameter changed by more than this fraction of the largest one


class Mixtures(NamedTuple):
    """The rows and targets of several trials."""

    x: Factor  # (t, m·n, d)
    y: Tensor  # (t, m, n, s)

    @classmethod
    def of(cls, x: Tensor, noise: Tensor, truth: Tensor, sigma: Tensor) -> Mixtures:
        """Compute the targets for every setting.

        Args:
            x: Rows (t, m, n, d), of clients in contiguous groups of equal size.
            noise: Standard normal noise (t, m, n).
            truth: True models θ* (t, s, k, d).
            sigma: Standard deviation of the noise of every setting (s,).
        """
        t, m, n, d = x.shape
        k = truth.shape[2]
        own = torch.einsum("tkrd,tskd->tkrs", x.reshape(t, k, -1, d), truth)  # group k's rows times its own truth
        return cls(Factor.of(x.reshape(t, m * n, d)), own.reshape(t, m, n, -1) + noise[..., None] * sigma)

    def only(self, clients: Tensor) -> Mixtures:
        """Return the data of some clients of every trial.

        Args:
            clients: Indices of the clients (t, c).
        """
        at = torch.arange(len(clients), device=clients.device)[:, None]
        y = self.y[at, clients]
        x = self.x.whole.unflatten(1, self.y.shape[1:3])[at, clients]
        return Mixtures(Factor.of(x.flatten(1, 2)), y)


class Runs(NamedTuple):
    """Runs of IFCA: u runs on each trial."""

    theta: Tensor  # (t, u, k, d)
    setting: Tensor  # the setting of each run (u,)
    lr: Tensor  # the step size of each run (u,)

    @classmethod
    def every(cls, starts: Tensor, lr: Tensor) -> Runs:
        """Combine every start with every step size; runs are in the order of s, l, r.

        Args:
            starts: Initial models (t, s, r, k, d).
            lr: Step sizes (l,).
        """
        t, s, r, k, d = starts.shape
        each = starts[:, :, None].expand(t, s, len(lr), r, k, d)
        setting = torch.arange(s, device=lr.device).repeat_interleave(len(lr) * r)
        return cls(each.reshape(t, -1, k, d), setting, lr.repeat_interleave(r).repeat(s))


def ifca(data: Mixtures, runs: Runs, rounds: int, *, normalise: str) -> tuple[Tensor, Tensor]:
    """Run Algorithm 1 with option I, and return the last models (t, u, k, d) and labels (t, u, m).

    A run that has converged or diverged is not updated any more; the others continue without it.

    Args:
        data: The trials.
        runs: The runs on each trial.
        rounds: Number of rounds.
        normalise: "all" divides the sum of gradients by the number of clients, otherwise by that of the cluster.
    """
    t, u, m = *runs.theta.shape[:2], data.y.shape[1]
    theta, labels = runs.theta.clone(), torch.zeros(t, u, m, dtype=torch.long, device=runs.theta.device)
    going = torch.ones(t, u, dtype=torch.bool, device=theta.device)
    trial = torch.arange(t, device=theta.device)[:, None]
    for begin in range(0, rounds, SPAN):
        most = int(going.sum(1).max())
        if not most:
            break
        at = going.byte().argsort(dim=1, descending=True, stable=True)[
            :, :most
        ]  # those that continue, padded with converged ones
        y = data.y.gather(3, runs.setting[at][:, None, None].expand(-1, *data.y.shape[1:3], -1))
        now, lr = theta[trial, at], runs.lr[at][..., None, None]
        before, label = now, labels[trial, at]
        for _ in range(min(SPAN, rounds - begin)):
            before, (now, label) = now, _round(data.x, y, now, lr, normalise)
        on = going[trial, at]  # the others do not change
        theta[trial, at] = torch.where(on[..., None, None], now, theta[trial, at])
        labels[trial, at] = torch.where(on[..., None], label, labels[trial, at])
        going[trial, at] &= (now - before).abs().amax((2, 3)) > STILL * now.abs().amax((2, 3))  # False for NaN
    return theta, labels


def _round(x: Factor, y: Tensor, theta: Tensor, lr: Tensor, normalise: str) -> tuple[Tensor, Tensor]:
    """Run one round of every run, given x (t, m·n, d), y (t, m, n, u) and theta (t, u, k, d)."""
    (t, u, k, d), (m, n) = theta.shape, y.shape[1:3]
    off = x.times(theta.reshape(t, u * k, d).transpose(1, 2)).reshape(t, m, n, u, k)
    off -= y[..., None]
    loss = torch.linalg.vector_norm(off, dim=2)  # its minimum is where that of the mean square is
    label = loss.nan_to_num(nan=torch.inf, posinf=torch.inf).argmin(-1)  # line 6 (t, m, u)
    chosen = label[..., None] == torch.arange(k, device=label.device)
    off.masked_fill_(~chosen[:, :, None], 0)
    gradient = x.after(off.reshape(t, m * n, u * k).transpose(1, 2)).reshape(theta.shape) * (2 / n)  # line 9
    share = 1 / m if normalise == "all" else 1 / chosen.sum(1)[..., None].clamp(min=1)
    return theta - lr * share * gradient, label.transpose(1, 2)  # line 14


def farthest_first(data: Mixtures, start: Tensor, lr: float, steps: int, k: int) -> Tensor:
    """Return the initial models that `FarthestFirst` finds (t, s, 1, k, d).

    Args:
        data: The trials, with the clients that train a candidate each.
        start: The common model that clients train from (t, d).
        lr: Step size.
        steps: Number of local steps.
        k: Number of clusters.
    """
    (t, m, n, s), d = data.y.shape, start.shape[1]
    x = data.x.whole.reshape(t, m, n, d)
    off = torch.einsum("tmnd,td->tmn", x, start)[..., None] - data.y
    kernel, rows = x @ x.transpose(2, 3), torch.zeros_like(off)  # in the dual form: θ_i = start + X_iᵀ rows_i
    for _ in range(steps):
        rows -= lr * 2 / n * (off + kernel @ rows)
    served, taken = off.square().mean(2), torch.zeros(t, m, s, dtype=torch.bool, device=x.device)
    at_t, at_s, models = torch.arange(t)[:, None], torch.arange(s), []
    for j in range(k):
        worst = served.masked_fill(taken, -torch.inf).argmax(1)  # (t, s)
        taken[at_t, worst, at_s] = True
        models.append(start[:, None] + torch.einsum("tsnd,tsn->tsd", x[at_t, worst], rows[at_t, worst, :, at_s]))
        now = (data.x.times(models[-1].transpose(1, 2)).reshape(off.shape) - data.y).square().mean(2)
        served = now if j == 0 else served.minimum(now)
    return torch.stack(models, 2)[:, :, None]
