"""The engine with the least load, the first of equals, in O(log n) a change: a heap of (load, number) in which old entries lie
until they come to the top."""

import heapq
from collections.abc import Sequence
from typing import Protocol

STALE = 8
"""Entries an engine from which on the heap is made anew."""


class Loaded(Protocol):
    """What can be chosen."""

    number: int
    is_alive: bool

    @property
    def load(self) -> int: ...


class LeastLoaded:
    """`engines`: numbered from 0, in their order."""

    def __init__(self) -> None:
        self._engines: Sequence[Loaded] = ()
        self._heap: list[tuple[int, int]] = []

    def watch(self, engines: Sequence[Loaded]) -> None:
        self._engines = engines
        self._heap = [(engine.load, engine.number) for engine in engines if engine.is_alive]
        heapq.heapify(self._heap)

    def changed(self, engine: Loaded) -> None:
        """Its load is another, or it has come back."""
        if not engine.is_alive:
            return
        if len(self._heap) > STALE * len(self._engines):
            self.watch(self._engines)
        else:
            heapq.heappush(self._heap, (engine.load, engine.number))

    def choose(self) -> int | None:
        """Number of an engine that is alive; None when none is."""
        heap = self._heap
        while heap:
            load, number = heap[0]
            engine = self._engines[number]
            if engine.is_alive and engine.load == load:
                return number
            heapq.heappop(heap)
        return None
