"""Watch: whether an engine that has requests makes steps. One timer an engine, and none while it has nothing to do.

Life.generate -> [Watch.start, heard, stop] -> Life: slow, at work again, hung

Only the time with requests counts as silence, and it ends with the next step only: an engine that hangs is found though its callers
give up and others come. Steps are seen at a look, a quarter of `slow_after_s` apart, so what is told is up to that much late.
"""

import asyncio
from collections.abc import Callable

LOOKS = 4
"""Looks in `slow_after_s`."""
LOOKS_WHILE_SLOW = 16
"""The same while it is slow: requests may wait for its next step."""
TICK_S = 1e-3
"""A timer may come a tick of the clock before its time."""


class Watch:
    """`beats`: the engine's steps so far. `changed`: told when `is_slow` is another. `hung`: told once; nothing is looked at after
    it. `hung_after_s` may be the smaller of the two: then nothing is ever slow."""

    def __init__(
        self,
        beats: Callable[[], int],
        *,
        slow_after_s: float,
        hung_after_s: float,
        changed: Callable[[], None],
        hung: Callable[[], None],
    ) -> None:
        self.is_slow = False
        self._beats = beats
        self._slow_after_s = slow_after_s
        self._hung_after_s = hung_after_s
        self._changed = changed
        self._hung = hung
        self._heard = beats()
        self._silent_s = 0.0
        self._looked_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """It has requests. Again: nothing new."""
        if self._timer is None:
            self._looked_at = asyncio.get_running_loop().time()
            self._listen()
            self._judge()

    def stop(self) -> None:
        """It has none, or must make no steps. It is not slow, then; how long it was silent is not forgotten."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._listen()
            self._set_slow(False)

    def heard(self) -> None:
        """A sign of life that is no step: an answer, or new weights."""
        self._silent_s = 0.0
        if self._timer is not None:
            self._looked_at = asyncio.get_running_loop().time()
            if self.is_slow:
                self._timer.cancel()
                self._judge()

    def _listen(self) -> None:
        """Add the time since the last look to the silence, unless there were steps."""
        now, beats = asyncio.get_running_loop().time(), self._beats()
        self._silent_s = self._silent_s + now - self._looked_at if beats == self._heard else 0.0
        self._looked_at, self._heard = now, beats

    def _look(self) -> None:
        self._listen()
        self._judge()

    def _judge(self) -> None:
        """Is it slow, is it hung, and when is the next look?"""
        if self._silent_s >= self._hung_after_s - TICK_S:
            self._timer = None
            self._hung()
            return
        is_slow = self._silent_s >= self._slow_after_s - TICK_S
        wait_s = self._slow_after_s / (LOOKS_WHILE_SLOW if is_slow else LOOKS)
        wait_s = min(wait_s, self._hung_after_s - self._silent_s)
        if not is_slow:
            wait_s = min(wait_s, self._slow_after_s - self._silent_s)
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._look)
        self._set_slow(is_slow)

    def _set_slow(self, is_slow: bool) -> None:
        if is_slow != self.is_slow:
            self.is_slow = is_slow
            self._changed()
