"""What a diagnosis says in words: yes, no, or which figures leave it open."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from coterie.runs.held_out_support import CLEARLY, HARDLY, ROUNDS, Gain, HeldOut
from coterie.runs.support import CLEAR, FEWER, FLAT, VALLEY, Judged, Support

TOLERATED = 0.2  # the share of mislabelled clients up to which labels are worth having
DISAGREE = 0.05  # the share of clients with another label under the likeliest models that the verdict mentions


class Facts(NamedTuple):
    """All that the figures and the verdict are made of."""

    sizes: Tensor  # n_i (M,)
    labels: Tensor  # ẑ_i under the likeliest models (M,)
    wrong: Tensor  # the probability that this label is wrong (M,)
    theta: Tensor  # the likeliest models (k, d)
    sigma: float
    seen: Tensor  # the root mean square over all rows of ⟨φ(x), θ_j - θ_j'⟩ (k, k); infinite where it is no pair
    support: Support  # how many groups there are, where clients of one group may vary
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


def judged(facts: Facts, value: dict[str, float]) -> tuple[bool | None, str]:
    """Whether the data support the groups of a run, and that in words.

    Args:
        facts: What is known of the clients.
        value: The figures by name.
    """
    k, found = len(facts.theta), facts.support
    faults = [
        *_faults_of_run(facts, value),
        *(_faults_of_groups(found.judged[k]) if found.supports(k) is False else ()),
    ]
    supported = False if faults else found.supports(k)
    words = [*_sentences(facts, value), *_evidence(facts, value), *_answer(facts, supported, faults)]
    return supported, " ".join(words)


def by_rows(facts: Facts) -> dict[tuple[int, int], float]:
    """The mean of p_i over clients with 1, 2, 3 to 4, 5 to 8, … rows."""
    band = facts.sizes.log2().ceil()
    parts = [(facts.sizes[band == b], facts.wrong[band == b]) for b in band.unique()]
    return {(int(n.min()), int(n.max())): float(p.mean()) for n, p in parts}


def _answer(facts: Facts, supported: bool | None, faults: list[str]) -> Iterator[str]:
    """The answer about the groups of the run, and about other numbers of groups."""
    k, found = len(facts.theta), facts.support
    if supported:
        more = f", and more: they support {found.found}" if found.found > k else ""
        yield f"The data support {_groups(k)}{_nature(found)}{more}."
    elif faults:
        yield f"The data do not support {_groups(k)}: {'; '.join(faults)}."
    elif found.open:
        yield f"No verdict on {_groups(k)}: {_left_open(found.open)}."
    if not supported and found.found != k and not (found.open and found.found == 1):
        yield f"They support {_groups(found.found)}{_nature(found)}."
    if supported is not None and found.open:
        yield f"Whether they support {found.open.real} groups is open: {_left_open(found.open)}."


def _nature(found: Support) -> str:
    """What a single group is like."""
    if found.groups != 1:
        return ""
    gain = found.fits[1].evidence - found.same
    return ", in which clients merely vary" if gain > 0 else ", in which all clients may have the same model"


def _left_open(groups: Judged) -> str:
    """Which figures leave it open whether there are so many groups."""
    k, real, bic = groups.fit.k, groups.real, f"(Δ BIC = {2 * groups.ahead:.0f})"
    number = f"{k} groups{f', of which {real} have two clients or more,' if real < k else ''}"
    low = f"between two of them the valley is only {groups.valley:.1f} nats"
    if groups.preferred:
        return f"BIC prefers {number} {bic}, but {low}"
    if groups.apart:
        return f"the valleys between {number} are clear ({groups.valley:.1f} nats), but BIC hardly prefers them {bic}"
    return f"BIC hardly prefers {number} {bic}, and {low}"


def _faults_of_run(facts: Facts, value: dict[str, float]) -> Iterator[str]:
    d = facts.theta.shape[1]
    if empty := (facts.members == 0).nonzero().flatten().tolist():
        yield f"no client chooses model {_listed(empty)}"
    if small := ((facts.rows > 0) & (facts.rows < d)).nonzero().flatten().tolist():
        yield f"cluster {_listed(small)} has fewer rows than a model has parameters, {d}"
    if value["mislabelled clients"] > TOLERATED:
        j, other = divmod(int(facts.seen.argmin()), len(facts.seen))
        pair = f"models {j} and {other} are the closest"
        yield f"over {TOLERATED:.0%} of the clients would be mislabelled, and {pair}"


def _faults_of_groups(groups: Judged) -> Iterator[str]:
    if groups.preferred is False:
        yield "fewer groups, in which clients vary, explain them as well, allowing for their fewer parameters"
    if few := groups.fit.k - groups.real:
        yield f"{few} of the groups {'have' if few > 1 else 'has'} one client at most"
    if groups.apart is False:
        yield "between two of the groups there is no valley, so that their clients may be a continuum"


def _evidence(facts: Facts, value: dict[str, float]) -> Iterator[str]:
    """The figures that decide."""
    k = len(facts.theta)
    clear, deep = (
        f"(over {high:.0f} is clear, up to {low:.0f} is none)" for low, high in ((2 * FEWER, 2 * CLEAR), (FLAT, VALLEY))
    )
    if k > 1:
        one = f"one that varies: Δ BIC = {2 * value['evidence']:.0f}; against " if k > 2 else ""
        last = "the best merge of two" if k > 2 else "one that varies"
        yield (
            f"{k} groups against {one}{last}: Δ BIC = {2 * value['against a merge']:.0f} {clear}; against a "
            f"continuum, between the two closest: {value['valley']:.1f} nats {deep}."
        )
    if facts.support.found == 1:
        yield f"One group that varies against one and the same model for all: Δ BIC = {2 * value['clients vary']:.0f}."


def _sentences(facts: Facts, value: dict[str, float]) -> Iterator[str]:
    sizes, d = facts.sizes, facts.theta.shape[1]
    least, middle, most = (int(n) for n in (sizes.min(), sizes.median(), sizes.max()))
    yield f"{len(sizes)} clients have {_range(least, most)} each{f', half of them at most {middle}' * (least < most)}."
    if bool(torch.isfinite(facts.seen).any()):
        bands = ", ".join(f"{p:.0%} with {_range(*n)}" for n, p in by_rows(facts).items())
        yield (
            f"With Δ/σ = {value['Δ/σ']:.2g} about {value['mislabelled clients']:.0%} will be mislabelled ({bands}); "
            f"on an average row the two closest models differ by {float(facts.seen.min()) / facts.sigma:.2g} σ."
        )
    if len(facts.theta) > 1:
        yield f"The smallest cluster has {facts.rows.min():.0f} rows for {d} parameters."
    if value.get("ν", 0) > 1:
        yield "The bound ν exceeds 1 with its constants set to 1, and says nothing."
    elif "ρ/κ" in value:
        holds = "holds" if value["ν log(e/ν)"] <= value["ρ/κ"] else "does not hold"
        yield f"Theorem 2's condition ν log(e/ν) ≲ ρ/κ {holds}, with all constants set to 1."
    if facts.disagree > DISAGREE:
        yield (
            f"{facts.disagree:.0%} of the clients choose another cluster under the likeliest models than under the "
            "run's: more rounds, soft labels or another start may help the run."
        )


def _groups(k: int) -> str:
    return f"{k} group{'s' * (k > 1)}"


def _range(low: int, high: int) -> str:
    return f"{low} row{'s' * (low > 1)}" if low == high else f"{low} to {high} rows"


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


# --- by held-out rows ------------------------------------------------------------------------------------------------


def judged_by_losses(found: HeldOut) -> str:
    """The same where models are judged by rows that they were not trained on."""
    k, supported = len(found.members), found.supported
    if supported:
        end = f"The data support {_groups(k)}."
    elif supported is None:
        end = f"No verdict on {_groups(k)}: {' and '.join(_close(found))}."
    else:
        end = f"The data do not support {_groups(k)}: {'; '.join(_unneeded(found))}."
    return f"{_losses_in_words(found)} {end}"


def _losses_in_words(found: HeldOut) -> str:
    k, (a, b) = len(found.members), found.closest
    if k == 1:
        return f"{found.clients} clients have a mean loss of {found.loss:.3g} on their test rows."
    fewer = (
        f"one model for clusters {a} and {b}, the closest, by {_plus_minus(found.merge)}, and than with "
        if k > 2
        else ""
    )
    return (
        f"{found.clients} clients have a mean loss of {found.loss:.3g} on their test rows, all models being trained on "
        f"for {ROUNDS} rounds. It is lower than with {fewer}one model for all by {_plus_minus(found.one)} "
        f"(over {CLEARLY:.0f} standard errors is clear, up to {HARDLY:.0f} is none)."
    )


def _plus_minus(gain: Gain) -> str:
    return f"{gain.mean:.3g} ± {gain.error:.2g}"


def _close(found: HeldOut) -> Iterator[str]:
    """Which gains chance may be the reason of."""
    a, b = found.closest
    for gain, other in ((found.merge, f"one model for clusters {a} and {b}"), (found.one, "one model for all")):
        if gain.real is None and (gain is found.merge or len(found.members) > 2):
            yield f"{other} serves clients worse by {gain.mean / gain.error:.1f} standard errors only"


def _unneeded(found: HeldOut) -> Iterator[str]:
    a, b = found.closest
    if empty := (found.members == 0).nonzero().flatten().tolist():
        yield f"no client chooses model {_listed(empty)}"
    if single := (found.members == 1).nonzero().flatten().tolist():
        yield f"cluster {_listed(single)} has one client only"
    if found.merge.real is False:
        yield f"one model for clusters {a} and {b} serves their clients as well"
    elif found.one.real is False:
        yield "one model for all serves clients as well"
