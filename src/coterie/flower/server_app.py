"""The ServerApp: name it in a pyproject.toml as `serverapp = "coterie.flower.server_app:app"`.

What it does is in a config.toml beside the app's data.py, with the tables [algorithm], [task] and [run] as for the
simulator; there is no [data], for the nodes have it.
"""

from __future__ import annotations

import logging
import secrets
import tomllib
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from flwr.app import Context
from flwr.serverapp import Grid as FlowerGrid
from flwr.serverapp import ServerApp

from coterie.core.key import Key
from coterie.core.method import Method
from coterie.core.precision import Precision, check_precision
from coterie.core.settings import setting, validate
from coterie.core.task import Task
from coterie.flower.data_file import find_data_file
from coterie.flower.engine import FlowerEngine
from coterie.flower.enrolment import enrol, plain_task
from coterie.flower.grid import Grid, wait_for
from coterie.flower.membership import FlowerMembership
from coterie.flower.roster import Roster
from coterie.flower.secure_engine import SecureFlower
from coterie.runs.config import build_algorithm, build_run, build_task
from coterie.runs.fit import check_uplink, fit_on
from coterie.runs.folder import read_roster
from coterie.runs.run import Run
from coterie.storage.lock import Held, alone
from coterie.storage.names import nearest_name

log = logging.getLogger("coterie")

PATIENCE = 60.0  # seconds to wait for another server to leave a run folder

RUN = ("rounds", "seed", "precision", "evaluations", "secure", "privacy", "uplink", "aggregate")


@dataclass(frozen=True)
class Settings:
    """The run config, under [tool.flwr.app.config] of the app or after `flwr run --run-config`, with - for _.

    Args:
        config: The config.toml; a relative path is beside data.py.
        out: The run folder on the server; "" writes nothing.
        resume: Whether to go on from the newest checkpoint in `out`, as soon as `min_replies` nodes are there.
        nodes: How many nodes to wait for at the start; the run starts if more than half of them, and `min_replies`, can
            take part.
        min_replies: How many must answer in every exchange, or the run stops.
        deadline: Seconds that nodes have to answer.
    """

    config: str = "config.toml"
    out: str = ""
    resume: bool = False
    nodes: int = setting(1, low=1)
    min_replies: int = setting(1, low=1)
    deadline: float = setting(600.0, low=1)

    @classmethod
    def of(cls, run_config: Mapping[str, Any]) -> Settings:
        """The settings in a run config.

        Example:
            >>> Settings.of({"nodes": 3, "min-replies": 2}).min_replies
            2

        Raises:
            ValueError: A key is unknown, or a value not allowed.
        """
        given = {name.replace("-", "_"): value for name, value in run_config.items()}
        for name in given:
            if name not in cls.__dataclass_fields__:
                raise ValueError(f"the run config has no key '{name}'{nearest_name(name, cls.__dataclass_fields__)}")
        settings = cls(**given)
        validate(settings)
        if settings.min_replies > settings.nodes:
            raise ValueError(f"min-replies is {settings.min_replies}, more than the {settings.nodes} nodes")
        return settings


class Parsed(NamedTuple):
    """What a config.toml asks for."""

    algorithm: Method
    task: Task
    run: dict[str, Any]  # rounds, seed, evaluations, secure, privacy, uplink, aggregate
    precision: Precision


def parse(tables: dict[str, Any]) -> Parsed:
    """What the contents of a config.toml ask for.

    Raises:
        ValueError: A table or a key is unknown or missing, or a value not allowed.
    """
    if unknown := sorted(tables.keys() - {"algorithm", "task", "run"}):
        raise ValueError(f"a configuration for Flower has no table [{unknown[0]}]: nodes have their own data")
    run = dict(tables.get("run", {}))
    if unknown := sorted(run.keys() - set(RUN)):
        raise ValueError(f"[run] has no key '{unknown[0]}' on Flower{nearest_name(unknown[0], RUN)}")
    if "rounds" not in run:
        raise ValueError("[run] needs rounds")
    algorithm = build_algorithm(tables.get("algorithm", {}))
    task = build_task(tables["task"]) if "task" in tables else algorithm.default_task()
    plain_task(task)  # or nodes could not build it
    run = build_run(run)
    run["uplink"] = check_uplink(run.get("uplink", ()))
    return Parsed(algorithm, task, run, check_precision(run.pop("precision", "float32"), torch.device("cpu")))


def serve(grid: Grid, settings: Settings, tables: dict[str, Any]) -> Run:
    """Train on the nodes of a grid as a config.toml says.

    Args:
        grid: Flower's.
        settings: Which nodes, and how long to wait for them.
        tables: The contents of the config.toml.
    """
    parsed = parse(tables)
    out = Path(settings.out).expanduser().absolute() if settings.out else None
    # A server that nobody watches any more may still be at work; one whose SuperLink is gone ends, but not at once.
    lock = alone(out.parent / f".{out.name}.lock", PATIENCE) if out else nullcontext()
    try:
        with lock:
            return _serve(grid, settings, parsed, out)
    except Held:
        raise ValueError(f"{out}: another server is at work on this run; `flwr list` tells which") from None


def _serve(grid: Grid, settings: Settings, parsed: Parsed, out: Path | None) -> Run:
    algorithm, task, asked, precision = parsed
    roster, name = _roster(grid, task, settings, out, secret="secure" in asked)
    log.info("flower: %d clients at %s", len(roster.federation), ", ".join(roster.sites))

    def members(key: Key) -> FlowerMembership:
        engine = FlowerEngine(
            grid,
            roster,
            task,
            key,
            run=name,
            min_replies=settings.min_replies,
            deadline=settings.deadline,
            uplink=asked["uplink"],
            precision=precision,
        )
        return FlowerMembership(engine)

    return fit_on(members, algorithm, **asked, secured=SecureFlower, out=out, resume=settings.resume)


def _roster(grid: Grid, task: Task, settings: Settings, out: Path | None, *, secret: bool) -> tuple[Roster, str]:
    """Who takes part, and the run's name: at a resume those who did before, of whom some may be missing.

    The name is drawn, for a folder may be deleted and another run made in its place.
    """
    kept = read_roster(out) if settings.resume and out else None
    if kept is None:
        # Under a secure sum there is nothing that true groups could be compared with.
        who = {"nodes": settings.nodes, "least": settings.min_replies, "deadline": settings.deadline}
        roster = enrol(grid, task, **who, groups=not secret)
        roster.federation.check(task)
        return roster, secrets.token_hex(8)
    wait_for(grid, settings.min_replies, settings.deadline)
    try:
        return Roster.from_plain(kept), _name(kept)
    except ValueError as error:
        raise ValueError(f"the roster in {out} is damaged: {error}") from error


def _name(kept: dict[str, Any]) -> str:
    """The name of the run that a roster.json is of."""
    if not isinstance(name := kept.get("run"), str):
        raise ValueError("it does not name the run")
    return name


def read_tables(path: str) -> dict[str, Any]:
    """A config.toml, given by its path or by its name in the app's folder."""
    file = Path(path).expanduser()
    if not file.is_absolute():
        file = find_data_file().parent / file
    if not file.is_file():
        raise ValueError(f"there is no {file}; set 'config' in the run config")
    return tomllib.loads(file.read_text(encoding="utf-8"))


app = ServerApp()


@app.main()
def main(grid: FlowerGrid, context: Context) -> None:
    """Run what the app's config.toml says."""
    # Of this logger only: Flower sends what is logged over HTTP, which is logged, too.
    log.setLevel(logging.INFO)
    log.addHandler(logging.StreamHandler())
    log.propagate = False
    settings = Settings.of(context.run_config)
    run = serve(grid, settings, read_tables(settings.config))
    log.info("flower: %s %.4f after %d rounds", run.scores.metric, run.score, len(run.history))
