"""Whether a model's output suits the targets of a task: each check says what is wrong, or None."""

from __future__ import annotations

from torch import Tensor


def check_labels(out: Tensor, y: Tensor) -> str | None:
    """Labels of a classifier: one of its classes per row."""
    if y.is_floating_point() or y.dim() != 1:
        return f"labels must be whole numbers, one per row, got {y.dtype} of shape {tuple(y.shape)}"
    if out.dim() != 2:
        return f"the model must give one logit per class for every row, got outputs of shape {tuple(out.shape[1:])}"
    low, high = int(y.min()), int(y.max())
    if high == -1:
        return "has no labels (y is None, or -1 throughout)"
    if low < 0 or high >= out.shape[-1]:
        return f"labels run from {low} to {high}, but the model has classes 0 to {out.shape[-1] - 1}"
    return None


def check_words(out: Tensor, y: Tensor) -> str | None:
    """The next words of a language model: one of its words at every position."""
    if y.is_floating_point() or y.dim() != 2:
        return f"the next words must be whole numbers, some per row, got {y.dtype} of shape {tuple(y.shape)}"
    if out.shape[1:-1] != y.shape[1:]:
        return f"the model gives logits of shape {tuple(out.shape[1:])}, the next words have {tuple(y.shape[1:])}"
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= out.shape[-1]:
        return f"the next words run from {low} to {high}, but the model has words 0 to {out.shape[-1] - 1}"
    return None


def check_density(out: Tensor, y: Tensor) -> str | None:
    """The output of a density: one log-likelihood per row."""
    return None if out.dim() == 1 else f"the model must give one log-likelihood per row, not {tuple(out.shape[1:])}"


def check_targets(out: Tensor, y: Tensor) -> str | None:
    """Targets of a regression: real numbers, as many per row as outputs."""
    if not y.is_floating_point():
        return f"targets of a regression must be floating point, got {y.dtype}"
    single = {out.shape[1:], y.shape[1:]} <= {(), (1,)}
    if out.shape[1:] != y.shape[1:] and not single:
        return f"the model gives outputs of shape {tuple(out.shape[1:])}, the targets have {tuple(y.shape[1:])}"
    return None


def check_counts(out: Tensor, y: Tensor) -> str | None:
    """Counts: one whole number of at least 0 per row, and one output for it."""
    if not {out.shape[1:], y.shape[1:]} <= {(), (1,)}:
        given = f"outputs of shape {tuple(out.shape[1:])} and targets of shape {tuple(y.shape[1:])}"
        return f"a model of counts must give one output for one target per row, got {given}"
    values = y[:1] if y.stride(0) == 0 else y  # all rows may be views of one
    if bool((wrong := (values < 0) | (values != values.round())).any()):
        return f"counts must be whole numbers of at least 0, got {values[wrong][0].item():g}"
    return None
