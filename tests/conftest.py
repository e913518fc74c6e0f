import logging

import pytest
import torch

import coterie as ct
from coterie.federation import Federation


@pytest.fixture(autouse=True)
def _quiet():
    logging.getLogger("coterie").setLevel(logging.WARNING)


@pytest.fixture(scope="session")
def task():
    return ct.Task.classifier(ct.models.MLP(64, 16, 10))


@pytest.fixture(scope="session")
def ragged():
    """Twelve clients of very unequal size in three well separated groups."""
    g = torch.Generator().manual_seed(0)
    centres = 3 * torch.randn(3, 10, 64, generator=g)
    clients, tests = [], []
    for i in range(12):
        for part, n in ((clients, 5 + 7 * i), (tests, 8)):
            y = torch.randint(10, (n,), generator=g)
            part.append((centres[i % 3][y] + 0.3 * torch.randn(n, 64, generator=g), y))
    return Federation.from_clients(clients, tests, groups=[i % 3 for i in range(12)])


@pytest.fixture(scope="session")
def regression():
    """Forty clients of very unequal size in three mixed regressions, and the task to learn them."""
    federation = ct.data.mixed_regression(
        k=3, d=4, seed=1, anchors=6, anchor_rows=40, pairs=14, rest=20, rest_rows=(1, 3, 6, 11)
    )
    return ct.Task.regressor(ct.models.Linear(4, 1)), federation


@pytest.fixture(scope="session")
def points():
    """Eight clients of very unequal size with points of three clusters, half of each client's of one."""
    whole = ct.data.gaussian_clusters(k=3, p=0.5, seed=2, clients=8, points=120, d=6, separation=6.0)
    rows = [(x[: 20 + 14 * i].flip(0), y[: 20 + 14 * i].flip(0)) for i in range(8) for x, y in [whole.train.client(i)]]
    return Federation.from_clients(rows)
