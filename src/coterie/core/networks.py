"""The networks of an adversarial task, as pure functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from coterie.core.module import PureModule
from coterie.core.pytree import Params


class Networks(NamedTuple):
    """The networks of an adversarial task, each a pure function of the parameters of all and of rows or codes.

    A code (n, dz + k) is dz numbers, and then a cluster's one-hot; an encoder gives logits in its place.
    """

    generate: Callable[[Params, Tensor], Tensor]  # from codes to rows
    judge: Callable[[Params, Tensor], Tensor]  # from rows to the critic's opinion of each (n, 1)
    encode: Callable[[Params, Tensor], Tensor]  # from rows to codes
    dz: int
    k: int


def part(module: nn.Module, name: str) -> Callable[[Params, Tensor], Tensor]:
    """One submodule, as a function of the whole module's parameters."""
    pure, prefix = PureModule(module.get_submodule(name)), f"{name}."

    def forward(params: Params, x: Tensor) -> Tensor:
        own = {n.removeprefix(prefix): p for n, p in params.items() if n.startswith(prefix)}
        return pure(own, (x,), {}, x.new_ones(len(x)))

    return forward
