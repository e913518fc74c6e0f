"""The convolutional network of the IFCA paper's rotated CIFAR-10.

An Efficient Framework for Clustered Federated Learning
    Avishek Ghosh, Jichan Chung, Dong Yin, Kannan Ramchandran. NeurIPS 2020.
"""

from __future__ import annotations

from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

# Of the weights of each layer, and the constants of the biases; the model of TensorFlow's tutorial has them so.
_CONVOLUTION, _HIDDEN = 0.05, 0.04
_BIAS = 0.1
_WINDOW, _ALPHA = 9, 0.001  # channels that local response normalisation looks at, and its strength


class CifarCNN(nn.Module):
    """The CNN of TensorFlow's first CIFAR-10 tutorial, which the IFCA paper trains on crops of 24 × 24.

    Two convolutions (5 × 5) with ReLU, max-pooling (3 × 3, stride 2) and local response normalisation, which come in
    the other order the second time, and two hidden layers. Weights are drawn from normal distributions that are cut off
    at two standard deviations: 0.05 for convolutions, 0.04 for hidden layers, 1 / inputs for the last layer. Biases
    begin at 0 for the first convolution and the last layer, at 0.1 for the others. The tutorial's weight decay of
    0.004 on the two hidden layers is no part of the model.

    Args:
        shape: (channels, height, width) of an image; height and width are multiples of 4.
        classes: Number of classes.
        channels: Number of filters of each convolution.
        hidden: Number of units of the two hidden layers.

    Example:
        >>> import torch
        >>> net = CifarCNN()
        >>> net(torch.zeros(5, 3, 24, 24)).shape, sum(p.numel() for p in net.parameters())
        (torch.Size([5, 10]), 1068298)
    """

    def __init__(
        self,
        shape: tuple[int, int, int] = (3, 24, 24),
        classes: int = 10,
        channels: int = 64,
        hidden: tuple[int, int] = (384, 192),
    ) -> None:
        super().__init__()
        if len(shape) != 3:
            raise ValueError(f"CifarCNN: shape must be channels, height and width, got {list(shape)}")
        depth, height, width = shape
        if min(height, width) < 4 or height % 4 or width % 4:
            raise ValueError(f"CifarCNN: height and width must be multiples of 4, got {height} and {width}")
        if len(hidden) != 2:
            raise ValueError(f"CifarCNN: hidden must be the sizes of two layers, got {list(hidden)}")
        self.spec = {
            "name": "cifar_cnn", "shape": list(shape), "classes": classes, "channels": channels, "hidden": list(hidden),
        }  # fmt: skip
        self.convolutions = nn.ModuleList(nn.Conv2d(n, channels, 5, padding=2) for n in (depth, channels))
        sizes = (channels * (height // 4) * (width // 4), *hidden, classes)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        first, second = (cast(nn.Conv2d, layer) for layer in self.convolutions)
        one, two, last = (cast(nn.Linear, layer) for layer in self.layers)
        for layer, spread, bias in (
            (first, _CONVOLUTION, 0.0),
            (second, _CONVOLUTION, _BIAS),
            (one, _HIDDEN, _BIAS),
            (two, _HIDDEN, _BIAS),
            (last, 1 / last.in_features, 0.0),
        ):
            nn.init.trunc_normal_(layer.weight, std=spread, a=-2 * spread, b=2 * spread)
            assert layer.bias is not None  # all layers above have one
            nn.init.constant_(layer.bias, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, one row per image."""
        first, second = self.convolutions
        weight, bias = cast(Tensor, first.weight), cast(Tensor, first.bias)  # to torch.fx they are something else
        # Which of some numbers is the largest is known without bias and ReLU, which then see a quarter of them.
        x = _pooled(functional.conv2d(x, weight, padding=2))
        x = (x + bias.to(x.dtype)[:, None, None]).relu()
        x = _pooled(_normalised(second(_normalised(x)).relu())).flatten(1)
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        return self.layers[-1](x)


def _pooled(x: Tensor) -> Tensor:
    """Of even sizes this halves them, as TensorFlow's padding does."""
    return functional.max_pool2d(x, 3, 2, ceil_mode=True)


def _normalised(x: Tensor) -> Tensor:
    """Local response normalisation, as torch computes it but for the power of -¾: by roots, which cost less."""
    squares = x.square().flatten(2).unsqueeze(1)
    around = functional.avg_pool2d(squares, (_WINDOW, 1), 1, (_WINDOW // 2, 0)).squeeze(1).reshape(x.shape)
    root = (1 + _ALPHA * around.to(torch.promote_types(x.dtype, torch.float32))).rsqrt()
    return x * (root * root.sqrt())
