"""Large linear layers without a weight matrix per client: exact, and faster, as no step reads and writes such a matrix.

In a step a linear layer is given rows A (n × a), and G (n × b) is the gradient at what it makes of them, so that at its
weight is GᵀA. After some steps of plain descent a client's weight is

    W = W⁰ - γ Σ GₛᵀAₛ = W⁰ + LᵀR,

where L and R have as many rows as the client has trained on so far. The layer's output is A W⁰ᵀ, one product for all
clients that were sent the same model, plus (A Rᵀ) L, two thin ones. Nobody forms W: the sum over clients is one product
of all their factors laid end to end (`Outer`). Of the 6.6 million parameters of LEAF's network for FEMNIST 6.4 million
are in one such layer, and a minibatch has ten rows.

All other layers are trained as ever, under vmap. Where the first layer is linear `coterie.engines.fused` does better.

Whether a matrix is the weight of such a layer is found out while it is used as one: if a model does anything else with
it, the exchange is done again without (`_Elsewhere`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from coterie.core.engine import Exchange
from coterie.core.local import NONE, Standing, descended, gradient_and_more, trained_and_moving, training_loss
from coterie.core.pytree import Outer, Params, joined, leaves, nbytes, stack, take, tree_leaves, tree_map
from coterie.core.step import Local, Reply, step_name
from coterie.core.sums import Sums, slot_sum
from coterie.core.task import Data, Task
from coterie.core.train import Descend, Given, Models, Train, Updated
from coterie.engines.chunks import Ways
from coterie.engines.errors import explained
from coterie.engines.local import Part
from coterie.engines.sent import Sent
from coterie.engines.vmap import Vmap, naming_clients

CACHED = 64 * 2**20  # bytes of work per chunk: more than by vmap alone, for what is in common is read once a chunk
PAYS = 3  # times as many numbers in the matrix as in its factors, from which on these are faster; found on a CPU
SHARED = 2  # clients that train one model, on average, from which on it pays that they have W⁰ in common


class LowRank:
    """`Train` steps that keep weights of large linear layers as what was sent and two thin factors.

    Args:
        engine: Whose clients are trained; it does all the rest.
    """

    def __init__(self, engine: Vmap) -> None:
        self.engine = engine
        self._said: set[tuple[str, tuple[str, ...]]] = set()

    def combine(self, exchange: Exchange) -> Sums | None:
        """The weighted updates added up by slot; None where there is no large layer, or none that can be done so."""
        ledger = exchange.ledger
        while work := self._match(exchange):
            charged = ledger.bytes_down, ledger.bytes_up
            try:
                sums = self._combined(work)
            except _Elsewhere as elsewhere:
                ledger.bytes_down, ledger.bytes_up = charged
                ledger.chunks[_verdict(elsewhere.name)] = 0  # a resumed run does not try again
                ledger.messages.append(f"vectorised: {step_name(exchange.step)}: {elsewhere}")
            else:
                self._say(exchange, work.layers)
                return sums
        return None

    def _match(self, exchange: Exchange) -> _Work | None:
        """What clients do, with large layers by factors."""
        engine, message, rows = self.engine, exchange.message, exchange.rows
        step = exchange.step(engine.work)
        if engine.device.type != "cpu" or engine.precision != "float32" or engine.uplink.transforms:
            return None
        if not isinstance(step, Train) or not isinstance(message, Models) or not _is_plain(step):
            return None
        if exchange.part != "train" or exchange.first or message.lr_each or engine.task.personal:
            return None
        if isinstance(rows, Tensor) and not isinstance(message.label, Tensor):
            return None  # then sums are not by model
        models = len(rows.unique()) if isinstance(rows, Tensor) else step.k if step.choose else 1
        if len(exchange.clients) < SHARED * models:
            return None
        sent = Sent.of(message, step, rows)
        layers = tuple(n for n in self._large(step.by, sent.models) if exchange.ledger.chunks.get(_verdict(n)) != 0)
        return _Work(engine, exchange, sent, layers) if layers else None

    def _say(self, exchange: Exchange, layers: tuple[str, ...]) -> None:
        """The log says once which layers of a step are done so."""
        if (said := (step_name(exchange.step), layers)) not in self._said:
            self._said.add(said)
            exchange.ledger.messages.append(f"vectorised: {said[0]}: {', '.join(layers)} by factors")

    def _combined(self, work: _Work) -> Sums:
        sums = self.engine.added(work.exchange, self._parts(work))
        # What clients were sent is the same for many: it is added at the end, once for each model and slot.
        for s, slot in work.counted.nonzero().tolist():
            for n in work.layers:
                sums.update[n][slot].add_(work.sent.models[n][s], alpha=float(work.counted[s, slot]))
        return sums

    def _parts(self, work: _Work) -> Iterator[Part]:
        exchange, chunks = work.exchange, self.engine.chunks
        name = f"{step_name(exchange.step)} by factors (message of {exchange.bytes_down() / 2**20:.2f} MiB)"
        ways = Ways(name, naming_clients(work.together, work.alone), work.alone, CACHED)
        found = ((at, *train(at)) for at, train in chunks.of(exchange, self.engine.sizes(exchange), ways))
        for at, model, reply in _gathered(found, exchange.bytes_down()):
            slot, weight = (x.reshape(model.shape) for x in (reply.slot, reply.weight))
            work.counted.index_put_((model, slot), weight, accumulate=True)
            yield Part(at, slot_sum(reply, exchange.slots), nbytes(reply))

    def _large(self, by: Any, models: Params) -> list[str]:
        """Names of the matrices that have many more numbers than their factors would have for the largest client."""
        n = int(self.engine.store.part("train").sizes.max())
        rank = by.steps(n) * (n if by.batch is None else min(by.batch, n))
        matrices = {name: p.shape[1:] for name, p in models.items() if p.dim() == 3}
        large = [name for name, (b, a) in matrices.items() if PAYS * rank * (a + b) <= a * b]
        return [name for name in large if name not in self.engine.work.moving]


def _is_plain(step: Train) -> bool:
    """Whether clients send the model that plain descent, and nothing else, has made of the one they took."""
    by = step.by
    return isinstance(by, Descend) and by.plain and not by.prox and step.send == "model"


def _verdict(name: str) -> str:
    """Under which name it is kept that a matrix cannot be done by factors."""
    return f"{name} by factors"


Found = tuple[Tensor, Tensor, Reply]  # clients' positions, the models that they took (c, r), and their replies


def _gathered(chunks: Iterator[Found], size: int) -> Iterator[Found]:
    """What was found of so many chunks at once that it takes so many bytes, of one form.

    A sum over clients writes all of a matrix, however few they are.
    """
    kept: list[Found] = []
    held = 0
    for found in chunks:
        if kept and [x.shape[1:] for x in leaves(found)] != [x.shape[1:] for x in leaves(kept[0])]:
            yield joined(kept)
            kept, held = [], 0
        kept.append(found)
        held += sum(x.nbytes for x in leaves(found))
        if held >= size:
            yield joined(kept)
            kept, held = [], 0
    if kept:
        yield joined(kept)


class _Work:
    """What clients do in one exchange. c is the clients of a chunk, r the starts, s the models that were sent.

    Attributes:
        layers: The names of the weights that are kept by factors.
        counted: How heavily clients that trained a model count in each sum (s, slots).
    """

    def __init__(self, engine: Vmap, exchange: Exchange, sent: Sent, layers: tuple[str, ...]) -> None:
        self.engine, self.exchange, self.sent, self.layers = engine, exchange, sent, layers
        self.step, self.stages = sent.step, engine.stages(exchange)
        by = _ByFactors(**vars(sent.step.by), layers=layers)
        self.train = replace(sent.step, by=by, choose=False, starts=None).derive(engine.work).run
        self.counted = torch.zeros(len(sent.models[layers[0]]), exchange.slots)

    def together(self, at: Tensor) -> tuple[Tensor, Reply]:
        """The models that some clients took (c, r), and their stacked replies; those with one model train together."""
        with self.engine.arithmetic():
            [local] = self.engine.local(self.stages, self.exchange, at)
            model, loss = vmap(self._chosen)(local) if self.step.choose else (self.sent.given(at), None)
            took, starts = model.flatten(), model.shape[1]
            groups = [(took == s).nonzero().flatten() for s in took.unique()]
            alike = len(groups) == starts == 1  # then nothing need be copied
            replies = [
                vmap(partial(self.train, self._message(int(took[own[0]]))))(
                    local if alike else take(local, own // starts)
                )
                for own in groups
            ]
            reply = replies[0] if alike else take(joined(replies), torch.cat(groups).argsort())
        return model, self._as_asked(tree_map(lambda x: x.unflatten(0, model.shape), reply), model, loss)

    def alone(self, at: Tensor) -> tuple[Tensor, Reply]:
        """The same for one client, without vmap."""
        with explained(self.engine, self.exchange, int(self.exchange.clients[at[0]])), self.engine.arithmetic():
            [stacked] = self.engine.local(self.stages, self.exchange, at)
            local = tree_map(lambda x: x[0], stacked)
            chosen = self._chosen(local) if self.step.choose else None
            model, loss = (self.sent.given(at), None) if chosen is None else tree_map(lambda x: x[None], chosen)
            reply = stack([self.train(self._message(s), local) for s in model[0].tolist()])
        return model, self._as_asked(tree_map(lambda x: x[None], reply), model, loss)

    def _chosen(self, local: Local) -> tuple[Tensor, Tensor]:
        """The models that a client takes, one for each start (r,), and its losses with them."""
        k, chosen = self.step.k, []
        for first in range(0, len(self.counted), k):
            models = {n: x[first : first + k] for n, x in self.sent.models.items()}
            label, loss = self.step.chosen(self.engine.work, models, NONE, local)
            chosen.append((first + label, loss))
        return stack(chosen)

    def _message(self, s: int) -> Models:
        """One of the models, for those who train it."""
        label = () if self.sent.label is None else self.sent.label[s]
        return Models({n: x[s] for n, x in self.sent.models.items()}, self.sent.lr, label)

    def _as_asked(self, reply: Reply, model: Tensor, loss: Tensor | None) -> Reply:
        """The replies of clients and starts (c, r, …), as the step sends them."""
        note = reply.note if loss is None else {**reply.note, "loss": loss}  # that by which they chose
        reply = reply._replace(slot=self.sent.slots(model), note=note)
        return reply if self.step.starts is not None else tree_map(lambda x: x[:, 0], reply)


@dataclass(frozen=True, kw_only=True)
class _ByFactors(Descend):
    """Descent whose result has an `Outer` in the place of some weights: how far each of them has moved.

    Args:
        layers: The names of the weights.
    """

    layers: tuple[str, ...]

    def __call__(self, task: Task, theta: Params, given: Given) -> Updated:
        """The trained model, and the loss of the first one on the rows of the first step."""
        trained, buffers = trained_and_moving(task, theta)
        whole = {n: trained.pop(n) for n in self.layers}
        step, now = _FactorStep(whole, self.epochs is not None), Standing(trained, buffers, {})
        now, first = descended(step, task, now, NONE, given.data, given.lr, self.tau, given.batches, given.noise)
        return Updated({**theta, **now.trained, **now.buffers, **now.moments}, first, NONE)


@dataclass(frozen=True)
class _FactorStep:
    """A plain step of a model, with factors of some weights in the place of an optimiser's moments.

    Args:
        whole: What these weights were at first.
        ragged: Whether there may be steps without rows, which change nothing.
    """

    whole: Params
    ragged: bool

    def __call__(
        self, task: Task, now: Standing, begin: Params, rows: Data, noise: Tensor | None, lr: Tensor
    ) -> tuple[Standing, Tensor]:
        """What has become of a model, and its loss on these rows before the step."""
        # The gradient at a layer's output is that at zeros which are added to it.
        zeros = {n: w.new_zeros(len(rows.mask), len(w)) for n, w in self.whole.items()}

        def loss(params: Params) -> tuple[Tensor, tuple[Params, Params]]:
            added = {n: params[n] for n in self.whole}
            with _Layers(self.whole, added, now.moments) as layers:
                value, moved = training_loss(task, {**params, **now.buffers, **self.whole}, rows, noise)
            return value, (moved, layers.inputs())

        gradient, value, (moved, seen) = gradient_and_more(loss, {**now.trained, **zeros})
        trained = {n: p - lr * gradient[n] for n, p in now.trained.items()}
        more = {n: Outer(-lr * gradient[n], seen[n]) for n in self.whole}
        buffers = {**now.buffers, **moved}
        if self.ragged:
            some = rows.mask.any()
            trained, buffers = tree_map(
                lambda a, b: torch.where(some, a, b), (trained, buffers), (now.trained, now.buffers)
            )
            more = tree_map(lambda x: torch.where(some, x, 0.0), more)
        factors = {n: _longer(now.moments.get(n), own) for n, own in more.items()}
        return Standing(trained, buffers, factors), value


def _longer(factors: Outer | None, more: Outer) -> Outer:
    """Factors with more rows."""
    return more if factors is None else Outer(*map(torch.cat, zip(factors, more, strict=True)))


class _Elsewhere(Exception):
    """A model uses a matrix otherwise than as the weight of one linear layer that sees each row of a step once.

    It is none of the errors that are taken for a model's own.
    """

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} not by factors: it is not the weight of one layer that sees each row once")
        self.name = name


_ABOUT = (Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__, Tensor.size, Tensor.dim)  # pyright: ignore[reportAttributeAccessIssue]


class _Layers(TorchFunctionMode):
    """In here, linear layers with these weights add to their outputs: by what their weights have moved, and zeros.

    Args:
        whole: What the weights were.
        zeros: What else is added to the outputs.
        factors: How far the weights have moved; of one that has not moved, nothing.
    """

    def __init__(self, whole: Params, zeros: Params, factors: dict[str, Outer]) -> None:
        super().__init__()
        self.whole, self.zeros, self.factors = whole, zeros, factors
        self._seen: Params = {}

    def inputs(self) -> Params:
        """The rows that each layer was given."""
        for n in self.whole:
            if n not in self._seen:
                raise _Elsewhere(n)
        return self._seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        used = [n for n, w in self.whole.items() if any(x is w for x in tree_leaves((args, kwargs)))]
        if not used or func in _ABOUT:
            return func(*args, **kwargs)
        if func is not functional.linear:
            raise _Elsewhere(used[0])
        return self._linear(used[0], *args, **kwargs)

    def _linear(self, name: str, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight is not self.whole[name] or name in self._seen:
            raise _Elsewhere(name)
        out = functional.linear(input, weight, bias)
        if out.shape != self.zeros[name].shape:
            raise _Elsewhere(name)
        self._seen[name], moved = input, self.factors.get(name)
        out = out + self.zeros[name]
        return out if moved is None else out + (input @ moved.right.T) @ moved.left
