"""Waiting: a deadline whose error says what took too long, whether a cancellation was asked for, and pauses that mean to take time.

Every wait of the controller that can hang stands inside `within`, and every task of it that nobody looks at while it runs inside
`no_stray_cancel`.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from asyncrl.errors import DeadlineError, StrayCancelError


class Within:
    """Made by `within`; entered once."""

    __slots__ = ("_deadline", "_late")

    def __init__(self, deadline: asyncio.Timeout, late: Callable[[], str]) -> None:
        self._deadline = deadline
        self._late = late

    async def __aenter__(self) -> None:
        await self._deadline.__aenter__()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            await self._deadline.__aexit__(kind, error, trace)
        except TimeoutError as timeout:
            raise DeadlineError(self._late()) from timeout
        if isinstance(error, TimeoutError) and self._deadline.expired():
            raise DeadlineError(self._late()) from error


def within(timeout_s: float | None, late: Callable[[], str]) -> Within:
    """Cancel the block after `timeout_s` (None: never) and raise DeadlineError with the words of `late`.

    A TimeoutError that the block raises by itself stays what it is.
    """
    return Within(asyncio.timeout(timeout_s), late)


def is_asked_to_end() -> bool:
    """Has somebody cancelled the running task? If not, a CancelledError in it came from inside: a future, or a raise."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@contextmanager
def no_stray_cancel(who: str) -> Iterator[None]:
    """A cancellation of this block that nobody asked of its task is raised as StrayCancelError: a task group passes over a task
    that ends with it, as if it had done its work. One that was asked for goes on."""
    try:
        yield
    except asyncio.CancelledError as error:
        if is_asked_to_end():
            raise
        raise StrayCancelError(f"{who} was cancelled, and nobody had asked for it") from error


async def back_off(seconds: float) -> None:
    """Let time pass before another try. Never a way to wait for a change: that is an event."""
    await asyncio.sleep(seconds)


async def give_way() -> None:
    """One turn of the loop for everybody else, in work that would hold it too long in one go."""
    await asyncio.sleep(0)
