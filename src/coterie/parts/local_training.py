"""The training that clients do on their own rows, as hyperparameters that several methods have."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.core.optimisers import PLAIN, Optimiser, find_optimiser
from coterie.core.settings import setting
from coterie.core.step import Weights
from coterie.core.train import Descend
from coterie.parts.schedules import Schedule


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """Hyperparameters of the training that clients do on their own rows.

    Args:
        lr: Step size γ.
        tau: Local steps τ per round.
        epochs: Passes over the client's rows per round, in place of τ steps: clients with more rows take more steps.
        batch: Rows per local step, from shuffled passes over the client's rows; None takes all of them each time.
        decay: The step size of round t is γ·decayᵗ.
        lr_schedule: More about the step size: `StepDecay`, `Cosine`, `Warmup`, or a function of the round t; it is
            multiplied by `lr_schedule(t)`.
        optimiser: How clients step: `SGD` (with momentum, Nesterov's, weight decay), `Adam`, `AdamW`, or their names.
        clip: The gradient of a step is shortened to this length if it is longer.
        fraction: Share of the clients that take part in a round.
        weights: "uniform": every client counts the same; "size": by its number of rows.
    """

    lr: float = setting(0.1, low=0)
    tau: int = setting(10, low=1)
    epochs: int | None = setting(None, low=1)
    batch: int | None = setting(None, low=1)
    decay: float = setting(1.0, low=0, high=1)
    lr_schedule: Schedule | Callable[[int], float] | None = None
    optimiser: str | Optimiser = PLAIN
    clip: float | None = setting(None, low=0)
    fraction: float = setting(1.0, low=0, high=1)
    weights: Weights = "uniform"

    def step_size(self, t: int) -> Tensor:
        """The step size of round t, to be sent to clients."""
        return torch.tensor(self.lr * self.decay**t * self._factor(t))

    def _factor(self, t: int) -> float:
        factor = 1.0 if self.lr_schedule is None else self.lr_schedule(t)
        if not isinstance(factor, int | float) or not 0 <= factor < math.inf:
            owner = type(self).__name__
            raise ValueError(f"{owner}: lr_schedule must give a number of at least 0, got {factor!r} for round {t}")
        return float(factor)

    def descend(self, prox: float = 0.0) -> Descend:
        """The local steps, as a description; `prox` is FedProx's μ."""
        whole = self.epochs is not None and self.batch is None  # a pass is one step
        return Descend(
            tau=self.epochs or self.tau if whole else self.tau,
            batch=self.batch,
            prox=prox,
            steady=self.decay == 1 and self.lr_schedule is None,
            optimiser=find_optimiser(self.optimiser, f"{type(self).__name__}: optimiser"),
            clip=self.clip,
            epochs=None if whole else self.epochs,
        )
