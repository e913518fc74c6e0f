"""The figures of a report, each drawn from what a run folder says; None where the folder does not say it."""

from __future__ import annotations

from collections.abc import Sequence

from coterie.report.clients import certainty, clients, gains, groups, sizes
from coterie.report.details import coefficients, effects, nodes, similarity, tree
from coterie.report.figure import Figure
from coterie.report.rounds import churn, cost, loss, membership, scores
from coterie.runs.view import View


def of_run(view: View, beside: Sequence[View] = ()) -> list[Figure]:
    """All figures of one run that its folder has the values for.

    Args:
        view: The run.
        beside: Runs on the same clients that it is held against: one model for all, and one each.
    """
    first = (scores, loss, membership, churn, sizes, groups, tree, similarity, certainty)
    then = (cost, clients, coefficients, effects, nodes)
    found = [draw(view) for draw in first]
    found += [gains(view, other) for other in beside]
    found += [draw(view) for draw in then]
    return [figure for figure in found if figure is not None]
