"""Waiting for a change without polling: `wait` returns at the next `notify`."""

import asyncio


class Signal:
    """A broadcast without memory. Check, then `await wait()` with no await in between: no notification is lost."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        """Wake all who wait now."""
        self._next.set()
        self._next = asyncio.Event()

    async def wait(self) -> None:
        """Until the next `notify`; the caller sets the deadline."""
        await self._next.wait()
