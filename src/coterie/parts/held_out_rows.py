"""Local training that leaves some rows of every client out, to see how a model serves rows it was not trained on."""

from __future__ import annotations

from dataclasses import dataclass

from coterie.core.settings import setting
from coterie.core.train import Rows, Train
from coterie.parts.local_training import LocalTraining


@dataclass(frozen=True, kw_only=True)
class HeldOutRows(LocalTraining):
    """Hyperparameters of local training with rows that are held out.

    Args:
        holdout: Share of every client's rows that is kept out of training, the same rows in every round. They judge
            splits. With 0, or where no client has enough rows to hold any out, no split is undone.
    """

    holdout: float = setting(0.1, low=0, high=0.9)

    def change(self) -> Train:
        """What a client does with the model that it is sent: train it, and send how it has changed."""
        rows = Rows(self.holdout) if self.holdout else None
        return Train(self.descend(), weights=self.weights, rows=rows, send="change")
