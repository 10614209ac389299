"""Guests: coroutines of other people's code, in tasks that their caller never has to wait for.

Place: session, tool_runner -> [guests] -> agent loops, async tools, async reward functions.

A coroutine that catches its cancellation, or waits in its `finally`, would hold whoever awaits it. Here it holds nobody:

1. `run` ends at its deadline, and at once when its caller is cancelled, whatever the guest does then.
2. A guest that goes on afterwards is counted in `num_late` until it ends; what it returns or raises is thrown away.
3. A caller is cancelled only by who cancels the caller: a guest that cancels its own task cancels the guest.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from asyncrl.errors import DeadlineError

T = TypeVar("T")

CLOSE_TIMEOUT_S = 1.0
"""Seconds that cancelled guests get to end when their owner is closed."""


class Guests:
    """The guests of one owner, who calls `close` in the end."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._late: set[asyncio.Task[Any]] = set()

    @property
    def num_late(self) -> int:
        """Guests whose caller has gone and that still run."""
        return sum(not task.done() for task in self._late)

    async def run(self, guest: Coroutine[Any, Any, T], *, name: str, timeout_s: float, limit: str) -> T:
        """The guest's result or error, its CancelledError too. Raises DeadlineError after `timeout_s`, the value of key `limit`."""
        # Not a TaskGroup: it waits for its tasks, and these may never end.
        task = asyncio.create_task(guest, name=f"guest: {name}")
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        try:
            await asyncio.wait({task}, timeout=timeout_s)
        finally:
            if not task.done():
                self._late.add(task)
                task.cancel()
        if not task.done():
            raise DeadlineError(f"{name} took longer than {limit} = {timeout_s:g} s")
        return task.result()

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        self._late.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may be gone, and asyncio would log it as forgotten

    async def close(self) -> None:
        """Cancel all and wait a moment for them; who still holds on then is left behind."""
        left = set(self._tasks)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=CLOSE_TIMEOUT_S)
