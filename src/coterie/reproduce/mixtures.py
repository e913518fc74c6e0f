"""IFCA with gradient averaging on many mixtures of linear regressions at once.

A grid of settings is a batch. Trials have rows x of their own; the settings of a trial (separation, noise) share them
and differ in y; and every setting is run from several starts with several step sizes. All of that is one product of x
with a wide matrix of models, and one back. The tests hold it to `IFCA` itself, run by run.

Throughout, t is the trials, s their settings, l step sizes, r starts, k clusters, m clients, n rows of each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from coterie.executors.products import Factor


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


class Found(NamedTuple):
    """Where the runs ended."""

    theta: Tensor  # (t, s, l, r, k, d)
    labels: Tensor  # of the last round (t, s, l, r, m)


def ifca(data: Mixtures, theta: Tensor, lr: Tensor, rounds: int, *, normalise: str) -> Found:
    """Algorithm 1 with option I, from theta (t, s, r, k, d), for every step size in lr (l,)."""
    (t, m, n, s), (r, k, d) = data.y.shape, theta.shape[2:]
    theta = theta[:, :, None].repeat(1, 1, len(lr), 1, 1, 1)
    y, cluster = data.y[..., None, None], torch.arange(k, device=theta.device)
    label = torch.zeros((), device=theta.device)
    for _ in range(rounds):
        off = data.x.times(theta.reshape(t, -1, d).transpose(1, 2)).reshape(t, m, n, s, len(lr) * r, k)
        off -= y
        loss = torch.linalg.vector_norm(off, dim=2)  # it is least where the mean square is
        label = loss.nan_to_num(nan=torch.inf, posinf=torch.inf).argmin(-1)  # line 6 (t, m, s, l·r)
        chosen = label[..., None] == cluster
        off.masked_fill_(~chosen[:, :, None], 0)
        gradient = data.x.after(off.reshape(t, m * n, -1).transpose(1, 2)).reshape(theta.shape) * (2 / n)  # line 9
        members = chosen.sum(1).reshape(*theta.shape[:-1], 1)
        share = 1 / m if normalise == "all" else 1 / members.clamp(min=1)
        theta = theta - lr[:, None, None, None] * share * gradient  # line 14
    return Found(theta, label.permute(0, 2, 3, 1).reshape(*theta.shape[:4], m))


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
