"""What a private run's exchanges cost, by the package dp-accounting.

Every exchange is one release of a Gaussian mechanism. Where the server adds the noise and clients were sampled, each
with the same chance and independently, it is that of a Poisson sample: privacy loss distributions tell what releases
cost together. Where clients add the noise, their server knows who takes part, so sampling hides nothing, and the sum of
n discrete Gaussians of σ units each is ½/z²-concentrated private up to a term of e^(-2π²σ²) (Kairouz, Liu and Steinke
2021, Theorem 1), which with σ ≥ 1024 is 0 in every computer's arithmetic.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import dp_accounting
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

INTERVAL = 1e-3  # of the discretised privacy loss, whose rounding is always upwards
NOISE = (0.05, 1e4)  # between which a noise multiplier is looked for
TOLERANCE = 1e-4  # of the noise multiplier


class Release(NamedTuple):
    """Some exchanges with the same noise.

    Attributes:
        rate: The chance of each client to be asked.
        noise: The noise multiplier z: standard deviation over sensitivity.
        times: How many there were.
    """

    rate: float
    noise: float
    times: int = 1


def added(releases: Sequence[Release], rate: float, noise: float) -> tuple[Release, ...]:
    """Releases and one more.

    Example:
        >>> added([Release(1.0, 2.0, 3)], 1.0, 2.0)
        (Release(rate=1.0, noise=2.0, times=4),)
    """
    times = {(r.rate, r.noise): r.times for r in releases}
    times[rate, noise] = times.get((rate, noise), 0) + 1
    return tuple(Release(*how, n) for how, n in times.items())


@lru_cache(maxsize=1024)
def epsilon_of(releases: tuple[Release, ...], delta: float, *, distributed: bool = False) -> float:
    """ε of some releases together.

    Args:
        releases: The releases.
        delta: δ.
        distributed: Whether the clients added the noise.

    Example:
        >>> round(epsilon_of((Release(1.0, 3.0, 30),), 1e-5), 2), round(epsilon_of((Release(0.1, 3.0, 30),), 1e-5), 2)
        (8.94, 0.75)
    """
    # It warns of orders that it leaves out, which costs nothing but tightness.
    logging.getLogger("absl").setLevel(logging.ERROR)
    accountant = RdpAccountant() if distributed else PLDAccountant(value_discretization_interval=INTERVAL)
    for release in releases:
        accountant.compose(_event(release, distributed=distributed), release.times)
    return float(accountant.get_epsilon(delta))


@lru_cache(maxsize=64)
def noise_for(epsilon: float, delta: float, rate: float, times: int, *, distributed: bool = False) -> float:
    """The least noise multiplier with which so many exchanges stay within ε.

    Args:
        epsilon: ε.
        delta: δ.
        rate: The chance of each client to be asked.
        times: The number of exchanges.
        distributed: Whether the clients add the noise.

    Raises:
        ValueError: There is none that makes sense.
    """
    least, most = NOISE

    def cost(noise: float) -> float:
        return epsilon_of((Release(rate, noise, times),), delta, distributed=distributed)

    if cost(most) > epsilon:
        raise ValueError(f"privacy: no noise keeps {times} exchanges within epsilon = {epsilon:g}, delta = {delta:g}")
    while most - least > TOLERANCE * most:
        middle = (least * most) ** 0.5
        least, most = (middle, most) if cost(middle) > epsilon else (least, middle)
    return most


def _event(release: Release, *, distributed: bool) -> dp_accounting.DpEvent:
    if distributed:
        return dp_accounting.ZCDpEvent(0.5 / release.noise**2)
    gaussian = dp_accounting.GaussianDpEvent(release.noise)
    return gaussian if release.rate >= 1 else dp_accounting.PoissonSampledDpEvent(release.rate, gaussian)
