"""Who takes part: nodes are asked who their clients are."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from flwr.app import ConfigRecord, Message, RecordDict

from coterie.core.module import PureModule
from coterie.core.task import Task
from coterie.flower.grid import Grid, TooFew, brief, exchange, wait_for
from coterie.flower.roster import Roster, Site
from coterie.runs.config import build_task

log = logging.getLogger("coterie")

LARGEST = 2**26  # letters with which a node tells who its clients are


def enrol(
    grid: Grid, task: Task, *, nodes: int, least: int | None = None, deadline: float = 600.0, groups: bool = True
) -> Roster:
    """Wait for so many nodes and ask them who their clients are. A node that cannot tell is left out.

    So is one whose rows are of another kind than most nodes'. It is named in the log, and may join later.

    Args:
        grid: Flower's.
        task: What is learnt.
        nodes: How many to wait for.
        least: How many must be able to take part; more than half of `nodes` must in any case. None for all.
        deadline: Seconds that they have to come, and then to answer.
        groups: Whether they also tell the true groups, where a generator knows them.

    Raises:
        TooFew: They have not come, or not answered, in time; says what each said.
    """
    enrolled, faults = ask_sites(grid, task, wait_for(grid, nodes, deadline), deadline, groups=groups)
    faults |= _unlike(enrolled)
    enrolled = {node: site for node, site in enrolled.items() if node not in faults}
    said = [f"node {node}: {why}" for node, why in faults.items()]
    if len(enrolled) < max(nodes if least is None else least, nodes // 2 + 1):
        raise TooFew(f"flower: {len(enrolled)} of {nodes} nodes could enrol. {'; '.join(said)}")
    for words in said:
        log.warning("flower: the run starts without %s", words)
    return Roster.of(list(enrolled.items()))


def _unlike(sites: Mapping[int, Site]) -> dict[int, str]:
    """Why nodes cannot take part whose rows are of another kind than most nodes'; of equals, the first name's are."""
    in_order = sorted(sites.items(), key=lambda each: each[1].name)
    usual = Counter(site.form for _, site in in_order).most_common(1)
    return {
        node: f"rows of site '{site.name}' are {site.form}, those of most are {usual[0][0]}"
        for node, site in in_order
        if site.form != usual[0][0]
    }


def ask_sites(
    grid: Grid, task: Task, nodes: Sequence[int], deadline: float, *, groups: bool
) -> tuple[dict[int, Site], dict[int, str]]:
    """Ask nodes who their clients are: what each answered, and why others did not. Each is judged by itself."""
    if not nodes:
        return {}, {}
    content = RecordDict({"task": ConfigRecord({"task": plain_task(task), "groups": groups})})
    enrolled, faults = dict[int, Site](), dict[int, str]()
    for node, message in exchange(grid, {n: (n, "query.enrol", content) for n in nodes}, deadline).items():
        try:
            site = _site(message)
            site.check(task)
            enrolled[node] = site
        except (ValueError, RuntimeError) as error:  # torch raises the second where it can get no memory
            faults[node] = brief(str(error))
    return enrolled, faults


def _site(message: Message | None) -> Site:
    if message is None:
        raise ValueError("no answer")
    if message.has_error():
        raise ValueError(message.error.reason)
    content = message.content
    if not isinstance(content, RecordDict) or not isinstance(record := content.get("site"), ConfigRecord):
        raise ValueError("it does not say who its clients are")
    if not isinstance(words := record.get("site"), str) or len(words) > LARGEST:
        raise ValueError(f"it does not say who its clients are in at most {LARGEST} letters")
    try:
        return Site.from_plain(json.loads(words))
    except RecursionError as error:
        raise ValueError("it says who its clients are in too many brackets") from error


def plain_task(task: Task) -> str:
    """A task as JSON, from which nodes build it.

    Raises:
        ValueError: They could not, or not the same one.
    """
    if not task.spec or ("model" not in task.spec and task.spec["kind"] != "distance"):
        raise ValueError(
            "flower: the task has a module of your own, which nodes cannot build; use one of coterie.models"
        )
    if task.functions is not None and (name := _another(task.functions.pure, build_task(task.spec))):
        raise ValueError(
            f"flower: nodes build the model anew from its description, so '{name}' would be another one there; only "
            "parameters that are trained and sent may differ from those of a new model"
        )
    return json.dumps(task.spec)


def _another(own: PureModule, built: Task) -> str | None:
    """The name of something that is not sent, such as a frozen parameter, and is not the same in what nodes build."""
    there = built.functions.pure.unsent if built.functions is not None else {}
    here = own.unsent
    for name in sorted({*here, *there}):
        if name not in here or name not in there or not torch.equal(here[name], there[name]):
            return name
    return None
