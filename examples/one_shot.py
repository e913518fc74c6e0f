"""What each way of OneShot to compare clients finds, on five seeds of some federations.

Columns: the adjusted Rand index by k-means, by linkage and by angles, with the true number of groups; and how many
groups linkage finds by itself.
"""

from collections.abc import Callable
from functools import partial

import coterie as ct

images, numbers = ct.Task.classifier(ct.models.MLP(64, 32, 10)), ct.Task.regressor(ct.models.Linear(20, 1))
linear = partial(ct.data.linear_mixture, clients=40, features=20, groups=2)
mixed = partial(ct.data.mixed_regression, k=3, d=20, pairs=0)
federations = {
    "rotated digits": (images, 4, lambda seed: ct.data.rotated_digits(40, seed)),
    "… label skew": (images, 4, lambda seed: ct.data.dirichlet(ct.data.rotated_digits(40, seed), 0.5, seed)),
    "… unequal sizes": (images, 4, lambda seed: ct.data.quantity_skew(ct.data.rotated_digits(40, seed), 1.0, seed)),
    "permuted labels": (images, 4, lambda seed: ct.data.permuted_digits(40, 4, seed)),
    "one group": (images, 1, lambda seed: ct.data.digits(40, seed)),
    "… of all sizes": (images, 1, lambda seed: ct.data.quantity_skew(ct.data.digits(40, seed), 1.0, seed)),
    "linear, 60 rows": (numbers, 2, partial(linear, rows=60)),
    "linear, 10 rows": (numbers, 2, partial(linear, rows=10)),
    "mixed, 60 rows": (numbers, 3, partial(mixed, anchors=40, anchor_rows=60, rest=0)),
    "mixed, 4 to 60": (numbers, 3, partial(mixed, anchors=10, anchor_rows=60, rest=30, rest_rows=(4, 8, 16))),
}


def tried(task: ct.Task, make: Callable[..., ct.Federation], k: int | None, by: str) -> str:
    """What five seeds give: the adjusted Rand index, or the number of groups where k is not given."""
    settings = {"steps": 100, "lr": 0.1} if task is images else {"steps": 500, "lr": 0.02}
    found = []
    for seed in range(5):
        try:
            run = ct.fit(ct.OneShot(k, by, **settings), task, make(seed=seed), rounds=1, seed=seed, evaluations=1)
        except ValueError:  # a client has too few rows for its singular vectors
            return "refused"
        found.append(f"{run.ari:.2f}" if k else str(len(run.models)))
    return " ".join(found)


if __name__ == "__main__":
    for name, (task, k, make) in federations.items():
        known = [tried(task, make, k, by) if k > 1 else "" for by in ("kmeans", "hierarchical", "angles")]
        print(f"{name:16}", *(f"{cell:25}" for cell in known), tried(task, make, None, "hierarchical"), flush=True)
