"""The event loop of a command: uvloop where it is installed, else asyncio's own; either way it ends.

cli -> [event_loop] -> run. `asyncio.run` waits at its end for every task that is left, for ever if one catches its cancellation, as
a tool, agent loop or reward function of somebody else's may. Here they get a moment, are named, and are left behind. And what stops
the loop without being on it, the garbage collector, is kept for what grows.
"""

import asyncio
import gc
import logging
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

END_TIMEOUT_S = 5.0
"""Seconds that what is left of a run gets to end, at its end or at the second Ctrl-C: enough to end reward processes."""

COLLECT_AFTER = (50_000, 20, 100)
"""Thresholds of the collector. A thousand live sessions are 300,000 objects: to walk them takes 0.25 s, in which nothing else runs.
Sessions leave no cycles, so their objects come and go by their counts. What does grow by 50,000 objects is looked at in 0.1 s."""


def run_loop(main: Coroutine[None, None, T], *, end_timeout_s: float = END_TIMEOUT_S) -> T:
    """Run `main` to its end on a loop of its own, and return what it returns. For the main thread, outside any loop."""
    loop = _new_loop()
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(main)
    finally:
        try:
            loop.run_until_complete(_end_tasks(end_timeout_s))
        finally:
            asyncio.set_event_loop(None)
            loop.set_exception_handler(lambda loop, context: None)  # who was left behind is told already
            loop.close()


@contextmanager
def rare_collections() -> Iterator[None]:
    """What is there now lives as long as the run, and is not walked again; inside the block collections are rare."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def _end_tasks(timeout_s: float) -> None:
    """Cancel every other task and wait a moment for them."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    if left:
        _, left = await asyncio.wait(left, timeout=timeout_s)
    if left:
        names = ", ".join(sorted(task.get_name() for task in left))
        log.warning("%d tasks hold on to their cancellation and are left behind: %s", len(left), names)
    await asyncio.get_running_loop().shutdown_asyncgens()
