"""MixedEffects: a mixture of random effects, between one model for all, groups of clients, and one model each.

Random-Effects Models for Longitudinal Data
    Nan M. Laird, James H. Ware. Biometrics 1982 (k = 1).
A Linear Mixed-Effects Model With Heterogeneity in the Random-Effects Population
    Geert Verbeke, Emmanuel Lesaffre. JASA 1996 (k > 1).

A client's parameters are a draw, θ_i ~ Σ_j π_j N(μ_j, Σ), and y = φ(x)θ_i + noise of variance σ². Σ = 0 is a
clustering, k = 1 a linear mixed model, a very wide Σ one model each. A round is an iteration of EM. Equation numbers in
the comments are those of docs/methods/mixed_effects.md; throughout, f is the fits that go side by side (starts, and
numbers of components), k the components, d the parameters, m the clients.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from coterie.core.cohort import Cohort
from coterie.core.features import is_linear, is_linear_classifier
from coterie.core.key import Key
from coterie.core.method import Method, Needs, Report, Served
from coterie.core.pytree import Outer, Params, exact, take, tree_map, unflat
from coterie.core.registry import register
from coterie.core.settings import setting
from coterie.core.step import ClientStep, Local, Reply, Step, client_step
from coterie.core.sums import Sums
from coterie.core.task import Data, Task
from coterie.core.train import Models
from coterie.parts.effects import Effects
from coterie.parts.laplace import laplace, linearised
from coterie.parts.random_effects import (
    Frame,
    Mixture,
    Posterior,
    Rows,
    bic,
    contribution,
    first_mixture,
    framed,
    maximised,
    parameters,
    posterior,
    scattered,
    seeds,
    started,
    turned,
)
from coterie.parts.residuals import values_of

LARGEST = 50  # parameters up to which Σ is full by default
FIRST = 30  # iterations at most of the one-component fit that others start from
ROUGH = 0.1  # of its log-likelihood: with less gain in an iteration it has arrived
MANY = 3  # components, for each that is looked for, among whose centres starts are chosen
SCATTERS = 3  # times that these are drawn
FAR = 50  # rounds as good as the last that a fit would need to become the best: it is given up
HALVING = 4  # rounds after which the worse half of the starts is given up, and again


class Sent(NamedTuple):
    """What clients are sent."""

    mixture: Mixture
    frame: Frame


class State(NamedTuple):
    """What is known after a round."""

    mixture: Mixture  # of all fits that are still going
    size: Tensor  # the components of each (f,)
    loglik: Tensor  # of each, before the last M-step (f,)
    gain: Tensor  # of the log-likelihood, in the last round (f,)
    bics: Tensor  # the lowest of fits with 1, 2, … components so far
    information: Tensor  # that the last round had about each μ (f, k, d, d), or the diagonal of it (f, k, d)
    frame: Frame
    like: Params  # a model, for the shapes of its parameters
    noisy: bool  # whether σ² is a parameter: not of a classifier
    labels: Tensor  # each client's likeliest component in the best fit (m,), -1 where it is hidden
    round: int
    done: bool


@register("mixed_effects")
@dataclass(frozen=True)
class MixedEffects(Method):
    """Learn how clients' linear models vary: between k groups, within them, and by noise.

    Every client's own model is its posterior mean, computed where its rows are. The server gets nothing but sums.

    Args:
        k: Components; "auto" takes the number with the lowest BIC, up to `at_most`.
        covariance: Of the parameters within a component: "full", "diagonal", or "auto": full up to 50 parameters.
        tied: Whether all components have one Σ, or each its own.
        restarts: Starts for each k > 1 that run side by side; every four rounds the less likely half is given up.
        at_most: The largest k that "auto" tries.
        tol: The run ends once no fit gains more log-likelihood in a round, summed over all clients. What is far below 1
            is within standard errors.

    Example:
        >>> import coterie as ct
        >>> federation = ct.data.mixed_regression(k=2, d=5, pairs=50, rest=50, anchors=4)
        >>> task = ct.Task.regressor(ct.models.Linear(5, 1))
        >>> run = ct.fit(ct.MixedEffects(k="auto"), task, federation, rounds=60, evaluations=1)
        >>> len(run.models), run.ari > 0.9
        (2, True)
    """

    needs = Needs(linear=True)
    quick = {"restarts": 2}

    k: int | Literal["auto"] = setting(1, low=1)
    covariance: Literal["auto", "full", "diagonal"] = "auto"
    tied: bool = True
    restarts: int = setting(16, low=1)
    at_most: int = setting(6, low=1)
    tol: float = setting(5e-3, low=0)

    def start(self, task: Task, cohort: Cohort, key: Key) -> State:
        """Units in which features are alike, one model for all in them, and the starts of every fit."""
        sizes, like = self._sizes(task, cohort), task.init(Key.of(0))
        frame, one = self._framed(sum(x.numel() for x in like.values()), cohort)
        fits = [one] if sizes == [1] else self._starts(sizes, Sent(one, frame), cohort, key)
        mixture: Mixture = tree_map(lambda *xs: torch.cat(xs), *fits)
        if not self.tied:
            mixture = mixture._replace(factor=mixture.factor.repeat_interleave(max(sizes), 1))
        size = torch.tensor([k for k, fit in zip(sizes, fits, strict=True) for _ in fit.noise])
        unknown = torch.full(size.shape, -torch.inf, dtype=torch.float64)
        none = torch.zeros_like(
            mixture.mean if mixture.diagonal else mixture.mean[..., None] * mixture.mean[..., None, :]
        )
        bics = torch.full((max(sizes),), torch.inf, dtype=torch.float64)
        labels, noisy = torch.full((cohort.population,), -1), self._noise(task) is None
        return State(mixture, size, unknown, -unknown, bics, none, frame, like, noisy, labels, 0, False)

    def round(self, state: State, cohort: Cohort) -> tuple[State, Report]:
        """One iteration of EM, for all fits."""
        sent = Sent(turned(state.mixture, state.round), state.frame)
        sums = cohort.combine(self.step, sent)
        total = _total(sums)
        after = state._replace(
            mixture=self._improved(sent.mixture, total, cohort.task),
            loglik=total["loglik"],
            gain=total["loglik"] - exact(state.loglik),
            information=total["information"],
            round=state.round + 1,
        )
        best = self.best(after)
        after = after._replace(bics=state.bics.cpu().scatter_reduce(0, after.size - 1, self.criterion(after), "amin"))
        labels = state.labels.clone()
        labels[cohort.clients] = sums.note["component"][:, best]
        return self._pruned(after._replace(labels=labels), cohort), Report(cohort.clients, sums.note["loss"][:, best])

    def done(self, state: State) -> bool:
        """Whether all fits have arrived."""
        return state.done

    def doubts(self, state: State, cohort: Cohort) -> Iterator[str]:
        """Whether EM was still on its way."""
        if (gain := float(state.gain[self.best(state)])) > ROUGH and state.round > 1:
            yield f"the log-likelihood still rose by {gain:.2g} in the last round: more rounds are needed"

    # --- what clients do ---------------------------------------------------------------------------------------------

    @client_step
    def scales(self, task: Task) -> ClientStep:
        """The logs of the sizes of features and targets, which may be anything."""

        def run(_: Any, local: Local) -> Reply:
            values = _values(task, local.data).square().sum(0) / local.data.mask.sum()
            seen = (values > 0).double()
            return Reply({"log": 0.5 * values.clamp(min=torch.finfo(values.dtype).tiny).log() * seen, "seen": seen})

        return ClientStep(run)

    @client_step
    def moments(self, task: Task) -> ClientStep:
        """Second moments of features and targets that are divided by their sizes."""

        def run(size: Tensor, local: Local) -> Reply:
            values = _values(task, local.data) / size
            return Reply({"moments": Outer(values, values), "rows": local.data.mask.sum().double()})

        return ClientStep(run)

    @client_step
    def step(self, task: Task) -> ClientStep:
        """The E-step: what the client adds to the sums of every fit."""

        def run(sent: Sent, local: Local) -> Reply:
            rows, found = _known(task, sent, local.data)
            each = found.loglik / rows.number.clamp(min=1) - sent.frame.unit.log()
            note = {"component": found.evidence.argmax(-1), "loss": -each}
            return Reply(contribution(sent.mixture, rows, found), note=note)

        return ClientStep(run, secrecy={"component": "hidden", "loss": "mean"})

    @client_step
    def own(self, task: Task) -> ClientStep:
        """The client's posterior mean, and its likeliest component."""
        like = task.init(Key.of(0))

        def run(sent: Sent, local: Local) -> Reply:
            _, found = _known(task, sent, local.data)
            theta = sent.frame.parameters(found.mean(sent.mixture)[0])
            return Reply(Models(unflat(theta.to(local.data.mask), like), label=found.evidence[0].argmax()))

        return ClientStep(run)

    @client_step
    def choose(self, task: Task) -> ClientStep:
        """The client's likeliest component."""

        def run(sent: Sent, local: Local) -> Reply:
            return Reply(slot=_known(task, sent, local.data)[1].evidence[0].argmax())

        return ClientStep(run)

    # --- what was learnt ---------------------------------------------------------------------------------------------

    def best(self, state: State) -> int:
        """The fit to keep, by BIC."""
        return int(self.criterion(state).argmin())

    def criterion(self, state: State) -> Tensor:
        """The BIC of every fit (f,)."""
        d, diagonal = state.mixture.mean.shape[-1], state.mixture.diagonal
        free = parameters(state.size, d, diagonal=diagonal, own=not self.tied)
        return bic(state.loglik.cpu(), free, len(state.labels))

    def fitted(self, state: State) -> Mixture:
        """The best fit alone, without components that it does not have (f = 1)."""
        at = self.best(state)
        one: Mixture = take(state.mixture, torch.tensor([at]))
        k = int(state.size[at])
        return one._replace(share=one.share[:, :k], mean=one.mean[:, :k], factor=one.factor[:, :k])

    def models(self, state: State) -> Params:
        """μ_j."""
        theta = state.frame.parameters(self.fitted(state).mean[0])
        return unflat(theta.to(next(iter(state.like.values()))), state.like)

    def effects(self, state: State) -> Effects:
        """What was learnt in the units of the data: μ with standard errors, Σ, σ², and shares of variation."""
        mixture, at = self.fitted(state), self.best(state)
        known = state.information[at][: mixture.mean.shape[1]]
        mixture, known, frame = tree_map(exact, (mixture, known, state.frame))
        return Effects.of(mixture, known, frame, state.like, noisy=state.noisy)

    def report(self, state: State) -> str:
        """The effects as a table."""
        return str(self.effects(state))

    def labels(self, state: State) -> Tensor:
        """Every client's likeliest component, -1 where a secure sum hides it."""
        return state.labels

    def members(self, state: State) -> Tensor:
        """How many clients each component has; where labels are hidden, as π says."""
        if bool((state.labels >= 0).any()):
            return super().members(state)
        return (self.fitted(state).share[0].cpu() * len(state.labels)).round().long()

    def served(self, state: State) -> Served:
        """The best fit, of which every client makes its own model."""
        return Served(Sent(self.fitted(state), state.frame), whole=True)

    def own_model(self) -> Step:
        """The posterior mean."""
        return self.own

    def place(self, state: State, cohort: Cohort) -> Tensor:
        """Every client's likeliest component."""
        sent = self.served(state).message
        return cohort.gather(self.choose, sent, slots=sent.mixture.mean.shape[1]).slot

    def assign(self, state: State, task: Task, data: Data) -> int:
        """The likeliest component of one client, old or new."""
        return int(_known(task, self.served(state).message, data)[1].evidence[0].argmax())

    def join(self, state: State, newcomers: Cohort) -> State:
        """Newcomers count from the next round on."""
        known = bool((state.labels >= 0).any())
        own = self.place(state, newcomers) if known else torch.full((len(newcomers),), -1)
        return state._replace(labels=torch.cat([state.labels, own]), done=False)

    def deviations(self, state: State, task: Task, data: Data | None, x: Tensor) -> Tensor:
        """By noise, and by what is not known of the client's parameters: eq. (11)."""
        if task.features is None:
            raise ValueError("MixedEffects: only predictions of a regression have standard deviations")
        sent: Sent = self.served(state).message
        rows = Data(x, x.new_zeros(len(x)), x.new_ones(len(x)))
        _, found = _known(task, sent, data or rows._replace(mask=torch.zeros_like(rows.mask)))
        phi = sent.frame.features(values_of(task, rows)[:, :-1])
        return sent.frame.unit * found.deviations(sent.mixture, phi)[0]

    # --- the parts of a run ------------------------------------------------------------------------------------------

    def _sizes(self, task: Task, cohort: Cohort) -> list[int]:
        """The numbers of components to try."""
        x = cohort.federation.train.x[:2]
        if not is_linear(task, x) and not is_linear_classifier(task, x):
            raise ValueError(
                "MixedEffects: the task must be a regression with one output or a classifier, with a model that is "
                f"linear in its parameters, such as Task.regressor(models.Linear({x[0].numel()}, 1)); for others use "
                "Personal(FedAvg()) or FedEM"
            )
        if self.k == "auto":
            return list(range(1, max(1, min(self.at_most, cohort.population // 2)) + 1))  # one client is no group
        if self.k > cohort.population:
            m = cohort.population
            raise ValueError(f"MixedEffects: k must be at most the number of clients, {m}, got {self.k}")
        return [self.k]

    def _framed(self, d: int, cohort: Cohort) -> tuple[Frame, Mixture]:
        """Units for features and targets, and where EM begins in them."""
        sums = _total(cohort.combine(self.scales, ()))
        size = (sums["log"] / sums["seen"].clamp(min=1)).exp()
        if self.covariance == "full" or (self.covariance == "auto" and d <= LARGEST):
            sums = _total(cohort.combine(self.moments, size))
            return framed(size, sums["moments"], sums["rows"], self._noise(cohort.task))
        if self.covariance == "auto":
            cohort.log(f"covariance=diagonal: a full one of {d} parameters has {d * (d + 1) // 2:,} numbers")
        basis = torch.where(sums["seen"] > 0, 1 / size, 0.0)[:-1]
        noise = self._noise(cohort.task)
        unit = size[-1] if noise is None else torch.ones_like(size[-1])
        return Frame(basis, unit), first_mixture(torch.zeros_like(basis), noise, diagonal=True)

    def _noise(self, task: Task) -> float | None:
        """σ² where it is no parameter: classes have none besides their probabilities."""
        return 1.0 if task.features is None else None

    def _improved(self, mixture: Mixture, sums: dict[str, Tensor], task: Task) -> Mixture:
        """The M-step."""
        return maximised(tree_map(exact, mixture), sums, learn_noise=self._noise(task) is None)

    def _starts(self, sizes: list[int], sent: Sent, cohort: Cohort, key: Key) -> list[Mixture]:
        """Where fits of so many components begin: by k-means++ among the centres of an iteration with many."""
        one, last = sent, -torch.inf
        for t in range(FIRST):  # one component, as far as it matters
            one = one._replace(mixture=turned(one.mixture, t))
            sums = _total(cohort.fold(t).combine(self.step, one))
            one = one._replace(mixture=self._improved(one.mixture, sums, cohort.task))
            if float(sums["loglik"]) - last < ROUGH:
                break
            last = float(sums["loglik"])
        many = min(MANY * max(sizes), cohort.population)
        wide = sent._replace(mixture=scattered(one.mixture, many, SCATTERS, key.fold(0).generator()))
        sums = _total(cohort.fold(FIRST).combine(self.step, wide))
        found = self._improved(wide.mixture, sums, cohort.task)
        centres, weight = found.mean.flatten(0, 1), found.share.flatten()
        return [
            started(one.mixture, seeds(centres, weight, k, self.restarts, key.fold(k).generator()), max(sizes))
            if k > 1
            else started(one.mixture, one.mixture.mean, max(sizes))
            for k in sizes
        ]

    def _pruned(self, state: State, cohort: Cohort) -> State:
        """The state without fits that are given up; at the end, with the best one alone."""
        value, best = self.criterion(state), self.best(state)
        keep = max(1, self.restarts // 2 ** (state.round // HALVING))
        order = state.loglik.argsort(descending=True)
        kept = torch.cat([order[state.size[order] == k][:keep] for k in state.size.unique().tolist()]).sort().values
        if keep == 1:  # of those left, some have too far to go
            kept = kept[(value - 2 * FAR * state.gain.abs())[kept] <= value[best]]
        if bool((state.gain[kept].abs() <= self.tol).all()):
            self._say(state, cohort)
            return _only(state, torch.tensor([best]))._replace(done=True)
        return _only(state, kept)

    def _say(self, state: State, cohort: Cohort) -> None:
        """Log how likely each number of components is."""
        if self.k == "auto":
            told = ", ".join(f"{k}: {x:.1f}" for k, x in enumerate(state.bics.tolist(), 1))
            cohort.log(f"k={int(state.size[self.best(state)])} has the lowest BIC ({told})")


def _values(task: Task, data: Data) -> Tensor:
    """φ and y side by side (n, p + 1), 0 for padding; of a classifier, those of a regression like it around θ = 0."""
    if task.jacobian is not None:
        phi = task.jacobian(data.x).double()
        rows, off = linearised(torch.zeros_like(phi[..., 0]), phi, data)
        return torch.cat([rows, off[:, None]], 1)
    return values_of(task, data)


def _known(task: Task, sent: Sent, data: Data) -> tuple[Rows, Posterior]:
    """A client's rows in the units of the run, and what it knows of itself under every component of every fit."""
    if task.jacobian is not None:
        return laplace(sent.mixture, sent.frame.features(task.jacobian(data.x).double()), data)
    rows = sent.frame.rows(values_of(task, data), data.mask.sum())
    return rows, posterior(sent.mixture, rows)


def _total(sums: Sums) -> dict[str, Tensor]:
    """The sums of the one slot, for the server's algebra."""
    return tree_map(lambda x: exact(x[0]), sums.update)


def _only(state: State, at: Tensor) -> State:
    """The state with these fits alone, and no more components than they have."""
    state = state._replace(
        **{name: take(getattr(state, name), at) for name in ("mixture", "size", "loglik", "gain", "information")}
    )
    k, mixture = int(state.size.max()), state.mixture
    own = mixture.factor[:, :k] if mixture.factor.shape[1] > 1 else mixture.factor
    mixture = mixture._replace(share=mixture.share[:, :k], mean=mixture.mean[:, :k], factor=own)
    return state._replace(mixture=mixture, information=state.information[:, :k])
