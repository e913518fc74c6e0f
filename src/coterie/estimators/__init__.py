"""Estimators by scikit-learn's rules, for one table of rows that belong to many clients."""

from coterie.estimators.classifier import ClusteredClassifier
from coterie.estimators.regressor import ClusteredRegressor

__all__ = ["ClusteredClassifier", "ClusteredRegressor"]
