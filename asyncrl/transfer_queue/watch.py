"""Following a partition: a snapshot of its tags, then the coalesced set of changed keys at each wake.

TransferQueue -> [Watch] -> replay

A change costs one entry a watch, whatever the number of keys. Invariants:
1. The first item is the snapshot, empty or not; each later item holds every key that changed since the item before, once.
2. A key that came and went between two items is in neither: what a slow watcher holds is bounded by the keys that it knows of
   and the keys alive.
3. The store holds a watch weakly: one that nobody holds any more is forgotten.
"""

import asyncio
from collections.abc import Callable
from typing import Self

from asyncrl.protocol.batch_meta import Tag


class Watch:
    """Async iterator of `{key: tag, or None when the key is gone}`. One consumer, whose deadline bounds the wait."""

    def __init__(self, *, snapshot: Callable[[], dict[str, Tag | None]], read: Callable[[str], Tag | None]) -> None:
        """snapshot: all tags now, asked for once; read: the tag of one key now, None when it is gone."""
        self._snapshot = snapshot
        self._read = read
        self._has_begun = False
        self._changed: dict[str, bool] = {}  # key -> whether the last item knew it
        self._wake = asyncio.Event()
        self._wake.set()
        self._is_closed = False

    def note(self, key: str, *, existed: bool, exists: bool) -> None:
        """Called by the store at each change of a tag, and when a key comes or goes."""
        if not self._has_begun:
            return
        was_known = self._changed.setdefault(key, existed)
        if not was_known and not exists:
            del self._changed[key]
        else:
            self._wake.set()

    def close(self) -> None:
        """Ends the iteration, after a change set that is already waiting."""
        self._is_closed = True
        self._wake.set()

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> dict[str, Tag | None]:
        while self._has_begun and not self._changed:
            if self._is_closed:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        if not self._has_begun:
            self._has_begun = True
            return self._snapshot()
        changes = {key: self._read(key) for key in self._changed}
        self._changed.clear()
        return changes
