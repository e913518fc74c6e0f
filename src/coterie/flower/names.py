"""The names of all client steps: the ClientApp must know them before torch, and with it the algorithms, is loaded."""

from __future__ import annotations

STEPS = (
    "apply", "back", "begin", "choose", "cluster", "commonest", "curvature", "descend", "follow", "forth",
    "judge", "learn", "loss", "points", "pool", "probe", "reassign", "score", "score_ensemble", "second_moment",
    "soft_step", "step", "tally", "total", "train",
)  # fmt: skip
