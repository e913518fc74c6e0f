"""A model taken apart after its first layer, where that layer is linear.

Full-batch training of such a model needs no copy of the first weight matrix per client: see `coterie.engines.fused`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from coterie.core.losses import cross_entropy, squared_error
from coterie.core.module import PureModule
from coterie.core.pytree import Params


class Head(NamedTuple):
    """The names of V and c where all that comes after z is Vᵀrelu(z) + c, under cross-entropy."""

    weight: str
    bias: str


class FirstLinear(NamedTuple):
    """A model as z = xWᵀ + b and what comes after.

    Attributes:
        weight: The name of W.
        bias: The name of b, None where there is none.
        loss: `loss(rest, z, y) -> (n,)`: the loss of each row, from the other parameters and z (n, h).
        head: Set if what comes after is a `Head`.
        squared: Whether nothing comes after, and the loss is (y - z)².
        logits: Whether nothing comes after, and the loss is the cross-entropy of z.
    """

    weight: str
    bias: str | None
    loss: Callable[[Params, Tensor, Tensor], Tensor]
    head: Head | None
    squared: bool
    logits: bool


class _Given(nn.Module):
    """Stands in for a layer whose output is known."""

    def __init__(self, z: Tensor) -> None:
        super().__init__()
        self.z = nn.Parameter(z)

    def forward(self, x: Tensor) -> Tensor:
        return self.z.view_as(self.z)  # a module that keeps it must not take it for a parameter of its own


def split_first_linear(module: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], x: Tensor) -> FirstLinear | None:
    """Split a module after its first layer; None if that is not a linear map of the flattened rows alone.

    It is recognised by behaviour, not by type: the layer must see exactly the flattened rows, whatever they hold, and
    the output must depend on them through that layer only.

    Args:
        module: The model, with real parameters.
        loss: `loss(output, y) -> (n,)`.
        x: Two rows of the kind that it takes.
    """
    try:
        return _split(module, loss, x)
    except Exception:  # a model may raise anything at rows that are not like its own: it does not bear being tried out
        return None


def _split(module: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], x: Tensor) -> FirstLinear | None:
    name = next((n for n, layer in module.named_modules() if isinstance(layer, nn.Linear)), None)
    if name is None or x.dtype != torch.float32:
        return None
    layer = module.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    if is_parametrized(layer):
        return None
    if not all(_sees(module, layer, rows) for rows in (x, *_drawn(x.shape))):
        return None
    prefix = f"{name}." if name else ""
    with torch.no_grad():
        out, z = module(x), torch.nn.functional.linear(x.flatten(1), layer.weight, layer.bias)
        after = _replaced(module, name, _Given(z))
        same = torch.equal(after(x), out) and torch.equal(after(x.flip(0) + 1), out)
    if not same or _tied(module, layer) or not all(p.requires_grad for p in layer.parameters()):
        return None
    if not _same_gradients(module, layer, after, x):
        return None
    alone = len(list(after.parameters())) == 1  # a layer that begins as the identity is something, too
    nothing = alone and loss in (squared_error, cross_entropy) and _is(after, lambda z: z, [], x)
    head = _head(after, x, z.shape) if loss is cross_entropy else None
    pure = PureModule(after)

    def rest_loss(rest: Params, z: Tensor, y: Tensor) -> Tensor:
        anything = z.new_zeros(()).expand(len(z), *x.shape[1:])  # the stand-in does not look at it
        return loss(pure({**rest, f"{prefix}z": z}, (anything,), {}, z.new_ones(len(z))), y)

    bias = f"{prefix}bias" if layer.bias is not None else None
    squared, logits = nothing and loss is squared_error, nothing and loss is cross_entropy
    return FirstLinear(f"{prefix}weight", bias, rest_loss, head, squared, logits)


def _drawn(shape: torch.Size) -> list[Tensor]:
    """Some numbers, small and large."""
    generator = torch.Generator().manual_seed(0)
    return [scale * torch.randn(shape, generator=generator) for scale in (1e-3, 1.0, 1e3)]


def _sees(module: nn.Module, layer: nn.Linear, x: Tensor) -> bool:
    """Whether the layer is given exactly these rows, whole and once, and does with them what its name says."""
    seen: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        module(x)
        handle.remove()
        if len(seen) != 1 or len(seen[0]) != len(x) or not torch.equal(seen[0].flatten(1), x.flatten(1)):
            return False
        if x[0].numel() != layer.in_features:  # it sees the rows piece by piece
            return False
        return torch.equal(layer(seen[0]), nn.functional.linear(x.flatten(1), layer.weight, layer.bias))


def _same_gradients(module: nn.Module, layer: nn.Linear, after: nn.Module, x: Tensor) -> bool:
    """Whether the layer's gradients follow from that at z: hooks, or what is not differentiated, may change them."""
    given = next(one for one in after.modules() if isinstance(one, _Given))
    with torch.enable_grad():
        wanted = torch.autograd.grad(module(x).square().sum(), list(layer.parameters()), materialize_grads=True)
        [at_z] = torch.autograd.grad(after(x).square().sum(), [given.z], materialize_grads=True)
    found = [at_z.T @ x.flatten(1), at_z.sum(0)]
    return all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(wanted, found, strict=False))


def _is(after: nn.Module, formula: Callable[[Tensor], Tensor], rest: list[nn.Parameter], x: Tensor) -> bool:
    """Whether what comes after z is a formula of it, with the same gradients at z and at the other parameters."""
    given = next(layer for layer in after.modules() if isinstance(layer, _Given))
    for z in _drawn(given.z.shape):
        with torch.no_grad():
            given.z.copy_(z)
        with torch.enable_grad():
            out, plain = after(x), formula(given.z)
            if not torch.equal(out, plain) or not out.requires_grad:
                return False
            slopes = [
                torch.autograd.grad(own.square().sum(), [given.z, *rest], materialize_grads=True)
                for own in (out, plain)
            ]
        if not all(torch.allclose(a, b, rtol=1e-4) for a, b in zip(*slopes, strict=True)):
            return False
    return True


def _head(after: nn.Module, x: Tensor, shape: torch.Size) -> Head | None:
    rest = {n: p for n, p in after.named_parameters() if n.rpartition(".")[2] != "z"}
    weight = next((n for n, p in rest.items() if p.dim() == 2 and p.shape[1] == shape[1]), None)
    bias = next((n for n, p in rest.items() if p.dim() == 1 and weight and len(p) == len(rest[weight])), None)
    if len(rest) != 2 or weight is None or bias is None or not all(p.requires_grad for p in rest.values()):
        return None
    own = [rest[weight], rest[bias]]
    plain = _is(after, lambda z: nn.functional.linear(z.relu(), *own), own, x)
    return Head(weight, bias) if plain else None


def _replaced(module: nn.Module, name: str, layer: nn.Module) -> nn.Module:
    if not name:  # the module is itself the layer
        return layer
    other = copy.deepcopy(module)
    parent, _, own = name.rpartition(".")
    setattr(other.get_submodule(parent), own, layer)
    return other


def _tied(module: nn.Module, layer: nn.Module) -> bool:
    """Whether the layer's parameters are used elsewhere in the module too."""
    own = {id(p) for p in layer.parameters()}
    uses = sum(id(p) in own for m in module.modules() for p in m.parameters(recurse=False))
    return uses != len(own)
