"""The real World: the loop's clock, counter-based seeds, and threads for what would block the loop.

This is the only module of the controller that may import `time` and `threading` (an import contract keeps it so); the simulator
replaces it. Not covered here: engine threads and reward processes, which belong to `rollout/` and `rewards/`.
"""

import asyncio
import hashlib
import json
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Self, TypeVar

from asyncrl.waiting import within

T = TypeVar("T")

DEFAULT_POOLS: Mapping[str, int] = {"files": 2, "model": 1, "tools": 64, "engines": 8}
"""Threads a pool. asyncio's own pool has cores + 4 threads: 64 sleeping tools would run in eleven waves on two cores."""


def derive_seed(*parts: str | int) -> int:
    """A 63-bit seed from any parts; the same on every machine (Python's `hash` is not). JSON keeps 1, "1" and ("1", "") apart."""
    return int.from_bytes(hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest(), "big") >> 1


class DaemonPool:
    """A thread pool whose threads never keep the process alive: the standard one joins its threads at exit, so one hung tool
    would hang the shutdown. Threads start when needed, up to `size`.

    `_spare` = waiting threads - queued jobs: negative once all threads are busy.
    """

    def __init__(self, name: str, size: int) -> None:
        self._name = name
        self._size = size
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._spare = 0
        self._closed = False

    def submit(self, function: Callable[..., T], *args: object) -> Future[T]:
        """Raises RuntimeError when the pool is closed: no thread would ever run the job."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError(f"thread pool {self._name!r} is closed")
            if self._spare <= 0 and self._threads < self._size:
                threading.Thread(target=self._run, name=f"asyncrl-{self._name}-{self._threads}", daemon=True).start()
                self._threads += 1
            else:
                self._spare -= 1
            self._jobs.put(lambda: _run_into(future, function, args))
        return future

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # else an idle thread would keep the last arguments and result alive
            with self._lock:
                self._spare += 1

    def close(self) -> None:
        """Let the threads end after the jobs already submitted; waits for nobody."""
        with self._lock:
            self._closed = True
            for _ in range(self._threads):
                self._jobs.put(None)


def _run_into(future: Future[T], function: Callable[..., T], args: Sequence[object]) -> None:
    """Run the function and settle its future; every exception travels to the waiter through it."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function(*args))
    except StopIteration as error:
        # An asyncio future refuses this one class, and its waiter would never wake.
        stopped = RuntimeError(f"{_name_of(function)} raised StopIteration")
        stopped.__cause__ = error
        future.set_exception(stopped)
    except BaseException as error:  # it is raised where somebody waits for it
        future.set_exception(error)


def _name_of(function: Callable[..., object]) -> str:
    return getattr(function, "__qualname__", repr(function))


class RealWorld:
    """Time, seeds and threads of one run. An async context manager; leaving it waits for no abandoned thread."""

    def __init__(self, *, run_seed: int = 0, pools: Mapping[str, int] | None = None) -> None:
        self._run_seed = run_seed
        self._pools = {name: DaemonPool(name, size) for name, size in {**DEFAULT_POOLS, **(pools or {})}.items()}
        self._abandoned = dict.fromkeys(self._pools, 0)
        self._lock = threading.Lock()

    def now(self) -> float:
        """The clock of asyncio's loop and of uvloop, whose own `time` counts whole milliseconds."""
        return time.monotonic()

    def wall_time(self) -> float:
        return time.time()

    def seed(self, *parts: str | int) -> int:
        return derive_seed(self._run_seed, *parts)

    def uid(self, number: int) -> str:
        return f"{self.seed('uid', number):016x}"

    def abandoned(self, pool: str) -> int:
        return self._abandoned[pool]

    async def site(self, name: str) -> None:
        """Nothing holds up a real run here."""

    async def offload(self, function: Callable[..., T], *args: object, pool: str = "files", timeout_s: float | None = None) -> T:
        future = self._pools[pool].submit(function, *args)
        try:
            async with within(timeout_s, lambda: f"{_name_of(function)} in pool {pool!r} took longer than {timeout_s} s"):
                result = await asyncio.wrap_future(future)
        finally:
            # wrap_future has asked the future to cancel; a function that already runs cannot be stopped, only counted.
            if not future.done():
                self._count_until_done(future, pool)
        return result

    def _count_until_done(self, future: Future[T], pool: str) -> None:
        with self._lock:
            self._abandoned[pool] += 1

        def uncount(_: Future[T]) -> None:
            with self._lock:
                self._abandoned[pool] -= 1

        future.add_done_callback(uncount)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for pool in self._pools.values():
            pool.close()
