"""Opens the TransferQueue of a run: with the journal at a path, and what it kept.

assembly -> [opening] -> journal, store
"""

import contextlib
import functools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

from asyncrl.errors import DeadlineError
from asyncrl.journal.entries import KeptSteps
from asyncrl.journal.opening import BUSY_S
from asyncrl.journal.sqlite import open_journal
from asyncrl.ports import World
from asyncrl.transfer_queue.store import TransferQueue


@asynccontextmanager
async def open_queue(
    path: Path | None,
    *,
    world: World,
    sync: Literal["normal", "full"] = "normal",
    commit_timeout_s: float = 60.0,
    weights_step: int | Callable[[KeptSteps], int] = 0,
) -> AsyncIterator[TransferQueue]:
    """path: of the journal, made where there is none; None: memory alone. Raises JournalError, and what `weights_step` raises.

    weights_step: the last step that the weights of this process have learned; or who chooses it, off the loop, once the journal
    belongs to this process and it is known from which steps one can go on.

    Leaving writes what is queued and lets the files go, off the loop. Raises DeadlineError when a disk that hangs does not let it;
    what has ended the block is raised before that.
    """
    if path is None:
        async with TransferQueue(weights_step=weights_step if isinstance(weights_step, int) else 0) as queue:
            yield queue
        return
    journal = await world.offload(functools.partial(open_journal, path, sync=sync))
    limit_s = commit_timeout_s + BUSY_S  # a reader may hold up the last of it
    try:
        step = weights_step if isinstance(weights_step, int) else await world.offload(lambda: weights_step(journal.steps()))
        saved = await world.offload(journal.load, step)
        async with TransferQueue(journal, saved, commit_timeout_s=commit_timeout_s, weights_step=step) as queue:
            yield queue
    except BaseException:
        with contextlib.suppress(DeadlineError):
            await world.offload(journal.close, timeout_s=limit_s)
        raise
    try:
        await world.offload(journal.close, timeout_s=limit_s)
    except DeadlineError as error:
        raise DeadlineError(f"{path} did not close within {limit_s:g} s; what was acknowledged is kept") from error
