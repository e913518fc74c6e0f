"""Whether what a site changes is in proportion: a guard against one site that outweighs all others by sheer size."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.flower.checks import Asked, Verb

FACTOR = {"combine": 10.0, "gather": 50.0}  # times the usual change of others: single clients differ more than sums
CALM = 0.01  # of a model's norm: a change is compared with no less
LIGHT = 1e-6  # of a site's weight: what has less moves nothing
TINY = 1e-30


class Change(NamedTuple):
    """How far a site moves the models that it was sent, per unit of weight: the largest over slots, or over clients.

    Attributes:
        moved: If what it sends are models: their distance from those that it was sent.
        sent: If what it sends are changes, or gradients: their norm.
        model: The norm of a model that it was sent.
        steps: How many steps its clients take, where that depends on their rows.
    """

    moved: float
    sent: float
    model: float
    steps: int = 1


def change(answer: Any, message: Any, asked: Asked) -> Change | None:
    """How far an answer moves the models of a message; None where it has none of them.

    Tensors are matched by their names and shapes. Sums that are no models, such as moments, have nothing to be compared
    with.

    Args:
        answer: Sums by slot, or every client's reply.
        message: What the server has sent.
        asked: What for.

    Example:
        >>> sums = {"update": {"w": torch.tensor([[6.0], [0.0]])}, "weight": torch.tensor([3.0, 0.0])}
        >>> change(sums, {"w": torch.tensor([[1.5], [7.0]])}, Asked("combine", slots=2, clients=3, part="train"))
        Change(moved=0.5, sent=2.0, model=1.5, steps=1)
    """
    sums, lead = asked.verb == "combine", answer["weight"].shape
    weight = answer["weight"].double() if sums else torch.ones(lead, dtype=torch.double)
    there, before = weight > 0, _tensors(message)
    own, squares = weight[there], list[Tensor]()
    for name, x in _tensors(answer["update"]).items():  # one by one: they may be large
        base = _sent(before.get(name), lead, x.shape[len(lead) :], None if sums else asked.rows)
        if base is not None and x.is_floating_point() and len(own):
            x, base = (each[there].reshape(len(own), -1) for each in (x, base))
            parts = (x - own[:, None].to(x) * base, x, base)
            squares.append(torch.stack([torch.linalg.vector_norm(p, dim=1, dtype=torch.double) ** 2 for p in parts]))
    if not squares:
        return None
    moved, sent, model = torch.stack(squares).sum(0).sqrt()
    per = own.clamp(min=LIGHT * float(own.sum()))
    return Change(float((moved / per).max()), float((sent / per).max()), float(model.max()), asked.steps)


class Guard:
    """Leaves out a site that changes models far more than the others do now, and than was usual before in the run.

    How far models move shrinks as they settle, and not everywhere alike: where two sites have nothing left to learn, a
    third with noisy rows goes on as before. So the largest change that was usual so far counts, too.

    Args:
        usual: The largest usual change so far, of models and of what is added to them; kept with the run.
        verb: Whether sites send sums or every client's reply.

    Example:
        >>> guard = Guard({})
        >>> guard.faults({s: Change(moved=x, sent=9.0, model=1.0) for s, x in enumerate((0.5, 0.1, 40.0))})
        {2: 'it changes models 80 times as much as others do (10 times at most)'}
        >>> guard.usual
        {'moved': 0.1}
    """

    def __init__(self, usual: dict[str, float], verb: Verb = "combine") -> None:
        self.usual, self._most = usual, FACTOR[verb]

    def faults(self, changes: Mapping[int, Change]) -> dict[int, str]:
        """Which of these sites are left out, and why; remembers what is usual among the others."""
        if not changes:
            return {}
        kind = _kind(changes)
        norms = {s: float(getattr(c, kind)) for s, c in changes.items()}
        times = {s: norm / max(self._usual(s, norms, changes, kind), TINY) for s, norm in norms.items()}
        faults = {
            s: f"it changes models {n:.3g} times as much as others do ({self._most:.0f} times at most)"
            for s, n in times.items()
            if n > self._most
        }
        fine = [norm for s, norm in norms.items() if s not in faults]
        self.usual[kind] = max(self.usual.get(kind, 0.0), statistics.median_low(fine or [0.0]))
        return faults

    def _usual(self, site: int, norms: Mapping[int, float], changes: Mapping[int, Change], kind: str) -> float:
        """What is usual for a site, as the others tell, and the past: who takes more steps may go further.

        Of two others the larger is believed: one that lies must not make an honest one look bad.
        """
        more = {s: max(1.0, changes[site].steps / c.steps) for s, c in changes.items()}
        others = [norm * more[s] for s, norm in norms.items() if s != site]
        if not others and kind not in self.usual:
            return math.inf  # nobody knows
        now = statistics.median_high(others) if others else 0.0
        return max(now, self.usual.get(kind, 0.0), CALM * changes[site].model)


def _kind(changes: Mapping[int, Change]) -> str:
    """Whether sites send models or what is to be added to them, by what most of their tensors are closer to."""
    moved, sent = (statistics.median_low([x[i] for x in changes.values()]) for i in range(2))
    return "moved" if moved <= sent else "sent"


def _tensors(tree: Any, name: str = "") -> dict[str, Tensor]:
    """The tensors of a tree that are in a dict, by their keys."""
    if isinstance(tree, Tensor):
        return {name: tree} if name else {}
    pairs = tree.items() if isinstance(tree, dict) else [("", x) for x in tree] if isinstance(tree, tuple) else []
    found: dict[str, Tensor] = {}
    for key, x in pairs:
        found = _tensors(x, key) | found
    return found


def _sent(x: Tensor | None, lead: torch.Size, shape: torch.Size, rows: Tensor | None) -> Tensor | None:
    """What of a message a tensor of an answer (lead, shape) began as; None if nothing fits."""
    if x is None:
        return None
    if x.shape == shape:
        return x.expand(*lead, *shape)
    x = x.reshape(-1, *shape) if x.shape[x.dim() - len(shape) :] == shape and x.numel() else x
    if x.shape[1:] != shape:
        return None
    if rows is not None and rows.shape == lead:
        return x[rows]
    if len(x) == lead[-1]:
        return x.expand(*lead, *shape)
    return None
