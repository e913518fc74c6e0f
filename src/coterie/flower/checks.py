"""Whether what a node sent back can be believed. None of this raises: a fault is a few words, for the log."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from coterie.core.pytree import leaves

Verb = Literal["combine", "gather"]

ABSURD = 1e6  # times the median norm of what nodes send, or times 1 where that is more
HUGE = 1e30  # a note is not as large, unless it is infinite where there is nothing to tell


class Asked(NamedTuple):
    """What a node was asked for.

    Attributes:
        verb: Sums by slot, or every client's reply.
        slots: How many slots there are.
        clients: How many clients of the node were to take part.
        part: On which rows: a client without test rows has no loss on them.
    """

    verb: Verb
    slots: int
    clients: int
    part: str


def fault(answer: Any, asked: Asked) -> str:
    """What is wrong with one answer, looked at by itself; "" where nothing is.

    Example:
        >>> sums = {"update": {"w": torch.ones(2, 3)}, "weight": torch.tensor([1.0, -1.0]), "note": {}}
        >>> fault(sums, Asked("combine", slots=2, clients=4, part="train"))
        'a weight is negative'
    """
    keys = {"update", "weight", "note"} | ({"slot"} if asked.verb == "gather" else set())
    if not isinstance(answer, dict) or answer.keys() != keys:
        return "it has not the parts that were asked for"
    if not isinstance(answer["weight"], Tensor) or not isinstance(answer["note"], dict):
        return "its weights or notes are of the wrong kind"
    if not all(isinstance(x, Tensor) for x in answer["note"].values()):
        return "its notes are of the wrong kind"
    return _weight_fault(answer, asked) or _update_fault(answer, asked) or _note_fault(answer, asked)


def _weight_fault(answer: Any, asked: Asked) -> str:
    weight = answer["weight"]
    if asked.verb == "combine" and weight.shape != (asked.slots,):
        return f"it has weights of shape {tuple(weight.shape)} for {asked.slots} slots"
    if asked.verb == "gather" and (weight.dim() not in (1, 2) or len(weight) != asked.clients):
        return f"it has weights of shape {tuple(weight.shape)} for {asked.clients} clients"
    if not weight.is_floating_point():
        return f"its weights are {weight.dtype}"
    if not bool(torch.isfinite(weight).all()):
        return "a weight is not finite"
    return "a weight is negative" if bool((weight < 0).any()) else ""


def _update_fault(answer: Any, asked: Asked) -> str:
    lead = answer["weight"].shape
    for x in leaves(answer["update"]):
        if x.shape[: len(lead)] != lead:
            return f"it has an update of shape {tuple(x.shape)} for {asked.slots} slots and {asked.clients} clients"
        if not bool(torch.isfinite(x).all()):
            return "an update is not finite"
    if asked.verb == "combine":
        return ""
    slot = answer["slot"]
    if not isinstance(slot, Tensor) or slot.dtype != torch.long or slot.shape != lead:
        return "its slots are of the wrong kind"
    return _range_fault(slot, 0, asked.slots, "a slot")


def _note_fault(answer: Any, asked: Asked) -> str:
    for name, x in answer["note"].items():
        if x.dim() == 0 or len(x) != asked.clients:
            return f"its note '{name}' has shape {tuple(x.shape)} for {asked.clients} clients"
        if x.is_floating_point() and bool((torch.isfinite(x) & (x.abs() >= HUGE)).any()):
            return f"its note '{name}' is enormous"
    note = answer["note"]
    if "loss" in note and asked.part == "train" and not bool(torch.isfinite(note["loss"]).all()):
        return "a loss is not finite"
    if "label" not in note:
        return ""
    starts = math.prod(note["label"].shape[1:])  # which run side by side, each with slots of its own
    if note["label"].dtype != torch.long or not starts:
        return "its labels are of the wrong kind"
    return _range_fault(note["label"], -1, asked.slots // starts, "a label")


def _range_fault(x: Tensor, low: int, slots: int, what: str) -> str:
    outside = x[(x < low) | (x >= slots)]
    return f"{what} is {int(outside[0])}, outside of {low} to {slots - 1}" if len(outside) else ""


def unlike(answers: Sequence[Any]) -> list[bool]:
    """Which answers differ from most in their tree, or in the shape or type of a tensor, the number of clients aside.

    Where there is no majority, the first is believed.

    Example:
        >>> unlike([{"w": torch.ones(1)}, {"w": torch.ones(1)}, {"w": torch.ones(1, dtype=torch.long)}])
        [False, False, True]
    """
    forms = [_form(answer) for answer in answers]
    usual = Counter(forms).most_common(1)[0][0] if forms else ""
    return [form != usual for form in forms]


def _form(answer: Any) -> str:
    found, tree = tree_flatten(answer)
    return f"{tree} {[(tuple(x.shape[1:]), x.dtype) if isinstance(x, Tensor) else type(x) for x in found]}"


def absurd(answers: Sequence[Any], clients: Sequence[int]) -> list[bool]:
    """Which answers are out of all proportion: their norm per client is a million times that of the median.

    Example:
        >>> [absurd([{"update": torch.tensor([x]), "weight": torch.ones(1)} for x in (1.0, 2.0, 1e9)], [1, 1, 1])]
        [[False, False, True]]
    """
    norms = [_norm((a["update"], a["weight"])) / n for a, n in zip(answers, clients, strict=True)]
    most = ABSURD * max(1.0, statistics.median_low(norms)) if norms else 0.0
    return [not norm <= most for norm in norms]


def _norm(tree: Any) -> float:
    return float(sum(float(x.double().square().sum()) for x in leaves(tree))) ** 0.5
