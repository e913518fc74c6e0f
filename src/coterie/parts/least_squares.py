"""Least squares in every cluster from sums over rows: by φᵀφ, or by products of it where that has too many numbers.

What is solved for is a change of the present models, so directions that no row has are left as they are, and rounding
errors of the sums are those of a small number. The server solves for k clusters at once, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from coterie.core.cohort import Cohort
from coterie.core.features import is_linear, require_linear
from coterie.core.local import nearest
from coterie.core.pytree import Outer, Params, exact, flat, take, unflat
from coterie.core.step import ClientStep, Local, Reply, client_step
from coterie.core.sums import Sums
from coterie.core.task import Data, Task
from coterie.core.train import SECRECY
from coterie.parts.residuals import features, residuals
from coterie.parts.soft_labels import softly

LARGEST = 512  # parameters up to which clients send φᵀφ, of d² numbers
NARROW = 1e-10  # of the largest eigenvalue of correlations: a direction with less is one that no row has
SOLVED = 1e-20  # of the squared length of b, as preconditioned: conjugate gradients have arrived

Solver = Literal["least_squares", "conjugate"]
Kept = Tensor | tuple[()]


class Towards(NamedTuple):
    """The message of a step of conjugate gradients."""

    theta: Params  # (k, …)
    direction: Tensor  # (k, d)


class LeastSquares:
    """For methods of `k` clusters whose models become those that fit their clients' rows best.

    A `fraction` of the clients takes part in a round, each in one cluster or, if `soft`, with a share in every one.
    `tau` is the number of conjugate steps in a round. The state says in `refine` by what models are refined.
    """

    k: int
    tau: int
    soft: bool
    fraction: float

    def solves(self, state: Any) -> bool:
        """Whether models are refined by least squares."""
        return state.refine in ("least_squares", "conjugate")

    def settled(
        self, refine: Solver | Literal["auto"], task: Task, d: int, cohort: Cohort
    ) -> Solver | Literal["fedavg"]:
        """What "auto" is for models of d parameters, which is said in the log; what is asked for by name is checked."""
        name, rows = type(self).__name__, cohort.federation.train.x[:2]
        if refine != "auto":
            require_linear(task, rows, f"{name}: refine='{refine}'")
            if refine == "conjugate" and self.soft:
                raise ValueError(f"{name}: refine='conjugate' takes hard labels only, got soft=True")
            return refine
        linear = is_linear(task, rows)
        large = "fedavg" if self.soft else "conjugate"  # which knows no soft labels
        found = ("least_squares" if d <= LARGEST else large) if linear else "fedavg"
        why = "" if linear else ", for this is no regression that is linear in its parameters"
        cohort.log(f"refine={found}{why}: {_sent(found, d, self.tau)}")
        return found

    # --- what a client does --------------------------------------------------------------------------------------

    @client_step
    def normal_step(self, task: Task) -> ClientStep:
        """Choose a model; the client's part of that cluster's normal equations."""

        def run(sent: Params, local: Local) -> Reply:
            j, loss = nearest(task, sent, local.data)
            part = _normal(task, take(sent, j), local.data)
            return Reply(part, local.data.mask.sum(), j, {"label": j, "loss": loss})

        return ClientStep(run, secrecy=SECRECY)

    @client_step
    def soft_normal_step(self, task: Task) -> ClientStep:
        """The client's part of all clusters' normal equations, by its shares in them."""
        return softly(task, self.k, lambda theta, data, lr: _normal(task, theta, data))

    @client_step
    def residual_step(self, task: Task) -> ClientStep:
        """Choose a model; with what conjugate gradients begin: φᵀ(y - φθ), and the diagonal of φᵀφ."""

        def run(sent: Params, local: Local) -> Reply:
            j, loss = nearest(task, sent, local.data)
            phi, off = _rows(task, take(sent, j), local.data)
            part = {"pull": phi.T @ off, "scale": phi.square().sum(0)}
            return Reply(part, slot=j, note={"label": j, "loss": loss})

        return ClientStep(run, secrecy=SECRECY)

    @client_step
    def product_step(self, task: Task) -> ClientStep:
        """A step of conjugate gradients: φᵀφ times the direction of the client's cluster."""

        def run(sent: Towards, local: Local) -> Reply:
            j, _ = nearest(task, sent.theta, local.data)
            phi, _ = _rows(task, take(sent.theta, j), local.data)
            return Reply(phi.T @ (phi @ take(sent.direction, j)), slot=j)

        return ClientStep(run)

    # --- what the server does ------------------------------------------------------------------------------------

    def solve(self, theta: Params, sums: Sums, kept: Kept, share: float) -> tuple[Params, Kept]:
        """The models that fit best by the sums of a normal step, and what is kept of these.

        Samples of the clients are remembered for as long as all take a turn: older sums count 1 - `share` of the next.
        """
        old, total = exact(flat(theta)), exact(sums.update["moved"] if self.soft else sums.update)
        if self.fraction < 1:
            total = _about(total, -old)  # in terms of y, not of residuals
            total = kept = total if isinstance(kept, tuple) else total + (1 - share) * exact(kept)
            total = _about(total, old)
        return _changed(theta, least_squares(total[:, :, :-1], total[:, :, -1])), kept

    def approach(self, theta: Params, sums: Sums, share: float, chosen: Cohort) -> Params:
        """The same by conjugate steps after a residual step, `share` of the way, so that rounds of samples average."""

        def times(direction: Tensor) -> Tensor:
            return exact(chosen.combine(self.product_step, Towards(theta, direction), slots=self.k).update)

        change = conjugate(times, exact(sums.update["pull"]), exact(sums.update["scale"]), self.tau)
        return _changed(theta, share * change)


def moved(old: Params, new: Params) -> float:
    """The longest way that a model went, over the distance of models from their mean; of one model, its length.

    Example:
        >>> moved({"w": torch.tensor([[0.0], [4.0]])}, {"w": torch.tensor([[1.0], [5.0]])})
        0.5
    """
    before, after = exact(flat(old)), exact(flat(new))
    apart = after - after.mean(0)
    far = apart if bool(apart.any()) else after
    return float((after - before).norm(dim=1).max() / far.norm(dim=1).max().clamp(min=1e-300))


def least_squares(gram: Tensor, pull: Tensor) -> Tensor:
    """The shortest x with Ax = b for A = Σφφᵀ (k, d, d) and b = Σφr (k, d), as features of equal scale have it.

    Example:
        >>> least_squares(torch.tensor([[[4.0, 0.0], [0.0, 0.0]]]), torch.tensor([[2.0, 0.0]]))
        tensor([[0.5000, 0.0000]])
    """
    scale = gram.diagonal(dim1=1, dim2=2).sqrt().clamp(min=torch.finfo(gram.dtype).tiny ** 0.5)
    values, vectors = torch.linalg.eigh(gram / (scale[:, :, None] * scale[:, None]))
    inverse = torch.where(values > NARROW * values[:, -1:], 1 / values, 0.0)
    along = (vectors.mT @ (pull / scale)[:, :, None])[:, :, 0] * inverse
    return (vectors @ along[:, :, None])[:, :, 0] / scale


def standard_errors(sums: Sums, label: Tensor, sizes: Tensor, k: int) -> Tensor:
    """Of what least squares find from the sums of a normal step with hard labels (k, d); ∞ where rows are too few.

    The noise is that about the models that were sent, which in the end are those that are found.

    Args:
        sums: Of `normal_step`.
        label: The cluster of every client that took part (m,).
        sizes: How many rows each has (m,).
        k: The clusters.
    """
    gram = exact(sums.update)[:, :, :-1].cpu()
    rows = torch.bincount(label, sizes.double(), minlength=k)
    squares = torch.bincount(label, sizes * sums.note["loss"].cpu().double(), minlength=k)
    free = rows - gram.shape[1]
    noise = torch.where(free > 0, squares / free.clamp(min=1), torch.inf)
    spread = torch.linalg.pinv(gram, hermitian=True).diagonal(dim1=1, dim2=2).clamp(min=0)
    return (noise[:, None] * spread).sqrt().nan_to_num(nan=torch.inf, posinf=torch.inf)


def conjugate(times: Callable[[Tensor], Tensor], pull: Tensor, scale: Tensor, steps: int) -> Tensor:
    """The same by so many steps of conjugate gradients, preconditioned by the diagonal of A.

    Args:
        times: `times(p)` is Ap (k, d); each is an exchange with the clients.
        pull: b (k, d).
        scale: The diagonal of A (k, d).
        steps: Of the iteration.
    """
    tiny = torch.finfo(pull.dtype).tiny

    def dot(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum(1, keepdim=True)

    inverse = torch.where(scale > 0, 1 / scale.clamp(min=tiny), 0.0)
    x, left, p = torch.zeros_like(pull), pull, inverse * pull
    size = first = dot(left, p)
    for _ in range(steps):
        product = times(p)
        curved = dot(p, product)
        going = (size > SOLVED * first) & (curved > 0)  # what is left after that is rounding
        far = torch.where(going, size / curved.clamp(min=tiny), 0.0)
        x, left = x + far * p, left - far * product
        size, old = dot(left, inverse * left), size
        p = inverse * left + torch.where(going, size / old.clamp(min=tiny), 0.0) * p
    return x


def _sent(refine: str, d: int, tau: int) -> str:
    """What a client sends, for the log."""
    numbers = {"least_squares": d * (d + 1), "conjugate": (tau + 2) * d, "fedavg": d}[refine]
    exchanges = f", in {tau + 1} exchanges" if refine == "conjugate" else ""
    end = "" if refine == "fedavg" else ", until models no longer move"
    return f"{numbers} numbers up per client and round{exchanges}{end}"


def _rows(task: Task, theta: Params, data: Data) -> tuple[Tensor, Tensor]:
    """φ (n, d) and y - ⟨φ, θ⟩ (n,) of a client's rows, as float64: what is solved for are differences of their sums."""
    phi = (features(task, data) * data.mask[:, None]).double()
    return phi, residuals(phi, data, flat(theta, 0)[None].double())[:, 0]


def _normal(task: Task, theta: Params, data: Data) -> Outer:
    """φᵀφ and φᵀ(y - φθ) side by side (d, d + 1), over a client's number of rows, by which it counts."""
    phi, off = _rows(task, theta, data)
    return Outer(phi / data.mask.sum(), torch.cat([phi, off[:, None]], 1))


def normal_equations(task: Task, theta: Params, data: Data) -> tuple[Tensor, Tensor]:
    """φᵀφ (d, d) and φᵀ(y - φθ) (d,) of a client's rows."""
    phi, off = _rows(task, theta, data)
    return phi.T @ phi, phi.T @ off


def _about(normal: Tensor, theta: Tensor) -> Tensor:
    """Normal equations (k, d, d + 1) for a change from a + θ (k, d), where they were for one from a."""
    gram, pull = normal[:, :, :-1], normal[:, :, -1:]
    return torch.cat([gram, pull - gram @ theta[:, :, None]], 2)


def _changed(theta: Params, change: Tensor) -> Params:
    """Models (k, …) after a change (k, d) in float64."""
    old = flat(theta)
    return unflat((exact(old) + change).to(old), take(theta, 0))
