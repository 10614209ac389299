"""Faults at awaits: where a task is resumed, an exception, a cancellation from inside or a hang comes in place of what it awaits.

VirtualLoop.wrap -> [Probe] -> the task's own coroutine

A task's first resume is its begin, not an await, and is left alone; so is one that brings an exception already. A count runs down
to the next fault, so an undisturbed resume costs a subtraction. Where asyncio waits for a future of its own (a task group for its
tasks, a semaphore for its turn) no exception can come in reality but a cancellation, and none is thrown.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any, Protocol

from asyncrl.errors import DeadlineError, EngineError, FieldError, JournalWriteError, StaleLeaseError, StrayCancelError
from asyncrl.simulation.draws import unit
from asyncrl.simulation.errors import InjectedError
from asyncrl.simulation.faults.kinds import FaultKind, ResumeFault
from asyncrl.simulation.faults.rates import NEVER, distance
from asyncrl.simulation.stacks import waiting_frames

SESSION_TASKS = ("group ", "session ", "guest: ")
"""Names of the tasks that belong to sessions begin so."""
GUESTS = "guest: "
"""Of those, the ones whose every wait has a deadline: only they may hang."""
OUR_OWN = "sim: "
"""Tasks of the simulator."""
GUESTS_ERRORS: tuple[Callable[[str], Exception], ...] = (
    InjectedError,
    *(TimeoutError, ConnectionResetError, MemoryError, OSError, KeyError, AssertionError, StopAsyncIteration),
    *(DeadlineError, StaleLeaseError, FieldError, EngineError, StrayCancelError, JournalWriteError),
    lambda text: ExceptionGroup(text, [InjectedError(text), TimeoutError()]),
)
"""Of guests: other people's code, in which anything may be raised."""
DEAF_SHARE = 0.25
"""Of the guests that hang: no cancellation ends them."""
INJECTED = "injected"
"""Argument of a CancelledError that was thrown in."""
INJECTED_INTO = "injected into"
"""Texts of errors that were thrown in begin so."""

Hit = Callable[[FaultKind, str, list[FrameType]], None]
"""Told of each fault: its kind, the task's name, and the frames of every await that it goes through, outermost first."""


class Coverage(Protocol):
    """Told of what happens at resumes, when somebody asks."""

    def resumed(self, number: int, task: str, frames: Sequence[FrameType]) -> None:
        """The `number`-th resume is that of this task, which waits in these frames."""
        ...

    def failed(self, error: BaseException) -> None:
        """The running task ends with `error`."""
        ...


_ERROR_FREE: frozenset[CodeType] = frozenset(
    function.__code__ for function in (asyncio.TaskGroup.__aexit__, asyncio.Semaphore.acquire, asyncio.Lock.acquire)
)
_HANG_FREE: frozenset[CodeType] = frozenset({asyncio.tasks._wait.__code__})  # type: ignore[attr-defined]
"""`asyncio.wait` has its own deadline, which ends it whatever it waits for."""


class ResumeFaults:
    """`rates`: of each kind, a share of the resumes of sessions' tasks; `at`: in their place, faults at resumes of any task, in
    their order."""

    def __init__(
        self,
        seed: int,
        rates: Mapping[FaultKind, float],
        *,
        at: Sequence[ResumeFault] = (),
        hit: Hit,
        coverage: Coverage | None = None,
    ) -> None:
        self._seed = seed
        self._rates = {kind: rate for kind, rate in rates.items() if rate > 0}
        self._total = sum(self._rates.values())
        self._at = deque(at)
        self._is_searching = bool(at)
        self._hit = hit
        self.coverage = coverage
        self._num_draws = 0
        self.num_resumes = 0
        """Resumes of all tasks so far, begins not counted; only with `at`."""
        self.left = at[0].number if at else self._distance()

    @property
    def is_armed(self) -> bool:
        return self._is_searching or self._total > 0

    def wrap(self, coro: Coroutine[Any, Any, Any], name: str) -> Coroutine[Any, Any, Any]:
        """What a task runs: for `VirtualLoop.wrap`. Whose it is it says when it begins: asyncio names a task after it is made."""
        return Probe(coro, name, self)

    def watches(self, name: str) -> bool:
        """May a task of this name be hit?"""
        return name.startswith(SESSION_TASKS) if not self._is_searching else not name.startswith(OUR_OWN)

    def _draw(self) -> float:
        self._num_draws += 1
        return unit(self._seed, self._num_draws)

    def _distance(self) -> int:
        return distance(self._total, self._draw())

    def due(self, probe: "Probe") -> FaultKind | None:
        """The count has run down: which fault, if any is possible here."""
        kind = self._next()
        frames = list(waiting_frames(probe.inner))
        if kind is FaultKind.AWAIT_HANG and (not probe.__name__.startswith(GUESTS) or frames[-1].f_code in _HANG_FREE):
            return None
        if kind is FaultKind.AWAIT_ERROR and frames[-1].f_code in _ERROR_FREE:
            return None
        self._hit(kind, probe.__name__, frames)
        return kind

    def _next(self) -> FaultKind:
        """The kind of the fault that is due; the count runs down to the one after it."""
        if not self._is_searching:
            self.left = self._distance()
            return self._kind()
        due = self._at.popleft()
        self.left = max(1, self._at[0].number - self.num_resumes) if self._at else NEVER
        return due.kind

    def error_for(self, task: str) -> Exception:
        """What a guest may raise is anybody's choice, and some of it has a meaning elsewhere."""
        text = f"{INJECTED_INTO} task {task!r}"
        if self._is_searching or not task.startswith(GUESTS):
            return InjectedError(text)
        return GUESTS_ERRORS[int(self._draw() * len(GUESTS_ERRORS))](text)

    def hangs_deaf(self) -> bool:
        """Does a guest that hangs hold on to its cancellation, too?"""
        return self._is_searching or self._draw() < DEAF_SHARE

    def _kind(self) -> FaultKind:
        rest = self._draw() * self._total
        for kind, rate in self._rates.items():
            rest -= rate
            if rest < 0:
                return kind
        return next(reversed(self._rates))


def _never() -> "asyncio.Future[None]":
    """What a coroutine yields to wait for something that never comes."""
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    never._asyncio_future_blocking = True
    return never


class Probe(Coroutine[Any, Any, Any]):
    """Runs `inner` until a fault is due. Shows itself to whoever asks where a task waits as `inner` would."""

    __slots__ = ("__name__", "__qualname__", "_faults", "_has_begun", "_is_deaf", "_is_watched", "inner")

    def __init__(self, inner: Coroutine[Any, Any, Any], name: str, faults: ResumeFaults) -> None:
        self.inner = inner
        self._faults = faults
        self._has_begun = self._is_watched = self._is_deaf = False
        self.__name__ = self.__qualname__ = name

    def send(self, value: Any) -> Any:
        if not self._has_begun:
            self._begin()
        elif self._is_watched:
            return self._resume(value)
        return self.inner.send(value)

    def _begin(self) -> None:
        self._has_begun = True
        task = asyncio.current_task()
        if task is not None:
            self.__name__ = self.__qualname__ = task.get_name()
        self._is_watched = self._faults.watches(self.__name__)

    def _resume(self, value: Any) -> Any:
        if self._faults.coverage is not None:
            self._faults.coverage.resumed(self._faults.num_resumes + 1, self.__name__, list(waiting_frames(self.inner)))
            return self._watched(self._resume_or_strike, value)
        return self._resume_or_strike(value)

    def _watched(self, resume: Callable[..., Any], *with_what: Any) -> Any:
        try:
            return resume(*with_what)
        except StopIteration:
            raise
        except BaseException as error:
            assert self._faults.coverage is not None
            self._faults.coverage.failed(error)
            raise

    def _resume_or_strike(self, value: Any) -> Any:
        faults = self._faults
        faults.num_resumes += 1
        faults.left -= 1
        if faults.left:
            return self.inner.send(value)
        match faults.due(self):
            case FaultKind.AWAIT_ERROR:
                return self.inner.throw(faults.error_for(self.__name__))
            case FaultKind.AWAIT_CANCEL:
                return self.inner.throw(asyncio.CancelledError(INJECTED))
            case FaultKind.AWAIT_HANG:
                self._is_deaf = faults.hangs_deaf()
                return _never()
        return self.inner.send(value)

    def throw(self, *error: Any) -> Any:
        self._has_begun = True
        if self._is_deaf:
            return _never()
        if self._faults.coverage is not None:
            return self._watched(self.inner.throw, *error)
        return self.inner.throw(*error)

    def close(self) -> None:
        self.inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self.inner.__await__()

    @property
    def cr_frame(self) -> FrameType | None:
        return getattr(self.inner, "cr_frame", None)

    @property
    def cr_await(self) -> Any:
        return getattr(self.inner, "cr_await", None)

    @property
    def cr_running(self) -> bool:
        return bool(getattr(self.inner, "cr_running", False))

    @property
    def cr_code(self) -> Any:
        return getattr(self.inner, "cr_code", None)
