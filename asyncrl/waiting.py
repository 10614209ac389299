"""Waiting: a deadline whose error says what took too long, and whether a cancellation was asked for.

Every wait of the controller that can hang stands inside `within`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from asyncrl.errors import DeadlineError


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
