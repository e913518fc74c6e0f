"""Benchmark of the secure sum: seconds and bytes of one session against what its clients would send in the open."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np

from coterie.secure.client import Client
from coterie.secure.messages import Sheet, Terms
from coterie.secure.protocol import Session

log = logging.getLogger("coterie")

SLOTS = 4
SIZES = ((12, 2_500), (20, 2_500), (20, 100_000), (50, 2_500), (100, 2_500), (256, 2_500))  # clients, numbers per slot
QUICK = SIZES[:2]


def measure(*, quick: bool = False) -> list[dict[str, Any]]:
    """Return one row per size, as `coterie bench secure --json` prints them.

    All clients and the server are computed one after the other in this process, so seconds are those of everybody.

    Args:
        quick: Whether to measure up to 20 clients of small models only.
    """
    rows = []
    for clients, numbers in QUICK if quick else SIZES:
        rows.append(_session(clients, numbers))
        log.info(f"secure: {clients} clients, {numbers} numbers: {rows[-1]['seconds']:.2f} s")
    return rows


def _session(clients: int, numbers: int) -> dict[str, Any]:
    terms = Terms(clients, 2 * clients // 3 + 1, 2, SLOTS)
    begin = time.perf_counter()
    session = Session({i: Client(i, terms) for i in range(clients)}, terms)
    session.add({i: _sheet(i % SLOTS, numbers) for i in session.agree()})
    seconds, transcript = time.perf_counter() - begin, session.server.transcript
    return {
        "clients": clients,
        "numbers": numbers,
        "seconds": seconds,
        "up_kb": transcript.bytes_up / clients / 1000,
        "down_kb": transcript.bytes_down / clients / 1000,
        "open_kb": 4 * numbers / 1000,
    }


def _sheet(slot: int, numbers: int) -> Sheet:
    chosen = np.eye(SLOTS, dtype=np.uint64)[slot]
    return Sheet(np.concatenate([chosen, np.ones(2, np.uint64)]), chosen[:, None] * np.ones(numbers + 1, np.uint64))
