"""The methods, one file each, beside their papers."""

from coterie.algorithms.base import Algorithm, Report
from coterie.algorithms.cfl import CFL
from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.ifca import IFCA
from coterie.algorithms.local_only import LocalOnly
from coterie.algorithms.starts import Balanced, FarthestFirst, Random, RandomGroups

ALGORITHMS: dict[str, type[Algorithm]] = {"cfl": CFL, "fedavg": FedAvg, "ifca": IFCA, "local_only": LocalOnly}

__all__ = [
    "ALGORITHMS",
    "CFL",
    "IFCA",
    "Algorithm",
    "Balanced",
    "FarthestFirst",
    "FedAvg",
    "LocalOnly",
    "Random",
    "RandomGroups",
    "Report",
]
