"""The methods, one file each, beside their papers."""

from coterie.algorithms.base import Algorithm, Report
from coterie.algorithms.cfl import CFL
from coterie.algorithms.clustergan import ClusterGAN
from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.fedx import FedX
from coterie.algorithms.ifca import IFCA
from coterie.algorithms.kfed import KFED
from coterie.algorithms.local_only import LocalOnly
from coterie.algorithms.mixed_regression import MixedRegression
from coterie.algorithms.moment_descent import MomentDescent
from coterie.algorithms.starts import STARTS, Balanced, FarthestFirst, Random, RandomGroups
from coterie.algorithms.uifca import UIFCA, Disturbed

ALGORITHMS: dict[str, type[Algorithm]] = {
    "cfl": CFL,
    "clustergan": ClusterGAN,
    "fedavg": FedAvg,
    "fedx": FedX,
    "ifca": IFCA,
    "kfed": KFED,
    "local_only": LocalOnly,
    "mixed_regression": MixedRegression,
    "uifca": UIFCA,
}

STARTS["moment_descent"] = MomentDescent  # a start that is a method of its own

__all__ = [
    "ALGORITHMS",
    "CFL",
    "IFCA",
    "KFED",
    "UIFCA",
    "Algorithm",
    "Balanced",
    "ClusterGAN",
    "Disturbed",
    "FarthestFirst",
    "FedAvg",
    "FedX",
    "LocalOnly",
    "MixedRegression",
    "MomentDescent",
    "Random",
    "RandomGroups",
    "Report",
]
