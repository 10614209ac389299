"""Which engine a request goes to: its session's, or the one with the least load.

EnginePool.generate -> [Router.choose] -> an engine

Invariants:
1. A session stays where its last request went, for its beginning is in that engine's cache, until that engine takes no requests.
2. A session never goes to weights older than those it has seen: while a publication is under way, engines differ.
3. Everything else goes to the engine with the least load, the first of equals.
"""

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

STALE = 8
"""Entries an engine from which on the heap is made anew."""
MAX_SESSIONS = 1 << 14
"""Sessions that are remembered: more than run at once. One that is forgotten is at home nowhere, and so loses its cache once."""


class Candidate(Protocol):
    """What can be chosen."""

    @property
    def number(self) -> int: ...

    @property
    def takes_requests(self) -> bool: ...

    @property
    def load(self) -> int: ...

    @property
    def version(self) -> int: ...


class LeastLoaded:
    """The one with the least load, in O(log n) a change: a heap of (load, number) in which old entries lie until they come to the
    top. `engines`: numbered from 0, in their order."""

    def __init__(self, engines: Sequence[Candidate]) -> None:
        self._engines = engines
        self._heap: list[tuple[int, int]] = []
        self._make_anew()

    def _make_anew(self) -> None:
        self._heap = [(engine.load, engine.number) for engine in self._engines if engine.takes_requests]
        heapq.heapify(self._heap)

    def changed(self, engine: Candidate) -> None:
        """Its load is another, or it takes requests again."""
        if not engine.takes_requests:
            return
        if len(self._heap) > STALE * len(self._engines):
            self._make_anew()
        else:
            heapq.heappush(self._heap, (engine.load, engine.number))

    def choose(self) -> int | None:
        """Number of an engine that takes requests; None when none does."""
        heap = self._heap
        while heap:
            load, number = heap[0]
            engine = self._engines[number]
            if engine.takes_requests and engine.load == load:
                return number
            heapq.heappop(heap)
        return None


class Home:
    """Where a session's last request went, and the newest weights that it has seen."""

    __slots__ = ("number", "version")

    def __init__(self, number: int) -> None:
        self.number = number
        self.version = -1


class Router:
    """`engines`: numbered from 0, in their order."""

    def __init__(self, engines: Sequence[Candidate], *, max_sessions: int = MAX_SESSIONS) -> None:
        self._engines = engines
        self._least = LeastLoaded(engines)
        self._homes: OrderedDict[str, Home] = OrderedDict()
        self._max_sessions = max_sessions

    def changed(self, engine: Candidate) -> None:
        """Its load is another, or it takes requests again."""
        self._least.changed(engine)

    def choose(self, session: str, newest: int | None = None) -> int | None:
        """Number of the engine for a request of `session` ("": of none); None when none can take it now.

        newest: no engine will have newer weights than these, even if somebody has seen some; None: that is open.
        """
        home = self._homes.get(session)
        if home is None:
            number = self._least_loaded(-1)
        else:
            version = home.version if newest is None else min(home.version, newest)
            number = home.number if self._can_stay(home, version) else self._least_loaded(version)
        if number is not None and session:
            self._settle(session, number)
        return number

    def saw(self, session: str, version: int) -> None:
        """An answer to `session` has a token of `version`."""
        home = self._homes.get(session)
        if home is not None:
            home.version = max(home.version, version)

    def _can_stay(self, home: Home, version: int) -> bool:
        engine = self._engines[home.number]
        return engine.takes_requests and engine.version >= version

    def _least_loaded(self, version: int) -> int | None:
        """Of those whose weights are of `version` at least. Only while weights are published does one have to be looked for."""
        number = self._least.choose()
        if number is None or self._engines[number].version >= version:
            return number
        fit = [engine for engine in self._engines if engine.takes_requests and engine.version >= version]
        return min(fit, key=lambda engine: (engine.load, engine.number)).number if fit else None

    def _settle(self, session: str, number: int) -> None:
        home = self._homes.setdefault(session, Home(number))
        home.number = number
        self._homes.move_to_end(session)
        if len(self._homes) > self._max_sessions:
            self._homes.popitem(last=False)
