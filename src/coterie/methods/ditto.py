"""Ditto: one model for all, and beside it one for each client, which is pulled towards it.

Ditto: Fair and Robust Federated Learning Through Personalization
    Tian Li, Shengyuan Hu, Ahmad Beirami, Virginia Smith. ICML 2021, Algorithm 1.

The paper trains v_k beside the rounds; as nothing of it flows back, it can as well be made at the end, from the last
global model. λ is chosen by each client, as in the paper's Section 3.3 ("Dynamic Ditto").
"""

from __future__ import annotations

from dataclasses import dataclass, field

from coterie.core.method import Method
from coterie.core.registry import register
from coterie.methods.fedavg import FedAvg
from coterie.methods.personal import Personal


@register("ditto")
@dataclass(frozen=True)
class Ditto(Personal):
    """`Personal` around FedAvg, with pulls towards the global model whatever the task.

    Example:
        >>> import coterie as ct
        >>> federation = ct.data.rotated_digits(clients=8, seed=0)
        >>> task = ct.Task.classifier(ct.models.MLP(64, 32, 10))
        >>> run = ct.fit(ct.Ditto(), task, federation, rounds=3, evaluations=1)
        >>> run.score > ct.fit(ct.FedAvg(), task, federation, rounds=3, evaluations=1).score
        True
    """

    method: Method = field(default_factory=FedAvg)
    strengths: tuple[float, ...] | None = (0.1, 1.0, 10.0)
