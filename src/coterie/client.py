"""What happens at one client: its rows, its step, its reply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.func import grad_and_value, vmap

from coterie.adam import Moving
from coterie.key import Key
from coterie.task import Data, Task
from coterie.tree import Params, flat, leaves, stack, tree_map, unflat


class Local(NamedTuple):
    """All that a client's step may look at besides what the server sent.

    Attributes:
        data: The client's rows, padded to the length of its bucket; `data.mask` tells the real ones.
        draws: What the step's `draw` returned for this client: every random number it will use.
        memory: What the client kept from its last reply, `()` at first.
    """

    data: Data
    draws: Any
    memory: Any


class Reply(NamedTuple):
    """What a client sends back.

    A reply may be in several parts, each for a sum of its own: then `slot` and `weight` have shape (parts,) and
    every tensor of `update` leads with that axis. Restarts travel so.

    Attributes:
        update: What is added up.
        weight: How heavily.
        slot: In which of the sums.
        note: Diagnostics of one client; they never enter a sum.
        memory: What stays on the client until its next step.
    """

    update: Any
    weight: Tensor
    slot: Tensor
    note: dict[str, Tensor]
    memory: Any = ()


class Plan(NamedTuple):
    """What a step does, in plain words, for an executor that knows a faster way to do exactly that.

    The client is sent `{"theta": models, "common": parameters that all models have, "lr": γ}`, without "common" where
    there are none. If `clusters` is set, the models are (starts, clusters, …) and for every start it chooses the one
    with the lowest mean loss on its rows; otherwise it takes what it is sent, whose "label" it passes on if there is
    one. From there it takes `tau` full-batch steps of size γ on its mean loss plus prox/2 ‖θ - θ⁽⁰⁾‖² and replies with
    the result (or with the gradient at the first step), weighted as `weights` says, to slot start · slots_per_start +
    label, with the note {"label", "loss"} ({"loss"} where there is no label). `steady` says that γ is the same in all
    rounds.
    """

    tau: int
    prox: float = 0.0
    gradient: bool = False
    weights: str = "uniform"
    clusters: int | None = None
    slots_per_start: int = 1
    steady: bool = False


class ClientStep(NamedTuple):
    """One client's work in one exchange with the server.

    Attributes:
        run: `run(shared, local) -> Reply`. Pure, about one client, and traceable under `torch.func.vmap`.
        draw: `draw(n, key, when)` makes, outside of `run`, all the random numbers of a client with n rows. `key`
            is the client's own and the same in every round; `when` is the round (and whatever the algorithm folded
            into it). Integer tensors of unequal shapes are padded with -1 where clients are stacked.
        plan: What `run` does, where it is something that an executor may know.
        many: Whether `run` is many small operations, which a GPU does faster than it can be told to: there they are
            recorded once. `run` must then be the same function whenever the algorithm makes the step.
    """

    run: Callable[[Any, Local], Reply]
    draw: Callable[[int, Key, tuple[int, ...]], Any] | None = None
    plan: Plan | None = None
    many: bool = False


def mean_loss(task: Task, params: Params, data: Data) -> Tensor:
    """F_i(θ): the mean loss over a client's real rows; 0 where it has none."""
    return (task.loss(params, data) * data.mask).sum() / data.mask.sum().clamp(min=1)


def mean_gradient(task: Task, params: Params, data: Data) -> Params:
    """∇F_i(θ)."""
    return gradient_of(lambda p: mean_loss(task, p, data), params)[0]


def pick(data: Data, rows: Tensor) -> Data:
    """The rows numbered by `rows`, of which -1 stands for no row."""
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


def local_update(
    task: Task, theta: Params, data: Data, *, lr: Tensor, tau: int, batches: Tensor | None = None, prox: float = 0.0
) -> tuple[Params, Tensor]:
    """LocalUpdate(θ, γ, τ) of IFCA's Algorithm 1 (lines 18-21): τ steps of (stochastic) gradient descent.

    Returns the model it ends with, and the mean loss of the one it began with on the rows of the first step.

    Args:
        task: Gives the loss.
        theta: The model to start from.
        data: The client's rows.
        lr: The step size γ.
        tau: The number of steps τ.
        batches: Row numbers of every step's minibatch (τ, size); None takes all rows each time.
        prox: FedProx's μ: adds μ/2 ‖θ - θ⁽⁰⁾‖² to the loss.
    """
    start, first = theta, torch.zeros(())
    for q in range(tau):
        batch = data if batches is None else pick(data, batches[q])
        gradient, loss = gradient_of(lambda p, batch=batch: mean_loss(task, p, batch), theta)
        first = loss if q == 0 else first
        if prox:
            gradient = tree_map(lambda g, p, s: g + prox * (p - s), gradient, theta, start)
        theta = tree_map(lambda p, g: torch.addcmul(p, g, lr, value=-1), theta, gradient)  # p - lr · g
    return theta, first


def adam_update(task: Task, theta: Params, data: Data, *, lr: Tensor, tau: int, batches: Tensor | None) -> Params:
    """As `local_update`, with Adam's steps in place of plain ones; returns the model it ends with."""
    now = Moving.begin(flat(theta, 0))
    for q in range(tau):
        batch = data if batches is None else pick(data, batches[q])
        slope, _ = gradient_of(lambda p, batch=batch: mean_loss(task, unflat(p["at"], theta), batch), {"at": now.at})
        now = now.step(slope["at"], lr)
    return unflat(now.at, theta)


def each_start(function: Callable[..., Any], in_dims: tuple[int | None, ...]) -> Callable[..., Any]:
    """`vmap` over starts; a single one is done without it, for vmap slows large models down."""

    def one(*args: Any) -> Any:
        own = [a if d is None else tree_map(lambda x: x[0], a) for a, d in zip(args, in_dims, strict=True)]
        return tree_map(lambda x: x[None], function(*own))

    def every(*args: Any) -> Any:
        batched = next(leaves(a)[0] for a, d in zip(args, in_dims, strict=True) if d is not None and leaves(a))
        return (one if len(batched) == 1 else vmap(function, in_dims=in_dims))(*args)

    return every


def each_model(function: Callable[..., Any]) -> Callable[..., Any]:
    """`vmap` over models; those with convolutions go one after another, for vmap would group them, which is slow."""

    def every(*args: Any) -> Any:
        if not any(x.dim() > 4 for x in leaves(args[0])):
            return vmap(function)(*args)
        models = range(len(leaves(args[0])[0]))
        return stack([function(*tree_map(lambda x, i=i: x[i], args)) for i in models])

    return every


def gradient_of(function: Callable[[Params], Tensor], theta: Params) -> tuple[Params, Tensor]:
    """The gradient of a function, and its value."""
    if peek_interpreter_stack() is not None:  # inside vmap
        return grad_and_value(function)(theta)
    own = {n: p.detach().requires_grad_() for n, p in theta.items()}  # outside of it, this is faster
    with torch.enable_grad():
        value = function(own)
        found = torch.autograd.grad(value, list(own.values()), materialize_grads=True)
    return dict(zip(own, found, strict=True)), value.detach()
