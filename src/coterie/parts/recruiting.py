"""Who takes part in federated moment descent: a few clients with many rows, and others in every iteration."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from coterie.core.cohort import Cohort
from coterie.core.key import Key

ENOUGH = 18  # times k²d: the pairs of rows from which on an iteration has been found reliable
LEAST = 6  # pairs of rows of an anchor: with fewer its steps are mostly noise
_H, _S = 0, 1  # streams under the key

Subspace = Literal["auto", "printed", "symmetric", "pooled"]


class Population(NamedTuple):
    """Who takes part, as positions in the cohort."""

    anchors: Tensor  # H (h,)
    others: list[Tensor]  # S_t for every iteration t


class Recruiting:
    """For moment descent, whose settings these are; those that may be left open have a value here."""

    anchors: int | None
    clients: int | None
    ell: int | None
    rounds: int
    orthogonal: int
    reuse: bool | None
    subspace: Subspace

    @property
    def rows_needed(self) -> int:
        """The rows that an anchor needs for all iterations."""
        return 2 * (self.ell or 0) * (1 if self.reuse else self.rounds)

    def recruited(self, k: int, d: int, cohort: Cohort, key: Key) -> Population:
        """Lines 3 and 7: the anchor clients H, and the other clients S_t of every iteration."""
        found = self.recruits(k, d, cohort, key)
        if isinstance(found, str):
            raise ValueError(f"MomentDescent: {found}")
        self._log(k, d, cohort, found)
        return found

    def recruits(self, k: int, d: int, cohort: Cohort, key: Key) -> Population | str:
        """Who takes part, or why that cannot be."""
        large = (cohort.sizes >= self.rows_needed).nonzero().flatten()
        if len(large) < k:
            return self._too_small(k, len(large), cohort.sizes)
        anchors = large[key.fold(_H).shuffle(cohort.numbers[large])][: self.anchors].sort().values
        able = cohort.sizes >= 2
        able[anchors] = False
        order = key.fold(_S).shuffle(cohort.numbers)
        order = order[able[order]]
        if not len(order):
            return f"no client besides the {len(anchors)} anchors has two rows; fewer anchors leave some"
        evidence = torch.ones_like(order) if self.subspace == "printed" else cohort.sizes[order] - 1
        others = self._choose_others(order, evidence, ENOUGH * k**2 * d)
        return others if isinstance(others, str) else Population(anchors, others)

    def _too_small(self, k: int, large: int, sizes: Tensor) -> str:
        """That too few clients can be anchors, and what to do."""
        way = f"with reuse=True it needs {2 * (self.ell or 0)}"
        if self.reuse:
            most = int(sizes.sort(descending=True).values[:k][-1]) // 2
            way = f"ell={most} would do" if most >= LEAST else "IFCA with restarts needs no anchors"
        return (
            f"an anchor client needs {self.rows_needed} rows (ell={self.ell}, reuse={self.reuse}) and k={k} of them "
            f"are needed at least, but {large} of {len(sizes)} clients have so many (the largest has "
            f"{int(sizes.max())}); {way}"
        )

    def _choose_others(self, order: Tensor, evidence: Tensor, enough: int) -> list[Tensor] | str:
        """S_0, …, S_{T-1}, taken from clients in a random order, until they have enough evidence or are enough."""
        parts, begin, total = [], 0, evidence.cumsum(0)
        for _ in range(1 if self.reuse else self.rounds):
            before = int(total[begin - 1]) if begin else 0
            end = begin + self.clients if self.clients else int(torch.searchsorted(total, before + enough)) + 1
            if self.reuse and self.clients is None:
                end = min(end, len(order))
            if end > len(order):
                return self._too_few(order, math.ceil(enough / float(evidence.double().mean())))
            parts.append(order[begin:end].sort().values)
            begin = end
        return parts * self.rounds if self.reuse else parts

    def _too_few(self, order: Tensor, enough: int) -> str:
        need, times = self.clients or enough, 1 if self.reuse else self.rounds
        way = "clients=None takes those there are" if self.reuse else "reuse=True takes the same in every iteration"
        return (
            f"{times} iterations need about {times * need} clients with at least two rows besides the anchors, "
            f"{need} each, but there are {len(order)}; {way}"
        )

    def _log(self, k: int, d: int, cohort: Cohort, found: Population) -> None:
        """Write to the log who takes part, and what each of them sends."""
        anchors, others, enough = len(found.anchors), found.others[0], ENOUGH * k**2 * d
        sizes = {"pooled": d * d, "symmetric": d * k * self.orthogonal, "printed": 2 * d * k * self.orthogonal}
        rows = int((cohort.sizes[others] - 1).sum())
        wanted = f" (of {self.anchors} asked for)" if anchors < (self.anchors or 0) else ""
        short = f", which is less than has been found reliable ({enough})" if rows < enough else ""
        cohort.log(
            f"moment descent (ell={self.ell}, reuse={self.reuse}): {anchors} anchors{wanted} use {2 * (self.ell or 0)} "
            f"{'of their' if self.reuse else 'fresh'} rows in each of {self.rounds} iterations, with {len(others)} "
            f"{'clients, always the same,' if self.reuse else 'fresh clients'} that have {rows} rows beyond their "
            f"first{short}; subspaces {self.subspace}, {sizes[self.subspace]} numbers up per client, anchor and "
            f"iteration ({', '.join(f'{way}: {size}' for way, size in sizes.items())})"
        )


def covering(k: int) -> int:
    """So many draws miss one of k equal clusters once in a thousand times.

    Example:
        >>> covering(2), covering(5)
        (11, 39)
    """
    return math.ceil(math.log(1000 * k) / -math.log1p(-1 / k)) if k > 1 else 1
