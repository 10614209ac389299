"""The event log of a simulated run: what happened when, the same bytes for the same seed.

loop, edges, faults -> [EventLog] -> the last events of a violation, a file, a digest
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator

Event = tuple[float, str, str]
"""(virtual seconds, kind, what)."""


class EventLog:
    """`keep`: events kept for `lines`, the newest; None: all. Every event counts for the digest when `digests` is on."""

    def __init__(self, *, keep: int | None = 50, digests: bool = False) -> None:
        self._events: deque[Event] = deque(maxlen=keep)
        self._digest = hashlib.blake2b(digest_size=16) if digests else None
        self.num_events = 0
        self.now: Callable[[], float] = float

    def note(self, kind: str, what: str) -> None:
        event = (self.now(), kind, what)
        self.num_events += 1
        self._events.append(event)
        if self._digest is not None:
            self._digest.update(f"{_line(event)}\n".encode())

    def step(self, task: str) -> None:
        """A task runs."""
        self.note("step", task)

    def lines(self) -> Iterator[str]:
        return map(_line, self._events)

    @property
    def digest(self) -> str:
        """32 hex digits over all events. Raises AssertionError when it was not asked for."""
        assert self._digest is not None
        return self._digest.hexdigest()


def _line(event: Event) -> str:
    seconds, kind, what = event
    return f"{seconds:.9f} {kind:<8} {what}"
