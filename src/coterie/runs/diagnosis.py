"""Can the data support so many groups? The quantities on which mixed regression depends, estimated from a run.

Global Convergence of Federated Learning for Mixed Regression
    Lili Su, Jiaming Xu, Pengkun Yang. NeurIPS 2022, Sections 3 and 4.2.

The models of a run whose clients choose the best of k lie too far apart, and leave too small residuals, where the
groups overlap: a client takes the model that suits its noise. So Δ and σ are not read off the run: starting from its
models, those of the greatest likelihood are found by expectation and maximisation, for which only sums are needed.
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
from coterie.core.features import require_linear
from coterie.core.federation import Federation
from coterie.core.method import Method
from coterie.core.pytree import Outer, flat, take, tree_map
from coterie.core.registry import register
from coterie.core.step import ClientStep, Local, Reply, client_step
from coterie.core.task import Data, Task
from coterie.methods.fedx import FedX
from coterie.runs.run import Run

TOLERATED = 0.2  # the share of mislabelled clients up to which labels are worth having
DISAGREE = 0.05  # the share of clients with another label under the likeliest models that the verdict mentions
STEPS, SETTLED = 200, 1e-4  # of expectation and maximisation at most; the change of all models at which to stop
NARROW = 1e-6  # the part of a second moment's largest eigenvalue below which a direction counts as not seen
WIDTH = 112  # of the verdict, about that of the table
LEAST = 1e-30  # a variance, where a model fits without any residual


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
        by_rows: The expected share of mislabelled clients among those with (least, most) rows.
        supported: Whether the data support as many groups as the run has.
        verdict: The same in words.
    """

    figures: tuple[Figure, ...]
    by_rows: dict[tuple[int, int], float]
    supported: bool
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


class Mixture(NamedTuple):
    """K regressions with Gaussian noise, of which each client has one."""

    theta: Tensor  # (k, d)
    share: Tensor  # of the clients (k,); 0 for a cluster that nobody chose
    variance: Tensor  # σ²


@register("observer", "service")
@dataclass(frozen=True)
class Observer:
    """The client's side of a diagnosis."""

    @client_step
    def expect(self, task: Task) -> ClientStep:
        """λ, how likely each model is the client's, and what the likeliest models follow from: all to be added up."""

        def run(mixture: Mixture, local: Local) -> Reply:
            phi, squares, rows = *_residuals(task, mixture.theta, local.data), local.data.mask.sum()
            fits = mixture.share.log() - squares / (2 * mixture.variance)
            share = fits.softmax(0)
            update = {
                "moment": Outer(share[:, None, None] * phi, phi.expand(len(share), *phi.shape)),
                "product": share[:, None] * (phi.T @ (local.data.y.reshape(-1) * local.data.mask)),
                "share": share,
                "squares": share @ squares,
                "likelihood": fits.logsumexp(0) - rows / 2 * (2 * math.pi * mixture.variance).log(),
            }
            return Reply(update)

        return ClientStep(run)

    @client_step
    def look(self, task: Task) -> ClientStep:
        """The label of (8), and the probability that noise makes another model look better than the true one.

        It is exact for two models and Gaussian noise. Of more models it takes the comparisons for independent, which
        gives too much where they go together, as they do unless one model lies between two others.
        """

        def run(mixture: Mixture, local: Local) -> Reply:
            phi, squares = _residuals(task, mixture.theta, local.data)
            chosen = mixture.share > 0
            label = squares.where(chosen, torch.inf).argmin()
            apart = (phi @ (mixture.theta - take(mixture.theta, label)).T).norm(dim=0)
            others = chosen & (torch.arange(len(chosen), device=label.device) != label)
            looks_better = torch.special.ndtr(-apart / (2 * mixture.variance.sqrt()))
            wrong = -(-looks_better * others).log1p().sum().expm1()  # 1 - Π (1 - p)
            note = {"wrong": wrong.clamp(max=1 - 1 / chosen.sum()), "squares": take(squares, label)}
            return Reply(slot=label, note=note)

        return ClientStep(run)


class _Facts(NamedTuple):
    """All that the figures and the verdict are made of."""

    sizes: Tensor  # n_i (M,)
    labels: Tensor  # ẑ_i under the likeliest models (M,)
    wrong: Tensor  # the probability that this label is wrong (M,)
    theta: Tensor  # the likeliest models (k, d)
    sigma: float
    seen: Tensor  # the root mean square over all rows of ⟨φ(x), θ_j - θ_j'⟩ (k, k); infinite where it is no pair
    evidence: float  # for k models rather than one
    disagree: float  # the share of clients that choose another cluster under the models of the run
    curvature: float  # max ‖φ(x_i)‖²/n_i; asked for only where it is needed

    @property
    def members(self) -> Tensor:
        """Clients of every cluster (k,)."""
        return self.labels.bincount(minlength=len(self.theta))

    @property
    def rows(self) -> Tensor:
        """N_j (k,)."""
        return self.labels.bincount(self.sizes, minlength=len(self.theta))


def diagnose(federation: Federation, run: Run) -> Diagnosis:
    """Estimate what mixed regression depends on, and say whether the data can support the groups of a run.

    Args:
        federation: The clients: those of the run, or others of their kind.
        run: A run for a regression whose model is linear in its parameters, by any method that finds clusters.

    Raises:
        ValueError: The run is of another kind, or has a single cluster, or more parameters than there are rows.

    Example:
        >>> import coterie as ct
        >>> task = ct.Task.regressor(ct.models.Linear(5, 1))
        >>> for sigma in (0.1, 2.0):
        ...     federation = ct.data.mixed_regression(k=2, d=5, sigma=sigma, pairs=300, rest=0, anchors=10)
        ...     run = ct.fit(ct.FedX(k=2), task, federation, rounds=20, evaluations=1)
        ...     ct.diagnose(federation, run).supported
        True
        False
    """
    own = run._cohort
    federation.check(own.task)
    cohort = own.uncharged() if federation is own.federation else run.cohort_of(federation)
    return diagnose_state(cohort, run.algorithm, run.state)


def diagnose_state(cohort: Cohort, algorithm: Method, state: Any) -> Diagnosis:
    """The same for a state and some clients."""
    _check(cohort, algorithm, state)
    facts = _facts(cohort, algorithm, state)
    figures = (*_of_data(facts), *_of_theorem(facts, algorithm, state))
    supported, verdict = _verdict(facts, {f.name: f.value for f in figures})
    return Diagnosis(figures, _by_rows(facts), supported, verdict)


# --- what is asked of the clients ------------------------------------------------------------------------------------


def _residuals(task: Task, theta: Tensor, data: Data) -> tuple[Tensor, Tensor]:
    """φ of a client's rows (n, d), and ‖y_i - φ(x_i)θ_j‖² for every model (k,)."""
    assert task.features is not None  # `require_linear` has seen to it
    phi = task.features(data.x) * data.mask[:, None]
    off = (data.y.reshape(-1) * data.mask)[:, None] - phi @ theta.T
    return phi, off.square().sum(0)


def _check(cohort: Cohort, algorithm: Method, state: Any) -> None:
    """Refuse what cannot be diagnosed."""
    require_linear(cohort.task, cohort.federation.train.x[:2], "diagnose")
    k, d = flat(algorithm.models(state)).shape
    if k < 2:
        raise ValueError("diagnose: the run has one cluster only, so there is nothing to tell apart")
    if (rows := len(cohort.federation.train.x)) <= k * d:
        raise ValueError(f"diagnose: there are {rows} rows, too few for {k} models with {k * d} parameters together")


def _facts(cohort: Cohort, algorithm: Method, state: Any) -> _Facts:
    theta = flat(algorithm.models(state)).cpu().double()
    (k, d), rows = theta.shape, len(cohort.federation.train.x)
    before = _looked(cohort, Mixture(theta, torch.ones(k), torch.ones(())))
    share = before.slot.bincount(minlength=k).double() / len(cohort)
    mixture, sums = _likeliest(cohort, Mixture(theta, share, before.note["squares"].double().sum() / rows))
    fitted = int((share > 0).sum())
    variance = mixture.variance * rows / (rows - fitted * d)
    after = _looked(cohort, mixture._replace(variance=variance))
    return _Facts(
        sizes=cohort.sizes.double(),
        labels=after.slot,
        wrong=after.note["wrong"].double(),
        theta=mixture.theta,
        sigma=math.sqrt(float(variance)),
        seen=_seen(mixture, sums["moment"].sum(0) / rows),
        evidence=float(sums["likelihood"]) - _of_one(cohort, sums) - (fitted - 1) * (d + 1) / 2 * math.log(rows),
        disagree=float((before.slot != after.slot).double().mean()),
        curvature=_curvature(cohort, algorithm) if isinstance(algorithm, FedX) else math.nan,
    )


def _curvature(cohort: Cohort, algorithm: FedX) -> float:
    return float(cohort.gather(algorithm.curvature, ()).note["curvature"].max())


def _looked(cohort: Cohort, mixture: Mixture) -> Reply:
    return tree_map(Tensor.cpu, cohort.gather(Observer().look, tree_map(Tensor.float, mixture)))


def _expected(cohort: Cohort, mixture: Mixture) -> dict[str, Tensor]:
    sums = cohort.combine(Observer().expect, tree_map(Tensor.float, mixture)).update
    return {name: x[0].cpu().double() for name, x in sums.items()}


def _likeliest(cohort: Cohort, mixture: Mixture) -> tuple[Mixture, dict[str, Tensor]]:
    """Expectation and maximisation until the models stay as they are; and the last sums."""
    sums: dict[str, Tensor] = {}
    for _ in range(STEPS):
        old, sums = mixture.theta, _expected(cohort, mixture)
        mixture = Mixture(
            theta=old + _solved(sums["moment"], sums["product"] - (sums["moment"] @ old[:, :, None])[:, :, 0]),
            share=sums["share"] / len(cohort),
            variance=(sums["squares"] / len(cohort.federation.train.x)).clamp(min=LEAST),
        )
        if float((mixture.theta - old).norm()) <= SETTLED * float(old.norm()):
            break
    return mixture, sums


def _of_one(cohort: Cohort, sums: dict[str, Tensor]) -> float:
    """The greatest log-likelihood of one model for all clients."""
    theta = _solved(sums["moment"].sum(0), sums["product"].sum(0))
    rows = len(cohort.federation.train.x)
    squares = _expected(cohort, Mixture(theta[None], torch.ones(1), torch.ones(())))["squares"]
    return -rows / 2 * (math.log(2 * math.pi * max(float(squares) / rows, LEAST)) + 1)


def _solved(moment: Tensor, product: Tensor) -> Tensor:
    """A⁻¹b for second moments A (…, d, d) and b (…, d), and 0 in directions that no row has."""
    return (torch.linalg.pinv(moment, rtol=NARROW, hermitian=True) @ product[..., None])[..., 0]


def _seen(mixture: Mixture, moment: Tensor) -> Tensor:
    apart = mixture.theta[:, None] - mixture.theta
    seen = torch.einsum("abd,de,abe->ab", apart, moment, apart).clamp(min=0).sqrt()
    real = (mixture.share > 0)[:, None] & (mixture.share > 0) & ~torch.eye(len(seen), dtype=torch.bool)
    return seen.where(real, torch.inf)


# --- what follows from it --------------------------------------------------------------------------------------------


def _of_data(facts: _Facts) -> Iterator[Figure]:
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
    yield Figure("evidence", facts.evidence, "log L_k - log L_1 - (k - 1)(d + 1)/2 · log N", "BIC; not in the paper")


def _of_theorem(facts: _Facts, algorithm: Method, state: Any) -> Iterator[Figure]:
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


def _by_rows(facts: _Facts) -> dict[tuple[int, int], float]:
    """The mean of p_i over clients with 1, 2, 3 to 4, 5 to 8, … rows."""
    band = facts.sizes.log2().ceil()
    parts = [(facts.sizes[band == b], facts.wrong[band == b]) for b in band.unique()]
    return {(int(n.min()), int(n.max())): float(p.mean()) for n, p in parts}


def _verdict(facts: _Facts, value: dict[str, float]) -> tuple[bool, str]:
    faults = list(_faults(facts, value))
    k = len(facts.theta)
    end = f"The data do not support {k} groups: {'; '.join(faults)}." if faults else f"The data support {k} groups."
    return not faults, " ".join([*_sentences(facts, value), end])


def _faults(facts: _Facts, value: dict[str, float]) -> Iterator[str]:
    d = facts.theta.shape[1]
    if empty := (facts.members == 0).nonzero().flatten().tolist():
        yield f"no client chooses model {_listed(empty)}"
    if small := ((facts.rows > 0) & (facts.rows < d)).nonzero().flatten().tolist():
        yield f"cluster {_listed(small)} has fewer rows than a model has parameters, {d}"
    if value["mislabelled clients"] > TOLERATED:
        j, other = divmod(int(facts.seen.argmin()), len(facts.seen))
        yield f"over {TOLERATED:.0%} of the clients would be mislabelled, and models {j} and {other} are the closest"
    if value["evidence"] <= 0:
        yield (
            "one model for all explains them as well, allowing for its fewer parameters, so that what sets the "
            "groups apart may be noise, and more clients will be mislabelled than the figures say"
        )


def _sentences(facts: _Facts, value: dict[str, float]) -> Iterator[str]:
    sizes, d = facts.sizes, facts.theta.shape[1]
    least, middle, most = (int(n) for n in (sizes.min(), sizes.median(), sizes.max()))
    yield f"{len(sizes)} clients have {_range(least, most)} each{f', half of them at most {middle}' * (least < most)}."
    if bool(torch.isfinite(facts.seen).any()):
        bands = ", ".join(f"{p:.0%} with {_range(*n)}" for n, p in _by_rows(facts).items())
        yield (
            f"With Δ/σ = {value['Δ/σ']:.2g} about {value['mislabelled clients']:.0%} will be mislabelled ({bands}); "
            f"on an average row the two closest models differ by {float(facts.seen.min()) / facts.sigma:.2g} σ."
        )
    yield f"The smallest cluster has {facts.rows.min():.0f} rows for {d} parameters."
    if value["ν"] > 1:
        yield "The bound ν exceeds 1 with its constants set to 1, and says nothing."
    elif "ρ/κ" in value:
        holds = "holds" if value["ν log(e/ν)"] <= value["ρ/κ"] else "does not hold"
        yield f"Theorem 2's condition ν log(e/ν) ≲ ρ/κ {holds}, with all constants set to 1."
    if facts.disagree > DISAGREE:
        yield (
            f"{facts.disagree:.0%} of the clients choose another cluster under the likeliest models than under the "
            "run's: more rounds, soft labels or another start may help the run."
        )


def _range(low: int, high: int) -> str:
    return f"{low} row{'s' * (low > 1)}" if low == high else f"{low} to {high} rows"


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
