"""Images replaced by the features of a trained network, in which similar images are close to each other."""

from __future__ import annotations

import functools

import torch
from safetensors.torch import load, save
from torch import Tensor

from coterie.core.federation import Federation
from coterie.data.mnist import images
from coterie.data.source import change, folder, keep
from coterie.models.alexnet import TURNS, AlexNet, rotnet

AT_ONCE = 1000  # images per forward pass


@change
def rotnet_features(federation: Federation, steps: int = 2000, seed: int = 0) -> Federation:
    """Replace images by the features of a RotNet that was trained on MNIST's training images.

    In a real federation every client would get the same public, trained network and compute the features itself. The
    network is trained once, on a GPU if there is one (2,000 steps take seconds there, and long on a CPU), and saved in
    the data folder.

    Args:
        federation: Clients whose rows are images (1, 28, 28).
        steps: Number of training steps of the network.
        seed: Seed of the training.
    """
    shape = tuple(federation.train.x.shape[1:])
    if shape != (1, 28, 28):
        raise ValueError(f"rotnet_features: rows must be images of shape (1, 28, 28), got {shape}")
    net, device = _trained(steps, seed)

    def represented(i: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([net.represent(part.to(device)).cpu() for part in x.split(AT_ONCE)]), y

    return federation.map(represented)


@functools.lru_cache(maxsize=1)
def _trained(steps: int, seed: int) -> tuple[AlexNet, torch.device]:
    """Return the trained network, read from the data folder if it is there, so that all runs use the same one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kept = folder() / "mnist" / f"rotnet-{steps}-{seed}.safetensors"
    if kept.exists():
        net = AlexNet(1, TURNS)
        net.load_state_dict(load(kept.read_bytes()))
        return net.to(device).eval().requires_grad_(False), device
    net = rotnet(images()[0].to(device), steps=steps, seed=seed)
    keep(kept, save({name: x.cpu().contiguous() for name, x in net.state_dict().items()}))
    return net, device
