"""Normalising flows: models of a density, with one log-likelihood per row."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from coterie.tree import Params


class AffineFlow(nn.Module):
    """x = g(z) with g affine and z standard normal: any Gaussian.

    It holds the inverse, z = Wx + b. Its best parameters follow from the mean and the covariance of the rows, so
    federated training needs two sums per client and no gradient steps: see `from_moments`.

    Args:
        inputs: Dimensions of a row.

    Example:
        >>> flow = AffineFlow(2)
        >>> flow(torch.zeros(5, 2)).shape
        torch.Size([5])
    """

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, inputs))
        self.bias = nn.Parameter(torch.empty(inputs))
        self.spec = {"name": "affine_flow", "inputs": inputs}
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Near the identity, so that no model begins with a likelihood far above the others'."""
        with torch.no_grad():
            self.weight.copy_(torch.eye(len(self.bias)) + 0.01 * torch.randn_like(self.weight))
            self.bias.normal_(0, 0.01)

    def forward(self, x: Tensor) -> Tensor:
        """Log-likelihood of every row."""
        z = x.flatten(1) @ self.weight.T + self.bias
        constant = -0.5 * len(self.bias) * math.log(2 * math.pi)
        return constant - 0.5 * z.square().sum(1) + torch.linalg.slogdet(self.weight)[1]

    @staticmethod
    def from_moments(mean: Tensor, covariance: Tensor) -> Params:
        """The parameters of the greatest likelihood for rows of such mean (…, d) and covariance (…, d, d).

        Example:
            >>> params = AffineFlow.from_moments(torch.tensor([3.0]), torch.tensor([[4.0]]))
            >>> params["weight"].item(), params["bias"].item()
            (0.5, -1.5)
        """
        eye = torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device).expand(covariance.shape)
        weight = torch.linalg.solve_triangular(torch.linalg.cholesky(covariance), eye, upper=False)
        return {"weight": weight, "bias": -(weight @ mean[..., None])[..., 0]}
