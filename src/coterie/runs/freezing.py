"""`freeze`: from a trained run to a task of which only the head is trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from coterie.core.freezing import check_head, frozen, trunk_of
from coterie.core.pytree import Params
from coterie.core.settings import check_type
from coterie.core.task import Task
from coterie.runs.fingerprint import digest
from coterie.runs.run import Run


def freeze(run: Run, head: str | Sequence[str]) -> Task:
    """A task whose model has the layers of a trained one, frozen, but for its head: that is drawn anew in every run.

    Frozen layers are not sent. They are as they are scored, without dropout, and with the statistics that BatchNorm
    has. Where possible a row passes through them once per run, whatever the method.

    Args:
        run: A trained run, such as one of `FedAvg`. If it has several models, they must have these layers in common.
        head: The name of the layer that is to be trained, with all that is in it; or several names.

    Raises:
        ValueError: A layer is not there or has no parameters, nothing is left to freeze, or models differ in more.

    Example:
        >>> import coterie as ct
        >>> federation = ct.data.rotated_digits(clients=8, seed=0)
        >>> whole = ct.fit(ct.FedAvg(), ct.Task.classifier(ct.models.MLP(64, 16, 10)), federation, rounds=1)
        >>> task = ct.freeze(whole, head="layers.1")
        >>> sorted(ct.fit(ct.IFCA(k=2, init="random"), task, federation, rounds=1).state.theta)
        ['layers.1.bias', 'layers.1.weight']
    """
    if not isinstance(run, Run):
        raise ValueError(f"freeze: run must be what fit returned, got a {type(run).__name__}")
    check_type("freeze: head", head, str | tuple[str, ...])
    names = (head,) if isinstance(head, str) else tuple(head)
    if run.task.functions is None:
        what = "the run has no module here: load it with its task, ct.load(folder, task=…), if it has one"
        raise ValueError(f"freeze: {what}")
    check_head(run.task.functions.make(0), names)
    trunks = [trunk_of(model, names) for model in run.models]
    for other in trunks[1:]:
        if differs := next((n for n, x in other.items() if not torch.equal(x, trunks[0][n])), None):
            raise ValueError(
                f"freeze: the {len(trunks)} models of the run differ in '{differs}', which is not in the head; "
                "freeze a run with one model, such as one of FedAvg, or name all layers in which they differ"
            )
    if own := [n for n in run.task.personal if n in trunks[0]]:
        raise ValueError(f"freeze: every client has a '{own[0]}' of its own (batch_norm='local'): put it in the head")
    return frozen(run.task, trunks[0], names, _spec(run, trunks[0], names))


def _spec(run: Run, trunk: Params, head: tuple[str, ...]) -> dict[str, Any]:
    """From what a configuration, or a node, builds the task again; of a run without a folder, only its kind."""
    known = run.task.spec
    if run.path is None or "model" not in known:
        return {n: v for n, v in known.items() if n == "kind"}
    return {**known, "from": str(run.path), "head": list(head), "trunk": digest(trunk)}
