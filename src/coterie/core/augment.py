"""Random changes of images in training, as pure functions of a seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from coterie.core.hashed import mixed, uniform
from coterie.core.settings import setting, to_plain


@dataclass(frozen=True)
class CropFlip:
    """Random crops and flips in training, the centre of the image wherever a model is scored or chosen.

    Every image of a batch has a place of its own. It follows from the client, the round, the step and the position in
    the batch, as dropout masks do: it is the same on every executor, and however a batch is padded.

    Args:
        size: Height and width of a crop, which is what the module is given.
        pad: Pixels of zeros that are put around an image before; with `size` its old one, images are shifted by up to
            `pad` pixels.
        flip: Whether half of the images, drawn at random, are mirrored left to right.

    Example:
        >>> images = torch.arange(16.0).reshape(1, 1, 4, 4)
        >>> CropFlip(2).centre(images)
        tensor([[[[ 5.,  6.],
                  [ 9., 10.]]]])
        >>> CropFlip(2).random(images, torch.tensor(1)).shape
        torch.Size([1, 1, 2, 2])
    """

    size: int = setting(low=1)
    pad: int = setting(0, low=0)
    flip: bool = True

    @property
    def spec(self) -> dict[str, Any]:
        """A plain description, for configurations."""
        return {"name": "crop_flip", **to_plain(self)}

    def centre(self, x: Tensor) -> Tensor:
        """The middle of all images (n, channels, height, width)."""
        x = self._padded(x)
        top, left = ((side - self.size) // 2 for side in x.shape[-2:])
        return x[..., top : top + self.size, left : left + self.size]

    def random(self, x: Tensor, seed: Tensor) -> Tensor:
        """A random crop of each image (n, channels, height, width), perhaps mirrored.

        Args:
            x: The images.
            seed: An integer (a 0-d tensor), which may be batched by `torch.func.vmap`.
        """
        x = self._padded(x)
        # Dropout hashes the seed plus small numbers; this must not be one of them.
        down, right, side = uniform(mixed(~seed.to(torch.int32)), (len(x), 3)).unbind(1)
        place = torch.arange(self.size, device=x.device)
        top, left = (
            (share * (length - self.size + 1)).long() for share, length in zip((down, right), x.shape[-2:], strict=True)
        )
        rows, columns = top[:, None] + place, left[:, None] + place
        if self.flip:
            columns = torch.where(side[:, None] < 0.5, columns, columns.flip(1))
        image, channel = (torch.arange(n, device=x.device) for n in x.shape[:2])
        return x[image[:, None, None, None], channel[:, None, None], rows[:, None, :, None], columns[:, None, None]]

    def _padded(self, x: Tensor) -> Tensor:
        if x.dim() != 4:
            raise ValueError(f"CropFlip takes images (channels, height, width), got rows of shape {tuple(x.shape[1:])}")
        if min(x.shape[-2:]) + 2 * self.pad < self.size:
            height, width = x.shape[-2:]
            raise ValueError(
                f"CropFlip: size {self.size} is more than images of {height} × {width} with pad {self.pad}"
            )
        return functional.pad(x, [self.pad] * 4) if self.pad else x


AUGMENTATIONS = {"crop_flip": CropFlip}
