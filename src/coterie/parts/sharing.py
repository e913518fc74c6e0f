"""Weight sharing: parameters that all clusters have in common (IFCA, Section 4.1). The others are clustered."""

from __future__ import annotations

from torch import Tensor

from coterie.core.key import Key
from coterie.core.pytree import Params
from coterie.core.task import Task


class Sharing:
    """For methods with `restarts` and `k` models each, of whose parameters `shared` are names."""

    k: int
    restarts: int
    shared: tuple[str, ...]

    def check_shared(self, task: Task) -> None:
        """Refuse names that the model has no parameters for."""
        names = task.init(Key.of(0))
        for name in self.shared:
            if name not in names:
                owner = type(self).__name__
                raise ValueError(f"{owner}: shared names '{name}', but the model's parameters are {', '.join(names)}")

    def tied(self, theta: Params) -> Params:
        """Models (r, k, …) whose shared parameters are those of the first model of their restart."""
        tie = {name: theta[name][:, :1].expand_as(theta[name]).contiguous() for name in self.shared}
        return {**theta, **tie}

    def apart(self, theta: Params) -> tuple[Params, Params]:
        """The clustered parameters (r, k, …), and the shared ones once (r, …): what has to be sent."""
        clustered = {name: x for name, x in theta.items() if name not in self.shared}
        return clustered, {name: theta[name][:, 0] for name in self.shared}

    def over_clusters(self, name: str, total: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """A parameter's sums by slot (r·k, …) and their weights (r·k,); those of a shared one over all clusters."""

        def pooled(x: Tensor) -> Tensor:
            each = x.unflatten(0, (self.restarts, self.k))
            return each.sum(1, keepdim=True).expand_as(each).flatten(0, 1)

        return (pooled(total), pooled(weight)) if name in self.shared else (total, weight)
