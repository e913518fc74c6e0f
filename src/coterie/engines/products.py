"""Products with a matrix that stays the same, as exact as float32 and on a GPU twice as fast.

A GPU multiplies numbers of 11 significant bits (tf32) eight times faster than float32's 24. A float32 number is the sum
of two such numbers and a remainder of some 2⁻²² of it, so three fast products, high·high + high·low + low·high, lose
about as much as float32's own rounding does.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from coterie.core.precision import arithmetic

_HIGH = -(2**13)  # the sign, the exponent and 10 bits of the mantissa, as a mask


class Factor(NamedTuple):
    """A matrix (…, n, d) to be multiplied many times; on a GPU also in two parts that add up to it.

    Example:
        >>> x = Factor.of(torch.eye(2))
        >>> x.times(torch.tensor([[1.0], [2.0]])).flatten()
        tensor([1., 2.])
    """

    whole: Tensor
    high: Tensor | None
    low: Tensor | None

    @classmethod
    def of(cls, x: Tensor, *, split: bool | None = None) -> Factor:
        """The factor; it is split on a GPU, or where `split` says so."""
        return cls(x, *(_parts(x) if (x.is_cuda if split is None else split) else (None, None)))

    def times(self, other: Tensor, plus: Tensor | None = None) -> Tensor:
        """X · other, and the vector `plus` added to every row."""
        if self.high is None or self.low is None:
            return _affine(self.whole, other, plus)
        high, low = _parts(other)
        with arithmetic("tf32", other.device):
            return _plus(_plus(_affine(self.high, high, plus), self.high, low), self.low, high)

    def after(self, other: Tensor) -> Tensor:
        """Other · X."""
        if self.high is None or self.low is None:
            return other @ self.whole
        high, low = _parts(other)
        with arithmetic("tf32", other.device):
            return _plus(_plus(high @ self.high, low, self.high), high, self.low)

    def add_after(self, total: Tensor, other: Tensor) -> Tensor:
        """Add other · X to total, in place."""
        if self.high is None or self.low is None:
            return _plus(total, other, self.whole)
        high, low = _parts(other)
        with arithmetic("tf32", other.device):
            return _plus(_plus(_plus(total, high, self.high), low, self.high), high, self.low)

    def rows(self, some: slice) -> Factor:
        """Some rows of a matrix (n, d)."""
        high, low = (None if x is None else x[some] for x in (self.high, self.low))
        return Factor(self.whole[some], high, low)


def _parts(x: Tensor) -> tuple[Tensor, Tensor]:
    if not x.is_contiguous() and x.mT.is_contiguous():  # a transposed view stays one
        high, low = _parts(x.mT)
        return high.mT, low.mT
    high = (x.contiguous().view(torch.int32) & _HIGH).view(torch.float32)
    return high, x - high


def _affine(a: Tensor, b: Tensor, plus: Tensor | None) -> Tensor:
    return a @ b if plus is None else torch.addmm(plus, a, b)  # which a GPU does in one pass


def _plus(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Add a · b to total, in place."""
    return total.addmm_(a, b) if total.dim() == 2 else total.baddbmm_(a, b)
