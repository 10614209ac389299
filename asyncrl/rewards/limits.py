"""Limits on calls: so many at once, so many that begin in any minute, so many tokens in any minute. First come, first served.

managers, judge -> [Limits.place] -> the call itself

Invariants:
1. At no time do more than `max_concurrent` calls hold a place; in no 60 seconds (from included, to excluded) do more than `max_rpm`
   calls begin, nor calls that count for more than `max_tpm` tokens.
2. Places are given in the order in which they were asked for. Nobody who asks later goes first, however little it wants.
3. Whoever stops waiting (its deadline, a cancellation) takes nothing: a place that it was just given goes to the next in line. A
   call that has begun gives its place back when it ends, however it ends; it stays counted in its minute, as the endpoint has
   counted it.
4. Nothing polls: a place is given when one is asked for or given back, or by one timer, at the time when the minute lets the next
   call begin. Without anybody in line there is no timer.

Time is the running loop's. Nothing is global: each scorer has limits of its own. Why no token bucket, and no library:
docs/decisions/rate_limit.md.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from asyncrl.config import LimitsConfig
from asyncrl.errors import DeadlineError
from asyncrl.waiting import within

WINDOW_S = 60.0
"""A minute, as endpoints count."""


@dataclass(slots=True)
class _Begun:
    """A call that began, and how much it counts for; 0 when it never began after all."""

    at_s: float
    amount: int


class Window:
    """How much began in the last minute, against a limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._begun: deque[_Begun] = deque()
        self._sum = 0

    def earliest(self, now_s: float, amount: int) -> float:
        """The first time, not before now, at which `amount` more may begin. amount: at most the limit."""
        self._forget(now_s)
        over = self._sum + amount - self._limit
        if over <= 0:
            return now_s
        for begun in self._begun:
            over -= begun.amount
            if over <= 0:
                return begun.at_s + WINDOW_S
        raise AssertionError(f"{amount} never fits under a limit of {self._limit}")

    def take(self, now_s: float, amount: int) -> _Begun:
        """`amount` begins now."""
        self._begun.append(begun := _Begun(now_s, amount))
        self._sum += amount
        return begun

    def give_back(self, begun: _Begun) -> None:
        """It did not begin after all."""
        self._sum -= begun.amount
        begun.amount = 0

    def _forget(self, now_s: float) -> None:
        while self._begun and self._begun[0].at_s + WINDOW_S <= now_s:
            self._sum -= self._begun.popleft().amount


Given = tuple[_Begun, ...]


class Limits:
    """The line before the calls of one scorer. `places`: a limit on calls at once besides the configured one; 0: none."""

    def __init__(self, config: LimitsConfig, *, places: int = 0) -> None:
        self._config = config
        self._places = min(filter(None, (config.max_concurrent, places)), default=0)
        limits = ((config.max_rpm, 1), (config.max_tpm, config.estimated_tokens_per_request))
        self._windows = tuple((Window(limit), amount) for limit, amount in limits if limit)
        self._line: dict[asyncio.Future[Given], None] = {}  # ordered, and left from anywhere
        self._timer: asyncio.TimerHandle | None = None
        self._counts = {"running": 0, "queue_timeouts": 0}

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Hold a place for the block. Raises DeadlineError when there is none within `queue_timeout_s`."""
        await self._enter()
        try:
            yield
        finally:
            self._counts["running"] -= 1
            self._admit()

    async def _enter(self) -> None:
        place: asyncio.Future[Given] = asyncio.get_running_loop().create_future()
        self._line[place] = None
        self._admit()
        try:
            async with within(self._config.queue_timeout_s, self._late):
                given = await place
        except BaseException as error:
            self._counts["queue_timeouts"] += isinstance(error, DeadlineError)
            self._leave(place)
            raise
        now_s = asyncio.get_running_loop().time()
        for begun in given:
            begun.at_s = now_s  # a busy loop may have kept it from running since it was given its place

    def _leave(self, place: "asyncio.Future[Given]") -> None:
        """Out of the line; or, when the place came at the same moment, back with it."""
        self._line.pop(place, None)
        if place.done() and not place.cancelled():
            for (window, _), begun in zip(self._windows, place.result(), strict=True):
                window.give_back(begun)
            self._counts["running"] -= 1
        self._admit()

    def _admit(self) -> None:
        """Give places to the first in line as long as the limits allow, and set the timer for the next."""
        now_s = asyncio.get_running_loop().time()
        while self._line and self._has_place and (start_s := self._earliest(now_s)) <= now_s:
            place = next(iter(self._line))
            del self._line[place]
            if not place.done():  # else it was cancelled, and its task has yet to run
                self._counts["running"] += 1
                place.set_result(tuple(window.take(now_s, amount) for window, amount in self._windows))
        self._set_timer(start_s if self._line and self._has_place else None)

    @property
    def _has_place(self) -> bool:
        return not self._places or self._counts["running"] < self._places

    def _earliest(self, now_s: float) -> float:
        return max([now_s, *(window.earliest(now_s, amount) for window, amount in self._windows)])

    def _set_timer(self, when_s: float | None) -> None:
        if self._timer is not None:
            if self._timer.when() == when_s and not self._timer.cancelled():
                return
            self._timer.cancel()
        self._timer = None if when_s is None else asyncio.get_running_loop().call_at(when_s, self._admit)

    def _late(self) -> str:
        keys = ("max_concurrent", "max_rpm", "max_tpm", "queue_timeout_s")
        limits = ", ".join(f"{key} = {getattr(self._config, key):g}" for key in keys if getattr(self._config, key))
        return (
            f"no place for a reward call within reward.limits.queue_timeout_s ({limits}; {len(self._line)} in line, "
            f"{self._counts['running']} running)"
        )

    def stats(self) -> dict[str, float]:
        """Calls in line, calls that hold a place, and calls that gave up waiting."""
        return {"queued": float(len(self._line)), **{name: float(count) for name, count in self._counts.items()}}
