"""Waiters: calls of one engine that all end when it does, whatever each of them waits for."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from asyncrl.errors import EngineError


@dataclass(slots=True, eq=False)
class _Waiter:
    """A call that somebody's task is in."""

    task: "asyncio.Task[object]"
    num_cancels: int
    """Of the task, when the call began."""
    is_failed: bool = False


class Waiters:
    """`failure`: why there is no hope for anybody; None before `fail`."""

    def __init__(self) -> None:
        self.failure: str | None = None
        self._waiters: set[_Waiter] = set()
        self._failed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiters)

    def check(self) -> None:
        """Raises EngineError after `fail`."""
        if self.failure is not None:
            raise EngineError(self.failure)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The block of a call: `fail` cancels it where it stands, and EngineError is raised in place of that. A cancellation by
        the caller stays one."""
        self.check()
        task = asyncio.current_task()
        assert task is not None
        waiter = _Waiter(task, task.cancelling())
        self._waiters.add(waiter)
        try:
            yield
        except asyncio.CancelledError:
            if waiter.is_failed and task.uncancel() <= waiter.num_cancels:
                raise EngineError(self.failure) from None
            raise
        finally:
            self._waiters.discard(waiter)

    async def failed(self, timeout_s: float) -> None:
        """Returns after `fail`, or `timeout_s` later. Not within `waiting`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._failed.wait()

    def fail(self, reason: str) -> None:
        """Everyone who waits gets EngineError, and so does every later call. The first reason stands. Not from within a wait."""
        if self.failure is not None:
            return
        self.failure = reason
        self._failed.set()
        for waiter in self._waiters:
            waiter.is_failed = True
            waiter.task.cancel()
