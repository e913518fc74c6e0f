"""Experiments of the papers: each is a TOML file and is run by name; results include the paper's numbers."""

from __future__ import annotations

import importlib
import importlib.util
import json
import platform
import tomllib
from pathlib import Path
from typing import Any

from coterie.storage.names import nearest_name
from coterie.storage.snapshot import write_text
from coterie_lab.reproduce.notebook import Notebook


def folder() -> Path:
    """Return the folder of the experiments' TOML files: in the checkout, or installed with the package."""
    package = Path(__file__).resolve().parent.parent
    checkout = package.parent.parent / "experiments"
    return checkout if checkout.is_dir() else package / "_experiments"


def experiments() -> dict[str, dict[str, Any]]:
    """Return the table of every experiment, by name."""
    return {p.stem: tomllib.loads(p.read_text(encoding="utf-8")) for p in sorted(folder().glob("*.toml"))}


def reproduce(name: str, *, quick: bool = False, out: Path | None = None, device: str = "auto") -> dict[str, Any]:
    """Run an experiment, and write NAME.json and NAME.png; an interrupted experiment is continued.

    Args:
        name: Name of the experiment.
        quick: Whether to run a small version, with the values of the TOML's [quick] table.
        out: Folder for the result; by default `experiments/results`, or `runs/quick` for a quick run.
        device: "auto", "cpu" or "cuda".
    """
    known = experiments()
    if name not in known:
        raise ValueError(f"there is no experiment '{name}'{nearest_name(name, known)}")
    spec = {**known[name], **(known[name].get("quick", {}) if quick else {})}
    where = out or (Path("runs/quick") if quick else folder() / "results")
    notebook = Notebook(where / f"{name}.part.json", spec, _device(device))
    content = _kind(spec).run(spec, device, notebook)
    result = {
        "name": name + (" (quick)" if quick else ""),
        "title": spec["title"],
        "commit": notebook.commits,
        "device": notebook.devices,
        "seconds": notebook.seconds,
        **content,
        "path": str(where / f"{name}.json"),
    }
    write_text(where / f"{name}.json", json.dumps({k: v for k, v in result.items() if k != "path"}, indent=1) + "\n")
    notebook.close()
    draw(name, where)
    return result


def draw(name: str, where: Path) -> None:
    """Draw NAME.png from NAME.json, if matplotlib is installed.

    Args:
        name: Name of the experiment.
        where: Folder of both files.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return
    result = json.loads((where / f"{name}.json").read_text(encoding="utf-8"))
    _kind(experiments()[name]).draw(result, where / f"{name}.png")


def _kind(spec: dict[str, Any]) -> Any:
    """The module that runs and draws an experiment of this kind; only that one is loaded."""
    return importlib.import_module(f"{__name__}.{spec['kind']}")


def _device(name: str) -> str:
    import torch

    from coterie.engines import find_device

    device = find_device(name)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})"
