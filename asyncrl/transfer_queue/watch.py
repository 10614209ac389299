"""Following a partition: a snapshot of its tags, then the coalesced set of changed keys at each wake.

TransferQueue -> [Watch] -> replay

A change costs one entry a watch, whatever the number of keys. Invariants:
1. The first item is the snapshot, empty or not; each later item holds every key that changed since the item before, once.
2. A key that came and went between two items is in neither: what a slow watcher holds is bounded by the keys that it knows of
   and the keys alive.
3. The store holds a watch weakly: one that nobody holds any more is forgotten.
"""

import asyncio
import weakref
from collections.abc import Callable, Collection
from typing import Self

from asyncrl.fields import Tag


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


class Watches:
    """All watches of a store, by partition."""

    def __init__(self) -> None:
        self._refs: dict[str, list[weakref.ref[Watch]]] = {}

    def __len__(self) -> int:
        return sum(len(self.of(partition_id)) for partition_id in list(self._refs))

    def add(self, partition_id: str, watch: Watch) -> None:
        self._refs.setdefault(partition_id, []).append(weakref.ref(watch))

    def of(self, partition_id: str) -> list[Watch]:
        """The watches that somebody still holds; the others are forgotten here."""
        refs = self._refs.get(partition_id)
        if not refs:
            return []
        alive = [watch for watch in (ref() for ref in refs) if watch is not None and not watch.is_closed]
        if not alive:
            del self._refs[partition_id]
        elif len(alive) < len(refs):
            self._refs[partition_id] = [weakref.ref(watch) for watch in alive]
        return alive

    def note(self, partition_id: str, keys: Collection[str], *, new: Collection[str] = (), exists: bool = True) -> None:
        """These keys changed; `new`: those that came to be. `exists` False: all of them went."""
        created = set(new)
        for watch in self.of(partition_id):
            for key in keys:
                watch.note(key, existed=key not in created, exists=exists)

    def close(self) -> None:
        for partition_id in list(self._refs):
            for watch in self.of(partition_id):
                watch.close()
