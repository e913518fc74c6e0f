"""A forward pass that is a pure function: dropout from a seed, and BatchNorm that sees only real rows.

In training, PyTorch's layers draw masks from a global generator and normalise by the statistics of whatever rows are in
the batch. Neither can be repeated where clients are stacked and padded. `Pass` is active during a forward pass and
computes those functions in its own way, whether a layer calls them or a user's `forward` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from coterie.core.hashed import mixed, uniform

_SELU = 1.7580993408473766  # what alpha_dropout sets a dropped number to, negated


class Pass(TorchFunctionMode):
    """One forward pass. Every call of it must be in a new one.

    Args:
        mask: 1 for a real row, 0 for padding (n,).
        seed: From which dropout masks follow; None draws none: dropout is off.
        batch_statistics: Whether BatchNorm normalises by the batch although it has running statistics and is not in
            training; of clients that have none of their own yet.

    Attributes:
        moved: What BatchNorm's running statistics have become, by the identity of the tensors that they were.
        used: The names of the functions that were computed in this way.
        drawn: The names of those that drew random numbers from a generator, which cannot be repeated.
        hooked: Whether a hook was put on a tensor, which not every way of differentiating calls.
    """

    def __init__(self, mask: Tensor, seed: Tensor | None, batch_statistics: bool = False) -> None:
        super().__init__()
        self.mask, self.seed, self.batch_statistics = mask, seed, batch_statistics
        self.moved: dict[int, Tensor] = {}
        self.used: list[str] = []
        self.drawn: list[str] = []
        self.hooked = False
        self._sites = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = _OWN.get(func)
        return func(*args, **(kwargs or {})) if own is None else own(self, func, *args, **(kwargs or {}))

    def keep(self, shape: Sequence[int], p: float, name: str) -> Tensor | None:
        """1 for what dropout keeps, 0 for what it drops; None where there is no dropout."""
        if self.seed is None or p == 0:
            return None
        self.used.append(name)
        self._sites += 1
        # Seeds of successive steps are successive numbers: without the inner hash, the second dropout of a step would
        # have the mask of the first one of the next step.
        return (uniform(mixed(mixed(self.seed.to(torch.int32)) + self._sites), shape) >= p).to(torch.float32)


# --- dropout ------------------------------------------------------------------------------------------------------


def _scaled(x: Tensor, factor: Tensor, inplace: bool) -> Tensor:
    return x.mul_(factor) if inplace else x * factor


def _dropout(
    own: Pass, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **old: bool
) -> Tensor:
    keep = own.keep(input.shape, p, "dropout") if old.get("train", training) else None
    return input if keep is None else _scaled(input, keep / (1 - p) if p < 1 else keep, inplace)


def _channel_dropout(batched: int) -> Callable[..., Tensor]:
    """Dropout of whole channels; an input of fewer dimensions than `batched` is a single row."""

    def drop(
        own: Pass, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        lead = input.shape[: 1 if input.dim() < batched else 2]
        keep = own.keep(lead, p, "channel dropout") if training else None
        if keep is None:
            return input
        keep = keep.reshape(*lead, *[1] * (input.dim() - len(lead)))
        return _scaled(input, keep / (1 - p) if p < 1 else keep, inplace)

    return drop


def _alpha_dropout(
    own: Pass, func: Any, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Tensor:
    """Dropout that keeps the mean and the variance of SELU's outputs."""
    lead = input.shape if func is functional.alpha_dropout else input.shape[:2]
    keep = own.keep(lead, p, func.__name__) if training else None
    if keep is None:
        return input
    keep = keep.reshape(*lead, *[1] * (input.dim() - len(lead)))
    a = 1 / math.sqrt((_SELU**2 * p + 1) * (1 - p))
    return _scaled(input, keep * a, inplace) + ((1 - keep) * -_SELU * a + _SELU * a * p)


def _attention(
    own: Pass,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **more: Any,
) -> Tensor:
    if own.seed is None or dropout_p == 0:
        return func(query, key, value, attn_mask, 0.0, is_causal, **more)
    if more.get("enable_gqa"):
        raise ValueError("scaled_dot_product_attention with dropout cannot have enable_gqa in a federation")
    scale = more.get("scale") or 1 / math.sqrt(query.shape[-1])
    score = query @ key.transpose(-2, -1) * scale
    if is_causal:
        attn_mask = torch.ones(score.shape[-2:], dtype=torch.bool, device=score.device).tril()
    if attn_mask is not None:
        score = score.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else score + attn_mask
    return _dropout(own, None, score.softmax(-1), dropout_p) @ value


def _multi_head_attention(own: Pass, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Torch's own function, with its calls of dropout and of attention replaced."""
    scope = {
        **func.__globals__,
        "has_torch_function": lambda tensors: False,  # it is this mode that has been asked already
        "dropout": lambda *a, **k: _dropout(own, functional.dropout, *a, **k),
        "scaled_dot_product_attention": lambda *a, **k: _attention(
            own, functional.scaled_dot_product_attention, *a, **k
        ),
    }
    copy = FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy(*args, **kwargs)


def _recurrent(own: Pass, func: Any, *args: Any) -> Any:
    """LSTM, GRU or RNN: with dropout between the layers, one layer after the other."""
    packed = isinstance(args[3], tuple | list)  # (data, batch_sizes, hx, weights, …) of a PackedSequence
    dropout, train, layers = args[6 if packed else 5], args[7 if packed else 6], args[5 if packed else 4]
    if own.seed is None or not train or not dropout or layers == 1:
        return func(*args)
    if packed:
        raise ValueError(f"{func.__name__} with dropout cannot take a PackedSequence in a federation; pad the rows")
    x, state, weights, biases, layers, dropout, train, both, batch_first = args
    ways = 2 if both else 1
    of_layer, ends = len(weights) // layers, []
    for i in range(layers):
        rows = slice(i * ways, (i + 1) * ways)
        begin = tuple(s[rows] for s in state) if isinstance(state, tuple | list) else state[rows]
        own_weights = weights[i * of_layer : (i + 1) * of_layer]
        x, *end = func(x, begin, own_weights, biases, 1, 0.0, train, both, batch_first)
        ends.append(end)
        if i < layers - 1:
            x = _dropout(own, None, x, dropout)
    return (x, *(torch.cat(each) for each in zip(*ends, strict=True)))


# --- BatchNorm ----------------------------------------------------------------------------------------------------


def _batch_norm(
    own: Pass,
    func: Any,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`functional.batch_norm` in which rows that are padding count for nothing."""
    if not training and not own.batch_statistics and running_mean is not None:
        return func(input, running_mean, running_var, weight, bias, False, momentum, eps)
    own.used.append("batch_norm")
    over = [0, *range(2, input.dim())]
    share = own.mask.reshape(-1, *[1] * (input.dim() - 1))
    if len(own.mask) != len(input):
        raise ValueError("BatchNorm must be given one entry per row in a federation, in the order of the rows")
    count = own.mask.sum().clamp(min=1) * math.prod(input.shape[2:])
    mean = (input * share).sum(over, keepdim=True) / count
    var = ((input - mean).square() * share).sum(over, keepdim=True) / count
    if training and running_mean is not None and running_var is not None:
        whole = var.flatten() * count / (count - 1).clamp(min=1)
        own.moved[id(running_mean)] = running_mean + momentum * (mean.flatten() - running_mean)
        own.moved[id(running_var)] = running_var + momentum * (whole - running_var)
    out = (input - mean) * (var + eps).rsqrt()
    shape = [1, -1, *[1] * (input.dim() - 2)]
    out = out if weight is None else out * weight.reshape(shape)
    return out if bias is None else out + bias.reshape(shape)


# --- what cannot be repeated --------------------------------------------------------------------------------------


def _random(own: Pass, func: Any, *args: Any, **kwargs: Any) -> Any:
    own.drawn.append(func.__name__)
    return func(*args, **kwargs)


def _rrelu(own: Pass, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Its fourth argument says whether it draws."""
    draws = kwargs.get("training", args[3] if len(args) > 3 else False)
    return _random(own, func, *args, **kwargs) if draws else func(*args, **kwargs)


def _hook(own: Pass, func: Any, *args: Any, **kwargs: Any) -> Any:
    own.hooked = True
    return func(*args, **kwargs)


_FACTORIES = ("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "bernoulli",
              "multinomial", "poisson", "binomial")  # fmt: skip
_METHODS = ("normal_", "uniform_", "bernoulli", "bernoulli_", "random_", "exponential_", "geometric_", "cauchy_",
            "log_normal_", "multinomial")  # fmt: skip

_OWN: dict[Any, Callable[..., Any]] = {
    functional.dropout: _dropout,
    torch.dropout: _dropout,
    functional.dropout1d: _channel_dropout(3),
    functional.dropout2d: _channel_dropout(3),
    functional.dropout3d: _channel_dropout(5),
    functional.alpha_dropout: _alpha_dropout,
    functional.feature_alpha_dropout: _alpha_dropout,
    functional.scaled_dot_product_attention: _attention,
    functional.multi_head_attention_forward: _multi_head_attention,
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _recurrent),
    functional.batch_norm: _batch_norm,
    **dict.fromkeys((getattr(torch, name) for name in _FACTORIES), _random),
    **dict.fromkeys((getattr(Tensor, name) for name in _METHODS), _random),
    functional.gumbel_softmax: _random,
    functional.rrelu: _rrelu,
    Tensor.register_hook: _hook,
}
