"""The event loop of a command: uvloop where it is installed, else asyncio's own; either way it ends.

cli -> [event_loop] -> run. `asyncio.run` waits at its end for every task that is left, for ever if one catches its cancellation, as
a tool, agent loop or reward function of somebody else's may. Here they get a moment, are named, and are left behind. So are threads
that still work: Python's own end would not survive them. And what stops the loop without being on it, the garbage collector, is
kept for what grows.
"""

import asyncio
import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Collection, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

END_TIMEOUT_S = 5.0
"""Seconds that what is left of a run gets to end, at its end or at the second Ctrl-C: enough to end reward processes."""

OURS = "asyncrl-"
"""How the names of threads begin that do work: of world, engine and journal."""

THREADS_TIMEOUT_S = 0.5
"""Seconds that threads without work get to end: they have been told to."""

COLLECT_AFTER = (200_000, 10, 10)
"""Thresholds of the collector. A thousand live sessions are 300,000 objects: to walk them takes 0.25 s, in which nothing else runs,
and with Python's own thresholds that is every few seconds. Neither sessions nor steps leave cycles: their objects go by their
counts, and what others leave may wait until it is this many."""


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


def leave_threads(code: int, before: Collection[threading.Thread]) -> None:
    """End the process here, with exit code `code`, when a thread of ours that is not in `before` still works; else return.

    At Python's own end such a thread is stopped where it stands. Inside of torch this aborts the process, with the exit code of a
    crash. What Python does before that (its output, its children) is for the caller: reward processes end with the run.
    """
    until_s = time.monotonic() + THREADS_TIMEOUT_S
    left = [thread for thread in threading.enumerate() if thread.name.startswith(OURS) and thread not in before]
    for thread in left:
        thread.join(max(until_s - time.monotonic(), 0))
    if any(thread.is_alive() for thread in left):
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # a closed one, or none
                stream.flush()
        os._exit(code)


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
