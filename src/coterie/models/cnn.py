"""A small convolutional network."""

from __future__ import annotations

from torch import Tensor, nn


class CNN(nn.Module):
    """Convolutions with ReLU and max-pooling, then a hidden layer.

    Args:
        shape: (channels, height, width) of an image.
        classes: Number of classes.
        channels: Number of filters of each convolution.
        kernel: Width of a filter.
        hidden: Number of units of the hidden layer.

    Example:
        >>> import torch
        >>> CNN((1, 8, 8), 10, channels=(4, 8), kernel=3, hidden=16)(torch.zeros(5, 1, 8, 8)).shape
        torch.Size([5, 10])
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        channels: tuple[int, ...] = (32, 64),
        kernel: int = 5,
        hidden: int = 128,
    ) -> None:
        super().__init__()
        self.spec = {
            "name": "cnn", "shape": list(shape), "classes": classes, "channels": list(channels), "kernel": kernel,
            "hidden": hidden,
        }  # fmt: skip
        if len(shape) != 3:
            raise ValueError(f"CNN: shape must be channels, height and width, got {list(shape)}")
        if min(classes, hidden, *channels) < 1:
            raise ValueError(
                f"CNN: classes, hidden and channels must be at least 1, got {classes}, {hidden}, {channels}"
            )
        depth, height, width = shape
        if min(height, width) < (least := 2 ** len(channels)):
            raise ValueError(f"CNN: an image must be at least {least} wide and high to be halved {len(channels)} times")
        self.convolutions = nn.ModuleList(
            nn.Conv2d(a, b, kernel, padding="same") for a, b in zip((depth, *channels), channels, strict=False)
        )
        pixels = (height >> len(channels)) * (width >> len(channels))
        self.hidden = nn.Linear(channels[-1] * pixels, hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, one row per image."""
        for convolution in self.convolutions:
            x = nn.functional.max_pool2d(convolution(x), 2).relu()  # in this order ReLU sees a quarter of the numbers
        return self.head(self.hidden(x.flatten(1)).relu())


class FemnistCNN(CNN):
    """LEAF's model of FEMNIST, which the IFCA paper trains: a `CNN` of 32 and 64 filters, 2,048 units and 62 classes.

    Args:
        classes: Number of classes.
        hidden: Number of units of the hidden layer.

    Example:
        >>> sum(p.numel() for p in FemnistCNN().parameters())
        6603710
    """

    def __init__(self, classes: int = 62, hidden: int = 2048) -> None:
        super().__init__((1, 28, 28), classes, hidden=hidden)
        self.spec = {"name": "femnist_cnn", "classes": classes, "hidden": hidden}
