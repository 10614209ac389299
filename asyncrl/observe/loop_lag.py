"""How late the event loop runs its timers, as what blocks the loop delays every session; and what its thread computes.

A timer that is set for a fixed interval and notes how much later it fires; the newest samples are kept.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

INTERVAL_S = 0.05
"""20 timers a second cost nothing, and a block of 50 ms or more is always seen."""
MAX_SAMPLES = 2400
"""Two minutes of samples."""


class LoopLag:
    """An async context manager; measures between enter and exit. thread_s: CPU seconds of the thread that asks, which is the
    loop's."""

    def __init__(self, *, interval_s: float = INTERVAL_S, thread_s: Callable[[], float] = time.thread_time) -> None:
        self._interval_s = interval_s
        self._thread_s = thread_s
        self._since_s = 0.0
        self._lags_s: deque[float] = deque(maxlen=MAX_SAMPLES)
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def stats(self) -> dict[str, float]:
        """Since the last call, in seconds: `cpu_s` of the loop's thread; `p50_s`, `p99_s` and `max_s` of the lags, where there is
        a sample."""
        lags_s = sorted(self._lags_s)
        self._lags_s.clear()
        before_s, self._since_s = self._since_s, self._thread_s()
        used = {"cpu_s": self._since_s - before_s}
        if not lags_s:
            return used
        ranks = {"p50_s": (len(lags_s) - 1) // 2, "p99_s": (len(lags_s) - 1) * 99 // 100, "max_s": -1}
        return {**used, **{name: lags_s[rank] for name, rank in ranks.items()}}

    def _fire(self) -> None:
        loop = asyncio.get_running_loop()
        self._lags_s.append(max(0.0, loop.time() - self._due))
        self._set(loop)

    def _set(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due = loop.time() + self._interval_s
        self._timer = loop.call_at(self._due, self._fire)

    async def __aenter__(self) -> Self:
        self._since_s = self._thread_s()
        self._set(asyncio.get_running_loop())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
