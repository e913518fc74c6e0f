"""The rounds that `coterie bench speed` times, and the least operations that each of them takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch.utils.flop_counter import FlopCounterMode

from coterie import IFCA, FedAvg
from coterie.core.federation import Federation
from coterie.core.method import Method
from coterie.core.task import Task
from coterie.models import CNN, MLP, FemnistCNN, Linear, ResNet
from coterie_lab.bench.loop import loss


@dataclass(frozen=True)
class Workload:
    """A round to run: the model, the clients, the method, and the minimum number of operations that it takes."""

    name: str
    module: torch.nn.Module
    federation: Federation
    k: int
    tau: int
    lr: float
    flops: float
    batch: int | None = None
    features: bool = True  # whether rows pass through frozen layers only once
    compiled: bool = False  # whether graphs are compiled before rounds are timed, as they are in a run of minutes

    @property
    def frozen(self) -> bool:
        """Whether some layers are frozen."""
        return not all(p.requires_grad for p in self.module.parameters())

    @cached_property
    def task(self) -> Task:
        """A classifier if the labels are integers, else a regressor; one for all executors, which share its graphs."""
        kind = Task.regressor if self.federation.train.y.is_floating_point() else Task.classifier
        task = kind(self.module)
        return task if self.features else replace(task, trunk=lambda x: None)

    @property
    def algorithm(self) -> Method:
        """IFCA from a random start, or FedAvg for a single model."""
        plain = {"lr": self.lr, "tau": self.tau, "batch": self.batch}
        return IFCA(self.k, init="random", **plain) if self.k > 1 else FedAvg(**plain)


def workloads(quick: bool, device: torch.device) -> list[Workload]:
    """Return the workloads: the IFCA paper's MLP with four clusters, one, and on minibatches, a linear model, CNNs.

    LEAF's CNN is that of the paper's FEMNIST experiment: all of it is trained, or it is frozen but for its last layer.
    On a GPU there are two more, a CNN and a ResNet on larger images; a CPU would need minutes for a round of these.

    On a GPU the first has as many clients as in the paper; the others have fewer, because the loop takes minutes there.

    Args:
        quick: Whether to use few clients and smaller networks.
        device: Where the workloads will run.
    """
    m, one = (16, 16) if quick else (480, 480) if device.type == "cpu" else (4800, 480)
    images = grouped(m, 50, 784, 10, groups=4)
    fewer = images if one == m else grouped(one, 50, 784, 10, groups=4)
    points = linear(50 if quick else 500, 20, 20)
    mlp = MLP(784, 200, 10)
    small, medium = CNN((1, 28, 28), 10, (8, 16), 5, 32), CNN((1, 28, 28), 10)
    few = grouped(4 if quick else 48, 50, 784, 10, groups=4).map(lambda i, x, y: (x.reshape(-1, 1, 28, 28), y))
    hidden = 256 if quick else 2048
    leaf = FemnistCNN(hidden=hidden)
    writers = grouped(4 if quick else 24, 50, 784, 62, groups=2).map(lambda i, x, y: (x.reshape(-1, 1, 28, 28), y))
    trained = sgd_flops(leaf, writers, 5)
    letters = grouped(2 if quick else 12, 100, 784, 62, groups=4).map(lambda i, x, y: (x.reshape(-1, 1, 28, 28), y))
    frozen = FemnistCNN(hidden=hidden).requires_grad_(False)
    frozen.head.requires_grad_(True)
    head = 4.0 * 10 * hidden * 62 * 10 * len(letters)  # outputs and gradient of the head, ten rows, ten steps
    line = len(points) * (4.0 * 20 * 20 + 2.0 * 20 * 20)  # residuals, gradient, and all steps in one product
    return [
        Workload(f"IFCA, {m} × 50, 784-200-10, τ=10, k=4", mlp, images, 4, 10, 0.1, gram_flops(m, 4)),
        Workload(f"FedAvg, {one} × 50, 784-200-10, τ=10", mlp, fewer, 1, 10, 0.1, gram_flops(one, 1)),
        Workload(
            f"FedAvg, {one} × 50, 784-200-10, batch 10, τ=10", mlp, fewer, 1, 10, 0.1, gram_flops(one, 1, batch=10), 10
        ),
        Workload(f"FedAvg, {len(points)} × 20, linear, d=20, τ=10", Linear(20, 1), points, 1, 10, 0.02, line),
        Workload(
            f"FedAvg, {len(few)} × 50, small CNN, batch 10, τ=5", small, few, 1, 5, 0.1, sgd_flops(small, few, 5), 10
        ),
        Workload(
            f"FedAvg, {len(few)} × 50, CNN 32-64, batch 10, τ=5", medium, few, 1, 5, 0.1, sgd_flops(medium, few, 5), 10
        ),
        Workload(f"FedAvg, {len(writers)} × 50, LEAF's CNN, batch 10, τ=5", leaf, writers, 1, 5, 0.1, trained, 10),
        Workload(
            f"IFCA, {len(writers)} × 50, LEAF's CNN, batch 10, τ=5, k=2",
            leaf,
            writers,
            2,
            5,
            0.1,
            choosing_flops(leaf, writers, 2) + trained,
            10,
        ),
        Workload(
            f"FedAvg, {len(letters)} × 100, FEMNIST's CNN, frozen but for its last layer, batch 10, τ=10",
            frozen,
            letters,
            1,
            10,
            0.1,
            head,
            10,
        ),
        *(colour_images(quick) if quick or device.type == "cuda" else ()),
    ]


def colour_images(quick: bool) -> list[Workload]:
    """Return two rounds of IFCA on clients of 500 images of CIFAR-10's size, with a CNN and with a ResNet.

    Args:
        quick: Whether to use few and small clients.
    """
    m, n, batch, tau = (4, 4, 2, 1) if quick else (64, 500, 50, 10)
    images = grouped(m, n, 3 * 32 * 32, 10, groups=2).map(lambda i, x, y: (x.reshape(-1, 3, 32, 32), y))
    modules = {"CNN 32-64": CNN((3, 32, 32), 10), "ResNet of 7 convolutions": ResNet(3, 10)}
    return [
        Workload(
            f"IFCA, {m} × {n}, {name}, batch {batch}, τ={tau}, k=2",
            module,
            images,
            2,
            tau,
            0.01,
            choosing_flops(module, images, 2) + sgd_flops(module, images, tau, batch),
            batch,
            compiled=True,
        )
        for name, module in modules.items()
    ]


def gram_flops(
    m: int, k: int, n: int = 50, d: int = 784, h: int = 200, classes: int = 10, tau: int = 10, batch: int | None = None
) -> float:
    """Return the operations of a round of a two-layer MLP in the cheapest exact form known, `coterie.engines.fused`.

    The Gram matrices are computed once per run and not counted.

    Args:
        m: Number of clients.
        k: Number of clusters.
        n: Number of rows per client.
        d: Number of features.
        h: Number of hidden units.
        classes: Number of classes.
        tau: Number of local steps.
        batch: Number of rows of a step; None for all.
    """
    rows = batch or n
    choose = 2.0 * m * n * d * h * k
    steps = (tau - 1) * 2.0 * m * rows * n * h
    tail = tau * 6.0 * m * rows * h * classes
    total = 2.0 * m * n * h * d
    return choose + steps + tail + total


def sgd_flops(module: torch.nn.Module, federation: Federation, tau: int, batch: int = 10) -> float:
    """Return the operations of τ steps on minibatches for all clients, from torch's count for one step.

    Args:
        module: The model.
        federation: The clients.
        tau: Number of local steps τ.
        batch: Number of rows of a minibatch.
    """
    x, y = federation.train.client(0)
    with FlopCounterMode(display=False) as counter:
        loss(module, x[:batch], y[:batch]).backward()
    module.zero_grad()
    return float(counter.get_total_flops()) * tau * len(federation)


def choosing_flops(module: torch.nn.Module, federation: Federation, k: int) -> float:
    """Return the operations of k models' outputs for all rows, from torch's count for one row.

    Args:
        module: The model.
        federation: The clients.
        k: Number of models.
    """
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(federation.train.x[:1])
    return float(counter.get_total_flops()) * k * len(federation.train.x)


def grouped(m: int, n: int, d: int, classes: int, groups: int) -> Federation:
    """Return clients in well separated groups, so that rounding errors never change the choice of a cluster.

    Args:
        m: Number of clients.
        n: Number of rows per client.
        d: Number of features.
        classes: Number of classes.
        groups: Number of groups.
    """
    g = torch.Generator().manual_seed(0)
    centres = torch.rand(groups, classes, d, generator=g)
    clients = []
    for i in range(m):
        y = torch.randint(classes, (n,), generator=g)
        clients.append((centres[i * groups // m][y] + 0.1 * torch.randn(n, d, generator=g), y))
    return Federation.from_clients(clients)


def linear(m: int, n: int, d: int) -> Federation:
    """Return clients whose rows all follow the same linear regression.

    Args:
        m: Number of clients.
        n: Number of rows per client.
        d: Number of features.
    """
    g = torch.Generator().manual_seed(0)
    theta = torch.randn(d, generator=g)
    rows = [torch.randn(n, d, generator=g) for _ in range(m)]
    return Federation.from_clients([(x, x @ theta) for x in rows])
