"""What the server keeps of every client's last report, for methods that compare clients' updates."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from coterie.core.cohort import Cohort
from coterie.core.method import Report
from coterie.core.pytree import leaves, put_rows, tree_map
from coterie.core.step import Reply


class Reports(NamedTuple):
    """The last report of every client (m, …)."""

    updates: Tensor  # its latest update, gradient or sketch (m, …), as far as it can be compared
    when: Tensor  # the round of that update (m,), -1 for none
    mute: Tensor  # whether what it sent last could not be compared (m,)
    weight: Tensor  # how heavily it counts (m,)
    held: Tensor  # its loss on the rows it holds out (m,), infinite if none
    rival: Tensor  # the same under the model that its cluster would have without the split that is on trial (m,)

    @classmethod
    def none(cls, m: int, length: int) -> Reports:
        """Those of m clients that have not reported yet, whose updates have so many numbers."""
        never, inf = torch.full((m,), -1), torch.full((m,), torch.inf)
        mute = torch.zeros(m, dtype=torch.bool)
        return cls(torch.zeros(m, length), never, mute, torch.zeros(m), inf, inf.clone())

    def more(self, n: int) -> Reports:
        """Those of n more clients too, who have not reported yet."""
        return tree_map(lambda x, new: torch.cat([x, new.to(x)]), self, Reports.none(n, self.updates.shape[1]))

    def updated(self, chosen: Cohort, vectors: Tensor, note: dict[str, Tensor], t: int) -> Reports:
        """After round t, in which these clients sent vectors (c, …). Those that cannot be compared are kept out."""
        usable = comparable(vectors, note["weight"])
        self._name_mute(chosen, usable, note["weight"], t)
        kept = chosen.clients[usable]
        return self._replace(
            updates=put_rows(self.updates, kept, vectors[usable]),
            when=put_rows(self.when, kept, torch.full_like(kept, t)),
            mute=put_rows(self.mute, chosen.clients, ~usable),
            weight=put_rows(self.weight, chosen.clients, note["weight"]),
            held=put_rows(self.held, chosen.clients, held_out_losses(note)),
        )

    def _name_mute(self, chosen: Cohort, usable: Tensor, weight: Tensor, t: int) -> None:
        """Write to the log whose updates cannot be compared: once, not in every round."""
        for i in (~usable).nonzero().flatten().tolist():
            client = int(chosen.clients[i])
            if not self.mute[client]:
                what = "all zero" if weight[i] > 0 else "not finite"
                name = chosen.federation.name(client)
                chosen.log(f"CFL: round {t + 1}: {name} is kept out of splits: its update is {what}")


def comparable(vectors: Tensor, weight: Tensor) -> Tensor:
    """Whether each client's vector has a direction (c,), on the CPU; a client that has diverged has no weight.

    Example:
        >>> comparable(torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]]), torch.tensor([1.0, 1.0, 0.0])).tolist()
        [True, False, False]
    """
    return ((weight > 0) & torch.isfinite(vectors).all(1) & (vectors != 0).any(1)).cpu()


def unless_diverged(reply: Reply) -> Reply:
    """One client's reply, or stacked ones, with no update and no weight where it is not finite: it spoils no sum.

    The weight is noted too, so that the server knows who has diverged.
    """
    axes = reply.weight.shape

    def finite(x: Tensor) -> Tensor:
        return torch.isfinite(x).reshape(*axes, -1).all(-1)

    fine = torch.stack([finite(x) for x in leaves(reply.update)]).all(0)
    update = tree_map(lambda x: torch.where(fine.reshape(*axes, *[1] * (x.dim() - len(axes))), x, 0.0), reply.update)
    weight = torch.where(fine, reply.weight, 0.0)
    return reply._replace(update=update, weight=weight, note={**reply.note, "weight": weight})


def held_out_losses(note: dict[str, Tensor]) -> Tensor:
    """The mean loss of each client on the rows it holds out (c,), infinite if it holds out none."""
    if "held" not in note:
        return torch.full_like(note["loss"], torch.inf)
    rows = note["held_rows"].to(note["held"])
    return torch.where(rows > 0, note["held"] / rows.clamp(min=1), torch.inf)


def report_of(clients: Tensor, note: dict[str, Tensor]) -> Report:
    """The losses of a round, without clients that have diverged; if all have, it is not one client's fault."""
    loss = note["loss"]
    fine = (torch.isfinite(loss) & (note["weight"] > 0)).cpu()
    if not bool(fine.any()):
        return Report(clients, torch.full_like(loss, torch.inf))
    return Report(clients[fine], loss[fine])
