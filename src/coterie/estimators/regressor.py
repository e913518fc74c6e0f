"""A regression for each cluster of clients."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import RegressorMixin
from sklearn.metrics import r2_score

from coterie.core.task import Source, Task
from coterie.estimators.base import Clustered
from coterie.storage.scales import Scale


class ClusteredRegressor(RegressorMixin, Clustered):
    """Regression where rows belong to clients, clients to hidden clusters, and each cluster has a model.

    Rows of a client that was there at `fit` are predicted by its own model, if the method makes one, else by that of
    its cluster. For any other client, the clusters' models are mixed, each by its share of all clients.

    Args:
        method: "auto" takes what `ct.compare` recommends; or the name of a method, such as "ifca", "cfl", "fedavg" or
            "mixed_effects"; or a method, such as `ct.IFCA(k=3)`. With more than 50,000 rows candidates are compared on
            a sample of the clients (`coterie.runs.sampling.sampled`), and the chosen method is trained on all. With a
            single client, "auto" is a plain model.
        k: The number of clusters. "auto" finds it on held-out rows, or leaves a method as it is given.
        model: "linear", "mlp" (64 hidden units), or a `torch.nn.Module` or function that builds one.
        lr: The step size; None takes the method's own, or of a linear model what its curvature bears.
        rounds: How many rounds to train at most.
        standardise: Whether columns of X, and y, are given mean 0 and standard deviation 1 before training.
            Predictions are in the units of y either way.
        device: "auto" (a GPU if there is one), "cpu" or "cuda".
        random_state: All draws follow from it.

    Attributes:
        clients_: The clients, sorted.
        labels_: The cluster of each.
        n_clusters_: How many clusters there are.
        models_: One model for each cluster. Of a linear one a dict of `coef` and `intercept` in the units of the data;
            else modules, which take rows `x_scale_(X)` and give `y_scale_(y)`.
        method_: The method that was trained.
        run_: The run, with its history, scores and warnings. A pickle has none.
        comparison_: How the method or its k was chosen; only where candidates were compared.
        x_scale_: The units of rows in training.
        y_scale_: The units of targets in training.
        n_features_in_: How many features a row has.
        feature_names_in_: Their names, where X is a table.

    Example:
        >>> import numpy as np, coterie as ct
        >>> rng = np.random.default_rng(0)
        >>> X, shop = rng.normal(size=(400, 1)), np.repeat(np.arange(20), 20)
        >>> y = np.where(shop % 2 == 0, 3, -3) * X[:, 0] + 100
        >>> model = ct.ClusteredRegressor(method="fedx", k=2, random_state=0).fit(X, y, groups=shop)
        >>> sorted(round(float(m["coef"][0]), 3) for m in model.models_)
        [-3.0, 3.0]
        >>> model.predict([[2.0], [2.0]], groups=[0, 1]).round(2)
        array([106.,  94.])
    """

    y_scale_: Scale

    def predict(self, X: Any, groups: Any = None) -> np.ndarray:
        """The value of each row.

        Args:
            X: Rows (n, features).
            groups: Whose each row is (n,); None where nobody knows.
        """
        return self._values(X, groups)[:, 0]

    def score(self, X: Any, y: Any, groups: Any = None, sample_weight: Any = None) -> float:  # pyright: ignore[reportIncompatibleMethodOverride]
        """R² of what is predicted.

        Args:
            X: Rows (n, features).
            y: Their targets (n,).
            groups: Whose each row is (n,); None where nobody knows.
            sample_weight: How much each row counts (n,).
        """
        return float(r2_score(y, self.predict(X, groups), sample_weight=sample_weight))

    def _reading(self) -> dict[str, Any]:
        return {"dtype": np.float64, "y_numeric": True}

    def _learn(self, y: np.ndarray) -> np.ndarray:
        self.y_scale_ = self._scale("y", y)
        return self._encoded(y)

    def _encoded(self, y: np.ndarray) -> np.ndarray:
        return self.y_scale_(y).astype(np.float32)

    def _make(self, source: Source) -> Task:
        return Task.regressor(source)

    @property
    def _outputs(self) -> int:
        return 1

    @property
    def _target_scale(self) -> Scale:
        return self.y_scale_

    def _value(self, out: np.ndarray) -> np.ndarray:
        return out
