"""Choose a model, train it, send it back: what most methods ask of a client, described instead of programmed.

`Train.derive` is the meaning of a description: one client's work as a plain function. The sequential engine runs that;
the vectorised engine reads the description itself and computes the same for many clients at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import torch
from torch import Tensor
from torch.func import vmap

from coterie.core.key import Key
from coterie.core.local import (
    Updated,
    hold_out,
    local_update,
    mean_loss,
    minibatches,
    nearest,
    personal_of,
    pick,
    shortened,
    training_gradient,
    unless_refused,
)
from coterie.core.optimisers import PLAIN, Moments, Optimiser
from coterie.core.pytree import Params, beside, leaves, stack, take, tree_map
from coterie.core.step import FIRST, ClientStep, Local, Reply, Secrecy, Weights
from coterie.core.task import Data, Task

if TYPE_CHECKING:
    from coterie.core.cohort import Cohort

_BATCHES, _NOISE = 1, 4  # streams under a client's key

SECRECY: dict[str, Secrecy] = {
    "label": "hidden", "loss": "mean", "held": "mean", "held_rows": "mean", "within": "mean",
}  # fmt: skip


class Models(NamedTuple):
    """The message of a `Train` step: the models, and how to train them.

    Attributes:
        theta: Models to choose among (k, …), or the one model to train (…). Where several starts run side by side, an
            axis of starts comes first.
        lr: The step size γ, for all models or one for each of them.
        label: The cluster of the one model; `()` where clients choose or there is one cluster only.
        common: Parameters that all k models share, sent once.
    """

    theta: Params
    lr: Tensor | tuple[()] = ()
    label: Tensor | tuple[()] = ()
    common: Params = {}

    def rows(self, index: Tensor) -> Self:
        """The message for one client that is sent only these rows of all models, and of their labels."""
        own = self._replace(theta=take(self.theta, index), label=take(self.label, index))
        return own._replace(lr=take(self.lr, index)) if self.lr_each else own

    @property
    def lr_each(self) -> bool:
        """Whether every model has a step size of its own."""
        return isinstance(self.lr, Tensor) and self.lr.dim() > 0


def own_rows(message: Any, index: Tensor) -> Any:
    """The rows of a message that one client is sent; of `Models`, those of the models and labels."""
    return message.rows(index) if isinstance(message, Models) else take(message, index)


@dataclass(frozen=True)
class Rows:
    """Which of its rows a client uses for what.

    Args:
        holdout: Share of the rows that is kept out of training, the same in every round. The loss of the model that was
            sent, summed over them, is in the note "held", and their number in "held_rows".
        fresh: T: the other rows are cut into 2T parts, and each of T rounds uses two new ones: one to choose on, one to
            train on (re-sampling, Section 5 of the IFCA paper).
    """

    holdout: float = 0.0
    fresh: int | None = None

    def draw(self, n: int, key: Key, when: tuple[int, ...]) -> dict[str, Tensor]:
        """The row numbers of each purpose for a client with n rows."""
        held, rest = hold_out(n, self.holdout, key)
        choose = train = rest
        if self.fresh:
            size = len(rest) // (2 * self.fresh)
            choose, train = rest[2 * when[0] * size :].split(size)[:2]
        return {"choose": choose, "train": train, "held": held}

    def check(self, cohort: Cohort, who: str) -> None:
        """Refuse clients with too few rows for T rounds."""
        least = int(cohort.sizes.min())
        kept = least - int(self.holdout * least)
        if self.fresh and kept < 2 * self.fresh:
            client = cohort.federation.name(int(cohort.clients[cohort.sizes.argmin()]))
            aside = f", {least - kept} of them held out" if kept < least else ""
            raise ValueError(
                f"{who}: resample={self.fresh} needs at least {2 * self.fresh} rows on every client, but "
                f"{client} has {least}{aside}"
            )


class Given(NamedTuple):
    """What a client trains with, besides a model."""

    data: Data
    lr: Any
    batches: Tensor | None = None  # the rows of every step
    noise: Tensor | None = None  # the seed of dropout
    moments: Moments | None = None  # what the optimiser remembers of the last round


@dataclass(frozen=True)
class Descend:
    """τ steps of gradient descent, on all rows or on minibatches.

    Args:
        tau: The number of steps τ.
        batch: Rows per step, from shuffled passes over the client's rows; None takes all of them each time.
        prox: FedProx's μ: the pull towards the model that was sent.
        steady: Whether the step size is the same in every round.
        optimiser: How to step.
        clip: The length to which longer gradients are shortened.
        epochs: Passes over the rows, in place of τ steps; only with `batch`.
    """

    tau: int
    batch: int | None = None
    prox: float = 0.0
    steady: bool = False
    optimiser: Optimiser = PLAIN
    clip: float | None = None
    epochs: int | None = None

    @property
    def plain(self) -> bool:
        """Whether a step is θ - γ·gradient and no more."""
        return self.optimiser == PLAIN and self.clip is None

    def steps(self, n: int) -> int:
        """How many steps a client with n rows takes."""
        if self.epochs is None or self.batch is None:
            return self.tau
        return self.epochs * -(-n // max(1, min(self.batch, n)))

    def __call__(self, task: Task, theta: Params, given: Given) -> Updated:
        """The trained model, the loss of the first one on the rows of the first step, and what is remembered."""
        return local_update(
            task,
            theta,
            given.data,
            lr=given.lr,
            tau=self.tau,
            batches=given.batches,
            prox=self.prox,
            optimiser=self.optimiser,
            clip=self.clip,
            moments=given.moments,
            noise=given.noise,
            ragged=self.epochs is not None,
        )


@dataclass(frozen=True)
class Gradient:
    """The gradient of the mean loss, on all rows or on one minibatch.

    Args:
        batch: Rows of the minibatch; None takes all.
    """

    batch: int | None = None
    tau = 1
    plain = True
    optimiser = PLAIN

    def steps(self, n: int) -> int:
        """One."""
        return self.tau

    def __call__(self, task: Task, theta: Params, given: Given) -> Updated:
        """The gradient, and the loss on the same rows."""
        rows = given.data if given.batches is None else pick(given.data, given.batches[0])
        gradient, loss, _ = training_gradient(task, theta, {}, rows, given.noise)
        return Updated(gradient, loss, {})


class _Outcome(NamedTuple):
    """What one start gives at one client."""

    update: Params
    label: Tensor | tuple[()]
    loss: Tensor
    held: Tensor | tuple[()]
    within: Tensor | tuple[()]
    memory: dict[str, Any]


@dataclass(frozen=True)
class Train:
    """A client step: take a model from the server's `Models`, train it, and reply with the result.

    Args:
        by: How it is trained.
        k: Clusters; those of start r have slots r·k to r·k + k - 1.
        choose: Whether the client is sent all k models and takes the one with the lowest mean loss on its rows.
            Otherwise it takes the one it is sent, and keeps its label.
        starts: How many starts run side by side, each with k models of its own; None where there is no such axis.
        weights: How heavily a client counts: "uniform", or by its number of rows ("size").
        rows: Which rows serve for what; None uses all for everything.
        send: Whether the client replies with the trained "model", or with the "change" from the one it was sent.
        bound: The length of the change, or of the gradient, to which longer ones are shortened; one that is not finite
            becomes 0. The note "within" says whether it was short enough. None sends it as it is.
        full_loss: Whether the loss in the note is that on all rows, where a client neither chooses nor trains on all.
            Otherwise it is that on the rows of the first step.

    Example:
        >>> from torch import nn
        >>> task = Task.classifier(nn.Linear(2, 2))
        >>> step = Train(Descend(tau=3), k=2, choose=True).derive(task)
        >>> models = tree_map(lambda *xs: torch.stack(xs), task.init(Key.of(0)), task.init(Key.of(1)))
        >>> rows = Data(torch.randn(5, 2), torch.zeros(5, dtype=torch.long), torch.ones(5))
        >>> reply = step.run(Models(models, lr=torch.tensor(0.1)), Local(rows, {}, ()))
        >>> sorted(reply.note), int(reply.slot) in (0, 1)
        (['label', 'loss'], True)
    """

    by: Descend | Gradient
    k: int = 1
    choose: bool = False
    starts: int | None = None
    weights: Weights = "uniform"
    rows: Rows | None = None
    send: Literal["model", "change"] = "model"
    full_loss: bool = False
    bound: float | None = None

    @property
    def holdout(self) -> float:
        """Share of each client's rows that is kept out of training."""
        return self.rows.holdout if self.rows else 0.0

    def derive(self, task: Task) -> ClientStep:
        """What one client does: the reference."""
        self._check(task)

        def one_start(theta: Params, common: Params, label: Any, lr: Any, kept: Any, local: Local) -> _Outcome:
            loss, own = None, personal_of(local.memory)
            if self.choose:
                label, loss = self.chosen(task, theta, common, local)
                theta = {**take(theta, label), **common}
            theta = {**theta, **own}
            if not self.choose and self.full_loss:
                loss = mean_loss(task, theta, self._rows(local, "choose"))
            held = self._held(task, theta, local)
            whole = {**beside(local.data.mask, task.personal), **theta}
            moments = self._moments(task, whole, label, kept)
            updated = self.by(task, whole, self._given(local, lr, moments))
            update = {n: updated.theta[n] for n in theta if n not in task.personal}
            if self.send == "change":
                update = tree_map(torch.sub, update, {n: theta[n] for n in update})
            update, within = (update, ()) if self.bound is None else shortened(update, self.bound)
            memory = self._memory(task, updated, label)
            return _Outcome(update, label, updated.loss if loss is None else loss, held, within, memory)

        def run(sent: Models, local: Local) -> Reply:
            kept = local.memory.get("moments", ()) if isinstance(local.memory, dict) else ()
            each = one_start if self.starts is None else _each_start(one_start, in_dims=(0, 0, 0, None, 0, None))
            return self._reply(each(sent.theta, sent.common, sent.label, sent.lr, kept, local), local)

        def draw(n: int, key: Key, when: tuple[int, ...]) -> dict[str, Tensor]:
            drawn = self.draw(n, key, when)
            return {**drawn, "noise": torch.tensor(key.fold(_NOISE, *when).seed() % 2**31)} if task.draws else drawn

        return ClientStep(run, draw if self.rows or self.by.batch or task.draws else None, SECRECY, self.weights)

    def chosen(self, task: Task, theta: Params, common: Params, local: Local) -> tuple[Tensor, Tensor]:
        """Which of the models (k, …) a client takes, and its loss with it."""
        models = {**theta, **tree_map(lambda x: x.expand(self.k, *x.shape), common)}
        return nearest(task, models, self._rows(local, "choose"), personal_of(local.memory))

    def _check(self, task: Task) -> None:
        """Refuse what a description cannot do with a task."""
        if task.personal and (self.starts or 1) > 1:
            raise ValueError("batch_norm='local' is not possible with several restarts, which all clients share")
        if self.bound is not None and self.send == "model" and isinstance(self.by, Descend):
            raise ValueError("bound is the length of a change: send='change'")
        if isinstance(self.by, Gradient) and (task.personal or task.moving):
            raise ValueError("BatchNorm's statistics move in training only: average models in place of gradients")

    def _moments(self, task: Task, theta: Params, label: Any, kept: Any) -> Moments | None:
        """What the client's optimiser remembers, if it is of the same cluster; None to begin anew."""
        if not self.by.optimiser.keep or not kept:
            return None
        if not isinstance(label, Tensor):
            return kept["state"]
        new = self.by.optimiser.begin({n: p for n, p in theta.items() if n not in task.moving})
        return tree_map(lambda a, b: torch.where(label == kept["label"], a, b), kept["state"], new)

    def _memory(self, task: Task, updated: Updated, label: Any) -> dict[str, Any]:
        """What the client keeps until its next step."""
        memory: dict[str, Any] = {}
        if task.personal:
            memory["personal"] = {n: updated.theta[n] for n in task.personal}
        if self.by.optimiser.keep and updated.moments:
            memory["moments"] = {"state": updated.moments, "label": label}
        return memory

    def draw(self, n: int, key: Key, when: tuple[int, ...]) -> dict[str, Tensor]:
        """The random numbers of a client with n rows."""
        drawn = self.rows.draw(n, key, when) if self.rows else {}
        if self.by.batch is not None:
            size, among = (len(drawn["train"]), drawn["train"]) if self.rows else (n, None)
            generator = key.fold(_BATCHES, *when).generator()
            batches = minibatches(size, max(1, min(self.by.batch, size)), self.by.steps(size), generator)
            drawn["batches"] = batches if among is None else torch.where(batches < 0, -1, among[batches])
        return drawn

    def _rows(self, local: Local, purpose: str) -> Data:
        return pick(local.data, local.draws[purpose]) if self.rows else local.data

    def training_rows(self, local: Local) -> Data:
        """The rows that a client trains on."""
        return self._rows(local, "train")

    def _given(self, local: Local, lr: Any, moments: Moments | None) -> Given:
        """What a client trains with. Minibatches number the rows of the whole client."""
        noise = local.draws.get("noise") if isinstance(local.draws, dict) else None
        if self.by.batch is not None:
            return Given(local.data, lr, local.draws["batches"], noise, moments)
        return Given(self.training_rows(local), lr, None, noise, moments)

    def _held(self, task: Task, theta: Params, local: Local) -> Tensor | tuple[()]:
        return mean_loss(task, theta, pick(local.data, local.draws["held"])) if self.holdout else ()

    def _reply(self, found: _Outcome, local: Local) -> Reply:
        note = {"loss": found.loss}
        if isinstance(found.label, Tensor):
            note["label"] = found.label
        if isinstance(found.held, Tensor):
            count = (local.draws["held"] >= 0).sum()
            note |= {"held": found.held * count, "held_rows": count.expand(found.held.shape)}
        if isinstance(found.within, Tensor):
            note["within"] = found.within
        slot = found.label if isinstance(found.label, Tensor) else FIRST
        weight = weight_of(local.data, self.weights)
        if self.starts is not None:
            slot = self.k * torch.arange(self.starts, device=slot.device) + slot
            weight = weight.expand(self.starts)
        return Reply(found.update, weight, slot, note, self._kept(found.memory, local.memory))

    def _kept(self, memory: dict[str, Any], before: Any) -> Any:
        """What the client remembers from now on, together with what it knew before and has not used; () for nothing."""
        if "personal" in memory and self.starts is not None:  # there is one start, and only this step has its axis
            memory = {**memory, "personal": tree_map(lambda x: x[0], memory["personal"])}
        return {**before, **memory} if memory and isinstance(before, dict) else memory or ()


def weight_of(data: Data, weights: Weights) -> Tensor:
    """How heavily a client counts in a mean."""
    return data.mask.sum() if weights == "size" else torch.ones((), device=data.mask.device)


def _each_start(function: Callable[..., Any], in_dims: tuple[int | None, ...]) -> Callable[..., Any]:
    """`vmap` over starts. It slows a single large model down, so that is done without it; as are models it refuses."""

    def one(args: tuple[Any, ...], r: int) -> Any:
        return function(*(a if d is None else tree_map(lambda x: x[r], a) for a, d in zip(args, in_dims, strict=True)))

    def every(*args: Any) -> Any:
        batched = next(leaves(a)[0] for a, d in zip(args, in_dims, strict=True) if d is not None and leaves(a))
        if len(batched) > 1:
            with unless_refused():
                return vmap(function, in_dims=in_dims)(*args)
        found = [one(args, r) for r in range(len(batched))]
        return stack(found) if len(found) > 1 else tree_map(lambda x: x[None], found[0])  # without a copy

    return every
