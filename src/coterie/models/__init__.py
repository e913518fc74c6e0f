"""Small models for federations. Any other `nn.Module` works as well, through `Task.from_module`."""

from torch import nn

from coterie.models.alexnet import AlexNet, rotnet
from coterie.models.cifar_cnn import CifarCNN
from coterie.models.cnn import CNN, FemnistCNN
from coterie.models.flow import AffineFlow, RealNVP, Zuko
from coterie.models.gan import GAN
from coterie.models.linear import Linear, Polynomial
from coterie.models.lstm import LSTM
from coterie.models.mlp import MLP
from coterie.models.resnet import ResNet

MODELS: dict[str, type[nn.Module]] = {
    "linear": Linear,
    "polynomial": Polynomial,
    "mlp": MLP,
    "cnn": CNN,
    "cifar_cnn": CifarCNN,
    "femnist_cnn": FemnistCNN,
    "resnet": ResNet,
    "lstm": LSTM,
    "affine_flow": AffineFlow,
    "real_nvp": RealNVP,
    "gan": GAN,
}

__all__ = [
    "CNN", "GAN", "LSTM", "MLP", "MODELS", "AffineFlow", "AlexNet", "CifarCNN", "FemnistCNN", "Linear", "Polynomial",
    "RealNVP", "ResNet", "Zuko", "rotnet",
]  # fmt: skip
