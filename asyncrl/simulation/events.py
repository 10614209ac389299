"""The event log of a simulated run: what happened when, the same bytes for the same seed.

loop, edges, faults -> [EventLog] -> the last events of a violation, a file, a digest

A line an event: virtual seconds with nine digits, kind, what. Nothing in it may depend on the process: no address, no real time, no
order of a set of strings.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

Event = tuple[float, str, str]
"""(virtual seconds, kind, what)."""

_LINES_A_HASH = 256


class EventLog:
    """`keep`: events kept for `lines`, the newest; None: all, for `write`. All count for the digest, if `digests`."""

    def __init__(self, *, keep: int | None = 50, digests: bool = False) -> None:
        self._events: deque[Event] = deque(maxlen=keep)
        self._digest = hashlib.blake2b(digest_size=16) if digests else None
        self._unhashed: list[Event] = []
        self.num_events = 0
        self.now: Callable[[], float] = float
        """The clock; each life of a controller has its own loop."""

    def note(self, kind: str, what: str) -> None:
        self.num_events += 1
        event = (self.now(), kind, what)
        self._events.append(event)
        if self._digest is not None:
            self._unhashed.append(event)
            if len(self._unhashed) >= _LINES_A_HASH:
                self._hash()

    def step(self, task: str) -> None:
        """A task runs."""
        if self._digest is not None:
            self.note("step", task)
            return
        self.num_events += 1  # most events are these
        self._events.append((self.now(), "step", task))

    def lines(self) -> Iterator[str]:
        return map(_line, self._events)

    def write(self, path: Path) -> None:
        """The events that are kept, a line each."""
        with path.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{line}\n" for line in self.lines())

    @property
    def digest(self) -> str:
        """32 hex digits over all events so far. Raises ValueError when it was not asked for."""
        if self._digest is None:
            raise ValueError("this log has no digest: EventLog(digests=True)")
        self._hash()
        return self._digest.hexdigest()

    def _hash(self) -> None:
        assert self._digest is not None
        self._digest.update("".join(f"{_line(event)}\n" for event in self._unhashed).encode())
        self._unhashed.clear()


def _line(event: Event) -> str:
    """One line, whatever is told: a message of several lines must not look like several events."""
    seconds, kind, what = event
    return f"{seconds:.9f} {kind:<8} {what}".replace("\n", "\\n").rstrip()
