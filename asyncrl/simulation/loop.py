"""VirtualLoop: an asyncio event loop in which time costs nothing and the seed decides every order that asyncio leaves open.

world, edges -> [VirtualLoop] <- the controller, unchanged

Invariants:
1. Time is a number: when nothing is ready it jumps to the next timer. `asyncio.sleep`, `timeout` and `call_later` need no change.
2. The seed orders what becomes ready in the same turn. Callbacks of one owner (a task, or a future) keep their order, as asyncio
   promises; `Order` says how much else is kept.
3. Nothing left to wake up is a DeadlockError that shows every waiting task with its stack.
4. What would leave the loop (a thread, a socket, a real sleep) raises OutsideError that names the caller (`fence.py`).
5. A run is a pure function of its seed: tasks are numbered, so that sets of them iterate in one order in every process.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from enum import StrEnum
from random import Random
from typing import Any, NoReturn, TypeVar

from asyncrl.simulation.errors import DeadlockError, EndlessError, OutsideError
from asyncrl.simulation.stacks import describe_tasks

T = TypeVar("T")

MAX_TURNS = 20_000_000
"""Turns of the loop after which a run is called endless: the largest honest run takes about a tenth."""


class Order(StrEnum):
    """What the seed may change among callbacks that are ready in the same turn."""

    STRICT = "strict"  # nothing: the order in which they became ready, as asyncio itself runs them
    TASKS = "tasks"  # tasks and edge events among each other; the callbacks of one owner keep their order
    ALL = "all"  # everything; asyncio promises more than that


class SimTask(asyncio.Task[T]):
    """A task with a number of its own as its hash: a set of tasks has one order, whatever their addresses."""

    def __init__(
        self, coro: Coroutine[Any, Any, T], *, loop: "VirtualLoop", name: str, number: int, context: Context | None
    ) -> None:
        self.number = number
        super().__init__(coro, loop=loop, name=name, context=context)

    def __hash__(self) -> int:
        return self.number


Wrap = Callable[[Coroutine[Any, Any, Any], str], Coroutine[Any, Any, Any]]
"""(coroutine, name of its task) -> what the task runs in its place: where faults come in."""


class VirtualLoop(asyncio.BaseEventLoop):
    """`start_s`: the time at its beginning. `after_turn` is called after every turn and may raise, which ends the loop at once."""

    def __init__(self, seed: int, *, order: Order = Order.TASKS, start_s: float = 0.0) -> None:
        super().__init__()
        self._now = start_s
        self._random = Random(seed).random
        self._order = order
        self._num_tasks = 0
        self.turns = 0
        self.steps = 0
        """Callbacks run so far: steps of tasks, and events of the edges."""
        self.max_turns = MAX_TURNS
        self.after_turn: Callable[[], None] | None = None
        self.before_step: Callable[[str], None] | None = None
        """Told the name of each task that is about to run."""
        self.begun: list[SimTask[Any]] | None = None
        self.ended: list[SimTask[Any]] | None = None
        """Tasks that were made, and that ended, since somebody emptied the lists; None: nobody asks."""
        self.wrap: Wrap | None = None
        self.failure: BaseException | None = None
        """The first exception that a callback raised: it has nobody to go to, so the run ends with it."""
        self.set_exception_handler(self._note_failure)

    # --- time

    def time(self) -> float:
        return self._now

    # --- tasks

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, T], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[T]:
        self._check_closed()
        self._num_tasks += 1
        name = name or f"task {self._num_tasks}"
        if self.wrap is not None:
            coro = self.wrap(coro, name)
        task = SimTask(coro, loop=self, name=name, number=self._num_tasks, context=context)
        if self.begun is not None:
            self.begun.append(task)
        return task

    # --- turns

    def _run_once(self) -> None:
        """One turn: everything that is ready now, in the seed's order. What becomes ready meanwhile waits for the next turn."""
        ready: deque[asyncio.Handle] = self._ready
        self._forget_cancelled()
        scheduled = self._scheduled
        if not ready and not self._stopping:
            if not scheduled:
                raise DeadlockError(f"nothing is left to wake up at {self._now:.6f} s\n{describe_tasks(self)}")
            self._now = max(self._now, scheduled[0]._when)
        while scheduled and scheduled[0]._when <= self._now:
            handle = heapq.heappop(scheduled)
            handle._scheduled = False
            ready.append(handle)
        self.turns += 1
        if self.turns > self.max_turns:
            raise EndlessError(f"{self.turns} turns of the loop and no end, at {self._now:.6f} s\n{describe_tasks(self)}")
        batch = list(ready)
        ready.clear()
        if len(batch) > 1 and self._order is not Order.STRICT:
            batch = self._shuffled(batch)
        self._run(batch)
        if self.failure is not None:
            raise self.failure
        if self.after_turn is not None:
            self.after_turn()

    def _forget_cancelled(self) -> None:
        """Most timers are deadlines that were met: as asyncio does, sweep them out when they are more than half."""
        scheduled = self._scheduled
        if len(scheduled) > 128 and self._timer_cancelled_count > len(scheduled) // 2:
            kept = [handle for handle in scheduled if not handle._cancelled]
            heapq.heapify(kept)
            self._scheduled, self._timer_cancelled_count = kept, 0
            return
        while scheduled and scheduled[0]._cancelled:
            heapq.heappop(scheduled)._scheduled = False
            self._timer_cancelled_count -= 1

    def _run(self, batch: list[asyncio.Handle]) -> None:
        told, ended = self.before_step, self.ended
        for handle in batch:
            if handle._cancelled:
                continue
            self.steps += 1
            owner = getattr(handle._callback, "__self__", None)
            if not isinstance(owner, SimTask):
                handle._run()
                continue
            if told is not None:
                told(owner.get_name())
            handle._run()
            if ended is not None and owner.done():
                ended.append(owner)

    def _shuffled(self, batch: list[asyncio.Handle]) -> list[asyncio.Handle]:
        draw = self._random
        order = sorted(range(len(batch)), key=[draw() for _ in batch].__getitem__)
        if self._order is Order.ALL:
            return [batch[position] for position in order]
        owners = [_owner(handle) for handle in batch]
        if len(set(owners)) == len(owners):
            return [batch[position] for position in order]
        queues: dict[int, deque[asyncio.Handle]] = {}
        for owner, handle in zip(owners, batch, strict=True):
            queues.setdefault(owner, deque()).append(handle)
        return [queues[owners[position]].popleft() for position in order]

    def _note_failure(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback raised, a task was destroyed while it waited, or an exception was never looked at: none may pass in silence."""
        if self.failure is None:
            self.failure = context.get("exception") or OutsideError(f"the event loop reports: {context['message']}")

    # --- what leaves the loop

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> NoReturn:  # type: ignore[override]
        raise OutsideError(f"run_in_executor({getattr(func, '__qualname__', func)}): blocking work goes through world.offload")

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Context | None = None) -> asyncio.Handle:
        raise OutsideError(f"call_soon_threadsafe({getattr(callback, '__qualname__', callback)}): there is no other thread")

    def _process_events(self, event_list: object) -> None:
        """There is no selector."""

    def _write_to_self(self) -> None:
        """There is no other thread to wake it."""


def _owner(handle: asyncio.Handle) -> int:
    """Of a task's step, the task; of the callback of a future (or of a task's end), that future; else the handle itself."""
    arguments = handle._args
    if arguments and isinstance(arguments[0], asyncio.Future):
        return id(arguments[0])
    task = getattr(handle._callback, "__self__", None)
    return id(task) if isinstance(task, SimTask) else id(handle)
