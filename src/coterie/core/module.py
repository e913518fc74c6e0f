"""Modules as pure functions: how they are drawn anew, what they keep fixed, and which a federation cannot use."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from coterie.core.pytree import Params


def builder(module: nn.Module | Callable[[], nn.Module]) -> Callable[..., nn.Module]:
    """A function of a seed that returns the module with freshly drawn parameters."""
    if not isinstance(module, nn.Module):
        return _leaving_the_generator_alone(module)
    for name, layer in module.named_modules():
        if list(layer.parameters(recurse=False)) and not hasattr(layer, "reset_parameters"):
            raise ValueError(
                f"Task: layer '{name or name_of(layer)}' has parameters but no reset_parameters(), so it cannot be "
                "drawn anew; pass a function that builds the module instead"
            )

    def build() -> nn.Module:
        fresh = copy.deepcopy(module)
        for layer in fresh.modules():
            if callable(reset := getattr(layer, "reset_parameters", None)):
                reset()
        return fresh

    return _leaving_the_generator_alone(build)


def _leaving_the_generator_alone(build: Callable[[], nn.Module]) -> Callable[..., nn.Module]:
    """Layers draw from the global generator only: seed it if asked, and put it back as it was."""

    def quiet(seed: int | None = None) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            if seed is not None:
                torch.manual_seed(seed)
            return build()

    return quiet


class Constants:
    """A module's buffers, of which a federation assumes that they never change."""

    def __init__(self, module: nn.Module) -> None:
        self._on = {torch.device("cpu"): {name: x.detach().clone() for name, x in module.named_buffers()}}

    def on(self, device: torch.device) -> Params:
        """The buffers on a device, brought there once."""
        if device not in self._on:
            self._on[device] = {name: x.to(device) for name, x in self._on[torch.device("cpu")].items()}
        return self._on[device]

    def changed(self, module: nn.Module) -> str | None:
        """Which buffer of a module has changed, if any."""
        own = self.on(torch.device("cpu"))
        for name, x in module.named_buffers():
            if not torch.equal(x, own[name]):
                return f"{name_of(module)} changes its buffer '{name}', which a federation cannot average"
        return None


def refuse(module: nn.Module) -> None:
    """Refuse layers that mix the rows of a batch, or draw random numbers."""
    for name, layer in module.named_modules():
        where = f"Task: layer '{name}' ({name_of(layer)})" if name else f"Task: {name_of(layer)}"
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            raise ValueError(
                f"{where} mixes the rows of a batch and keeps statistics of them, which a federation cannot average; "
                "use GroupNorm or LayerNorm in place of BatchNorm"
            )
        if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0:
            raise ValueError(f"{where} draws random numbers inside the model; set p=0 or remove it")


def outside(module: nn.Module, x: Tensor) -> str | None:
    """Say which values a module does not take, if it has a range `between`."""
    if (between := getattr(module, "between", None)) is None:  # rows in a file are not read for nothing
        return None
    low, high = between
    if bool(((x >= low) & (x <= high)).all()):
        return None
    return f"{name_of(module)} takes values from {low:g} to {high:g}, but these go from {x.min():g} to {x.max():g}"


def name_of(module: nn.Module) -> str:
    """The name of a module's class, for messages."""
    return type(module).__name__
