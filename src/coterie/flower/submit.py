"""Have a local federation train what a configuration describes, and watch it do so."""

from __future__ import annotations

import json
import subprocess
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coterie.flower.lab import NAME, PATIENCE, Lab

POLL = 0.2  # seconds between two looks at the run folder
TOLD = 15  # lines of the server's log that are shown if a run fails


def submit(lab: Lab, config: Path, out: Path, *, resume: bool) -> int:
    """Send an app to the SuperLink and have it run; the number of the run.

    Args:
        lab: The federation.
        config: The configuration, in the folder of the app.
        out: The run folder.
        resume: Whether to go on from its newest checkpoint.

    Raises:
        ValueError: The federation is down, the folder is no app, or the SuperLink refused it.
    """
    check_app(config)
    if not lab.processes():
        raise ValueError(f"no federation is running in {lab.folder}; start one with: coterie flower up")
    values = {"config": config.name, "out": str(out.absolute()), "resume": resume, **_nodes(lab, config)}
    changes = " ".join(f"{name}={json.dumps(value)}" for name, value in values.items())
    answer = lab.flwr("run", str(config.parent.absolute()), NAME, "--run-config", changes)
    if not answer["success"]:
        raise ValueError(f"the SuperLink refused the app: {answer['error-message']}")
    return int(answer["run-id"])


def _nodes(lab: Lab, config: Path) -> dict[str, int]:
    """How many nodes there are, and how many must answer: as many as the app says, if there are so many."""
    nodes = len(lab.settings["nodes"])
    project = tomllib.loads((config.parent / "pyproject.toml").read_text(encoding="utf-8"))
    asked = project.get("tool", {}).get("flwr", {}).get("app", {}).get("config", {}).get("min-replies", 1)
    return {"nodes": nodes, "min-replies": min(asked, nodes)}


def check_app(config: Path) -> None:
    """Refuse a configuration that is in no app's folder."""
    if not config.is_file():
        raise ValueError(f"{config}: there is no such file")
    for name in ("pyproject.toml", "data.py"):
        if not (config.parent / name).is_file():
            raise ValueError(
                f"{config.parent} is no app: it has no {name}; `coterie flower init` makes one, into which this belongs"
            )


def watch(lab: Lab, run: int, out: Path, show: Callable[[dict[str, Any]], None]) -> None:
    """Hand every event of a run to `show`, until the run has ended.

    Args:
        lab: The federation.
        run: The number of the run.
        out: The run folder.
        show: Is given each event, as it is written.

    Raises:
        ValueError: It has failed; says what the server's log says last.
    """
    events, state = _Events(out / "events.jsonl"), "running"
    while not state.startswith("finished"):  # the log may end before the run does
        with _log(lab, run) as log:
            while log.poll() is None:
                for event in events.new():
                    show(event)
                time.sleep(POLL)
        state = _state(lab, run)
    for event in events.new():
        show(event)
    if state != "finished:completed":
        log = _log_file(lab, run)
        words = last_words(log.read_text(encoding="utf-8", errors="replace"))
        raise ValueError(
            f"run {run} is {state}: {words}\ngo on with --resume once its cause is gone; the server's log is {log}"
        )


def last_words(log: str) -> str:
    r"""The error at the end of a server's log; where there is none, its last lines.

    Example:
        >>> last_words("Traceback (most recent call last):\n  File ...\nValueError: no rows\nExit Code: 201")
        'ValueError: no rows'
    """
    lines = log.splitlines()
    at = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    after = [line for line in lines[at[-1] + 1 :] if line and not line.startswith(" ")] if at else []
    return after[0] if after else "\n".join(lines[-TOLD:])


class _Events:
    """A run's events as they come; those of an earlier part of the run are passed over."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = path.stat().st_size if path.exists() else 0

    def new(self) -> Iterator[dict[str, Any]]:
        if not self.path.exists():
            return
        # A resumed run takes back the rounds that its checkpoint has not.
        self._read = min(self._read, self.path.stat().st_size)
        with self.path.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):  # it is still being written
                    return
                self._read += len(line)
                yield json.loads(line)


@contextmanager
def _log(lab: Lab, run: int) -> Iterator[subprocess.Popen[bytes]]:
    """Flower's own command that writes a run's log until the run ends."""
    with _log_file(lab, run).open("ab") as file:
        process = subprocess.Popen(
            ["flwr", "log", str(run), NAME, "--stream"], env=lab.environment, stdin=subprocess.DEVNULL, stdout=file,
            stderr=file,
        )  # fmt: skip
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait()


def _log_file(lab: Lab, run: int) -> Path:
    return lab.folder / "logs" / f"run-{run}.log"


def _state(lab: Lab, run: int) -> str:
    """What the SuperLink says of a run, such as "running" or "finished:failed". It may be on its way back."""
    end = time.monotonic() + PATIENCE
    while True:
        answer = lab.flwr("list", NAME, "--run-id", str(run))
        if answer.get("runs"):
            return str(answer["runs"][0]["status"])
        if time.monotonic() > end:
            raise ValueError(f"the SuperLink does not know run {run}: {answer.get('error-message')}")
        time.sleep(1)
