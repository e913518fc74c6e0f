"""Large linear layers without a weight matrix per client: exact, and faster, as no step reads and writes such a matrix.

In a step a linear layer is given rows A (n × a), and G (n × b) is the gradient at what it makes of them, so that at its
weight is GᵀA. After some steps of plain descent a client's weight is

    W = W⁰ - γ Σ GₛᵀAₛ = W⁰ + LᵀR,

where L and R have as many rows as the client has trained on so far. The layer's output is A W⁰ᵀ, one product for all
clients that were sent the same model, plus (A Rᵀ) L, two thin ones. Nobody forms W: the sum over clients is one product
of all their factors laid end to end (`Outer`). Of the 6.6 million parameters of LEAF's network for FEMNIST 6.4 million
are in one such layer, and a minibatch has ten rows.

All other layers are trained as ever, under vmap. Where the first layer is linear `coterie.engines.fused` does better.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from coterie.core.engine import Exchange
from coterie.core.local import NONE, apart, gradient_and_more, one_gradient, pick, training_loss
from coterie.core.pytree import Outer, Params, leaves, nbytes, stack, take, tree_map
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
        self._tried: dict[str, bool] = {}
        self._said: set[str] = set()

    def match(self, exchange: Exchange) -> _Work | None:
        """What clients do, with large layers by factors; None if there are none, or the step does not allow for it."""
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
        if not (layers := tuple(n for n in self._large(step.by, sent.models) if self._is_linear(n, sent.models))):
            return None
        if (name := step_name(exchange.step)) not in self._said:
            self._said.add(name)
            exchange.ledger.messages.append(f"vectorised: {name}: {', '.join(layers)} by factors")
        return _Work(engine, exchange, sent, layers)

    def combine(self, work: _Work) -> Sums:
        """Run the step on every client and add the weighted updates up by slot."""
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
        for at, model, reply in _gathered(
            chunks.of(exchange, self.engine.sizes(exchange), ways), exchange.bytes_down()
        ):
            slot, weight = (x.reshape(model.shape) for x in (reply.slot, reply.weight))
            work.counted.index_put_((model, slot), weight, accumulate=True)
            yield Part(at, slot_sum(reply, exchange.slots), nbytes(reply))

    def _large(self, by: Any, models: Params) -> list[str]:
        """Names of the matrices that have many more numbers than their factors would have."""
        n = int(self.engine.store.part("train").sizes.max())
        rank = by.steps(n) * (n if by.batch is None else min(by.batch, n))
        matrices = {name: p.shape[1:] for name, p in models.items() if p.dim() == 3}
        return [name for name, (b, a) in matrices.items() if PAYS * rank * (a + b) <= a * b]

    def _is_linear(self, name: str, models: Params) -> bool:
        """Whether this is the weight of a linear layer that sees one row for each of a client's."""
        if name not in self._tried:
            rows = self.engine.store.part("train")
            data = Data(rows.x[:2].cpu(), rows.y[:2].cpu(), torch.ones(len(rows.x[:2])))
            self._tried[name] = is_linear(self.engine.work, take(models, 0), data, name)
        return self._tried[name]


def _is_plain(step: Train) -> bool:
    """Whether clients send the model that plain descent, and nothing else, has made of the one they took."""
    by = step.by
    return isinstance(by, Descend) and by.plain and not by.prox and step.send == "model"


def _gathered(chunks: Iterator[tuple[Tensor, Any]], size: int) -> Iterator[tuple[Tensor, Tensor, Reply]]:
    """Clients' positions, models and replies, of so many chunks at once that their factors take so many bytes.

    A sum over clients writes all of a matrix, however few they are.
    """
    kept: list[tuple[Tensor, Tensor, Reply]] = []
    for at, train in chunks:
        kept.append((at, *train(at)))
        if sum(x.nbytes for x in leaves(kept)) >= size:
            yield _joined(kept)
            kept = []
    if kept:
        yield _joined(kept)


def _joined(trees: list[Any]) -> Any:
    """Trees of stacked tensors, end to end."""
    return tree_map(lambda *xs: torch.cat(xs), *trees)


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
        self.message = lru_cache(self._message)

    def together(self, at: Tensor) -> tuple[Tensor, Reply]:
        """The models that some clients took (c, r), and their stacked replies; those with one model train together."""
        with self.engine.arithmetic():
            [local] = self.engine.local(self.stages, self.exchange, at)
            model, loss = vmap(self._chosen)(local) if self.step.choose else (self._given(at), None)
            took, starts = model.flatten(), model.shape[1]
            groups = [(took == s).nonzero().flatten() for s in took.unique()]
            alike = len(groups) == starts == 1  # then nothing need be copied
            replies = [
                vmap(partial(self.train, self.message(int(took[own[0]]))))(
                    local if alike else take(local, own // starts)
                )
                for own in groups
            ]
            reply = replies[0] if alike else take(_joined(replies), torch.cat(groups).argsort())
        return model, self._as_asked(tree_map(lambda x: x.unflatten(0, model.shape), reply), model, loss)

    def alone(self, at: Tensor) -> tuple[Tensor, Reply]:
        """The same for one client, without vmap."""
        with explained(self.engine, self.exchange, int(self.exchange.clients[at[0]])), self.engine.arithmetic():
            [stacked] = self.engine.local(self.stages, self.exchange, at)
            local = tree_map(lambda x: x[0], stacked)
            chosen = self._chosen(local) if self.step.choose else None
            model, loss = (self._given(at), None) if chosen is None else tree_map(lambda x: x[None], chosen)
            reply = stack([self.train(self.message(s), local) for s in model[0].tolist()])
        return model, self._as_asked(tree_map(lambda x: x[None], reply), model, loss)

    def _given(self, at: Tensor) -> Tensor:
        """The models that some clients were sent (c, r), where they do not choose."""
        rows = self.sent.rows
        assert rows is not None  # they are there unless clients choose
        return rows[at] if len(rows) > 1 else rows.expand(len(at), -1)

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
        return Models(take(self.sent.models, s), self.sent.lr, label)

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
        trained, buffers = apart(task, theta)
        whole = {n: trained.pop(n) for n in self.layers}
        factors, first, data = NO_FACTORS, torch.zeros(()), given.data
        for q in range(self.tau if given.batches is None else len(given.batches)):
            rows = data if given.batches is None else pick(data, given.batches[q])
            seed = None if given.noise is None else given.noise + q
            found = gradient_by_factors(task, trained, buffers, whole, factors, rows, seed)
            after = {n: p - given.lr * found.gradient[n] for n, p in trained.items()}, {**buffers, **found.moved}
            if self.epochs is not None:  # where clients are stacked, those with fewer steps have some without rows
                some = rows.mask.any()
                after = tree_map(lambda a, b, some=some: torch.where(some, a, b), after, (trained, buffers))
            trained, buffers = after
            factors = {n: _longer(factors.get(n), -given.lr * found.gradient[n], found.seen[n]) for n in whole}
            first = found.loss if q == 0 else first
        result: dict[str, Any] = {**theta, **trained, **buffers, **factors}
        return Updated(result, first, NONE)


NO_FACTORS: dict[str, Outer] = {}


def _longer(factors: Outer | None, left: Tensor, right: Tensor) -> Outer:
    """Factors with more rows, which are those of a step."""
    return Outer(left, right) if factors is None else Outer(*map(torch.cat, zip(factors, (left, right), strict=True)))


class _Found(NamedTuple):
    """What a step finds.

    Attributes:
        gradient: At the trained parameters, and at the outputs of the layers whose weights are kept by factors.
        loss: On the rows of the step.
        moved: What has become of the buffers.
        seen: The rows that these layers saw.
    """

    gradient: Params
    loss: Tensor
    moved: Params
    seen: Params


def gradient_by_factors(
    task: Task,
    trained: Params,
    buffers: Params,
    whole: Params,
    factors: dict[str, Outer],
    rows: Data,
    seed: Tensor | None,
) -> _Found:
    """The gradient of the mean loss in training of a model some of whose weights are W⁰ + LᵀR.

    Args:
        task: Gives the loss.
        trained: All parameters but these weights.
        buffers: What moves without being trained.
        whole: W⁰ of these weights.
        factors: How far they have moved from there; of a weight that has not moved, nothing.
        rows: To train on.
        seed: Of dropout; None trains as it scores.
    """
    none_yet = {n: w.new_zeros(len(rows.mask), len(w)) for n, w in whole.items()}  # added to layers' outputs

    def loss(params: Params) -> tuple[Tensor, tuple[Params, Params]]:
        with _Layers(whole, params, factors) as layers:
            value, moved = training_loss(task, {**params, **buffers, **whole}, rows, seed)
        return value, (moved, layers.seen)

    gradient, value, (moved, seen) = gradient_and_more(loss, {**trained, **none_yet})
    return _Found(gradient, value, moved, seen)


class _Layers(TorchFunctionMode):
    """In here, linear layers with these weights add to their output what they have moved by, and what is added there.

    Attributes:
        seen: The rows that each layer was given.
    """

    def __init__(self, whole: Params, added: Params, factors: dict[str, Outer]) -> None:
        super().__init__()
        self.whole, self.added, self.factors = whole, added, factors
        self.seen: Params = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return self._moved(out, *args, **(kwargs or {})) if func is functional.linear else out

    def _moved(self, out: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        name = next((n for n, w in self.whole.items() if w is weight), None)
        if name is None:
            return out
        if name in self.seen or out.shape != self.added[name].shape:
            raise RuntimeError(f"a layer whose weight is '{name}' does not see the rows of a step once, one by one")
        self.seen[name] = input
        out = out + self.added[name]
        return out if name not in self.factors else out + (input @ self.factors[name].right.T) @ self.factors[name].left


def is_linear(task: Task, theta: Params, rows: Data, name: str) -> bool:
    """Whether a weight may be kept by factors: whether a model has the same loss and gradients that way, tried on rows.

    Args:
        task: Gives the loss.
        theta: Some model.
        rows: Some rows.
        name: The name of the weight.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn(shape: Sequence[int]) -> Tensor:
        return torch.randn(shape, generator=generator) / math.prod(shape) ** 0.5

    trained, buffers = apart(task, theta)
    trained = {n: p + drawn(p.shape) for n, p in trained.items()}  # of a model of zeros all gradients may be 0
    weight = trained.pop(name)
    left, right = (drawn((3, n)) for n in weight.shape)
    moved, seed = Outer(left, right), None if task.train is None else torch.tensor(1)
    try:
        wanted, loss, _ = one_gradient(task, {**trained, name: weight + moved.product()}, buffers, rows, seed)
        found = gradient_by_factors(task, trained, buffers, {name: weight}, {name: moved}, rows, seed)
        own = {**found.gradient, name: Outer(found.gradient[name], found.seen[name]).product()}
    except Exception:  # a model may raise anything where a layer is not used as one
        return False
    same = [(loss, found.loss), *((gradient, own[n]) for n, gradient in wanted.items())]
    return all(torch.allclose(a, b, rtol=1e-3, atol=1e-6) for a, b in same)
