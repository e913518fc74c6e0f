"""A classifier for each cluster of clients."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.special import softmax
from sklearn.base import ClassifierMixin
from sklearn.metrics import accuracy_score
from sklearn.utils.multiclass import check_classification_targets

from coterie.core.task import Source, Task
from coterie.estimators.base import Clustered
from coterie.storage.scales import Scale


class ClusteredClassifier(ClassifierMixin, Clustered):
    """Classification where rows belong to clients, clients to hidden clusters, and each cluster has a model.

    Rows of a client that was there at `fit` are predicted by its own model, if the method makes one, else by that of
    its cluster. For any other client, the clusters' probabilities are mixed, each by its share of all clients.

    Args:
        method: "auto" takes what `ct.compare` recommends; or the name of a method, such as "ifca", "cfl", "fedavg" or
            "mixed_effects"; or a method, such as `ct.IFCA(k=3)`. With more than 50,000 rows candidates are compared on
            a sample of the clients (`coterie.runs.sampling.sampled`), and the chosen method is trained on all. With a
            single client, "auto" is a plain model.
        k: The number of clusters. "auto" finds it on held-out rows, or leaves a method as it is given.
        model: "linear" (logistic regression), "mlp" (64 hidden units), or a `torch.nn.Module` or function that builds
            one, with one output for each class.
        lr: The step size; None takes the method's own.
        rounds: How many rounds to train at most.
        standardise: Whether columns of X are given mean 0 and standard deviation 1 before training.
        device: "auto" (a GPU if there is one), "cpu" or "cuda".
        random_state: All draws follow from it.

    Attributes:
        classes_: The classes, sorted.
        clients_: The clients, sorted.
        labels_: The cluster of each.
        n_clusters_: How many clusters there are.
        models_: One model for each cluster. Of a linear one a dict of `coef` and `intercept`, a row for each class, in
            the units of the data; else modules, which take rows `x_scale_(X)`.
        method_: The method that was trained.
        run_: The run, with its history, scores and warnings. A pickle has none.
        comparison_: How the method or its k was chosen; only where candidates were compared.
        x_scale_: The units of rows in training.
        n_features_in_: How many features a row has.
        feature_names_in_: Their names, where X is a table.

    Example:
        >>> import numpy as np, coterie as ct
        >>> rng = np.random.default_rng(0)
        >>> X, user = rng.normal(size=(400, 1)), np.repeat(np.arange(20), 20)
        >>> y = np.where((X[:, 0] > 0) == (user % 2 == 0), "yes", "no")
        >>> model = ct.ClusteredClassifier(method="ifca", k=2, random_state=0).fit(X, y, groups=user)
        >>> model.predict([[1.0], [1.0]], groups=[0, 1])
        array(['yes', 'no'], dtype='<U3')
    """

    classes_: np.ndarray

    def predict(self, X: Any, groups: Any = None) -> np.ndarray:
        """The likeliest class of each row.

        Args:
            X: Rows (n, features).
            groups: Whose each row is (n,); None where nobody knows.
        """
        likeliest = self.predict_proba(X, groups).argmax(1)
        return self.classes_[likeliest]

    def predict_proba(self, X: Any, groups: Any = None) -> np.ndarray:
        """The probability of every class (n, classes), in the order of `classes_`.

        Args:
            X: Rows (n, features).
            groups: Whose each row is (n,); None where nobody knows.
        """
        return self._values(X, groups)

    def score(self, X: Any, y: Any, groups: Any = None, sample_weight: Any = None) -> float:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The share of rows whose class is predicted.

        Args:
            X: Rows (n, features).
            y: Their classes (n,).
            groups: Whose each row is (n,); None where nobody knows.
            sample_weight: How much each row counts (n,).
        """
        return float(accuracy_score(y, self.predict(X, groups), sample_weight=sample_weight))

    def _reading(self) -> dict[str, Any]:
        return {"dtype": np.float64}

    def _learn(self, y: np.ndarray) -> np.ndarray:
        check_classification_targets(y)
        self.classes_, numbers = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                f"{self._name}: y must have two classes at least, got one class, {self.classes_.tolist()[0]!r}"
            )
        return numbers

    def _encoded(self, y: np.ndarray) -> np.ndarray:
        if len(new := np.setdiff1d(y, self.classes_)):
            raise ValueError(f"{self._name}: y has the class {new.tolist()[0]!r}, which was not there at fit")
        return np.searchsorted(self.classes_, y)

    def _make(self, source: Source) -> Task:
        return Task.classifier(source)

    @property
    def _outputs(self) -> int:
        return len(self.classes_)

    @property
    def _target_scale(self) -> Scale:
        return Scale.none()

    def _value(self, out: np.ndarray) -> np.ndarray:
        return softmax(out, axis=1)
