"""What clients keep for themselves, on their node's disk: never in a message, and not in Flower's context."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from coterie.storage import snapshot

FORGOTTEN = 90 * 86400  # seconds: a run with which nobody has gone on is forgotten when it is found so twice
IDLE = ".idle"  # a file beside the folder of such a run
KEPT = 2  # versions: after the last piece of work, and after the one before, should the last have to be done again


class Moment(NamedTuple):
    """Which try at which piece of work a message belongs to.

    Attributes:
        run: The name of the run.
        unit: 0 for the start, t + 1 for round t.
        attempt: A name for this try; what clients kept in another try at the same work, or after it, is void.
        after: Unit and attempt of the last try that counted and in which this site took part; None where there is none.
    """

    run: str
    unit: int
    attempt: str
    after: tuple[int, str] | None = None

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Moment:
        """The moment that a message's words tell of."""
        after = json.loads(str(fields["after"]))
        return cls(
            run=str(fields["run"]),
            unit=int(fields["unit"]),
            attempt=str(fields["attempt"]),
            after=None if after is None else (int(after[0]), str(after[1])),
        )

    def counts(self, unit: int, attempt: str) -> bool:
        """Whether what was kept in a try counts at this moment.

        Of what is older than `after`, all does: what did not was thrown away when the site took part in that try.

        Example:
            >>> now = Moment("run", 7, "ef", after=(5, "cd"))
            >>> [now.counts(*kept) for kept in ((4, "ab"), (5, "cd"), (5, "ab"), (6, "cd"), (7, "ef"))]
            [True, True, False, False, True]
        """
        if (unit, attempt) == (self.unit, self.attempt):
            return True
        return self.after is not None and (unit < self.after[0] or (unit, attempt) == self.after)


class Memory:
    """The memories of a node's clients, by client name, as of some moment.

    A server that was killed goes on from its last checkpoint, and a round in which a node failed is done again. So
    nodes must be able to go back, too: a version is kept for each of the last pieces of work. And a site that was left
    out of a round may have done its part of it all the same, so the server tells which try counted last.

    Args:
        folder: Where; None where there is nowhere to keep anything.
        site: The node's name: several nodes may be given one folder.
    """

    def __init__(self, folder: Path | None, site: str) -> None:
        self.folder, self.site = folder, site

    def load(self, moment: Moment, types: dict[str, type]) -> dict[str, Any]:
        """What clients remember at this moment; versions that do not count are thrown away.

        Raises:
            ValueError: The version that is needed was kept too long ago.
        """
        _word(moment.attempt)
        if self.folder is None:
            return {}
        kept = []
        for file in self._versions(moment.run):
            if moment.counts(*_try(file)):
                kept.append(file)
            else:
                file.unlink(missing_ok=True)
        if not kept:
            if moment.after is not None and self._marker(moment).exists():
                raise ValueError(f"site '{self.site}' no longer has what its clients remembered before this round")
            return {}
        content = snapshot.load(kept[-1], types)
        return dict(zip(content["names"], content["memory"], strict=True))

    def save(self, moment: Moment, memory: dict[str, Any]) -> None:
        """Keep what clients remember after a step.

        Raises:
            ValueError: There is nowhere to keep it, or the site has moved on while this step was under way.
        """
        if self.folder is None:
            raise ValueError(f"site '{self.site}': clients have something to remember; give the node a 'memory' folder")
        folder, now = self._folder(moment.run), (moment.unit, _word(moment.attempt))
        if any(kept[0] >= moment.unit and kept != now for kept in map(_try, self._versions(moment.run))):
            raise ValueError(f"site '{self.site}': a later message has overtaken this one")
        self._forget_old_runs(but=moment.run)
        content = {"names": tuple(memory), "memory": tuple(memory.values())}
        snapshot.save(folder / f"{moment.unit:08d}-{moment.attempt}.safetensors", content, private=True)
        for old in self._versions(moment.run)[:-KEPT]:
            old.unlink(missing_ok=True)
            self._marker(moment).touch()

    def load_chunks(self, run: str) -> dict[str, int]:
        """How many clients go together, by step, as found out in earlier messages of the run.

        To find it out takes the work of a few clients and part of torch that loads for seconds, and every message may
        start a new process.
        """
        if self.folder is None or not (file := self._folder(run) / "chunks.json").is_file():
            return {}
        return json.loads(file.read_text(encoding="utf-8"))

    def save_chunks(self, run: str, chunks: dict[str, int]) -> None:
        """Keep them for later messages, if there is a folder."""
        if self.folder is not None:
            self._forget_old_runs(but=run)
            snapshot.write_text(self._folder(run) / "chunks.json", json.dumps(chunks))

    def identity_file(self) -> Path:
        """The file of the secret key by which other nodes know this one.

        Raises:
            ValueError: There is no folder for it.
        """
        if self.folder is None:
            raise ValueError(f"site '{self.site}': a secure sum has secrets to keep; give the node a 'memory' folder")
        return self.folder / f"identity-{_digest(self.site)}.key"

    def load_session(self, run: str) -> dict[str, Any] | None:
        """Where the node stands in a secure sum; None where it takes part in none."""
        if self.folder is None or not (file := self._session(run)).is_file():
            return None
        return json.loads(file.read_text(encoding="utf-8"))

    def save_session(self, run: str, plain: dict[str, Any]) -> None:
        """Keep it until the next message, for nobody else to read."""
        snapshot.write_private(self._session(run), json.dumps(plain))

    def take_session(self, run: str) -> dict[str, Any] | None:
        """Take it away, and return it: of several processes one has it, and the others None."""
        file = self._session(run)
        taken = file.with_name(f".session.{secrets.token_hex(8)}.json")
        try:
            file.rename(taken)
        except FileNotFoundError:
            return None
        plain = json.loads(taken.read_text(encoding="utf-8"))
        taken.unlink()
        return plain

    def drop_stale_sessions(self, now: float, but: str) -> None:
        """Forget the sessions of all runs that have broken off: those past their time, `but` the one that goes on."""
        if self.folder is None:
            return
        for file in (self.folder / _digest(self.site)).glob("*/session.json"):
            with suppress(FileNotFoundError):  # another process, which answers another run, may have been faster
                plain = json.loads(file.read_text(encoding="utf-8"))
                if plain["session"] != but and plain.get("until", 0) < now:  # older versions wrote no time
                    file.unlink()

    def _forget_old_runs(self, but: str) -> None:
        """Mark runs that have not gone on for long, and delete those whose mark is as old.

        Not at first sight: a clock that jumps makes every run look old, once.
        """
        own, now = self._folder(but), time.time()
        for run in own.parent.glob("*"):
            if run == own or run.suffix == IDLE:
                continue
            mark = run.with_suffix(IDLE)
            with suppress(FileNotFoundError):  # another process may have been faster
                used = run.stat().st_mtime  # when a file in it was made or went
                if now - used <= FORGOTTEN:
                    mark.unlink(missing_ok=True)
                elif not mark.exists() or mark.stat().st_mtime < used:
                    mark.touch()
                    os.utime(mark, (now, now))
                elif now - mark.stat().st_mtime > FORGOTTEN:
                    shutil.rmtree(run)
                    mark.unlink()

    def _session(self, run: str) -> Path:
        return self._folder(run) / "session.json"

    def _versions(self, run: str) -> list[Path]:
        """All that is kept of a run, the newest last."""
        return sorted(self._folder(run).glob("*-*.safetensors"))

    def _folder(self, run: str) -> Path:
        assert self.folder is not None
        # Names come from elsewhere, so no part of a path is made of them.
        return self.folder / _digest(self.site) / _digest(run)

    def _marker(self, moment: Moment) -> Path:
        return self._folder(moment.run) / "older-ones-are-gone"


def _digest(name: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=12).hexdigest()


def _try(file: Path) -> tuple[int, str]:
    """The unit and the attempt after which a version was kept."""
    unit, _, attempt = file.stem.partition("-")
    return int(unit), attempt


def _word(attempt: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{1,64}", attempt):
        raise ValueError("an attempt must be named by hexadecimal digits")
    return attempt
