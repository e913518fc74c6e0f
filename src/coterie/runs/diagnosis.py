"""Can the data support so many groups? The quantities on which mixed regression depends, estimated from a run.

Global Convergence of Federated Learning for Mixed Regression
    Lili Su, Jiaming Xu, Pengkun Yang. NeurIPS 2022, Sections 3 and 4.2.

The models of a run whose clients choose the best of k lie too far apart, and leave too small residuals, where the
groups overlap: a client takes the model that suits its noise. So Δ and σ are not read off the run: starting from its
models, those of the greatest likelihood are found by expectation and maximisation, for which only sums are needed.

Whether there are groups at all is not a question about these, but about `coterie.runs.support`. Models of other kinds
are judged by rows that they were not trained on: `coterie.runs.held_out_support`.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.core.cohort import Cohort
from coterie.core.features import is_linear
from coterie.core.federation import Federation
from coterie.core.method import Method
from coterie.core.pytree import exact, flat, to_device
from coterie.core.step import Reply
from coterie.methods.fedx import FedX
from coterie.parts.random_effects import QUIET, Mixture, maximised
from coterie.runs.held_out_support import HeldOut, held_out
from coterie.runs.run import Run
from coterie.runs.support import FURTHER, Clients, Known, Observer, support
from coterie.runs.verdict import Facts, by_rows, judged, judged_by_losses

STEPS, SETTLED = 200, 1e-4  # of expectation and maximisation at most; the change of all models at which to stop
WIDTH = 112  # of the verdict, about that of the table


class Figure(NamedTuple):
    """One estimate, how it is made, and where the paper has it."""

    name: str
    value: float
    formula: str
    where: str


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` returns; printed, it is a table and a verdict.

    Attributes:
        figures: The estimates. `diagnosis["Δ"]` is the value of one.
        by_rows: The expected share of mislabelled clients among those with (least, most) rows; empty where models
            are judged by held-out rows.
        supported: Whether the data support as many groups as the run has: each of its models is needed. There may be
            more groups. None, which is no verdict, where figures disagree or are too close to call.
        groups: The number of groups that the data support, looking a few further than the run has; 1 where clients
            have the same model or merely vary. None where it is open whether there are more, and where models are
            judged by held-out rows.
        verdict: The same in words; without a verdict, which figures leave it open.
    """

    figures: tuple[Figure, ...]
    by_rows: dict[tuple[int, int], float]
    supported: bool | None
    groups: int | None
    verdict: str

    def __getitem__(self, name: str) -> float:
        for figure in self.figures:
            if figure.name == name:
                return figure.value
        raise KeyError(f"no figure '{name}'; there are {', '.join(f.name for f in self.figures)}")

    def __str__(self) -> str:
        rows = [(f.name, f"{f.value:.4g}", f.formula, f.where) for f in self.figures]
        name, value, formula, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
        lines = [f"{a:<{name}}  {b:>{value}}  {c:<{formula}}  {d}" for a, b, c, d in rows]
        return "\n".join([*lines, "", textwrap.fill(self.verdict, WIDTH)])


def diagnose(federation: Federation, run: Run, *, further: int = FURTHER) -> Diagnosis:
    """Say whether the data can support the groups of a run, if that is clear, and estimate what it depends on.

    Args:
        federation: The clients: those of the run, or others of their kind.
        run: A run by any method that finds clusters. A regression whose model is linear in its parameters is judged by
            what its clients' rows say about groups that vary; any other task by rows that were not trained on.
        further: How many groups more than the run has are looked for at most.

    Raises:
        ValueError: There are fewer rows than parameters, or no test rows where these are needed.

    Example:
        >>> import coterie as ct
        >>> federation = ct.data.mixed_regression(k=2, d=5, sigma=0.1, pairs=0, rest=60, rest_rows=(10,), anchors=0)
        >>> task = ct.Task.regressor(ct.models.Linear(5, 1))
        >>> for k in (1, 2, 3):
        ...     run = ct.fit(ct.FedX(k=k), task, federation, rounds=20, evaluations=1)
        ...     found = ct.diagnose(federation, run)
        ...     found.supported, found.groups
        (True, 2)
        (True, 2)
        (False, 2)
    """
    own = run._cohort
    federation.check(own.task)
    cohort = own.uncharged() if federation is own.federation else run.cohort_of(federation)
    return diagnose_state(cohort, run.algorithm, run.state, further)


def diagnose_state(cohort: Cohort, algorithm: Method, state: Any, further: int = FURTHER) -> Diagnosis:
    """The same for a state and some clients."""
    if not is_linear(cohort.task, cohort.federation.train.x[:2]):
        return _of_held_out(held_out(cohort, algorithm, state))
    _check(cohort, algorithm, state)
    facts = _facts(cohort, algorithm, state, further)
    figures = tuple(_figures(facts, algorithm, state))
    supported, verdict = judged(facts, {f.name: f.value for f in figures})
    return Diagnosis(figures, by_rows(facts), supported, facts.support.groups, verdict)


# --- what is asked of the clients ------------------------------------------------------------------------------------


def _check(cohort: Cohort, algorithm: Method, state: Any) -> None:
    """Refuse what cannot be diagnosed."""
    k, d = flat(algorithm.models(state)).shape
    if (rows := len(cohort.federation.train.x)) <= k * d:
        raise ValueError(f"diagnose: there are {rows} rows, too few for {k} models with {k * d} parameters together")
    if len(cohort) < 2:
        raise ValueError("diagnose: there is one client only, so there is nothing to tell apart")


def _facts(cohort: Cohort, algorithm: Method, state: Any, further: int) -> Facts:
    theta = exact(flat(algorithm.models(state)))
    (k, p), rows = theta.shape, len(cohort.federation.train.x)
    before = _looked(cohort, Known(theta, torch.ones(k), torch.ones(()).double()))
    share = before.slot.bincount(minlength=k).double() / len(cohort)
    known, seen = _likeliest(cohort, Known(theta, share, before.note["squares"].sum() / rows))
    variance = known.variance * rows / (rows - int((share > 0).sum()) * p)
    after = _looked(cohort, known._replace(variance=variance))
    return Facts(
        sizes=cohort.sizes.double(),
        labels=after.slot,
        wrong=after.note["wrong"],
        theta=known.theta,
        sigma=math.sqrt(float(variance)),
        seen=seen,
        support=support(cohort, theta, share, further),
        disagree=float((before.slot != after.slot).double().mean()),
        curvature=_curvature(cohort, algorithm) if isinstance(algorithm, FedX) else math.nan,
    )


def _curvature(cohort: Cohort, algorithm: FedX) -> float:
    return float(cohort.gather(algorithm.curvature, ()).note["curvature"].max())


def _looked(cohort: Cohort, known: Known) -> Reply:
    reply = cohort.gather(Observer().look, to_device(known, cohort.engine.device), slots=len(known.share))
    return reply._replace(note={name: exact(x) for name, x in reply.note.items()})


def _likeliest(cohort: Cohort, known: Known) -> tuple[Known, Tensor]:
    """The likeliest models of the paper's kind, with one noise and no variation within groups; and `Facts.seen`."""
    clients, one = Clients.of(cohort, own_noise=False)
    frame = clients.frame
    mean, none = known.theta / frame.unit @ torch.linalg.pinv(frame.basis).mT, torch.zeros_like(one.factor)
    noise = (known.variance / frame.unit.square()).clamp(min=QUIET)
    mixture, moment = Mixture(known.share[None], mean[None], none, noise[None]), none
    for _ in range(STEPS):
        old, sums = mixture, clients.expected(mixture)
        mixture, moment = maximised(mixture, sums), (sums["information"][0] * mixture.noise).sum(0) / sums["rows"]
        if float((mixture.mean - old.mean).norm()) <= SETTLED * float(old.mean.norm()):
            break
    likeliest = Known(frame.parameters(mixture.mean[0]), mixture.share[0], mixture.noise[0] * frame.unit.square())
    return likeliest, frame.unit * _seen(mixture, moment)


def _seen(mixture: Mixture, moment: Tensor) -> Tensor:
    theta, some = mixture.mean[0], mixture.share[0] > 0
    apart = theta[:, None] - theta
    seen = torch.einsum("abd,de,abe->ab", apart, moment, apart).clamp(min=0).sqrt()
    real = some[:, None] & some & ~torch.eye(len(seen), dtype=torch.bool)
    return seen.where(real, torch.inf)


# --- what follows from it --------------------------------------------------------------------------------------------


def _figures(facts: Facts, algorithm: Method, state: Any) -> Iterator[Figure]:
    yield from _of_data(facts)
    yield from _of_support(facts)
    if len(facts.theta) > 1:
        yield from _of_theorem(facts, algorithm, state)


def _of_data(facts: Facts) -> Iterator[Figure]:
    sizes, m = facts.sizes, len(facts.sizes)
    chosen = facts.theta[facts.members > 0]
    delta = float(torch.pdist(chosen).min()) if len(chosen) > 1 else math.nan
    by_row = sizes / sizes.sum()
    yield Figure("Δ", delta, "min ‖θ_j - θ_j'‖", "Section 3, after (1)")
    yield Figure("σ", facts.sigma, "√(Σ_i Σ_j λ_ij ‖y_i - φ(x_i)θ_j‖² / (N - kd))", "Section 3, after (1)")
    yield Figure("Δ/σ", delta / facts.sigma, "", "Theorem 2, in p_e")
    yield Figure("p_min", float(facts.members.min()) / m, "min_j |{i: ẑ_i = j}| / M", "Section 3, after (1)")
    yield Figure("ρ", float(facts.rows.min() / sizes.sum()), "min_j N_j / N", "Theorem 2")
    yield Figure("χ²(n)", float(m * by_row.square().sum() - 1), "M Σ_i (n_i/N)² - 1", "before Theorem 2")
    formula = "mean of p_i = 1 - Π_{j≠ẑ_i} Φ(‖φ(x_i)(θ_ẑ_i - θ_j)‖ / 2σ)"
    yield Figure("mislabelled clients", float(facts.wrong.mean()), formula, "from (8), Gaussian noise")
    yield Figure("mislabelled rows", float(by_row @ facts.wrong), "Σ_i n_i p_i / N", "first term of (10), with p_i")


def _of_support(facts: Facts) -> Iterator[Figure]:
    """What speaks for groups: L_k is the likelihood of k groups in which clients vary, and have noise of their own."""
    found, k = facts.support, len(facts.theta)
    one = found.fits[1]
    if k > 1:
        own, less = found.fits[k], found.fits[k - 1]
        formula = "log L_k - log L_1 - (k - 1)(d + 1)/2 · log M"
        yield Figure("evidence", own.evidence - one.evidence, formula, "BIC, against one group that varies")
        formula = "log L_k - log L_{k-1} - (d + 1)/2 · log M"
        yield Figure("against a merge", own.evidence - less.evidence, formula, "BIC, against the best merge of two")
        formula = "min_{a,b} log L(two groups) - log L(one hump), along θ_a - θ_b"
        yield Figure("valley", found.judged[k].valley, formula, "not in the paper")
    formula = "log L_1 - log L(Σ = 0) - d(d + 1)/4 · log M"
    yield Figure("clients vary", one.evidence - found.same, formula, "BIC, within one group")
    yield Figure("groups", float(found.found), "that the data clearly support", "not in the paper")
    if found.open:
        yield Figure("groups, perhaps", float(found.open.real), "of which that is open", "not in the paper")


def _of_theorem(facts: Facts, algorithm: Method, state: Any) -> Iterator[Figure]:
    """Theorem 2 with its constants c and C, which the paper leaves open, set to 1."""
    (k, d), sizes, m = facts.theta.shape, facts.sizes, len(facts.sizes)
    data = {f.name: f.value for f in _of_data(facts)}
    contrast = torch.tensor(data["Δ/σ"]).square().clamp(max=1)  # of NaN, NaN
    p_e = 4 * k * (-sizes * contrast.square()).exp()
    expected = float(sizes @ p_e / sizes.sum())
    deviation = math.sqrt(d * k * math.log(k) / m * (data["χ²(n)"] + 1))
    yield Figure("Σ n p_e / N", expected, "p_e(n) = 4k exp(-c n (1 ∧ Δ²/σ²)²), c = 1", "Theorem 2, (10)")
    yield Figure("deviation", deviation, "C √(dk log k / M · (χ²(n) + 1)), C = 1", "Theorem 2, (10)")
    nu = expected + deviation
    yield Figure("ν", nu, "the sum of these two", "Theorem 2, (10)")
    yield Figure(
        "ν log(e/ν)", min(nu, 1.0) * (1 - math.log(min(nu, 1.0))), "at most 1; above it ν says nothing", "Theorem 2"
    )
    if isinstance(algorithm, FedX) and not algorithm.solves(state):  # least squares take no steps
        gamma = 2 * state.lr * facts.curvature
        prox, s = algorithm.refine == "fedprox", algorithm.tau
        kappa = 1 + gamma if prox else s * gamma / (1 - (1 - gamma) ** s)
        yield Figure("γ", gamma, "η max ‖φ(x_i)‖² / n_i, η = 2 lr", "Section 4.2, after (8)")
        yield Figure("κ", kappa, "1 + γ" if prox else f"sγ / (1 - (1 - γ)^s), s = {s}", "Section 4.2, after (8)")
        yield Figure("ρ/κ", data["ρ"] / kappa, "must be ≳ ν log(e/ν)", "Theorem 2")


# --- by held-out rows ------------------------------------------------------------------------------------------------


def _of_held_out(found: HeldOut) -> Diagnosis:
    return Diagnosis(tuple(_of_losses(found)), {}, found.supported, None, judged_by_losses(found))


def _of_losses(found: HeldOut) -> Iterator[Figure]:
    yield Figure("loss", found.loss, "mean over clients of the loss of test rows", f"{len(found.members)} models")
    yield Figure("p_min", float(found.members.min()) / found.clients, "min_j |{i: ẑ_i = j}| / M", "")
    if len(found.members) > 1:
        a, b = found.closest
        yield Figure("against a merge", found.merge.mean, f"lower than with one model for {a} and {b}", "their clients")
        yield Figure("± merge", found.merge.error, "standard error over clients", "")
        yield Figure("against one", found.one.mean, "lower than with one model for all", "all clients")
        yield Figure("± one", found.one.error, "standard error over clients", "")
