"""Orders: what holds for every engine of the pool, also for one that comes back: the newest weights, and whether steps are made.

EnginePool.publish, pause, resume -> [Orders] -> Member: before an engine serves, it has what is ordered here

Invariant: when no publication is under way, no engine that serves has newer weights than `newest`, and each that comes has those.
"""

import asyncio
from dataclasses import dataclass

from asyncrl.ports import WeightSnapshot


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weights:
    """Of a version."""

    version: int
    snapshot: WeightSnapshot


class Orders:
    """`newest`: None until something is published: then an engine's own weights are right."""

    def __init__(self) -> None:
        self.newest: Weights | None = None
        self.is_paused = False
        self._is_decided = asyncio.Event()
        self._is_decided.set()

    @property
    def is_open(self) -> bool:
        """Is it not known yet whether a publication fits?"""
        return not self._is_decided.is_set()

    def offer(self) -> None:
        """A publication begins. Nobody comes to serve until it is decided, for he could miss it."""
        self._is_decided.clear()

    def accept(self, weights: Weights) -> None:
        """They fit: from now on they are what an engine must have."""
        self.newest = weights
        self._is_decided.set()

    def decide(self) -> None:
        """The publication is over, whatever came of it."""
        self._is_decided.set()

    async def decided(self) -> None:
        """Bounded by the publication's deadline."""
        await self._is_decided.wait()
