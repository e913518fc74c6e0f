"""Randomness as data: a key is a path of integers, and the same path gives the same numbers anywhere."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Key(NamedTuple):
    """A path of integers such as (seed, stream, client, round).

    No global seed is ever set: two processes, or two executors, that hold the same key draw the same numbers,
    in whatever order they visit the clients.

    Example:
        >>> key = Key.of(0)
        >>> a, b = key.fold(3, 7).generator(), key.fold(3).fold(7).generator()
        >>> bool((torch.rand(4, generator=a) == torch.rand(4, generator=b)).all())
        True
    """

    path: tuple[int, ...]

    @classmethod
    def of(cls, seed: int) -> Key:
        """The key at the root of a run."""
        return cls((int(seed),))

    def fold(self, *more: int) -> Key:
        """The key further down the path."""
        return Key(self.path + tuple(int(i) for i in more))

    def seed(self) -> int:
        """A 56-bit integer hashed from the path, for libraries that want one."""
        digest = hashlib.blake2b(repr(self.path).encode(), digest_size=7).digest()
        return int.from_bytes(digest, "big")

    def generator(self) -> torch.Generator:
        """A fresh generator on the CPU: draws are made there and moved, so every device sees the same ones."""
        return torch.Generator().manual_seed(self.seed())

    def shuffle(self, numbers: Tensor) -> Tensor:
        """The order that sorts integers by their hashes: a permutation that depends on the integers, not their places.

        Example:
            >>> numbers = torch.tensor([3, 1, 2])
            >>> a = numbers[Key.of(0).shuffle(numbers)]
            >>> b = numbers.flip(0)[Key.of(0).shuffle(numbers.flip(0))]
            >>> bool((a == b).all())
            True
        """
        return torch.from_numpy(np.argsort(self._hashes(numbers), kind="stable"))

    def chances(self, numbers: Tensor) -> Tensor:
        """Uniform in [0, 1) for each of some integers; they depend on the integers, not their places.

        Example:
            >>> Key.of(0).chances(torch.tensor([3, 1])).flip(0).equal(Key.of(0).chances(torch.tensor([1, 3])))
            True
        """
        return torch.from_numpy((self._hashes(numbers) >> np.uint64(11)) * 2.0**-53)

    def _hashes(self, numbers: Tensor) -> np.ndarray:
        z = numbers.numpy().astype(np.uint64) + np.uint64(self.seed())  # splitmix64
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))
