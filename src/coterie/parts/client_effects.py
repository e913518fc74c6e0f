"""What a client computes with a mixture of random effects that it is sent, whatever its targets are."""

from __future__ import annotations

from typing import NamedTuple

from coterie.core.task import Data, Task
from coterie.parts.families import family_of
from coterie.parts.laplace import laplace
from coterie.parts.random_effects import Frame, Mixture, Posterior, Rows, posterior
from coterie.parts.residuals import values_of


class Sent(NamedTuple):
    """What clients are sent."""

    mixture: Mixture
    frame: Frame


def known(task: Task, sent: Sent, data: Data) -> tuple[Rows, Posterior]:
    """A client's rows in the units of the run, and what it knows of itself under every component of every fit."""
    if task.jacobian is not None and (family := family_of(task)):
        return laplace(family, sent.mixture, sent.frame.features(task.jacobian(data.x).double()), data)
    rows = sent.frame.rows(values_of(task, data), data.mask.sum()).condensed()
    return rows, posterior(sent.mixture, rows)
