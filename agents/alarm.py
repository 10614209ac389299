"""Alarm: a deadline that looks before it strikes: whether the work goes on, or what was being done when it passed.

Place: SessionContext.generate (the engine's beats), runner (what its sessions are at) -> [alarm] -> DeadlineError.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType

from asyncrl.waiting import Within


class Alarm:
    """An async context manager, entered once. Each `after_s` seconds `look` is called, on the loop: with "" the block goes on, with
    any other text it is cancelled and DeadlineError raised with this text.

    One timer an alarm, as for `asyncio.timeout`. A TimeoutError that the block raises by itself stays what it is.
    """

    __slots__ = ("_after_s", "_deadline", "_look", "_timer", "_told", "_within")

    def __init__(self, after_s: float, look: Callable[[], str]) -> None:
        self._after_s = after_s
        self._look = look
        told: list[str] = []  # not the alarm itself: a cycle at every call of an engine would be work for the garbage collector
        self._told = told
        self._deadline = asyncio.timeout(None)
        self._within = Within(self._deadline, lambda: told[-1])
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        await self._within.__aenter__()
        self._wait()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._timer is not None
        self._timer.cancel()
        await self._within.__aexit__(kind, error, trace)

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._after_s, self._ring)

    def _ring(self) -> None:
        if text := self._look():
            self._told.append(text)
            self._deadline.reschedule(asyncio.get_running_loop().time())
        else:
            self._wait()
