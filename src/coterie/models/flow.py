"""Normalising flows: models of a density, with one log-likelihood per row.

A flow's `location` names the parameters that say where its rows lie rather than how they are spread. UIFCA leaves them
to each cluster where it shrinks the others towards what clusters have in common.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from coterie.core.pytree import Params


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

    location = ("bias",)

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


Mask = Literal["cyclic", "checkerboard"]


class RealNVP(nn.Module):
    """A flow for images: couplings, each of which moves one part of an image by what another part tells it.

    With the usual checkerboard mask a pixel is told by its neighbours: the model learns how strokes look, and finds
    other digits as likely as its own. With the cyclic mask of Kirichenko et al. a quarter of the image is told by the
    quarter before it (top left, top right, bottom right, bottom left): the model learns what the image shows.

    Pixels are 8-bit values divided by 255, made continuous by `dequantised`.

    Density Estimation Using Real NVP
        Laurent Dinh, Jascha Sohl-Dickstein, Samy Bengio. ICLR 2017.
    Why Normalizing Flows Fail to Detect Out-of-Distribution Data
        Polina Kirichenko, Pavel Izmailov, Andrew Gordon Wilson. NeurIPS 2020.

    Args:
        shape: (channels, height, width) of an image, height and width even.
        mask: "cyclic" or "checkerboard".
        couplings: How many; in a multiple of 4 the cyclic mask gives every quarter its turn equally often.
        channels: Filters of the convolutions in each coupling.
        blocks: Residual blocks of two convolutions in each coupling.

    Example:
        >>> flow = RealNVP((1, 8, 8), couplings=4, channels=4, blocks=1)
        >>> flow(torch.zeros(5, 1, 8, 8)).shape
        torch.Size([5])
    """

    location = ("centre",)
    between = (0.0, 1.0)

    def __init__(
        self,
        shape: tuple[int, ...] = (1, 28, 28),
        mask: Mask = "cyclic",
        couplings: int = 8,
        channels: int = 32,
        blocks: int = 2,
    ) -> None:
        super().__init__()
        if len(shape) != 3 or shape[1] % 2 or shape[2] % 2:
            raise ValueError(f"RealNVP: shape must be (channels, even height, even width), got {tuple(shape)}")
        if mask not in (known := get_args(Mask)):
            raise ValueError(f"RealNVP: mask must be one of {', '.join(known)}, got {mask!r}")
        self.spec = {
            "name": "real_nvp", "shape": list(shape), "mask": mask, "couplings": couplings, "channels": channels,
            "blocks": blocks,
        }  # fmt: skip
        self.mask = mask
        self.centre = nn.Parameter(torch.zeros(shape))
        self.couplings = nn.ModuleList(Coupling(shape[0], channels, blocks) for _ in range(couplings))

    def reset_parameters(self) -> None:
        """The latent normal distribution begins around the origin."""
        nn.init.zeros_(self.centre)

    def forward(self, x: Tensor) -> Tensor:
        """Log-likelihood of every image."""
        if x.shape[1:] != self.centre.shape:
            raise ValueError(f"RealNVP: an image must be of shape {tuple(self.centre.shape)}, got {tuple(x.shape[1:])}")
        start, volume = _logit(dequantised(x))
        z, grown = (self._around if self.mask == "cyclic" else self._across)(start)
        z = (z - self.centre).flatten(1)
        return volume + grown - 0.5 * (z.square() + math.log(2 * math.pi)).sum(1)

    def _around(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Each quarter of the image moves the next."""
        (top_left, top_right), (bottom_left, bottom_right) = (half.chunk(2, -1) for half in x.chunk(2, -2))
        quarters = [top_left, top_right, bottom_right, bottom_left]
        grown = x.new_zeros(len(x))
        for i, coupling in enumerate(self.couplings):
            told = (i + 1) % 4
            scale, shift = coupling(quarters[i % 4])
            quarters[told] = (quarters[told] + shift) * scale.exp()
            grown = grown + scale.flatten(1).sum(1)
        top, bottom = torch.cat(quarters[:2], -1), torch.cat([quarters[3], quarters[2]], -1)
        return torch.cat([top, bottom], -2), grown

    def _across(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The black squares of a checkerboard move the white ones, and the other way round."""
        rows, columns = (torch.arange(side, device=x.device) for side in x.shape[-2:])
        black = ((rows[:, None] + columns) % 2).to(x)
        grown = x.new_zeros(len(x))
        for i, coupling in enumerate(self.couplings):
            told = black if i % 2 else 1 - black
            scale, shift = (part * told for part in coupling(x * (1 - told)))
            x = (x + shift) * scale.exp()
            grown = grown + scale.flatten(1).sum(1)
        return x, grown


class Coupling(nn.Module):
    """What one part of an image tells another: a log-scale and a shift for every pixel.

    Args:
        depth: Channels of an image.
        channels: Filters of the convolutions.
        blocks: Residual blocks of two convolutions.
    """

    def __init__(self, depth: int, channels: int, blocks: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(depth, channels, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2 * blocks))
        self.last = _Silent(channels, 2 * depth, 3, padding=1)
        self.rescale = nn.Parameter(torch.ones(depth, 1, 1))

    def reset_parameters(self) -> None:
        """A log-scale lies between -1 and 1 at first."""
        nn.init.ones_(self.rescale)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Log-scale and shift, each of the shape of x."""
        x = self.first(x)
        for one, two in zip(self.blocks[::2], self.blocks[1::2], strict=True):
            x = x + two(one(x.relu()).relu())
        scale, shift = self.last(x.relu()).chunk(2, 1)
        return self.rescale * scale.tanh(), shift


class _Silent(nn.Conv2d):
    """A convolution that begins with 0: a coupling tells nothing at first, and a flow is the identity."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Zuko(nn.Module):
    """Any flow of the zuko library, such as neural spline flows, with a centre of its own.

    Args:
        flow: A flow for rows of d numbers, without context: what `flow()` gives has a `transform` and a `base`.

    Example:
        >>> import zuko
        >>> Zuko(zuko.flows.NSF(3, transforms=2, hidden_features=(16,)))(torch.zeros(5, 3)).shape
        torch.Size([5])
    """

    location = ("centre",)

    def __init__(self, flow: nn.Module) -> None:
        super().__init__()
        self.flow = flow
        self.centre = nn.Parameter(torch.zeros(flow().base.event_shape))

    def reset_parameters(self) -> None:
        """The latent distribution begins where zuko has it."""
        nn.init.zeros_(self.centre)

    def forward(self, x: Tensor) -> Tensor:
        """Log-likelihood of every row."""
        distribution = self.flow()
        z, volume = distribution.transform.call_and_ladj(x.flatten(1))
        return distribution.base.log_prob(z - self.centre) + volume


LEVELS = 256  # of a pixel
INSIDE = 0.9  # of the interval from 0 to 1: how much of it pixels fill, before the logit


def dequantised(x: Tensor) -> Tensor:
    """Images of 8-bit pixels as continuous ones: to each pixel a uniform number below one level is added.

    Those numbers follow from the image alone, so it has one likelihood under each model, all K models of a clustering
    see the same image, and nobody's random state is used up.

    Example:
        >>> x = torch.rand(2, 1, 28, 28).mul(255).round() / 255
        >>> bool((dequantised(x) == dequantised(x)).all()), bool((dequantised(x) * 256 // 1 == (x * 255).round()).all())
        (True, True)
    """
    level = (x * (LEVELS - 1)).round()
    pixel = torch.arange(1, level[0].numel() + 1, device=x.device)
    image = (level.flatten(1).long() * _scrambled(pixel)).sum(1, keepdim=True)  # whole numbers: in any order the same
    # 16 bits, for with the 8 of a level they make the 24 of a float: nothing is rounded up to the next level.
    noise = (_scrambled(image + _scrambled(pixel + len(pixel))) >> 15).to(x) / 2**16
    return (level + noise.reshape(x.shape)) / LEVELS


def _scrambled(number: Tensor) -> Tensor:
    """31 bits that look random, of each whole number; no product exceeds 63 bits."""
    number = number & 0x7FFFFFFF
    number = ((number ^ (number >> 16)) * 0x21F0AAAD) & 0x7FFFFFFF
    number = ((number ^ (number >> 15)) * 0x735A2D97) & 0x7FFFFFFF
    return number ^ (number >> 15)


def _logit(x: Tensor) -> tuple[Tensor, Tensor]:
    """Pixels from (0, 1) to all numbers, and the log of how much volume that makes of an image."""
    inside = (1 - INSIDE) / 2 + INSIDE * x
    volume = math.log(INSIDE) - inside.log() - (1 - inside).log()
    return inside.logit(), volume.flatten(1).sum(1)
