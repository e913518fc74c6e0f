"""Whether an error is vmap's, which cannot batch everything, or the model's own."""

from __future__ import annotations

import re

# What vmap says where it cannot do what it is asked; every other error is the step's or the model's own.
_REFUSALS = re.compile(
    r"vmap|batching rule|functorch|randomness error mode|BatchedTensor|"
    r"Cannot access data pointer of Tensor|doesn't have storage|mutate a captured Tensor",
    re.IGNORECASE,
)


def is_refusal(error: Exception) -> bool:
    """Whether an error says that vmap cannot batch an operation, rather than that the operation is wrong.

    Example:
        >>> is_refusal(RuntimeError("Batching rule not implemented for aten::lstm.input"))
        True
        >>> is_refusal(RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)"))
        False
    """
    return isinstance(error, RuntimeError) and _REFUSALS.search(str(error)) is not None
