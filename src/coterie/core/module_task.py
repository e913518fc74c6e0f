"""The functions of a task that is made from a module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from coterie.core.augment import CropFlip
from coterie.core.first_layer import FirstLinear, split_first_linear
from coterie.core.key import Key
from coterie.core.making import Maker
from coterie.core.module import PureModule, outside
from coterie.core.pytree import Params, leaves, take
from coterie.core.trunk import Cut, cut_after_trunk
from coterie.storage.packed import raw_bytes

if TYPE_CHECKING:
    from coterie.storage.inputs import Inputs

PerRow = Callable[[Tensor, Tensor], Tensor]  # (output, y) -> (n,)


class Apart(NamedTuple):
    """A module as `head(see(x))`, where nothing in a run changes `see`."""

    see: Callable[[Tensor], Tensor]
    head: ModuleFunctions


@dataclass(frozen=True)
class ModuleFunctions:
    """What a task does with its module.

    Args:
        make: Makes modules to begin with.
        pure: The module as a function.
        loss: `loss(output, y) -> (n,)`.
        score: `score(output, y) -> (n,)`.
        verify: Looks at an output and the targets; returns what is wrong with them, or None.
        mix: The outputs (j, n, …) of j models, and their shares (j,), as one output (n, …).
        inputs: How a row is taken apart into several inputs; None where it is one.
        augment: What is done to images before the module is given them; None for nothing.
    """

    make: Maker
    pure: PureModule
    loss: PerRow
    score: PerRow
    verify: Callable[[Tensor, Tensor], str | None]
    mix: Callable[[Tensor, Tensor], Tensor]
    inputs: Inputs | None = None
    augment: CropFlip | None = None
    _first_layers: dict[bytes, FirstLinear | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def draws(self) -> bool:
        """Whether training may need random numbers, for dropout or for crops of images."""
        return self.augment is not None or self.pure.moves is not False

    def init(self, key: Key) -> Params:
        """A model to begin with."""
        made = self.make.init(key)
        own = {**dict(made.named_parameters()), **dict(made.named_buffers())}
        kinds = self.pure.kinds
        return {n: own[n].detach().clone() for n in (*kinds.trained, *kinds.carried)}

    def output(self, params: Params, x: Tensor, mask: Tensor) -> Tensor:
        """The module's output, as it is scored."""
        return self.pure(params, *self._arguments(x), mask)

    def losses(self, params: Params, data: Any) -> Tensor:
        """The loss of every row."""
        return self.loss(self.output(params, data.x, data.mask), data.y)

    def scores(self, params: Params, data: Any) -> Tensor:
        """The score of every row."""
        return self.score(self.output(params, data.x, data.mask), data.y)

    def training(self, params: Params, data: Any, seed: Tensor) -> tuple[Tensor, Params]:
        """The loss of every row in training, and the buffers that the pass has moved."""
        args, kwargs = self._arguments(data.x, seed)
        if self.pure.moves is False:
            return self.loss(self.pure(params, args, kwargs, data.mask), data.y), {}
        out, moved = self.pure.train(params, args, kwargs, data.mask, seed)
        return self.loss(out, data.y), moved

    def mixed(self, params: Params, x: Tensor, mask: Tensor, shares: Tensor) -> Tensor:
        """The output of several models (j, …) together."""
        each = range(len(leaves(params)[0]))
        return self.mix(torch.stack([self.output(take(params, j), x, mask) for j in each]), shares)

    def check(self, data: Any) -> str | None:
        """What is wrong with rows, None if the module takes them."""
        if wrong := self.takes(data.x):
            return wrong
        args, kwargs = self._arguments(data.x[:1].cpu())
        model = self.init(Key.of(0))
        with torch.no_grad():
            if wrong := self.pure.fault(args, kwargs):
                return wrong
            out = self.pure(model, args, kwargs, torch.ones(1))
        wrong = outside(self.make(0), data.x) or self._wrong_rows(out) or self.verify(out, data.y)
        return wrong or self._wrong_loss(out, data.y[:1].cpu()) or self._mixes(model, data.x, out)

    def takes(self, x: Tensor) -> str | None:
        """What is wrong with rows without targets, tried on the first; None if the module takes them."""
        try:
            with torch.no_grad():
                self.pure(self.init(Key.of(0)), *self._arguments(x[:1].cpu()), torch.ones(1))
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
            why = f" ({error})" if isinstance(error, ValueError | TypeError) else ""  # torch speaks of its own matters
            kind = self.inputs is None and x.dtype != torch.float32 and "type" in str(error)
            return f"{self.pure.name} does not take {self._given(x)}{why}{'; give float32' if kind else ''}"
        return None

    def first_layer(self, x: Tensor) -> FirstLinear | None:
        """The module taken apart after its first layer, where training is the same as scoring.

        That is found by trying it on these rows. What was found is kept for them: a node of a real federation asks
        again for every message.
        """
        known = repr((x.shape, x.dtype)).encode() + raw_bytes(x)
        if known not in self._first_layers:
            self._first_layers.clear()
            self._first_layers[known] = self._first_layer(x)
        return self._first_layers[known]

    def _first_layer(self, x: Tensor) -> FirstLinear | None:
        if (
            self.inputs is not None
            or self.augment is not None
            or self.takes(x)
            or self.pure.fault((x,), {})
            or self.pure.moves
        ):
            return None
        return split_first_linear(self.make(0), self.loss, x)

    def cut(self, x: Tensor) -> Apart | str | None:
        """The module taken apart after its frozen layers; None if it has none, or why that is not possible.

        Args:
            x: Some rows of the kind that it takes.
        """
        if self.pure.kinds.fixed and self.augment is not None:
            return "rows are cropped at random, and have other features each time"
        two = torch.cat([x[:2].cpu()] * 2)[:2]
        args = self._arguments(two)
        if not self.pure.kinds.fixed or self.takes(two) or self.pure.fault(*args):
            return None
        found = cut_after_trunk(self.make, self.pure, self.init(Key.of(0)), args)
        if not isinstance(found, Cut):
            return found

        def see(rows: Tensor) -> Tensor:
            return found.trunk({}, *self._arguments(rows), rows.new_ones(len(rows)))

        return Apart(see, replace(self, make=found.make, pure=found.head, inputs=None))

    def _arguments(self, x: Tensor, seed: Tensor | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the module is given: with a seed as in training, without as it is scored."""
        if self.inputs is not None and self.augment is not None:
            raise ValueError("augment takes rows that are one image, but these are several inputs")
        if self.augment is not None:
            x = self.augment.centre(x) if seed is None else self.augment.random(x, seed)
        return ((x,), {}) if self.inputs is None else self.inputs.unpack(x)

    def _given(self, x: Tensor) -> str:
        if self.inputs is not None:
            return f"inputs {self.inputs}"
        return f"rows of shape {tuple(x.shape[1:])} and type {x.dtype}"

    def _wrong_rows(self, out: Tensor) -> str | None:
        if out.dim() < 1 or len(out) != 1:
            return f"{self.pure.name} must give one output per row, but gives {tuple(out.shape)} for one row"
        return None

    def _wrong_loss(self, out: Tensor, y: Tensor) -> str | None:
        """A loss may be any function: what it returns is looked at."""
        two, targets = torch.cat([out, out / 2 + 1]), y.expand(2, *y.shape[1:])
        for what, function in (("loss", self.loss), ("score", self.score)):
            try:
                both, one = function(two, targets), function(two[:1], targets[:1])
            except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
                return f"the {what} does not take outputs {_kind(out)} with targets {_kind(y)} ({error})"
            shape = tuple(getattr(both, "shape", ()))
            if shape != (2,):
                hint = "; torch's losses do so with reduction='none'" if shape == () else ""
                return f"the {what} must give one value per row, got shape {shape} for 2 rows{hint}"
            if both.requires_grad:
                return f"the {what} has parameters of its own, which would not be trained"
            if not torch.allclose(both[:1], one, rtol=1e-3, atol=1e-5, equal_nan=True):
                return f"the {what} of a row must not depend on the other rows, but it does"
        return None

    def _mixes(self, model: Params, x: Tensor, out: Tensor) -> str | None:
        """A row's output must not depend on the rows beside it, which may be padding; BatchNorm knows which are."""
        if len(x) < 2 or self.pure.uses_the_batch:
            return None
        first, other = x[:1].cpu(), x[1:2].cpu()
        with torch.no_grad():
            beside = self.output(model, torch.cat([first, other, first]), torch.ones(3))
        near = 1e-4 * float(out.abs().max() + 1)
        if len(beside) == 3 and all(torch.allclose(beside[i], out[0], rtol=1e-3, atol=near) for i in (0, 2)):
            return None
        return (
            f"{self.pure.name} gives a row another output when other rows are beside it: it mixes the rows of a batch "
            "(is it a layer with batch_first=False?)"
        )


def _kind(x: Tensor) -> str:
    return f"{tuple(x.shape[1:])} of {x.dtype}"
