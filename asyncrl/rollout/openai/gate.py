"""Gate: no request is at the server while something holds the gate shut; for servers that cannot freeze their requests.

Invariants:
1. `shut` returns when nobody is inside; who comes meanwhile waits at the gate.
2. It opens when every `shut` has had its `open`.
"""

import asyncio
from types import TracebackType


class Gate:
    """Entered as an async context by whoever goes through."""

    def __init__(self) -> None:
        self._num_holding = 0
        self._num_inside = 0
        self._opened = asyncio.Event()
        self._emptied = asyncio.Event()

    async def shut(self) -> None:
        """Hold it shut. A wait that is cancelled still holds it: `open` follows in any case."""
        self._num_holding += 1
        while self._num_inside:
            self._emptied.clear()
            await self._emptied.wait()

    def open(self) -> None:
        self._num_holding -= 1
        if not self._num_holding:
            self._opened.set()

    async def __aenter__(self) -> None:
        while self._num_holding:
            self._opened.clear()
            await self._opened.wait()
        self._num_inside += 1

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._num_inside -= 1
        if not self._num_inside:
            self._emptied.set()
