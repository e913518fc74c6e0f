"""IFCA with gradient averaging on many mixtures of linear regressions at once.

A grid of settings is a batch. Trials have rows x of their own; the settings of a trial (separation, noise) share them
and differ in y; and every setting is run from several starts with several step sizes. All of that is one product of x
with a wide matrix of models, and one back. The tests hold it to `IFCA` itself, run by run.

Throughout, t is the trials, s their settings, l step sizes, r starts, u = s·l·r runs of a trial, k clusters, m clients,
n rows of each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from coterie.engines.products import Factor

SPAN = 20  # rounds, after which runs that have come to rest are sorted out
STILL = 1e-6  # the part of its largest parameter by which no parameter of a run at rest moved in the last round


class Mixtures(NamedTuple):
    """The data of some trials."""

    x: Factor  # (t, m·n, d)
    y: Tensor  # (t, m, n, s)

    @classmethod
    def of(cls, x: Tensor, noise: Tensor, truth: Tensor, sigma: Tensor) -> Mixtures:
        """Targets for every setting.

        Args:
            x: Rows (t, m, n, d), of clients in contiguous equal groups.
            noise: Standard normal (t, m, n).
            truth: θ* (t, s, k, d).
            sigma: The noise of every setting (s,).
        """
        t, m, n, d = x.shape
        k = truth.shape[2]
        own = torch.einsum("tkrd,tskd->tkrs", x.reshape(t, k, -1, d), truth)  # group k's rows meet its own truth
        return cls(Factor.of(x.reshape(t, m * n, d)), own.reshape(t, m, n, -1) + noise[..., None] * sigma)

    def only(self, clients: Tensor) -> Mixtures:
        """The clients of every trial that are numbered by (t, c)."""
        at = torch.arange(len(clients), device=clients.device)[:, None]
        y = self.y[at, clients]
        x = self.x.whole.unflatten(1, self.y.shape[1:3])[at, clients]
        return Mixtures(Factor.of(x.flatten(1, 2)), y)


class Runs(NamedTuple):
    """Runs of IFCA on the trials: u of them on each."""

    theta: Tensor  # (t, u, k, d)
    setting: Tensor  # which of the settings each run is about (u,)
    lr: Tensor  # the step size of each (u,)

    @classmethod
    def every(cls, starts: Tensor, lr: Tensor) -> Runs:
        """Every start (t, s, r, k, d) with every step size (l,): runs in the order of s, l, r."""
        t, s, r, k, d = starts.shape
        each = starts[:, :, None].expand(t, s, len(lr), r, k, d)
        setting = torch.arange(s, device=lr.device).repeat_interleave(len(lr) * r)
        return cls(each.reshape(t, -1, k, d), setting, lr.repeat_interleave(r).repeat(s))


def ifca(data: Mixtures, runs: Runs, rounds: int, *, normalise: str) -> tuple[Tensor, Tensor]:
    """Algorithm 1 with option I: the models (t, u, k, d) and the labels (t, u, m) after so many rounds.

    A run that no longer moves, or has diverged, is left where it is; the others go on without it.
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
        ]  # those that go on, and as many at rest
        y = data.y.gather(3, runs.setting[at][:, None, None].expand(-1, *data.y.shape[1:3], -1))
        now, lr = theta[trial, at], runs.lr[at][..., None, None]
        before, label = now, labels[trial, at]
        for _ in range(min(SPAN, rounds - begin)):
            before, (now, label) = now, _round(data.x, y, now, lr, normalise)
        on = going[trial, at]  # the others stay where they were
        theta[trial, at] = torch.where(on[..., None, None], now, theta[trial, at])
        labels[trial, at] = torch.where(on[..., None], label, labels[trial, at])
        going[trial, at] &= (now - before).abs().amax((2, 3)) > STILL * now.abs().amax((2, 3))  # of NaN, it is not
    return theta, labels


def _round(x: Factor, y: Tensor, theta: Tensor, lr: Tensor, normalise: str) -> tuple[Tensor, Tensor]:
    """One round of every run: x (t, m·n, d), y (t, m, n, u), theta (t, u, k, d)."""
    (t, u, k, d), (m, n) = theta.shape, y.shape[1:3]
    off = x.times(theta.reshape(t, u * k, d).transpose(1, 2)).reshape(t, m, n, u, k)
    off -= y[..., None]
    loss = torch.linalg.vector_norm(off, dim=2)  # it is least where the mean square is
    label = loss.nan_to_num(nan=torch.inf, posinf=torch.inf).argmin(-1)  # line 6 (t, m, u)
    chosen = label[..., None] == torch.arange(k, device=label.device)
    off.masked_fill_(~chosen[:, :, None], 0)
    gradient = x.after(off.reshape(t, m * n, u * k).transpose(1, 2)).reshape(theta.shape) * (2 / n)  # line 9
    share = 1 / m if normalise == "all" else 1 / chosen.sum(1)[..., None].clamp(min=1)
    return theta - lr * share * gradient, label.transpose(1, 2)  # line 14


def farthest_first(data: Mixtures, start: Tensor, lr: float, steps: int, k: int) -> Tensor:
    """What `FarthestFirst` finds (t, s, 1, k, d): `start` is the common model (t, d), all clients of `data` train."""
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
