"""What fused training gives: the model of every client, or their sums.

c is the clients of a chunk, r the starts, s the models that were sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.core.first_layer import FirstLinear
from coterie.core.pytree import Params, take, tree_map
from coterie.core.sums import Sums, weighted_sums
from coterie.engines.descent import Moved
from coterie.engines.products import Factor

NARROW = 8  # outputs of all models together up to which all rows are multiplied, with 0 for models they did not take
RUN = 4  # clients in a row with one model, on average, for which a product of their own pays


class Trained(NamedTuple):
    """What a chunk of clients ends with."""

    x: Tensor  # (c, n, d)
    rows: Factor  # the same rows as one long list (c·n, d)
    moved: Moved
    label: Tensor  # the model each took (c, r)
    notes: dict[str, Tensor]  # about rows that were held out, and about how far the model has moved (c, r)
    based: bool  # whether what moved is to be added to W⁰ and b⁰, or is itself the answer (a gradient)

    def models(self, split: FirstLinear, start: Params) -> Params:
        """Every client's model (c, r, …)."""
        first, bias = self.moved.first, self.moved.bias
        own = {**self.moved.rest, split.weight: first if bias is not None else first.transpose(2, 3) @ self.x[:, None]}
        if split.bias:
            own[split.bias] = first.sum(2) if bias is None else bias
        if self.based:
            own |= {n: own[n] + take(start[n], self.label) for n in (split.weight, split.bias) if n}
        return {n: own[n] for n in start}

    def sums(self, split: FirstLinear, start: Params, weight: Tensor, moved: Tensor | None) -> Sums:
        """Σ weight · model over the clients that took each model (s, …), where W moved by what `rows_sum` says."""
        first, bias = self.moved.first, self.moved.bias
        each = {**self.moved.rest}
        if split.bias:
            each[split.bias] = first.sum(2) if bias is None else bias
        if bias is not None:
            each[split.weight] = first
        flattened = tree_map(lambda x: x.flatten(0, 1), each)
        own, count = weighted_sums(self.label, weight, len(start[split.weight]), flattened)
        if moved is not None:
            own[split.weight] = moved
        for n in (split.weight, split.bias) if self.based else ():
            if n:
                own[n] = own[n] + count.reshape(-1, *[1] * (start[n].dim() - 1)) * start[n]
        return Sums({n: own[n] for n in start}, count, {})

    def rows_sum(self, weight: Tensor, like: Tensor) -> Tensor | None:
        """Σ weight · BᵀX over the clients that took each model: few large products over many clients' rows.

        None in the primal form, where every client has its own ΔW.
        """
        if self.moved.bias is not None:
            return None
        own = self.moved.first * weight[..., None, None]
        if like[:, :, 0].numel() <= NARROW:
            took = self.label[..., None] == torch.arange(len(like), device=own.device)  # (c, r, s)
            spread = own[:, :, :, None].where(took[:, :, None, :, None], 0).sum(1)  # (c, n, s, h)
            return (spread.flatten(0, 1).flatten(1).T @ self.x.flatten(0, 1)).reshape(like.shape)
        total = torch.zeros_like(like)
        for s, at, r in members(self.label):
            self._rows_of(at).add_after(total[s], own[at, r].flatten(0, 1).T)
        return total

    def _rows_of(self, clients: slice | Tensor) -> Factor:
        """The rows of some clients; of neighbours, without a copy."""
        if not isinstance(clients, slice):
            return Factor.of(self.x[clients].flatten(0, 1), split=False)
        n = self.x.shape[1]
        return self.rows.rows(slice(clients.start * n, clients.stop * n))


def members(label: Tensor) -> Iterator[tuple[int, slice | Tensor, Any]]:
    """Models, and who took them: indices of clients and starts, of which no two are the same."""
    label = label.cpu()
    if label.shape[1] == 1:  # rows of neighbours with one model need not be copied
        taken, length = label[:, 0].unique_consecutive(return_counts=True)
        if len(taken) * RUN <= len(label):
            end = length.cumsum(0)
            for s, a, e in zip(taken.tolist(), (end - length).tolist(), end.tolist(), strict=True):
                yield s, slice(a, e), 0
            return
    for s in label.unique().tolist():
        yield s, *(label == s).nonzero(as_tuple=True)
