"""What the server does with the mean of its clients' models: take it, or step towards it with an optimiser of its own.

Adaptive Federated Optimization
    Sashank Reddi, Zachary Charles, Manzil Zaheer, Zachary Garrett, Keith Rush, Jakub Konečný, Sanjiv Kumar,
    H. Brendan McMahan. ICLR 2021, Algorithm 2: the mean change Δ of a round is used as a gradient is, per cluster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from coterie.core.optimisers import PLAIN, Optimiser, find_optimiser
from coterie.core.pytree import Params, tree_map
from coterie.core.settings import setting
from coterie.core.task import Task


@dataclass(frozen=True, kw_only=True)
class ServerStep:
    """Hyperparameters of the server's step.

    Args:
        server: How each cluster's model steps along the mean change of its clients' models: `SGD` (with momentum,
            FedAvgM), `Adam` (FedAdam), `Yogi` (FedYogi), or their names. The default takes the mean as it is.
        server_lr: Step size of the server.
    """

    server: str | Optimiser = PLAIN
    server_lr: float = setting(1.0, low=0)

    @property
    def takes_the_mean(self) -> bool:
        """Whether a cluster's new model is just the mean of its clients' models."""
        return self.server in (PLAIN, "sgd") and self.server_lr == 1

    def begin_server(self, theta: Params, task: Task) -> Any:
        """What the server's optimiser remembers of models (k, …) before the first round; () where it has none."""
        return () if self.takes_the_mean else vmap(self._server.begin)(_trained(theta, task))

    def advance(self, theta: Params, mean: Params, weight: Tensor, moments: Any, task: Task) -> tuple[Params, Any]:
        """The models after the server's step, and what its optimiser remembers.

        Args:
            theta: The models that were sent (k, …).
            mean: The means of what came back (k, …).
            weight: The clients' weight in each (k,); a cluster that nobody was in does not move.
            moments: What was remembered.
            task: Says which of a model's tensors are trained; all others become their mean.
        """
        if self.takes_the_mean:
            return mean, moments
        old = _trained(theta, task)
        change = {n: old[n] - mean[n] for n in old}  # -Δ
        rate = torch.full_like(weight, self.server_lr)
        new, after = vmap(self._server.step)(old, change, moments, rate)
        where = _where(weight > 0)
        return {**mean, **tree_map(where, new, old)}, tree_map(where, after, moments)

    def begun_again(self, moments: Any, theta: Params, which: Tensor, task: Task) -> Any:
        """What the server's optimiser remembers, where some models (k,) have just been started again."""
        return tree_map(_where(which), self.begin_server(theta, task), moments)

    @property
    def _server(self) -> Optimiser:
        return find_optimiser(self.server, f"{type(self).__name__}: server")


def _where(which: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Takes rows of the first of two tensors where `which` (k,) says so, else of the second."""
    return lambda a, b: torch.where(which.to(a.device).reshape(-1, *[1] * (a.dim() - 1)), a, b)


def _trained(theta: Params, task: Task) -> Params:
    return {n: x for n, x in theta.items() if n not in task.moving}
