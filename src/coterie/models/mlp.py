"""A multilayer perceptron."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn


class MLP(nn.Module):
    """A multilayer perceptron: linear layers with ReLU between them, on flattened rows.

    Args:
        sizes: Number of features, of hidden units of each layer, and of classes: `MLP(784, 200, 10)` is the IFCA
            paper's.

    Example:
        >>> [name for name, _ in MLP(64, 32, 10).named_parameters()]
        ['layers.0.weight', 'layers.0.bias', 'layers.1.weight', 'layers.1.bias']
    """

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        if len(sizes) < 2:
            raise ValueError(f"MLP: sizes must be at least two numbers, features and classes, got {list(sizes)}")
        if min(sizes) < 1:
            raise ValueError(f"MLP: sizes must be at least 1, got {list(sizes)}")
        self.spec = {"name": "mlp", "sizes": list(sizes)}
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, one row per row of x."""
        x = x.flatten(1)
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        return self.layers[-1](x)
