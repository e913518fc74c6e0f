"""Local training without a weight matrix per client: exact, and many times faster than one step at a time.

A client has X (n × d), and its model starts with z = XWᵀ + b. The gradient with respect to W is GᵀX, where G (n × h)
is the gradient at z. So after any number of full-batch steps W = W⁰ + BᵀX and b = b⁰ + Bᵀ1, where B (n × h) has
collected the G's, and

    z = z⁰ + (X Xᵀ + 1) B.

z⁰ was computed when the client chose its cluster, the Gram matrix X Xᵀ (n × n) once per run, and the sum of many
clients' new W is one product Σ BᵢᵀXᵢ. For n < d no client ever has a W of its own: the *dual* form. For n ≥ d it is
cheaper to keep W, batched over clients: the *primal* form. Where nothing comes after z and the loss is squared, all τ
steps are one linear map of the residuals, made once for a step size: the *closed* form. A step on a minibatch changes
its rows of B alone, and is taken in the dual form, on a CPU, where that pays.

A `Train` step is recognised by its description, never a method. Throughout, c is the clients of a chunk, r the starts
that run side by side, s the models that were sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vmap

from coterie.core.engine import Exchange
from coterie.core.first_layer import FirstLinear
from coterie.core.key import Key
from coterie.core.pytree import Params, nbytes, stack, take, tree_map
from coterie.core.step import Reply, step_name
from coterie.core.task import Data
from coterie.core.train import Descend, Gradient, Models, Train
from coterie.engines.chunks import Chunks, Ways
from coterie.engines.descent import (
    Moved,
    Work,
    descend,
    descend_in_batches,
    leap,
    leap_pays,
    reach_of,
    reach_side,
    shortened,
    traced_gradients,
)
from coterie.engines.graphs import Replayed
from coterie.engines.kernels import descend_by_turns, descend_on_chip, fits, turns
from coterie.engines.local import LocalEngine, Part
from coterie.engines.products import Factor
from coterie.engines.refusal import is_refusal
from coterie.engines.sent import Sent
from coterie.engines.store import Kept
from coterie.engines.trained import Trained, members

CACHED = 48 * 2**20  # bytes of work per chunk on a CPU, where a chunk should stay in the cache
FEW = 64  # up to so many models, clients with the same one share a product
LARGE = 2**23  # numbers in z from which on a GPU is busy for longer than it takes to tell it what to do
NOT_LINEAR = "the model's first layer is not a linear map of the rows, or the model has dropout, BatchNorm or crops"


class Fused:
    """`Train` steps in fused form.

    Args:
        engine: Whose clients are trained.
        chunks: Cuts them into chunks.
    """

    def __init__(self, engine: LocalEngine, chunks: Chunks) -> None:
        self.engine, self.chunks, self.device = engine, chunks, engine.device
        self._said: set[tuple[str, str | None]] = set()  # of steps, and why they are not fused
        self._replayed = Replayed(descend) if self.device.type == "cuda" else descend

    def match(self, exchange: Exchange) -> Match | None:
        """How this exchange can be fused; None if it cannot."""
        step, message = exchange.step(self.engine.work), exchange.message
        if not isinstance(step, Train) or not isinstance(message, Models):
            return None
        if exchange.part != "train" or exchange.first or message.lr_each:
            return None
        self._say(exchange, step, why := self._why_not(step, message))
        return Match(self._first, Sent.of(message, step, exchange.rows)) if self._first and not why else None

    def parts(self, exchange: Exchange, match: Match) -> Iterator[Part]:
        """The sums of chunks of clients, without a model of each."""
        split, sent = match
        sizes, in_order = self.engine.sizes(exchange), sent.in_order(exchange.slots)
        ways = Ways(f"fused {step_name(exchange.step)}", lambda at: self._train(match, exchange, at), None, CACHED)
        for at, train in self.chunks.of(exchange, sizes, ways):
            trained = train(at)
            weight = self._weight(sent.step, sizes[at], trained.label)
            note = sent.note(trained)
            each = nbytes(sent.models) // len(sent.models[split.weight]) + 12  # 12: a weight and a slot
            with self.engine.arithmetic():
                moved = trained.rows_sum(weight, sent.models[split.weight])
            sums = trained.sums(split, sent.models, weight, moved)
            sums = sums if in_order else sent.by_slot(sums, trained.label, exchange.slots)
            yield Part(at, sums._replace(note=note), weight.numel() * each + nbytes(note))

    def replies(self, exchange: Exchange, match: Match) -> Iterator[tuple[Tensor, Reply]]:
        """The trained models of chunks of clients."""
        split, sent = match
        sizes = self.engine.sizes(exchange)

        def train(at: Tensor) -> tuple[Trained, Params]:
            trained = self._train(match, exchange, at)
            return trained, trained.models(split, sent.models)

        for at, work in self.chunks.of(exchange, sizes, Ways(f"fused {step_name(exchange.step)}", train, None, CACHED)):
            trained, models = work(at)
            weight = self._weight(sent.step, sizes[at], trained.label)
            slot = sent.slots(trained.label)
            if sent.step.starts is None:
                models, weight, slot = tree_map(lambda x: x[:, 0], (models, weight, slot))
            yield at, Reply(models, weight, slot, sent.note(trained))

    def _train(self, match: Match, exchange: Exchange, at: Tensor) -> Trained:
        """Choose and train for the clients at these positions."""
        split, sent = match
        engine, clients = self.engine, exchange.clients[at]
        data = engine.store.rows(exchange.part, clients)
        held = self._held(sent.step, exchange, clients, data)
        mask = data.mask if held is None else data.mask * (1 - held)
        data = data._replace(x=data.x.flatten(2), mask=mask)
        with engine.arithmetic():
            factor = self._factor(data.x, exchange, clients)
            loss = None
            if sent.rows is None:
                z, label, loss = choose(split, sent, data, factor)
            else:
                label = sent.given(at).to(self.device)
                z = first_product(split, sent.models, data.x, label, factor)
        rest = take({n: p for n, p in sent.models.items() if n not in (split.weight, split.bias)}, label)
        notes = {} if held is None else _held_loss(split, rest, z, data.y, held)
        kernel = self._kernel(split, data.x, exchange, clients)
        work = Work(data.x, data.y, row_shares(data), z.float(), kernel, rest, sent.lr)
        with engine.arithmetic(), torch.autocast(self.device.type, enabled=False):  # many small steps: no bfloat16 here
            if sent.step.by.batch is None:
                moved = self._move(split, sent.step, work, exchange, clients)
            else:
                moved = self._move_in_batches(split, sent.step, work, loss, exchange, at)
        if sent.step.send == "change":
            moved = moved._replace(rest=tree_map(torch.sub, moved.rest, rest))
        if sent.step.bound is not None:
            moved, notes["within"] = shortened(split, moved, kernel, sent.step.bound)
        return Trained(
            data.x, factor, moved, label, notes, sent.step.send == "model" and isinstance(sent.step.by, Descend)
        )

    def _held(self, step: Train, exchange: Exchange, clients: Tensor, data: Data) -> Tensor | None:
        """1 for the rows that clients keep out of training (c, n); None where they keep out none."""
        if step.rows is None or not step.holdout:
            return None
        rows, engine = step.rows, self.engine

        def make() -> Tensor:
            held = torch.zeros(data.mask.shape)
            sizes = engine.federation.part(exchange.part).sizes[clients].tolist()
            for own, i, n in zip(held, clients.tolist(), sizes, strict=True):
                own[rows.draw(n, engine.client_key(i), exchange.when)["held"]] = 1.0
            return held.to(self.device)

        kept = self._kept(("held-out rows", step.holdout), exchange, clients, data.mask.nbytes, make)
        return make() if kept is None else kept

    def _factor(self, x: Tensor, exchange: Exchange, clients: Tensor) -> Factor:
        """The rows of all clients as one long list, ready to be multiplied."""
        rows = x.flatten(0, 1)
        if self.device.type != "cuda" or self.engine.precision != "float32":
            return Factor.of(rows, split=False)
        kept = self._kept(("rows in halves",), exchange, clients, 2 * rows.nbytes, lambda: Factor.of(rows))
        return kept or Factor.of(rows)

    def _kernel(self, split: FirstLinear, x: Tensor, exchange: Exchange, clients: Tensor) -> Tensor | None:
        """XXᵀ, plus 1 for b, where the dual form is the cheaper one."""
        (c, n, d), one = x.shape, float(split.bias is not None)
        if n >= d:
            return None
        kept = self._kept(("Gram matrices",), exchange, clients, 4 * c * n * n, lambda: x @ x.transpose(1, 2) + one)
        return x @ x.transpose(1, 2) + one if kept is None else kept

    def _move(self, split: FirstLinear, step: Train, work: Work, exchange: Exchange, clients: Tensor) -> Moved:
        """Train: on a GPU in kernels where there are some, in closed form where that pays, else step by step."""
        by = step.by
        if isinstance(by, Descend):
            if split.head and self.device.type == "cuda":
                if fits(split.head, work):
                    return descend_on_chip(split.head, by, work)
                if turns(split.head, work):
                    return descend_by_turns(split.head, by, work)
            if split.squared and by.steady and leap_pays(by, work):
                name, side = ("closed forms", float(work.lr), by.tau, by.prox, step.holdout), reach_side(work)
                reach = self._kept(
                    name, exchange, clients, 4 * len(work.x) * side**2, lambda: reach_of(split, by, work)
                )
                if reach is not None:
                    return leap(work, reach)
        return (self._replayed if work.z.numel() < LARGE else descend)(split, by, work)

    def _move_in_batches(
        self, split: FirstLinear, step: Train, work: Work, loss: Tensor | None, exchange: Exchange, at: Tensor
    ) -> Moved:
        """Train on minibatches. The loss is that with which a model was chosen, on all rows; else as the step says."""
        assert isinstance(step.by, Descend)
        if loss is None and step.full_loss:
            loss = (each_loss(split, work.rest, work.z, work.y) * work.shares[:, None]).sum(2)
        drawn = self.engine.draws(self.engine.stages(exchange)[-1], exchange, at)
        moved = descend_in_batches(split, step.by, work, drawn["batches"])
        return moved if loss is None else moved._replace(loss=loss)

    def _kept(
        self, name: tuple[Any, ...], exchange: Exchange, clients: Tensor, size: int, make: Callable[[], Kept]
    ) -> Kept | None:
        """What is made once for a chunk, if it will be needed again: as long as everybody takes part."""
        if not exchange.everybody:
            return None
        return self.engine.store.kept(name, clients, size, make, exchange.ledger.messages)

    def _weight(self, step: Train, sizes: Tensor, like: Tensor) -> Tensor:
        """How heavily each client and start counts (c, r)."""
        if step.weights == "size":
            return sizes.to(self.device, torch.float32)[:, None].expand(like.shape)
        return torch.ones(like.shape, device=self.device)

    @cached_property
    def _refused(self) -> bool:
        """Whether vmap cannot batch what comes after the first layer, tried on two clients of two rows."""
        if (split := self._first) is None:
            return False
        part, theta = self.engine.store.part("train"), self.engine.work.init(Key.of(0))
        x, y = part.x[:2].cpu().flatten(1), part.y[:2].cpu()
        z = nn.functional.linear(x, theta[split.weight], theta[split.bias] if split.bias else None)
        rest = {n: p for n, p in theta.items() if n not in (split.weight, split.bias)}
        rest, z, y, shares = stack([(rest, z, y, torch.ones(len(x)))] * 2)
        try:
            with self.engine.arithmetic():
                traced_gradients(split)(rest, z, y, shares)
        except RuntimeError as error:
            return is_refusal(error)
        return False

    @cached_property
    def _first(self) -> FirstLinear | None:
        """The model taken apart; None if it cannot be."""
        return self.engine.work.first_layer(self.engine.store.part("train").x[:2].cpu())

    def _why_not(self, step: Train, message: Models) -> str | None:
        """Why a step cannot be fused."""
        if self.engine.uplink.transforms:
            return "the uplink changes every reply"
        if step.rows and step.rows.fresh:
            return "clients train on other rows from round to round"
        if not step.by.plain:
            return "steps are more than the gradient: there is an optimiser or a limit to the gradient's length"
        if step.by.batch is not None and isinstance(step.by, Gradient):
            return "clients send the gradient on one minibatch"
        if step.by.batch is not None and self.device.type != "cpu":
            return "minibatches are fused on a CPU only"
        if self._first is None:
            return NOT_LINEAR
        if self._refused:
            return "vmap cannot batch what comes after the first layer"
        if isinstance(step.by, Descend) and step.by.batch is not None:
            n, d = self._shape()
            h = {**message.theta, **message.common}[self._first.weight].shape[-2]
            if not batches_pay(step.by, n, d, h):
                return f"clients have up to {n} rows of {d} numbers, and minibatches of {step.by.batch}"
        return None

    def _shape(self) -> tuple[int, int]:
        """The rows of the largest client, and the numbers of a row."""
        rows = self.engine.store.part("train")
        return int(rows.sizes.max()), rows.x[0].numel()

    def _say(self, exchange: Exchange, step: Train, why: str | None) -> None:
        """The log says once whether steps are fused, or why not."""
        name = step_name(exchange.step)
        if (name, why) in self._said:
            return
        self._said.add((name, why))
        n, d = self._shape()
        form = f"dual form for clients of fewer than {d} rows, primal for others" if n >= d else "dual form"
        leaps = self._first is not None and self._first.squared and step.by.batch is None
        closed = ", or closed form where that pays" if leaps else ""
        said = f"not fused: {why}" if why else f"fused ({form}{closed})"
        exchange.ledger.messages.append(f"vectorised: {name}: {said}")


def batches_pay(by: Descend, n: int, d: int, h: int) -> bool:
    """Whether the dual form is faster for minibatches than weights of each client, which every step reads and writes.

    z⁰ and the sum are of all rows, however few a client trains on, and so is the Gram matrix, which is not kept
    everywhere; a step on weights takes the longer for each operation the fewer rows it has. The 30 was found with 10
    and 50 rows on a CPU.

    Args:
        by: How clients train.
        n: Rows of the largest client.
        d: Numbers of a row.
        h: Outputs of the first layer.
    """
    if n >= d or by.batch is None:
        return False
    batch = min(by.batch, n)
    rows = by.steps(n) * batch
    dual = 4 * n * d * h + 2 * rows * n * h + 2 * n * n * d
    return dual <= (1 + 30 / batch) * 4 * rows * d * h


class Match(NamedTuple):
    """A step that can be fused."""

    split: FirstLinear
    sent: Sent


def choose(split: FirstLinear, sent: Sent, data: Data, rows: Factor) -> tuple[Tensor, Tensor, Tensor]:
    """z⁰ of the model that each start likes best (c, r, n, h), which it is and its mean loss (c, r).

    The models are the same for all clients, so their rows can be treated as one long list.
    """
    weight, k = sent.models[split.weight], sent.step.k
    (s, h, d), (c, n) = weight.shape, data.x.shape[:2]
    bias = sent.models[split.bias].flatten() if split.bias else None
    z = rows.times(weight.reshape(s * h, d).T, bias).unflatten(1, (s, h))
    rest = {name: p for name, p in sent.models.items() if name not in (split.weight, split.bias)}
    each = _losses(split, rest, z, data.y.flatten(0, 1)).unflatten(1, (c, n))
    mean = (each * row_shares(data)).sum(-1)  # (s, c)
    best = mean.nan_to_num(nan=torch.inf, posinf=torch.inf).unflatten(0, (s // k, k)).argmin(1).T
    label = best + k * torch.arange(s // k, device=z.device)
    client = torch.arange(c, device=z.device)[:, None]
    return z.unflatten(0, (c, n))[client, :, label], label, mean.T[client, label]


def _losses(split: FirstLinear, rest: Params, z: Tensor, y: Tensor) -> Tensor:
    """The losses of all rows (s, c·n) by every model, whose z are side by side (c·n, s, h)."""
    if z.is_cuda and z.numel() >= LARGE:  # vmap would put the models' z one after the other first, which takes long
        return torch.stack([split.loss(take(rest, i), z[:, i], y) for i in range(z.shape[1])])
    return vmap(split.loss, in_dims=(0, 1, None))(rest, z, y)


def first_product(split: FirstLinear, models: Params, x: Tensor, label: Tensor, rows: Factor) -> Tensor:
    """z⁰ of the model that each client and start was sent (c, r, n, h)."""
    weight = models[split.weight]
    if len(weight) > FEW:  # a model each: one small product per client
        z = x[:, None] @ take(weight, label).transpose(-1, -2)
    elif len(weight) == 1:
        z = rows.times(weight[0].T).unflatten(0, x.shape[:2])[:, None].repeat(1, label.shape[1], 1, 1)
    else:
        z = x.new_empty(*label.shape, x.shape[1], weight.shape[1])
        for s, at, r in members(label):
            z[at, r] = (x[at] @ weight[s].T).to(z.dtype)
    return z if split.bias is None else z.add_(take(models[split.bias], label)[:, :, None])


def _held_loss(split: FirstLinear, rest: Params, z: Tensor, y: Tensor, held: Tensor) -> dict[str, Tensor]:
    """The loss of the model that each client and start took, summed over held-out rows, and their number (c, r)."""
    rows = held.sum(1).long()[:, None].expand(z.shape[:2])
    return {"held": (each_loss(split, rest, z, y) * held[:, None]).sum(2), "held_rows": rows}


def each_loss(split: FirstLinear, rest: Params, z: Tensor, y: Tensor) -> Tensor:
    """The loss of every row by the model that each client and start took (c, r, n)."""
    c, r = z.shape[:2]
    flat = tree_map(lambda p: p.flatten(0, 1), rest)
    return vmap(split.loss)(flat, z.flatten(0, 1).float(), y.repeat_interleave(r, 0)).unflatten(0, (c, r))


def row_shares(data: Data) -> Tensor:
    """Each row's part in the mean of its client (c, n)."""
    return data.mask / data.mask.sum(1, keepdim=True).clamp(min=1)
