"""How many groups do clients support, where those of one group may vary and have noise of their own?

The null is not one model but one group with random effects: θ_i ~ N(μ, Σ), y_i = φ(x_i)θ_i + e_i with a variance of
noise that is the client's own. k groups are θ_i ~ Σ_j π_j N(μ_j, Σ). They are supported if BIC prefers them to fewer,
if each has two clients or more, and if between any two of them there is a valley: no distribution of clients along the
line through both that has one hump only explains them as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.core.cohort import Cohort
from coterie.core.pytree import exact, take, to_device
from coterie.core.registry import register
from coterie.core.step import ClientStep, Local, Reply, client_step
from coterie.core.task import Data, Task
from coterie.parts.least_squares import least_squares
from coterie.parts.residuals import features
from coterie.parts.valley import valley
from coterie.parts.varying import (
    Groups,
    Lines,
    contribution,
    lines,
    maximised,
    merged,
    position,
    seen,
    split,
)

CLEAR = 5.0  # nats by which BIC must prefer groups to fewer of them: a difference of 10 as it is mostly given
VALLEY = 4.0  # nats by which two groups must explain clients better than one hump
FURTHER = 2  # groups beyond those of a run that are looked for: there may be more, and clients like no other
STEPS, SHORT = 100, 8  # of expectation and maximisation at most; of those after which the better starts are kept
SETTLED = 0.02  # nats that a step must add
FAINT = 1e-9  # of the mean of a client's second moments: a direction with less is one that no row has
FEWEST = 1.0  # degrees of freedom of what is known beforehand of a client's noise


class Noise(NamedTuple):
    """What is known of clients' noise beforehand: s²/σ_i² ~ χ²_ν/ν."""

    level: Tensor  # s²
    doubt: Tensor  # 1/ν, 0 if all clients have the same


class Sent(NamedTuple):
    """The message of most exchanges: some groups or lines, and how rows are scaled before they are used."""

    of: Any
    scale: Tensor  # of every feature (d,)
    noise: Noise


@register("observer", "service")
@dataclass(frozen=True)
class Observer:
    """The client's side of a diagnosis."""

    @client_step
    def moments(self, task: Task) -> ClientStep:
        """φᵀφ, φᵀy and yᵀy, to be added up."""

        def run(_: Any, local: Local) -> Reply:
            phi, y, rows = _rows(task, local.data)
            return Reply({"gram": phi.T @ phi, "product": phi.T @ y, "squares": y @ y, "rows": rows})

        return ClientStep(run)

    @client_step
    def residue(self, task: Task) -> ClientStep:
        """The noise that the client's own least squares leave: moments of its logarithm, to be added up.

        Fitting a scaled F distribution by these is Smyth's moderation of variances (2004).
        """

        def run(sent: Sent, local: Local) -> Reply:
            phi, y, rows = _rows(task, local.data)
            free, squares = _free(phi / sent.scale, y, rows)
            half, known = free.clamp(min=1) / 2, (free > 0).double()
            least = 1e-12 * (y @ y / rows)
            log = (squares / free.clamp(min=1)).clamp(min=least).clamp(min=1e-300).log() - half.digamma() + half.log()
            update = {"known": known, "log": known * log, "square": known * log**2}
            return Reply(update | {"chance": known * torch.polygamma(1, half), "free": free, "squares": squares})

        return ClientStep(run)

    @client_step
    def expect(self, task: Task) -> ClientStep:
        """The client's part of the sums from which the likeliest groups follow."""

        def run(sent: Sent, local: Local) -> Reply:
            return Reply(contribution(sent.of, *_scaled(task, sent, local.data)))

        return ClientStep(run)

    @client_step
    def place(self, task: Task) -> ClientStep:
        """The likeliest group, and where on the lines between groups the client lies."""

        def run(sent: Sent, local: Local) -> Reply:
            phi, y, rows = _scaled(task, sent, local.data)
            groups, between = sent.of
            at, error = position(between, phi, y)
            label = seen(groups, phi, y, rows).evidence[0].argmax()
            return Reply(slot=label, note={"at": at, "error": error})

        return ClientStep(run)

    @client_step
    def look(self, task: Task) -> ClientStep:
        """The label of (8), and the probability that noise makes another model look better than the true one.

        It is exact for two models and Gaussian noise. Of more models it takes the comparisons for independent, which
        gives too much where they go together, as they do unless one model lies between two others.
        """

        def run(groups: Groups, local: Local) -> Reply:
            phi, y, _ = _rows(task, local.data)
            theta, chosen = groups.mean[0], groups.share[0] > 0
            squares = (y[:, None] - phi @ theta.T).square().sum(0)
            label = squares.where(chosen, torch.inf).argmin()
            apart = (phi @ (theta - take(theta, label)).T).norm(dim=0)
            others = chosen & (torch.arange(len(chosen), device=label.device) != label)
            looks_better = torch.special.ndtr(-apart / (2 * groups.noise[0].sqrt()))
            wrong = -(-looks_better * others).log1p().sum().expm1()  # 1 - Π (1 - p)
            note = {"wrong": wrong.clamp(max=1 - 1 / chosen.sum()), "squares": take(squares, label)}
            return Reply(slot=label, note=note)

        return ClientStep(run)


def _rows(task: Task, data: Data) -> tuple[Tensor, Tensor, Tensor]:
    """φ (n, d) and y (n,) of a client, 0 for padding, and how many rows it has: as float64."""
    mask = data.mask.double()
    return features(task, data).double() * mask[:, None], data.y.reshape(-1).double() * mask, mask.sum()


def _scaled(task: Task, sent: Sent, data: Data) -> tuple[Tensor, Tensor, Tensor]:
    """The same in units of the features, and of what noise the client has beside others."""
    phi, y, rows = _rows(task, data)
    phi = phi / sent.scale
    free, squares = _free(phi, y, rows)
    own = ((sent.noise.doubt * squares / sent.noise.level + 1) / (sent.noise.doubt * free + 1)).sqrt()
    return phi / own, y / own, rows


def _free(phi: Tensor, y: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The degrees of freedom that the client's own least squares leave, and the sum of squared residuals."""
    gram = phi.T @ phi
    faint = FAINT * gram.diagonal().mean()
    whole = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram + faint * whole))
    theta = inverse @ (phi.T @ y)
    unused = (faint * inverse.diagonal().sum()).round()  # an inverse eigenvalue is 1/faint where there are no rows
    return rows - len(gram) + unused, (y - phi @ theta).square().sum()


class Fit(NamedTuple):
    """Some number of groups, as likely as they could be made."""

    groups: Groups  # a single fit
    likelihood: float
    evidence: float  # the same, less (k - 1)(d + 1)/2 · log M

    @property
    def k(self) -> int:
        """Groups."""
        return self.groups.mean.shape[1]


class Judged(NamedTuple):
    """What speaks for the groups of a fit."""

    fit: Fit
    members: Tensor  # clients of each (k,)
    valley: float  # the least between any two that have two clients or more

    @property
    def real(self) -> int:
        """Groups of two clients or more."""
        return int((self.members > 1).sum())


class Support(NamedTuple):
    """What a search for groups has found."""

    found: int  # the groups that are supported
    fits: dict[int, Fit]  # the likeliest of every number that was tried
    judged: dict[int, Judged]  # those that BIC prefers to all smaller ones, and those of the run
    same: float  # the evidence that all clients have one and the same model, as that of `fits`


@dataclass(frozen=True)
class Clients:
    """The clients that are asked, and how their rows are scaled."""

    cohort: Cohort
    scale: Tensor
    noise: Noise

    @classmethod
    def of(cls, cohort: Cohort, *, own_noise: bool = True) -> tuple[Clients, Groups]:
        """The clients, and one model for all of them; clients may have noise of their own, or all have the same."""
        sums = _sums(cohort, Observer().moments, ())
        gram, product = sums["gram"], sums["product"]
        scale = (gram.diagonal() / sums["rows"]).sqrt().clamp(min=1e-150)
        theta = least_squares(gram[None], product[None])
        noise = (sums["squares"] - theta[0] @ product).clamp(min=1e-12 * float(sums["squares"])) / sums["rows"]
        even = Noise(noise.clamp(min=1e-300), torch.zeros(()).double())
        clients = cls(cohort, scale, even)
        if own_noise:
            clients = cls(cohort, scale, clients._moderation())
        one = torch.ones(1, 1).double()
        none = torch.zeros(1, *gram.shape).double()
        return clients, Groups(one, theta[None] * scale, none, even.level[None])

    def _moderation(self) -> Noise:
        """ν and s² by the mean and the variance of the logarithms of clients' variances."""
        sums = _sums(self.cohort, Observer().residue, Sent((), self.scale, self.noise))
        m = float(sums["known"])
        if m < 3:
            return self.noise
        mean = sums["log"] / m
        extra = float((sums["square"] - m * mean**2) / (m - 1) - sums["chance"] / m)
        half = _trigamma_inverse(extra) if extra > 0 else math.inf
        if math.isinf(half):
            return Noise((sums["squares"] / sums["free"]).clamp(min=1e-300), torch.zeros(()).double())
        half = torch.tensor(max(half, FEWEST / 2)).double()
        return Noise((mean + half.digamma() - half.log()).exp(), 1 / (2 * half))

    def likeliest(self, starts: Groups) -> Fit:
        """The best that expectation and maximisation lead to from some starts; most are given up early."""
        groups, likelihood = self._climbed(starts, SHORT)
        if len(likelihood) > 2:
            groups = groups.only(likelihood.topk(2).indices)
        groups, likelihood = self._climbed(groups, STEPS)
        best = likelihood.argmax()
        (_, k, d), value = groups.mean.shape, float(likelihood[best])
        return Fit(groups.only(best[None]), value, value - (k - 1) * (d + 1) / 2 * math.log(len(self.cohort)))

    def _climbed(self, groups: Groups, steps: int) -> tuple[Groups, Tensor]:
        before = torch.full((len(groups.share),), -math.inf).double()
        for _ in range(steps):
            sums = self.expected(groups)
            if bool((sums["likelihood"] - before < SETTLED).all()):
                break
            before, last, groups = sums["likelihood"], groups, maximised(groups, sums)
        else:
            return last, before  # these belong together
        return groups, sums["likelihood"]

    def expected(self, groups: Groups) -> dict[str, Tensor]:
        """The sums of one exchange."""
        return _sums(self.cohort, Observer().expect, Sent(groups, self.scale, self.noise))

    def judged(self, fit: Fit) -> Judged:
        """Ask every client for its group, and where it lies between groups."""
        between: Lines = lines(fit.groups)
        sent = Sent((fit.groups, between), self.scale, self.noise)
        reply = self.cohort.gather(Observer().place, to_device(sent, self.cohort.engine.device), slots=fit.k)
        at, error, label = exact(reply.note["at"]), exact(reply.note["error"]), reply.slot
        members = label.bincount(minlength=fit.k)
        valleys = [
            valley(at[own, pair], error[own, pair])
            for pair, (a, b) in enumerate(torch.combinations(torch.arange(fit.k)).tolist())
            if min(int(members[a]), int(members[b])) > 1
            for own in [(label == a) | (label == b)]
        ]
        return Judged(fit, members, min(valleys, default=0.0))


def support(cohort: Cohort, theta: Tensor, share: Tensor) -> Support:
    """How many groups there are, looking up to a few more than a run has.

    Args:
        cohort: The clients.
        theta: The models of the run (k, d).
        share: The shares of the clients that choose them (k,).
    """
    clients, one = Clients.of(cohort)
    k, varied = len(theta), _varied(clients, one)
    same = clients.likeliest(one)
    fits = {1: clients.likeliest(varied)}
    for j in range(2, k + FURTHER + 1):
        if _falls(fits, j - 1) and (j - 1 > k or _falls(fits, j - 2)):
            break
        fits[j] = clients.likeliest(split(fits[j - 1].groups))
    if k > 1:
        own = clients.likeliest(_of_run(theta * clients.scale, share, fits[1].groups))
        fits[k] = max(fits.get(k, own), own, key=lambda fit: fit.likelihood)
        if k > 2:
            less = clients.likeliest(merged(fits[k].groups))
            fits[k - 1] = max(fits.get(k - 1, less), less, key=lambda fit: fit.likelihood)
    judged = {j: clients.judged(fits[j]) for j in _preferred(fits, k)}
    d = theta.shape[1]
    return Support(
        found=max((v.real for j, v in judged.items() if _holds(fits, v)), default=1),
        fits=fits,
        judged=judged,
        same=same.likelihood + d * (d + 1) / 4 * math.log(len(cohort)),
    )


def _falls(fits: dict[int, Fit], j: int) -> bool:
    """Whether j groups have less evidence than one fewer."""
    return j > 1 and fits[j].evidence < fits[j - 1].evidence


def _preferred(fits: dict[int, Fit], k: int) -> Iterator[int]:
    for j in sorted(fits):
        if j > 1 and (j == k or _better(fits, j)):
            yield j


def _better(fits: dict[int, Fit], j: int) -> bool:
    """Whether BIC clearly prefers j groups to any smaller number."""
    return fits[j].evidence > max(fit.evidence for i, fit in fits.items() if i < j) + CLEAR


def _holds(fits: dict[int, Fit], judged: Judged) -> bool:
    return _better(fits, judged.fit.k) and judged.real > 1 and judged.valley > VALLEY


def _varied(clients: Clients, one: Groups) -> Groups:
    """A start for one group whose clients vary: by as much as their rows' noise would let their own models."""
    sums = clients.expected(one)
    gram = sums["information"][0, 0] * one.noise / sums["clients"]  # of an average client
    ridge = gram + 0.01 * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    values, vectors = torch.linalg.eigh(ridge)
    return one._replace(factor=(vectors * (one.noise / values).sqrt())[None], noise=one.noise / 2)


def _of_run(theta: Tensor, share: Tensor, one: Groups) -> Groups:
    """A start from a run's models, around which clients vary less than all of them do."""
    share = share.clamp(min=0.5 / max(len(share), 1) / 100)
    return one._replace(share=(share / share.sum())[None], mean=theta[None], factor=0.3 * one.factor)


def _trigamma_inverse(value: float) -> float:
    """The x with ψ'(x) = value, by halving."""
    low, high = 1e-3, 1e5
    for _ in range(100):
        middle = math.sqrt(low * high)
        above = float(torch.polygamma(1, torch.tensor(middle).double())) > value
        low, high = (middle, high) if above else (low, middle)
    return math.inf if low > 5e4 else low


def _sums(cohort: Cohort, step: Any, message: Any) -> dict[str, Tensor]:
    sums = cohort.combine(step, to_device(message, cohort.engine.device)).update
    return {name: exact(x[0]) for name, x in sums.items()}
