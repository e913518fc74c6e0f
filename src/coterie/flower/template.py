"""A small app that works, to begin with: a copy of the example."""

from __future__ import annotations

from pathlib import Path

from coterie.storage.snapshot import write_text

# Of examples/flower. What .gitignore names is not sent to nodes: a federation's keys and tokens, and runs.
APP = ("pyproject.toml", "data.py", "ifca.toml", ".gitignore")


def write_app(folder: Path) -> None:
    """Write the app to a folder; nothing that is there is overwritten."""
    for name in APP:
        if (folder / name).exists():
            raise ValueError(f"{folder / name} is there already; choose another folder")
    package = Path(__file__).resolve().parent.parent
    checkout = package.parent.parent / "examples" / "flower"
    source = checkout if checkout.is_dir() else package / "_flower_app"
    for name in APP:
        write_text(folder / name, (source / name).read_text(encoding="utf-8"))
