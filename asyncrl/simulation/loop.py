"""VirtualLoop: an asyncio event loop in which time costs nothing and the seed decides every order that asyncio leaves open.

world, edges -> [VirtualLoop] <- the controller, unchanged

Invariants:
1. Time is a number: when nothing is ready it jumps to the next timer. `asyncio.sleep`, `timeout` and `call_later` need no change.
2. The seed orders what becomes ready in the same turn. Callbacks of one owner (`handles.py`) keep their order, as asyncio promises;
   `Order` says how much else is kept.
3. Nothing left to wake up is a DeadlockError that shows every waiting task with its stack.
4. What would leave the loop (a thread, a socket, a real sleep) raises OutsideError that names the caller (`fence.py`), and ends the
   run even when the caller swallows it.
5. A run is a pure function of its seed. Tasks and futures are numbered, so that sets of them iterate in one order in every process.
   Nothing depends on when the garbage collector runs: the loop holds every task that is not done, and every task and future whose
   exception nobody has looked at; the collector itself runs by turns (`garbage.py`).
6. What ends the loop from outside (a crash, a violation, a deadlock) ends it at once: no more code of any task runs, not even what
   stands in a `finally`, and nothing of it stays in memory.
"""

import asyncio
import gc
import heapq
import sys
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Sequence
from contextvars import Context
from enum import StrEnum
from itertools import count
from random import Random
from typing import Any, TypeVar, TypeVarTuple, Unpack

from asyncrl.simulation.errors import DeadlockError, EndlessError, UnseenError
from asyncrl.simulation.fence import FencedLoop, fenced
from asyncrl.simulation.garbage import Suspended, collecting_by_hand, discard, suspended, suspended_in
from asyncrl.simulation.handles import SimFuture, SimHandle, SimTask, SimTimer
from asyncrl.simulation.stacks import describe_tasks

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

MAX_TURNS = 20_000_000
"""Turns of the loop after which a run is called endless: the largest honest run takes about a tenth."""
TURNS_A_COLLECTION = 20_000
"""Turns between two garbage collections. A run of the reference scenario takes a tenth of it."""
TURNS_A_TASK = 50
"""Further turns between two collections for each task that waits: a collection looks at all that is alive, so its share of the
time stays the same however many tasks there are."""
_SWEEP_AT = 100
"""Timers from which on cancelled ones are swept out once they are more than half."""


class Order(StrEnum):
    """What the seed may change among callbacks that are ready in the same turn."""

    STRICT = "strict"  # nothing: the order in which they became ready, as asyncio itself runs them
    TASKS = "tasks"  # tasks and edge events among each other; the callbacks of one owner keep their order
    ALL = "all"  # everything; asyncio promises more than that


Wrap = Callable[[Coroutine[Any, Any, Any], str], Coroutine[Any, Any, Any]]
"""(coroutine, name of its task) -> what the task runs in its place: where faults come in."""

Step = SimHandle | SimTimer


class VirtualLoop(FencedLoop):
    """`start_s`: the time at its beginning. `before_step` and `after_turn` may raise, which ends the loop at once.

    One run each: what ends it early discards it. A process may run many, one after the other.
    """

    _stopping: bool
    _closed: bool

    def __init__(self, seed: int, *, order: Order = Order.TASKS, start_s: float = 0.0) -> None:
        super().__init__()
        self._ready: deque[Step] = deque()
        self._scheduled: list[tuple[float, int, SimTimer]] = []
        self._num_swept = 0
        self._now = start_s
        self._random = Random(seed).random
        self._order = order
        self._timer_numbers = count()
        self._future_numbers = count(1)
        self._num_tasks = 0
        self._waiting: dict[int, SimTask[Any]] = {}
        self._failed: list[asyncio.Future[Any]] = []
        self._left: list[weakref.ref[Suspended]] = []
        self._collect_at = TURNS_A_COLLECTION
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
        """What the run must end with, though it was raised to nobody, or was swallowed; the first that was told by `fail`."""
        self.set_exception_handler(self._note_failure)

    # --- time

    def time(self) -> float:
        return self._now

    # --- tasks and futures

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, T], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[T]:
        if self._closed:
            self._check_open()
        self._num_tasks = number = self._num_tasks + 1
        name = name or f"task {number}"
        if self.wrap is not None:
            coro = self.wrap(coro, name)
        task = SimTask(coro, loop=self, name=name, number=number, context=context)
        self._waiting[number] = task
        if self.begun is not None:
            self.begun.append(task)
        return task

    def create_future(self) -> asyncio.Future[Any]:
        future: SimFuture[Any] = SimFuture(loop=self)
        future.number = next(self._future_numbers)
        return future

    @property
    def tasks_left(self) -> list[SimTask[Any]]:
        """Those that are not done, in the order in which they were made."""
        return [task for task in self._waiting.values() if not task.done()]

    # --- callbacks

    def call_soon(self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None) -> asyncio.Handle:
        if self._closed:
            self._check_open()
        handle = SimHandle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(
        self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        if self._closed:
            self._check_open()
        timer = SimTimer(when, callback, args, self, context)
        heapq.heappush(self._scheduled, (when, next(self._timer_numbers), timer))
        return timer

    def call_later(
        self, delay: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Asked by a timer that is cancelled. Most are deadlines that were met: they are swept out once they are more than half."""
        if not getattr(handle, "_scheduled", False):
            return
        self._num_swept += 1
        if len(self._scheduled) > _SWEEP_AT and self._num_swept > len(self._scheduled) // 2:
            # The one that is being cancelled is not marked yet; it goes with the next sweep, or at its time.
            self._scheduled = [entry for entry in self._scheduled if not entry[2].cancelled()]
            heapq.heapify(self._scheduled)
            self._num_swept = 1

    # --- the end of a run

    def run_until_complete(self, future: Generator[Any, None, T] | Awaitable[T]) -> T:
        """As asyncio's; raises UnseenError as well when it went well but a failure was seen by nobody."""
        result: T = super().run_until_complete(future)
        self._look_for_unseen(is_over=True)
        if self.failure is not None:
            raise self.failure
        return result

    def run_forever(self) -> None:
        # The fence first: it is a generator itself, and not one of this run's.
        with fenced(self.fail), collecting_by_hand():
            try:
                super().run_forever()
            except BaseException:
                self._discard(suspended())
                raise
            if self._waiting:
                self._left = [weakref.ref(thing) for thing in suspended()]

    def abandon(self) -> None:
        """Close the loop. Tasks that are not done are let go where they stand, without another line of their code."""
        left = [thing for reference in self._left if (thing := reference()) is not None]
        self._left.clear()
        self._discard(left)

    def fail(self, error: BaseException) -> None:
        """End the run with this error, at once after the step that is running. The first one counts."""
        if self.failure is None:
            self.failure = error

    def _discard(self, things: list[Suspended]) -> None:
        self.set_exception_handler(lambda loop, context: None)  # asyncio would complain of what is let go
        discard(things)
        for task in self._waiting.values():
            discard(suspended_in(task.get_coro()))  # the outermost may have been made before the run
        self._waiting.clear()
        self._failed.clear()
        self.begun = self.ended = self.wrap = self.before_step = self.after_turn = None
        self._thread_id = None
        self.close()

    def _check_open(self) -> None:
        if self.is_closed():
            raise RuntimeError("the event loop is closed: its run is over")

    # --- turns

    def _run_once(self) -> None:
        """One turn: everything that is ready now, in the seed's order. What becomes ready meanwhile waits for the next turn."""
        ready, scheduled = self._ready, self._scheduled
        if not ready or (scheduled and scheduled[0][0] <= self._now):
            self._wake_timers()
        self.turns += 1
        if self.turns > self.max_turns:
            raise EndlessError(f"{self.turns} turns of the loop and no end, at {self._now:.6f} s\n{self._describe()}")
        if len(ready) == 1:  # most turns
            self._run((ready.popleft(),))
        else:
            batch = list(ready)
            ready.clear()
            self._run(batch if self._order is Order.STRICT else self._shuffled(batch))
        if self.after_turn is not None:
            self.after_turn()
        if self._failed:
            self._look_for_unseen(is_over=False)
        if self.failure is not None:
            raise self.failure
        if self.turns >= self._collect_at:
            gc.collect()
            self._collect_at = self.turns + TURNS_A_COLLECTION + TURNS_A_TASK * len(self._waiting)

    def _wake_timers(self) -> None:
        """Timers whose time has come are ready; when nothing else is, the time of the next has come."""
        scheduled, ready = self._scheduled, self._ready
        while scheduled and scheduled[0][2]._cancelled:
            heapq.heappop(scheduled)
            self._num_swept -= 1
        if not ready and not self._stopping:
            if not scheduled:
                raise DeadlockError(f"nothing is left to wake up at {self._now:.6f} s\n{self._describe()}")
            self._now = max(self._now, scheduled[0][0])
        while scheduled and scheduled[0][0] <= self._now:
            timer = heapq.heappop(scheduled)[2]
            timer._scheduled = False
            if timer._cancelled:
                self._num_swept -= 1
            else:
                ready.append(timer)

    def _run(self, batch: Sequence[Step]) -> None:
        told, ended = self.before_step, self.ended
        for handle in batch:
            if handle._cancelled:
                continue
            self.steps += 1
            task = handle.task
            if task is None:
                handle._context.run(handle._callback, *handle._args)
            else:
                if told is not None:
                    told(task.get_name())
                handle._context.run(handle._callback, *handle._args)
                if task.done():
                    self._note_end(task)
                    if ended is not None:
                        ended.append(task)
            if self.failure is not None:
                raise self.failure

    def _note_end(self, task: SimTask[Any]) -> None:
        self._waiting.pop(task.number, None)
        if task._log_traceback:
            self._failed.append(task)

    def _shuffled(self, batch: list[Step]) -> list[Step]:
        draw = self._random
        order = sorted(range(len(batch)), key=[draw() for _ in batch].__getitem__)
        if self._order is Order.ALL:
            return [batch[position] for position in order]
        # A handle without an owner is its own.
        owners = [id(handle.owner or handle) for handle in batch]
        if len(set(owners)) == len(owners):
            return [batch[position] for position in order]
        queues: dict[int, deque[Step]] = {}
        for owner, handle in zip(owners, batch, strict=True):
            queues.setdefault(owner, deque()).append(handle)
        return [queues[owners[position]].popleft() for position in order]

    # --- failures that have nobody to go to

    def note_failed(self, future: asyncio.Future[Any]) -> None:
        """A future of this loop has an exception now."""
        self._failed.append(future)

    def _look_for_unseen(self, *, is_over: bool) -> None:
        """An exception that nobody looked at, and nobody can: only this list still holds the future, or the run is over.

        By reference count, never by the collector, so that it is found in the same turn of every process. What hangs on itself in
        a cycle is found when the run is over.
        """
        failed = [future for future in self._failed if future._log_traceback]
        self._failed = failed
        for index in range(len(failed)):
            # Held by the list, and by the argument of getrefcount.
            if is_over or sys.getrefcount(failed[index]) == 2:
                self._fail_unseen(failed[index])

    def _fail_unseen(self, future: asyncio.Future[Any]) -> None:
        future._log_traceback = False
        error = future.exception()
        what = f"task {future.get_name()!r}" if isinstance(future, asyncio.Task) else "a future"
        unseen = UnseenError(f"{what} failed, and nobody has looked at it: {error!r}")
        unseen.__cause__ = error
        self.fail(unseen)

    def _note_failure(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """asyncio has something to report that it could only log: none of it may pass in silence."""
        error = UnseenError(f"the event loop reports: {context['message']}")
        error.__cause__ = context.get("exception")
        self.fail(error)

    def _describe(self) -> str:
        failed = [future for future in self._failed if future._log_traceback]
        unseen = "".join(f"\n  nobody has looked at the failure of {future!r}" for future in failed)
        return describe_tasks(self.tasks_left) + unseen

    # --- async generators

    def _asyncgen_firstiter_hook(self, agen: AsyncGenerator[Any, Any]) -> None:
        """Nothing is to be remembered of it: those that wait are found when they are wanted."""

    def _asyncgen_finalizer_hook(self, agen: AsyncGenerator[Any, Any]) -> None:
        """It was let go in the middle: as in asyncio, its end is a task of its own."""
        if not self.is_closed():
            self.call_soon(self.create_task, agen.aclose())

    # --- the parts of a loop that look outside

    def _process_events(self, event_list: object) -> None:
        """There is no selector."""

    def _write_to_self(self) -> None:
        """There is no other thread to wake it."""
