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

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from coterie.core.cohort import Cohort
from coterie.core.features import is_linear, require_linear
from coterie.core.key import Key
from coterie.core.local import nearest
from coterie.core.method import Coefficient, Groups, Report
from coterie.core.pytree import Params, flat, stacked, take, tree_map, unflat
from coterie.core.registry import register
from coterie.core.settings import setting
from coterie.core.step import ClientStep, Local, Reply, Step, client_step
from coterie.core.sums import Sums
from coterie.core.task import Data, Task
from coterie.core.train import SECRECY, Descend, Given, Models, Train
from coterie.parts.choosing import Choosing
from coterie.parts.effects import names_of
from coterie.parts.least_squares import Kept, LeastSquares, Solver, moved, standard_errors
from coterie.parts.residuals import features
from coterie.parts.soft_labels import Soft, softly
from coterie.parts.starts import FarthestFirst, Start, find_start

GAMMA = 0.9  # γ of Section 4.2 for the step size that is found: it must stay below 1
STILL = 1e-6  # of the models' distance: with less a round moves none
MOVING = 0.05  # of the models' distance, that as many rounds again would move one

Refine = Literal["auto", "least_squares", "conjugate", "fedavg", "fedprox"]
Way = Solver | Literal["fedavg", "fedprox", "proximal"]  # the last is FedProx in closed form


class State(NamedTuple):
    """What FedX knows after a round."""

    theta: Params  # the cluster models θ_j (k, …)
    labels: Tensor  # each client's last cluster (m,), -1 where it has never taken part or it is hidden
    members: Tensor  # clients of each cluster (k,): by the labels or, where these are hidden, of the last round
    lr: float  # the step size, in terms of the task's own loss
    refine: Way  # how line 7 is done
    temperature: float  # that of soft labels, 0 for hard ones
    round: int
    kept: Kept  # φᵀφ and φᵀy of samples of the clients so far, older ones less (k, d, d + 1)
    moved: float  # how far the last round moved a model, as a part of how far models are apart; infinite at first
    errors: Tensor | tuple[()] = ()  # standard errors of θ_j by least squares (k, d), where all clients took part


@register("fedx")
@dataclass(frozen=True)
class FedX(LeastSquares, Choosing):
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
        refine = self._way(task, flat(theta).shape[1], cohort)
        return State(theta, never, none, lr, refine, self.temperature or 0.0, 0, (), torch.inf)

    def round(self, state: State, cohort: Cohort) -> tuple[State, Report]:
        """Lines 5 to 7."""
        chosen = cohort.sample(self.fraction)
        step, sent = self._exchange(state)
        sums = chosen.combine(step, sent, slots=self.k)
        theta, kept = self._refined(state, sums, chosen)
        labels = state.labels.clone()
        labels[chosen.clients] = sums.note["label"]
        known = torch.bincount(labels[labels >= 0], minlength=self.k)
        after = State(
            theta=theta,
            labels=labels,
            members=known if sums.members is None else sums.members,
            lr=state.lr,
            refine=state.refine,
            temperature=self._next_temperature(sums),
            round=state.round + 1,
            kept=kept,
            moved=moved(state.theta, theta),
            errors=self._errors(state, sums, chosen),
        )
        return after, Report(chosen.clients, sums.note["loss"])

    def done(self, state: State) -> bool:
        """Whether least squares are at their fixed point: all further rounds would be the same."""
        return self.solves(state) and self.fraction == 1 and state.moved < STILL

    def doubts(self, state: State, cohort: Cohort) -> Iterator[str]:
        """Whether models were still on their way; those of a sample of the clients always move."""
        if self.fraction == 1 and state.moved * state.round > MOVING:
            yield f"models still moved by {state.moved:.2%} of their distance in the last round: more rounds are needed"

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
        return softly(task, self.k, lambda theta, data, lr: _less(steps(task, theta, Given(data, lr)).theta, theta))

    @client_step
    def soft_proximal_step(self, task: Task) -> ClientStep:
        """Lines 6 and 7 at one client, with λ by likelihood and the proximal problem solved exactly."""
        return softly(task, self.k, lambda theta, data, lr: _less(_solved(task, theta, data, lr), theta))

    @client_step
    def curvature(self, task: Task) -> ClientStep:
        """‖φ(x_i)‖²/n_i, from which γ follows."""

        def run(_: Any, local: Local) -> Reply:
            phi = features(task, local.data) * local.data.mask[:, None]
            gram = phi @ phi.T if phi.shape[0] < phi.shape[1] else phi.T @ phi
            return Reply(note={"curvature": torch.linalg.eigvalsh(gram)[-1] / local.data.mask.sum()})

        return ClientStep(run)

    def models(self, state: State) -> Params:
        """Line 2: θ̂."""
        return state.theta

    def labels(self, state: State) -> Tensor:
        """The clusters that clients last chose."""
        return state.labels

    def coefficients(self, state: State) -> list[Coefficient]:
        """Every parameter of models that least squares find, with standard errors where these are known."""
        if state.refine != "least_squares":
            return []
        names, theta = names_of(take(state.theta, 0)), flat(state.theta)
        errors = state.errors if isinstance(state.errors, Tensor) else None
        return [
            Coefficient(name, j, float(theta[j, i]), None if errors is None else _finite(float(errors[j, i])))
            for j in range(len(theta))
            for i, name in enumerate(names)
        ]

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

    def adopt(self, state: State, groups: Groups, task: Task) -> tuple[FedX, State]:
        """Models and labels are replaced; what is kept of samples of the clients, if their clusters are."""
        known, k = groups.labels[groups.labels >= 0], stacked(groups.models)
        return replace(self, k=k), state._replace(
            theta=groups.models,
            labels=groups.labels,
            members=torch.bincount(known, minlength=k),
            kept=state.kept if k == self.k else (),
            moved=torch.inf,
            errors=(),
        )

    def grows(self) -> bool:
        """Any k will do."""
        return True

    # --- the parts of a round ------------------------------------------------------------------------------------

    def _way(self, task: Task, d: int, cohort: Cohort) -> Way:
        """How line 7 is done for this task and models of d parameters."""
        if self.refine == "fedprox":
            return "proximal" if is_linear(task, cohort.federation.train.x[:2]) else "fedprox"
        return "fedavg" if self.refine == "fedavg" else self.settled(self.refine, task, d, cohort)

    def _steps(self) -> Descend:
        """Line 7 by s gradient steps; those of FedProx are on the local proximal problem."""
        prox = 1 / self.lr if self.refine == "fedprox" and self.lr else 0.0
        return Descend(self.tau, prox=prox, steady=True)

    def _exchange(self, state: State) -> tuple[Step, Params | Models | Soft]:
        """Line 5: the step of this round, and what clients are sent for it."""
        # The prox term has curvature 1/η: half steps of it converge for any loss that is less curved.
        lr = torch.tensor(state.lr / 2 if state.refine == "fedprox" else state.lr)
        if self.soft:
            soft = {"least_squares": self.soft_normal_step, "proximal": self.soft_proximal_step}
            return soft.get(state.refine, self.soft_step), Soft(state.theta, lr, torch.tensor(state.temperature))
        if self.solves(state):
            return self.normal_step if state.refine == "least_squares" else self.residual_step, state.theta
        return self.proximal_step if state.refine == "proximal" else self.step, Models(state.theta, lr)

    def _refined(self, state: State, sums: Sums, chosen: Cohort) -> tuple[Params, Kept]:
        """Line 7 at the server: the models, and what least squares keep of a sample of the clients."""
        share = max(self.fraction, 2 / (state.round + 2))  # of a round against those before it: at first more
        if state.refine == "least_squares":
            return self.solve(state.theta, sums, state.kept, share)
        if state.refine == "conjugate":
            return self.approach(state.theta, sums, share, chosen), ()
        return self._improve(state.theta, sums, float(chosen.sizes.sum())), ()

    def _errors(self, state: State, sums: Sums, chosen: Cohort) -> Tensor | tuple[()]:
        """Standard errors of least squares, as if clusters were known: from the sums that models are solved from."""
        label = sums.note["label"].cpu()
        if state.refine != "least_squares" or self.soft or self.fraction < 1 or bool((label < 0).any()):
            return ()
        return standard_errors(sums, label, chosen.sizes, self.k)

    def _improve(self, theta: Params, sums: Sums, everybody: float) -> Params:
        """Line 7: Σ w_i θ_{i,t}; a model that nobody refined stays as it is."""

        def column(x: Tensor, like: Tensor) -> Tensor:
            return x.reshape(-1, *[1] * (like.dim() - 1))

        if self.soft:
            change, members = sums.update["moved"], sums.update["share"]
        else:
            change, members = tree_map(lambda x, p: x - column(sums.weight, p) * p, sums.update, theta), sums.weight
        by = members if self.normalise == "cluster" else torch.full_like(members, everybody)
        by = by.clamp(min=torch.finfo(by.dtype).tiny)
        return tree_map(lambda x, p: torch.where(column(members, p) > 0, p + x / column(by, p), p), change, theta)

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


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _less(end: Params, begin: Params) -> Params:
    return tree_map(torch.sub, end, begin)


def _solved(task: Task, theta: Params, data: Data, lr: Any) -> Params:
    """The solution of the local proximal problem, for squared loss and a model that is linear in its parameters."""
    phi, n = features(task, data) * data.mask[:, None], data.mask.sum()
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
