"""One HTML file that tells of one run or several: it can be mailed, opens from disk, and asks no network for anything.

`body` is the part of it that `coterie serve` shows of a run while it trains.
"""

from __future__ import annotations

from coterie.report.page import body, page, write

__all__ = ["body", "page", "write"]
