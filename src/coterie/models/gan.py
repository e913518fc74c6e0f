"""The three networks of ClusterGAN: a generator, a critic, and an encoder that inverts the generator.

ClusterGAN: Latent Space Clustering in Generative Adversarial Networks
    Sudipto Mukherjee, Himanshu Asnani, Eugene Lin, Sreeram Kannan. AAAI 2019.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

SLOPE = 0.2  # negative slope of the leaky ReLUs


class GAN(nn.Module):
    """Networks that map between rows and codes (z_n, z_c): dz numbers that vary within a cluster, and the cluster.

    The generator maps codes to rows, the critic scores rows, the encoder maps rows to codes. There is no batch
    normalisation, which the original has in its generator and encoder: a federation cannot average it. Pixels lie
    between 0 and 1.

    Args:
        shape: (channels, height, width) of an image, or (d,) for points, whose networks have linear layers only.
        k: Number of clusters.
        dz: Number of values of a code besides its cluster.
        channels: Number of filters of each convolution, each of which halves the image; None takes 64 and 128 for
            images, and no convolutions for points.
        hidden: Number of units of each hidden layer.

    Example:
        >>> import torch
        >>> gan = GAN((1, 8, 8), k=10, channels=(4, 8), hidden=(16,))
        >>> gan.generator(torch.zeros(5, 40)).shape, gan.critic(torch.zeros(5, 1, 8, 8)).shape
        (torch.Size([5, 1, 8, 8]), torch.Size([5, 1]))
        >>> gan(torch.zeros(5, 1, 8, 8)).shape
        torch.Size([5, 10])
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        k: int,
        dz: int = 30,
        channels: tuple[int, ...] | None = None,
        hidden: tuple[int, ...] = (1024,),
    ) -> None:
        super().__init__()
        if len(shape) not in (1, 3):
            raise ValueError(f"GAN: shape must be (channels, height, width) or (d,), got {tuple(shape)}")
        if channels is None:
            channels = (64, 128) if len(shape) == 3 else ()
        if channels and (len(shape) == 1 or any(side % 2 ** len(channels) for side in shape[1:])):
            raise ValueError(
                f"GAN: with {len(channels)} convolutions, rows must be images whose height and width are multiples of "
                f"{2 ** len(channels)}, got shape {tuple(shape)}"
            )
        self.spec = {
            "name": "gan", "shape": list(shape), "k": k, "dz": dz, "channels": list(channels), "hidden": list(hidden),
        }  # fmt: skip
        self.k, self.dz = k, dz
        if len(shape) == 3:
            self.between = (0.0, 1.0)
        self.generator = _generator(dz + k, shape, channels, hidden)
        # A constant added to all scores of the critic changes neither network's loss.
        self.critic = _reader(shape, channels, hidden, 1, bias=False)
        self.encoder = _reader(shape, channels, hidden, dz + k)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the clusters, one row per row of x."""
        return self.encoder(x)[:, self.dz :]


def _reader(
    shape: Sequence[int], channels: Sequence[int], hidden: Sequence[int], out: int, *, bias: bool = True
) -> nn.Sequential:
    """Build a network from rows to `out` numbers: convolutions that halve an image, then hidden layers."""
    sizes = [math.prod(_smallest(shape, channels)), *hidden]
    convolutions = [nn.Conv2d(a, b, 4, stride=2, padding=1) for a, b in pairwise([shape[0], *channels])]
    layers: list[nn.Module] = [nn.Linear(a, b) for a, b in pairwise(sizes)]
    layers.append(nn.Linear(sizes[-1], out, bias=bias))
    layers[0] = nn.Sequential(nn.Flatten(), layers[0])
    return _rectified([*convolutions, *layers])


def _generator(codes: int, shape: Sequence[int], channels: Sequence[int], hidden: Sequence[int]) -> nn.Sequential:
    """Build a network from codes to rows: the layers of `_reader` in reverse order."""
    small = _smallest(shape, channels)
    layers: list[nn.Module] = [nn.Linear(a, b) for a, b in pairwise([codes, *reversed(hidden), math.prod(small)])]
    layers[-1] = nn.Sequential(layers[-1], nn.Unflatten(1, small))
    wider = [*reversed(channels), shape[0]] if channels else []
    layers += [nn.ConvTranspose2d(a, b, 4, stride=2, padding=1) for a, b in pairwise(wider)]
    return nn.Sequential(_rectified(layers), nn.Sigmoid() if len(shape) == 3 else nn.Identity())


def _rectified(layers: Sequence[nn.Module]) -> nn.Sequential:
    """Put a leaky ReLU between the layers."""
    between = [part for layer in layers for part in (layer, nn.LeakyReLU(SLOPE))]
    return nn.Sequential(*between[:-1])


def _smallest(shape: Sequence[int], channels: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a row after the last convolution."""
    return (channels[-1], *(side >> len(channels) for side in shape[1:])) if channels else tuple(shape)
