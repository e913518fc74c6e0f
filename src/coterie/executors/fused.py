"""Full-batch local training without a weight matrix per client: exact, and many times faster than one step at a time.

A client has X (n × d), and its model starts with z = XWᵀ + b. The gradient with respect to W is GᵀX, where G (n × h)
is the gradient at z. So after any number of full-batch steps W = W⁰ + BᵀX, where B (n × h) has collected the G's, and

    X Wᵀ = X W⁰ᵀ + (X Xᵀ) B.

X W⁰ᵀ was computed when the client chose its cluster, the Gram matrix X Xᵀ (n × n) once per run, and the sum of many
clients' new W is one product Σ BᵢᵀXᵢ. For n < d no client ever has a W of its own: the *dual* form. For n ≥ d it is
cheaper to keep W, batched over clients: the *primal* form.

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
from coterie.executors.graphs import Replayed
from coterie.executors.vectorised import Vectorised
from coterie.split import FirstLinear
from coterie.task import Data
from coterie.tree import Params, nbytes, take, tree_map

CACHED = 96 * 2**20  # bytes of work per chunk on a CPU, where a chunk should stay in the cache
FEW = 64  # up to so many models, clients with the same one share a product


class Fused(Vectorised):
    """The vectorised executor, with steps whose plan is known done in fused form."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._known: dict[str, FirstLinear | None] = {}
        self._descend = Replayed(descend) if self.device.type == "cuda" else descend

    def _sums(
        self, step: ClientStep, name: str, shared: Any, slots: int, rows: Tensor | None
    ) -> Iterator[tuple[Tensor, Sums, int]]:
        split = self._split(step, name)
        if split is None or step.plan is None:
            yield from super()._sums(step, name, shared, slots, rows)
            return
        sent = Sent.of(shared, step.plan, rows)
        for at in self._chunks(f"fused {name}", lambda at: self._train(split, sent, at), CACHED):
            trained = self._train(split, sent, at)
            weight = self._weight(step.plan, at, trained.label)
            note = sent.note(trained)
            bytes_up = weight.numel() * (nbytes(sent.models) // slots + 12) + nbytes(note)  # 12: a weight and a slot
            yield at, trained.sums(split, sent.models, weight)._replace(note=note), bytes_up

    def _replies(self, step: ClientStep, name: str, shared: Any, rows: Tensor | None) -> Iterator[tuple[Tensor, Reply]]:
        split = self._split(step, name)
        if split is None or step.plan is None or step.plan.clusters or "label" in shared:
            yield from super()._replies(step, name, shared, rows)
            return
        sent = Sent.of(shared, step.plan, rows)
        for at in self._chunks(
            f"fused {name}", lambda at: self._train(split, sent, at).models(split, sent.models), CACHED
        ):
            trained = self._train(split, sent, at)
            slot = torch.zeros(len(at), dtype=torch.long, device=self.device)
            weight = self._weight(step.plan, at, trained.label)[:, 0]
            update = tree_map(lambda p: p[:, 0], trained.models(split, sent.models))
            yield at, Reply(update, weight, slot, sent.note(trained))

    def _train(self, split: FirstLinear, sent: Sent, at: Tensor) -> Trained:
        """Choose and train for the clients at these positions."""
        data = self._store.rows(self.part, self.clients[at])
        data = data._replace(x=data.x.flatten(2))
        dual = data.x.shape[1] < data.x.shape[2]
        kernel = self._store.gram(self.clients[at], data.x, keep=len(self) == self.population) if dual else None
        if sent.rows is None:
            z, label = choose(split, sent, data)
        else:
            label = (sent.rows[at] if len(sent.rows) > 1 else sent.rows.expand(len(at), -1)).to(self.device)
            z = first_product(sent.models[split.weight], data.x, label)
        start = None if dual else take(sent.models[split.weight], label)
        rest = take({n: p for n, p in sent.models.items() if n != split.weight}, label)
        moved, rest, loss = self._descend(split, sent.plan, data, z, kernel, start, rest, sent.lr)
        return Trained(data.x, moved, rest, label, loss, dual=dual, based=not sent.plan.gradient)

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
            told = f"fused ({form})" if split else "not fused: the model's first layer is not a linear map of the rows"
            self.ledger.messages.append(f"vectorised: {name}: {told}")
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
            return {"label": trained.label % self.plan.slots_per_start, "loss": trained.loss}
        return {"loss": trained.loss[:, 0]}


class Trained(NamedTuple):
    """What a chunk of clients ends with."""

    x: Tensor  # (c, n, d)
    moved: Tensor  # dual: B (c, r, n, h); primal: W (c, r, h, d)
    rest: Params  # all other parameters (c, r, …)
    label: Tensor  # the model each took (c, r)
    loss: Tensor  # F_i of it before training (c, r)
    dual: bool
    based: bool  # whether BᵀX is to be added to W⁰, or is itself the answer (a gradient)

    def models(self, split: FirstLinear, start: Params) -> Params:
        """Every client's model (c, r, …)."""
        weight = self.moved
        if self.dual:
            weight = self.moved.transpose(-1, -2) @ self.x[:, None]
            if self.based:
                weight = weight + take(start[split.weight], self.label)
        return {n: weight if n == split.weight else self.rest[n] for n in start}

    def sums(self, split: FirstLinear, start: Params, weight: Tensor) -> Sums:
        """Σ weight · model over the clients that took each model (s, …)."""
        total = weighted_sums(self.label, weight, len(start[split.weight]))
        first = self._dual_sum(start[split.weight], weight) if self.dual else total(self.moved.flatten(0, 1))
        update = {n: first if n == split.weight else total(self.rest[n].flatten(0, 1)) for n in start}
        return Sums(update, total(torch.ones_like(weight.flatten())), {})

    def _dual_sum(self, start: Tensor, weight: Tensor) -> Tensor:
        """Σ weight · (W⁰ + BᵀX): one product per model, over all rows of the clients that took it."""
        total = torch.zeros_like(start)
        for s in self.label.unique().tolist():
            at, r = (self.label == s).nonzero(as_tuple=True)
            own = self.moved[at, r] * weight[at, r, None, None]
            total[s] = own.flatten(0, 1).T @ self.x[at].flatten(0, 1)
            if self.based:
                total[s] += weight[at, r].sum() * start[s]
        return total


def choose(split: FirstLinear, sent: Sent, data: Data) -> tuple[Tensor, Tensor]:
    """XW⁰ᵀ of the model that each start likes best (c, r, n, h), and which it is (c, r).

    The models are the same for all clients, so their rows can be treated as one long list.
    """
    weight, k = sent.models[split.weight], sent.plan.clusters or 1
    (s, _, d), (c, n) = weight.shape, data.x.shape[:2]
    z = data.x.reshape(c * n, d) @ weight.transpose(1, 2)  # (s, c·n, h)
    rest = {name: p for name, p in sent.models.items() if name not in (split.weight, split.bias)}
    shifted = z + sent.models[split.bias][:, None] if split.bias else z
    each = vmap(split.loss, in_dims=(0, 0, None))(rest, shifted, data.y.flatten(0, 1)).unflatten(1, (c, n))
    mean = (each * row_shares(data)).sum(-1).T  # (c, s)
    best = mean.nan_to_num(nan=torch.inf, posinf=torch.inf).unflatten(1, (s // k, k)).argmin(-1)
    label = best + k * torch.arange(s // k, device=z.device)
    return z.unflatten(1, (c, n))[label, torch.arange(c, device=z.device)[:, None]], label


def first_product(weight: Tensor, x: Tensor, label: Tensor) -> Tensor:
    """XW⁰ᵀ of the model that each client and start was sent (c, r, n, h)."""
    if len(weight) > FEW:  # a model each: one small product per client
        return x[:, None] @ take(weight, label).transpose(-1, -2)
    if len(weight) == 1:
        return (x @ weight[0].T)[:, None].expand(-1, label.shape[1], -1, -1)
    z = x.new_empty(*label.shape, x.shape[1], weight.shape[1])
    for s in label.unique().tolist():
        at, r = (label == s).nonzero(as_tuple=True)
        z[at, r] = x[at] @ weight[s].T
    return z


def descend(
    split: FirstLinear,
    plan: Plan,
    data: Data,
    first: Tensor,
    kernel: Tensor | None,
    start: Tensor | None,
    rest: Params,
    lr: Tensor,
) -> tuple[Tensor, Params, Tensor]:
    """τ steps of every client and start, or one gradient.

    Args:
        split: The model, taken apart.
        plan: What is to be done.
        data: The clients' rows (c, n, …).
        first: XW⁰ᵀ (c, r, n, h).
        kernel: XXᵀ (c, n, n) for the dual form, None for the primal.
        start: W⁰ (c, r, h, d) for the primal form.
        rest: All parameters but W (c, r, …).
        lr: γ.

    Returns:
        B or W, the other parameters, and the loss before the first step.
    """
    rows, begin = data.x[:, None], rest
    moved = torch.zeros_like(first) if start is None else start
    loss = first  # replaced in the first step
    for q in range(1 if plan.gradient else plan.tau):
        if q == 0:
            z = first
        else:
            z = rows @ moved.transpose(-1, -2) if kernel is None else _add_product(first, kernel, moved)
        at_z, own, now = gradients(split, data, rest, z)
        loss = now if q == 0 else loss
        down = at_z if start is None else at_z.transpose(-1, -2) @ rows
        if plan.gradient:
            return down, own, loss
        if plan.prox:
            down = down + plan.prox * (moved if start is None else moved - start)
            own = tree_map(lambda g, p, p0: g + plan.prox * (p - p0), own, rest, begin)
        moved = torch.addcmul(moved, down, lr, value=-1)
        rest = tree_map(lambda p, g: torch.addcmul(p, g, lr, value=-1), rest, own)
    return moved, rest, loss


def _add_product(first: Tensor, kernel: Tensor, moved: Tensor) -> Tensor:
    """Add kernel @ moved to first, for kernels (c, n, n) shared by all starts; one pass over memory where it can be."""
    if first.shape[1] == 1:
        return torch.baddbmm(first[:, 0], kernel, moved[:, 0])[:, None]
    return first + kernel[:, None] @ moved


def gradients(split: FirstLinear, data: Data, rest: Params, z: Tensor) -> tuple[Tensor, Params, Tensor]:
    """The gradients at XWᵀ and at the other parameters, and the loss."""
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        leaves = {n: p.detach().requires_grad_() for n, p in rest.items()}
        loss = losses(split, data, leaves, z)
        found = torch.autograd.grad(loss.sum(), [z, *leaves.values()])
    return found[0], dict(zip(leaves, found[1:], strict=True)), loss.detach()


def losses(split: FirstLinear, data: Data, rest: Params, z: Tensor) -> Tensor:
    """Mean losses (c, r) from XWᵀ (c, r, n, h) and all other parameters (c, r, …)."""
    shifted = z + rest[split.bias][..., None, :] if split.bias else z
    others = {n: p for n, p in rest.items() if n != split.bias}
    over_starts: Callable[..., Tensor] = vmap(split.loss, in_dims=(0, 0, None))
    each = vmap(over_starts)(others, shifted, data.y)
    return (each * row_shares(data)[:, None]).sum(-1)


def row_shares(data: Data) -> Tensor:
    """Each row's part in the mean of its client (c, n)."""
    return data.mask / data.mask.sum(1, keepdim=True).clamp(min=1)
