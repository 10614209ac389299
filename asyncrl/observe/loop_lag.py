"""How late the event loop runs its timers: what blocks the loop delays every session.

A timer that is set for a fixed interval and notes how much later it fires; the newest samples are kept.
"""

import asyncio
from collections import deque
from types import TracebackType
from typing import Self

INTERVAL_S = 0.05
"""20 timers a second cost nothing, and a block of 50 ms or more is always seen."""
MAX_SAMPLES = 2400
"""Two minutes of samples."""


class LoopLag:
    """An async context manager; measures between enter and exit."""

    def __init__(self, *, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._lags_s: deque[float] = deque(maxlen=MAX_SAMPLES)
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def stats(self) -> dict[str, float]:
        """Median, 99th percentile and maximum of the lags since the last call, in seconds; empty when there is no sample yet."""
        lags_s = sorted(self._lags_s)
        self._lags_s.clear()
        if not lags_s:
            return {}
        ranks = {"p50_s": (len(lags_s) - 1) // 2, "p99_s": (len(lags_s) - 1) * 99 // 100, "max_s": -1}
        return {name: lags_s[rank] for name, rank in ranks.items()}

    def _fire(self) -> None:
        loop = asyncio.get_running_loop()
        self._lags_s.append(max(0.0, loop.time() - self._due))
        self._set(loop)

    def _set(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due = loop.time() + self._interval_s
        self._timer = loop.call_at(self._due, self._fire)

    async def __aenter__(self) -> Self:
        self._set(asyncio.get_running_loop())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
