"""Who blocks the event loop: a thread of its own sees that the loop does not come round, and logs the stack of the loop's thread.

    loop ──tick──> [LoopWatch] <──looks── its thread ──> log: the stack, once a block
                        └──> the loop's side, when it runs again: log and an Incident with the length

A block that holds Python's lock stops the watching thread as well; it looks as soon as the lock is free, which is inside the call
that held it, as a rule.
"""

import asyncio
import contextlib
import logging
import sys
import sysconfig
import threading
import time
import traceback
from types import FrameType, TracebackType
from typing import Self

from asyncrl.ports import Incident, IncidentKind, Report

log = logging.getLogger(__name__)

TICKS_A_LIMIT = 4
"""A block is noticed a quarter of the limit too late at most; with the usual second that is 4 timers a second."""
MOST_FRAMES = 40
"""Innermost frames of a stack in the log."""
_OF_PYTHON = sysconfig.get_paths()["stdlib"]
CLOSE_S = 1.0
"""For the thread's last breath: it may be in the middle of writing to the log."""


class LoopWatch:
    """An async context manager; watches the running loop between enter and exit. limit_s: `trainer.max_loop_lag_s`.

    `report` is called on the loop's side, after the block.
    """

    def __init__(self, limit_s: float, report: Report) -> None:
        self._limit_s = limit_s
        self._interval_s = limit_s / TICKS_A_LIMIT
        self._report = report
        self._ticked_s = 0.0
        self._culprit = (0.0, "")
        """Since when it stands, and where."""
        self._is_closing = False
        self._wake = threading.Event()
        self._has_ended = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._thread: threading.Thread | None = None

    # --- the loop's side

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._set(loop)
        self._thread = threading.Thread(target=self._watch, args=(loop, threading.get_ident()), name="loop-watch", daemon=True)
        self._thread.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._timer is not None
        self._timer.cancel()
        self._note_block()
        self._is_closing = True
        self._wake.set()
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._has_ended.wait()
        except TimeoutError:
            log.warning("the thread that watches the event loop did not end: it cannot write to the log")

    def _tick(self) -> None:
        self._note_block()
        self._set(asyncio.get_running_loop())

    def _set(self, loop: asyncio.AbstractEventLoop) -> None:
        self._ticked_s = time.monotonic()
        self._timer = loop.call_later(self._interval_s, self._tick)

    def _note_block(self) -> None:
        """Was this tick too late? Then what blocked is over."""
        left_s = self._left_s(self._ticked_s)
        if left_s > 0:
            return
        since_s, name = self._culprit
        where = f" in {name}" if since_s == self._ticked_s else ""
        text = f"the event loop stood still for {self._limit_s - left_s:.2f} s{where}"
        self._ticked_s = time.monotonic()
        self._wake.set()
        log.warning("%s (trainer.max_loop_lag_s = %g)", text, self._limit_s)
        self._report(Incident(kind=IncidentKind.LAG, what="loop", text=text, limit="trainer.max_loop_lag_s"))

    # --- both

    def _left_s(self, ticked_s: float) -> float:
        """Until the tick after this one is too late."""
        return ticked_s + self._interval_s + self._limit_s - time.monotonic()

    # --- the thread's side

    def _watch(self, loop: asyncio.AbstractEventLoop, thread_id: int) -> None:
        while not self._is_closing:
            ticked_s = self._ticked_s
            left_s = self._left_s(ticked_s)
            if left_s > 0:
                self._wake.wait(left_s)  # is set by the end of a block and by the close
            elif self._log_stack(ticked_s, thread_id):
                self._wake.wait()  # the loop's side sets it: a block is told once
            self._wake.clear()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(self._has_ended.set)

    def _log_stack(self, ticked_s: float, thread_id: int) -> bool:
        """False: the loop runs again already."""
        frame = sys._current_frames().get(thread_id)
        if frame is None or self._ticked_s != ticked_s:
            return False
        name = _name_of(frame)
        self._culprit = (ticked_s, name)
        stack = "".join(traceback.format_stack(frame, limit=MOST_FRAMES))
        late_s = self._limit_s - self._left_s(ticked_s)
        log.warning("the event loop has not run for %.2f s; its thread is in %s:\n%s", late_s, name, stack)
        return True


def _name_of(frame: FrameType) -> str:
    """The innermost function that is not Python's own: who called `time.sleep` or `json.dumps` is to blame for it."""
    culprit: FrameType | None = frame
    while culprit is not None and _is_of_python(culprit.f_code.co_filename):
        culprit = culprit.f_back
    culprit = culprit or frame
    return f"{culprit.f_code.co_qualname} ({culprit.f_code.co_filename}:{culprit.f_lineno})"


def _is_of_python(filename: str) -> bool:
    return filename.startswith(("<frozen", _OF_PYTHON)) and "site-packages" not in filename
