"""The deadline of every acknowledgement: one timer for all that wait, since a timer each would cost more than the entry.

TransferQueue -> append -> [commit_deadline] -> await
"""

import asyncio
from collections import deque

from asyncrl.errors import DeadlineError


class CommitDeadline:
    """Fails what is not acknowledged `limit_s` seconds after it was given to `watch`.

    `failure`: set when that has happened, for good. What comes after it would be acknowledged later still, and whoever gave up
    waiting does not know what is kept: nobody may write on.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._waiting: deque[tuple[float, asyncio.Future[None]]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self.failure: DeadlineError | None = None

    def watch(self, acknowledged: "asyncio.Future[None]") -> None:
        """Acknowledgements come in the order of their entries, so those that are done are at the front."""
        loop = asyncio.get_running_loop()
        self._forget_done()
        self._waiting.append((loop.time() + self._limit_s, acknowledged))
        if self._timer is None:
            self._timer = loop.call_at(self._waiting[0][0], self._look)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _forget_done(self) -> None:
        while self._waiting and self._waiting[0][1].done():
            self._waiting.popleft()

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        self._forget_done()
        if self._waiting and self._waiting[0][0] <= loop.time():
            self._fail()
        self._timer = loop.call_at(self._waiting[0][0], self._look) if self._waiting else None

    def _fail(self) -> None:
        text = f"the journal did not acknowledge within store.commit_timeout_s = {self._limit_s:g} s; is its disk still there?"
        self.failure = DeadlineError(text)
        for _, late in self._waiting:
            if not late.done():
                late.set_exception(DeadlineError(text))
        self._waiting.clear()
