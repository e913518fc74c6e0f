"""One line that tells how a run is going."""

from __future__ import annotations

import sys
from typing import Any, TextIO


class Progress:
    """A callback of `fit` that rewrites one line of a terminal after every round; elsewhere each has a line."""

    def __init__(self, name: str, rounds: int, metric: str, device: str, stream: TextIO | None = None) -> None:
        self.name, self.rounds, self.metric, self.device = name, rounds, metric, device
        self.stream = stream or sys.stderr
        self._score = self._loss = ""

    def __call__(self, row: dict[str, Any]) -> None:
        """Show this row of the history."""
        if row.get(self.metric) is not None:
            self._score = f" {self.metric} {row[self.metric]:.3f}"
        if row["loss"] is not None:
            self._loss = f" loss {row['loss']:.4f}"
        if self.stream.isatty():
            begin, end = "\r\033[K", "\n" if row["round"] == self.rounds else ""
        else:
            begin, end = "", "\n"
        bar = "━" * round(20 * row["round"] / self.rounds)
        self.stream.write(
            f"{begin}{self.name} {bar:<20} round {row['round']}/{self.rounds}{self._loss}{self._score} "
            f"groups {row['groups']} {row['seconds']:.3f} s/round on {self.device}{end}"
        )
        self.stream.flush()
