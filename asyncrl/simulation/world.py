"""SimWorld: a World in which blocking work takes virtual time.

controller -> [SimWorld.offload] -> the work, run at once in the loop's own thread; its caller waits for as long as it says it takes

Work says so by `spend`. A pool has its number of threads: work beyond it waits. Work that nobody waits for any more still takes its
thread until it ends, as a real thread would. Not covered: work that sees another thread's half-done effects.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from asyncrl.simulation.events import EventLog
from asyncrl.simulation.loop import VirtualLoop
from asyncrl.waiting import within
from asyncrl.world import DEFAULT_POOLS, derive_seed

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")


class SimWorld:
    """`loop`: its clock is the world's. `call_s`: seconds of every piece of blocking work, besides what it spends; `calls_s`: more
    of those, by pool. `at_site`: awaited where the controller may be held up."""

    def __init__(
        self,
        loop: VirtualLoop,
        *,
        run_seed: int,
        log: EventLog,
        call_s: float = 0.0,
        calls_s: Mapping[str, float] | None = None,
        pools: Mapping[str, int] | None = None,
        at_site: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        self._at_site = at_site
        self._loop = self.loop = loop
        self._run_seed = run_seed
        self._log = log
        sizes, more_s = {**DEFAULT_POOLS, **(pools or {})}, calls_s or {}
        self._pools = {name: _Pool(size, call_s + more_s.get(name, 0.0)) for name, size in sizes.items()}
        self._spent = 0.0

    def now(self) -> float:
        return self._loop.time()

    def wall_time(self) -> float:
        return self._loop.time()

    def seed(self, *parts: str | int) -> int:
        return derive_seed(self._run_seed, *parts)

    def uid(self, number: int) -> str:
        return f"{self.seed('uid', number):016x}"

    def abandoned(self, pool: str) -> int:
        return self._pools[pool].abandoned

    async def site(self, name: str) -> None:
        if self._at_site is not None:
            await self._at_site(name)

    def spend(self, seconds: float) -> None:
        """For work that is being offloaded: it takes so much longer."""
        self._spent += seconds

    async def offload(self, function: Callable[..., T], *args: object, pool: str = "files", timeout_s: float | None = None) -> T:
        job = _Job(function, args, self._loop.create_future())
        threads = self._pools[pool]
        threads.queue.append(job)
        self._loop.call_soon(self._start, threads)
        try:
            async with within(timeout_s, lambda: f"{_name_of(function)} in pool {pool!r} took longer than {timeout_s} s"):
                result: T = await job.future
        finally:
            if not job.is_done and job.has_begun:
                job.is_abandoned = True
                threads.abandoned += 1
        return result

    def _start(self, pool: "_Pool") -> None:
        while pool.queue and pool.free:
            job = pool.queue.popleft()
            if job.future.cancelled():
                continue
            pool.free -= 1
            job.has_begun = True
            self._spent = pool.call_s
            job.run()
            if self._spent:
                self._loop.call_later(self._spent, self._end, pool, job)
            else:
                self._loop.call_soon(self._end, pool, job)

    def _end(self, pool: "_Pool", job: "_Job") -> None:
        job.is_done = True
        pool.free += 1
        pool.abandoned -= job.is_abandoned
        if not job.future.done():
            if job.error is not None:
                job.future.set_exception(job.error)
            else:
                job.future.set_result(job.result)
        self._start(pool)


class _Pool:
    """`free`: threads; `call_s`: seconds of each call, besides what it spends."""

    def __init__(self, size: int, call_s: float) -> None:
        self.free = size
        self.call_s = call_s
        self.queue: deque[_Job] = deque()
        self.abandoned = 0


class _Job:
    __slots__ = ("args", "error", "function", "future", "has_begun", "is_abandoned", "is_done", "result")

    def __init__(self, function: Callable[..., Any], args: tuple[object, ...], future: "asyncio.Future[Any]") -> None:
        self.function = function
        self.args = args
        self.future = future
        self.result: Any = None
        self.error: BaseException | None = None
        self.has_begun = self.is_done = self.is_abandoned = False

    def run(self) -> None:
        """Every exception travels to the waiter."""
        try:
            self.result = self.function(*self.args)
        except StopIteration as error:
            # An asyncio future refuses this one class, and its waiter would never wake.
            self.error = RuntimeError(f"{_name_of(self.function)} raised StopIteration")
            self.error.__cause__ = error
        except BaseException as error:  # it is raised where somebody waits for it
            self.error = error


def _name_of(function: Callable[..., object]) -> str:
    return getattr(function, "__qualname__", repr(function))
