"""A model taken apart after the layers that are frozen: a trunk, whose outputs never change, and a head.

What a trained layer sees of a row is then a constant of the run, the row's *features*, and is computed once. The cut is
found in the graph of the module's operations, which `torch.fx` records: all that depends neither on a trained
parameter nor on what training does otherwise, such as dropout, is the trunk. The head must need a single tensor of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.dropout import _DropoutNd

from coterie.core.making import Maker
from coterie.core.module import PureModule, in_mode, is_held
from coterie.core.pytree import Params

Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # those of a module, by position and by keyword

_SEED = torch.tensor(1)


class Cut(NamedTuple):
    """A module as a trunk and a head.

    Attributes:
        trunk: From rows to features, which nothing in a run changes.
        make: Makes heads to begin with, as the module was made.
        head: From features to outputs; its parameters have the names that they have in the module.
    """

    trunk: PureModule
    make: Maker
    head: PureModule


class _Piece(nn.Module):
    """Some operations of a module, with the layers that they use under their own names.

    `fx.GraphModule` is not used as it is: it writes to standard error whenever something is raised in it, and vmap
    raises where it cannot batch a layer.
    """

    def __init__(self, whole: nn.Module, graph: fx.Graph) -> None:
        super().__init__()
        made = fx.GraphModule(whole, graph)
        _put_in_order(made, whole)
        for name, x in made.named_parameters(recurse=False):
            self.register_parameter(name, x)
        for name, x in made.named_buffers(recurse=False):
            self.register_buffer(name, x)
        for name, layer in made.named_children():
            self.add_module(name, layer)
        self._run = type(made).forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self, *args, **kwargs)


class _Whole(Exception):
    """Says why a module is not taken apart."""


def cut_after_trunk(make: Maker, pure: PureModule, params: Params, given: Arguments) -> Cut | str | None:
    """Take a module apart after its frozen layers.

    Args:
        make: Makes the module.
        pure: The same as a function.
        params: A model.
        given: Two rows of the kind that it takes.

    Returns:
        The parts; None where there is nothing to gain, because no layer is frozen or none of those comes before all
        others; where there would be, but it is not possible, why.
    """
    parameters = dict(make(0).named_parameters())
    if not any(name in parameters for name in pure.kinds.fixed):
        return None
    try:
        cut = _cut(make, pure)
        if cut is not None:
            _check(cut, pure, params, given)
        return cut
    except _Whole as why:
        return str(why)
    except Exception as error:  # a module may raise anything where it is not called as it expects to be
        return f"its forward cannot be followed ({str(error).splitlines()[0] if str(error) else type(error).__name__})"


def _cut(make: Maker, pure: PureModule) -> Cut | None:
    if pure.carry:
        raise _Whole("it has buffers in carry, which may be made of any row")
    module = make(0)
    graph = _graph(module)
    late, features = _sides(graph, module, pure)
    early = _behind([features])
    if not any(True for node in early for _ in _tensors(node, module, nn.Parameter)):
        return None

    def build() -> nn.Module:
        return _Piece(make.build(), _part(graph, late, {features: "features"}, None))

    rows = {node: str(node.target) for node in graph.nodes if node.op == "placeholder"}
    trunk = _Piece(module, _part(graph, early, rows, features))
    heads = Maker(build, "module" if make.same else "random")
    cut = Cut(PureModule(trunk), heads, PureModule(heads(0), pure.batch_norm))
    if cut.head.kinds[:3] != pure.kinds[:3]:
        raise _Whole("its trained parameters would be in another order")
    return cut


def _put_in_order(part: nn.Module, whole: nn.Module) -> None:
    """Give what a part of a module consists of the order that it has in the module, in place of that of its use."""
    for kind in ("_parameters", "_buffers", "_modules"):
        own, order = getattr(part, kind), getattr(whole, kind)
        ordered = {**{name: own[name] for name in order if name in own}, **own}
        own.clear()
        own.update(ordered)
    for name, child in part.named_children():
        _put_in_order(child, whole.get_submodule(name))


def _graph(module: nn.Module) -> fx.Graph:
    """The operations of a forward pass, which must be the same in training and in scoring."""
    training, scoring = (fx.Tracer().trace(in_mode(module, mode)) for mode in (True, False))
    if str(training) != str(scoring):
        raise _Whole("its forward asks whether it is in training; dropout should be a layer, nn.Dropout")
    return training


def _sides(graph: fx.Graph, module: nn.Module, pure: PureModule) -> tuple[set[fx.Node], fx.Node]:
    """What the head consists of, and the one node before it that it needs."""
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    moving = {id(own[n]) for n in (*pure.kinds.trained, *pure.kinds.carried, *pure.kinds.personal)}
    late: set[fx.Node] = set()
    of_rows: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or any(n in of_rows for n in node.all_input_nodes):
            of_rows.add(node)
        touched = any(id(x) in moving for x in _tensors(node, module)) or _draws(node, module)
        if node.op == "output" or touched or any(n in late for n in node.all_input_nodes):
            late.add(node)
    while True:
        needed = {n for node in late for n in node.all_input_nodes if n not in late}
        crossing = [n for n in graph.nodes if n in needed and n in of_rows]
        if len(crossing) == 1:
            return late | _behind(needed - of_rows), crossing[0]  # constants belong to whoever needs them
        plain = [n for n in crossing if n.op != "placeholder" and not _tensors(n, module)]
        if not plain:
            names = ", ".join(n.name for n in crossing)
            raise _Whole(f"what is trained needs more than one value of what is frozen: {names or 'none of a row'}")
        late.add(plain[-1])  # it may be made of the others


def _tensors(node: fx.Node, module: nn.Module, kind: type = Tensor) -> list[Any]:
    """The parameters and buffers that an operation uses, or those of a kind."""
    if node.op == "call_module":
        layer = module.get_submodule(str(node.target))
        own = [*layer.parameters(), *layer.buffers()]
    elif node.op == "get_attr":
        parent, _, name = str(node.target).rpartition(".")
        own = [getattr(module.get_submodule(parent), name)]
    else:
        own = []
    return [x for x in own if isinstance(x, kind)]


def _draws(node: fx.Node, module: nn.Module) -> bool:
    """Whether an operation is a layer with dropout that is not held as it is scored."""
    if node.op != "call_module":
        return False
    layers = [x for x in module.get_submodule(str(node.target)).modules() if not is_held(x)]
    rates = [x.p if isinstance(x, _DropoutNd) else getattr(x, "dropout", 0) for x in layers]
    return any(isinstance(p, float) and p > 0 for p in rates)


def _behind(nodes: Any) -> set[fx.Node]:
    """These nodes, and all that they are made of."""
    found: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return found


def _part(whole: fx.Graph, nodes: set[fx.Node], given: dict[fx.Node, str], result: fx.Node | None) -> fx.Graph:
    """A graph of some nodes of another one.

    Args:
        whole: The other one.
        nodes: Which.
        given: Those that are its inputs, with their names.
        result: What it returns; None if that is among the nodes.
    """
    part, own = fx.Graph(), {}
    for node in whole.nodes:
        if node in given:
            own[node] = part.node_copy(node) if node.op == "placeholder" else part.placeholder(given[node])
        elif node in nodes:
            own[node] = part.node_copy(node, lambda n: own[n])
    if result is not None:
        part.output(own[result])
    return part


# --- whether it is true ----------------------------------------------------------------------------------------------


def _check(cut: Cut, pure: PureModule, params: Params, given: Arguments) -> None:
    """Try the parts on some rows: together they must be the module, and no row may depend on the others."""
    trunk, ones = cut.trunk, torch.ones
    if trunk.fault(*given) or trunk.moves:
        raise _Whole("its frozen layers do something else in training than in scoring")
    with torch.no_grad():
        seen = trunk({}, *given, ones(2))
        many = trunk({}, *_taken(given, [1, 0, 1]), ones(3))
    if seen.dtype != torch.float32 or seen.dim() < 1 or len(seen) != 2:
        raise _Whole("its frozen layers do not return one row of float32 for each row")
    if not (torch.allclose(many[1:], seen, rtol=1e-4, atol=1e-5) and torch.allclose(many[0], many[2])):
        raise _Whole("its frozen layers mix the rows of a batch")
    for how in (_scored, _trained):
        features = seen.clone()
        own, apart = how(pure, params, given), how(cut.head, params, ((features,), {}))
        if not torch.equal(features, seen):
            raise _Whole("it changes the output of a frozen layer in place")
        if not all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(own, apart, strict=True)):
            raise _Whole("its head and its frozen layers, one after the other, are not the same as the module")


def _taken(given: Arguments, rows: list[int]) -> Arguments:
    args, kwargs = given
    return tuple(x[rows] for x in args), {n: x[rows] for n, x in kwargs.items()}


def _scored(pure: PureModule, params: Params, given: Arguments) -> list[Tensor]:
    return _with_slopes(lambda own: pure(own, *given, torch.ones(2)), params, pure.kinds.trained)


def _trained(pure: PureModule, params: Params, given: Arguments) -> list[Tensor]:
    return _with_slopes(lambda own: pure.train(own, *given, torch.ones(2), _SEED)[0], params, pure.kinds.trained)


def _with_slopes(function: Callable[[Params], Tensor], params: Params, names: Sequence[str]) -> list[Tensor]:
    """An output, and the gradients of a number that is made of it at some parameters."""
    with torch.enable_grad():
        own = {n: p.detach().clone().requires_grad_(n in names) for n, p in params.items()}
        out = function(own)
        slopes = torch.autograd.grad(out.square().sum(), [own[n] for n in names], materialize_grads=True)
    return [out.detach(), *slopes]
