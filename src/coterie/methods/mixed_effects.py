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
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from coterie.core.cohort import Cohort
from coterie.core.features import is_generalised_linear, is_linear
from coterie.core.key import Key
from coterie.core.method import Coefficient, Groups, Method, Needs, Report, Served
from coterie.core.pytree import Outer, Params, exact, flat, stacked, take, tree_map, unflat
from coterie.core.registry import register
from coterie.core.settings import setting
from coterie.core.step import ClientStep, Local, Reply, Step, client_step
from coterie.core.sums import Sums
from coterie.core.task import Data, Task
from coterie.core.train import Models
from coterie.parts.client_effects import Sent, known
from coterie.parts.effects import Effects
from coterie.parts.families import first_values, known_noise, weight_of
from coterie.parts.groupings import centred
from coterie.parts.quasi_newton import Search
from coterie.parts.random_effects import (
    Frame,
    Mixture,
    bic,
    contribution,
    first_mixture,
    framed,
    maximised,
    parameters,
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
RARE = 0.05  # of all clients: with fewer, a component is rather of odd clients than a group
PER = 2  # clients at least for each parameter, where quasi-Newton steps are taken
HALVING = 4  # rounds after which the worse half of the starts is given up, and again


class State(NamedTuple):
    """What is known after a round."""

    mixture: Mixture  # of all fits that are still going
    size: Tensor  # the components of each (f,)
    loglik: Tensor  # of each, before the last M-step (f,)
    gain: Tensor  # of the log-likelihood (f,): in the last round, or by `search` what is still to come
    bics: Tensor  # the lowest of fits with 1, 2, … components so far
    information: Tensor  # that the last round had about each μ (f, k, d, d), or the diagonal of it (f, k, d)
    search: Search | None  # by which one component is found in fewer rounds than EM needs
    frame: Frame
    like: Params  # a model, for the shapes of its parameters
    noisy: bool  # whether σ² is a parameter: not of classes and counts
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
        tol: The run ends once no fit gains more log-likelihood in a round, summed over all clients; one of a single
            component, once it has no more to gain in all. What is far below 1 is within standard errors.

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
        none = _no_information(mixture)
        bics = torch.full((max(sizes),), torch.inf, dtype=torch.float64)
        labels, noisy = torch.full((cohort.population,), -1), task.features is not None
        search = self._search(one, cohort) if sizes == [1] else None
        return State(mixture, size, unknown, -unknown, bics, none, search, frame, like, noisy, labels, 0, False)

    def round(self, state: State, cohort: Cohort) -> tuple[State, Report]:
        """One iteration of EM, for all fits; or one step of the search for a single component."""
        tried = state.search.trial if state.search else state.mixture
        sent = Sent(turned(tried, state.round), state.frame)
        sums = cohort.combine(self.step, sent)
        after = self._after(state, sent.mixture, _total(sums), cohort.task)
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
            rose = "would still rise by about" if state.search else "still rose in the last round by"
            yield f"the log-likelihood {rose} {gain:.2g}: more rounds are needed"

    # --- what clients do ---------------------------------------------------------------------------------------------

    @client_step
    def scales(self, task: Task) -> ClientStep:
        """The logs of the sizes of features and targets, which may be anything; of counts also how much rows weigh."""

        def run(_: Any, local: Local) -> Reply:
            values = first_values(task, local.data).square().sum(0) / local.data.mask.sum()
            seen = (values > 0).double()
            logs = 0.5 * values.clamp(min=torch.finfo(values.dtype).tiny).log() * seen
            return Reply({"log": logs, "seen": seen} | weight_of(task, local.data))

        return ClientStep(run)

    @client_step
    def moments(self, task: Task) -> ClientStep:
        """Second moments of features and targets that are divided by their sizes."""

        def run(size: Tensor, local: Local) -> Reply:
            values = first_values(task, local.data) / size
            return Reply({"moments": Outer(values, values), "rows": local.data.mask.sum().double()})

        return ClientStep(run)

    @client_step
    def step(self, task: Task) -> ClientStep:
        """The E-step: what the client adds to the sums of every fit."""

        def run(sent: Sent, local: Local) -> Reply:
            rows, found = known(task, sent, local.data)
            each = found.loglik / rows.number.clamp(min=1) - sent.frame.unit.log()
            note = {"component": found.evidence.argmax(-1), "loss": -each}
            return Reply(contribution(sent.mixture, rows, found), note=note)

        return ClientStep(run, secrecy={"component": "hidden", "loss": "mean"})

    @client_step
    def own(self, task: Task) -> ClientStep:
        """The client's posterior mean, and its likeliest component."""
        like = task.init(Key.of(0))

        def run(sent: Sent, local: Local) -> Reply:
            _, found = known(task, sent, local.data)
            theta = sent.frame.parameters(found.mean(sent.mixture)[0])
            return Reply(Models(unflat(theta.to(local.data.mask), like), label=found.evidence[0].argmax()))

        return ClientStep(run)

    @client_step
    def choose(self, task: Task) -> ClientStep:
        """The client's likeliest component."""

        def run(sent: Sent, local: Local) -> Reply:
            return Reply(slot=known(task, sent, local.data)[1].evidence[0].argmax())

        return ClientStep(run)

    # --- what was learnt ---------------------------------------------------------------------------------------------

    def best(self, state: State) -> int:
        """The fit to keep, by BIC."""
        return int(self.criterion(state).argmin())

    def criterion(self, state: State) -> Tensor:
        """The BIC of every fit (f,); with k="auto" infinite for one with a component that is too rare to count."""
        d, diagonal = state.mixture.mean.shape[-1], state.mixture.diagonal
        free = parameters(state.size, d, diagonal=diagonal, own=not self.tied)
        value, share = bic(state.loglik.cpu(), free, len(state.labels)), state.mixture.share.cpu()
        if self.k != "auto":
            return value
        there = torch.arange(share.shape[1]) < state.size[:, None]
        return value.where(~(there & (share < RARE)).any(1), torch.inf)

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
        information = state.information[at][: mixture.mean.shape[1]]
        mixture, information, frame = tree_map(exact, (mixture, information, state.frame))
        return Effects.of(mixture, information, frame, state.like, noisy=state.noisy)

    def report(self, state: State) -> str:
        """The effects as a table."""
        return str(self.effects(state))

    def coefficients(self, state: State) -> list[Coefficient]:
        """μ of every component, with standard errors."""
        return self.effects(state).coefficients()

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
        return int(known(task, self.served(state).message, data)[1].evidence[0].argmax())

    def join(self, state: State, newcomers: Cohort) -> State:
        """Newcomers count from the next round on."""
        told = bool((state.labels >= 0).any())
        own = self.place(state, newcomers) if told else torch.full((len(newcomers),), -1)
        return state._replace(labels=torch.cat([state.labels, own]), done=False)

    def adopt(self, state: State, groups: Groups, task: Task) -> tuple[MixedEffects, State]:
        """The best fit alone goes on, with these centres."""
        placed, k = groups.labels[groups.labels >= 0], stacked(groups.models)
        members = torch.bincount(placed, minlength=k)
        mixture = centred(self.fitted(state), state.frame, flat(groups.models), members, tied=self.tied)
        unknown = torch.full((1,), -torch.inf, dtype=torch.float64)
        return replace(self, k=k), state._replace(
            mixture=mixture,
            size=torch.tensor([k]),
            loglik=unknown,
            gain=-unknown,
            bics=torch.full((k,), torch.inf, dtype=torch.float64),
            information=_no_information(mixture),
            search=None if state.search is None or k > 1 else Search.start(mixture),
            labels=groups.labels,
            done=False,
        )

    def grows(self) -> bool:
        """Any k will do."""
        return True

    def deviations(self, state: State, task: Task, data: Data | None, x: Tensor) -> Tensor:
        """By noise, and by what is not known of the client's parameters: eq. (11)."""
        if task.features is None:
            raise ValueError(
                "MixedEffects: only predictions of a regression have standard deviations, not those of classes "
                "or counts"
            )
        sent: Sent = self.served(state).message
        rows = Data(x, x.new_zeros(len(x)), x.new_ones(len(x)))
        _, found = known(task, sent, data or rows._replace(mask=torch.zeros_like(rows.mask)))
        phi = sent.frame.features(values_of(task, rows)[:, :-1])
        return sent.frame.unit * found.deviations(sent.mixture, phi)[0]

    # --- the parts of a run ------------------------------------------------------------------------------------------

    def _sizes(self, task: Task, cohort: Cohort) -> list[int]:
        """The numbers of components to try."""
        x = cohort.federation.train.x[:2]
        if not is_linear(task, x) and not is_generalised_linear(task, x):
            raise ValueError(
                "MixedEffects: the task must be a regression with one output, counts or a classifier, with a model "
                f"that is linear in its parameters, such as Task.regressor(models.Linear({x[0].numel()}, 1)); for "
                "others use Personal(FedAvg()) or FedEM"
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
        size, noise = (sums["log"] / sums["seen"].clamp(min=1)).exp(), known_noise(cohort.task, sums)
        if self.covariance == "full" or (self.covariance == "auto" and d <= LARGEST):
            sums = _total(cohort.combine(self.moments, size))
            return framed(size, sums["moments"], sums["rows"], noise)
        if self.covariance == "auto":
            cohort.log(f"covariance=diagonal: a full one of {d} parameters has {d * (d + 1) // 2:,} numbers")
        basis = torch.where(sums["seen"] > 0, 1 / size, 0.0)[:-1]
        unit = size[-1] if noise is None else torch.ones_like(size[-1])
        return Frame(basis, unit), first_mixture(torch.zeros_like(basis), noise, diagonal=True)

    def _search(self, one: Mixture, cohort: Cohort) -> Search | None:
        """A search from here; none where too little is known of a slope, or there may be many maxima."""
        d, noisy = one.mean.shape[-1], cohort.task.features is not None
        return Search.start(one) if noisy and not one.diagonal and 0 < PER * d <= cohort.population else None

    def _after(self, state: State, sent: Mixture, total: dict[str, Tensor], task: Task) -> State:
        """The state with what follows from the sums of a round."""
        state = state._replace(round=state.round + 1)
        if state.search is None:
            mixture, gain = self._improved(sent, total, task), total["loglik"] - exact(state.loglik)
            return state._replace(mixture=mixture, loglik=total["loglik"], gain=gain, information=total["information"])
        search: Search = tree_map(exact, state.search).after(tree_map(exact, sent), total)
        best = total["information"] if bool(search.loglik == total["loglik"][0]) else state.information
        mixture, loglik, gain = search.found, search.loglik[None], search.promise[None]
        return state._replace(search=search, mixture=mixture, loglik=loglik, gain=gain, information=best)

    def _improved(self, mixture: Mixture, sums: dict[str, Tensor], task: Task) -> Mixture:
        """The M-step."""
        return maximised(tree_map(exact, mixture), sums, learn_noise=task.features is not None)

    def _starts(self, sizes: list[int], sent: Sent, cohort: Cohort, key: Key) -> list[Mixture]:
        """Where fits of so many components begin: by k-means++ among the centres of an iteration with many."""
        one, last, search = sent, -torch.inf, self._search(sent.mixture, cohort)
        for t in range(FIRST):  # one component, as far as it matters
            tried = sent._replace(mixture=turned(search.trial if search else one.mixture, t))
            sums = _total(cohort.fold(t).combine(self.step, tried))
            search = search and search.after(tried.mixture, sums)
            one = one._replace(mixture=search.found if search else self._improved(tried.mixture, sums, cohort.task))
            if float(search.promise if search else sums["loglik"] - last) < ROUGH:
                break
            last = sums["loglik"]
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
        order = value.argsort(stable=True)
        kept = torch.cat([order[state.size[order] == k][:keep] for k in state.size.unique().tolist()]).sort().values
        if keep == 1:  # of those left, some have too far to go; one component stays, for others may become too rare
            near = (value - 2 * FAR * state.gain.abs())[kept] <= value[best]
            kept = kept[near | (state.size[kept] == 1)]
        if bool((state.gain[kept].abs() <= self.tol).all()):
            self._say(state, cohort)
            return _only(state, torch.tensor([best]))._replace(done=True)
        return _only(state, kept)

    def _say(self, state: State, cohort: Cohort) -> None:
        """Log how likely each number of components is."""
        if self.k == "auto":
            told = ", ".join(f"{k}: {x:.1f}" for k, x in enumerate(state.bics.tolist(), 1))
            rare = f"where no component has less than {RARE:.0%} of the clients"
            cohort.log(f"k={int(state.size[self.best(state)])} has the lowest BIC {rare} (on the way: {told})")


def _total(sums: Sums) -> dict[str, Tensor]:
    """The sums of the one slot, for the server's algebra."""
    return tree_map(lambda x: exact(x[0]), sums.update)


def _no_information(mixture: Mixture) -> Tensor:
    """That about each μ before the first round: zeros (f, k, d, d), or (f, k, d)."""
    mean = mixture.mean
    return torch.zeros_like(mean if mixture.diagonal else mean[..., None] * mean[..., None, :])


def _only(state: State, at: Tensor) -> State:
    """The state with these fits alone, and no more components than they have."""
    state = state._replace(
        **{name: take(getattr(state, name), at) for name in ("mixture", "size", "loglik", "gain", "information")}
    )
    k, mixture = int(state.size.max()), state.mixture
    own = mixture.factor[:, :k] if mixture.factor.shape[1] > 1 else mixture.factor
    mixture = mixture._replace(share=mixture.share[:, :k], mean=mixture.mean[:, :k], factor=own)
    return state._replace(mixture=mixture, information=state.information[:, :k])
