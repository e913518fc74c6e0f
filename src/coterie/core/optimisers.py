"""Optimisers as pure functions, with the arithmetic of `torch.optim`: for clients' steps, and for the server's.

Adam: A Method for Stochastic Optimization
    Diederik P. Kingma, Jimmy Ba. ICLR 2015.
Decoupled Weight Decay Regularization (AdamW)
    Ilya Loshchilov, Frank Hutter. ICLR 2019.
Adaptive Federated Optimization (an optimiser at the server; Yogi)
    Sashank Reddi, Zachary Charles, Manzil Zaheer, Zachary Garrett, Keith Rush, Jakub Konečný, Sanjiv Kumar,
    H. Brendan McMahan. ICLR 2021, Algorithm 2.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie.core.pytree import Params, tree_map
from coterie.core.registry import find, register
from coterie.core.settings import setting

Moments = dict[str, Any]  # what an optimiser remembers: trees of parameters, and the number of steps


@dataclass(frozen=True, kw_only=True)
class Optimiser(ABC):
    """A way to step along gradients.

    Args:
        keep: Whether a client keeps what the optimiser remembers from one round to the next, as long as it stays in its
            cluster. Otherwise every round begins anew.
    """

    keep: bool = False

    @abstractmethod
    def begin(self, theta: Params) -> Moments:
        """What is remembered before the first step."""

    @abstractmethod
    def step(self, theta: Params, gradient: Params, moments: Moments, lr: Tensor) -> tuple[Params, Moments]:
        """The parameters after a step, and what is remembered."""


@dataclass(frozen=True, kw_only=True)
class Decaying(Optimiser):
    """A way to step that can also pull parameters towards 0.

    Args:
        weight_decay: Pull towards 0, added to the gradient.
        decay_only: The parameters that are pulled, by the beginnings of their names; None for all.
    """

    weight_decay: float = setting(0.0, low=0)
    decay_only: tuple[str, ...] | None = None

    def check_names(self, theta: Params) -> None:
        """Refuse to pull parameters that are not there."""
        for beginning in self.decay_only or ():
            if not any(name.startswith(beginning) for name in theta):
                raise ValueError(f"decay_only: no parameter begins with '{beginning}'; they are: {', '.join(theta)}")

    def pulled(self, theta: Params, gradient: Params) -> Params:
        """The gradient, with weight decay."""
        if not self.weight_decay:
            return gradient
        return {n: g + self.weight_decay * theta[n] if self.decays(n) else g for n, g in gradient.items()}

    def decays(self, name: str) -> bool:
        """Whether weight decay pulls the parameter of that name."""
        return self.decay_only is None or name.startswith(tuple(self.decay_only))


@register("sgd", "optimiser")
@dataclass(frozen=True, kw_only=True)
class SGD(Decaying):
    """Gradient descent, as `torch.optim.SGD`.

    Args:
        momentum: Share of the last step that is made again.
        nesterov: Whether the gradient is that ahead of the momentum's step.

    Example:
        >>> theta, slope = {"w": torch.tensor([1.0])}, {"w": torch.tensor([2.0])}
        >>> SGD().step(theta, slope, SGD().begin(theta), torch.tensor(0.1))[0]["w"]
        tensor([0.8000])
    """

    momentum: float = setting(0.0, low=0, high=1)
    nesterov: bool = False

    def begin(self, theta: Params) -> Moments:
        """No velocity."""
        self.check_names(theta)
        return {"velocity": tree_map(torch.zeros_like, theta)} if self.momentum else {}

    def step(self, theta: Params, gradient: Params, moments: Moments, lr: Tensor) -> tuple[Params, Moments]:
        """One step."""
        gradient = self.pulled(theta, gradient)
        if self.momentum:
            velocity = tree_map(lambda v, g: self.momentum * v + g, moments["velocity"], gradient)
            moments = {"velocity": velocity}
            gradient = tree_map(lambda g, v: g + self.momentum * v, gradient, velocity) if self.nesterov else velocity
        return tree_map(lambda p, g: torch.addcmul(p, g, lr, value=-1), theta, gradient), moments  # p - lr · g


@register("adam", "optimiser")
@dataclass(frozen=True, kw_only=True)
class Adam(Decaying):
    """Adam, as `torch.optim.Adam`.

    Args:
        beta1: Decay of the mean of gradients.
        beta2: Decay of the mean of their squares.
        eps: Added to the root of the squares.
    """

    beta1: float = setting(0.9, low=0, high=1)
    beta2: float = setting(0.999, low=0, high=1)
    eps: float = setting(1e-8, low=0)

    def begin(self, theta: Params) -> Moments:
        """No gradient seen."""
        self.check_names(theta)
        mean, square = (tree_map(torch.zeros_like, theta) for _ in range(2))
        first = next(iter(theta.values()))
        return {"mean": mean, "square": square, "steps": torch.zeros((), dtype=torch.long, device=first.device)}

    def step(self, theta: Params, gradient: Params, moments: Moments, lr: Tensor) -> tuple[Params, Moments]:
        """One step."""
        theta, gradient = self.decayed(theta, gradient, lr)
        mean = tree_map(lambda m, g: m.lerp(g, 1 - self.beta1), moments["mean"], gradient)
        square = tree_map(self.squared, moments["square"], gradient)
        after = {"mean": mean, "square": square, "steps": moments["steps"] + 1}
        size, unbias = self.corrections(after["steps"], lr)
        move = tree_map(lambda m, v: size * m / (v.sqrt() * unbias + self.eps), mean, square)
        return tree_map(torch.sub, theta, move), after

    def decayed(self, theta: Params, gradient: Params, lr: Tensor) -> tuple[Params, Params]:
        """The parameters and the gradient with weight decay."""
        return theta, self.pulled(theta, gradient)

    def squared(self, square: Tensor, gradient: Tensor) -> Tensor:
        """The mean of squared gradients."""
        return square * self.beta2 + (1 - self.beta2) * gradient.square()

    def corrections(self, steps: Tensor, lr: Tensor) -> tuple[Tensor, Tensor]:
        """The step size, and the factor of the root of squares, corrected for having begun at 0."""
        t = steps.double()  # 1 - 0.999 has no more than five digits in float32
        size = lr.double() / (1 - self.beta1**t)
        return size.to(lr.dtype), (1 - self.beta2**t).rsqrt().to(lr.dtype)


@register("adamw", "optimiser")
@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """Adam with weight decay apart from the gradient, as `torch.optim.AdamW`.

    Args:
        weight_decay: Every step multiplies the parameters that decay by 1 - lr·weight_decay first.
    """

    weight_decay: float = setting(0.01, low=0)

    def decayed(self, theta: Params, gradient: Params, lr: Tensor) -> tuple[Params, Params]:
        """The parameters shrunk, the gradient as it is."""
        return {n: p * (1 - lr * self.weight_decay) if self.decays(n) else p for n, p in theta.items()}, gradient


@register("yogi", "optimiser")
@dataclass(frozen=True, kw_only=True)
class Yogi(Adam):
    """Yogi as in Algorithm 2 of Reddi et al.: squares grow fast and shrink slowly. Without correction of the begin.

    Args:
        beta2: Decay of the mean of squares.
        eps: τ, the degree of adaptivity; squares begin at τ².
    """

    beta2: float = setting(0.99, low=0, high=1)
    eps: float = setting(1e-3, low=0)

    def begin(self, theta: Params) -> Moments:
        """Squares of τ²."""
        square = tree_map(lambda p: torch.full_like(p, self.eps**2), theta)
        return {**super().begin(theta), "square": square}

    def squared(self, square: Tensor, gradient: Tensor) -> Tensor:
        """Squares that move by at most the newest square."""
        new = gradient.square()
        return square - (1 - self.beta2) * new * torch.sign(square - new)

    def corrections(self, steps: Tensor, lr: Tensor) -> tuple[Tensor, Tensor]:
        """None."""
        return lr, torch.ones_like(lr)


PLAIN = SGD()


def find_optimiser(given: str | Optimiser, where: str) -> Optimiser:
    """The optimiser meant by a name, or given with its settings.

    Args:
        given: What the user gave.
        where: The beginning of the message if there is none of that name.
    """
    return find("optimiser", given, where)() if isinstance(given, str) else given
