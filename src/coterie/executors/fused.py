"""Full-batch local training without a weight matrix per client: exact, and many times faster than one step at a time.

A client has X (n × d), and its model starts with z = XWᵀ + b. The gradient with respect to W is GᵀX, where G (n × h)
is the gradient at z. So after any number of full-batch steps W = W⁰ + BᵀX and b = b⁰ + Bᵀ1, where B (n × h) has
collected the G's, and

    z = z⁰ + (X Xᵀ + 1) B.

z⁰ was computed when the client chose its cluster, the Gram matrix X Xᵀ (n × n) once per run, and the sum of many
clients' new W is one product Σ BᵢᵀXᵢ. For n < d no client ever has a W of its own: the *dual* form. For n ≥ d it is
cheaper to keep W, batched over clients: the *primal* form. Where nothing comes after z and the loss is squared, all τ
steps are one linear map of the residuals, made once for a step size: the *closed* form.

The executor recognises a `Plan`, never an algorithm. Throughout, c is the clients of a chunk, r the starts that run
side by side, s the models that were sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from coterie.client import ClientStep, Plan, Reply
from coterie.cohort import Sums, weighted_sums
from coterie.executors.descent import Moved, Work, descend, leap, leap_pays, reach_of, reach_side
from coterie.executors.graphs import Replayed
from coterie.executors.kernels import descend_on_chip, fits
from coterie.executors.products import Factor
from coterie.executors.store import Kept
from coterie.executors.vectorised import Vectorised
from coterie.split import FirstLinear
from coterie.task import Data
from coterie.tree import Params, nbytes, take, tree_map

CACHED = 48 * 2**20  # bytes of work per chunk on a CPU, where a chunk should stay in the cache
NARROW = 8  # outputs of all models together up to which all rows are multiplied, with 0 for models they did not take
FEW = 64  # up to so many models, clients with the same one share a product
LARGE = 2**23  # numbers in z from which on a GPU is busy for longer than it takes to tell it what to do
RUN = 4  # clients in a row with one model, on average, for which a product of their own pays


class Fused(Vectorised):
    """The vectorised executor, with steps whose plan is known done in fused form."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._known: dict[str, FirstLinear | None] = {}
        self._replayed = Replayed(descend) if self.device.type == "cuda" else descend

    def _sums(
        self, step: ClientStep, name: str, shared: Any, slots: int, rows: Tensor | None
    ) -> Iterator[tuple[Tensor, Sums, int]]:
        split = self._split(step, name)
        slotted = rows is None or "label" in shared  # else all models that were sent go into one sum
        if split is None or step.plan is None or not slotted:
            yield from super()._sums(step, name, shared, slots, rows)
            return
        sent = Sent.of(shared, step.plan, rows)
        for at, train in self._chunks(f"fused {name}", lambda at: self._train(split, sent, at), CACHED):
            trained = train(at)
            weight = self._weight(step.plan, at, trained.label)
            note = sent.note(trained)
            bytes_up = weight.numel() * (nbytes(sent.models) // slots + 12) + nbytes(note)  # 12: a weight and a slot
            with self._arithmetic():
                moved = trained.rows_sum(weight, sent.models[split.weight])
            yield at, trained.sums(split, sent.models, weight, moved)._replace(note=note), bytes_up

    def _replies(self, step: ClientStep, name: str, shared: Any, rows: Tensor | None) -> Iterator[tuple[Tensor, Reply]]:
        split = self._split(step, name)
        if split is None or step.plan is None or step.plan.clusters or "label" in shared:
            yield from super()._replies(step, name, shared, rows)
            return
        sent = Sent.of(shared, step.plan, rows)

        def train(at: Tensor) -> tuple[Trained, Params]:
            trained = self._train(split, sent, at)
            return trained, trained.models(split, sent.models)

        for at, work in self._chunks(f"fused {name}", train, CACHED):
            trained, models = work(at)
            slot = torch.zeros(len(at), dtype=torch.long, device=self.device)
            weight = self._weight(step.plan, at, trained.label)[:, 0]
            update = tree_map(lambda p: p[:, 0], models)
            yield at, Reply(update, weight, slot, sent.note(trained))

    def _train(self, split: FirstLinear, sent: Sent, at: Tensor) -> Trained:
        """Choose and train for the clients at these positions."""
        data = self._store.rows(self.part, self.clients[at])
        data = data._replace(x=data.x.flatten(2))
        with self._arithmetic():
            if sent.rows is None:
                z, label = choose(split, sent, data, self._factor(data.x, self.clients[at]))
            else:
                label = (sent.rows[at] if len(sent.rows) > 1 else sent.rows.expand(len(at), -1)).to(self.device)
                z = first_product(split, sent.models, data.x, label, self._factor(data.x, self.clients[at]))
        rest = take({n: p for n, p in sent.models.items() if n not in (split.weight, split.bias)}, label)
        kernel = self._kernel(split, data.x, self.clients[at])
        work = Work(data.x, data.y, row_shares(data), z.float(), kernel, rest, sent.lr)
        with self._arithmetic(), torch.autocast(self.device.type, enabled=False):  # many small steps: no bfloat16 here
            moved = self._move(split, sent.plan, work, self.clients[at])
        return Trained(data.x, moved, label, based=not sent.plan.gradient)

    def _factor(self, x: Tensor, clients: Tensor) -> Factor:
        """The rows of all clients as one long list, ready to be multiplied."""
        rows = x.flatten(0, 1)
        if self.device.type != "cuda" or self.precision != "float32":
            return Factor.of(rows, split=False)
        return self._kept(("rows in halves",), clients, 2 * rows.nbytes, lambda: Factor.of(rows)) or Factor.of(rows)

    def _kernel(self, split: FirstLinear, x: Tensor, clients: Tensor) -> Tensor | None:
        """XXᵀ, plus 1 for b, where the dual form is the cheaper one."""
        (c, n, d), one = x.shape, float(split.bias is not None)
        if n >= d:
            return None
        kept = self._kept(("Gram matrices",), clients, 4 * c * n * n, lambda: x @ x.transpose(1, 2) + one)
        return x @ x.transpose(1, 2) + one if kept is None else kept

    def _move(self, split: FirstLinear, plan: Plan, work: Work, clients: Tensor) -> Moved:
        """Train: on a GPU in one kernel where there is one, in closed form where that pays, else step by step."""
        if split.head and self.device.type == "cuda" and fits(split.head, plan, work):
            return descend_on_chip(split.head, plan, work)
        if split.squared and plan.steady and not plan.gradient and leap_pays(plan, work):
            name, size = ("closed forms", float(work.lr), plan.tau, plan.prox), 4 * len(work.x) * reach_side(work) ** 2
            reach = self._kept(name, clients, size, lambda: reach_of(split, plan, work))
            if reach is not None:
                return leap(work, reach)
        return (self._replayed if work.z.numel() < LARGE else descend)(split, plan, work)

    def _kept(self, name: tuple[Any, ...], clients: Tensor, size: int, make: Callable[[], Kept]) -> Kept | None:
        """What is made once for a chunk, if it will be wanted again: as long as everybody takes part."""
        return self._store.kept(name, clients, size, make) if self._everybody else None

    @property
    def _everybody(self) -> bool:
        """Whether all clients take part."""
        return len(self) == self.population

    def _weight(self, plan: Plan, at: Tensor, like: Tensor) -> Tensor:
        """How heavily each client and start counts (c, r)."""
        if plan.weights == "size":
            return self.sizes[at].to(self.device, torch.float32)[:, None].expand(like.shape)
        return torch.ones(like.shape, device=self.device)

    def _split(self, step: ClientStep, name: str) -> FirstLinear | None:
        """The model taken apart, if this step and this model can be fused."""
        if step.plan is None or self.uplink.transforms or self.part != "train":
            return None
        if name not in self._known:
            self._known[name] = split = self.task.split(self.federation.train.x[:2])
            n, d = int(self.federation.train.sizes.max()), self.federation.train.x[0].numel()
            form = f"dual form for clients of fewer than {d} rows, primal for others" if n >= d else "dual form"
            closed = ", or closed form where that pays" if split and split.squared else ""
            told = "not fused: the model's first layer is not a linear map of the rows"
            self.ledger.messages.append(f"vectorised: {name}: {f'fused ({form}{closed})' if split else told}")
        return self._known[name]


class Sent(NamedTuple):
    """What a planned step was sent, in one form for all steps."""

    plan: Plan
    models: Params  # (s, …)
    rows: Tensor | None  # the model of every client and start (clients, r); None to choose
    lr: Tensor
    labelled: bool

    @classmethod
    def of(cls, shared: dict[str, Any], plan: Plan, rows: Tensor | None) -> Sent:
        """Read `shared` as `Plan` says."""
        theta, lr = shared["theta"], shared["lr"].flatten()[0]
        if plan.clusters:
            common = {n: x[:, None].expand(-1, plan.clusters, *x.shape[1:]) for n, x in shared["common"].items()}
            return cls(plan, tree_map(lambda x: x.flatten(0, 1), {**theta, **common}), None, lr, True)
        if rows is None:
            return cls(plan, tree_map(lambda x: x[None], theta), torch.zeros(1, 1, dtype=torch.long), lr, False)
        return cls(plan, theta, rows.reshape(len(rows), -1), lr, "label" in shared)

    def note(self, trained: Trained) -> dict[str, Tensor]:
        """The clients' diagnostics."""
        if self.labelled:
            return {"label": trained.label % self.plan.slots_per_start, "loss": trained.moved.loss}
        return {"loss": trained.moved.loss[:, 0]}


class Trained(NamedTuple):
    """What a chunk of clients ends with."""

    x: Tensor  # (c, n, d)
    moved: Moved
    label: Tensor  # the model each took (c, r)
    based: bool  # whether what moved is to be added to W⁰ and b⁰, or is itself the answer (a gradient)

    def models(self, split: FirstLinear, start: Params) -> Params:
        """Every client's model (c, r, …)."""
        first, bias = self.moved.first, self.moved.bias
        own = {**self.moved.rest, split.weight: first if bias is not None else first.transpose(2, 3) @ self.x[:, None]}
        if split.bias:
            own[split.bias] = first.sum(2) if bias is None else bias
        if self.based:
            own |= {n: own[n] + take(start[n], self.label) for n in (split.weight, split.bias) if n}
        return {n: own[n] for n in start}

    def sums(self, split: FirstLinear, start: Params, weight: Tensor, moved: Tensor | None) -> Sums:
        """Σ weight · model over the clients that took each model (s, …), where W moved by what `rows_sum` says."""
        first, bias = self.moved.first, self.moved.bias
        each = {**self.moved.rest}
        if split.bias:
            each[split.bias] = first.sum(2) if bias is None else bias
        if bias is not None:
            each[split.weight] = first
        flattened = tree_map(lambda x: x.flatten(0, 1), each)
        own, count = weighted_sums(self.label, weight, len(start[split.weight]), flattened)
        if moved is not None:
            own[split.weight] = moved
        for n in (split.weight, split.bias) if self.based else ():
            if n:
                own[n] = own[n] + count.reshape(-1, *[1] * (start[n].dim() - 1)) * start[n]
        return Sums({n: own[n] for n in start}, count, {})

    def rows_sum(self, weight: Tensor, like: Tensor) -> Tensor | None:
        """Σ weight · BᵀX over the clients that took each model: few large products over many clients' rows.

        None in the primal form, where every client has its own ΔW.
        """
        if self.moved.bias is not None:
            return None
        own = self.moved.first * weight[..., None, None]
        if like[:, :, 0].numel() <= NARROW:
            took = self.label[..., None] == torch.arange(len(like), device=own.device)  # (c, r, s)
            spread = own[:, :, :, None].where(took[:, :, None, :, None], 0).sum(1)  # (c, n, s, h)
            return (spread.flatten(0, 1).flatten(1).T @ self.x.flatten(0, 1)).reshape(like.shape)
        total = torch.zeros_like(like)
        for s, at, r in _members(self.label):
            total[s].addmm_(own[at, r].flatten(0, 1).T, self.x[at].flatten(0, 1))
        return total


def _members(label: Tensor) -> Iterator[tuple[int, Any, Any]]:
    """Models, and who took them: indices of clients and starts, of which no two are the same."""
    label = label.cpu()
    if label.shape[1] == 1:  # rows of neighbours with one model need not be copied
        taken, length = label[:, 0].unique_consecutive(return_counts=True)
        if len(taken) * RUN <= len(label):
            end = length.cumsum(0)
            for s, a, e in zip(taken.tolist(), (end - length).tolist(), end.tolist(), strict=True):
                yield s, slice(a, e), 0
            return
    for s in label.unique().tolist():
        yield s, *(label == s).nonzero(as_tuple=True)


def choose(split: FirstLinear, sent: Sent, data: Data, rows: Factor) -> tuple[Tensor, Tensor]:
    """z⁰ of the model that each start likes best (c, r, n, h), and which it is (c, r).

    The models are the same for all clients, so their rows can be treated as one long list.
    """
    weight, k = sent.models[split.weight], sent.plan.clusters or 1
    (s, h, d), (c, n) = weight.shape, data.x.shape[:2]
    bias = sent.models[split.bias].flatten() if split.bias else None
    z = rows.times(weight.reshape(s * h, d).T, bias).unflatten(1, (s, h))
    rest = {name: p for name, p in sent.models.items() if name not in (split.weight, split.bias)}
    each = vmap(split.loss, in_dims=(0, 1, None))(rest, z, data.y.flatten(0, 1)).unflatten(1, (c, n))
    mean = (each * row_shares(data)).sum(-1)  # (s, c)
    best = mean.nan_to_num(nan=torch.inf, posinf=torch.inf).unflatten(0, (s // k, k)).argmin(1).T
    label = best + k * torch.arange(s // k, device=z.device)
    return z.unflatten(0, (c, n))[torch.arange(c, device=z.device)[:, None], :, label], label


def first_product(split: FirstLinear, models: Params, x: Tensor, label: Tensor, rows: Factor) -> Tensor:
    """z⁰ of the model that each client and start was sent (c, r, n, h)."""
    weight = models[split.weight]
    if len(weight) > FEW:  # a model each: one small product per client
        z = x[:, None] @ take(weight, label).transpose(-1, -2)
    elif len(weight) == 1:
        z = rows.times(weight[0].T).unflatten(0, x.shape[:2])[:, None].repeat(1, label.shape[1], 1, 1)
    else:
        z = x.new_empty(*label.shape, x.shape[1], weight.shape[1])
        for s, at, r in _members(label):
            z[at, r] = (x[at] @ weight[s].T).to(z.dtype)
    return z if split.bias is None else z.add_(take(models[split.bias], label)[:, :, None])


def row_shares(data: Data) -> Tensor:
    """Each row's part in the mean of its client (c, n)."""
    return data.mask / data.mask.sum(1, keepdim=True).clamp(min=1)
