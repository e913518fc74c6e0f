"""coterie: find the hidden groups of a federation's clients and train one model per group."""

from coterie import data, models
from coterie.algorithms import (
    CFL,
    IFCA,
    KFED,
    UIFCA,
    Balanced,
    ClusterGAN,
    Disturbed,
    FarthestFirst,
    FedAvg,
    FedX,
    LocalOnly,
    MixedRegression,
    MomentDescent,
    Random,
    RandomGroups,
)
from coterie.diagnose import Diagnosis, diagnose
from coterie.evaluate import Scores
from coterie.federation import Federation
from coterie.run import Diverged, Run, fit
from coterie.secure import SecureSum
from coterie.task import Task

__version__ = "0.1.0"

__all__ = [
    "CFL", "IFCA", "KFED", "UIFCA", "Balanced", "ClusterGAN", "Diagnosis", "Disturbed", "Diverged", "FarthestFirst",
    "FedAvg", "FedX", "Federation", "LocalOnly", "MixedRegression", "MomentDescent", "Random", "RandomGroups", "Run",
    "Scores", "SecureSum", "Task", "data", "diagnose", "fit", "models",
]  # fmt: skip
