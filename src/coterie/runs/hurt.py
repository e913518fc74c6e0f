"""Who is hurt: clients that one way of sharing serves worse than another."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

DECILE = 0.1
LESS_IS_BETTER = ("mse", "deviance", "nats", "loss", "squared distance")


class Hurt(NamedTuple):
    """Clients that are served worse than in another way.

    With few test rows a client may be worse off by chance: of two equally good ways each hurts half of the clients, so
    look at `mean` and `worst` beside the share.

    Attributes:
        share: Of the clients that have both scores.
        mean: By how much they are worse off, on average over them; 0 where there is none.
        worst: By how much at most.
    """

    share: float
    mean: float
    worst: float

    @classmethod
    def of(cls, error: np.ndarray, than: np.ndarray) -> Hurt:
        """Compare errors (m,) with those in another way; a client that lacks one of them (NaN) does not count.

        Example:
            >>> Hurt.of(np.array([1.0, 2.0, 4.0, np.nan]), than=np.array([1.0, 3.0, 1.0, 0.0]))
            Hurt(share=0.3333333333333333, mean=3.0, worst=3.0)
        """
        more = error - than
        more = more[~np.isnan(more)]
        worse = more[more > 0]
        if not len(worse):
            return cls(0.0 if len(more) else float("nan"), 0.0, 0.0)
        return cls(len(worse) / len(more), float(worse.mean()), float(worse.max()))


def errors(metric: str, score: np.ndarray, loss: np.ndarray) -> np.ndarray:
    """Scores so that less is better: 1 - accuracy, an MSE as it is; the loss where the score is one of the user's own.

    Args:
        metric: The name of the score.
        score: Each client's score (m,).
        loss: Each client's mean loss (m,).

    Example:
        >>> errors("accuracy", np.array([0.75]), np.array([1.5])), errors("profit", np.array([0.75]), np.array([1.5]))
        (array([0.25]), array([1.5]))
    """
    if metric == "accuracy":
        return 1 - score
    return score if metric in LESS_IS_BETTER else loss


def worst_tenth(score: np.ndarray, error: np.ndarray) -> float:
    """The mean score of the tenth of the clients, at least one, that have the largest errors; NaN if none has any.

    Example:
        >>> worst_tenth(np.arange(20.0), error=-np.arange(20.0))
        0.5
    """
    known = np.flatnonzero(~np.isnan(error))
    if not len(known):
        return float("nan")
    count = max(1, round(DECILE * len(known)))
    return float(score[known[np.argsort(-error[known])[:count]]].mean())
