"""What clients were sent, in one form for all `Train` steps.

c is the clients of a chunk, r the starts, s the models that were sent.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.core.pytree import Params, tree_map
from coterie.core.sums import Sums
from coterie.core.train import Models, Train
from coterie.engines.trained import Trained


class Sent(NamedTuple):
    """What clients were sent, in one form for all `Train` steps."""

    step: Train
    models: Params  # (s, …)
    rows: Tensor | None  # the model of every client and start (clients, r); None to choose
    lr: Tensor
    label: Tensor | None  # of every model (s,)

    @classmethod
    def of(cls, message: Models, step: Train, rows: Any) -> Sent:
        """Read a message as the step says."""
        theta, lr = message.theta, message.lr
        assert isinstance(lr, Tensor)  # every `Train` step needs one
        if not step.choose:
            label = message.label if isinstance(message.label, Tensor) else None
            if not isinstance(rows, Tensor):
                theta, rows = tree_map(lambda x: x[None], theta), torch.zeros(1, 1, dtype=torch.long)
            return cls(step, theta, rows.reshape(len(rows), -1), lr, label)
        common = message.common
        if step.starts is None:
            theta, common = tree_map(lambda x: x[None], (theta, common))
        common = {n: x[:, None].expand(-1, step.k, *x.shape[1:]) for n, x in common.items()}
        models = tree_map(lambda x: x.flatten(0, 1), {**theta, **common})
        return cls(step, models, None, lr, torch.arange(step.k, device=lr.device).repeat(step.starts or 1))

    def given(self, at: Tensor) -> Tensor:
        """The models that clients at these positions were sent (c, r), where they do not choose."""
        assert self.rows is not None
        return self.rows[at] if len(self.rows) > 1 else self.rows.expand(len(at), -1)

    def in_order(self, slots: int) -> bool:
        """Whether model s belongs to slot s; it need not where clients were sent some of all models only."""
        if self.rows is None or self.label is None:
            return True
        k = slots if self.step.starts is None else self.step.k
        return torch.equal(self.label.cpu(), torch.arange(slots) % k)

    def slots(self, took: Tensor) -> Tensor:
        """The slots of clients and starts that took these models (c, r)."""
        if self.label is None:
            return torch.zeros_like(took)
        first = 0 if self.step.starts is None else self.step.k * torch.arange(took.shape[1], device=took.device)
        return first + self.label[took]

    def by_slot(self, sums: Sums, took: Tensor, slots: int) -> Sums:
        """Sums by model as sums by slot, where clients took these models (c, r)."""
        taken = took.unique()
        at = torch.zeros(len(sums.weight), dtype=torch.long, device=took.device)
        at = at.index_put_((took,), self.slots(took))[taken]

        def placed(x: Tensor) -> Tensor:
            return x.new_zeros(slots, *x.shape[1:]).index_copy_(0, at, x[taken])

        return Sums(tree_map(placed, sums.update), placed(sums.weight), sums.note)

    def note(self, trained: Trained) -> dict[str, Tensor]:
        """The clients' diagnostics."""
        note = {"loss": trained.moved.loss}
        note |= trained.notes
        if self.label is not None:
            note["label"] = self.label[trained.label]
        return note if self.step.starts is not None else {name: x[:, 0] for name, x in note.items()}
