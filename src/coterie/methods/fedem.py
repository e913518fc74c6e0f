"""FedEM: every client's rows are a mixture of k distributions that all clients share, in shares of its own.

Federated Multi-Task Learning under a Mixture of Distributions
    Othmane Marfoq, Giovanni Neglia, Aurélien Bellet, Laetitia Kameni, Richard Vidal. NeurIPS 2021, Algorithm 1.

Line numbers in the comments are those of Algorithm 1. Its M components are our k clusters, its tasks our clients. Two
things are done otherwise than printed:

* Line 6 is one step from the shares π_t of the last round, which clients keep. Ours are found anew in every round, by
  some steps from the shares of all clients (`parts/mixture.py`). They follow from what is sent and the rows alone:
  nothing has to be kept, and a client that has been away, or is new, is treated as all others are.
* Line 7 divides the weighted losses by all n_t rows, and line 10 weighs clients by n_t: a component's model moves as
  far as its share of all rows. We divide by the rows that the component has, and weigh by these. With one local step
  the direction is the same, and the length does not depend on how common a component is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.core.cohort import Cohort
from coterie.core.key import Key
from coterie.core.local import each_model
from coterie.core.method import Method, Needs, Report, Served
from coterie.core.pytree import Params, tree_map
from coterie.core.registry import register
from coterie.core.settings import setting
from coterie.core.step import ClientStep, Local, Reply, Step, client_step
from coterie.core.sums import Sums, slot_mean
from coterie.core.task import SHARE, Data, Task
from coterie.core.train import SECRECY, Given, Models, Train
from coterie.parts.local_training import LocalTraining
from coterie.parts.mixture import joint, own_shares
from coterie.parts.server_step import ServerStep
from coterie.parts.starts import Start, find_start
from coterie.parts.tournament import Tournament

TINY = torch.finfo(torch.float32).tiny
LEAST = 1e-3  # share of all rows that every component is given


class Sent(NamedTuple):
    """Line 2: what clients are sent."""

    theta: Params  # (k, …)
    share: Tensor  # of each component in the rows of all clients (k,)
    temperature: Tensor
    lr: Tensor


class State(NamedTuple):
    """What FedEM knows after a round."""

    theta: Params  # the components' models θ_m (k, …)
    share: (
        Tensor  # of each component in the rows of all who last took part, or in all clients if these count alike (k,)
    )
    labels: Tensor  # the component that each client last had most rows of (m,), -1 if never or hidden
    members: Tensor  # clients with each label (k,); where labels are hidden, all who took part
    temperature: float  # what a row's loss is divided by to be -log of its likelihood
    round: int
    moments: Any = ()  # what the server's optimiser remembers


class Mixed(NamedTuple):
    """What a client's rows say about k models."""

    own: Tensor  # q: how much of each row every component has (k, n), 0 for padding
    share: Tensor  # π: the client's shares (k,)
    loss: Tensor  # -log of the mixture's likelihood times the temperature, the mean over the rows


@register("fedem")
@dataclass(frozen=True)
class FedEM(LocalTraining, ServerStep, Method):
    """Alternate between telling which component each row is of and improving every component's model by its rows.

    A client is served by the mixture of all k models in its own shares.

    Args:
        k: Number of components.
        init: The start, as for `IFCA`; None takes the tournament, which places whole clients.
        temperature: What the loss of a row is divided by to be -log of its likelihood: 1 for cross-entropy, 2σ² for
            squared loss. None takes 1, and for squared loss learns σ² from the residuals; the first round is then
            one of hard choices.

    Example:
        >>> import coterie as ct
        >>> federation = ct.data.mixture(ct.data.permuted_digits(clients=16, groups=2, seed=0), p=0.5)
        >>> task = ct.Task.classifier(ct.models.MLP(64, 32, 10))
        >>> run = ct.fit(ct.FedEM(k=2, lr=0.3), task, federation, rounds=20, seed=0)
        >>> len(run.models), run.scores.mean > 0.6
        (2, True)
    """

    needs = Needs(soft=True)
    quick = {"init": Tournament(steps=4, bouts=1)}

    k: int = setting(low=1)
    init: str | Start | Sequence[Params] | None = None
    temperature: float | None = setting(None, low=0)

    def start(self, task: Task, cohort: Cohort, key: Key) -> State:
        """The initial models."""
        if self.k > cohort.population:
            raise ValueError(f"FedEM: k must be at most the number of clients, {cohort.population}, got {self.k}")
        if task.personal:
            raise ValueError(
                "FedEM: with batch_norm='local' a client keeps one set of parameters, but it trains k models"
            )
        draw = find_start("tournament" if self.init is None else self.init, self.k)
        theta = draw(self.k, self.lr, task, cohort, key)
        never, none = torch.full((cohort.population,), -1), torch.zeros(self.k, dtype=torch.long)
        first = 0.0 if _is_squared(task) else 1.0
        temperature = first if self.temperature is None else self.temperature
        even = _shares(torch.ones(self.k))
        return State(theta, even, never, none, temperature, 0, self.begin_server(theta, task))

    def round(self, state: State, cohort: Cohort) -> tuple[State, Report]:
        """Lines 2 to 10."""
        chosen = cohort.sample(self.fraction)
        sums = chosen.combine(self.step, self._broadcast(state), slots=self.k)  # lines 2-8
        change = sums._replace(update=sums.update["moved"])
        mean = tree_map(
            torch.add, state.theta, slot_mean(change, tree_map(torch.zeros_like, state.theta))
        )  # lines 9-10
        theta, moments = self.advance(state.theta, mean, sums.weight, state.moments, cohort.task)
        labels = state.labels.clone()
        labels[chosen.clients] = sums.note["label"]
        after = State(
            theta=theta,
            share=_shares(sums.weight.cpu()),
            labels=labels,
            members=self._counted(labels) if sums.members is None else sums.members,
            temperature=self._next_temperature(state, sums, cohort.task),
            round=state.round + 1,
            moments=moments,
        )
        return after, Report(chosen.clients, sums.note["loss"])

    @client_step
    def step(self, task: Task) -> ClientStep:
        """Lines 4 to 8 at one client."""
        descend = self.descend()

        def run(sent: Sent, local: Local) -> Reply:
            losses = _losses(task, sent.theta, local.data)
            mixed = mixture(losses, local.data.mask, sent.share, sent.temperature)  # lines 5 and 6
            draws = local.draws if isinstance(local.draws, dict) else {}

            def solve(theta: Params, own: Tensor, moments: Any) -> tuple[Params, Any]:  # line 7
                rows = local.data._replace(mask=own)  # a row counts as much as the component has of it
                given = Given(rows, sent.lr, draws.get("batches"), draws.get("noise"), moments or None)
                updated = descend(task, theta, given)
                return updated.theta, updated.moments if descend.optimiser.keep else ()

            kept = local.memory["moments"] if isinstance(local.memory, dict) else ()
            theta, moments = each_model(solve)(sent.theta, mixed.own, kept)
            rows, mass = local.data.mask.sum(), mixed.own.sum(1)
            loss = _component_losses(mixed.own, losses, local.data.y[0].numel())
            return Reply(
                update={"moved": tree_map(torch.sub, theta, sent.theta), "loss": loss},
                weight=mass if self.weights == "size" else mass / rows.clamp(min=1),
                slot=torch.arange(self.k, device=mass.device),
                note={"label": mixed.share.argmax(), "loss": mixed.loss},
                memory={"moments": moments} if moments else (),
            )

        return ClientStep(run, Train(descend).derive(task).draw, SECRECY, self.weights)

    @client_step
    def mix(self, task: Task) -> ClientStep:
        """A client's own model: all k, mixed by its shares in them."""

        def run(sent: Sent, local: Local) -> Reply:
            share = self._share(task, sent, local.data)
            return Reply(Models({**sent.theta, SHARE: share}, label=share.argmax()))

        return ClientStep(run)

    @client_step
    def choose(self, task: Task) -> ClientStep:
        """The component that a client has most of."""
        return ClientStep(lambda sent, local: Reply(slot=self._share(task, sent, local.data).argmax()))

    def own_model(self) -> Step:
        """Clients mix the models by themselves."""
        return self.mix

    def served(self, state: State) -> Served:
        """All models, as in a round."""
        return Served(self._broadcast(state), whole=True)

    def models(self, state: State) -> Params:
        """The models of the components."""
        return state.theta

    def labels(self, state: State) -> Tensor:
        """The components that clients last had most rows of."""
        return state.labels

    def members(self, state: State) -> Tensor:
        """How many clients have most of each component; where that is hidden, everybody is in all."""
        return state.members

    def place(self, state: State, cohort: Cohort) -> Tensor:
        """The component that each client of the cohort has most of."""
        return cohort.gather(self.choose, self._broadcast(state), slots=self.k).slot

    def assign(self, state: State, task: Task, data: Data) -> int:
        """The component that a client has most of, which may have taken no part in training."""
        return int(self.shares(state, task, data).argmax())

    def shares(self, state: State, task: Task, data: Data) -> Tensor:
        """π: how much of each component is in a client's rows (k,), which only who has these can tell."""
        return self._share(task, self._broadcast(state), data)

    def join(self, state: State, newcomers: Cohort) -> State:
        """Shares are found anew in every round; only the label is noted, where the server knows the others'."""
        known = bool((state.labels >= 0).any())
        own = self.place(state, newcomers) if known else torch.full((len(newcomers),), -1)
        return state._replace(labels=torch.cat([state.labels, own]), members=state.members + self._counted(own))

    # --- the parts of a round ----------------------------------------------------------------------------------------

    def _broadcast(self, state: State) -> Sent:
        """Line 2."""
        return Sent(state.theta, state.share, torch.tensor(state.temperature), self.step_size(state.round))

    def _share(self, task: Task, sent: Sent, data: Data) -> Tensor:
        return mixture(_losses(task, sent.theta, data), data.mask, sent.share, sent.temperature).share

    def _counted(self, labels: Tensor) -> Tensor:
        return torch.bincount(labels[labels >= 0], minlength=self.k)

    def _next_temperature(self, state: State, sums: Sums, task: Task) -> float:
        """2σ² by the residuals of this round, where it is learnt."""
        if self.temperature is not None or not _is_squared(task):
            return state.temperature
        return float(2 * sums.update["loss"].sum() / sums.weight.sum())


def mixture(losses: Tensor, mask: Tensor, share: Tensor, temperature: Tensor) -> Mixed:
    """Lines 5 and 6 until the shares are nearly at rest: q_m ∝ π_m exp(-loss_m / temperature) for each row, π = mean q.

    Args:
        losses: Of each row under each of k models (k, n).
        mask: 1 for a real row (n,).
        share: The shares of all clients (k,), near which those of a client with few rows stay.
        temperature: Makes a loss -log of a likelihood; 0 gives every row to the model that serves it best.

    Example:
        >>> losses = torch.tensor([[0.1, 0.1, 9.0, 9.0], [9.0, 9.0, 0.1, 9.0]])
        >>> found = mixture(losses, torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.tensor([0.5, 0.5]), torch.tensor(1.0))
        >>> found.own.round().tolist(), bool(found.share[0] > found.share[1])
        ([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]], True)
    """
    losses = losses.nan_to_num(nan=torch.inf, posinf=torch.inf)
    least = losses.amin(0)
    above = (losses - least).nan_to_num(nan=0.0, posinf=torch.inf)  # of the best model, which need not be finite
    temperature, share = (x.to(losses) for x in (temperature.clamp(min=TINY), share))
    own = own_shares(above / temperature, share, mask)
    both = joint(above / temperature, own)
    each = least - temperature * both.logsumexp(0)
    return Mixed(both.softmax(0) * mask, own, (each * mask).sum() / mask.sum().clamp(min=1))


def _shares(weight: Tensor) -> Tensor:
    """Shares by weights (k,). None is 0: a component that nobody has now may be somebody's later."""
    share = (weight / weight.sum()).clamp(min=LEAST)
    return share / share.sum()


def _losses(task: Task, theta: Params, data: Data) -> Tensor:
    """Of each row under each model (k, n)."""
    return each_model(lambda t: task.loss(t, data))(theta)


def _component_losses(own: Tensor, losses: Tensor, outputs: int) -> Tensor:
    """The mean loss of the rows that each component has (k,), for one output."""
    total = torch.where(own > 0, own * losses, 0.0).sum(1)
    return total / own.sum(1).clamp(min=TINY) / outputs


def _is_squared(task: Task) -> bool:
    """Whether the loss is squared, so that its scale is not that of a likelihood."""
    return task.features is not None
