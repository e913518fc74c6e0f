"""A small AlexNet, and RotNet: features of a network that was trained to predict the rotation of images.

ImageNet Classification with Deep Convolutional Neural Networks
    Alex Krizhevsky, Ilya Sutskever, Geoffrey Hinton. NeurIPS 2012.
Unsupervised Representation Learning by Predicting Image Rotations
    Spyros Gidaris, Praveer Singh, Nikos Komodakis. ICLR 2018.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

TURNS = 4
LR, MOMENTUM, DECAY = 0.05, 0.9, 5e-4


class AlexNet(nn.Module):
    """Five convolutions for small images, with batch normalisation, and a linear layer on the mean of the last one.

    It is trained centrally by `rotnet`, before there is a federation.

    Args:
        depth: Number of channels of an image.
        classes: Number of classes.
        features: Number of filters of the last convolution.

    Example:
        >>> net = AlexNet(1, 4).eval()
        >>> net(torch.zeros(5, 1, 28, 28)).shape, net.represent(torch.zeros(5, 1, 28, 28)).shape
        (torch.Size([5, 4]), torch.Size([5, 64]))
    """

    def __init__(self, depth: int, classes: int, features: int = 64) -> None:
        super().__init__()
        widths = [depth, 32, 64, 96, 64, features]
        layers: list[nn.Module] = []
        for i in range(5):
            layers += [nn.Conv2d(widths[i], widths[i + 1], 3, padding=1, bias=False)]
            layers += [nn.BatchNorm2d(widths[i + 1]), nn.ReLU()]
            layers += [nn.MaxPool2d(2)] if i < 2 else []
        self.convolutions = nn.Sequential(*layers)
        self.head = nn.Linear(features, classes)

    def represent(self, x: Tensor) -> Tensor:
        """Return the features of every image: the mean activation of each filter of the last convolution."""
        return self.convolutions(x).mean((-2, -1))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, one row per image."""
        return self.head(self.represent(x))


def rotnet(images: Tensor, *, steps: int = 2000, batch: int = 128, seed: int = 0) -> AlexNet:
    """Train an AlexNet to predict which of four rotations was applied to an image, and return it for its features.

    Args:
        images: Square upright images (n, channels, height, width).
        steps: Number of steps of SGD with momentum, with a one-cycle learning-rate schedule.
        batch: Number of images per step, each of which is used in all four rotations.
        seed: Seed of the weights and of the batches.

    Example:
        >>> net = rotnet(torch.rand(8, 1, 28, 28), steps=2, batch=4)
        >>> net.represent(torch.rand(3, 1, 28, 28)).shape
        torch.Size([3, 64])
    """
    if images.dim() != 4 or images.shape[-1] != images.shape[-2] or images.shape[-1] < 4:
        raise ValueError(f"rotnet: images must be (n, channels, side, side), got shape {tuple(images.shape)}")
    if not len(images):
        raise ValueError("rotnet: there must be at least one image, got 0")
    g = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = AlexNet(images.shape[1], TURNS).to(images.device)
    optimiser = torch.optim.SGD(net.parameters(), LR, momentum=MOMENTUM, weight_decay=DECAY, nesterov=True)
    pace = torch.optim.lr_scheduler.OneCycleLR(optimiser, LR, total_steps=steps + 1)
    turn = torch.arange(TURNS, device=images.device).repeat_interleave(batch)
    for _ in range(steps):
        upright = images[torch.randint(len(images), (batch,), generator=g).to(images.device)]
        turned = torch.cat([torch.rot90(upright, t, (-2, -1)) for t in range(TURNS)])
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(turned), turn).backward()
        optimiser.step()
        pace.step()
    return net.eval().requires_grad_(False)
