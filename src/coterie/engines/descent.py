"""Descent of many clients at once, from z = XWᵀ + b on; `coterie.engines.fused` says why that is enough.

Throughout, c is the clients of a chunk, r the starts that run side by side, b all c·r of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from coterie.core.first_layer import FirstLinear, Head
from coterie.core.pytree import Params, tree_map
from coterie.core.train import Descend, Gradient

Gradients = Callable[[Params, Tensor, Tensor, Tensor], tuple[Tensor, Params, Tensor]]
"""(rest, z, y, shares) -> the gradients of the mean losses at z and at the rest, and the losses (b,)."""


class Work(NamedTuple):
    """What a chunk of clients trains on."""

    x: Tensor  # (c, n, d)
    y: Tensor  # (c, n, …)
    shares: Tensor  # each row's part in its client's mean loss (c, n)
    z: Tensor  # XW⁰ᵀ + b⁰ (c, r, n, h); it is written over
    kernel: Tensor | None  # dual form: XXᵀ, plus 1 where there is a b (c, n, n)
    rest: Params  # all parameters but W and b (c, r, …)
    lr: Tensor  # γ


class Moved(NamedTuple):
    """How far training moved W and b (or, for a gradient, what it is), and where it took the other parameters."""

    first: Tensor  # dual form: B (c, r, n, h), so that W moves by BᵀX and b by Bᵀ1; primal: ΔW (c, r, h, d)
    bias: Tensor | None  # primal form: Δb (c, r, h)
    rest: Params
    loss: Tensor  # before the first step (c, r)


def shortened(split: FirstLinear, moved: Moved, kernel: Tensor | None, bound: float) -> tuple[Moved, Tensor]:
    """What moved, no longer than a bound and 0 if it is not finite; and whether it was no longer before (c, r).

    Args:
        split: The model taken apart.
        moved: How far all parameters moved, or gradients.
        kernel: That of the dual form, where ‖BᵀX‖² + ‖Bᵀ1‖² = ⟨B, (XXᵀ + 1)B⟩.
        bound: The length.
    """
    if moved.bias is None:
        assert kernel is not None
        parts = [moved.first * (kernel[:, None] @ moved.first)]
    else:
        parts = [moved.first.square(), *([moved.bias.square()] if split.bias else [])]
    parts += [x.square() for x in moved.rest.values()]
    norm = torch.stack([x.flatten(2).double().sum(2) for x in parts]).sum(0).clamp(min=0).sqrt()  # (c, r)
    factor, known = bound / norm.clamp(min=bound), torch.isfinite(norm)

    def short(x: Tensor) -> Tensor:
        shape = *norm.shape, *[1] * (x.dim() - 2)
        return torch.where(known.reshape(shape), x * factor.to(x).reshape(shape), 0.0)

    bias = None if moved.bias is None else short(moved.bias)
    found = Moved(short(moved.first), bias, tree_map(short, moved.rest), moved.loss)
    return found, (norm <= bound).float()


def descend(split: FirstLinear, by: Descend | Gradient, work: Work) -> Moved:
    """τ steps of every client and start, or one gradient."""
    starts = work.z.shape[1]
    gradients, rest = gradients_of(split), tree_map(lambda p: p.flatten(0, 1), work.rest)
    y, shares = _each_start(work.y, starts), _each_start(work.shares, starts)
    prox = by.prox if isinstance(by, Descend) else 0.0
    side = _Primal(split, prox, work) if work.kernel is None else _Dual(work.kernel, prox, work)
    begin, loss = rest, shares
    for q in range(by.tau):
        at_z, own, now = gradients(rest, side.z, y, shares)
        loss = now if q == 0 else loss
        if isinstance(by, Gradient):
            return _by_start(side.gradient(at_z, own, loss), starts)
        if prox:
            own = tree_map(lambda g, p, p0: g + prox * (p - p0), own, rest, begin)
        rest = tree_map(lambda p, g: torch.addcmul(p, g, work.lr, value=-1), rest, own)
        side.step(at_z, last=q == by.tau - 1)
    return _by_start(side.moved(rest, loss), starts)


def descend_in_batches(split: FirstLinear, by: Descend, work: Work, batches: Tensor) -> Moved:
    """A step of every client and start on each of its minibatches, in the dual form.

    A step on the rows of a minibatch changes these rows of B alone; z of the next ones is made of all of B.

    Args:
        split: The model taken apart.
        by: How to step; τ and epochs are in `batches`.
        work: What clients train on; z stays as it is, and there is a kernel.
        batches: Row numbers of every step's minibatch (c, τ, size); -1 is no row, and a step without rows is none.
    """
    assert work.kernel is not None
    starts = work.z.shape[1]
    gradients, rest = gradients_of(split), tree_map(lambda p: p.flatten(0, 1), work.rest)
    z, each = work.z.flatten(0, 1), _each_start(batches, starts)
    client = torch.arange(len(batches), device=z.device).repeat_interleave(starts)[:, None]
    moved, begin, loss = torch.zeros_like(z), rest, z.new_zeros(len(z))
    for q, at in enumerate(each.unbind(1)):
        real, rows = at >= 0, at.clamp(min=0)
        shares = real / real.sum(1, keepdim=True).clamp(min=1)
        where = rows[..., None].expand(-1, -1, z.shape[2])
        now_z = torch.baddbmm(z.gather(1, where), work.kernel[client, rows], moved)
        at_z, own, now = gradients(rest, now_z, work.y[client, rows], shares)
        if by.epochs is not None:
            at_z, own = _of_some(real, at_z), {n: _of_some(real, g) for n, g in own.items()}
        loss = now if q == 0 else loss
        if by.prox:
            pull = by.prox * real.any(1).float()
            own = tree_map(lambda g, p, p0, pull=pull: g + _along(pull, p) * (p - p0), own, rest, begin)
            moved *= 1 - work.lr * _along(pull, moved)
        rest = tree_map(lambda p, g: torch.addcmul(p, g, work.lr, value=-1), rest, own)
        moved.scatter_add_(1, where, at_z * -work.lr)
    return _by_start(Moved(moved, None, rest, loss), starts)


def _of_some(real: Tensor, gradient: Tensor) -> Tensor:
    """A gradient (b, …) where a step has rows (b, size), else 0: 0 times one that is not finite would not be 0."""
    return torch.where(_along(real.any(1), gradient), gradient, 0.0)


def _along(each: Tensor, like: Tensor) -> Tensor:
    """A number for each of the first axis (b,), to be multiplied with (b, …)."""
    return each.reshape(-1, *[1] * (like.dim() - 1))


class _Dual:
    """W as W⁰ + BᵀX, so z = z⁰ + (XXᵀ + 1)B. What is added up is -B/γ: a step is one sum and one product."""

    def __init__(self, kernel: Tensor, prox: float, work: Work) -> None:
        self.lr, self.prox, self.z = work.lr, prox, work.z.flatten(0, 1)
        self.pull = _each_start(kernel * -work.lr, work.z.shape[1])
        self.total = torch.zeros_like(self.z)

    def step(self, at_z: Tensor, *, last: bool) -> None:
        if self.prox:
            at_z = torch.addcmul(at_z, self.total, self.lr, value=-self.prox)
        self.total += at_z
        if not last:
            self.z.baddbmm_(self.pull, at_z)

    def moved(self, rest: Params, loss: Tensor) -> Moved:
        return Moved(self.total.mul_(-self.lr), None, rest, loss)

    def gradient(self, at_z: Tensor, rest: Params, loss: Tensor) -> Moved:
        return Moved(at_z, None, rest, loss)


class _Primal:
    """W and b themselves, batched over clients: z = z⁰ + XΔWᵀ + Δb."""

    def __init__(self, split: FirstLinear, prox: float, work: Work) -> None:
        self.lr, self.prox, self.z = work.lr, prox, work.z.flatten(0, 1)
        self.x = _each_start(work.x, work.z.shape[1])
        self.has_bias = split.bias is not None
        self.weight = self.x.new_zeros(len(self.z), self.z.shape[2], self.x.shape[2])
        self.bias = self.x.new_zeros(len(self.z), self.z.shape[2])

    def step(self, at_z: Tensor, *, last: bool) -> None:
        weight, bias = at_z.transpose(1, 2) @ self.x, at_z.sum(1)
        if self.prox:
            weight, bias = weight + self.prox * self.weight, bias + self.prox * self.bias
        self.weight += weight.mul_(-self.lr)
        self.bias += bias.mul_(-self.lr)
        if not last:
            self.z.baddbmm_(self.x, weight.transpose(1, 2))
            if self.has_bias:
                self.z += bias[:, None]

    def moved(self, rest: Params, loss: Tensor) -> Moved:
        return Moved(self.weight, self.bias, rest, loss)

    def gradient(self, at_z: Tensor, rest: Params, loss: Tensor) -> Moved:
        return Moved(at_z.transpose(1, 2) @ self.x, at_z.sum(1), rest, loss)


def _each_start(x: Tensor, starts: int) -> Tensor:
    """(c, …) as (b, …)."""
    return x.repeat_interleave(starts, 0) if starts > 1 else x


def _by_start(moved: Moved, starts: int) -> Moved:
    return tree_map(lambda x: None if x is None else x.unflatten(0, (-1, starts)), moved)


# --- what comes after z ---------------------------------------------------------------------------------------------


def gradients_of(split: FirstLinear) -> Gradients:
    """By hand where little comes after z, else by automatic differentiation."""
    if split.squared:
        return _squared_gradients
    if split.logits:
        return _logit_gradients
    if split.head is not None:
        return _head_gradients(split.head)
    return traced_gradients(split)


def _squared_gradients(rest: Params, z: Tensor, y: Tensor, shares: Tensor) -> tuple[Tensor, Params, Tensor]:
    """Of (z - y)²."""
    off = z - y.reshape(z.shape)
    at_z = off * shares[..., None]
    return 2 * at_z, {}, (at_z * off).sum((1, 2))


def _logit_gradients(rest: Params, z: Tensor, y: Tensor, shares: Tensor) -> tuple[Tensor, Params, Tensor]:
    """Of the cross-entropy of z."""
    at_z, loss = _cross_entropy(z - z.amax(2, keepdim=True), y, shares)
    return at_z, {}, loss


def _cross_entropy(out: Tensor, y: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient at logits (b, n, classes) that are 0 at most, and the loss (b,)."""
    own, odds = out.gather(2, y[..., None]), out.exp()  # torch's log_softmax is slow for few classes
    all_odds = odds.sum(2, keepdim=True)
    loss = ((all_odds.log() - own)[..., 0] * shares).sum(1)
    at_out = odds.div_(all_odds).scatter_add_(2, y[..., None], own.new_full(own.shape, -1))
    at_out *= shares[..., None]
    return at_out, loss


def _head_gradients(head: Head) -> Gradients:
    """Of the cross-entropy of Vᵀrelu(z) + c, in as few passes over z as there can be."""

    def gradients(rest: Params, z: Tensor, y: Tensor, shares: Tensor) -> tuple[Tensor, Params, Tensor]:
        weight, active = rest[head.weight], z.relu()
        out = torch.baddbmm(rest[head.bias][:, None], active, weight.transpose(1, 2))
        out -= out.amax(2, keepdim=True)
        at_out, loss = _cross_entropy(out, y, shares)
        at_z = torch.bmm(at_out, weight)
        torch.ops.aten.threshold_backward.grad_input(at_z, active, 0, grad_input=at_z)
        return at_z, {head.weight: torch.bmm(at_out.transpose(1, 2), active), head.bias: at_out.sum(1)}, loss

    return gradients


def traced_gradients(split: FirstLinear) -> Gradients:
    """Of anything that vmap can batch."""

    def gradients(rest: Params, z: Tensor, y: Tensor, shares: Tensor) -> tuple[Tensor, Params, Tensor]:
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            leaves = {n: p.detach().requires_grad_() for n, p in rest.items()}
            loss = (vmap(split.loss)(leaves, z, y) * shares).sum(1)
            found = torch.autograd.grad(loss.sum(), [z, *leaves.values()], materialize_grads=True)
        return found[0], dict(zip(leaves, found[1:], strict=True)), loss.detach()

    return gradients


# --- all steps at once ----------------------------------------------------------------------------------------------


def leap(work: Work, reach: Tensor) -> Moved:
    """All τ steps on squared loss in one product: `reach` is made by `reach_of` for the same γ.

    B⁽q⁺¹⁾ = AB⁽q⁾ - 2γSR, with R = z⁰ - y, S the rows' shares and A = (1 - γμ)I - 2γS(XXᵀ + 1): so B = -2γ(ΣAᑫ)SR.
    The primal form is the same with XᵀSX in place of S(XXᵀ + 1), on the other side.
    """
    starts = work.z.shape[1]
    y, shares = _each_start(work.y, starts), _each_start(work.shares, starts)
    at_z, _, loss = _squared_gradients({}, work.z.flatten(0, 1), y, shares)
    at_z, loss = (v.unflatten(0, (-1, starts)) for v in (at_z, loss))
    if work.kernel is not None:
        return Moved(reach[:, None] @ at_z, None, {}, loss)
    both = torch.cat([at_z.transpose(2, 3) @ work.x[:, None], at_z.sum(2)[..., None]], 3) @ reach[:, None]
    return Moved(both[..., :-1], both[..., -1], {}, loss)


def leap_pays(by: Descend, work: Work) -> bool:
    """Whether making the matrix costs no more than twenty rounds of steps do."""
    starts, n, h, d = *work.z.shape[1:], work.x.shape[2]
    step = 2 * n * d if work.kernel is None else n * n
    return 2 * math.log2(by.tau + 1) * reach_side(work) ** 3 <= 20 * by.tau * step * starts * h


def reach_side(work: Work) -> int:
    """The side of a client's matrix."""
    return work.x.shape[2] + 1 if work.kernel is None else work.x.shape[1]


def reach_of(split: FirstLinear, by: Descend, work: Work) -> Tensor:
    """-γ ΣAᑫ over q < τ, of every client: (c, n, n) in the dual form, (c, d+1, d+1) in the primal."""
    if work.kernel is not None:
        pull = work.shares[..., None] * work.kernel
    else:
        ones = torch.full_like(work.x[..., :1], float(split.bias is not None))
        wide = torch.cat([work.x, ones], 2)
        pull = wide.transpose(1, 2) @ (work.shares[..., None] * wide)
    identity = torch.eye(pull.shape[1], device=pull.device)
    return -work.lr * _geometric((1 - work.lr * by.prox) * identity - 2 * work.lr * pull, identity, by.tau)


def _geometric(a: Tensor, identity: Tensor, terms: int) -> Tensor:
    """I + A + … + Aᵗ⁻¹, in about 2·log₂ t products."""
    if terms == 1:
        return identity.expand_as(a)
    total, power, have = identity, a, 1  # total has `have` terms, power is Aʰᵃᵛᵉ
    for bit in bin(terms)[3:]:
        total, power, have = total + power @ total, power @ power, 2 * have
        if bit == "1":
            total, power, have = total + power, power @ a, have + 1
    return total
