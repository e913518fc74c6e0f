"""A client step: what one client does in one exchange with the server, and what it sends back.

A step is a method of a frozen dataclass, marked with `@client_step`. It is given the task and returns either a
description (`coterie.core.train.Train`), which engines may carry out in a faster way, or a `ClientStep`: any function
of one client. A step crosses a network as the name of its class, the class's settings and its own name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from coterie.core.key import Key
from coterie.core.task import Data, Task

Draw = Callable[[int, Key, tuple[int, ...]], Any]
"""`draw(n, key, when)` makes all random numbers of a client with n rows before its step runs.

`key` belongs to the client and is the same in every round; `when` is the round, and whatever the method folded into
it. Integer tensors of unequal shapes are padded with -1, which stands for no row, where clients are stacked.
"""

Secrecy = Literal["mean", "hidden"]
Weights = Literal["uniform", "size"]

ONE = torch.ones(())
FIRST = torch.zeros((), dtype=torch.long)


class Local(NamedTuple):
    """All that a client's step may look at besides the server's message.

    Attributes:
        data: The client's rows, padded to the length of its bucket; `data.mask` is 1 for the real ones.
        draws: What the step's `draw` returned for this client: every random number it will use.
        memory: What the client kept from its last reply, `()` at first.
    """

    data: Data
    draws: Any
    memory: Any


class Reply(NamedTuple):
    """What a client sends back.

    A reply may be in several parts, each for a sum of its own: then `slot` and `weight` have shape (parts,) and
    every tensor of `update` leads with that axis. Restarts are sent this way.

    Attributes:
        update: What is added up.
        weight: How heavily it counts; 1 by default.
        slot: The sum it is added to; the first by default.
        note: Diagnostics of one client; they never enter a sum.
        memory: What stays on the client until its next step.
    """

    update: Any = ()
    weight: Tensor = ONE
    slot: Tensor = FIRST
    note: dict[str, Tensor] = {}
    memory: Any = ()


class ClientStep(NamedTuple):
    """A free-form step: any function of one client that can be traced by `torch.func.vmap`.

    Attributes:
        run: `run(message, local) -> Reply`, a pure function.
        draw: Makes the random numbers that `run` needs.
        secrecy: What the server of a secure sum gets in place of each client's note: "mean", the mean over all clients,
            or "hidden", -1. A note that is not listed has to be sent as it is, so the step cannot run there.
        weights: How heavily a client may count in a sum: at most 1 ("uniform"), or at most as its rows ("size"). Nodes
            of a real federation are held to it.
        finish: What clients do to their replies outside of the traced function, where every reply is asked for:
            `finish(replies, keys)` is given the stacked replies of some clients, and the key of each at this moment.
        as_they_are: Whether it looks at the rows themselves, whatever the task. Else, where the model's first layers
            are frozen, rows may be what comes out of these, and the task is to go on from there.

    Example:
        >>> step = ClientStep(lambda message, local: Reply(message + local.data.x.sum()))
        >>> rows = Data(torch.ones(3, 2), torch.zeros(3), torch.ones(3))
        >>> step.run(torch.tensor(1.0), Local(rows, (), ())).update
        tensor(7.)
    """

    run: Callable[[Any, Local], Reply]
    draw: Draw | None = None
    secrecy: Mapping[str, Secrecy] = {}
    weights: Weights = "size"
    finish: Callable[[Reply, Sequence[Key]], Reply] | None = None
    as_they_are: bool = False


class Description(Protocol):
    """A step that is described rather than programmed: what one client does follows from it."""

    def derive(self, task: Task) -> ClientStep:
        """What one client does, as a function: the reference that every engine agrees with."""
        ...


Step = Callable[[Task], ClientStep | Description]  # a method that is marked with `client_step`

Marked = TypeVar("Marked", bound=Callable[..., Any])

_MARK = "_is_client_step"


def client_step(method: Marked) -> Marked:
    """Mark a method `step(self, task)` as a client step, so that nodes of a federation can find it by its name."""
    setattr(method, _MARK, True)
    return method


def client_steps(owner: type) -> tuple[str, ...]:
    """The names of the client steps of a class.

    Example:
        >>> class Counter:
        ...     @client_step
        ...     def count(self, task): ...
        >>> client_steps(Counter)
        ('count',)
    """
    members = inspect.getmembers(owner, inspect.isfunction)
    return tuple(name for name, function in members if getattr(function, _MARK, False))


def derived(step: Step, task: Task) -> ClientStep:
    """What one client does in a step, as a function."""
    found = step(task)
    return found if isinstance(found, ClientStep) else found.derive(task)


def step_name(step: Step) -> str:
    """A step's name for messages, such as "IFCA.step"."""
    owner = getattr(step, "__self__", None)
    if inner := getattr(owner, "inner", None):  # a step around another
        return step_name(inner)
    name = getattr(step, "__name__", "step")
    return name if owner is None else f"{type(owner).__name__}.{name}"
