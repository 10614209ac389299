"""Signs of life: what each rank did last, and when, in shared memory. Training code says `beat("update: micro-batch 3 of 8")`.

In one process nobody listens, and a beat costs nothing. A beat is no promise of progress; it moves the deadline of all ranks on, so
it belongs between pieces of work that differ (a micro-batch, a file), never into a loop that waits.
"""

import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from mmap import mmap

_SLOT = struct.Struct("=qdH238s")
SLOT_BYTES = _SLOT.size
"""Of one rank: how many beats, when the last was (time.monotonic, one clock for all processes of a machine), its text."""

_listener: Callable[[str], None] | None = None


def beat(text: str) -> None:
    """Say what this rank is at. Nothing in a process that is no rank."""
    if _listener is not None:
        _listener(text)


def listen(listener: Callable[[str], None] | None) -> None:
    """Who hears `beat` in this process; a rank's main sets it before anything else."""
    global _listener
    _listener = listener


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """count: beats so far; at: seconds of time.monotonic, 0.0 before the first."""

    count: int
    at: float
    text: str


class Board:
    """One slot a rank. Each slot has one writer; a reader may see half of a new text, which only a message shows."""

    def __init__(self, memory: mmap, world: int) -> None:
        self._memory = memory
        self.world = world

    def write(self, rank: int, text: str) -> None:
        count = _SLOT.unpack_from(self._memory, rank * SLOT_BYTES)[0]
        data = text.encode()[:238]
        _SLOT.pack_into(self._memory, rank * SLOT_BYTES, count + 1, time.monotonic(), len(data), data)

    def read(self, rank: int) -> Beat:
        count, at, length, data = _SLOT.unpack_from(self._memory, rank * SLOT_BYTES)
        return Beat(count=count, at=at, text=data[:length].decode(errors="ignore"))

    def all(self) -> list[Beat]:
        return [self.read(rank) for rank in range(self.world)]
