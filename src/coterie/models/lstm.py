"""A recurrent language model."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LSTM(nn.Module):
    """A language model that predicts the next word at every position: an embedding, LSTM layers, a logit per word.

    It is written with matrix products, because `torch.func.vmap` cannot batch `nn.LSTM`. The gates are in the order of
    `nn.LSTM`: input, forget, cell, output.

    Args:
        words: Size of the vocabulary.
        embedding: Size of the embedding of a word.
        hidden: Number of units of each layer.
        layers: Number of LSTM layers.

    Example:
        >>> LSTM(50, embedding=4, hidden=8)(torch.zeros(3, 20, dtype=torch.long)).shape
        torch.Size([3, 20, 50])
    """

    def __init__(self, words: int, embedding: int = 64, hidden: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.spec = {"name": "lstm", "words": words, "embedding": embedding, "hidden": hidden, "layers": layers}
        for name in ("words", "embedding", "hidden", "layers"):
            if self.spec[name] < 1:
                raise ValueError(f"LSTM: {name} must be at least 1, got {self.spec[name]}")
        self.embedding = nn.Embedding(words, embedding)
        sizes = (embedding, *[hidden] * (layers - 1))
        self.inputs = nn.ModuleList(nn.Linear(size, 4 * hidden) for size in sizes)
        self.recurrences = nn.ModuleList(nn.Linear(hidden, 4 * hidden, bias=False) for _ in sizes)
        self.head = nn.Linear(hidden, words)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (n, length, words) of the word that follows each word of x (n, length)."""
        out = self.embedding(x)
        for inputs, recurrence in zip(self.inputs, self.recurrences, strict=True):
            out = _unrolled(inputs(out), recurrence)
        return self.head(out)


def _unrolled(given: Tensor, recurrence: nn.Module) -> Tensor:
    """Return the outputs (n, length, h) of a layer, given what its inputs add to the gates (n, length, 4h)."""
    outputs: list[Tensor] = []
    cell = out = given.new_zeros(given.shape[0], given.shape[-1] // 4)
    for now in given.unbind(1):
        enter, forget, value, leave = (now + recurrence(out)).chunk(4, -1)
        cell = forget.sigmoid() * cell + enter.sigmoid() * value.tanh()
        out = leave.sigmoid() * cell.tanh()
        outputs.append(out)
    return torch.stack(outputs, 1)
