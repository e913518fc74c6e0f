"""Freeze a model but for its head: the other layers keep the values that they have, the head is drawn anew."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from coterie.core.making import Maker
from coterie.core.module import PureModule, hold
from coterie.core.pytree import Params
from coterie.core.task import Task
from coterie.storage.names import nearest_name


def frozen(task: Task, values: Params, head: Sequence[str], spec: dict[str, Any] | None = None) -> Task:
    """A task of which only the head is trained. Its start is random; all other layers are as they are scored.

    Args:
        task: A task that was made from a module.
        values: A state dict of the module, whose values the layers outside of the head get.
        head: The names of layers, with all that is in them.
        spec: A plain description of the new task; None for none.

    Raises:
        ValueError: A layer is not there or has no parameters, nothing is left to freeze, or the head cannot be drawn.
    """
    if task.functions is None or task.networks is not None:
        raise ValueError("freeze: only a task made from a module with one output has layers to freeze")
    own, before = task.functions, task.functions.pure
    heads = check_head(own.make(0), head)

    def prepared(module: nn.Module) -> nn.Module:
        module.load_state_dict(trunk_of(values, heads), strict=False)
        for name, p in module.named_parameters():
            if not _within(name, heads):
                p.requires_grad_(False)
        for name, layer in module.named_modules():
            if not _within(name, heads) and not any(_within(one, [name]) for one in heads):
                hold(layer)
        return module

    module, build = own.make.module, own.make.build
    make = Maker(prepared(copy.deepcopy(module)) if module is not None else lambda: prepared(build()))
    pure = PureModule(make(0), before.batch_norm, [n for n in before.carry if _within(n, heads)])
    if not pure.kinds.trained:
        raise ValueError(f"freeze: nothing is left to train: all parameters of {_listed(heads)} are frozen already")
    return task.of_functions(replace(own, make=make, pure=pure, inputs=None), spec)


def check_head(module: nn.Module, head: Sequence[str]) -> tuple[str, ...]:
    """The names of the layers of a head, if the module has them and others besides.

    Args:
        module: The module.
        head: The names that a user gave.
    """
    layers = {n: layer for n, layer in module.named_modules() if n and any(True for _ in layer.parameters())}
    if not head:
        raise ValueError(f"freeze: head names no layer; those with parameters are {', '.join(layers)}")
    for name in head:
        if name not in layers:
            raise ValueError(f"freeze: the model has no layer '{name}' with parameters{nearest_name(name, layers)}")
    everywhere = dict(module.named_parameters(remove_duplicate=False))
    inside = {id(p) for n, p in everywhere.items() if _within(n, head)}
    outside = {id(p): n for n, p in everywhere.items() if not _within(n, head)}
    if not outside:
        raise ValueError(f"freeze: nothing is left to freeze: {_listed(head)} are all layers of the model")
    if shared := inside & outside.keys():
        raise ValueError(
            f"freeze: {_listed(head)} cannot be drawn anew: it shares a parameter with '{outside[shared.pop()]}'"
        )
    return tuple(head)


def trunk_of(values: Params, head: Sequence[str]) -> Params:
    """What a state dict says of the layers outside of the head."""
    return {n: x for n, x in values.items() if not _within(n, head)}


def _within(name: str, layers: Sequence[str]) -> bool:
    """Whether a parameter, buffer or layer is one of these layers or in one."""
    return any(not layer or name == layer or name.startswith(f"{layer}.") for layer in layers)


def _listed(head: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in head)
