"""Small models for federations. Any other `nn.Module` works as well, through `Task.from_module`."""

from torch import nn

from coterie.models.alexnet import AlexNet, rotnet
from coterie.models.cnn import CNN
from coterie.models.flow import AffineFlow, RealNVP, Zuko
from coterie.models.gan import GAN
from coterie.models.linear import Linear, Polynomial
from coterie.models.lstm import LSTM
from coterie.models.mlp import MLP

MODELS: dict[str, type[nn.Module]] = {
    "linear": Linear,
    "polynomial": Polynomial,
    "mlp": MLP,
    "cnn": CNN,
    "lstm": LSTM,
    "affine_flow": AffineFlow,
    "real_nvp": RealNVP,
    "gan": GAN,
}

__all__ = [
    "CNN", "GAN", "LSTM", "MLP", "MODELS", "AffineFlow", "AlexNet", "Linear", "Polynomial", "RealNVP", "Zuko", "rotnet",
]  # fmt: skip
