"""IFCA as a plain loop, to be read alongside Algorithm 1 of the paper. `coterie.IFCA` is the fast version.

python examples/01_ifca_by_hand.py
"""

import torch
from torch.nn.functional import cross_entropy

import coterie as ct

federation = ct.data.rotated_digits(clients=16, seed=0)
clients = [federation.train.client(i) for i in range(len(federation))]
k, gamma, tau, rounds = 4, 0.1, 10, 30

torch.manual_seed(0)  # seed 1 loses groups, as a random start often does; hence coterie does not start at random
models = [ct.models.MLP(64, 32, 10) for _ in range(k)]  # line 1


def loss(model: torch.nn.Module, i: int) -> torch.Tensor:
    """F_i(θ): the mean loss of client i."""
    x, y = clients[i]
    return cross_entropy(model(x), y)


def local_update(model: torch.nn.Module, i: int) -> torch.nn.Module:
    """LocalUpdate(θ, γ, τ), lines 18 to 21."""
    own = ct.models.MLP(64, 32, 10)
    own.load_state_dict(model.state_dict())
    for _ in range(tau):
        gradients = torch.autograd.grad(loss(own, i), list(own.parameters()))
        with torch.no_grad():
            for p, g in zip(own.parameters(), gradients, strict=True):
                p -= gamma * g
    return own


for _t in range(rounds):  # line 2
    with torch.no_grad():
        labels = [min(range(k), key=lambda j: float(loss(models[j], i))) for i in range(len(clients))]  # line 6
    trained = [local_update(models[j], i) for i, j in enumerate(labels)]  # line 11
    for j in range(k):  # line 15
        members = [trained[i].state_dict() for i in range(len(clients)) if labels[i] == j]
        if members:  # an empty cluster keeps its model
            mean = {name: torch.stack([m[name] for m in members]).mean(0) for name in members[0]}
            models[j].load_state_dict(mean)

print("true groups  ", federation.groups.tolist())
print("found groups ", labels)
