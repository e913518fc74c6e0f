"""Shamir's secret sharing: any `needed` shares determine the secret, fewer reveal nothing about it.

How to Share a Secret
    Adi Shamir. Communications of the ACM 22(11), 1979.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from coterie.secure.masks import SECRET, Entropy

PRIME = 2**521 - 1  # a Mersenne prime: the field must be larger than any secret
SHARE = 66  # bytes of a share


def split(secret: bytes, holders: Sequence[int], needed: int, random: Entropy) -> dict[int, bytes]:
    """Split a secret into shares, one for every holder.

    Args:
        secret: `SECRET` bytes.
        holders: Numbers of the holders, none of which is negative.
        needed: Number of shares that determine the secret.
        random: Source of random bytes for the coefficients of the polynomial.

    Example:
        >>> import os
        >>> shares = split(bytes(range(32)), [0, 1, 2, 3, 4], 3, os.urandom)
        >>> join({i: shares[i] for i in (4, 0, 2)}) == bytes(range(32))
        True
    """
    draws = (int.from_bytes(random(SHARE), "big") & PRIME for _ in range(needed - 1))
    coefficients = [*draws, int.from_bytes(secret, "big")]  # the highest power first; the secret is the value at 0

    def value(x: int) -> int:
        total = 0
        for coefficient in coefficients:
            total = total * x + coefficient  # x is small: one remainder at the end is cheaper than one per step
        return total % PRIME

    return {i: value(i + 1).to_bytes(SHARE, "big") for i in holders}


def join(shares: Mapping[int, bytes]) -> bytes:
    """Restore a secret from exactly as many shares as are needed.

    Args:
        shares: The shares, by holder.

    Raises:
        ValueError: The shares do not belong to one secret.
    """
    values = zip(_at_zero(tuple(shares)), shares.values(), strict=True)
    secret = sum(factor * int.from_bytes(share, "big") for factor, share in values) % PRIME
    if secret >> 8 * SECRET:
        raise ValueError("secure sum: the shares of a secret do not fit together")
    return secret.to_bytes(SECRET, "big")


@lru_cache(maxsize=8)  # a session uses the same holders many times
def _at_zero(holders: tuple[int, ...]) -> list[int]:
    """Return the Lagrange coefficients: the weight of each holder's share in the value at 0."""
    out = []
    for i in holders:
        above = below = 1
        for j in holders:
            if j != i:
                above, below = above * (j + 1) % PRIME, below * (j - i) % PRIME
        out.append(above * pow(below, -1, PRIME) % PRIME)
    return out
