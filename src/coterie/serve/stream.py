"""Server-sent events: a message whenever the files of a run change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from coterie.serve.stamps import Stamps

PAUSE = 0.5  # seconds between two looks
ALIVE = 10  # looks without a change after which a comment is sent, so that both sides notice when the other is gone


async def changes(folder: Path, seen: str, ending: Callable[[], bool]) -> AsyncIterator[str]:
    """Send the version of a run whenever it is another, beginning with that now if it is not what was seen.

    Args:
        folder: The run folder.
        seen: The version that the reader has.
        ending: Whether the server is being stopped: it waits for all answers to end.
    """
    yield "retry: 1000\n\n"
    still = 0
    while not ending():
        now = (await asyncio.to_thread(Stamps.of, folder)).version
        if now != seen:
            seen, still = now, 0
            yield f"id: {now}\ndata: {now}\n\n"
        elif (still := still + 1) % ALIVE == 0:
            yield ": still here\n\n"
        await asyncio.sleep(PAUSE)
