"""coterie: find the hidden groups of a federation's clients and train one model per group."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers; when the program runs, names are found as `__getattr__` says
    from coterie import callbacks, data, models, plot, testing
    from coterie.analysis.table_fit import TableFit, fit_table
    from coterie.core.augment import CropFlip
    from coterie.core.federation import Federation
    from coterie.core.optimisers import SGD, Adam, AdamW, Yogi
    from coterie.core.registry import register
    from coterie.core.task import Task
    from coterie.core.uplink import Quantise
    from coterie.estimators import ClusteredClassifier, ClusteredRegressor
    from coterie.methods.cfl import CFL
    from coterie.methods.clustergan import ClusterGAN
    from coterie.methods.ditto import Ditto
    from coterie.methods.fedavg import FedAvg
    from coterie.methods.fedem import FedEM
    from coterie.methods.fedx import FedX
    from coterie.methods.ifca import IFCA
    from coterie.methods.kfed import KFED
    from coterie.methods.local_only import LocalOnly
    from coterie.methods.mixed_effects import MixedEffects
    from coterie.methods.mixed_regression import MixedRegression
    from coterie.methods.moment_descent import MomentDescent
    from coterie.methods.one_shot import OneShot
    from coterie.methods.personal import Personal
    from coterie.methods.uifca import UIFCA, Disturbed
    from coterie.parts.schedules import Cosine, StepDecay, Warmup
    from coterie.parts.starts import Balanced, FarthestFirst, Random, RandomGroups
    from coterie.parts.tournament import Tournament
    from coterie.privacy import Privacy
    from coterie.robust.rules import Buckets, Clipped, GeometricMedian, Krum, Median, Trimmed
    from coterie.runs.candidates import candidates
    from coterie.runs.choosing import choose_k, compare
    from coterie.runs.comparison import ChosenK, Comparison
    from coterie.runs.diagnosis import Diagnosis, diagnose
    from coterie.runs.fit import fit
    from coterie.runs.freezing import freeze
    from coterie.runs.load import load
    from coterie.runs.run import Diverged, Run
    from coterie.runs.scores import Scores
    from coterie.secure import SecureSum

from coterie.core import moved

__version__ = "0.2.0"

moved.install()

_HOMES = {
    "analysis.table_fit": ("TableFit", "fit_table"),
    "core.augment": ("CropFlip",),
    "core.federation": ("Federation",),
    "core.registry": ("register",),
    "core.task": ("Task",),
    "estimators": ("ClusteredClassifier", "ClusteredRegressor"),
    "runs.candidates": ("candidates",),
    "runs.choosing": ("choose_k", "compare"),
    "runs.comparison": ("ChosenK", "Comparison"),
    "runs.diagnosis": ("Diagnosis", "diagnose"),
    "runs.scores": ("Scores",),
    "runs.fit": ("fit",),
    "runs.freezing": ("freeze",),
    "runs.load": ("load",),
    "runs.run": ("Diverged", "Run"),
    "privacy": ("Privacy",),
    "secure": ("SecureSum",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}
_MODULES = ("callbacks", "data", "models", "plot", "testing")


def __getattr__(name: str) -> Any:
    """Load what is asked for, and not before: a node's thin ClientApp needs no torch, which loads for seconds.

    Whatever is registered as a method, a start, a robust mean or an uplink is found by the name of its class.
    """
    if name == "__all__":  # what `from coterie import *` takes: installed methods, too
        return __dir__()
    if name.startswith("_"):
        raise AttributeError(f"module 'coterie' has no attribute '{name}'")
    if name in _MODULES:
        return importlib.import_module(f"coterie.{name}")
    if name in _HOME:
        return getattr(importlib.import_module(f"coterie.{_HOME[name]}"), name)
    registered = _registered()
    if name not in registered:
        raise AttributeError(f"module 'coterie' has no attribute '{name}'")
    return registered[name]


def __dir__() -> list[str]:
    return sorted([*_HOME, *_MODULES, *_registered()])


def _registered() -> dict[str, type]:
    known = importlib.import_module("coterie.core.registry").known
    kinds = ("method", "start", "optimiser", "schedule", "uplink", "aggregate")
    return {cls.__name__: cls for kind in kinds for cls in known(kind).values()}
