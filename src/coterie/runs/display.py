"""What a run shows of itself: as text, as HTML in a notebook, and as a picture."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np

from coterie.core.card import Card
from coterie.runs import plots

if TYPE_CHECKING:
    from coterie.runs.run import Run

CLUSTERS = 8  # that are listed
LONG = 40  # letters of a setting that are shown


def card(run: Run) -> Card:
    """The method, how well it does, its clusters and its folder."""
    metric, found, points = run.scores.metric, sizes(run), run.algorithm.needs.points
    scores = {} if points else run.scores.per_cluster  # which are of clients
    what = "point" if points else "client"
    rows = [
        (metric, f"{run.score:.4f}, mean over {len(run.labels):,} clients"),
        *([] if run.ari is None else [("ARI", f"{run.ari:.3f}")]),
        ("rounds", f"{len(run.history)} on {run._cohort.engine.device}"),
    ]
    for j, n in list(found.items())[:CLUSTERS]:
        own = f", {metric} {scores[j]:.4f}" if j in scores else ""  # nobody may be there to score
        rows.append((f"cluster {j}", f"{n:,} {what}{'' if n == 1 else 's'}{own}"))
    if len(found) > CLUSTERS:
        rows.append(("…", f"{len(found) - CLUSTERS:,} more clusters"))
    rows.extend(("warning", warning) for warning in run.warnings)
    if run.path is not None:
        rows.append(("folder", str(run.path)))
    return Card(f"Run of {spelled(run.algorithm)}", rows)


def sizes(run: Run) -> dict[int, int]:
    """The members of every cluster that has any: clients, or points of methods that group those."""
    hidden = bool((run.labels < 0).all())  # a secure sum reveals only how many there are
    if run.algorithm.needs.points or hidden:
        members = run.algorithm.members(run.state).cpu().numpy()
    else:
        members = np.bincount(run.labels[run.labels >= 0])
    return {int(j): int(members[j]) for j in np.flatnonzero(members)}


def spelled(settings: Any) -> str:
    """A method, or another dataclass of settings, as it would be written: with those that are not the defaults.

    Example:
        >>> import coterie as ct
        >>> spelled(ct.IFCA(k=4, lr=0.1, tau=5, init=ct.FarthestFirst(steps=3)))
        'IFCA(tau=5, k=4, init=FarthestFirst(steps=3))'
    """
    values = ((f.name, getattr(settings, f.name), f.default) for f in dataclasses.fields(settings))
    given = [f"{name}={_value(value)}" for name, value, default in values if repr(value) != repr(default)]
    return f"{type(settings).__name__}({', '.join(given)})"


def plot(run: Run, ax: Any = None) -> Any:
    """Draw a run's score over its rounds.

    Args:
        run: The run.
        ax: The axes to draw on; None makes a figure of pyplot's, which notebooks show by themselves.
    """
    if ax is None:
        from matplotlib import pyplot

        ax = pyplot.subplots(figsize=(6.5, 4), layout="constrained")[1]
    metric = run.scores.metric
    plots.score(ax, run.history, metric, sizes(run))
    ax.set_title(textwrap.fill(f"{spelled(run.algorithm)}: {metric} {run.score:.3f}", 64), fontsize=11)
    return ax


def _value(value: Any) -> str:
    if dataclasses.is_dataclass(value):
        return spelled(value)
    return text if len(text := repr(value)) <= LONG else "…"  # models to start from, for example
