"""The training that clients do on their own rows, as hyperparameters that several methods have."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.core.settings import setting
from coterie.core.train import Descend, Weights


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """Hyperparameters of the training that clients do on their own rows.

    Args:
        lr: Step size γ.
        tau: Local steps τ per round.
        batch: Rows per local step, from shuffled passes over the client's rows; None takes all of them each time.
        decay: The step size of round t is γ·decayᵗ.
        fraction: Share of the clients that take part in a round.
        weights: "uniform": every client counts the same; "size": by its number of rows.
    """

    lr: float = setting(0.1, low=0)
    tau: int = setting(10, low=1)
    batch: int | None = setting(None, low=1)
    decay: float = setting(1.0, low=0, high=1)
    fraction: float = setting(1.0, low=0, high=1)
    weights: Weights = "uniform"

    def step_size(self, t: int) -> Tensor:
        """γ·decayᵗ, to be sent to clients."""
        return torch.tensor(self.lr * self.decay**t)

    def descend(self, prox: float = 0.0) -> Descend:
        """τ local steps, as a description; `prox` is FedProx's μ."""
        return Descend(self.tau, self.batch, prox, steady=self.decay == 1)
