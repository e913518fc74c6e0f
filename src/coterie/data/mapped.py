"""Federations stored in folders, which may be larger than memory."""

from __future__ import annotations

from pathlib import Path

from coterie.core.federation import Federation
from coterie.data.source import dataset


@dataset
def mapped(path: str | Path) -> Federation:
    """A federation stored in a folder by `Federation.create`, mapped into memory.

    Args:
        path: The folder.
    """
    return Federation.open(path)
