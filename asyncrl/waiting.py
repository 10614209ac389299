"""Waiting: a deadline whose error says what took too long, and whether a cancellation was asked for.

Every wait of the controller that can hang stands inside `within`, and every task of it that nobody looks at while it runs inside
`no_stray_cancel`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from asyncrl.errors import DeadlineError, StrayCancelError


@asynccontextmanager
async def within(timeout_s: float | None, late: Callable[[], str]) -> AsyncIterator[None]:
    """Cancel the block after `timeout_s` (None: never) and raise DeadlineError with the words of `late`.

    A TimeoutError that the block raises by itself stays what it is.
    """
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            yield
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise DeadlineError(late()) from error


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
