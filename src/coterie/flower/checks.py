"""Whether what a node sent back can be believed. None of this raises: a fault is a few words, for the log."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from coterie.core.pytree import leaves

Verb = Literal["combine", "gather"]

ABSURD = 1e6  # times the median norm of what nodes send, or times 1 where that is more
ROOM = 1.1  # clients may have got a few more rows since they enrolled
SPARE = 2**26  # bytes that any answer may have
SLACK = 4  # times the bytes that were sent for each slot or client, or that others answer with
HUGE = 1e30  # a note is not as large, unless it is infinite where there is nothing to tell


class Asked(NamedTuple):
    """What a node was asked for.

    Attributes:
        verb: Sums by slot, or every client's reply.
        slots: How many slots there are.
        clients: How many clients of the node were to take part.
        part: On which rows: a client without test rows has no loss on them.
        worth: How heavily each of them counts at most (clients,); None where nobody knows.
        sums: To how many slots each adds at most; None for any number.
        rows: The row of the message that each was sent (clients,) or (clients, parts); None where all of it was.
        steps: How many steps the largest takes, where that depends on its rows.
    """

    verb: Verb
    slots: int
    clients: int
    part: str
    worth: Tensor | None = None
    sums: int | None = None
    rows: Tensor | None = None
    steps: int = 1


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
    if bool((weight < 0).any()):
        return "a weight is negative"
    return "" if asked.worth is None else _excess(weight, asked.worth, asked)


def _excess(weight: Tensor, worth: Tensor, asked: Asked) -> str:
    """Which weight is more than the clients that a site has enrolled, or their rows, can have."""
    if asked.verb == "gather":
        found, most = weight, worth.to(weight).reshape(-1, *[1] * (weight.dim() - 1)).expand_as(weight)
    else:
        total = worth.to(weight).sum()
        most = torch.cat([total.expand(asked.slots), total[None] * (asked.sums or asked.slots)])
        found = torch.cat([weight, weight.sum()[None]])
    over = (found > ROOM * most).flatten().nonzero().flatten().tolist()
    if not over:
        return ""
    given, allowed = (float(x.flatten()[over[0]]) for x in (found, most))
    return f"its weight is {given:g}, but its clients count for {allowed:g} at most"


def _update_fault(answer: Any, asked: Asked) -> str:
    lead = answer["weight"].shape
    for x in leaves(answer["update"]):
        if x.shape[: len(lead)] != lead:
            return f"it has an update of shape {tuple(x.shape)} for {asked.slots} slots and {asked.clients} clients"
        if not bool(torch.isfinite(x).all()):
            return "an update is not finite"
        if asked.verb == "combine" and bool(x[answer["weight"] == 0].any()):
            return "it adds to a slot in which it has no weight"
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


def oversized(found: Mapping[int, int], asked: Mapping[int, Asked], sent: int) -> dict[int, str]:
    """Which sites' answers have far more bytes than what was asked for, and than most others'.

    Example:
        >>> three = dict.fromkeys(range(3), Asked("combine", slots=2, clients=4, part="train"))
        >>> oversized({0: 4000, 1: 4000, 2: 512_000_000}, three, sent=4000)
        {2: 'its answer of 512 MB is too large: 67 MB at most'}
    """
    whole = statistics.median_low(found.values()) if found else 0
    each = statistics.median_low([n / asked[s].clients for s, n in found.items()]) if found else 0.0
    faults: dict[int, str] = {}
    for s, n in found.items():
        own = asked[s]
        models = sent * (own.clients if own.verb == "gather" else own.slots)
        most = SPARE + SLACK * max(models, whole, each * own.clients)
        if n > most:
            faults[s] = f"its answer of {n / 1e6:.0f} MB is too large: {most / 1e6:.0f} MB at most"
    return faults


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
