"""When a cluster's training has come to a standstill while its clients' has not: CFL's (32) and (33), made relative.

The thresholds ε₁ and ε₂ as printed are lengths, which depend on the model, the step size and the local steps. Here
updates are compared with the longest ones of the same cluster, and held-out losses with earlier ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from coterie.core.pytree import stack, take
from coterie.core.settings import setting
from coterie.parts.split_trials import SplitTrials

BLIND = 1 / 3  # of eps1, where no held-out rows show whether a cluster is stationary
LOWER = 0.02  # a loss is clearly lower than another by this share of it


class Progress(NamedTuple):
    """How the training of a leaf has gone since it is there, or of all leaves (k,)."""

    peak: Tensor  # the greatest mean length of its clients' updates
    best: Tensor  # the last held-out loss that was clearly lower than those before, infinite if there is none
    still: Tensor  # rounds since then

    @classmethod
    def none(cls) -> Progress:
        """Of a leaf that is new."""
        return cls(torch.zeros(()), torch.tensor(torch.inf), torch.tensor(0))

    def after(self, lengths: Tensor, held: Tensor) -> Progress:
        """One leaf's, after a round: the lengths of its clients' updates, and their held-out losses (c,)."""
        peak, known = self.peak.maximum(lengths.mean()), torch.isfinite(held)
        loss = held[known].mean() if bool(known.any()) else self.best
        if bool(torch.isinf(self.best) | (loss < self.best - LOWER * self.best.abs())):
            return Progress(peak, loss, torch.zeros_like(self.still))
        return Progress(peak, self.best, self.still + 1)


@dataclass(frozen=True, kw_only=True)
class Stationarity(SplitTrials):
    """Hyperparameters of line 13 of CFL, and the comparison with earlier rounds that makes them relative.

    Args:
        thresholds: "relative" needs no tuning from model to model. A cluster is stationary once its mean update is
            shorter than eps1 times the longest update of its clients and, if rows are held out, the loss on those has
            not fallen by 2% in `patience` rounds; its clients are incongruent while their updates are on average longer
            than eps2 times what they have been at most. "absolute": eps1 and eps2 are the lengths ε₁ and ε₂ of (32) and
            (33), as printed; they depend on the model, the step size and the local steps, and are to be given.
        eps1: See above.
        eps2: See above.
        compare: What is measured and compared: the clients' weight updates, or their full gradients.
        max_age: A client's last update counts for so many rounds. Clients that have been away for longer when their
            cluster is split stay with the parent until they take part again, and are then placed by Algorithm 4.
    """

    thresholds: Literal["relative", "absolute"] = "relative"
    eps1: float = setting(0.3, low=0)
    eps2: float = setting(0.5, low=0)
    compare: Literal["update", "gradient"] = "update"
    max_age: int = setting(10, low=0)

    def fresh(self, state: Any, v: int) -> Tensor:
        """A leaf's clients whose last update is not too old and was made since the leaf is there."""
        young = state.reports.when >= max(state.round - self.max_age, state.tree[v].since + 1)
        return ((state.node == v) & young).nonzero().flatten()

    def watched(self, state: Any) -> Any:
        """The state with the progress of every leaf after a round."""
        progress = [take(state.progress, c) for c in range(len(state.leaves))]
        for c, v in enumerate(state.leaves):
            clients = self.fresh(state, v)
            if bool((state.reports.when[clients] == state.round).any()):  # there is something new about this leaf
                held = state.reports.held[clients]
                progress[c] = progress[c].after(self._lengths(state, clients), held)
        return state._replace(progress=stack(progress))

    def relative_eps1(self, state: Any, c: int) -> float:
        """How long leaf c's mean update may be, over its clients' longest; 0 while their held-out loss falls."""
        progress = take(state.progress, c)
        if bool(torch.isinf(progress.best)):  # nobody holds rows out
            return BLIND * self.eps1
        return self.eps1 if int(progress.still) >= self.patience else 0.0

    def still_long(self, state: Any, c: int, clients: Tensor) -> bool:
        """Whether the updates of leaf c's clients are long, by what they have been."""
        return float(self._lengths(state, clients).mean()) > self.eps2 * float(state.progress.peak[c])

    def _lengths(self, state: Any, clients: Tensor) -> Tensor:
        """How long clients' updates are, in steps of this round's size, so that a step that shrinks does not matter."""
        step = float(self.step_size(state.round)) if self.compare == "update" else 1.0
        return state.reports.updates[clients].norm(dim=1) / max(step, torch.finfo(torch.float32).tiny)
