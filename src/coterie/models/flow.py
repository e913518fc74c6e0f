"""Normalising flows: models of a density, which return one log-likelihood per row.

A flow's `location` names the parameters that determine where its rows lie rather than how they are spread. UIFCA keeps
these separate for each cluster, and shrinks the other parameters towards values that are common to all clusters.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from coterie.core.pytree import Params


class AffineFlow(nn.Module):
    """A Gaussian density as a flow: x = g(z) with g affine and z standard normal.

    The parameters are those of the inverse, z = Wx + b. The best ones follow from the mean and the covariance of the
    rows (`from_moments`), so federated training needs two sums per client and no gradient steps.

    Args:
        inputs: Number of dimensions of a row.

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
        """Initialise near the identity, so that no model starts with a much higher likelihood than the others."""
        with torch.no_grad():
            self.weight.copy_(torch.eye(len(self.bias)) + 0.01 * torch.randn_like(self.weight))
            self.bias.normal_(0, 0.01)

    def forward(self, x: Tensor) -> Tensor:
        """Return the log-likelihood of every row."""
        z = x.flatten(1) @ self.weight.T + self.bias
        constant = -0.5 * len(self.bias) * math.log(2 * math.pi)
        return constant - 0.5 * z.square().sum(1) + torch.linalg.slogdet(self.weight)[1]

    @staticmethod
    def from_moments(mean: Tensor, covariance: Tensor) -> Params:
        """Return the maximum-likelihood parameters for rows with a given mean and covariance.

        Args:
            mean: Mean of the rows (…, d).
            covariance: Covariance of the rows (…, d, d).

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
    """A flow for images: coupling layers, each of which transforms one part of an image depending on another part.

    With the usual checkerboard mask a pixel is transformed depending on its neighbours: the model learns how strokes
    look, and gives other digits the same likelihood as its own. With the cyclic mask of Kirichenko et al. a quarter of
    the image is transformed depending on the quarter before it (top left, top right, bottom right, bottom left): the
    model learns what the image shows.

    Pixels are 8-bit values divided by 255, made continuous by `dequantised`.

    Density Estimation Using Real NVP
        Laurent Dinh, Jascha Sohl-Dickstein, Samy Bengio. ICLR 2017.
    Why Normalizing Flows Fail to Detect Out-of-Distribution Data
        Polina Kirichenko, Pavel Izmailov, Andrew Gordon Wilson. NeurIPS 2020.

    Args:
        shape: (channels, height, width) of an image, height and width even.
        mask: "cyclic" or "checkerboard".
        couplings: Number of couplings; with a multiple of 4 the cyclic mask transforms every quarter equally often.
        channels: Number of filters of the convolutions in each coupling.
        blocks: Number of residual blocks, of two convolutions each, in each coupling.

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
        """Initialise the centre of the latent normal distribution to the origin."""
        nn.init.zeros_(self.centre)

    def forward(self, x: Tensor) -> Tensor:
        """Return the log-likelihood of every image."""
        if x.shape[1:] != self.centre.shape:
            raise ValueError(f"RealNVP: an image must be of shape {tuple(self.centre.shape)}, got {tuple(x.shape[1:])}")
        start, volume = _logit(dequantised(x))
        z, grown = (self._around if self.mask == "cyclic" else self._across)(start)
        z = (z - self.centre).flatten(1)
        return volume + grown - 0.5 * (z.square() + math.log(2 * math.pi)).sum(1)

    def _around(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Transform each quarter of the image depending on the one before; return it and the log-determinant."""
        (top_left, top_right), (bottom_left, bottom_right) = (half.chunk(2, -1) for half in x.chunk(2, -2))
        quarters = [top_left, top_right, bottom_right, bottom_left]
        grown = x.new_zeros(len(x))
        for i, coupling in enumerate(self.couplings):
            moved = (i + 1) % 4
            scale, shift = coupling(quarters[i % 4])
            quarters[moved] = (quarters[moved] + shift) * scale.exp()
            grown = grown + scale.flatten(1).sum(1)
        top, bottom = torch.cat(quarters[:2], -1), torch.cat([quarters[3], quarters[2]], -1)
        return torch.cat([top, bottom], -2), grown

    def _across(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Transform the white squares of a checkerboard depending on the black ones, then the black ones, and so on."""
        rows, columns = (torch.arange(side, device=x.device) for side in x.shape[-2:])
        black = ((rows[:, None] + columns) % 2).to(x)
        grown = x.new_zeros(len(x))
        for i, coupling in enumerate(self.couplings):
            moved = black if i % 2 else 1 - black
            scale, shift = (part * moved for part in coupling(x * (1 - moved)))
            x = (x + shift) * scale.exp()
            grown = grown + scale.flatten(1).sum(1)
        return x, grown


class Coupling(nn.Module):
    """A network that computes a log-scale and a shift for every pixel of one part of an image from another part.

    Args:
        depth: Number of channels of an image.
        channels: Number of filters of the convolutions.
        blocks: Number of residual blocks, of two convolutions each.
    """

    def __init__(self, depth: int, channels: int, blocks: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(depth, channels, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2 * blocks))
        self.last = _ZeroConv2d(channels, 2 * depth, 3, padding=1)
        self.rescale = nn.Parameter(torch.ones(depth, 1, 1))

    def reset_parameters(self) -> None:
        """Initialise the factor of the log-scale to 1, so that log-scales lie between -1 and 1."""
        nn.init.ones_(self.rescale)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-scale and the shift, each of the shape of x."""
        x = self.first(x)
        for one, two in zip(self.blocks[::2], self.blocks[1::2], strict=True):
            x = x + two(one(x.relu()).relu())
        scale, shift = self.last(x.relu()).chunk(2, 1)
        return self.rescale * scale.tanh(), shift


class _ZeroConv2d(nn.Conv2d):
    """A convolution that is initialised to 0, so that every coupling, and with it the flow, starts as the identity."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Zuko(nn.Module):
    """Any flow of the zuko library, such as a neural spline flow, with an additional centre parameter.

    Args:
        flow: A flow for rows of d numbers, without context: `flow()` returns an object with `transform` and `base`.

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
        """Initialise the centre to 0, which leaves the latent distribution as zuko defines it."""
        nn.init.zeros_(self.centre)

    def forward(self, x: Tensor) -> Tensor:
        """Return the log-likelihood of every row."""
        distribution = self.flow()
        z, volume = distribution.transform.call_and_ladj(x.flatten(1))
        return distribution.base.log_prob(z - self.centre) + volume


LEVELS = 256  # values of a pixel
INSIDE = 0.9  # the part of the interval from 0 to 1 that pixels fill, before the logit


def dequantised(x: Tensor) -> Tensor:
    """Make 8-bit pixels continuous by adding uniform noise below one level to each of them.

    The noise is computed from the image alone, so an image has one likelihood under each model, all K models of a
    clustering see the same image, and no random state is consumed.

    Args:
        x: Images (n, …) of 8-bit values divided by 255.

    Example:
        >>> x = torch.rand(2, 1, 28, 28).mul(255).round() / 255
        >>> bool((dequantised(x) == dequantised(x)).all()), bool((dequantised(x) * 256 // 1 == (x * 255).round()).all())
        (True, True)
    """
    level = (x * (LEVELS - 1)).round()
    pixel = torch.arange(1, level[0].numel() + 1, device=x.device)
    image = (level.flatten(1).long() * _scrambled(pixel)).sum(1, keepdim=True)  # integers: the order does not matter
    # 16 bits: with the 8 of a level they make the 24 of a float, so nothing is rounded up to the next level.
    noise = (_scrambled(image + _scrambled(pixel + len(pixel))) >> 15).to(x) / 2**16
    return (level + noise.reshape(x.shape)) / LEVELS


def _scrambled(number: Tensor) -> Tensor:
    """Hash each integer to 31 bits that look random; no product exceeds 63 bits."""
    number = number & 0x7FFFFFFF
    number = ((number ^ (number >> 16)) * 0x21F0AAAD) & 0x7FFFFFFF
    number = ((number ^ (number >> 15)) * 0x735A2D97) & 0x7FFFFFFF
    return number ^ (number >> 15)


def _logit(x: Tensor) -> tuple[Tensor, Tensor]:
    """Map pixels from (0, 1) to the real line; return them and the log-determinant of the map for every image."""
    inside = (1 - INSIDE) / 2 + INSIDE * x
    volume = math.log(INSIDE) - inside.log() - (1 - inside).log()
    return inside.logit(), volume.flatten(1).sum(1)
