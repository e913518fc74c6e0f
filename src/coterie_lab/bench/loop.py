"""A round as in public reference code: one client after the other, each with a copy of the module, and plain SGD."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from coterie.core.pytree import Params, stacked


def loop_round(
    module: nn.Module,
    models: Params,
    clients: Sequence[tuple[Tensor, ...]],
    lr: float,
    tau: int,
    batches: Sequence[Tensor] | None = None,
) -> Params:
    """Choose clusters, train and average without batching over clients, and return the new models (k, …).

    Args:
        module: The model.
        models: Parameters of the clusters (k, …).
        clients: x and y of every client.
        lr: Step size.
        tau: Number of local steps.
        batches: For every client the rows of each step (τ, size); None uses all rows in every step.
    """
    k = stacked(models)
    centres = [_load(module, {n: x[j] for n, x in models.items()}) for j in range(k)]
    trained: list[list[nn.Module]] = [[] for _ in range(k)]
    for i, (x, y) in enumerate(clients):
        with torch.no_grad():
            losses = [float(loss(c, x, y)) for c in centres] if k > 1 else [0.0]
        j = losses.index(min(losses))
        own = copy.deepcopy(centres[j])
        for q in range(tau):
            rows = slice(None) if batches is None else batches[i][q]
            parameters = [p for p in own.parameters() if p.requires_grad]
            gradients = torch.autograd.grad(loss(own, x[rows], y[rows]), parameters)
            with torch.no_grad():
                for p, g in zip(parameters, gradients, strict=True):
                    p -= lr * g
        trained[j].append(own)
    means = [_mean(members) if members else centres[j] for j, members in enumerate(trained)]
    return {n: torch.stack([dict(m.named_parameters())[n].detach() for m in means]) for n in models}


def loss(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean loss of rows: the squared error if the targets are real numbers, else the cross-entropy.

    Args:
        module: The model.
        x: The rows.
        y: Their targets.
    """
    out = module(x)
    return (out[:, 0] - y).square().mean() if y.is_floating_point() else cross_entropy(out, y)


def _load(module: nn.Module, params: Params) -> nn.Module:
    own = copy.deepcopy(module)
    own.load_state_dict(params, strict=False)  # what is frozen is in the module
    return own.to(next(iter(params.values())).device)


def _mean(members: list[nn.Module]) -> nn.Module:
    mean = copy.deepcopy(members[0])
    with torch.no_grad():
        for name, p in mean.named_parameters():
            p.copy_(torch.stack([m.get_parameter(name) for m in members]).mean(0))
    return mean
