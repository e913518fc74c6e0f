"""The list of runs: a folder is read again only when one of its files has changed, and of its events only the new."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from coterie.callbacks import HIGHER
from coterie.runs.contents import EVENT
from coterie.runs.folder import EVENTS, read_config, read_result
from coterie.runs.view import FIXED
from coterie.serve.access import DEPTH, readable
from coterie.serve.stamps import Stamp, Stamps, obstacle
from coterie.storage.reading import opened, parse_json

# A run says nothing of its process: it counts as running as long as its files change often enough.
QUIET = 60.0  # seconds without a change
SLOW = 5  # times its slowest round, where that is longer
FIRST = 600.0  # seconds for the first round, of which nothing is known

PATIENCE = 0.25  # seconds that a list waits for runs that have not been read yet

RUNNING, STOPPED, FINISHED, DAMAGED, UNREAD = "running", "stopped", "finished", "damaged", "unread"
NOT_STATED = {"event", *FIXED}


class Row(NamedTuple):
    """A run in the list.

    Attributes:
        name: Its folder, below the served one.
        changed: When it was last written, in seconds since 1970.
        method: The name of its method.
        data: The name of its data.
        rounds: That it was asked for.
        done: Rounds.
        metric: The name of its score.
        best: The best score of a round.
        finished: Whether it has a result.
        damage: Why it cannot be read, None if it can.
        quiet: Seconds without a change after which it counts as stopped.
        unread: Whether nothing but its name is known yet.
    """

    name: str
    changed: float
    method: str = ""
    data: str = ""
    rounds: int = 0
    done: int = 0
    metric: str = ""
    best: float | None = None
    finished: bool = False
    damage: str | None = None
    quiet: float = QUIET
    unread: bool = False

    def status(self, now: float) -> str:
        """Running, stopped, finished or damaged; or not read yet.

        Args:
            now: The time, in seconds since 1970.
        """
        if self.unread:
            return UNREAD
        if self.damage is not None:
            return DAMAGED
        if self.finished:
            return FINISHED
        return RUNNING if now - self.changed < self.quiet else STOPPED

    @property
    def share(self) -> float:
        """How much of it is done, from 0 to 1."""
        return 1.0 if self.finished else min(1.0, self.done / self.rounds) if self.rounds else 0.0

    def has(self, words: list[str], now: float) -> bool:
        """Whether all of some lower-case words are in what the list says of it.

        Args:
            words: What is looked for.
            now: The time, for the status.
        """
        text = f"{self.name}\n{self.method}\n{self.data}\n{self.status(now)}".lower()
        return all(word in text for word in words)


class Index:
    """The runs below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._known: dict[str, _Known] = {}
        self._lock = threading.Lock()  # requests are answered in several threads

    def rows(self, patience: float = math.inf) -> list[Row]:
        """All runs, as they are now. The newest are read first.

        Args:
            patience: Seconds after which those that are not read yet are listed by their names, and others that have
                changed as they were.
        """
        with self._lock:
            runs = sorted(_runs(str(self.root), "", DEPTH), key=lambda run: run[2].changed, reverse=True)
            self._known = {name: self._known.get(name, _Known()) for name, _, _ in runs}  # without those deleted
            end = time.monotonic() + patience
            return [self._look(name, path, stamps, end) for name, path, stamps in runs]

    def row(self, name: str) -> Row:
        """One run, as it is now.

        Args:
            name: Of a run below the folder.
        """
        path = f"{self.root}/{name}"
        with self._lock:
            return self._look(name, path, Stamps.of(path), math.inf)

    def _look(self, name: str, path: str, stamps: Stamps, end: float) -> Row:
        known = self._known.setdefault(name, _Known())
        if known.row is None or known.stamps != stamps:
            if time.monotonic() > end:
                return known.row or Row(name, stamps.changed, unread=True)
            known.row, known.stamps = _read(name, Path(path), stamps, known), stamps
        return known.row


class _Known:
    """What was read of a run before."""

    def __init__(self) -> None:
        self.row: Row | None = None
        self.stamps: Stamps | None = None
        self.tally = _Tally()


class _Tally:
    """The rounds of an events.jsonl that grows: what was counted is not read again."""

    def __init__(self) -> None:
        self.inode, self.read = 0, 0  # the file, and how many of its bytes
        self.done, self.slowest = 0, 0.0
        self.metric: str | None = None
        self.best: float | None = None

    def follow(self, file: Path, stamp: Stamp) -> None:
        """Count the rounds that were added; a last line that is not whole yet comes with the next.

        Raises:
            ValueError: A line is none of a run's events.
        """
        if stamp.inode != self.inode or stamp.size < self.read:  # a run that was resumed writes its file anew
            self.__init__()
            self.inode = stamp.inode
        with opened(file) as f:
            f.seek(self.read)
            for line in f:
                if not line.endswith(b"\n"):
                    break
                self.read += len(line)
                self._take(parse_json(line.decode(), file, EVENT))

    def _take(self, event: dict[str, Any]) -> None:
        if event["event"] != "round":
            return
        self.done += 1
        self.slowest = max(self.slowest, _number(event.get("seconds")) or 0.0)
        if self.metric is None:
            self.metric = next((key for key in event if key not in NOT_STATED), None)
        score = None if self.metric is None else _number(event.get(self.metric))
        if score is not None:
            better = max if self.metric in HIGHER else min
            self.best = score if self.best is None else better(self.best, score)


def ordered(rows: list[Row], words: list[str], column: str, descending: bool, now: float) -> list[Row]:
    """The rows that have all words, in the order of a column; those without a value in it come last.

    Args:
        rows: All rows.
        words: In lower case.
        column: A key of `COLUMNS`.
        descending: Whether the largest comes first.
        now: The time, for the status.
    """
    key = COLUMNS[column]
    kept = [row for row in rows if row.has(words, now)] if words else rows
    values = [(key(row, now), row) for row in kept]
    known = sorted((v for v in values if v[0] is not None), key=lambda v: v[1].name)
    known.sort(key=lambda v: v[0], reverse=descending)
    return [row for _, row in known] + [row for value, row in values if value is None]


COLUMNS: dict[str, Callable[[Row, float], Any]] = {
    "name": lambda row, now: row.name,
    "status": lambda row, now: row.status(now),
    "progress": lambda row, now: None if row.damage or row.unread else row.share,
    "score": lambda row, now: row.best,
    "method": lambda row, now: row.method or None,
    "data": lambda row, now: row.data or None,
    "changed": lambda row, now: row.changed,
}


def _runs(folder: str, before: str, depth: int) -> Iterator[tuple[str, str, Stamps]]:
    """The run folders below a folder. Links are not followed, nor are run folders looked into."""
    try:
        with os.scandir(folder) as entries:
            inner = [e for e in entries if not e.name.startswith(".") and e.is_dir(follow_symlinks=False)]
    except OSError:  # may not be read, or is gone
        return
    for entry in inner:
        name, stamps = before + entry.name, Stamps.of(entry.path)
        if stamps.of_a_run:
            yield name, entry.path, stamps
        elif depth > 1:
            yield from _runs(entry.path, f"{name}/", depth - 1)


def _read(name: str, path: Path, stamps: Stamps, known: _Known) -> Row:
    """A run as its files say; what is wrong with them is shown, whatever it is, and the other runs with it."""
    try:
        if (why := obstacle(path)) is not None:
            raise ValueError(why)
        config = read_config(path)
        if stamps.events is not None:
            known.tally.follow(path / EVENTS, stamps.events)
        if stamps.result is not None:
            read_result(path)
        return _row(name, config, known.tally, stamps)
    except Exception as error:  # files of any content raise anything
        known.tally = _Tally()
        return Row(name, stamps.changed, damage=reason(error, path))


def _row(name: str, config: dict[str, Any], tally: _Tally, stamps: Stamps) -> Row:
    method, data, rounds = config["algorithm"]["name"], config["data"]["name"], config["run"]["rounds"]
    if not (isinstance(method, str) and isinstance(data, str) and isinstance(rounds, int)):
        raise ValueError("config.toml does not say method, data and rounds")
    quiet = FIRST if not tally.done else max(QUIET, SLOW * tally.slowest)
    done, metric = tally.done, readable(tally.metric or "", 40)
    ended = stamps.result is not None
    return Row(name, stamps.changed, method, data, rounds, done, metric, tally.best, ended, quiet=quiet)


def reason(error: Exception, path: Path) -> str:
    """Why a run cannot be shown, in one line that does not tell where the folder lies.

    Args:
        error: What went wrong.
        path: The run folder.
    """
    words = f"there is no {error}" if isinstance(error, KeyError) else str(error)
    return readable(words.replace(str(path), path.name) or type(error).__name__)


def _number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and math.isfinite(value) else None


def ago(then: float, now: float) -> str:
    """How long ago something was.

    Args:
        then: In seconds since 1970.
        now: The same.

    Example:
        >>> ago(0, 5), ago(0, 600), ago(0, 4e5)
        ('just now', '10 min ago', '4 days ago')
    """
    seconds = max(0.0, now - then)
    for most, unit, word in ((10, 1, ""), (60, 1, "s"), (3600, 60, "min"), (2 * 86400, 3600, "h")):
        if seconds < most:
            return f"{int(seconds / unit)} {word} ago" if word else "just now"
    return f"{int(seconds / 86400)} days ago"


def local_time(then: float) -> str:
    """A time as the clock of this machine showed it.

    Args:
        then: In seconds since 1970.
    """
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(min(max(then, 0.0), 4e9)))
