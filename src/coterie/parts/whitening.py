"""Whitening: a linear map after which the features of a regression have the identity as their second moment."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coterie.core.cohort import Cohort
from coterie.core.pytree import Outer, exact
from coterie.core.step import ClientStep, Local, Reply, client_step
from coterie.core.task import Task
from coterie.parts.residuals import features

COLLINEAR = 1e-5  # the smallest eigenvalue that the correlations of the features must have


class Whitening:
    """For methods of models that are linear in their parameters."""

    @client_step
    def second_moment(self, task: Task) -> ClientStep:
        """The sum of φφᵀ over a client's rows."""

        def run(_: Any, local: Local) -> Reply:
            phi = features(task, local.data) * local.data.mask[:, None]
            return Reply(Outer(phi, phi), note={"rows": local.data.mask.sum()})

        return ClientStep(run)

    def whitening(self, cohort: Cohort) -> Tensor:
        """W, the inverse root of the correlations of the cohort's features, over their scales (d, d)."""
        sums = cohort.combine(self.second_moment, ())
        rows = int(sums.note["rows"].sum())
        moment = exact(sums.update[0]) / rows
        scale = moment.diagonal().sqrt()
        values, vectors = torch.linalg.eigh(moment / (scale[:, None] * scale).clamp(min=1e-300))
        if float(values[0]) <= COLLINEAR:
            raise ValueError(f"MomentDescent: {_degenerate(vectors[:, 0], rows, len(cohort))}")
        return (vectors / values.sqrt()) @ vectors.T / scale


def _degenerate(direction: Tensor, rows: int, clients: int) -> str:
    """What is wrong with features that do not span all d dimensions; `direction` is one that they miss."""
    if rows < len(direction):
        return f"{clients} clients have {rows} rows together, fewer than the model's {len(direction)} parameters"
    involved = (direction.abs() > 0.01).nonzero().flatten().tolist()
    where = f"over {rows} rows of {clients} clients (features are counted from 0; the model's bias is the last)"
    if len(involved) == 1:
        return f"feature {involved[0]} is zero {where}"
    names = ", ".join(map(str, involved[:8])) + (", …" if len(involved) > 8 else "")
    return (
        f"features {names} are collinear {where}: one of them is constant, follows from the others, or has a mean far "
        "above its spread"
    )
