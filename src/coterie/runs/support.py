"""How many groups do clients support, where those of one group may vary and have noise of their own?

The null is not one model but one group with random effects: θ_i ~ N(μ, Σ), y_i = φ(x_i)θ_i + e_i with a variance of
noise that is the client's own. k groups are θ_i ~ Σ_j π_j N(μ_j, Σ). They are supported if BIC prefers them to fewer,
if each has two clients or more, and if between any two of them there is a valley: no distribution of clients along the
line through both that has one hump only explains them as well. Where one of these figures speaks for groups but not
clearly, and none against them, it is open whether there are so many.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.core.cohort import Cohort
from coterie.core.pytree import exact, take, to_device, tree_map
from coterie.core.registry import register
from coterie.core.step import ClientStep, Local, Reply, Step, client_step
from coterie.core.task import Data, Task
from coterie.methods.mixed_effects import MixedEffects
from coterie.parts.groupings import Lines, merged, pairs, split
from coterie.parts.random_effects import (
    Frame,
    Mixture,
    Rows,
    contribution,
    framed,
    maximised,
    posterior,
    turned,
)
from coterie.parts.residuals import values_of
from coterie.parts.valley import valley
from coterie.runs.answers import answer, every

CLEAR = 5.0  # nats by which BIC must prefer groups to fewer of them: a difference of 10 as it is mostly given
VALLEY = 4.0  # nats by which two groups must explain clients better than one hump
FEWER, FLAT = 0.0, 1.0  # the same, up to which BIC does not prefer groups and there is no valley; between, it is open
FURTHER = 2  # groups beyond those of a run that are looked for: there may be more, and clients like no other
STEPS, SHORT = 100, 8  # of expectation and maximisation at most; of those after which the better starts are kept
SETTLED = 0.02  # nats that a step must add
FAINT = 1e-9  # of the mean of a client's second moments: a direction with less is one that no row has
QUIET = 1e-12  # the least variance, in units of the residuals of one model for all
TIGHT = 0.3  # of how clients deviate from one group: how they do at first from the groups of a run
FEWEST = 1.0  # degrees of freedom of what is known beforehand of a client's noise


class Noise(NamedTuple):
    """What is known of clients' noise beforehand: s²/σ_i² ~ χ²_ν/ν."""

    level: Tensor  # s²
    doubt: Tensor  # 1/ν, 0 if all clients have the same


class Sent(NamedTuple):
    """The message of most exchanges: some groups, and how rows are scaled before they are used."""

    mixture: Mixture
    frame: Frame
    noise: Noise


class Between(NamedTuple):
    """A message about the lines between groups."""

    lines: Lines
    sent: Sent


class Known(NamedTuple):
    """Models of the paper's kind."""

    theta: Tensor  # (k, p)
    share: Tensor  # of the clients (k,); 0 for a cluster that nobody chose
    variance: Tensor  # σ²


@register("observer", "service")
@dataclass(frozen=True)
class Observer:
    """The client's side of a diagnosis."""

    @client_step
    def residue(self, task: Task) -> ClientStep:
        """The noise that the client's own least squares leave: moments of its logarithm, to be added up.

        Fitting a scaled F distribution by these is Smyth's moderation of variances (2004).
        """

        def run(frame: Frame, local: Local) -> Reply:
            free, squares = _free(frame.rows(values_of(task, local.data), local.data.mask.sum()))
            half, known = free.clamp(min=1) / 2, (free > 0).double()
            log = (squares / free.clamp(min=1)).clamp(min=QUIET).log() - half.digamma() + half.log()
            update = {"known": known, "log": known * log, "square": known * log**2}
            return Reply(update | {"chance": known * torch.polygamma(1, half), "free": free, "squares": squares})

        return ClientStep(run)

    @client_step
    def expect(self, task: Task) -> ClientStep:
        """The client's part of the sums from which the likeliest groups follow."""

        def run(sent: Sent, local: Local) -> Reply:
            rows = _scaled(task, sent, local.data)
            return Reply(contribution(sent.mixture, rows, posterior(sent.mixture, rows)))

        return ClientStep(run)

    @client_step
    def place(self, task: Task) -> ClientStep:
        """The likeliest group, and where on the lines between groups the client lies."""

        def run(message: Between, local: Local) -> Reply:
            rows = _scaled(task, message.sent, local.data)
            at, error = message.lines.position(rows)
            label = posterior(message.sent.mixture, rows).evidence[0].argmax()
            return Reply(slot=label, note={"at": at, "error": error})

        return ClientStep(run)

    @client_step
    def look(self, task: Task) -> ClientStep:
        """The label of (8), and the probability that noise makes another model look better than the true one.

        It is exact for two models and Gaussian noise. Of more models it takes the comparisons for independent, which
        gives too much where they go together, as they do unless one model lies between two others.
        """

        def run(known: Known, local: Local) -> Reply:
            values = values_of(task, local.data)
            phi, y, theta, chosen = values[:, :-1], values[:, -1], known.theta, known.share > 0
            squares = (y[:, None] - phi @ theta.T).square().sum(0)
            label = squares.where(chosen, torch.inf).argmin()
            apart = (phi @ (theta - take(theta, label)).T).norm(dim=0)
            others = chosen & (torch.arange(len(chosen), device=label.device) != label)
            looks_better = torch.special.ndtr(-apart / (2 * known.variance.sqrt()))
            wrong = -(-looks_better * others).log1p().sum().expm1()  # 1 - Π (1 - p)
            note = {"wrong": wrong.clamp(max=1 - 1 / chosen.sum()), "squares": take(squares, label)}
            return Reply(slot=label, note=note)

        return ClientStep(run)


def _scaled(task: Task, sent: Sent, data: Data) -> Rows:
    """A client's rows in units of the frame, and of what noise it has beside others."""
    rows = sent.frame.rows(values_of(task, data), data.mask.sum()).condensed()
    free, squares = _free(rows)
    own = ((sent.noise.doubt * squares / sent.noise.level + 1) / (sent.noise.doubt * free + 1)).sqrt()
    return rows._replace(phi=rows.phi / own, y=rows.y / own)


def _free(rows: Rows) -> tuple[Tensor, Tensor]:
    """The degrees of freedom that the client's own least squares leave, and the sum of squared residuals."""
    phi, y = rows.phi[0, 0], rows.y[0, 0]
    gram = phi.T @ phi
    faint = FAINT * gram.diagonal().mean().clamp(min=QUIET)
    whole = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram + faint * whole))
    unused = (faint * inverse.diagonal().sum()).round()  # an eigenvalue is 1/faint where there are no rows
    return rows.number - len(gram) + unused, (y - phi @ (inverse @ (phi.T @ y))).square().sum()


class Fit(NamedTuple):
    """Some number of groups, as likely as they could be made."""

    mixture: Mixture  # f = 1
    likelihood: float
    evidence: float  # the same, less (k - 1)(d + 1)/2 · log M

    @property
    def k(self) -> int:
        """Groups."""
        return self.mixture.mean.shape[1]


class Judged(NamedTuple):
    """What speaks for the groups of a fit."""

    fit: Fit
    ahead: float  # nats by which BIC prefers them to any smaller number
    members: Tensor  # clients of each (k,)
    valley: float  # the least between any two that have two clients or more

    @property
    def real(self) -> int:
        """Groups of two clients or more."""
        return int((self.members > 1).sum())

    @property
    def preferred(self) -> bool | None:
        """Whether BIC prefers them."""
        return answer(self.ahead, FEWER, CLEAR)

    @property
    def apart(self) -> bool | None:
        """Whether there is a valley between any two."""
        return answer(self.valley, FLAT, VALLEY)

    @property
    def supported(self) -> bool | None:
        """Whether there are so many groups as are real; None where that is open."""
        return every(self.real > 1, self.preferred, self.apart)


class Support(NamedTuple):
    """What a search for groups has found."""

    fits: dict[int, Fit]  # the likeliest of every number that was tried
    judged: dict[int, Judged]  # those that BIC prefers to all smaller ones, and those of the run
    same: float  # the evidence that all clients have one and the same model, as that of `fits`

    @property
    def found(self) -> int:
        """The groups that are clearly supported."""
        return max((each.real for each in self.judged.values() if each.supported), default=1)

    @property
    def open(self) -> Judged | None:
        """More groups of which it is open whether they are supported: the most of them."""
        more = [each for each in self.judged.values() if each.supported is None and each.real > self.found]
        return max(more, key=lambda each: each.real, default=None)

    @property
    def groups(self) -> int | None:
        """How many groups there are; None where that is open."""
        return None if self.open else self.found

    def supports(self, k: int) -> bool | None:
        """Whether there are k groups or more."""
        if k <= self.found:
            return True
        return None if self.open and k <= self.open.real else False


@dataclass(frozen=True)
class Clients:
    """The clients that are asked, and how their rows are scaled."""

    cohort: Cohort
    frame: Frame
    noise: Noise

    @classmethod
    def of(cls, cohort: Cohort, *, own_noise: bool = True) -> tuple[Clients, Mixture]:
        """The clients, who may have noise of their own, and where a fit of one group begins."""
        effects = MixedEffects()
        sums = _sums(cohort, effects.scales, ())
        size = (sums["log"] / sums["seen"].clamp(min=1)).exp()
        sums = _sums(cohort, effects.moments, size)
        frame, one = framed(size, sums["moments"], sums["rows"])
        even = Noise(torch.ones(()).double(), torch.zeros(()).double())
        return cls(cohort, frame, _moderation(_sums(cohort, Observer().residue, frame)) if own_noise else even), one

    def likeliest(self, starts: Mixture) -> Fit:
        """The best that expectation and maximisation lead to from some starts; most are given up early."""
        mixture, likelihood = self._climbed(starts, SHORT)
        if len(likelihood) > 2:
            mixture = take(mixture, likelihood.topk(2).indices)
        mixture, likelihood = self._climbed(mixture, STEPS)
        best, (_, k, d) = likelihood.argmax(), mixture.mean.shape
        value = float(likelihood[best])
        return Fit(take(mixture, best[None]), value, value - (k - 1) * (d + 1) / 2 * math.log(len(self.cohort)))

    def _climbed(self, mixture: Mixture, steps: int) -> tuple[Mixture, Tensor]:
        """Fits after so many steps at most, and their likelihood."""
        sums = self.expected(mixture)
        for t in range(steps):
            before, mixture = sums["loglik"], turned(maximised(mixture, sums), t)
            sums = self.expected(mixture)
            if bool((sums["loglik"] - before < SETTLED).all()):
                break
        return mixture, sums["loglik"]

    def expected(self, mixture: Mixture) -> dict[str, Tensor]:
        """The sums of one exchange."""
        return _sums(self.cohort, Observer().expect, Sent(mixture, self.frame, self.noise))

    def judged(self, fit: Fit, ahead: float) -> Judged:
        """Ask every client for its group, and where it lies between groups."""
        message = Between(Lines.of(fit.mixture), Sent(fit.mixture, self.frame, self.noise))
        reply = self.cohort.gather(Observer().place, to_device(message, self.cohort.engine.device), slots=fit.k)
        at, error, label = exact(reply.note["at"]), exact(reply.note["error"]), reply.slot
        members = label.bincount(minlength=fit.k)
        valleys = [
            valley(at[own, i], error[own, i])
            for i, (a, b) in enumerate(pairs(fit.k).tolist())
            if min(int(members[a]), int(members[b])) > 1
            for own in [(label == a) | (label == b)]
        ]
        return Judged(fit, ahead, members, min(valleys, default=0.0))


def _moderation(sums: dict[str, Tensor]) -> Noise:
    """ν and s² by the mean and the variance of the logarithms of clients' variances."""
    m = float(sums["known"])
    mean = sums["log"] / max(m, 1)
    extra = float((sums["square"] - m * mean**2) / max(m - 1, 1) - sums["chance"] / max(m, 1))
    if m < 3 or extra <= 0:
        return Noise(torch.ones(()).double(), torch.zeros(()).double())
    half = torch.tensor(max(_trigamma_inverse(extra), FEWEST / 2)).double()
    return Noise((mean + half.digamma() - half.log()).exp(), 1 / (2 * half))


def support(cohort: Cohort, theta: Tensor, share: Tensor, further: int = FURTHER) -> Support:
    """How many groups there are, looking up to a few more than a run has.

    Args:
        cohort: The clients.
        theta: The models of the run (k, p).
        share: The shares of the clients that choose them (k,).
        further: How many more are looked for at most, as long as evidence rises.
    """
    clients, start = Clients.of(cohort)
    k, d = len(theta), start.mean.shape[-1]
    same = clients.likeliest(start._replace(factor=torch.zeros_like(start.factor)))
    fits = {1: clients.likeliest(start)}
    for j in range(2, k + further + 1):
        if _falls(fits, j - 1) and (j - 1 > k or _falls(fits, j - 2)):
            break
        fits[j] = clients.likeliest(split(fits[j - 1].mixture))
    if k > 1:
        _keep(fits, clients.likeliest(_of_run(theta, share, clients.frame, fits[1].mixture)))
    if k > 2:
        _keep(fits, clients.likeliest(merged(fits[k].mixture)))
    ahead = {j: fits[j].evidence - max(fits[i].evidence for i in fits if i < j) for j in fits if j > 1}
    return Support(
        fits=fits,
        judged={j: clients.judged(fits[j], ahead[j]) for j in ahead if j == k or ahead[j] > FEWER},
        same=same.likelihood + d * (d + 1) / 4 * math.log(len(cohort)),
    )


def _keep(fits: dict[int, Fit], fit: Fit) -> None:
    """Keep a fit if it is the likeliest of its number of groups."""
    fits[fit.k] = max(fits.get(fit.k, fit), fit, key=lambda each: each.likelihood)


def _falls(fits: dict[int, Fit], j: int) -> bool:
    """Whether j groups have less evidence than one fewer."""
    return j > 1 and fits[j].evidence < fits[j - 1].evidence


def _of_run(theta: Tensor, share: Tensor, frame: Frame, one: Mixture) -> Mixture:
    """A start from a run's models, around which clients vary less than all of them do."""
    share = share.clamp(min=0.01 / len(share))
    mean = theta / frame.unit @ torch.linalg.pinv(frame.basis).mT
    return Mixture((share / share.sum())[None], mean[None], TIGHT * one.factor, one.noise)


def _trigamma_inverse(value: float) -> float:
    """The x with ψ'(x) = value, by halving."""
    low, high = 1e-3, 1e5
    for _ in range(100):
        middle = math.sqrt(low * high)
        above = float(torch.polygamma(1, torch.tensor(middle).double())) > value
        low, high = (middle, high) if above else (low, middle)
    return low


def _sums(cohort: Cohort, step: Step, message: Any) -> dict[str, Tensor]:
    sums = cohort.combine(step, to_device(message, cohort.engine.device))
    return tree_map(lambda x: exact(x[0]), sums.update)
