"""A linear map: logistic regression, or linear regression."""

from __future__ import annotations

from torch import Tensor, nn


class Linear(nn.Linear):
    """y = xWᵀ + b on flattened rows.

    Args:
        inputs: Features of a row.
        outputs: Classes, or targets.
        bias: Whether to learn b.

    Example:
        >>> import torch
        >>> Linear(4, 2)(torch.zeros(3, 2, 2)).shape
        torch.Size([3, 2])
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__(inputs, outputs, bias)
        self.spec = {"name": "linear", "inputs": inputs, "outputs": outputs, "bias": bias}

    def forward(self, input: Tensor) -> Tensor:
        """One row of outputs per row of inputs."""
        return super().forward(input.flatten(1))
