"""Callbacks of `fit`: functions that are called after every round with its row of the history and the run so far.

    ct.fit(…, callbacks=[ct.callbacks.EarlyStopping("accuracy", patience=5), ct.callbacks.TensorBoard()])

A callback that returns True ends the run after this round. Any function of two arguments will do; one that is a
`coterie.runs.fit.Tracker` is also told how a run begins and ends.
"""

from __future__ import annotations

from coterie.callbacks.trackers import MLflow, TensorBoard, WandB
from coterie.callbacks.watching import HIGHER, Checkpoint, EarlyStopping

__all__ = ["HIGHER", "Checkpoint", "EarlyStopping", "MLflow", "TensorBoard", "WandB"]
