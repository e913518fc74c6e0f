"""When a run was begun, and from what code."""

from __future__ import annotations

import datetime
import subprocess
from importlib.metadata import version
from typing import Any

PATIENCE = 5  # seconds for git to answer


def provenance() -> dict[str, Any]:
    """The time, the version of coterie, and the commit that is checked out where this process runs, if there is one."""
    now = datetime.datetime.now().astimezone().isoformat(" ", "minutes")
    return {"time": now, "coterie": version("coterie"), "commit": commit()}


def commit() -> str | None:
    """The commit that is checked out in this folder or above it; None where there is none, or no git.

    Whether files differ from it is not asked: git would run filters that the folder's own settings name.
    """
    try:
        found = subprocess.run(
            ["git", "rev-parse", "--verify", "--quiet", "HEAD"], capture_output=True, text=True, timeout=PATIENCE
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None
