"""FedX with clustering: each client estimates its cluster, then refines that cluster's model.

Global Convergence of Federated Learning for Mixed Regression
    Lili Su, Jiaming Xu, Pengkun Yang. NeurIPS 2022, Phase 2.

Line numbers in the comments are those of Phase 2. The paper's loss of a client is half of the mean squared error, ours
is the task's own mean loss: so its η is twice our `lr` where that is the mean squared error.

Line 7 is FedAvg or FedProx in the paper, whose steps are as long as the most curved client allows and as many as the
features' condition number asks for. Where a model is linear in its parameters, line 7 is by default what these steps
converge to: least squares in every cluster, from sums over its clients' rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from coterie.core.cohort import Cohort
from coterie.core.features import is_linear, require_linear
from coterie.core.key import Key
from coterie.core.local import mean_loss, nearest
from coterie.core.method import Report
from coterie.core.pytree import Outer, Params, exact, flat, is_outer, take, tree_map, unflat
from coterie.core.registry import register
from coterie.core.settings import setting
from coterie.core.step import ClientStep, Local, Reply, Secrecy, Step, client_step
from coterie.core.sums import Sums
from coterie.core.task import Data, Task
from coterie.core.train import Descend, Given, Models, Train
from coterie.parts.choosing import Choosing
from coterie.parts.least_squares import conjugate, least_squares
from coterie.parts.residuals import features, residuals
from coterie.parts.starts import FarthestFirst, Start, find_start

GAMMA = 0.9  # γ of Section 4.2 for the step size that is found: it must stay below 1
LARGEST = 512  # parameters up to which clients send φᵀφ, of d² numbers
STILL = 1e-6  # of the models' distance: with less a round moves none
MOVING = 0.05  # of the models' distance, that as many rounds again would move one

Refine = Literal["auto", "least_squares", "conjugate", "fedavg", "fedprox"]

SECRECY: dict[str, Secrecy] = {"label": "hidden", "loss": "mean"}


class Soft(NamedTuple):
    """The message of a round with soft labels."""

    theta: Params  # (k, …)
    lr: Tensor
    temperature: Tensor


class Towards(NamedTuple):
    """The message of a step of conjugate gradients."""

    theta: Params  # (k, …)
    direction: Tensor  # (k, d)


class State(NamedTuple):
    """What FedX knows after a round."""

    theta: Params  # the cluster models θ_j (k, …)
    labels: Tensor  # each client's last cluster (m,), -1 where it has never taken part or it is hidden
    members: Tensor  # clients of each cluster (k,): by the labels or, where these are hidden, of the last round
    lr: float  # the step size, in terms of the task's own loss
    refine: Refine  # how line 7 is done
    linear: bool  # whether it is FedProx in closed form
    temperature: float  # that of soft labels, 0 for hard ones
    round: int
    kept: Tensor | tuple[()]  # φᵀφ and φᵀy of samples of the clients so far, older ones less (k, d, d + 1)
    moved: float  # how far the last round moved a model, as a part of how far models are apart; infinite at first


class Refined(NamedTuple):
    """What lines 5 to 7 give."""

    theta: Params  # (k, …)
    sums: Sums
    kept: Tensor | tuple[()] = ()


@register("fedx")
@dataclass(frozen=True)
class FedX(Choosing):
    """Alternate between estimating each client's cluster and refining the cluster models.

    Args:
        k: Number of clusters.
        lr: Step size η/2 (η/2 of FedProx's proximal term too); None takes γ = 0.9, that is 0.45 over the largest
            ‖φ(x_i)‖²/n_i of all clients, for which each sends one number. Only for models that are linear in their
            parameters.
        refine: How line 7 is done. For squared loss and a model that is linear in its parameters: "least_squares" (each
            model becomes the one that fits its clients' rows best; they send φᵀφ and φᵀ(y - φθ)) or "conjugate"
            (towards the same by s steps of conjugate gradients, each an exchange of d numbers). The run ends when these
            no longer move a model. For any task: "fedavg" (s local gradient steps) or "fedprox" (the local proximal
            problem, solved exactly for squared loss and such a model, else by s gradient steps). "auto":
            "least_squares" up to 512 parameters, "conjugate" above, and "fedavg" for other tasks.
        tau: s, the local steps, or those of conjugate gradients in a round.
        soft: λ by likelihood, and a client's update of a model counts λ times (Lemma 1). Otherwise λ is a vertex of the
            simplex, the minimiser of (7).
        temperature: Of soft labels: λ_j ∝ exp(-Σ loss / temperature) over the client's rows: 2σ² for squared loss, 1
            for cross-entropy. None takes twice the mean loss of the round before, which estimates 2σ²; the first round
            is then a hard one.
        normalise: "cluster": the sum of clients' updates is divided by the rows of the cluster; "all": by those of all
            clients, as printed, which slows a cluster down by its share of the rows. Not for least squares.
        fraction: Share of the clients that take part in a round.
        init: The start, as for `IFCA`.

    Example:
        >>> import coterie as ct
        >>> federation = ct.data.mixed_regression(k=2, d=5, pairs=50, rest=50, anchors=4)
        >>> task = ct.Task.regressor(ct.models.Linear(5, 1))
        >>> run = ct.fit(ct.FedX(k=2), task, federation, rounds=40, evaluations=1)
        >>> run.ari > 0.9
        True
    """

    quick = {"init": FarthestFirst(steps=4), "lr": 0.05}

    k: int = setting(low=1)
    lr: float | None = setting(None, low=1e-12)
    refine: Refine = "auto"
    tau: int = setting(10, low=1)
    soft: bool = False
    temperature: float | None = setting(None, low=0)
    normalise: Literal["cluster", "all"] = "cluster"
    fraction: float = setting(1.0, low=0, high=1)
    init: str | Start | Sequence[Params] = "farthest_first"

    def start(self, task: Task, cohort: Cohort, key: Key) -> State:
        """Lines 1 and 3."""
        if self.k > cohort.population:
            name = type(self).__name__
            raise ValueError(f"{name}: k must be at most the number of clients, {cohort.population}, got {self.k}")
        lr = self._step_size(task, cohort)
        theta = find_start(self.init, self.k)(self.k, lr, task, cohort, key)
        never = torch.full((cohort.population,), -1)
        none = torch.zeros(self.k, dtype=torch.long)
        refine = self._settled(task, flat(theta).shape[1], cohort)
        linear = refine == "fedprox" and is_linear(task, cohort.federation.train.x[:2])
        return State(theta, never, none, lr, refine, linear, self.temperature or 0.0, 0, (), torch.inf)

    def round(self, state: State, cohort: Cohort) -> tuple[State, Report]:
        """Lines 5 to 7."""
        chosen = cohort.sample(self.fraction)
        ways = {"least_squares": self._solve, "conjugate": self._conjugate}
        theta, sums, kept = ways.get(state.refine, self._descend)(state, chosen)
        labels = state.labels.clone()
        labels[chosen.clients] = sums.note["label"]
        known = torch.bincount(labels[labels >= 0], minlength=self.k)
        after = State(
            theta=theta,
            labels=labels,
            members=known if sums.members is None else sums.members,
            lr=state.lr,
            refine=state.refine,
            linear=state.linear,
            temperature=self._next_temperature(sums),
            round=state.round + 1,
            kept=kept,
            moved=_moved(state.theta, theta),
        )
        return after, Report(chosen.clients, sums.note["loss"])

    def done(self, state: State) -> bool:
        """Whether least squares are at their fixed point: all further rounds would be the same."""
        return self.solves(state) and self.fraction == 1 and state.moved < STILL

    def doubts(self, state: State, cohort: Cohort) -> Iterator[str]:
        """Whether models were still on their way; those of a sample of the clients always move."""
        if self.fraction == 1 and state.moved * state.round > MOVING:
            yield f"models still moved by {state.moved:.2%} of their distance in the last round: more rounds are needed"

    def solves(self, state: State) -> bool:
        """Whether line 7 is least squares."""
        return state.refine in ("least_squares", "conjugate")

    @client_step
    def normal_step(self, task: Task) -> ClientStep:
        """Lines 6 and 7 at one client, with a hard label: its part of its cluster's normal equations."""

        def run(sent: Params, local: Local) -> Reply:
            j, loss = nearest(task, sent, local.data)  # eq. (8)
            part = _normal(task, take(sent, j), local.data)
            return Reply(part, local.data.mask.sum(), j, {"label": j, "loss": loss})

        return ClientStep(run, secrecy=SECRECY)

    @client_step
    def soft_normal_step(self, task: Task) -> ClientStep:
        """Lines 6 and 7 at one client, with λ by likelihood: its part of all clusters' normal equations."""
        return self._soft(task, lambda theta, data, lr: _normal(task, theta, data))

    @client_step
    def residual_step(self, task: Task) -> ClientStep:
        """Line 6 at one client, and with what conjugate gradients begin: φᵀ(y - φθ), and the diagonal of φᵀφ."""

        def run(sent: Params, local: Local) -> Reply:
            j, loss = nearest(task, sent, local.data)
            phi, off = _rows(task, take(sent, j), local.data)
            part = {"pull": phi.T @ off, "scale": phi.square().sum(0)}
            return Reply(part, slot=j, note={"label": j, "loss": loss})

        return ClientStep(run, secrecy=SECRECY)

    @client_step
    def product_step(self, task: Task) -> ClientStep:
        """A step of conjugate gradients at one client: φᵀφ times its cluster's direction."""

        def run(sent: Towards, local: Local) -> Reply:
            j, _ = nearest(task, sent.theta, local.data)
            phi, _ = _rows(task, take(sent.theta, j), local.data)
            return Reply(phi.T @ (phi @ take(sent.direction, j)), slot=j)

        return ClientStep(run)

    @client_step
    def step(self, task: Task) -> Train:
        """Lines 6 and 7 at one client, with a hard label (eq. 8) and s gradient steps."""
        return Train(self._steps(), self.k, choose=True, weights="size")

    @client_step
    def proximal_step(self, task: Task) -> ClientStep:
        """Lines 6 and 7 at one client, with a hard label and the proximal problem solved exactly."""

        def run(sent: Models, local: Local) -> Reply:
            j, loss = nearest(task, sent.theta, local.data)  # eq. (8)
            end = _solved(task, take(sent.theta, j), local.data, sent.lr)
            return Reply(end, local.data.mask.sum(), j, {"label": j, "loss": loss})

        return ClientStep(run, secrecy=SECRECY)

    @client_step
    def soft_step(self, task: Task) -> ClientStep:
        """Lines 6 and 7 at one client, with λ by likelihood and s gradient steps."""
        steps = self._steps()
        return self._soft(task, lambda theta, data, lr: _less(steps(task, theta, Given(data, lr)).theta, theta))

    @client_step
    def soft_proximal_step(self, task: Task) -> ClientStep:
        """Lines 6 and 7 at one client, with λ by likelihood and the proximal problem solved exactly."""
        return self._soft(task, lambda theta, data, lr: _less(_solved(task, theta, data, lr), theta))

    @client_step
    def curvature(self, task: Task) -> ClientStep:
        """‖φ(x_i)‖²/n_i, from which γ follows."""

        def run(_: Any, local: Local) -> Reply:
            assert task.features is not None
            phi = task.features(local.data.x) * local.data.mask[:, None]
            gram = phi @ phi.T if phi.shape[0] < phi.shape[1] else phi.T @ phi
            return Reply(note={"curvature": torch.linalg.eigvalsh(gram)[-1] / local.data.mask.sum()})

        return ClientStep(run)

    def models(self, state: State) -> Params:
        """Line 2: θ̂."""
        return state.theta

    def labels(self, state: State) -> Tensor:
        """The clusters that clients last chose."""
        return state.labels

    def members(self, state: State) -> Tensor:
        """How many clients each cluster has; where labels are soft and hidden, everybody is in all."""
        return state.members

    def join(self, state: State, newcomers: Cohort) -> State:
        """Line 6 for clients that are new; a step size that was found becomes smaller if they need it."""
        own = self.place_new(state, newcomers)
        return state._replace(
            labels=torch.cat([state.labels, own]),
            members=state.members + torch.bincount(own[own >= 0], minlength=self.k),
            lr=min(state.lr, self._step_size(newcomers.task, newcomers)),
            moved=torch.inf,
        )

    # --- what a client does --------------------------------------------------------------------------------------

    def _steps(self) -> Descend:
        """Line 7 by s gradient steps; those of FedProx are on the local proximal problem."""
        prox = 1 / self.lr if self.refine == "fedprox" and self.lr else 0.0
        return Descend(self.tau, prox=prox, steady=True)

    def _soft(self, task: Task, part: Callable[[Params, Data, Tensor], Any]) -> ClientStep:
        def run(sent: Soft, local: Local) -> Reply:
            rows = local.data.mask.sum()
            losses = vmap(lambda t: mean_loss(task, t, local.data))(sent.theta).nan_to_num(nan=torch.inf)
            above = (losses - losses.amin()) * rows
            share = (-above / sent.temperature.clamp(min=torch.finfo(above.dtype).tiny)).softmax(0)  # λ_i
            each = vmap(lambda t: part(t, local.data, sent.lr))(sent.theta)
            moved = tree_map(lambda x: _times(share, x), each, is_leaf=is_outer)  # Lemma 1: λ weighs all of it
            update = {"moved": moved, "share": share, "loss": _times(share, losses)}
            note = {"label": losses.argmin(), "loss": losses.amin()}
            return Reply(update, rows.expand(self.k), torch.arange(self.k, device=share.device), note)

        return ClientStep(run, secrecy=SECRECY)

    # --- what the server does ------------------------------------------------------------------------------------

    def _settled(self, task: Task, d: int, cohort: Cohort) -> Refine:
        """How line 7 is done; what "auto" has become is in the log."""
        if self.refine in ("fedavg", "fedprox"):
            return self.refine
        name, rows = type(self).__name__, cohort.federation.train.x[:2]
        if self.refine != "auto":
            require_linear(task, rows, f"{name}: refine='{self.refine}'")
            if self.refine == "conjugate" and self.soft:
                raise ValueError(f"{name}: refine='conjugate' takes hard labels only, got soft=True")
            return self.refine
        linear = is_linear(task, rows)
        found = _best(d, soft=self.soft) if linear else "fedavg"
        why = "" if linear else ", for this is no regression that is linear in its parameters"
        cohort.log(f"refine={found}{why}: {_sent(found, d, self.tau)}")
        return found

    def _solve(self, state: State, chosen: Cohort) -> Refined:
        """Lines 5 to 7 by least squares; samples of the clients are remembered for as long as all take a turn."""
        step, sent = self._exchange(state)
        sums = chosen.combine(step, sent, slots=self.k)
        old, total = exact(flat(state.theta)), exact(sums.update["moved"] if self.soft else sums.update)
        gram, pull = total[:, :, :-1], total[:, :, -1]
        kept: Tensor | tuple[()] = ()
        if self.fraction < 1:
            kept = torch.cat([gram, (pull + _times_each(gram, old))[:, :, None]], 2)  # in terms of y, not of residuals
            kept = kept if isinstance(state.kept, tuple) else kept + (1 - self._share(state)) * exact(state.kept)
            gram, pull = kept[:, :, :-1], kept[:, :, -1] - _times_each(kept[:, :, :-1], old)
        return Refined(_changed(state.theta, least_squares(gram, pull)), sums, kept)

    def _conjugate(self, state: State, chosen: Cohort) -> Refined:
        """The same by s conjugate steps; a sample of the clients goes its share of the way, so that rounds average."""
        step, sent = self._exchange(state)
        sums = chosen.combine(step, sent, slots=self.k)

        def times(direction: Tensor) -> Tensor:
            return exact(chosen.combine(self.product_step, Towards(state.theta, direction), slots=self.k).update)

        change = conjugate(times, exact(sums.update["pull"]), exact(sums.update["scale"]), self.tau)
        return Refined(_changed(state.theta, self._share(state) * change), sums)

    def _share(self, state: State) -> float:
        """How much a round counts against those before it: in the end its share of the clients, at first more."""
        return max(self.fraction, 2 / (state.round + 2))

    def _descend(self, state: State, chosen: Cohort) -> Refined:
        """Lines 5 to 7 by gradient steps, or by FedProx."""
        step, sent = self._exchange(state)
        sums = chosen.combine(step, sent, slots=self.k)
        return Refined(self._improve(state.theta, sums, float(chosen.sizes.sum())), sums)

    def _exchange(self, state: State) -> tuple[Step, Params | Models | Soft]:
        """The step of this round, and what clients are sent for it."""
        if state.refine == "conjugate":
            return self.residual_step, state.theta
        if state.refine == "least_squares" and not self.soft:
            return self.normal_step, state.theta
        # The prox term has curvature 1/η: half steps of it converge for any loss that is less curved.
        by_steps = state.refine == "fedprox" and not state.linear
        lr = torch.tensor(state.lr / 2 if by_steps else state.lr)
        if not self.soft:
            return self.proximal_step if state.linear else self.step, Models(state.theta, lr)
        steps = self.soft_proximal_step if state.linear else self.soft_step
        sent = Soft(state.theta, lr, torch.tensor(state.temperature))
        return self.soft_normal_step if self.solves(state) else steps, sent

    def _improve(self, theta: Params, sums: Sums, everybody: float) -> Params:
        """Line 7: Σ w_i θ_{i,t}; a model that nobody refined stays as it is."""

        def column(x: Tensor, like: Tensor) -> Tensor:
            return x.reshape(-1, *[1] * (like.dim() - 1))

        if self.soft:
            moved, members = sums.update["moved"], sums.update["share"]
        else:
            moved, members = tree_map(lambda x, p: x - column(sums.weight, p) * p, sums.update, theta), sums.weight
        by = members if self.normalise == "cluster" else torch.full_like(members, everybody)
        by = by.clamp(min=torch.finfo(by.dtype).tiny)
        return tree_map(lambda x, p: torch.where(column(members, p) > 0, p + x / column(by, p), p), moved, theta)

    def _next_temperature(self, sums: Sums) -> float:
        if not self.soft:
            return 0.0
        if self.temperature is not None:
            return self.temperature
        return float(2 * sums.update["loss"].sum() / sums.weight[0])

    def _step_size(self, task: Task, cohort: Cohort) -> float:
        if self.lr is not None:
            return self.lr
        require_linear(task, cohort.federation.train.x[:2], f"{type(self).__name__}: where no lr is given")
        return GAMMA / 2 / float(cohort.gather(self.curvature, ()).note["curvature"].max())


def _best(d: int, *, soft: bool) -> Refine:
    """The least squares that send little enough for d parameters; those by conjugate gradients know no soft labels."""
    if d <= LARGEST:
        return "least_squares"
    return "fedavg" if soft else "conjugate"


def _sent(refine: Refine, d: int, tau: int) -> str:
    """What a client sends, for the log."""
    if refine == "least_squares":
        return f"{d * (d + 1)} numbers up per client and round, until models no longer move"
    if refine == "conjugate":
        return f"{(tau + 2) * d} numbers up per client and round, in {tau + 1} exchanges, until models no longer move"
    return f"{d} numbers up per client and round"


def _moved(old: Params, new: Params) -> float:
    """The longest way that a model went, over the distance of models from their mean; of one model, its length."""
    before, after = exact(flat(old)), exact(flat(new))
    apart = after - after.mean(0)
    far = apart if bool(apart.any()) else after
    return float((after - before).norm(dim=1).max() / far.norm(dim=1).max().clamp(min=1e-300))


def _changed(theta: Params, change: Tensor) -> Params:
    """Models (k, …) after a change (k, d) in float64."""
    old = flat(theta)
    return unflat((exact(old) + change).to(old), take(theta, 0))


def _times_each(matrices: Tensor, vectors: Tensor) -> Tensor:
    return (matrices @ vectors[:, :, None])[:, :, 0]


def _rows(task: Task, theta: Params, data: Data) -> tuple[Tensor, Tensor]:
    """φ (n, d) and y - ⟨φ, θ⟩ (n,) of a client's rows, as float64: what is solved for are differences of their sums."""
    phi = (features(task, data) * data.mask[:, None]).double()
    return phi, residuals(phi, data, flat(theta, 0)[None].double())[:, 0]


def _normal(task: Task, theta: Params, data: Data) -> Outer:
    """φᵀφ and φᵀ(y - φθ) side by side (d, d + 1), over a client's number of rows, by which it counts."""
    phi, off = _rows(task, theta, data)
    return Outer(phi / data.mask.sum(), torch.cat([phi, off[:, None]], 1))


def _less(end: Params, begin: Params) -> Params:
    return tree_map(torch.sub, end, begin)


def _times(share: Tensor, x: Tensor | Outer) -> Any:
    """Each model's part (k, …) times its λ; nothing of a model that has none, not even if it has diverged."""
    if isinstance(x, Outer):
        return Outer(_times(share, x.left), x.right)
    share = share.reshape(-1, *[1] * (x.dim() - 1))
    return torch.where(share > 0, share * x, 0.0)


def _solved(task: Task, theta: Params, data: Data, lr: Any) -> Params:
    """The solution of the local proximal problem, for squared loss and a model that is linear in its parameters."""
    assert task.features is not None  # `is_linear` has been tried
    phi, n = task.features(data.x) * data.mask[:, None], data.mask.sum()
    off = (phi @ flat(theta, 0) - data.y.reshape(-1)) * data.mask
    return unflat(flat(theta, 0) - proximal(phi, off, 2 * lr / n), theta)


def proximal(phi: Tensor, off: Tensor, eta: Tensor) -> Tensor:
    """Lemma 1: η φᵀ(I + ηφφᵀ)⁻¹ off, how far the proximal problem's solution lies from where it began.

    Example:
        >>> phi, off = torch.tensor([[2.0], [0.0]]), torch.tensor([1.0, 3.0])
        >>> proximal(phi, off, torch.tensor(0.5))  # 0.5 · 2 · 1 / (1 + 0.5 · 4)
        tensor([0.3333])
    """
    n, d = phi.shape
    if n <= d:
        kernel = torch.eye(n, device=phi.device, dtype=phi.dtype) + eta * (phi @ phi.T)
        return eta * (phi.T @ torch.linalg.solve(kernel, off))
    kernel = torch.eye(d, device=phi.device, dtype=phi.dtype) + eta * (phi.T @ phi)
    return eta * torch.linalg.solve(kernel, phi.T @ off)
