"""A small residual network without BatchNorm.

Deep Residual Learning for Image Recognition
    Kaiming He, Xiangyu Zhang, Shaoqing Ren, Jian Sun. CVPR 2016.
Group Normalization
    Yuxin Wu, Kaiming He. ECCV 2018.
"""

from __future__ import annotations

from torch import Tensor, nn


class _Block(nn.Module):
    """Two convolutions, added to what goes in, and average pooling, which halves the image."""

    def __init__(self, width: int, groups: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.first_norm, self.second_norm = (nn.GroupNorm(groups, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first_norm(self.first(x)).relu()
        return nn.functional.avg_pool2d((x + self.second_norm(self.second(y))).relu(), 2)


class ResNet(nn.Module):
    """A small residual network with GroupNorm: a 3 × 3 convolution, blocks of two more, the mean, a linear layer.

    GroupNorm has no statistics of the batch, so nothing of it depends on who else is in a client's batch.

    Args:
        depth: Number of channels of an image, which is at least 2^blocks wide and high.
        classes: Number of classes.
        width: Number of filters of each convolution.
        blocks: Number of blocks, each of which halves the image.
        groups: Groups of GroupNorm, of which `width` is a multiple.

    Example:
        >>> import torch
        >>> net = ResNet(3, 10)
        >>> net(torch.zeros(5, 3, 32, 32)).shape, sum(p.numel() for p in net.parameters())
        (torch.Size([5, 10]), 57098)
    """

    def __init__(self, depth: int, classes: int, width: int = 32, blocks: int = 3, groups: int = 4) -> None:
        super().__init__()
        for what, number in (("depth", depth), ("classes", classes), ("blocks", blocks)):
            if number < 1:
                raise ValueError(f"ResNet: {what} must be at least 1, got {number}")
        if groups < 1 or width < 1 or width % groups:
            raise ValueError(f"ResNet: width must be a positive multiple of groups, got {width} and {groups}")
        self.spec = {
            "name": "resnet", "depth": depth, "classes": classes, "width": width, "blocks": blocks, "groups": groups,
        }  # fmt: skip
        self.stem = nn.Conv2d(depth, width, 3, padding=1)
        self.blocks = nn.Sequential(*(_Block(width, groups) for _ in range(blocks)))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, one row per image."""
        return self.head(self.blocks(self.stem(x)).mean((-2, -1)))
