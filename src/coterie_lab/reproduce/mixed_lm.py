"""statsmodels' MixedLM on a federation: the mixed model that is not federated, in a process of its own."""

from __future__ import annotations

import importlib.util
import multiprocessing
import time
import warnings
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from coterie.core.federation import Federation, Packed


class Rows(NamedTuple):
    """Rows of all clients, with a column of ones for the intercept."""

    x: np.ndarray
    y: np.ndarray
    client: np.ndarray

    @classmethod
    def of(cls, part: Packed) -> Rows:
        """The rows of a part of a federation."""
        x = part.x.double().numpy()
        client = np.repeat(np.arange(len(part.sizes)), part.sizes.numpy())
        return cls(np.column_stack([np.ones(len(x)), x]), part.y.double().numpy(), client)


def mixed_lm(federation: Federation, limit: float) -> dict[str, Any]:
    """Fit random intercepts and slopes by REML, as MixedLM does by default, and score each client's own model.

    Args:
        federation: Its training rows are fitted, its test rows score.
        limit: Seconds after which the fit is given up.

    Returns:
        "error" (each client's mean squared error), "converged" and "seconds" (of CPU time); or "failed", the reason.
    """
    if importlib.util.find_spec("statsmodels") is None:
        return {"failed": "statsmodels is not installed"}
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_fit, args=(theirs, Rows.of(federation.train), Rows.of(federation.part("test"))))
    process.start()
    theirs.close()  # so that the end of the process is noticed
    try:
        return ours.recv() if ours.poll(limit) else {"failed": f"not done after {limit:.0f} s"}
    except EOFError:
        return {"failed": "its process ended"}
    finally:
        process.kill()
        process.join()


def _fit(answer: Connection, train: Rows, test: Rows) -> None:
    from statsmodels.regression.mixed_linear_model import MixedLM  # pyright: ignore[reportMissingImports]

    warnings.simplefilter("ignore")  # it warns of every optimiser that it tries
    begin = time.process_time()
    try:
        found = MixedLM(train.y, train.x, train.client, exog_re=train.x).fit()
    except (ValueError, np.linalg.LinAlgError) as error:
        answer.send({"failed": str(error)})
        return
    effects = found.random_effects
    theta = np.stack([found.fe_params + effects[i] for i in range(len(effects))])
    seconds = time.process_time() - begin
    squared = (test.y - (test.x * theta[test.client]).sum(1)) ** 2
    error = np.bincount(test.client, squared) / np.bincount(test.client)
    answer.send({"error": error.tolist(), "converged": bool(found.converged), "seconds": seconds})
