"""Models that are linear in their parameters: f(x) = ⟨φ(x), θ⟩, whatever φ is.

φ(x) is the gradient of the output with respect to the parameters, so it needs no description: any module whose output
is linear in its parameters has one. For `models.Linear` it is the row itself, and a 1 for the bias.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.func import grad, jacrev, vmap

from coterie.core.first_layer import FirstLinear
from coterie.core.key import Key
from coterie.core.pytree import Params, flat

if TYPE_CHECKING:
    from coterie.core.task import Task


def features_of(
    output: Callable[[Params, Tensor], Tensor],
    shapes: dict[str, torch.Size],
    first_layer: Callable[[Tensor], FirstLinear | None],
) -> Callable[[Tensor], Tensor]:
    """φ of a model with one output: rows (n, …) to features (n, d), in the order of its parameters.

    Args:
        output: `output(params, x)` of the model.
        shapes: Of its parameters.
        first_layer: Takes the model apart: of one that is a linear layer and nothing else, φ(x) is known without a
            gradient for every row.
    """
    layers: dict[torch.Size, FirstLinear | None] = {}  # by the shape of a row

    def layer(row: torch.Size) -> FirstLinear | None:
        if row not in layers and peek_interpreter_stack() is None:  # inside vmap it could not be tried
            layers[row] = first_layer(torch.zeros(2, *row))
        found = layers.get(row)
        return found if found is not None and found.squared and len(shapes) == 1 + (found.bias is not None) else None

    def phi(x: Tensor) -> Tensor:
        if (linear := layer(x.shape[1:])) is not None:
            own = {linear.weight: x.flatten(1), linear.bias: x.new_ones(len(x), 1)}
            return torch.cat([own[name] for name in shapes], 1)
        zero = {name: x.new_zeros(shape) for name, shape in shapes.items()}

        def of_row(params: Params, row: Tensor) -> Tensor:
            return output(params, row[None]).reshape(())

        return flat(vmap(grad(of_row), in_dims=(None, 0))(zero, x))

    return phi


def jacobian_of(
    output: Callable[[Params, Tensor], Tensor], shapes: dict[str, torch.Size]
) -> Callable[[Tensor], Tensor]:
    """φ of each of a model's outputs: rows (n, …) to features (n, c, d).

    Args:
        output: `output(params, x)` of the model.
        shapes: Of its parameters.
    """

    def phi(x: Tensor) -> Tensor:
        zero = {name: x.new_zeros(shape) for name, shape in shapes.items()}

        def of_row(params: Params, row: Tensor) -> Tensor:
            return output(params, row[None]).flatten()

        return flat(vmap(jacrev(of_row), in_dims=(None, 0))(zero, x), 2)

    return phi


def is_generalised_linear(task: Task, x: Tensor) -> bool:
    """Whether a task's outputs are ⟨φ_c(x), θ⟩, and its targets classes or counts, tried on some rows."""
    from coterie.core.task import Data

    if task.jacobian is None or task.functions is None:
        return False
    rows = Data(x, torch.zeros(len(x), dtype=torch.long), torch.ones(len(x)))
    try:
        phi = task.jacobian(x)
        for j in range(2):
            theta = {name: p.to(x.dtype) for name, p in task.init(Key.of(j)).items()}
            given, expected = task.loss(theta, rows), task.functions.loss(phi @ flat(theta, 0), rows.y)
            if not torch.allclose(given, expected, rtol=1e-3, atol=1e-5):
                return False
    except RuntimeError:  # its outputs are of another number, or it takes rows together
        return False
    return True


def is_linear(task: Task, x: Tensor) -> bool:
    """Whether a task's model is ⟨φ(x), θ⟩ with a single output and its loss is squared, tried on some rows."""
    return task.features is not None and _agrees(task, x, [task.init(Key.of(j)) for j in range(2)])


def linearity(task: Task) -> Callable[[torch.Size], bool]:
    """The same as a function of a row's shape, tried on rows that are made up: a step cannot look at values."""
    drawn = [] if task.features is None else [task.init(Key.of(j)) for j in range(2)]  # vmap draws nothing

    @cache
    def is_linear_on(shape: torch.Size) -> bool:
        return bool(drawn) and _agrees(task, torch.arange(1.0, 2 * shape.numel() + 1).sin().reshape(2, *shape), drawn)

    return is_linear_on


def _agrees(task: Task, x: Tensor, models: list[Params]) -> bool:
    """Whether the loss of some models on these rows is that of ⟨φ(x), θ⟩."""
    from coterie.core.task import Data

    assert task.features is not None
    rows = Data(x, x.new_zeros(len(x)), x.new_ones(len(x)))
    try:
        phi = task.features(x)
        for model in models:
            theta = {name: p.to(x.dtype) for name, p in model.items()}
            squared, expected = task.loss(theta, rows), (phi @ flat(theta, 0)).square()  # of f(x), for y = 0
            if not torch.allclose(squared, expected, rtol=1e-3, atol=1e-5 * float(expected.max().clamp(min=1))):
                return False
    except RuntimeError:  # it has several outputs, or takes rows together
        return False
    return True


def require_linear(task: Task, x: Tensor, who: str) -> None:
    """Refuse a task whose model is not linear in its parameters.

    Args:
        task: The task.
        x: Some rows to try it on.
        who: Whose need it is, for the message.
    """
    if not is_linear(task, x):
        raise ValueError(
            f"{who}: the task must be a regression with one output whose model is linear in its parameters, such as "
            f"Task.regressor(models.Linear({x[0].numel()}, 1))"
        )
