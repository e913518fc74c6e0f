"""How modules are made to begin with: drawn anew, or taken as they are; and which cannot be."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from coterie.core.key import Key
from coterie.core.module import is_held, name_of

Init = Literal["random", "module"]


class Maker:
    """Makes modules of one kind.

    Attributes:
        same: Whether all are the same.
        module: The module that is copied; None where a function builds them.
        build: Makes one, with random numbers of torch's global generator.

    Args:
        module: A module, or a function that builds one.
        init: "random": its layers are drawn anew, except what is frozen. "module": it is taken as it is.
    """

    def __init__(self, module: nn.Module | Callable[[], nn.Module], init: Init = "random") -> None:
        if init not in ("random", "module"):
            raise ValueError(f"Task: init must be 'random' or 'module', got {init!r}")
        if not isinstance(module, nn.Module) and not callable(module):
            raise ValueError(f"Task: module must be a torch.nn.Module or a function that builds one, got {module!r}")
        self.same = init == "module"
        self.module = module if isinstance(module, nn.Module) else None
        if self.module is not None:
            _check_whole(self.module)
        self.build = module if self.module is None else self._copied
        if self.module is not None and not self.same:
            _check_resets(self.module)

    def __call__(self, seed: int) -> nn.Module:
        """A module; layers draw from the global generator only, which is seeded, and then put back as it was."""
        with torch.random.fork_rng(devices=[]):
            _seed(seed)
            made = self.build()
        if not isinstance(made, nn.Module):
            raise ValueError(f"Task: the function must build a torch.nn.Module, but returned {type(made).__name__}")
        return made

    def init(self, key: Key) -> nn.Module:
        """The module that a model begins as."""
        return self(0 if self.same else key.seed())

    def _copied(self) -> nn.Module:
        assert self.module is not None  # else a function builds it
        fresh = copy.deepcopy(self.module)
        if not self.same:
            frozen = {name: x.detach().clone() for name, x in _frozen(fresh).items()}
            for layer in _children_first(fresh):
                _reset(layer)
            with torch.no_grad():
                for name, x in _frozen(fresh).items():
                    x.copy_(frozen[name])
        return fresh


def _seed(seed: int) -> None:
    """The same as `torch.manual_seed`, which is slow where it has to note the seed for GPUs that are not there."""
    if torch.cuda.is_available() or torch.backends.mps.is_available() or torch.xpu.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def _check_whole(module: nn.Module) -> None:
    """Refuse modules that cannot be copied, or would not be the same afterwards."""
    name = name_of(module)
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ValueError(f"Task: {name} divides its work by itself; give the module in it, its .module")
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(f"Task: {name} was compiled by torch.jit; give the module that it was made from")
    named = (("parameter", module.named_parameters()), ("layer", module.named_modules()))
    for what, own, x in ((what, own, x) for what, each in named for own, x in each):
        if x._backward_hooks:
            raise ValueError(f"Task: {what} '{own}' has a backward hook, which is not called in a federation")
    try:
        copy.deepcopy(module)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"Task: {name} cannot be copied ({str(error).splitlines()[0]}); pass a function that builds it, and "
            "torch.nn.utils.parametrizations in place of torch.nn.utils.weight_norm"
        ) from error


def _frozen(module: nn.Module) -> dict[str, Tensor]:
    """Frozen parameters, and the buffers beside them: a pretrained BatchNorm has its statistics there."""
    found: dict[str, Tensor] = {}
    for prefix, layer in module.named_modules():
        own: dict[str, Tensor] = dict(layer.named_parameters(recurse=False))
        kept = {n: p for n, p in own.items() if not p.requires_grad}
        if is_held(layer) or (own and len(kept) == len(own)):
            kept |= dict(layer.named_buffers(recurse=False))
        found |= {f"{prefix}." * bool(prefix) + n: x for n, x in kept.items()}
    return found


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    """All layers in their order, each after those that it consists of, as it was when they were built."""
    for child in module.children():
        yield from _children_first(child)
    yield module


def _resetter(layer: nn.Module) -> Callable[[], Any] | None:
    """The function that draws a layer's own parameters; torch's attention hides its."""
    found: Any = getattr(layer, "reset_parameters", None) or getattr(layer, "_reset_parameters", None)
    return found if callable(found) else None


def _reset(layer: nn.Module) -> None:
    """Draw a layer's own parameters; of a parametrised one, those that give freshly drawn tensors."""
    if not parametrize.is_parametrized(layer):
        if (reset := _resetter(layer)) is not None:
            reset()
        return
    bare, names = copy.deepcopy(layer), list(layer.parametrizations)  # pyright: ignore[reportArgumentType]
    bare.__class__ = type(layer).__bases__[0]  # as it was before it was parametrised
    del bare._modules["parametrizations"]
    for name in names:
        bare.register_parameter(name, nn.Parameter(getattr(layer, name).detach().clone()))
    _reset(bare)
    with torch.no_grad():
        for name in names:
            setattr(layer, name, getattr(bare, name).detach())
        for name, p in layer.named_parameters(recurse=False):
            p.copy_(getattr(bare, name))


def _check_resets(module: nn.Module) -> None:
    for name, layer in module.named_modules():
        own = [p for p in layer.parameters(recurse=False) if p.requires_grad]
        if own and _resetter(layer) is None and not isinstance(layer, parametrize.ParametrizationList):
            raise ValueError(
                f"Task: layer '{name or name_of(layer)}' has parameters but no reset_parameters(), so it cannot be "
                "drawn anew; pass a function that builds the module, or init='module' to begin with it as it is"
            )
