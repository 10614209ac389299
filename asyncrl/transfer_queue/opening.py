"""Opens the TransferQueue of a run: with the journal at a path, and what it kept.

assembly -> [opening] -> journal, store
"""

import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

from asyncrl.journal.sqlite import open_journal
from asyncrl.ports import World
from asyncrl.transfer_queue.store import TransferQueue


@asynccontextmanager
async def open_queue(
    path: Path | None, *, world: World, sync: Literal["normal", "full"] = "normal", commit_timeout_s: float = 60.0
) -> AsyncIterator[TransferQueue]:
    """path: of the journal, made where there is none; None: memory alone. Raises JournalError.

    Leaving writes what is queued and lets the files go, off the loop.
    """
    if path is None:
        async with TransferQueue() as queue:
            yield queue
        return
    journal = await world.offload(functools.partial(open_journal, path, sync=sync))
    try:
        saved = await world.offload(journal.load)
        async with TransferQueue(journal, saved, commit_timeout_s=commit_timeout_s) as queue:
            yield queue
    finally:
        await world.offload(journal.close)
