"""A request to stop: the first signal ends the run at the next border with a checkpoint, the second at once.

cli -> [stopping] -> trainer. A wait that may be cut short stands inside `until(stop)`; everything else is finished first.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager


class StopRequested(Exception):
    """Raised out of `until` when the run was asked to stop. Not an error: the trainer catches it at the border of a step."""


class Stop:
    """Whether the run was asked to stop, and who wants to know at once."""

    def __init__(self) -> None:
        self._requested = False
        self._callbacks: list[Callable[[], object]] = []

    @property
    def is_requested(self) -> bool:
        return self._requested

    def request(self) -> None:
        """The first one counts; another changes nothing."""
        if self._requested:
            return
        self._requested = True
        for callback in list(self._callbacks):
            callback()

    @contextmanager
    def calling(self, callback: Callable[[], object]) -> Iterator[None]:
        """Call `callback` on a request that comes inside this block."""
        self._callbacks.append(callback)
        try:
            yield
        finally:
            self._callbacks.remove(callback)


@asynccontextmanager
async def until(stop: Stop) -> AsyncIterator[None]:
    """Cancel the block when a stop is requested. Raises StopRequested, at once if the request came before."""
    if stop.is_requested:
        raise StopRequested
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(None) as scope:
            with stop.calling(lambda: scope.reschedule(loop.time())):
                yield
    except TimeoutError:
        if scope.expired():
            raise StopRequested from None
        raise


@contextmanager
def on_signals(stop: Stop) -> Iterator[None]:
    """SIGINT and SIGTERM request a stop inside this block; a second one ends the process as if we had never listened."""
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)

    def remove() -> None:
        for number in signals:
            loop.remove_signal_handler(number)

    def first() -> None:
        remove()
        stop.request()

    for number in signals:
        loop.add_signal_handler(number, first)
    try:
        yield
    finally:
        remove()
