"""What a VirtualLoop hands out: handles that know whose they are, and tasks and futures that are numbered.

loop -> [handles] -> asyncio, the controller

A number is also the hash: a set of tasks or futures iterates in one order in every process, whatever their addresses.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from asyncrl.simulation.loop import VirtualLoop

T = TypeVar("T")


class SimTask(asyncio.Task[T]):
    """`number`: how many tasks of its loop were made up to it."""

    __slots__ = ("number",)

    def __init__(
        self, coro: Coroutine[Any, Any, T], *, loop: "VirtualLoop", name: str, number: int, context: Context | None
    ) -> None:
        self.number = number  # before asyncio puts it into a set
        super().__init__(coro, loop=loop, name=name, context=context)

    def __hash__(self) -> int:
        return self.number


class SimFuture(asyncio.Future[T]):
    """A future that tells its loop when it fails, so that a failure nobody looks at is found without the garbage collector."""

    __slots__ = ("number",)

    number: int

    def __hash__(self) -> int:
        return self.number

    def set_exception(self, exception: type | BaseException, /) -> None:
        super().set_exception(exception)
        loop: Any = self.get_loop()
        loop.note_failed(self)


class SimHandle(asyncio.Handle):
    """A callback of the next turn. `task`: whose step it is, if it is one; `owner`: callbacks of one owner keep their order.

    The owner of a task's step is the task; of what a future calls at its end, that future; of anything else, the task that asked
    for it; outside of tasks it has none.
    """

    __slots__ = ("owner", "task")

    _callback: Callable[..., object]
    _context: Context

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], loop: "VirtualLoop", context: Context | None
    ) -> None:
        # Not the parent's: it asks for debug mode, and takes half the time of a turn.
        self._context = copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = self._source_traceback = None
        bound = getattr(callback, "__self__", None)
        self.task: SimTask[Any] | None = bound if type(bound) is SimTask else None
        self.owner: object = None
        if args and isinstance(args[0], asyncio.Future):
            self.owner = args[0]
        else:
            self.owner = self.task or asyncio.current_task(loop)


class SimTimer(asyncio.TimerHandle):
    """A callback at a time. Among timers of the same time there is no order to keep, as asyncio has it."""

    __slots__ = ("owner", "task")

    _callback: Callable[..., object]
    _context: Context

    def __init__(
        self, when: float, callback: Callable[..., object], args: tuple[Any, ...], loop: "VirtualLoop", context: Context | None
    ) -> None:
        self._context = copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = self._source_traceback = None
        self._when = when
        self._scheduled = True
        self.task: SimTask[Any] | None = None
        self.owner: object = None

    def cancel(self) -> None:
        # Not the parent's, for the same reason.
        if not self._cancelled:
            self._loop._timer_handle_cancelled(self)
            self._cancelled = True
            self._callback = self._args = None  # type: ignore[assignment]  # as asyncio lets go of them
