"""Random numbers as a function of a seed and a place: the same on every device, and however rows are padded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_GOLDEN = -1640531527  # 2³² divided by the golden ratio, as a 32-bit integer with a sign


def uniform(seed: Tensor, shape: Sequence[int]) -> Tensor:
    """Numbers from [0, 1) of a shape, each a hash of the seed and of its own coordinates.

    A number does not depend on how long the axes are: rows that pad a batch at its end change no other row's numbers.
    The seed may be batched by `torch.func.vmap`, which `torch.rand` does not allow.

    Args:
        seed: An integer (a 0-d tensor).
        shape: Of the result.

    Example:
        >>> seed = torch.tensor(7)
        >>> bool((uniform(seed, (3, 2)) == uniform(seed, (5, 2))[:3]).all())
        True
    """
    state = mixed(seed.to(torch.int32))
    for length in shape:
        place = torch.arange(length, dtype=torch.int32, device=seed.device) * _GOLDEN
        state = mixed(state[..., None] ^ place)
    return _shifted(state, 8).to(torch.float32) / 2**24


def mixed(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers in which every bit depends on every other (Wellons' "lowbias32")."""
    x = (x ^ _shifted(x, 16)) * 0x7FEB352D
    x = (x ^ _shifted(x, 15)) * -2073254261  # 0x846CA68B with a sign
    return x ^ _shifted(x, 16)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift right, filling with zeros: torch fills with the sign."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)
