"""What keeps the server from reading the updates that it averages and compares (CFL, Section V-B), and sketches.

Cosines, norms and means of vectors do not change when all vectors are put through one orthonormal map. Clients that
share a secret seed can therefore send P Δθ in place of Δθ.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.func import vmap

from coterie.core.key import Key
from coterie.core.pytree import Params, flat
from coterie.core.settings import setting
from coterie.core.task import Task

BLOCK = 64  # coordinates that are rotated together
_ORDER, _SIGNS, _ROTATION, _SKETCH = range(4)  # streams under the secret

Kind = Literal["none", "permutation", "rotation"]
Shapes = tuple[tuple[str, tuple[int, ...]], ...]  # names and shapes of a model's parameters, in order


@dataclass(frozen=True)
class Disguise:
    """An orthonormal map of models that the clients know and the server does not.

    Args:
        kind: "none", "permutation" (of all coordinates) or "rotation" (a permutation, then blocks of coordinates are
            rotated, so that not even the values are seen).
        secret: The seed that the clients share.
        shapes: The shapes of the model's parameters.

    Example:
        >>> disguise = Disguise("rotation", 7, (("w", (2, 3)), ("b", (2,))))
        >>> theta = {"w": torch.randn(2, 3), "b": torch.randn(2)}
        >>> hidden = disguise.put_on(theta)
        >>> list(hidden), torch.allclose(disguise.take_off(hidden)["w"], theta["w"], atol=1e-6)
        (['disguised'], True)
    """

    kind: Kind
    secret: int
    shapes: Shapes

    def __post_init__(self) -> None:
        if self.kind != "none":  # drawn here and kept, for inside vmap nothing can be drawn
            _order(self._padded, self.secret)
            _rotation(self.secret)

    def put_on(self, params: Params) -> Params:
        """P θ, as one tensor."""
        if self.kind == "none":
            return params
        vector = flat(params, axes=0)
        order = _order(self._padded, self.secret).to(vector.device)
        vector = torch.nn.functional.pad(vector, (0, self._padded - len(vector)))[order]
        if self.kind == "rotation":
            vector = (vector.reshape(-1, BLOCK) @ _rotation(self.secret).to(vector)).flatten()
        return {"disguised": vector}

    def take_off(self, disguised: Params) -> Params:
        """θ from P θ."""
        if self.kind == "none":
            return disguised
        vector = disguised["disguised"]
        if self.kind == "rotation":
            vector = (vector.reshape(-1, BLOCK) @ _rotation(self.secret).to(vector).T).flatten()
        back = _order(self._padded, self.secret).argsort().to(vector.device)
        parts = vector[back][: self._size].split([_numel(shape) for _, shape in self.shapes])
        return {name: part.reshape(shape) for (name, shape), part in zip(self.shapes, parts, strict=True)}

    def take_off_each(self, disguised: Params) -> Params:
        """Models (k, …) from k disguised ones."""
        return disguised if self.kind == "none" else vmap(self.take_off)(disguised)

    @property
    def _size(self) -> int:
        return sum(_numel(shape) for _, shape in self.shapes)

    @property
    def _padded(self) -> int:
        return -(-self._size // BLOCK) * BLOCK if self.kind == "rotation" else self._size


def shapes_of(params: Params) -> Shapes:
    """Names and shapes, in order."""
    return tuple((name, tuple(x.shape)) for name, x in params.items())


@dataclass(frozen=True)
class Sketch:
    """A random projection: coordinates are dealt to `size` sums at random, each with a random sign.

    Inner products are kept on average, with an error of about ‖a‖‖b‖ / √size. Everybody uses the same projection.

    Args:
        length: Of the vectors.
        size: Of their projections.

    Example:
        >>> a, b = torch.randn(2, 50_000, generator=torch.Generator().manual_seed(0))
        >>> sketch = Sketch(50_000, 1000)
        >>> float((sketch(a) @ sketch(b) - a @ b) / (a.norm() * b.norm())) < 0.1
        True
    """

    length: int
    size: int

    def __post_init__(self) -> None:
        _order(self._padded, _SKETCH)  # as above
        _signs(self._padded)

    def __call__(self, vector: Tensor) -> Tensor:
        """The projection of one vector."""
        order = _order(self._padded, _SKETCH).to(vector.device)
        mixed = torch.nn.functional.pad(vector, (0, self._padded - self.length))[order]
        return (mixed * _signs(self._padded).to(vector)).reshape(-1, self.size).sum(0)

    @property
    def _padded(self) -> int:
        return -(-self.length // self.size) * self.size


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """Hyperparameters of what the server sees of the clients' updates.

    Args:
        privacy: Clients send updates through a secret "permutation" of all coordinates, or "rotation"; the server never
            sees a model or an update without it.
        secret: The seed of it, which only clients know. There is none by default, because everybody would know it.
        sketch: Compare random projections of this length; the server then sees sums and projections only.
    """

    privacy: Kind = "none"
    secret: int | None = setting(None, low=0)
    sketch: int | None = setting(None, low=2)

    def disguise(self, shapes: Shapes) -> Disguise:
        """The map P for models of these shapes."""
        return Disguise(self.privacy, self.secret or 0, tuple((name, tuple(shape)) for name, shape in shapes))

    def check_secret(self) -> None:
        """Refuse to disguise by a seed that everybody knows.

        Raises:
            ValueError: There is a disguise and no secret.
        """
        if self.privacy != "none" and self.secret is None:
            raise ValueError(
                f"{type(self).__name__}: privacy = '{self.privacy}' needs a secret that only clients know, such as one "
                f"that was just drawn: secret = {secrets.randbits(62)}"
            )

    def maps(self, task: Task, longest: int | None = None) -> tuple[Disguise, Callable[[Params], Tensor]]:
        """The map P for a task's models, and what is compared of a disguised update: all of it, or its sketch.

        Args:
            task: Its models.
            longest: What is longer is sketched in any case.
        """
        disguise = self.disguise(shapes_of(like := task.init(Key.of(0))))
        length = flat({n: x for n, x in disguise.put_on(like).items() if n not in task.moving}, axes=0).numel()
        size = self.sketch or longest
        if size is None or (self.sketch is None and length <= size):
            return disguise, lambda update: flat(update, axes=0)
        project = Sketch(length, size)
        return disguise, lambda update: project(flat(update, axes=0))


@functools.lru_cache(maxsize=8)
def _order(size: int, secret: int) -> Tensor:
    return torch.randperm(size, generator=Key.of(secret).fold(_ORDER, size).generator())


@functools.lru_cache(maxsize=8)
def _signs(size: int) -> Tensor:
    return torch.randint(2, (size,), generator=Key.of(_SKETCH).fold(_SIGNS, size).generator()) * 2.0 - 1


@functools.lru_cache(maxsize=8)
def _rotation(secret: int) -> Tensor:
    """An orthonormal matrix, uniformly drawn."""
    q, r = torch.linalg.qr(torch.randn(BLOCK, BLOCK, generator=Key.of(secret).fold(_ROTATION).generator()))
    return q * r.diagonal().sign()


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
