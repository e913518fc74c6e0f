"""Exact samples of the discrete Gaussian distribution, many at once, from uniform integers alone.

The Discrete Gaussian for Differential Privacy
    Clément Canonne, Gautam Kamath, Thomas Steinke. NeurIPS 2020, Algorithms 1 to 3.

No logarithm is taken and no floating-point number drawn, so that what is sampled is the distribution itself, as long as
bytes are uniform. σ is a whole number up to 2 · FINE: the chance that a number on the way exceeds 2⁶³ is below e⁻¹⁰⁰⁰.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from coterie.core.key import Key

FINE = 1024  # σ is from FINE to 2 · FINE units of the grid


class Source:
    """Uniform integers from a source of random bytes.

    Args:
        draw: Given a number, returns so many bytes.
    """

    def __init__(self, draw: Callable[[int], bytes]) -> None:
        self._draw = draw

    @classmethod
    def of(cls, key: Key) -> Source:
        """A source that follows from a key, for simulations."""
        return cls(np.random.Generator(np.random.Philox(key.seed())).bytes)

    @classmethod
    def system(cls) -> Source:
        """The system's own, which nobody can foresee."""
        return cls(os.urandom)

    def below(self, high: np.ndarray) -> np.ndarray:
        """A uniform integer from 0 to h - 1 for each h below 2⁶³, by rejection.

        Example:
            >>> bool((Source.of(Key.of(0)).below(np.array([1, 3, 2**40])) < [1, 3, 2**40]).all())
            True
        """
        high = high.astype(np.uint64)
        out, left = np.zeros_like(high), np.arange(len(high))
        while len(left):
            raw = np.frombuffer(self._draw(8 * len(left)), np.uint64) >> np.uint64(1)  # below 2⁶³
            bound, whole = high[left], np.uint64(2**63) // high[left]
            fine = raw < whole * bound
            out[left[fine]] = raw[fine] % bound[fine]
            left = left[~fine]
        return out.astype(np.int64)


def discrete_gaussian(sigma: int, n: int, source: Source) -> np.ndarray:
    """Algorithm 3: n samples of N_ℤ(0, σ²), with σ² = `sigma`², by rejection from the discrete Laplace distribution.

    Example:
        >>> x = discrete_gaussian(1000, 20_000, Source.of(Key.of(0)))
        >>> abs(float(x.std()) / 1000 - 1) < 0.02, x.dtype.kind
        (True, 'i')
    """
    if not 1 <= sigma <= 2 * FINE:
        raise ValueError(f"discrete_gaussian: sigma must be from 1 to {2 * FINE}, got {sigma}")
    t = sigma + 1
    out, left = np.zeros(n, np.int64), np.arange(n)
    while len(left):
        y = discrete_laplace(t, len(left), source)
        off = np.abs(y) * t - sigma * sigma  # (|y| - σ²/t)² / 2σ² = off² / 2σ²t²
        taken = bernoulli_exp(off * off, np.full(len(left), 2 * sigma * sigma * t * t), source)
        out[left[taken]] = y[taken]
        left = left[~taken]
    return out


def discrete_laplace(t: int, n: int, source: Source) -> np.ndarray:
    """Algorithm 2: n samples with probabilities proportional to exp(-|x| / t)."""
    out, left = np.zeros(n, np.int64), np.arange(n)
    while len(left):
        u = source.below(np.full(len(left), t))
        taken = bernoulli_exp(u, np.full(len(left), t), source)
        left_now, u = left[taken], u[taken]
        x = u + t * _geometric(len(u), source)
        negative = source.below(np.full(len(u), 2)) == 1
        fine = ~(negative & (x == 0))  # else 0 would come twice as often
        out[left_now[fine]] = np.where(negative, -x, x)[fine]
        left = np.concatenate([left[~taken], left_now[~fine]])
    return out


def bernoulli_exp(a: np.ndarray, b: np.ndarray, source: Source) -> np.ndarray:
    """Algorithm 1: which of some events happen, each with chance exp(-a/b), for whole a ≥ 0 and b > 0."""
    going = np.ones(len(a), bool)
    turns = a // b
    for _ in range(int(turns.max(initial=0))):
        at = np.flatnonzero(going & (turns > 0))
        if not len(at):
            break
        going[at] = _small(b[at], b[at], source)
        turns[at] -= 1
    at = np.flatnonzero(going)
    going[at] = _small(a[at] % b[at], b[at], source)
    return going


def _small(a: np.ndarray, b: np.ndarray, source: Source) -> np.ndarray:
    """Events with chance exp(-a/b) for a ≤ b: k grows as long as events of chance a/(b·k) happen; is it odd?"""
    k, left = np.ones(len(a), np.int64), np.arange(len(a))
    while len(left):
        on = source.below(b[left] * k[left]) < a[left]
        left = left[on]
        k[left] += 1
    return k % 2 == 1


def _geometric(n: int, source: Source) -> np.ndarray:
    """How many events of chance 1/e happen before one does not."""
    count, left = np.zeros(n, np.int64), np.arange(n)
    while len(left):
        one = np.ones(len(left), np.int64)
        left = left[_small(one, one, source)]
        count[left] += 1
    return count
