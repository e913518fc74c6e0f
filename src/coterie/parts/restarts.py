"""Restarts: several starts of a method run side by side, and the best is kept.

They are an axis, not a loop: every tensor that a start has of its own leads with their axis (r, …), clients do the work
of all starts in one exchange, and start r adds to slots r·k to r·k + k - 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from coterie.core.pytree import Params, stack, take


class Restarts:
    """For methods with `restarts`, whose states hold models `theta` (r, k, …) and their `quality` (r,), best lowest."""

    restarts: int

    def drawn(self, draw: Callable[[int], Params]) -> Params:
        """The first models of every start, by its number (r, …)."""
        return stack([draw(r) for r in range(self.restarts)])

    def best(self, state: Any) -> int:
        """The start to keep."""
        return int(state.quality.argmin())

    def models(self, state: Any) -> Params:
        """The k models of the best start."""
        return take(state.theta, self.best(state))

    @property
    def compares(self) -> bool:
        """Whether there are several starts to choose from."""
        return self.restarts > 1


def held_out_loss(note: dict[str, Tensor]) -> Tensor:
    """The mean loss of every start on the rows that clients hold out (r,), or on all rows where nobody holds any out.

    Args:
        note: The notes of `Train` steps.
    """
    if "held" in note and bool((note["held_rows"] > 0).any()):
        quality = note["held"].sum(0).cpu() / note["held_rows"].sum(0).cpu()
    else:
        quality = note["loss"].mean(0).cpu()
    return quality.nan_to_num(nan=torch.inf, posinf=torch.inf)
