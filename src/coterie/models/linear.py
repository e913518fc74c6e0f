"""Models that are linear in the rows or in features of the rows: logistic, linear and polynomial regression."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations_with_replacement

import torch
from torch import Tensor, nn


class Linear(nn.Linear):
    """A linear model of the flattened rows or of features of them: y = φ(x)Wᵀ + b.

    Args:
        inputs: Number of features of a row, after `phi`.
        outputs: Number of classes, or of targets.
        bias: Whether to learn b.
        phi: The feature map φ, rows (n, …) to features (n, inputs); the identity if None.

    Example:
        >>> import torch
        >>> Linear(4, 2)(torch.zeros(3, 2, 2)).shape
        torch.Size([3, 2])
        >>> Linear(2, 1, phi=lambda x: torch.stack([x.sum(1), x.square().sum(1)], 1))(torch.zeros(3, 9)).shape
        torch.Size([3, 1])
    """

    def __init__(
        self, inputs: int, outputs: int, bias: bool = True, phi: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        if min(inputs, outputs) < 1:
            raise ValueError(f"Linear: inputs and outputs must be at least 1, got {inputs} and {outputs}")
        super().__init__(inputs, outputs, bias)
        self.phi = phi
        if phi is None:  # a function cannot be written to the configuration of a run
            self.spec = {"name": "linear", "inputs": inputs, "outputs": outputs, "bias": bias}

    def forward(self, input: Tensor) -> Tensor:
        """Return one row of outputs per row of inputs."""
        return super().forward((input if self.phi is None else self.phi(input)).flatten(1))


class Polynomial(Linear):
    """A polynomial of the rows: a linear model of all monomials up to a degree.

    Args:
        inputs: Number of values in a row.
        degree: The highest total degree of a monomial.
        outputs: Number of targets.

    Example:
        >>> model = Polynomial(2, degree=2)  # x₁, x₂, x₁², x₁x₂, x₂², and the bias
        >>> model.weight.shape
        torch.Size([1, 5])
    """

    def __init__(self, inputs: int, degree: int, outputs: int = 1) -> None:
        if degree < 1:
            raise ValueError(f"Polynomial: degree must be at least 1, got {degree}")
        powers = [c for n in range(1, degree + 1) for c in combinations_with_replacement(range(inputs), n)]

        def monomials(x: Tensor) -> Tensor:
            columns = x.flatten(1).unbind(1)
            return torch.stack([torch.stack([columns[i] for i in power]).prod(0) for power in powers], 1)

        super().__init__(len(powers), outputs, phi=monomials)
        self.spec = {"name": "polynomial", "inputs": inputs, "degree": degree, "outputs": outputs}
