"""Federations in folders, which may be larger than memory."""

from __future__ import annotations

from coterie.core.federation import Federation
from coterie.data.source import dataset


@dataset
def mapped(path: str) -> Federation:
    """The folder `path`, which `Federation.create` wrote."""
    return Federation.open(path)
