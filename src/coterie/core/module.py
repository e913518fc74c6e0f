"""Modules as pure functions: which of their tensors are trained, sent or kept, and which layers cannot be used."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrizations import _SpectralNorm

from coterie.core.forward import Pass
from coterie.core.pytree import Params

BatchNorm = Literal["average", "local"]

_PROBE = torch.tensor(1)  # a seed for trying a module out
# vmap cannot batch what attention does in evaluation; a GPU's recurrent layers have no gradient there.
_AS_IN_TRAINING = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder, nn.RNNBase)


class Kinds(NamedTuple):
    """The names of a module's parameters and buffers, by what a federation does with them."""

    trained: tuple[str, ...]  # parameters: trained, sent, averaged
    carried: tuple[str, ...]  # buffers that move in training: sent and averaged
    personal: tuple[str, ...]  # those of BatchNorm that never leave a client (FedBN)
    fixed: tuple[str, ...]  # frozen parameters and all other buffers: nobody sends them


class PureModule:
    """A module as a function of its parameters.

    Args:
        module: With real parameters. Those of `requires_grad` False stay as they are.
        batch_norm: "average": BatchNorm's parameters and statistics are averaged as all others. "local" (FedBN): every
            client keeps its own.
        carry: Names of buffers that move in training, besides those of torch's own layers.
    """

    def __init__(self, module: nn.Module, batch_norm: BatchNorm = "average", carry: Sequence[str] = ()) -> None:
        _check_layers(module)
        module = _as_frozen(module)
        self.name = name_of(module)
        self.batch_norm: BatchNorm = batch_norm
        self.carry = tuple(carry)
        self.kinds = _kinds(module, batch_norm, carry)
        own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self.shapes = {n: own[n].shape for n in (*self.kinds.trained, *self.kinds.carried)}  # of what is sent
        self.aliases = _aliases(module, own)
        self._values = _OnDevices({n: own[n].detach().clone() for n in (*self.kinds.fixed, *self.kinds.personal)})
        self._module = copy.deepcopy(module)
        self._training = _uncounted(in_mode(copy.deepcopy(module), training=True)).to("meta")
        self._scoring = _uncounted(_scoring(module)).to("meta")
        self._counters = {n for n, _ in module.named_buffers()} - {n for n, _ in self._training.named_buffers()}
        self._sees_all_rows = bool(carry)  # what is made of these buffers is the user's, and may be of any row
        self._norms = any(isinstance(layer, _BatchNorm) for layer in module.modules())
        buffers = dict(module.named_buffers())
        self.moving = tuple(n for n in (*self.kinds.carried, *self.kinds.personal) if n in buffers)
        self.moves: bool | None = None  # whether training differs from scoring; None until it was tried

    @property
    def uses_the_batch(self) -> bool:
        """Whether a row's score depends on the other rows: where BatchNorm has no statistics, or not yet."""
        bare = any(isinstance(m, _BatchNorm) and m.running_mean is None for m in self._module.modules())
        return bare or bool(self.kinds.personal)

    # --- the function -----------------------------------------------------------------------------------------------

    def __call__(self, params: Params, args: tuple[Any, ...], kwargs: dict[str, Any], mask: Tensor) -> Tensor:
        """The output as it is scored: no dropout, running statistics."""
        state = self._used(params, mask.device)
        # Only BatchNorm looks at other rows, and only where it has no statistics.
        alone = any(n not in params for n in self.kinds.personal)
        with Pass(mask, None, batch_statistics=alone) if self._norms else nullcontext():
            return output_of(functional_call(self._scoring, state, args, kwargs, tie_weights=False))

    def train(
        self, params: Params, args: tuple[Any, ...], kwargs: dict[str, Any], mask: Tensor, seed: Tensor
    ) -> tuple[Tensor, Params]:
        """The output as it is trained, and what the pass made of the buffers that move.

        Args:
            params: The parameters.
            args: The rows.
            kwargs: More of them, by name.
            mask: 1 for a real row (n,).
            seed: Dropout masks follow from it.
        """
        if self._sees_all_rows and peek_interpreter_stack() is not None:
            raise RuntimeError("vmap pads clients to one length, which buffers that are carried would be made of")
        if self._sees_all_rows and not bool(mask.all()):
            return self._train_real_rows(params, args, kwargs, mask, seed)
        state = self._used(params, mask.device)
        # A copy for each client, also where vmap stacks them: buffers may be written to.
        state |= {n: state[n] + 0 * mask.sum() for n in self.moving}
        before = {n: state[n] for n in self.moving}
        with Pass(mask, seed) as own:
            out = output_of(functional_call(self._training, state, args, kwargs, tie_weights=False))
        return out, {n: own.moved.get(id(before[n]), state[n]) for n in self.moving}

    def _train_real_rows(
        self, params: Params, args: tuple[Any, ...], kwargs: dict[str, Any], mask: Tensor, seed: Tensor
    ) -> tuple[Tensor, Params]:
        """The same for a batch with padding, which the module is not shown; its outputs are 0 there."""
        real = mask.nonzero().flatten()
        own = tuple(x[real] for x in args), {n: x[real] for n, x in kwargs.items()}
        out, moved = self.train(params, *own, mask[real], seed)
        return out.new_zeros(len(mask), *out.shape[1:]).index_copy(0, real, out), moved

    def _state(self, params: Params, device: torch.device) -> Params:
        """All tensors of the module."""
        state = {**self._values.on(device), **params}
        return {**state, **{alias: state[name] for alias, name in self.aliases.items()}}

    def _used(self, params: Params, device: torch.device) -> Params:
        """All that the function uses."""
        return {n: x for n, x in self._state(params, device).items() if n not in self._counters}

    @property
    def personal(self) -> Params:
        """What a client begins with of what never leaves it."""
        return {n: self._values.on(torch.device("cpu"))[n] for n in self.kinds.personal}

    @property
    def fixed(self) -> Params:
        """Frozen parameters and constants, by name."""
        return {n: x for n, x in self.unsent.items() if n in self.kinds.fixed}

    @property
    def unsent(self) -> Params:
        """What is never in a message, by name: frozen parameters, constants, and what clients begin with."""
        return {n: x for n, x in self._values.on(torch.device("cpu")).items() if n not in self._counters}

    # --- what is left of it -----------------------------------------------------------------------------------------

    def state_dict(self, params: Params) -> Params:
        """A model as the module's own `load_state_dict` takes it: with frozen parameters, buffers and tied names."""
        state = self._state(params, torch.device("cpu"))
        return {n: state[n].detach().cpu().clone() for n in self._module.state_dict()}

    def loaded(self, params: Params) -> nn.Module:
        """The module with these parameters, for scoring."""
        module = copy.deepcopy(self._module)
        module.load_state_dict(self.state_dict(params))
        return module.eval()

    def fault(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """What is wrong with a module that can be called, tried on a row; None if nothing is."""
        trials = [self._tried(args, kwargs, training) for training in (False, False, True, True)]
        for trial in trials:
            if trial.drawn:
                return (
                    f"{self.name} draws random numbers by {trial.drawn[0]} inside the model, which cannot be repeated; "
                    "of such layers and functions only dropout is possible"
                )
            if trial.hooked:
                return f"{self.name} puts a hook on a tensor inside the model, which is not called in a federation"
            for name in trial.moved:
                if name not in (*self.kinds.carried, *self.kinds.personal):
                    return f"{self.name} changes its buffer '{name}'{self._way_out(name)}"
        scored, again, trained, once_more = (trial.out for trial in trials)
        if not (torch.equal(scored, again) and torch.equal(trained, once_more)):  # Python and numpy have them, too
            return f"{self.name} gives another output for the same row and parameters when it is called again"
        if self.kinds.trained and not trials[2].tracked:
            return f"{self.name} gives an output without a gradient (is its forward under torch.no_grad?)"
        self.moves = bool(trials[2].special or self.kinds.carried or self.kinds.personal)
        self.moves = self.moves or not torch.equal(scored, trained)
        return None

    def _tried(self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> _Trial:
        """A pass of a copy of the module."""
        copied, rows = in_mode(copy.deepcopy(self._module), training), torch.ones(len(_first(args, kwargs)))
        with torch.set_grad_enabled(training), Pass(rows, _PROBE if training else None) as own:
            out = output_of(copied(*args, **kwargs))
        tracked = out.requires_grad
        return _Trial(out.detach().nan_to_num(), own.drawn, own.hooked, bool(own.used), self._moved(copied), tracked)

    def _moved(self, module: nn.Module) -> list[str]:
        """The buffers of which a pass has made something else."""
        before = dict(self._module.named_buffers())
        now = {n: x for n, x in module.named_buffers() if n in before and n not in self._counters}
        return [n for n, x in now.items() if not torch.equal(x, before[n])]

    def _way_out(self, name: str) -> str:
        if self._module.get_buffer(name).is_floating_point():
            return f"; carry=('{name}',) has it sent and averaged"
        return ", which is no floating-point number and cannot be averaged"


class _Trial(NamedTuple):
    """What a pass of a module shows."""

    out: Tensor
    drawn: list[str]  # the functions that drew random numbers
    hooked: bool  # whether it put a hook on a tensor
    special: bool  # whether it had dropout or BatchNorm
    moved: list[str]  # the buffers that it changed
    tracked: bool  # whether its output has a gradient


class _OnDevices:
    """Tensors that never change, brought to each device once."""

    def __init__(self, values: Params) -> None:
        self._on = {torch.device("cpu"): values}

    def on(self, device: torch.device) -> Params:
        if device not in self._on:
            self._on[device] = {n: x.to(device) for n, x in self._on[torch.device("cpu")].items()}
        return self._on[device]


def hold(layer: nn.Module) -> None:
    """Have a layer be as it is scored in training too: without dropout, and with the statistics that it has."""
    vars(layer)["_held"] = True


def is_held(layer: nn.Module) -> bool:
    """Whether a layer is as it is scored in training too."""
    return "_held" in vars(layer)


def in_mode(module: nn.Module, training: bool) -> nn.Module:
    """The module in training, but for the layers that are held, or in evaluation."""
    for layer in module.train(training).modules():
        layer.training = training and not is_held(layer)
    return module


def _kinds(module: nn.Module, batch_norm: BatchNorm, carry: Sequence[str]) -> Kinds:
    trained = [n for n, p in module.named_parameters() if p.requires_grad]
    buffers = dict(module.named_buffers())
    for name in carry:
        if name not in buffers or not buffers[name].is_floating_point():
            floats = ", ".join(n for n, x in buffers.items() if x.is_floating_point()) or "none"
            raise ValueError(f"Task: carry names '{name}', but the buffers of floating point are: {floats}")
    carried, personal = list(carry), []
    for prefix, layer in module.named_modules():
        names = [
            f"{prefix}." * bool(prefix) + n for n, x in layer.named_buffers(recurse=False) if x.is_floating_point()
        ]
        if is_held(layer):
            continue
        if isinstance(layer, _BatchNorm):
            own = [f"{prefix}." * bool(prefix) + n for n, _ in layer.named_parameters(recurse=False)]
            (personal if batch_norm == "local" else carried).extend(names)
            personal += own if batch_norm == "local" else []
        elif isinstance(layer, _SpectralNorm):
            carried += names
    trained = [n for n in trained if n not in personal]
    known = {*trained, *carried, *personal}
    rest = [n for n, _ in (*module.named_parameters(), *module.named_buffers()) if n not in known]
    return Kinds(tuple(trained), tuple(carried), tuple(personal), tuple(rest))


def _as_frozen(module: nn.Module) -> nn.Module:
    """A copy of which BatchNorm layers that are frozen and in evaluation, as the user gave them, are held."""
    copied = copy.deepcopy(module)
    for layer in copied.modules():
        frozen = not any(p.requires_grad for p in layer.parameters(recurse=False))
        if isinstance(layer, _BatchNorm) and layer.affine and frozen and not layer.training:
            hold(layer)
    return copied


def _aliases(module: nn.Module, own: Mapping[str, Tensor]) -> dict[str, str]:
    """The other names of tensors that are used in several places, with the first name of each."""
    first = {id(x): n for n, x in own.items()}
    everything = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return {n: first[id(x)] for n, x in everything if first[id(x)] != n}


def _scoring(module: nn.Module) -> nn.Module:
    """A copy for scoring. Some layers go the way of training, without dropout."""
    copied = copy.deepcopy(module).eval()
    for layer in copied.modules():
        if isinstance(layer, _AS_IN_TRAINING):
            layer.training = True
        if isinstance(layer, nn.MultiheadAttention | nn.RNNBase):
            layer.dropout = 0.0
    return copied


def _uncounted(module: nn.Module) -> nn.Module:
    """The module with BatchNorm layers that do not count their batches, which they need for no result."""
    for layer in module.modules():
        if isinstance(layer, _BatchNorm):
            layer.num_batches_tracked = None
    return module


def _check_layers(module: nn.Module) -> None:
    """Refuse layers that a federation cannot repeat or average."""
    for name, layer in module.named_modules():
        where = f"Task: layer '{name}' ({name_of(layer)})" if name else f"Task: {name_of(layer)}"
        strange = [p.dtype for p in layer.parameters(recurse=False) if not is_lazy(p) and p.dtype != torch.float32]
        if strange or any(p.is_meta for p in layer.parameters(recurse=False)):
            kind = str(strange[0]).removeprefix("torch.") if strange else "no values: its device is meta"
            raise ValueError(f"{where} has parameters of {kind}; give float32, such as module.float()")
        if any(is_lazy(x) for x in (*layer.parameters(recurse=False), *layer.buffers(recurse=False))):
            raise ValueError(f"{where} does not know its shape yet; call the module on some rows once")
        if isinstance(layer, nn.SyncBatchNorm):
            raise ValueError(f"{where} is for several processes that train one model; use BatchNorm")
        if isinstance(layer, _BatchNorm) and layer.momentum is None:
            raise ValueError(f"{where}: momentum=None, a plain mean over all batches, has no meaning over clients")
        if isinstance(layer, _InstanceNorm) and layer.track_running_stats:
            raise ValueError(f"{where}: track_running_stats is not possible in a federation; use GroupNorm")


def output_of(out: Any) -> Tensor:
    """The tensor that a module returns; of models in Hugging Face's style, its logits."""
    if isinstance(out, Tensor):
        return out
    logits = out.get("logits") if isinstance(out, Mapping) else getattr(out, "logits", None)
    if not isinstance(logits, Tensor):
        raise ValueError(f"it must return a tensor, or something with logits, not {type(out).__name__}")
    return logits


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return args[0] if args else next(iter(kwargs.values()))


def outside(module: nn.Module, x: Tensor) -> str | None:
    """Say which values a module does not take, if it has a range `between`."""
    if (between := getattr(module, "between", None)) is None:  # rows in a file are not read for nothing
        return None
    low, high = between
    if bool(((x >= low) & (x <= high)).all()):
        return None
    return f"{name_of(module)} takes values from {low:g} to {high:g}, but these go from {x.min():g} to {x.max():g}"


def name_of(module: nn.Module) -> str:
    """The name of a module's class, for messages."""
    return type(module).__name__
