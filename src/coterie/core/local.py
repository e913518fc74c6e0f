"""What a client computes with its own rows: losses, gradients, local updates, choices. All of it is pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.func import grad_and_value, vmap

from coterie.core.key import Key
from coterie.core.optimisers import PLAIN, Moments, Optimiser
from coterie.core.pytree import Params, leaves, stack, tree_map
from coterie.core.task import Data, Task

NONE: Params = {}
_ROWS = 2  # stream under a client's key


def mean_loss(task: Task, params: Params, data: Data) -> Tensor:
    """F_i(θ): the mean loss over a client's real rows; 0 where it has none."""
    return (task.loss(params, data) * data.mask).sum() / data.mask.sum().clamp(min=1)


def mean_gradient(task: Task, params: Params, data: Data) -> Params:
    """∇F_i(θ)."""
    return gradient_of(lambda p: mean_loss(task, p, data), params)[0]


def pick(data: Data, rows: Tensor) -> Data:
    """The rows numbered by `rows`, where -1 stands for no row."""
    at = rows.clamp(min=0)
    return Data(data.x[at], data.y[at], data.mask[at] * (rows >= 0))


def minibatches(n: int, size: int, steps: int, generator: torch.Generator) -> Tensor:
    """`steps` batches from repeated shuffled passes over n rows, as row numbers (steps, size); -1 is no row.

    Example:
        >>> rows = minibatches(5, 2, 3, torch.Generator().manual_seed(0))
        >>> sorted(rows.flatten().tolist())     # one pass: the last batch holds one row
        [-1, 0, 1, 2, 3, 4]
    """
    per_pass = max(1, -(-n // size))
    passes = [torch.randperm(n, generator=generator) for _ in range(-(-steps // per_pass))]
    padded = [torch.nn.functional.pad(p, (0, per_pass * size - n), value=-1) for p in passes]
    return torch.cat(padded).reshape(-1, size)[:steps]


def hold_out(n: int, share: float, key: Key) -> tuple[Tensor, Tensor]:
    """The rows of a client that are kept out of training, the same in every round, and the others."""
    order = torch.randperm(n, generator=key.fold(_ROWS).generator())
    return order[: int(share * n)], order[int(share * n) :]


class Updated(NamedTuple):
    """What local training gives."""

    theta: Params
    loss: Tensor  # of the first model, on the rows of the first step
    moments: Moments  # what the optimiser remembers


def local_update(
    task: Task,
    theta: Params,
    data: Data,
    *,
    lr: Tensor,
    tau: int,
    batches: Tensor | None = None,
    prox: float = 0.0,
    optimiser: Optimiser = PLAIN,
    clip: float | None = None,
    moments: Moments | None = None,
    noise: Tensor | None = None,
    ragged: bool = False,
) -> Updated:
    """LocalUpdate(θ, γ, τ) of IFCA's Algorithm 1 (lines 18-21): τ steps of (stochastic) gradient descent.

    Args:
        task: Gives the loss.
        theta: The model to start from.
        data: The client's rows.
        lr: The step size γ.
        tau: The number of steps τ; with `batches`, one is taken for each.
        batches: Row numbers of every step's minibatch (τ, size); None takes all rows each time.
        prox: FedProx's μ: adds μ/2 ‖θ - θ⁽⁰⁾‖² to the loss.
        optimiser: How to step.
        clip: The length to which longer gradients are shortened.
        moments: What the optimiser remembers; None begins anew.
        noise: The seed of dropout; None trains as it scores.
        ragged: Whether batches may be without rows, which make no step: where clients are stacked, those with fewer
            steps are padded.
    """
    trained, buffers = trained_and_moving(task, theta)
    begin = trained if prox else NONE
    now = Standing(trained, buffers, optimiser.begin(trained) if moments is None else moments)
    step = LocalStep(prox, optimiser, clip, ragged)
    now, first = descended(step, task, now, begin, data, lr, tau, batches, noise)
    return Updated({**theta, **now.trained, **now.buffers}, first, now.moments)


def descended(
    step: Callable[..., tuple[Standing, Tensor]],
    task: Task,
    now: Standing,
    begin: Params,
    data: Data,
    lr: Tensor,
    tau: int,
    batches: Tensor | None,
    noise: Tensor | None,
) -> tuple[Standing, Tensor]:
    """Where τ steps of a kind lead, and the loss on the rows of the first one; for arguments see `local_update`."""
    first = torch.zeros(())
    for q in range(tau if batches is None else len(batches)):
        rows = data if batches is None else pick(data, batches[q])
        now, loss = _computed(step, task, now, begin, rows, None if noise is None else noise + q, lr)
        first = loss if q == 0 else first
    return now, first


class Standing(NamedTuple):
    """Where local training stands."""

    trained: Params
    buffers: Params
    moments: Moments


@dataclass(frozen=True)
class LocalStep:
    """One step of `local_update`, whose settings these are: a function that an engine may compile as a whole."""

    prox: float
    optimiser: Optimiser
    clip: float | None
    ragged: bool

    def __call__(
        self, task: Task, now: Standing, begin: Params, rows: Data, noise: Tensor | None, lr: Tensor
    ) -> tuple[Standing, Tensor]:
        """What has become of a model that began as `begin`, and its loss on these rows before the step."""
        gradient, loss, moved = one_gradient(task, now.trained, now.buffers, rows, noise)
        if self.prox:
            gradient = tree_map(lambda g, p, s: g + self.prox * (p - s), gradient, now.trained, begin)
        gradient = gradient if self.clip is None else clipped(gradient, self.clip)
        trained, moments = self.optimiser.step(now.trained, gradient, now.moments, lr)
        after = Standing(trained, {**now.buffers, **moved}, moments)
        if self.ragged:
            some = rows.mask.any()
            after = tree_map(lambda a, b: torch.where(some, a, b), after, now)
        return after, loss


def training_gradient(
    task: Task, trained: Params, buffers: Params, rows: Data, noise: Tensor | None
) -> tuple[Params, Tensor, Params]:
    """The gradient of the mean loss in training, the loss, and what has become of the buffers."""
    return _computed(one_gradient, task, trained, buffers, rows, noise)


def one_gradient(
    task: Task, trained: Params, buffers: Params, rows: Data, noise: Tensor | None
) -> tuple[Params, Tensor, Params]:
    """`training_gradient`, by torch."""
    return gradient_and_more(lambda p: training_loss(task, {**p, **buffers}, rows, noise), trained)


def training_loss(task: Task, params: Params, rows: Data, noise: Tensor | None) -> tuple[Tensor, Params]:
    """The mean loss in training, and what has become of the buffers."""
    if task.train is None or noise is None:
        return mean_loss(task, params, rows), {}
    each, moved = task.train(params, rows, noise)
    return (each * rows.mask).sum() / rows.mask.sum().clamp(min=1), moved


Way = Callable[..., Any]  # (function, task, *trees of tensors) -> function(task, *trees)
_way: ContextVar[Way | None] = ContextVar("way", default=None)


@contextmanager
def stacked_by(way: Way) -> Iterator[None]:
    """In here, an engine computes the losses and the steps of stacked clients in a way of its own."""
    token = _way.set(way)
    try:
        yield
    finally:
        _way.reset(token)


def _computed(function: Callable[..., Any], task: Task, *args: Any) -> Any:
    """`function(task, *args)`; of clients that vmap has stacked, in the way of the engine, if it has one."""
    way = _way.get() if peek_interpreter_stack() is not None else None
    return function(task, *args) if way is None else way(function, task, *args)


def clipped(gradient: Params, length: float) -> Params:
    """A gradient no longer than `length`, as `torch.nn.utils.clip_grad_norm_` does it."""
    norm = torch.stack([g.square().sum() for g in gradient.values()]).sum().sqrt()
    factor = (length / (norm + 1e-6)).clamp(max=1)
    return tree_map(lambda g: g * factor, gradient)


def shortened(update: Any, bound: float) -> tuple[Any, Tensor]:
    """A tree no longer than a bound, 0 if it is not finite; and whether it was no longer before, as 1 or 0.

    Example:
        >>> shortened({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}, 1.0)
        ({'a': tensor([0.6000]), 'b': tensor([0.8000])}, tensor(0.))
    """
    norm = torch.stack([x.double().square().sum() for x in leaves(update)]).sum().sqrt()
    factor, known = (bound / norm.clamp(min=bound)), torch.isfinite(norm)
    return tree_map(lambda x: torch.where(known, x * factor.to(x), 0.0), update), (norm <= bound).float()


def trained_and_moving(task: Task, theta: Params) -> tuple[Params, Params]:
    """The parameters that are trained, and the buffers that move with them."""
    moving = task.moving
    return {n: p for n, p in theta.items() if n not in moving}, {n: theta[n] for n in moving if n in theta}


def gradient_of(function: Callable[[Params], Tensor], theta: Params) -> tuple[Params, Tensor]:
    """The gradient of a function, and its value."""
    gradient, value, _ = gradient_and_more(lambda p: (function(p), ()), theta)
    return gradient, value


def gradient_and_more(function: Callable[[Params], tuple[Tensor, Any]], theta: Params) -> tuple[Params, Tensor, Any]:
    """The gradient of the first of two values, and both."""
    if peek_interpreter_stack() is not None:  # inside vmap
        gradient, (value, more) = grad_and_value(function, has_aux=True)(theta)
        return gradient, value, more
    own = {n: p.detach().requires_grad_() for n, p in theta.items()}  # outside of it, this is faster
    with torch.enable_grad():
        value, more = function(own)
        found = torch.autograd.grad(value, list(own.values()), materialize_grads=True)
    return dict(zip(own, found, strict=True)), value.detach(), tree_map(torch.detach, more)


@contextmanager
def unless_refused() -> Iterator[None]:
    """An error in here is passed over: vmap's, for all else will be raised again where it is done one by one.

    But not that a matrix has no inverse: models that diverge come to that.
    """
    try:
        yield
    except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage] - torch documents it
        raise
    except RuntimeError:
        pass


def each_model(function: Callable[..., Any]) -> Callable[..., Any]:
    """`vmap` over models. Where vmap cannot batch one, or has to group convolutions, which is slow: one by one."""

    def every(*args: Any) -> Any:
        if not any(x.dim() > 4 for x in leaves(args[0])):
            with unless_refused():
                return vmap(function)(*args)
        models = range(len(leaves(args[0])[0]))
        return stack([function(*tree_map(lambda x, i=i: x[i], args)) for i in models])

    return every


def model_losses(task: Task, theta: Params, data: Data, personal: Params) -> Tensor:
    """F(θ_j) on these rows of models stacked (k, …), with what a client keeps of them to itself: (k,)."""
    return _computed(all_losses, task, theta, data, personal)


def all_losses(task: Task, theta: Params, data: Data, personal: Params) -> Tensor:
    """`model_losses`, by torch."""
    return each_model(lambda t: mean_loss(task, {**t, **personal}, data))(theta)


def nearest(task: Task, theta: Params, data: Data, personal: Params = NONE) -> tuple[Tensor, Tensor]:
    """Argmin over j of F(θ_j) on these rows, and that loss, for models stacked (k, …)."""
    losses = model_losses(task, theta, data, personal)
    j = losses.nan_to_num(nan=torch.inf, posinf=torch.inf).argmin()  # nobody chooses a model that has diverged
    return j, losses.index_select(0, j.reshape(1))[0]


def personal_of(memory: Any) -> Params:
    """What a client keeps of its model to itself, from what it remembers; empty if nothing."""
    return memory.get("personal", {}) if isinstance(memory, dict) else {}


def each_nearest(task: Task, theta: Params, data: Data) -> Tensor:
    """Argmin over j of the loss of θ_j for every row (n,), for models stacked (k, …)."""
    losses = each_model(lambda t: task.loss(t, data))(theta)
    return losses.nan_to_num(nan=torch.inf, posinf=torch.inf).argmin(0)


def membership(label: Tensor, k: int, mask: Tensor) -> Tensor:
    """1 where a real row (n,) is in a cluster (n, k)."""
    return (label[:, None] == torch.arange(k, device=label.device)) * mask[:, None]


def remembered(labels: Any, n: int) -> Tensor:
    """The labels that a client kept (…, n); stacking clients may have padded them to another length.

    Raises:
        ValueError: It kept none.
    """
    if not isinstance(labels, Tensor):
        raise ValueError("clients remember nothing of this run: they missed its start, or their memory was lost")
    short = n - labels.shape[-1]
    return torch.nn.functional.pad(labels, (0, short), value=-1) if short > 0 else labels[..., :n]
