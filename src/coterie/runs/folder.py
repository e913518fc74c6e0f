"""The run folder: all that is ever known of a run. The command line, plots and dashboard read only this.

config.toml                         algorithm, task, data, seed, rounds
events.jsonl                        one line per round and per start, and what the executor had to say
fingerprint.json                    hashes of the rows and of the model's shapes, which a resumed run must have too
roster.json                         who the clients are, where they are elsewhere and may come and go
checkpoints/round-000012.safetensors  the whole state after 12 rounds; the last two are kept
final/cluster-0.safetensors         the state dict of cluster 0, for load_state_dict; one file per cluster
final/result.json                   labels and scores
trackers.json                       what experiment trackers have logged, where a run has any
"""

from __future__ import annotations

import json
import shutil
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from coterie.core.method import Method
from coterie.core.pytree import Params
from coterie.core.task import Task
from coterie.runs import contents
from coterie.runs.fingerprint import difference
from coterie.runs.provenance import provenance
from coterie.storage import reading, snapshot
from coterie.storage.lock import Held, alone
from coterie.storage.reading import Damaged

CONFIG, EVENTS, RESULT = "config.toml", "events.jsonl", "final/result.json"
ROSTER, FINGERPRINT = "roster.json", "fingerprint.json"
KEPT = 2  # checkpoints: the one before is there should the last be damaged
PACE = 10  # a checkpoint is written once it is this many times cheaper than the work since the last


class Record:
    """Writes a run folder."""

    def __init__(
        self, path: str | Path, config: dict[str, Any], fingerprint: dict[str, str], *, resume: bool = False
    ) -> None:
        self.path = Path(path)
        self.config, self.fingerprint = config, fingerprint
        self._cost = 0.0
        self._last = time.monotonic()
        if is_run(self.path):
            if not resume:
                raise ValueError(f"{self.path} already holds a run; resume it, overwrite it, or choose another folder")
            _check_same(read_config(self.path), config, self.path)
            if other := difference(read_fingerprint(self.path), fingerprint):
                raise ValueError(f"{self.path} was made with {other}; a run can only be resumed as it was begun")
        elif _foreign(self.path):
            raise ValueError(f"{self.path} exists and is not a run folder; choose another")

    def begin(self) -> None:
        """Write the configuration, before anything else: from now on the folder holds a run."""
        snapshot.write_text(self.path / CONFIG, to_toml(self.config))
        snapshot.write_text(self.path / FINGERPRINT, json.dumps(self.fingerprint, indent=1) + "\n")
        if reading.is_there(self.path / EVENTS):  # a line that was cut off would run into the next one
            self._write_events(read_events(self.path))
        self.event("start", **provenance())

    def roster(self, content: Any) -> None:
        """Write who the clients are, in their order."""
        snapshot.write_text(self.path / ROSTER, json.dumps(content) + "\n")

    def event(self, kind: str, **values: Any) -> None:
        """Append one line to events.jsonl."""
        snapshot.append_text(self.path / EVENTS, json.dumps({"event": kind, **values}) + "\n")

    def checkpoint(self, done: int, content: Any, *, force: bool = False) -> None:
        """Save the state after `done` rounds, unless the last save is so recent that saving would cost too much."""
        if not force and time.monotonic() - self._last < PACE * self._cost:
            return
        begin = time.monotonic()
        folder = self.path / "checkpoints"
        snapshot.save(folder / f"round-{done:06d}.safetensors", content)
        for old in sorted(folder.glob("round-*.safetensors"))[:-KEPT]:
            old.unlink()
        self._last = time.monotonic()
        self._cost = self._last - begin

    def restore(self, method: Method, task: Task) -> tuple[Any | None, list[str]]:
        """The newest checkpoint that can be read, and a warning for each that is damaged and set aside."""
        content, damaged = read_checkpoint(self.path, method, task)
        for file in damaged:
            file.replace(file.with_suffix(".damaged"))
        ending = "falling back to the checkpoint before it" if content is not None else "starting again"
        return content, [f"{file.name} is damaged and set aside; {ending}" for file in damaged]

    def rewind(self, done: int) -> list[dict[str, Any]]:
        """Drop what came after round `done`, which will be made again, and return the rounds before."""
        events = [e for e in read_events(self.path) if e["event"] != "end" and e.get("round", 0) <= done]
        self._write_events(events)
        shutil.rmtree(self.path / "final", ignore_errors=True)
        return read_history(self.path)

    def _write_events(self, events: list[dict[str, Any]]) -> None:
        snapshot.write_text(self.path / EVENTS, "".join(json.dumps(e) + "\n" for e in events))

    def finish(self, models: list[Params], result: dict[str, Any]) -> None:
        """Write the results."""
        write_models(self.path / "final", models)
        snapshot.write_text(self.path / RESULT, json.dumps(result, indent=1) + "\n")


@contextmanager
def alone_in(path: Path, *, overwrite: bool = False) -> Iterator[None]:
    """Be the only one that writes to a run folder, however this process ends.

    Args:
        path: The run folder, which need not be there.
        overwrite: Whether the run that is there is moved away; it is restored if the new one fails before it writes
            its folder.

    Raises:
        ValueError: Another process writes to the folder, or it holds something else than a run.
    """
    there = path.parent.exists()
    try:
        with ExitStack() as stack:
            with snapshot.writing(path):
                _hold(path.resolve(), stack)
            with _set_aside(path) if overwrite else nullcontext():
                yield
    finally:
        if not there:  # it was made for the lock; where there is a run in it now, it stays
            with suppress(OSError):
                path.parent.rmdir()


def _hold(path: Path, stack: ExitStack) -> None:
    """Hold the lock of a run folder, a file beside it: the folder itself may be moved away."""
    try:
        stack.enter_context(alone(path.with_name(f".{path.name}.writing"), 0))
    except Held:
        raise ValueError(f"{path}: another run is writing to this folder; wait for it, or choose another") from None


@contextmanager
def _set_aside(path: Path) -> Iterator[None]:
    """Move an old run away. Killed at any moment, it leaves what the next one goes on from."""
    aside = path.with_name(f".{path.name}.old")
    if is_run(path):
        shutil.rmtree(aside, ignore_errors=True)  # left by one that was killed when its own folder was written
        path.rename(aside)
    elif _foreign(path):
        raise ValueError(f"{path} is not a run folder, so overwrite leaves it alone")
    try:
        yield
    finally:
        if is_run(aside) and not is_run(path):
            shutil.rmtree(path, ignore_errors=True)
            aside.rename(path)
        shutil.rmtree(aside, ignore_errors=True)


class Onlooker(Record):
    """The run folder in a process that helps with a run: it reads what the leading process writes."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def begin(self) -> None:
        """Nothing: it is written already, or will be."""

    def roster(self, content: Any) -> None:
        """Nothing."""

    def event(self, kind: str, **values: Any) -> None:
        """Nothing."""

    def checkpoint(self, done: int, content: Any, *, force: bool = False) -> None:
        """Nothing."""

    def restore(self, method: Method, task: Task) -> tuple[Any | None, list[str]]:
        """The newest checkpoint that can be read."""
        return read_checkpoint(self.path, method, task)[0], []

    def rewind(self, done: int) -> list[dict[str, Any]]:
        """The rounds up to `done`."""
        return [row for row in read_history(self.path) if row["round"] <= done]

    def finish(self, models: list[Params], result: dict[str, Any]) -> None:
        """Nothing."""


def write_models(folder: Path, models: list[Params], which: Sequence[int] | None = None) -> None:
    """Write a state dict per cluster, of all or only some of them, and remove those of clusters that are no more."""
    for j in range(len(models)) if which is None else which:
        tensors = {n: x.contiguous() for n, x in models[j].items()}
        snapshot.write_tensors(folder / f"cluster-{j}.safetensors", tensors)
    for file in folder.glob("cluster-*.safetensors"):
        if int(file.stem.partition("-")[2]) >= len(models):
            file.unlink()


def read_models(path: Path) -> list[Params]:
    """The state dicts of a run's clusters; none if it is not finished."""
    numbered = {f.stem.partition("-")[2]: f for f in (path / "final").glob("cluster-*.safetensors")}
    files = sorted((int(j), file) for j, file in numbered.items() if j.isdecimal())
    return [reading.read_tensors(file)[0] for _, file in files]


def is_run(path: Path) -> bool:
    """Whether a folder holds a run, finished or not."""
    return reading.is_there(path / CONFIG)


def read_config(path: Path) -> dict[str, Any]:
    """config.toml as a dict."""
    if not is_run(path):
        raise ValueError(f"{path} is not a run folder: it has no config.toml")
    return reading.read_toml(path / CONFIG, contents.CONFIG)


def read_fingerprint(path: Path) -> dict[str, str]:
    """fingerprint.json as a dict; empty where there is none."""
    file = path / FINGERPRINT
    return reading.read_json(file, {str: str}) if reading.is_there(file) else {}


def read_roster(path: Path) -> Any | None:
    """roster.json as it was written; None where there is none."""
    return reading.read_json(file) if reading.is_there(file := path / ROSTER) else None


def read_events(path: Path) -> list[dict[str, Any]]:
    """events.jsonl as a list of dicts; a last line that was cut off by a kill is left out."""
    file = path / EVENTS
    lines = reading.read_text(file).split("\n")[:-1] if reading.is_there(file) else []
    return [reading.parse_json(line, file, contents.EVENT) for line in lines]


def read_history(path: Path) -> list[dict[str, Any]]:
    """The rounds of a run, one dict each."""
    return rounds_of(read_events(path), path)


def rounds_of(events: list[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """The rounds among the events of the run in a folder.

    Raises:
        Damaged: They are none that a run can have.
    """
    history = [{k: v for k, v in event.items() if k != "event"} for event in events if event["event"] == "round"]
    if wrong := contents.wrong_history(history):
        raise Damaged(f"{path / EVENTS} is damaged ({wrong})")
    return history


def read_result(path: Path) -> dict[str, Any]:
    """result.json as a dict."""
    if not finished(path):
        read_config(path)  # says so if this is no run folder at all
        raise ValueError(f"{path} is not finished: {len(read_history(path))} rounds so far; resume it first")
    result = reading.read_json(path / RESULT, contents.RESULT)
    if wrong := contents.wrong_result(result):
        raise Damaged(f"{path / RESULT} is damaged ({wrong})")
    return result


def finished(path: Path) -> bool:
    """Whether a run has come to its end."""
    return reading.is_there(path / RESULT)


def read_checkpoint(path: Path, method: Method, task: Task) -> tuple[Any | None, list[Path]]:
    """The newest checkpoint that can be read, and the newer ones that cannot."""
    damaged: list[Path] = []
    for file in sorted((path / "checkpoints").glob("round-*.safetensors"), reverse=True):
        try:
            content = snapshot.load(file, snapshot.named_tuples(method))
            contents.check_checkpoint(content, method, task, file)
            return content, damaged
        except Damaged:
            damaged.append(file)
    return None, damaged


def to_toml(config: dict[str, Any]) -> str:
    """A dict of tables of plain values as TOML.

    Example:
        >>> print(to_toml({"run": {"rounds": 3, "seed": 0}, "algorithm": {"name": "ifca", "shared": []}}), end="")
        [run]
        rounds = 3
        seed = 0
        <BLANKLINE>
        [algorithm]
        name = "ifca"
        shared = []
    """

    def value(v: Any) -> str:
        if isinstance(v, dict):
            return "{ " + ", ".join(f"{k} = {value(x)}" for k, x in v.items()) + " }"
        if isinstance(v, list | tuple):
            return "[" + ", ".join(value(x) for x in v) + "]"
        return json.dumps(v)  # JSON's numbers, booleans and strings are TOML's

    tables = [f"[{name}]\n" + "".join(f"{k} = {value(v)}\n" for k, v in t.items()) for name, t in config.items()]
    return "\n".join(tables)


def _foreign(path: Path) -> bool:
    """Whether something is there that is no run, and more than what a kill in the very first write leaves behind."""
    if not path.is_dir():
        return reading.is_there(path)
    return any(not p.name.endswith(".part") for p in path.iterdir())


def _check_same(old: dict[str, Any], new: dict[str, Any], path: Path) -> None:
    """A run may be resumed for more rounds; anything else must be as it was."""
    for table in old.keys() | new.keys():
        a, b = old.get(table, {}), tomllib.loads(to_toml({"t": new.get(table, {})}))["t"]
        for name in sorted(a.keys() | b.keys()):
            if (table, name) != ("run", "rounds") and a.get(name) != b.get(name):
                raise ValueError(
                    f"{path} was made with {table}.{name} = {a.get(name)!r}, now it is {b.get(name)!r}; "
                    "a run can only be resumed as it was begun"
                )
